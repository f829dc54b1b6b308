//! Builds the label policy from `[labels]`.

use std::collections::BTreeMap;

use super::{error::Problem, files::Files, schema::Label, toml_reader::Field};
use crate::{
    label_policy::{
        ADDRESS_LABELS, DEFAULT_IPV6_PREFIX, HashSecret, IPV6_BITS, LabelKind, LabelPolicy, LabelSettings,
    },
    labels::MAX_LABEL_NAME,
};

/// Minimum length of the key that secret labels are hashed with, in bytes.
pub const MIN_HASH_SECRET: usize = 16;

/// Reads the key that secret labels are hashed with.
pub fn hash_secret(
    field: &Field<String>,
    files: &mut Files,
    problems: &mut Vec<Problem>,
) -> Option<HashSecret> {
    let secret = files.secret(field, problems)?;
    if secret.len() < MIN_HASH_SECRET {
        let message = format!(
            "the key in this file has {} bytes: use at least {MIN_HASH_SECRET}, for example the output of `openssl rand -hex 32`",
            secret.len()
        );
        problems.push(Problem::new(&field.location(), message));
    }
    Some(HashSecret::new(secret))
}

/// Builds the policy and collects problems and warnings.
pub fn policy(
    read: Field<BTreeMap<String, Field<Label>>>,
    secret: Option<HashSecret>,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) -> LabelPolicy {
    let mut labels = Vec::new();
    for (name, field) in read.into_value().unwrap_or_default() {
        let location = field.location();
        let Some(read) = field.into_value() else { continue };
        if name.is_empty() || name.len() > MAX_LABEL_NAME {
            let message = format!(
                "label name of {} bytes is out of range: use 1 to {MAX_LABEL_NAME} bytes",
                name.len()
            );
            problems.push(Problem::new(&location, message));
        }
        labels.push(label(&name, &read, problems));
    }
    if secret.is_none() && labels.iter().any(|label| label.secret) {
        let message = "store.hash_secret_file is not set: secret labels are hashed with a random key of this process, so \
                      instances do not share their counters and a restart loses them";
        warnings.push(message.to_owned());
    }
    LabelPolicy::new(labels, secret.unwrap_or_else(HashSecret::of_process))
}

fn label(name: &str, read: &Label, problems: &mut Vec<Problem>) -> LabelSettings {
    let usual = if ADDRESS_LABELS.contains(&name) { LabelKind::Ip } else { LabelKind::Text };
    let kind = read.kind.get().map_or(usual, |word| word.0);
    let mut ipv6_prefix = DEFAULT_IPV6_PREFIX;
    if let Some(length) = read.ipv6_prefix.get() {
        match u8::try_from(*length) {
            Ok(length @ 1..=IPV6_BITS) => ipv6_prefix = length,
            _ => {
                let message =
                    format!("labels.{name}.ipv6_prefix {length} is out of range: use 1 to {IPV6_BITS}");
                problems.push(Problem::new(&read.ipv6_prefix.location(), message));
            }
        }
        if kind != LabelKind::Ip {
            let message =
                format!("labels.{name} is not an address label: add kind = \"ip\", or remove ipv6_prefix");
            problems.push(Problem::new(&read.ipv6_prefix.location(), message));
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
