//! What is decided: which keys, which algorithm, and a limit that is never reached.

use std::{fmt, time::Duration};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use sluicegate::Limit;

use crate::remote::{bounds::Bound, keys::Keys};

const DAY: Duration = Duration::from_secs(86_400);

/// Number of keys where there are many.
pub const MANY_KEYS: u64 = 100_000;

/// Algorithms that are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    TokenBucket,
    SlidingLog,
}

/// How requests spread over keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spread {
    OneKey,
    ManyKeys,
}

/// What every contestant decides in one run.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    pub algorithm: Algorithm,
    pub spread: Spread,
    pub keys: Keys,
}

impl Workload {
    pub const fn new(algorithm: Algorithm, spread: Spread) -> Self {
        let keys = match spread {
            Spread::OneKey => Keys::Hot,
            Spread::ManyKeys => Keys::Random(MANY_KEYS),
        };
        Self { algorithm, spread, keys }
    }

    /// A limit that no run reaches. Buckets last for the whole matrix, so that most keys exist.
    pub fn bound(&self) -> Bound {
        match (self.algorithm, self.spread) {
            (Algorithm::TokenBucket, Spread::OneKey) => {
                Bound { amount: 1_000_000_000, window: Duration::from_secs(100_000) }
            }
            (Algorithm::TokenBucket, Spread::ManyKeys) => Bound { amount: 10_000, window: 100 * DAY },
            (Algorithm::SlidingLog, Spread::OneKey) => {
                Bound { amount: 1_000_000, window: Duration::from_secs(1) }
            }
            (Algorithm::SlidingLog, Spread::ManyKeys) => {
                Bound { amount: 1_000, window: Duration::from_secs(3_600) }
            }
        }
    }

    pub fn limit(&self) -> Result<Limit> {
        match self.algorithm {
            Algorithm::TokenBucket => self.bound().bucket(),
            Algorithm::SlidingLog => self.bound().log(),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TokenBucket => "token bucket",
            Self::SlidingLog => "sliding log",
        })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OneKey => "one key",
            Self::ManyKeys => "100,000 keys",
        })
    }
}
