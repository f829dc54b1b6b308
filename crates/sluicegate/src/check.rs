//! One operation on one or more counters, as a store receives it.

use std::time::Duration;

use sluicegate_core::{Operation, Terms, Timestamp};
use smallvec::SmallVec;

use crate::key::{HoldId, Key};

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
    lease: Option<LeaseCall>,
    hold: Option<HoldCall>,
    tiers: Tiers,
}

/// The id of a hold and the operation on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HoldCall {
    /// The id of the hold.
    pub id: HoldId,
    /// The operation.
    pub operation: HoldOperation,
}

/// An operation on a hold. Only [`HoldOperation::Hold`] and [`HoldOperation::HoldNew`] are conditional; the operation of the other checks is
/// [`Operation::Charge`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldOperation {
    /// Check, and record the admitted request under the id. The operation of the check is [`Operation::Check`].
    Hold {
        /// The time from now until the hold expires.
        ttl: Duration,
    },
    /// The same for an id that is not trusted: an existing id is a conflict, even if the hold is the same, and a denial never reverts an
    /// existing hold. Sent only once, so that a hold never conflicts with itself.
    HoldNew {
        /// The time from now until the hold expires.
        ttl: Duration,
    },
    /// Replace the estimate of each tier with its cost.
    Settle {
        /// The tiers that keep their estimate, as bits.
        kept: u64,
        /// The most units that are charged beyond the estimate, instead of the bound of the limit.
        max_excess: Option<u64>,
    },
    /// Move the expiry, if that makes it later.
    Renew {
        /// The time from now until the hold expires.
        ttl: Duration,
    },
    /// Revert the hold on this server, because another server denied it at `until`. No effect if the hold was repeated after `until`, or had
    /// expired by then.
    Revert {
        /// The store's time of the denied attempt.
        until: Timestamp,
    },
}

/// What a check does with the leases of its counters, besides its operation. Every tier of such a check has a limit with a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseCall {
    /// A check: if all requests pass, charge up to this many further ones in advance.
    Draw {
        /// The number of further requests.
        requests: u32,
    },
    /// A refund of one counter, with the time of the draw: the lease ends, and its unspent units are refunded. A store that has no record
    /// of the lease changes nothing.
    End {
        /// The units of the lease that were spent since the last call.
        spent: u32,
        /// The units that will not be spent.
        unspent: u32,
    },
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

impl HoldOperation {
    /// Returns when the hold of this operation expires, from now, if it makes one.
    #[cfg(feature = "redis")]
    pub(crate) fn new_ttl(self) -> Option<Duration> {
        match self {
            Self::Hold { ttl } | Self::HoldNew { ttl } => Some(ttl),
            _ => None,
        }
    }

    /// Whether the operation makes a hold whose id must be new.
    pub(crate) fn needs_new_id(self) -> bool {
        matches!(self, Self::HoldNew { .. })
    }

    /// Returns the operation for some tiers of its check.
    pub(crate) fn for_tiers(self, places: &[usize]) -> Self {
        match self {
            Self::Settle { kept, max_excess } => {
                let bit = |(index, place): (usize, &usize)| (kept >> place & 1) << index;
                Self::Settle { kept: places.iter().enumerate().map(bit).sum(), max_excess }
            }
            other => other,
        }
    }
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
        Ok(Self { operation, count: 1, lease: None, hold: None, tiers })
    }

    /// Repeats the check for `count` identical requests; 0 counts as 1. An operation on a hold is for one request.
    pub fn times(mut self, count: u32) -> Self {
        self.count = if self.hold.is_some() { 1 } else { count.max(1) };
        self
    }

    /// Draws or ends a lease as well.
    ///
    /// # Panics
    /// If the limit of a tier has no lease.
    #[must_use]
    pub fn with_lease(mut self, lease: LeaseCall) -> Self {
        assert!(self.is_leasable(), "every tier has a limit with a lease");
        self.lease = Some(lease);
        self
    }

    /// The same check without a lease.
    #[must_use]
    pub fn without_lease(mut self) -> Self {
        self.lease = None;
        self
    }

    /// Makes the check an operation on a hold.
    #[must_use]
    pub fn with_hold(mut self, id: HoldId, operation: HoldOperation) -> Self {
        self.operation = match operation {
            HoldOperation::Hold { .. } | HoldOperation::HoldNew { .. } => Operation::Check,
            _ => Operation::Charge,
        };
        self.count = 1;
        self.hold = Some(HoldCall { id, operation });
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

    /// What the check does with leases.
    pub fn lease(&self) -> Option<LeaseCall> {
        self.lease
    }

    /// The operation on a hold, if it is one.
    #[inline]
    pub fn hold(&self) -> Option<&HoldCall> {
        self.hold.as_ref()
    }

    /// Whether the check is decided together with the holds of its counters: it is an operation on a hold, or expired holds of a counter
    /// must be released first.
    #[inline]
    pub(crate) fn uses_holds(&self) -> bool {
        let is_conditional = matches!(self.operation, Operation::Check | Operation::Peek);
        self.hold.is_some()
            || (is_conditional && self.tiers.iter().any(|tier| tier.terms.limit.releases_expired()))
    }

    /// Whether every limit of the check has a lease, and the check is not an operation on a hold.
    #[inline]
    pub(crate) fn is_leasable(&self) -> bool {
        self.hold.is_none() && self.tiers.iter().all(|tier| tier.terms.limit.lease().is_some())
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
