//! How a counter is called in Redis: `<prefix>1:{<tag>}:<algorithm>:<rule>:<identity>`.
//!
//! `1` is the version of the stored format. The tag, eight hex digits, is all that decides the Cluster
//! slot, and is never a caller's text: see [`crate::key`] for how rule and identity are encoded.

use std::io::Write;

use tollgate_core::Algorithm;

use crate::key::Key;

/// The prefix of all keys unless another is set.
pub const DEFAULT_PREFIX: &str = "tg";
/// The longest prefix.
pub const MAX_PREFIX: usize = 32;

/// The version of the stored format.
const FORMAT: u32 = 1;

pub(super) fn redis_key(prefix: &str, key: &Key, algorithm: Algorithm) -> Vec<u8> {
    let mut name = Vec::new();
    write_redis_key(&mut name, prefix, key, algorithm);
    name
}

/// Appends the name to `text`.
pub(super) fn write_redis_key(text: &mut Vec<u8>, prefix: &str, key: &Key, algorithm: Algorithm) {
    let (tag, rule, identity) = (key.tag(), key.rule(), key.identity());
    write!(text, "{prefix}{FORMAT}:{{{tag:08x}}}:{algorithm}:{rule}:{identity}")
        .expect("writing to a vector cannot fail");
}

/// The tag of the set of processes that ask this store. No counter has it: theirs are numbers.
pub(super) const INSTANCES: &str = "instances";

/// The set of processes that ask this store.
pub(super) fn instances_key(prefix: &str) -> String {
    format!("{prefix}{FORMAT}:{{{INSTANCES}}}")
}

/// A key that nobody uses, with this tag.
pub(super) fn probe_key(prefix: &str, tag: &str) -> String {
    format!("{prefix}{FORMAT}:{{{tag}}}:probe")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_as_documented() {
        let key = Key::without_rule("user:42").unwrap();
        let text = String::from_utf8(redis_key(DEFAULT_PREFIX, &key, Algorithm::TokenBucket)).unwrap();
        assert_eq!(text, "tg1:{30d13f94}:token-bucket:!key:user%3a42");
    }

    #[test]
    fn a_callers_braces_never_reach_the_key() {
        let key = Key::without_rule("{a}b}{").unwrap();
        let text = String::from_utf8(redis_key("tg", &key, Algorithm::SlidingLog)).unwrap();
        assert_eq!((text.matches('{').count(), text.matches('}').count()), (1, 1));
    }
}
