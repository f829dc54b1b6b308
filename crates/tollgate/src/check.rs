//! The question of one request, as a store sees it.

use smallvec::SmallVec;
use tollgate_core::{Operation, Terms};

use crate::key::Key;

/// The most tiers one check may have.
pub const MAX_TIERS: usize = 64;

/// One operation of `count` identical requests on several counters, all or none.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Check, Cost, Key, Limit, MemoryStore, Operation, Terms, Tier};
///
/// let limit = Limit::fixed_window(10, Duration::from_secs(60))?;
/// let tier = Tier { key: Key::without_rule("user:42")?, terms: Terms::new(limit, Cost::ONE) };
/// let check = Check::new(Operation::Check, vec![tier])?.times(3);
/// let decided = MemoryStore::new().decide_all(&[check]);
/// assert_eq!(decided.answers[0][0].charged, 3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Check {
    operation: Operation,
    count: u32,
    tiers: Tiers,
}

/// The counters of a check: a single one, as most checks have, lies in the check itself.
pub(crate) type Tiers = SmallVec<[Tier; 1]>;

/// One counter of a check and what is asked of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tier {
    /// The counter.
    pub key: Key,
    /// What is asked of it.
    pub terms: Terms,
}

/// Why a check cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// It has no tiers, or more than [`MAX_TIERS`].
    #[error("a check has {0} tiers: use 1 to {MAX_TIERS}")]
    Tiers(usize),
    /// Two tiers are the same counter, so that neither could be decided by itself.
    #[error("two tiers of one check count on the same key {0:?}: charge it once, with the sum of both costs")]
    RepeatedKey(String),
}

impl Check {
    /// A check of one request.
    ///
    /// # Errors
    /// When there are no tiers, too many, or two on the same counter.
    pub fn new(operation: Operation, tiers: Vec<Tier>) -> Result<Self, CheckError> {
        Self::of(operation, tiers.into())
    }

    /// As [`Check::new`].
    pub(crate) fn of(operation: Operation, tiers: Tiers) -> Result<Self, CheckError> {
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

    /// The same check for `count` identical requests at once, at least one.
    pub fn times(mut self, count: u32) -> Self {
        self.count = count.max(1);
        self
    }

    /// What is done.
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// How many identical requests ask.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The counters, in order.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }
}

impl Tier {
    /// The algorithm is part of a counter: another one starts fresh.
    pub(crate) fn same_counter(&self, other: &Self) -> bool {
        self.key == other.key && self.terms.limit.algorithm() == other.terms.limit.algorithm()
    }
}
