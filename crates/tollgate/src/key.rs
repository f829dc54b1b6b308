//! One counter's name: a rule and the values that are counted apart.
//!
//! The text of a key is injective for any bytes: two different (rule, values) never share a counter.
//! Letters, digits, `-`, `.` and `_` stand for themselves, every other byte is `%XX`, and values are
//! joined by `,`. So the marks `,` `!` `*` and `#` never come from a caller:
//!
//! | text | means |
//! |---|---|
//! | `a,b` | the values `a` and `b` |
//! | `!` in place of a value | the label is absent |
//! | `*` | no values at all: one counter for everybody |
//! | `#` and 64 hex digits | the SHA-256 of a text over 128 bytes |
//! | `!…` as a rule | reserved: a counter that belongs to no rule |

use std::{
    fmt::{self, Write},
    sync::{Arc, LazyLock},
};

use sha2::{Digest, Sha256};

/// The longest identity that is stored as it is; a longer one is stored as its SHA-256.
pub const MAX_PLAIN_IDENTITY: usize = 128;
/// The longest key of a check without rules, in bytes.
pub const MAX_KEY: usize = 1024;

/// The rule of a check without rules.
static NO_RULE: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("!key"));

/// The name of one counter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    rule: Arc<str>,
    identity: Box<str>,
    tag: u32,
}

/// Why a key cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key is empty.
    #[error("the key is empty: name who is counted, for example \"user:42\"")]
    Empty,
    /// The key is too long.
    #[error("the key has {0} bytes: use at most {MAX_KEY}, or a hash of it")]
    TooLong(usize),
}

impl Key {
    /// The counter of `rule` (a text from [`encoded_rule`]) for these values of its `per` labels, stored
    /// in the Cluster slot of `co_locate`, or of the values themselves when there is none.
    pub fn of_rule(rule: &Arc<str>, values: &[Option<&[u8]>], co_locate: Option<&[Option<&[u8]>]>) -> Self {
        let identity = identity(values);
        let tag = match co_locate {
            Some(values) => crc32fast::hash(self::identity(values).as_bytes()),
            None => crc32fast::hash(identity.as_bytes()),
        };
        Self { rule: Arc::clone(rule), identity: identity.into(), tag }
    }

    /// The counter of a check without rules.
    ///
    /// # Errors
    /// When `key` is empty or too long.
    pub fn without_rule(key: impl AsRef<[u8]>) -> Result<Self, KeyError> {
        let key = key.as_ref();
        if key.is_empty() {
            return Err(KeyError::Empty);
        }
        if key.len() > MAX_KEY {
            return Err(KeyError::TooLong(key.len()));
        }
        Ok(Self::of_rule(&NO_RULE, &[Some(key)], None))
    }

    /// The rule, as it stands in the stored key.
    pub fn rule(&self) -> &str {
        &self.rule
    }

    pub(crate) fn shared_rule(&self) -> Arc<str> {
        Arc::clone(&self.rule)
    }

    /// The values, as they stand in the stored key.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// What decides the Cluster slot: ours, never a caller's text.
    pub fn tag(&self) -> u32 {
        self.tag
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.rule, self.identity)
    }
}

/// A rule's name as it stands in stored keys.
pub fn encoded_rule(name: &str) -> Arc<str> {
    let mut text = String::with_capacity(name.len());
    push_encoded(&mut text, name.as_bytes());
    text.into()
}

fn identity(values: &[Option<&[u8]>]) -> String {
    if values.is_empty() {
        return "*".to_owned();
    }
    let mut text = String::with_capacity(32);
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            text.push(',');
        }
        match value {
            Some(value) => push_encoded(&mut text, value),
            None => text.push('!'),
        }
    }
    if text.len() > MAX_PLAIN_IDENTITY {
        let digest = Sha256::digest(text.as_bytes());
        text.clear();
        text.push('#');
        for byte in digest {
            push_hex(&mut text, byte);
        }
    }
    text
}

fn push_encoded(text: &mut String, bytes: &[u8]) {
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_') {
            text.push(char::from(byte));
        } else {
            text.push('%');
            push_hex(text, byte);
        }
    }
}

fn push_hex(text: &mut String, byte: u8) {
    write!(text, "{byte:02x}").expect("writing to a string cannot fail");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The inverse of [`identity`] for what is not hashed.
    fn decoded(text: &str) -> Vec<Option<Vec<u8>>> {
        if text == "*" {
            return Vec::new();
        }
        let value = |part: &str| {
            let mut bytes = Vec::new();
            let mut rest = part.as_bytes();
            while let Some((&first, tail)) = rest.split_first() {
                if first == b'%' {
                    bytes.push(u8::from_str_radix(std::str::from_utf8(&tail[..2]).unwrap(), 16).unwrap());
                    rest = &tail[2..];
                } else {
                    bytes.push(first);
                    rest = tail;
                }
            }
            bytes
        };
        text.split(',').map(|part| (part != "!").then(|| value(part))).collect()
    }

    fn encoded(values: &[Option<Vec<u8>>]) -> String {
        identity(&values.iter().map(Option::as_deref).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn what_is_not_hashed_can_be_read_back(
            values in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..8)), 0..5)
        ) {
            let text = encoded(&values);
            prop_assert!(text.len() <= MAX_PLAIN_IDENTITY);
            prop_assert_eq!(decoded(&text), values);
        }
    }

    #[test]
    fn nasty_values_never_share_a_counter() {
        let parts: [&[u8]; 17] = [
            b"", b"a", b"b", b"a,b", b"a_b", b"_", b",", b"!", b"*", b"#", b"%", b"%2c", b"{a}", b"}{",
            b"\0", b"\xff", b":",
        ];
        let mut all: Vec<Vec<Option<&[u8]>>> = vec![vec![]];
        let options: Vec<Option<&[u8]>> = parts.iter().map(|part| Some(*part)).chain([None]).collect();
        for first in &options {
            all.push(vec![*first]);
            for second in &options {
                all.push(vec![*first, *second]);
                all.extend(options.iter().map(|third| vec![*first, *second, *third]));
            }
        }
        let distinct: std::collections::HashSet<String> = all.iter().map(|values| identity(values)).collect();
        assert_eq!(distinct.len(), all.len());
        assert!(all.len() > 6_000);
        assert!(distinct.iter().all(|text| !text.contains(['{', '}', ':'])));
    }

    #[test]
    fn long_values_are_hashed_and_stay_apart() {
        let long = vec![b'x'; 129];
        let longer = vec![b'x'; 130];
        let (one, two) = (identity(&[Some(&long)]), identity(&[Some(&longer)]));
        assert_eq!((one.len(), two.len()), (65, 65));
        assert_ne!(one, two);
        assert_eq!(identity(&[Some(&long[..128])]).len(), 128);
    }

    #[test]
    fn an_empty_or_oversized_key_is_refused_with_a_remedy() {
        assert_eq!(Key::without_rule(""), Err(KeyError::Empty));
        assert_eq!(Key::without_rule([b'a'; MAX_KEY + 1]), Err(KeyError::TooLong(MAX_KEY + 1)));
        assert!(Key::without_rule([b'a'; MAX_KEY]).is_ok());
    }

    #[test]
    fn a_key_without_a_rule_cannot_meet_a_rule_of_any_name() {
        let key = Key::without_rule("a").unwrap();
        for name in ["!key", "key", "%21key"] {
            assert_ne!(key, Key::of_rule(&encoded_rule(name), &[Some(b"a")], None));
        }
    }

    #[test]
    fn tiers_about_one_subject_share_a_tag_and_a_tag_label_overrides_it() {
        let (one, two) = (encoded_rule("one"), encoded_rule("two"));
        let ip: &[Option<&[u8]>] = &[Some(b"203.0.113.9")];
        assert_eq!(Key::of_rule(&one, ip, None).tag(), Key::of_rule(&two, ip, None).tag());
        let tenant: &[Option<&[u8]>] = &[Some(b"acme")];
        assert_eq!(Key::of_rule(&one, ip, Some(tenant)).tag(), Key::of_rule(&two, tenant, None).tag());
    }
}
