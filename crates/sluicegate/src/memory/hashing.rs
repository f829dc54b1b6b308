//! The hash of a counter.

use std::hash::{BuildHasher, Hasher};

use sluicegate_core::Algorithm;

use crate::{hashing::RandomKeyedHash, key::Key};

/// The hash function of one store.
#[derive(Clone)]
pub(super) struct Hashing(RandomKeyedHash);

impl Hashing {
    pub(super) fn new() -> Self {
        Self(RandomKeyedHash::default())
    }

    /// Returns the hash of the counter of a key.
    pub(super) fn of_key(&self, key: &Key, algorithm: Algorithm) -> u64 {
        self.of(key.shared_rule().map(|rule| &**rule), key.identity_bytes(), algorithm)
    }

    /// Returns the hash of the counter of `rule` for `identity`.
    pub(super) fn of(&self, rule: Option<&str>, identity: &[u8], algorithm: Algorithm) -> u64 {
        let mut hasher = self.0.build_hasher();
        hasher.write(identity);
        if let Some(rule) = rule {
            hasher.write(rule.as_bytes());
        }
        hasher.write_u8(algorithm as u8);
        hasher.finish()
    }
}
