//! The hash of a counter's name: cheap, and keyed at random, because requests choose what is hashed.
//!
//! Not SipHash: it took more time than the rest of a lookup. The keys come from the same source as those of the
//! standard library's hasher, and no hash ever leaves the store.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::LazyLock,
};

use foldhash::{SharedSeed, quality::SeedableRandomState};
use tollgate_core::Algorithm;

use crate::key::Key;

static SHARED_SEED: LazyLock<SharedSeed> = LazyLock::new(|| SharedSeed::from_u64(random()));

/// How one store hashes: no two do it alike.
#[derive(Clone)]
pub(super) struct Hashing(SeedableRandomState);

impl Hashing {
    pub(super) fn new() -> Self {
        Self(SeedableRandomState::with_seed(random(), &SHARED_SEED))
    }

    /// The hash of a key's counter.
    pub(super) fn of_key(&self, key: &Key, algorithm: Algorithm) -> u64 {
        self.of(key.shared_rule().map(|rule| &**rule), key.identity_bytes(), algorithm)
    }

    /// The hash of the counter that `rule` has for `identity`.
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

/// A number that nobody can foresee.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
