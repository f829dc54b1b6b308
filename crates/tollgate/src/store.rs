//! What every store promises: it keeps counters, owns the clock, and decides atomically.

use std::{future::Future, time::Duration};

use tokio::time::Instant;
use tollgate_core::{Algorithm, Answer, Timestamp};

use crate::{check::Check, key::Key};

/// Keeps counters and decides over them in one atomic step, on its own clock.
pub trait Store: Send + Sync + 'static {
    /// Decides `checks` in order; each sees what the earlier ones charged. A call that arrives after its
    /// deadline charges nothing.
    fn decide(
        &self,
        checks: &[Check],
        deadline: Option<Deadline>,
    ) -> impl Future<Output = Result<Decided, StoreError>> + Send;

    /// Whether asking costs a round trip, which several checks had better share.
    fn is_remote(&self) -> bool;

    /// Whether its clock runs as real ones do, and is not moved by hand.
    fn keeps_real_time(&self) -> bool {
        true
    }

    /// Whether it would decide now. Changes nothing.
    fn probe(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Makes a process known as one that asks this store, for `lifetime`. How many are known.
    fn announce(
        &self,
        instance: u64,
        lifetime: Duration,
    ) -> impl Future<Output = Result<u32, StoreError>> + Send;

    /// Forgets these counters. How many of them were there.
    fn reset(&self, counters: &[(Key, Algorithm)]) -> impl Future<Output = Result<u64, StoreError>> + Send;
}

/// Until when a call is of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// Until this moment of the store's clock.
    Store(Timestamp),
    /// Until this moment of the process's clock. A store far away goes by its own clock, as soon as it is known what
    /// that shows.
    Process(Instant),
}

/// What a store decided, at one moment of its clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// When.
    pub at: Timestamp,
    /// For each check, the answer of each of its tiers.
    pub answers: Vec<Vec<Answer>>,
}

/// Why a store did not answer, split by what is known about the charge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The call arrived after its deadline, and changed nothing.
    #[error("the call reached the store after its deadline and changed nothing (store time {0:?})")]
    Late(Timestamp),
    /// The store said no, and nothing changed.
    #[error("the store refused the call, nothing changed: {0}")]
    NotRun(String),
    /// There is no answer; whether the call took effect is unknown, and it must not be sent again.
    #[error("the store did not answer, whether the call took effect is unknown: {0}")]
    Ambiguous(String),
    /// The batch is larger than one atomic step may be.
    #[error("a batch of {tiers} tiers is too large: use at most {max}")]
    TooLarge {
        /// Tiers in the batch.
        tiers: usize,
        /// The bound.
        max: usize,
    },
}
