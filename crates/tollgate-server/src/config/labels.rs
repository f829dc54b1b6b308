//! From `[labels]` as written to the policy that all front ends follow.

use std::collections::BTreeMap;

use tollgate::labels::MAX_LABEL_NAME;

use super::{error::Problem, read::Label, reader::Field};
use crate::labels::{DEFAULT_IPV6_PREFIX, HashSecret, IP, Kind, LabelPolicy, LabelSettings};

/// The longest that IPv6 addresses can be kept.
const IPV6_BITS: u8 = 128;

/// The policy; what is wrong is noted.
pub(super) fn policy(
    read: Field<BTreeMap<String, Field<Label>>>,
    secret: Option<HashSecret>,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) -> LabelPolicy {
    let mut labels = Vec::new();
    for (name, field) in read.into_value().unwrap_or_default() {
        let place = field.place();
        let Some(read) = field.into_value() else { continue };
        if name.is_empty() || name.len() > MAX_LABEL_NAME {
            let message = format!("a label's name has 1 to {MAX_LABEL_NAME} bytes, this one {}", name.len());
            problems.push(Problem::new(&place, message));
        }
        labels.push(label(&name, &read, problems));
    }
    if secret.is_none() && labels.iter().any(|label| label.secret) {
        let message = "store.hash_secret_file is not set: secret labels are hashed with a key of this process, so that \
                       instances do not share their counters and a restart forgets them";
        warnings.push(message.to_owned());
    }
    LabelPolicy::new(labels, secret.unwrap_or_else(HashSecret::of_process))
}

fn label(name: &str, read: &Label, problems: &mut Vec<Problem>) -> LabelSettings {
    let usual = if name == IP { Kind::Ip } else { Kind::Text };
    let kind = read.kind.get().map_or(usual, |word| word.0);
    let mut ipv6_prefix = DEFAULT_IPV6_PREFIX;
    if let Some(length) = read.ipv6_prefix.get() {
        match u8::try_from(*length) {
            Ok(length @ 1..=IPV6_BITS) => ipv6_prefix = length,
            _ => {
                let message =
                    format!("labels.{name}.ipv6_prefix {length} is out of range: use 1 to {IPV6_BITS}");
                problems.push(Problem::new(&read.ipv6_prefix.place(), message));
            }
        }
        if kind != Kind::Ip {
            let message =
                format!("labels.{name} is not an address: add kind = \"ip\", or leave ipv6_prefix out");
            problems.push(Problem::new(&read.ipv6_prefix.place(), message));
        }
    }
    LabelSettings {
        kind,
        ipv6_prefix,
        header: read.header.get().map(|header| header.0.clone()),
        secret: read.secret.get().copied().unwrap_or_default(),
        ..LabelSettings::new(name)
    }
}
