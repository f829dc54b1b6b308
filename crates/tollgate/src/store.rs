//! What every store promises: it keeps counters, owns the clock, and decides atomically.

use std::{future::Future, time::Duration};

use tokio::time::Instant;
use tollgate_core::{Algorithm, Answer, Limit, Operation, Snapshot, Timestamp};

use crate::{
    check::{Check, Tier},
    key::Key,
    stats::StoreStats,
};

/// Keeps counters and decides over them in one atomic step, on its own clock.
///
/// [`MemoryStore`](crate::MemoryStore) and [`RedisStore`](crate::RedisStore) are stores, and what is written for any `Store` works
/// with both:
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Cost, Error, Limit, Limiter, Store};
///
/// async fn may_log_in<S: Store>(limiter: &Limiter<S>, user: &str) -> Result<bool, Error> {
///     let limit = Limit::sliding_log(5, Duration::from_secs(60)).expect("5 a minute is possible");
///     Ok(limiter.check_key(user, &limit, Cost::ONE).await?.is_allowed())
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// # let limiter = Limiter::new(tollgate::MemoryStore::new(), []).unwrap();
/// # assert!(may_log_in(&limiter, "alice").await.unwrap());
/// # });
/// ```
pub trait Store: Send + Sync + 'static {
    /// Decides `checks` in order; each sees what the earlier ones charged (where counters are on several servers, also
    /// what an earlier one had only reserved). A call that arrives after its deadline charges nothing.
    fn decide(
        &self,
        checks: &[Check],
        deadline: Option<Deadline>,
    ) -> impl Future<Output = Result<Decided, StoreError>> + Send;

    /// Decides as [`Store::decide`] does, and says for each check what became of it: on a Cluster, a node that is away
    /// is no reason to lose the answers of others.
    fn decide_each(
        &self,
        checks: &[Check],
        deadline: Option<Deadline>,
    ) -> impl Future<Output = Vec<Result<Answered, StoreError>>> + Send {
        async move { each(self.decide(checks, deadline).await, checks.len()) }
    }

    /// Decides one check of one request at once and tells what each of its tiers says, if the store is in this process.
    /// Where it is not, nothing happens.
    ///
    /// A store in this process works without it too, but slower: each check then goes through [`Store::decide`] as one to a store
    /// far away does, with a deadline, a place in a queue, and a breaker.
    fn decide_here(&self, check: &Check, tell: &mut dyn FnMut(&Answer)) -> Option<Timestamp> {
        let _ = (check, tell);
        None
    }

    /// The same for one request that meets one counter, as most do: nothing is made for it but the answer. Where it is left out,
    /// [`Store::decide_here`] is asked.
    fn decide_one_here(&self, operation: Operation, tier: &Tier) -> Option<(Answer, Timestamp)> {
        let _ = (operation, tier);
        None
    }

    /// Checks counters one after the other, each for a request of its own, and tells what each says, if the store is in this
    /// process. Whether it is, which never changes; where it is not, nothing happens.
    fn check_each_here(&self, tiers: &[Tier], tell: &mut dyn FnMut(&Answer)) -> bool {
        let _ = (tiers, tell);
        false
    }

    /// Whether asking costs a round trip, which several checks had better share.
    fn is_remote(&self) -> bool;

    /// Whether its clock runs as real ones do, and is not moved by hand.
    fn keeps_real_time(&self) -> bool {
        true
    }

    /// Which of its servers decides a check, as far as is known; 0 where there is one. Checks of different lanes do not
    /// wait for each other.
    fn lane(&self, check: &Check) -> u64;

    /// Whether the server of a lane would decide now. Changes nothing.
    fn probe(&self, lane: u64) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Makes a process known as one that asks this store, for `lifetime`. How many are known.
    fn announce(
        &self,
        instance: u64,
        lifetime: Duration,
    ) -> impl Future<Output = Result<u32, StoreError>> + Send;

    /// What it noticed of its servers so far.
    fn stats(&self) -> StoreStats {
        StoreStats::default()
    }

    /// Returns the snapshots of counters, for display; `None` for an invalid stored state. Changes nothing. Optional for a store.
    fn inspect(
        &self,
        counters: &[(Key, Limit)],
    ) -> impl Future<Output = Result<Vec<Option<CounterSnapshot>>, StoreError>> + Send {
        let _ = counters;
        async { Err(StoreError::NotRun("this store has no snapshots".to_owned())) }
    }

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

/// What a store decided about one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    /// When; if its tiers were decided at several times, the last of them.
    pub at: Timestamp,
    /// The answer of each of its tiers.
    pub answers: Vec<Answer>,
}

/// The state of a counter at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSnapshot {
    /// Time on the store's clock.
    pub at: Timestamp,
    /// The units that count.
    pub snapshot: Snapshot,
}

/// What became of all `count` checks of a batch, for each.
pub(crate) fn each(decided: Result<Decided, StoreError>, count: usize) -> Vec<Result<Answered, StoreError>> {
    match decided {
        Ok(Decided { at, answers }) => {
            answers.into_iter().map(|answers| Ok(Answered { at, answers })).collect()
        }
        Err(error) => vec![Err(error); count],
    }
}

/// Why a store did not decide, by what is known about the charge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The call arrived after its deadline, and changed nothing.
    #[error("call reached the store after its deadline, nothing changed (store time {0:?})")]
    Late(Timestamp),
    /// The store rejected the call with an error reply, and nothing changed.
    #[error("store rejected the call, nothing changed: {code} {detail}")]
    Rejected {
        /// Error code of the reply: `OOM`, `LOADING`, …
        code: String,
        /// Error message of the reply.
        detail: String,
    },
    /// The call was not sent, and nothing changed.
    #[error("call not sent, nothing changed: {0}")]
    NotRun(String),
    /// There is no reply. Whether the call took effect is unknown, and it must not be repeated.
    #[error("no reply from the store, it is unknown whether the call took effect: {0}")]
    Ambiguous(String),
    /// The batch is larger than one atomic step may be.
    #[error("batch of {tiers} tiers is too large: use at most {max}")]
    TooLarge {
        /// Tiers in the batch.
        tiers: usize,
        /// The bound.
        max: usize,
    },
}
