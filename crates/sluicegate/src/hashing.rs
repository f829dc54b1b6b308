//! Fast hashing with random keys, because clients control what is hashed.
//!
//! SipHash took more time than the rest of a lookup. The keys come from the same source as those of the standard library, and hashes never
//! leave the process.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::LazyLock,
};

use foldhash::{SharedSeed, quality::SeedableRandomState};

static SHARED_SEED: LazyLock<SharedSeed> = LazyLock::new(|| SharedSeed::from_u64(random()));

/// The hash function of one table, with its own random key.
#[derive(Clone)]
pub(crate) struct RandomKeyedHash(SeedableRandomState);

impl Default for RandomKeyedHash {
    fn default() -> Self {
        Self(SeedableRandomState::with_seed(random(), &SHARED_SEED))
    }
}

impl BuildHasher for RandomKeyedHash {
    type Hasher = <SeedableRandomState as BuildHasher>::Hasher;

    fn build_hasher(&self) -> Self::Hasher {
        self.0.build_hasher()
    }
}

/// Returns an unpredictable number.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
