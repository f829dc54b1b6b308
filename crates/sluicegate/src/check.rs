//! One operation on one or more counters, as a store receives it.

use sluicegate_core::{Operation, Terms};
use smallvec::SmallVec;

use crate::key::Key;

/// The maximum number of tiers in one check.
pub const MAX_TIERS: usize = 64;

/// One operation of `count` identical requests on one or more counters, all or none.
///
/// ```
/// use std::time::Duration;
/// use sluicegate::{Cost, Limit, MemoryStore, limiter::Operation, store::{Check, Key, Terms, Tier}};
///
/// let limit = Limit::fixed_window(10, Duration::from_secs(60))?;
/// let tier = Tier { key: Key::without_rule("user:42")?, terms: Terms::new(limit, Cost::ONE) };
/// let check = Check::new(Operation::Check, vec![tier])?.times(3);
/// let decided = MemoryStore::new().decide_all(&[check]);
/// assert_eq!(decided[0].answers[0].charged, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Check {
    operation: Operation,
    count: u32,
    tiers: Tiers,
}

/// The tiers of a check. Most checks have one, which is stored inline.
pub(crate) type Tiers = SmallVec<[Tier; 1]>;

/// One counter of a check, with its limit and cost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tier {
    /// The counter.
    pub key: Key,
    /// The limit, the cost and how the limit applies.
    pub terms: Terms,
}

/// Why a check is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The check has no tiers, or more than [`MAX_TIERS`].
    #[error("a check of {0} tiers is out of range: use 1 to {MAX_TIERS}")]
    Tiers(usize),
    /// Two tiers refer to the same counter.
    #[error("two tiers of one check use the same key {0:?}: charge it once, with the sum of both costs")]
    RepeatedKey(String),
}

impl Check {
    /// Creates a check of one request.
    ///
    /// # Errors
    /// When there are no tiers, too many, or two on the same counter.
    pub fn new(operation: Operation, tiers: Vec<Tier>) -> Result<Self, CheckError> {
        Self::from_tiers(operation, tiers.into())
    }

    /// As [`Check::new`].
    pub(crate) fn from_tiers(operation: Operation, tiers: Tiers) -> Result<Self, CheckError> {
        if tiers.is_empty() || tiers.len() > MAX_TIERS {
            return Err(CheckError::Tiers(tiers.len()));
        }
        for (index, tier) in tiers.iter().enumerate() {
            if tiers[..index].iter().any(|other| tier.same_counter(other)) {
                return Err(CheckError::RepeatedKey(tier.key.to_string()));
            }
        }
        Ok(Self { operation, count: 1, tiers })
    }

    /// Repeats the check for `count` identical requests; 0 counts as 1.
    pub fn times(mut self, count: u32) -> Self {
        self.count = count.max(1);
        self
    }

    /// The operation.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// The number of identical requests.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The tiers, in order.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// Returns the keys of all tiers.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.tiers().iter().map(|tier| &tier.key)
    }
}

impl Tier {
    /// Whether both tiers refer to the same counter. A key has a separate counter for each algorithm.
    pub(crate) fn same_counter(&self, other: &Self) -> bool {
        self.key == other.key && self.terms.limit.algorithm() == other.terms.limit.algorithm()
    }
}
