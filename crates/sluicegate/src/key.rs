//! The key of a counter: a rule and the values of its `per` labels.
//!
//! The encoding is injective for any bytes: two different (rule, values) never share a counter. Letters, digits, `-`, `.` and `_` are
//! kept, every other byte becomes `%XX`, and values are joined by `,`. The characters `,` `!` `*` and `#` are therefore never part of a
//! caller's text:
//!
//! | text | meaning |
//! |---|---|
//! | `a,b` | the values `a` and `b` |
//! | `!` in place of a value | the label is absent |
//! | `*` | no values: one counter for all requests |
//! | `#` and 64 hex digits | the SHA-256 of a text over 128 bytes |
//! | `!…` as a rule | reserved: a counter without a rule |

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::{Arc, LazyLock},
};

use sha2::{Digest, Sha256};
use sluicegate_core::hold::MAX_HOLD_ID;

use crate::{hashing::random, labels::Labels, rules::MAX_RULE_NAME};

/// The longest identity that is stored unhashed; longer ones are stored as SHA-256.
pub const MAX_PLAIN_IDENTITY: usize = 128;
/// The longest caller-provided key, in bytes.
pub const MAX_KEY: usize = 1024;
/// The longest identity that is stored inline.
const MAX_SHORT: usize = 22;

/// The rule of a check without rules.
const NO_RULE: &str = "!key";

/// The rule of a limit in the request that counts by labels.
static LABELS: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("!labels"));

/// The key of one counter.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Absent for [`NO_RULE`], whose reference count would be shared by all threads.
    rule: Option<Arc<str>>,
    identity: IdentityText,
    /// Hash that determines the Cluster slot, if not that of the identity.
    co_located: Option<u32>,
}

/// An identity; a short one is stored inline.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum IdentityText {
    /// At most [`MAX_SHORT`] bytes; those beyond `len` are zero.
    Short { len: u8, bytes: [u8; MAX_SHORT] },
    /// A longer identity.
    Long(Box<str>),
}

/// Why a key is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key is empty.
    #[error("key is empty: identify the caller, for example \"user:42\"")]
    Empty,
    /// The key is too long.
    #[error("key has {0} bytes: use at most {MAX_KEY}, or a hash of it")]
    TooLong(usize),
}

impl Key {
    /// Returns the key of `rule` (from [`encoded_rule`]) for these values of its `per` labels, in the Cluster slot of `co_locate`, or of the
    /// values themselves without it.
    pub fn of_rule(rule: &Arc<str>, values: &[Option<&[u8]>], co_locate: Option<&[Option<&[u8]>]>) -> Self {
        let co_located = co_locate.map(|values| crc32fast::hash(identity(values).as_bytes()));
        Self { rule: Some(Arc::clone(rule)), identity: identity(values), co_located }
    }

    /// Returns the key of a check without rules.
    ///
    /// # Errors
    /// If `key` is empty or too long.
    #[inline]
    pub fn without_rule(key: impl AsRef<[u8]>) -> Result<Self, KeyError> {
        let key = key.as_ref();
        if key.is_empty() {
            return Err(KeyError::Empty);
        }
        if key.len() > MAX_KEY {
            return Err(KeyError::TooLong(key.len()));
        }
        let identity = short_encoded(key).unwrap_or_else(|| identity(&[Some(key)]));
        Ok(Self { rule: None, identity, co_located: None })
    }

    /// Returns the key of exactly these labels, without a rule.
    pub fn of_labels(labels: &Labels) -> Self {
        let names_and_values = |(name, value)| [Some(str::as_bytes(name)), Some(value)];
        let parts: Vec<_> = labels.iter().flat_map(names_and_values).collect();
        Self { rule: Some(Arc::clone(&LABELS)), identity: identity(&parts), co_located: None }
    }

    /// Returns the rule as in the stored key.
    pub fn rule(&self) -> &str {
        self.rule.as_deref().unwrap_or(NO_RULE)
    }

    /// Returns the rule, unless it is that of a check without rules.
    pub(crate) fn shared_rule(&self) -> Option<&Arc<str>> {
        self.rule.as_ref()
    }

    /// Returns the values as in the stored key.
    pub fn identity(&self) -> &str {
        self.identity.as_str()
    }

    /// Returns the bytes of [`Key::identity`], without UTF-8 validation.
    pub(crate) fn identity_bytes(&self) -> &[u8] {
        self.identity.as_bytes()
    }

    /// Returns the size of its heap allocation, if it has one.
    pub(crate) fn heap_bytes(&self) -> Option<usize> {
        match &self.identity {
            IdentityText::Short { .. } => None,
            IdentityText::Long(text) => Some(text.len()),
        }
    }

    /// Returns the key with these parts as they are stored; `None` if they cannot be those of a key.
    pub(crate) fn from_encoded(rule: &str, identity: &str, co_located: Option<u32>) -> Option<Self> {
        let is_rule = is_encoded(rule, MAX_ENCODED * MAX_RULE_NAME);
        if !is_rule || !is_encoded(identity, MAX_PLAIN_IDENTITY) {
            return None;
        }
        let mut short = [0; MAX_SHORT];
        let identity = match short.get_mut(..identity.len()) {
            Some(start) => {
                start.copy_from_slice(identity.as_bytes());
                IdentityText::short(identity.len(), short)
            }
            None => IdentityText::Long(identity.into()),
        };
        Some(Self { rule: (rule != NO_RULE).then(|| rule.into()), identity, co_located })
    }

    /// Returns the hash that determines the Cluster slot, if it is not that of the identity.
    pub(crate) fn co_located(&self) -> Option<u32> {
        self.co_located
    }

    /// Returns the tag that determines the Cluster slot; never text of a caller.
    pub fn tag(&self) -> u32 {
        self.co_located.unwrap_or_else(|| crc32fast::hash(self.identity_bytes()))
    }
}

/// The id of a hold, encoded like an identity.
#[derive(Clone)]
pub struct HoldId {
    text: Arc<str>,
    /// Whether this process made the id, so that no caller repeats it.
    is_random: bool,
}

impl PartialEq for HoldId {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for HoldId {}

impl Hash for HoldId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.text.hash(state);
    }
}

/// Why the id of a hold is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HoldIdError {
    /// The id is empty.
    #[error("id is empty: use one that is unique to the request, or leave it out")]
    Empty,
    /// The id is too long.
    #[error("id has {0} bytes: use at most {MAX_HOLD_ID}, or a hash of it")]
    TooLong(usize),
}

impl HoldId {
    /// Creates an id from any bytes.
    ///
    /// # Errors
    /// If it is empty or too long.
    pub fn new(id: impl AsRef<[u8]>) -> Result<Self, HoldIdError> {
        let id = id.as_ref();
        match id.len() {
            0 => Err(HoldIdError::Empty),
            len if len > MAX_HOLD_ID => Err(HoldIdError::TooLong(len)),
            _ => Ok(Self::encoded(id)),
        }
    }

    /// Creates an id from any bytes. Long ones are hashed, and empty ones are replaced by a placeholder, because the stores treat an empty id as
    /// no hold.
    pub fn hashed(id: impl AsRef<[u8]>) -> Self {
        let value = Some(id.as_ref()).filter(|id| !id.is_empty());
        Self::of_text(identity(&[value]).as_str())
    }

    /// Creates an id that no other hold has.
    pub fn random() -> Self {
        let text = format!("{:016x}{:016x}", random(), random());
        Self { text: text.into(), is_random: true }
    }

    fn encoded(id: &[u8]) -> Self {
        let mut text = vec![0; MAX_ENCODED * id.len()];
        let len = encode(id, &mut text).expect("the buffer fits every encoded byte");
        Self::of_text(ascii(&text[..len]))
    }

    fn of_text(text: &str) -> Self {
        Self { text: text.into(), is_random: false }
    }

    /// Whether this process made the id, so that no caller repeats it.
    pub(crate) fn is_random(&self) -> bool {
        self.is_random
    }

    /// Returns the id of this encoded text; `None` if it cannot be one.
    pub(crate) fn from_encoded(id: &str) -> Option<Self> {
        is_encoded(id, MAX_ENCODED * MAX_HOLD_ID).then(|| Self::of_text(id))
    }

    /// Returns the id as the caller sent it. Bytes that are not text are replaced.
    pub(crate) fn decoded(&self) -> Arc<str> {
        decoded_rule(&self.text)
    }

    /// Returns the encoded id.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Debug for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

impl fmt::Display for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl IdentityText {
    #[inline]
    fn short(len: usize, bytes: [u8; MAX_SHORT]) -> Self {
        Self::Short { len: u8::try_from(len).expect("a short text is short"), bytes }
    }

    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Short { len, bytes } => &bytes[..usize::from(*len)],
            Self::Long(text) => text.as_bytes(),
        }
    }

    fn as_str(&self) -> &str {
        match self {
            Self::Short { .. } => ascii(self.as_bytes()),
            Self::Long(text) => text,
        }
    }
}

impl fmt::Debug for IdentityText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.rule(), self.identity())
    }
}

/// Returns the name of a rule as in stored keys.
pub fn encoded_rule(name: &str) -> Arc<str> {
    let mut text = vec![0; MAX_ENCODED * name.len()];
    let len = encode(name.as_bytes(), &mut text).expect("the buffer fits every encoded byte");
    ascii(&text[..len]).into()
}

/// Returns the name of a rule from its stored form.
pub(crate) fn decoded_rule(text: &str) -> Arc<str> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let escaped = after.get(..2).filter(|_| first == b'%').and_then(|digits| str::from_utf8(digits).ok());
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into()
}

/// Whether a text has only characters of encoded rules, identities and ids, and at most `max` of them.
fn is_encoded(text: &str, max: usize) -> bool {
    let is_used = |byte: u8| byte.is_ascii_alphanumeric() || b"-._%,!*#".contains(&byte);
    !text.is_empty() && text.len() <= max && text.bytes().all(is_used)
}

fn identity(values: &[Option<&[u8]>]) -> IdentityText {
    let mut short = [0; MAX_SHORT];
    if let Some(len) = join_encoded(values, &mut short) {
        return IdentityText::short(len, short);
    }
    let mut plain = [0; MAX_PLAIN_IDENTITY];
    if let Some(len) = join_encoded(values, &mut plain) {
        return IdentityText::Long(ascii(&plain[..len]).into());
    }
    let value_len = |value: &Option<&[u8]>| MAX_ENCODED * value.map_or(1, <[u8]>::len) + 1;
    let mut long = vec![0; values.iter().map(value_len).sum()];
    let len = join_encoded(values, &mut long).expect("the buffer fits every encoded byte and the commas");
    let mut hashed = [b'#'; 65];
    for (place, byte) in hashed[1..].chunks_exact_mut(2).zip(Sha256::digest(&long[..len])) {
        place.copy_from_slice(&hex(byte));
    }
    IdentityText::Long(ascii(&hashed).into())
}

fn ascii(text: &[u8]) -> &str {
    str::from_utf8(text).expect("keys are ASCII")
}

/// Writes the encoded values, joined by commas, to the start of `text`, and returns the length if they fit.
fn join_encoded(values: &[Option<&[u8]>], text: &mut [u8]) -> Option<usize> {
    if values.is_empty() {
        *text.first_mut()? = b'*';
        return Some(1);
    }
    let mut end = 0;
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            *text.get_mut(end)? = b',';
            end += 1;
        }
        match value {
            Some(value) => end += encode(value, &mut text[end..])?,
            None => {
                *text.get_mut(end)? = b'!';
                end += 1;
            }
        }
    }
    Some(end)
}

/// Number of bytes of an escaped byte.
const MAX_ENCODED: usize = 3;

/// The encoding of each byte, padded with zeros.
const ENCODED: [[u8; MAX_ENCODED + 1]; 256] = {
    let mut encoded = [[0; MAX_ENCODED + 1]; 256];
    let mut byte = 0_u8;
    loop {
        encoded[byte as usize] = if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_') {
            [byte, 0, 0, 0]
        } else {
            let [high, low] = hex(byte);
            [b'%', high, low, 0]
        };
        if byte == u8::MAX {
            break encoded;
        }
        byte += 1;
    }
};

/// Returns the length of an encoded byte.
fn encoded_len(encoded: [u8; MAX_ENCODED + 1]) -> usize {
    if encoded[1] == 0 { 1 } else { MAX_ENCODED }
}

/// Writes the encoded bytes to the start of `text`, and returns the length if they fit.
fn encode(bytes: &[u8], text: &mut [u8]) -> Option<usize> {
    let mut end = 0;
    for &byte in bytes {
        let encoded = ENCODED[usize::from(byte)];
        let len = encoded_len(encoded);
        text.get_mut(end..end + len)?.copy_from_slice(&encoded[..len]);
        end += len;
    }
    Some(end)
}

/// Returns the encoded bytes if they fit inline. Every byte is written as four bytes, of which the next one overwrites the unused part.
#[inline]
fn short_encoded(bytes: &[u8]) -> Option<IdentityText> {
    let mut text = [0; MAX_SHORT + MAX_ENCODED];
    let mut end = 0;
    for &byte in bytes {
        let encoded = ENCODED[usize::from(byte)];
        text.get_mut(end..end + encoded.len())?.copy_from_slice(&encoded);
        end += encoded_len(encoded);
    }
    let short = text.first_chunk().filter(|_| end <= MAX_SHORT)?;
    Some(IdentityText::short(end, *short))
}

const fn hex(byte: u8) -> [u8; 2] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    [DIGITS[(byte >> 4) as usize], DIGITS[(byte & 15) as usize]]
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

    fn text_of(values: &[Option<&[u8]>]) -> String {
        identity(values).as_str().to_owned()
    }

    fn encoded(values: &[Option<Vec<u8>>]) -> String {
        text_of(&values.iter().map(Option::as_deref).collect::<Vec<_>>())
    }

    proptest! {
        #[test]
        fn unhashed_identities_can_be_decoded(
            values in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..8)), 0..5)
        ) {
            let text = encoded(&values);
            prop_assert!(text.len() <= MAX_PLAIN_IDENTITY);
            prop_assert_eq!(decoded(&text), values);
        }

        /// Around the longest inline length.
        #[test]
        fn a_key_without_a_rule_is_one_value(key in prop::collection::vec(any::<u8>(), 1..30), plain in "[a-z.:]{15,26}") {
            for key in [&key[..], plain.as_bytes()] {
                prop_assert_eq!(Key::without_rule(key).unwrap().identity, identity(&[Some(key)]));
            }
        }
    }

    #[test]
    fn special_characters_never_collide() {
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
        let distinct: std::collections::HashSet<String> = all.iter().map(|values| text_of(values)).collect();
        assert_eq!(distinct.len(), all.len());
        assert!(all.len() > 6_000);
        assert!(distinct.iter().all(|text| !text.contains(['{', '}', ':'])));
    }

    #[test]
    fn long_values_are_hashed_and_stay_distinct() {
        let long = vec![b'x'; 129];
        let longer = vec![b'x'; 130];
        let (one, two) = (text_of(&[Some(&long)]), text_of(&[Some(&longer)]));
        assert_eq!((one.len(), two.len()), (65, 65));
        assert_ne!(one, two);
        assert_eq!(text_of(&[Some(&long[..128])]).len(), 128);
        assert_eq!(
            text_of(&[Some(&[b'a'; 129])]),
            "#c12cb024a2e5551cca0e08fce8f1c5e314555cc3fef6329ee994a3db752166ae"
        );
    }

    #[test]
    fn an_empty_or_oversized_key_is_rejected() {
        assert_eq!(Key::without_rule(""), Err(KeyError::Empty));
        assert_eq!(Key::without_rule([b'a'; MAX_KEY + 1]), Err(KeyError::TooLong(MAX_KEY + 1)));
        assert!(Key::without_rule([b'a'; MAX_KEY]).is_ok());
    }

    #[test]
    fn a_key_without_a_rule_never_equals_one_of_a_rule() {
        let key = Key::without_rule("a").unwrap();
        for name in ["!key", "key", "%21key"] {
            assert_ne!(key, Key::of_rule(&encoded_rule(name), &[Some(b"a")], None));
        }
    }

    #[test]
    fn labels_that_differ_never_share_a_counter() {
        let keys =
            [&[("a", "b")][..], &[("a", "b"), ("c", "d")], &[("a", "b,c"), ("d", "")], &[("a,b", "")], &[]]
                .map(|labels| Key::of_labels(&Labels::new(labels.iter().copied()).unwrap()));
        let distinct: std::collections::HashSet<_> = keys.iter().map(ToString::to_string).collect();
        assert_eq!(distinct.len(), keys.len());
        assert_ne!(keys[0], Key::of_rule(&encoded_rule("!labels"), &[Some(b"a"), Some(b"b")], None));
    }

    #[test]
    fn tiers_with_equal_values_share_a_tag_and_a_tag_label_overrides_it() {
        let (one, two) = (encoded_rule("one"), encoded_rule("two"));
        let ip: &[Option<&[u8]>] = &[Some(b"203.0.113.9")];
        assert_eq!(Key::of_rule(&one, ip, None).tag(), Key::of_rule(&two, ip, None).tag());
        let tenant: &[Option<&[u8]>] = &[Some(b"acme")];
        assert_eq!(Key::of_rule(&one, ip, Some(tenant)).tag(), Key::of_rule(&two, tenant, None).tag());
    }
}
