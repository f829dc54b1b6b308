//! The names of Redis keys, in the slot of their counter:
//!
//! | name | contents |
//! |---|---|
//! | `<prefix>1:{<tag>}:<algorithm>:<rule>:<identity>` | a counter |
//! | `<prefix>1:{<tag>}:lease:<algorithm>:<rule>:<identity>` | its leases |
//! | `<prefix>1:{<tag>}:holds:<algorithm>:<rule>:<identity>` | the index of its holds; a concurrency counter is its own index |
//! | `<prefix>1:{<tag>}:hold:<algorithm>:<rule>:<identity>:<id>` | the record of one hold |
//!
//! `1` is the version of the stored format. The tag, eight hex digits, alone determines the Cluster slot
//! and never contains text of a caller. [`Key`] describes how rule and identity are encoded.

use std::io::Write;

use sluicegate_core::Algorithm;

use crate::key::{HoldId, Key};

/// The default prefix of all keys.
pub const DEFAULT_PREFIX: &str = "sg";
/// The longest prefix.
pub const MAX_PREFIX: usize = 32;

/// The version of the stored format.
const FORMAT: u32 = 1;

pub(super) fn redis_key(prefix: &str, key: &Key, algorithm: Algorithm) -> Vec<u8> {
    let mut name = Vec::new();
    write_redis_key(&mut name, prefix, key, algorithm);
    name
}

/// Appends the key to `text`.
pub(super) fn write_redis_key(text: &mut Vec<u8>, prefix: &str, key: &Key, algorithm: Algorithm) {
    let (tag, rule, identity) = (key.tag(), key.rule(), key.identity());
    write!(text, "{prefix}{FORMAT}:{{{tag:08x}}}:{algorithm}:{rule}:{identity}")
        .expect("writing to a vector cannot fail");
}

/// Appends the key of a record beside a counter to `text`.
fn write_kind(text: &mut Vec<u8>, prefix: &str, kind: &str, key: &Key, algorithm: Algorithm) {
    let (tag, rule, identity) = (key.tag(), key.rule(), key.identity());
    write!(text, "{prefix}{FORMAT}:{{{tag:08x}}}:{kind}:{algorithm}:{rule}:{identity}")
        .expect("writing to a vector cannot fail");
}

/// Appends the key of a counter's lease record to `text`.
pub(super) fn write_lease_key(text: &mut Vec<u8>, prefix: &str, key: &Key, algorithm: Algorithm) {
    write_kind(text, prefix, LEASE, key, algorithm);
}

/// Appends the key of the index of a counter's holds to `text`. For a concurrency counter, that is the counter.
pub(super) fn write_holds_key(text: &mut Vec<u8>, prefix: &str, key: &Key, algorithm: Algorithm) {
    if algorithm.properties().has_window {
        write_kind(text, prefix, HOLDS, key, algorithm);
    } else {
        write_redis_key(text, prefix, key, algorithm);
    }
}

/// Appends the key of the record of a hold to `text`.
pub(super) fn write_hold_key(text: &mut Vec<u8>, prefix: &str, key: &Key, algorithm: Algorithm, id: &HoldId) {
    write_kind(text, prefix, HOLD, key, algorithm);
    write!(text, ":{id}").expect("writing to a vector cannot fail");
}

/// Returns the keys that belong to a counter, except for records of single holds.
pub(super) fn counter_keys(prefix: &str, key: &Key, algorithm: Algorithm) -> Vec<Vec<u8>> {
    let mut keys = vec![redis_key(prefix, key, algorithm), lease_key(prefix, key, algorithm)];
    if algorithm.properties().has_window {
        keys.push(holds_key(prefix, key, algorithm));
    }
    keys
}

/// Returns the key of the record of a hold, whose counter has this index. Returns `None` if it is not the key of an index.
pub(super) fn hold_key_beside(prefix: &str, index: &[u8], id: &[u8]) -> Option<Vec<u8>> {
    let is_index = match parse(prefix, index)? {
        Name::Holds { .. } => true,
        Name::Counter { algorithm, .. } => !algorithm.properties().has_window,
        _ => false,
    };
    let rest = str::from_utf8(index).ok().filter(|_| is_index)?;
    let (tag, counter) = rest.split_once("}:")?;
    let counter = counter.strip_prefix(HOLDS).and_then(|rest| rest.strip_prefix(':')).unwrap_or(counter);
    let mut name = format!("{tag}}}:{HOLD}:{counter}:").into_bytes();
    name.extend(id);
    Some(name)
}

/// Returns the key of a counter's lease record.
pub(super) fn lease_key(prefix: &str, key: &Key, algorithm: Algorithm) -> Vec<u8> {
    let mut name = Vec::new();
    write_lease_key(&mut name, prefix, key, algorithm);
    name
}

/// Returns the key of the index of a counter's holds.
pub(super) fn holds_key(prefix: &str, key: &Key, algorithm: Algorithm) -> Vec<u8> {
    let mut name = Vec::new();
    write_holds_key(&mut name, prefix, key, algorithm);
    name
}

/// The parts of a key that mark a record beside a counter. No algorithm has such a name.
const LEASE: &str = "lease";
const HOLDS: &str = "holds";
const HOLD: &str = "hold";

/// The tag of the set of processes. No counter has it: their tags are hex numbers.
pub(super) const INSTANCES: &str = "instances";

/// Returns the key of the set of processes that use this store.
pub(super) fn instances_key(prefix: &str) -> String {
    format!("{prefix}{FORMAT}:{{{INSTANCES}}}")
}

/// Returns an unused key with this tag.
pub(super) fn probe_key(prefix: &str, tag: &str) -> String {
    format!("{prefix}{FORMAT}:{{{tag}}}:probe")
}

/// The parsed name of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Name<'a> {
    Counter {
        rule: &'a str,
        algorithm: Algorithm,
    },
    /// The leases of a counter.
    Lease {
        rule: &'a str,
    },
    /// The index of a counter's holds.
    Holds {
        rule: &'a str,
    },
    /// The record of a hold.
    Hold {
        rule: &'a str,
    },
    Instances,
}

/// Returns a pattern that matches all keys of the limiter.
pub(super) fn pattern(prefix: &str) -> String {
    format!("{prefix}{FORMAT}:*")
}

/// Parses the name of a key; `None` if the limiter does not write such keys.
pub(super) fn parse<'a>(prefix: &str, name: &'a [u8]) -> Option<Name<'a>> {
    let rest = str::from_utf8(name).ok()?.strip_prefix(prefix)?.strip_prefix(&format!("{FORMAT}:{{"))?;
    let (tag, rest) = rest.split_once('}')?;
    if tag == INSTANCES && rest.is_empty() {
        return Some(Name::Instances);
    }
    let is_tag = tag.len() == 8 && tag.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let rest = rest.strip_prefix(':').filter(|_| is_tag)?;
    let (first, further) = rest.split_once(':')?;
    let (kind, rest) = match first {
        LEASE | HOLDS | HOLD => (Some(first), further),
        _ => (None, rest),
    };
    let mut parts = rest.split(':');
    let (algorithm, rule, identity) = (parts.next()?, parts.next()?, parts.next()?);
    let algorithm = Algorithm::ALL.into_iter().find(|known| known.name() == algorithm)?;
    let has_id = kind != Some(HOLD) || parts.next().is_some_and(|id| !id.is_empty());
    let is_whole = parts.next().is_none() && has_id && !rule.is_empty() && !identity.is_empty();
    let name = match kind {
        None => Name::Counter { rule, algorithm },
        Some(LEASE) => Name::Lease { rule },
        Some(HOLDS) => Name::Holds { rule },
        Some(_) => Name::Hold { rule },
    };
    is_whole.then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_documented_format() {
        let key = Key::without_rule("user:42").unwrap();
        let text = String::from_utf8(redis_key(DEFAULT_PREFIX, &key, Algorithm::TokenBucket)).unwrap();
        assert_eq!(text, "sg1:{30d13f94}:token-bucket:!key:user%3a42");
    }

    #[test]
    fn exactly_the_written_names_are_parsed() {
        let key = Key::without_rule("user:42").unwrap();
        let name = redis_key("sg", &key, Algorithm::SlidingLog);
        let counter = Name::Counter { rule: "!key", algorithm: Algorithm::SlidingLog };
        assert_eq!(parse("sg", &name), Some(counter));
        let lease = lease_key("sg", &key, Algorithm::SlidingLog);
        assert_eq!(lease, b"sg1:{30d13f94}:lease:sliding-log:!key:user%3a42");
        assert_eq!(parse("sg", &lease), Some(Name::Lease { rule: "!key" }));
        let holds = holds_key("sg", &key, Algorithm::SlidingLog);
        assert_eq!(holds, b"sg1:{30d13f94}:holds:sliding-log:!key:user%3a42");
        assert_eq!(parse("sg", &holds), Some(Name::Holds { rule: "!key" }));
        let counter = redis_key("sg", &key, Algorithm::Concurrency);
        assert_eq!(holds_key("sg", &key, Algorithm::Concurrency), counter);
        let mut hold = Vec::new();
        write_hold_key(&mut hold, "sg", &key, Algorithm::Concurrency, &HoldId::new("a:b").unwrap());
        assert_eq!(hold, b"sg1:{30d13f94}:hold:concurrency:!key:user%3a42:a%3ab");
        assert_eq!(parse("sg", &hold), Some(Name::Hold { rule: "!key" }));
        assert_eq!(hold_key_beside("sg", &counter, b"a%3ab"), Some(hold.clone()));
        let mut windowed = Vec::new();
        write_hold_key(&mut windowed, "sg", &key, Algorithm::SlidingLog, &HoldId::new("a").unwrap());
        assert_eq!(hold_key_beside("sg", &holds, b"a"), Some(windowed));
        for other in [&name, &lease, &hold] {
            assert_eq!(hold_key_beside("sg", other, b"a"), None);
        }
        assert_eq!(parse("sg", instances_key("sg").as_bytes()), Some(Name::Instances));
        for other in [
            "sg1:{instances}:probe",
            "sg1:{30d13f94}:token-bucket:!key",
            "sg1:{30d13f94}:token-bucket:!key:a:b",
            "sg1:{30d13f94}:token-bucket::a",
            "sg1:{30d13f94}:lease:token-bucket:!key",
            "sg1:{30d13f94}:lease:!key:a",
            "sg1:{30d13f94}:holds:token-bucket:!key:a:b",
            "sg1:{30d13f94}:hold:token-bucket:!key:a",
            "sg1:{30d13f94}:hold:token-bucket:!key:a:",
            "sg1:{30D13F94}:token-bucket:!key:a",
            "sg1:{30d13f94}:gcra:!key:a",
            "sg2:{30d13f94}:token-bucket:!key:a",
            "t1:{30d13f94}:token-bucket:!key:a",
            "sg1:session",
        ] {
            assert_eq!(parse("sg", other.as_bytes()), None, "{other}");
        }
        assert_eq!(parse("sg", b"sg1:{30d13f94}:token-bucket:\xff:a"), None);
    }

    #[test]
    fn a_callers_braces_never_reach_the_key() {
        let key = Key::without_rule("{a}b}{").unwrap();
        let text = String::from_utf8(redis_key("sg", &key, Algorithm::SlidingLog)).unwrap();
        assert_eq!((text.matches('{').count(), text.matches('}').count()), (1, 1));
    }
}
