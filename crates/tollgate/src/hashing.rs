//! Hashing that is cheap, and keyed at random, because requests choose what is hashed.
//!
//! Not SipHash: it took more time than the rest of a lookup. The keys come from the same source as those of the
//! standard library's hasher, and no hash ever leaves the process.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    sync::LazyLock,
};

use foldhash::{SharedSeed, quality::SeedableRandomState};

static SHARED_SEED: LazyLock<SharedSeed> = LazyLock::new(|| SharedSeed::from_u64(random()));

/// How one table hashes: no two do it alike.
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

/// A number that nobody can foresee.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
