//! Local or remote, chosen once when the limiter is built. All differences between the two are in this file.

use std::{slice, sync::Arc, time::Duration};

use sluicegate_core::{Algorithm, Answer, HoldAnswer, Limit, Timestamp, step::Share};
use smallvec::{SmallVec, smallvec};

use crate::{
    check::{Check, Tier},
    decision::Source,
    key::Key,
    memory::{MemoryStore, MemoryUsage},
    remote::{Options, Remote},
    stats::{RemoteCounters, Stats, StoreStats},
    store::{CheckAnswer, CounterSnapshot, Store, StoreError},
};

/// Where checks are decided.
pub(crate) enum Backend {
    /// In this process, synchronously.
    Local(MemoryStore),
    /// By a store on another host, within the deadline.
    Remote(Arc<Remote>),
}

/// The progress of a check without waiting.
pub(crate) enum Step<'a> {
    /// It is decided.
    Decided(CheckShares),
    /// It must be sent to the store.
    Remote(&'a Arc<Remote>),
}

/// The answers of a check's tiers to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckShares {
    /// The store's time of the decision; `None` for a denial from the cache.
    pub(crate) at: Option<Timestamp>,
    pub(crate) source: Source,
    /// Each answer with the position of its tier in the check. A denial from the cache has only the tiers that deny.
    pub(crate) shares: SmallVec<[(usize, Share); 1]>,
    /// The result of a hold operation on each tier; otherwise empty.
    pub(crate) holds: Vec<HoldAnswer>,
}

impl CheckShares {
    /// No tier has an answer yet.
    pub(crate) fn without_answers() -> Self {
        Self { at: None, source: Source::Fallback, shares: SmallVec::new(), holds: Vec::new() }
    }

    /// Returns the results of a hold operation; nothing for other checks.
    pub(crate) fn holds_of(check: &Check, answers: &[Answer]) -> Vec<HoldAnswer> {
        if check.uses_holds() { answers.iter().map(|answer| answer.hold).collect() } else { Vec::new() }
    }
}

impl Backend {
    pub(crate) fn new(store: Store, options: Options) -> Self {
        match store {
            Store::Memory(store) => Self::Local(store),
            Store::Remote(store) => Self::Remote(Arc::new(Remote::new(store, options))),
        }
    }

    pub(crate) fn is_remote(&self) -> bool {
        matches!(self, Self::Remote(_))
    }

    /// Returns how long other processes may repeat a cached denial.
    pub(crate) fn denial_cache(&self) -> Duration {
        match self {
            Self::Local(_) => Duration::ZERO,
            Self::Remote(remote) => remote.denial_cache(),
        }
    }

    /// Decides a check of one request, if that is possible without waiting.
    #[inline]
    pub(crate) fn start(&self, check: &Check) -> Step<'_> {
        match self {
            Self::Local(store) => Step::Decided(decide_locally(store, check)),
            Self::Remote(remote) => {
                remote.decide_here(check).map_or_else(|| Step::Remote(remote), Step::Decided)
            }
        }
    }

    /// Settles, releases or renews a hold.
    pub(crate) async fn adjust_hold(
        &self,
        check: &Check,
        deadline: Option<Duration>,
    ) -> Result<CheckShares, StoreError> {
        match self {
            Self::Local(store) => Ok(decide_locally(store, check)),
            Self::Remote(remote) => remote.adjust_hold(check, deadline).await,
        }
    }

    /// Settles a hold that a failure policy made in this process, and not in the store.
    pub(crate) fn adjust_fallback_hold(&self, check: &Check) {
        if let Self::Remote(remote) = self {
            remote.adjust_fallback_hold(check);
        }
    }

    /// Sends queued settlements if the runtime that did so has stopped.
    pub(crate) fn resume_settlements(&self) {
        if let Self::Remote(remote) = self {
            remote.resume_settlements();
        }
    }

    /// Returns the remaining time of a caller's deadline after `elapsed`; `None` for the memory store, which never
    /// waits.
    pub(crate) fn time_left(&self, deadline: Option<Duration>, elapsed: Duration) -> Option<Duration> {
        match self {
            Self::Local(_) => None,
            Self::Remote(remote) => Some(remote.deadline(deadline).saturating_sub(elapsed)),
        }
    }

    /// Logs a warning if a round trip of this length takes too much of the deadline.
    pub(crate) fn warn_if_slow(&self, round_trip: Duration) {
        if let Self::Remote(remote) = self {
            remote.warn_if_slow(round_trip);
        }
    }

    /// Returns leased units to a remote store.
    pub(crate) async fn return_leases(&self) {
        if let Self::Remote(remote) = self {
            remote.return_leases().await;
        }
    }

    /// Returns leased units to a remote store in the background.
    pub(crate) fn return_leases_later(&self) {
        if let Self::Remote(remote) = self {
            remote.return_leases_later();
        }
    }

    pub(crate) async fn warm_up(&self) -> Result<(), StoreError> {
        match self {
            Self::Local(_) => Ok(()),
            Self::Remote(remote) => remote.warm_up().await,
        }
    }

    /// Deletes a counter and returns whether it existed.
    pub(crate) async fn reset(
        &self,
        counter: &(Key, Algorithm),
        deadline: Option<Duration>,
    ) -> Result<bool, StoreError> {
        match self {
            Self::Local(store) => Ok(store.forget(slice::from_ref(counter)) > 0),
            Self::Remote(remote) => remote.reset(counter, deadline).await,
        }
    }

    pub(crate) async fn inspect(
        &self,
        counters: &[(Key, Limit)],
        deadline: Option<Duration>,
    ) -> Result<Vec<Option<CounterSnapshot>>, StoreError> {
        match self {
            Self::Local(store) => Ok(store.inspect(counters).into_iter().map(Some).collect()),
            Self::Remote(remote) => remote.inspect(counters, deadline).await,
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        match self {
            Self::Local(store) => {
                let whole = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
                let MemoryUsage { counters, bytes, max_bytes, overflow_decisions } = store.usage();
                let store = StoreStats {
                    keys: whole(counters),
                    bytes: whole(bytes),
                    max_bytes: whole(max_bytes),
                    overflow_decisions,
                    ..StoreStats::default()
                };
                Stats { store, ..RemoteCounters::default().snapshot() }
            }
            Self::Remote(remote) => remote.stats(),
        }
    }
}

#[inline]
fn decide_locally(store: &MemoryStore, check: &Check) -> CheckShares {
    if let [Tier { key, terms }] = check.tiers()
        && !check.uses_holds()
    {
        let (answer, at) = store.decide_one(key, terms, check.operation(), 1);
        let shares = smallvec![(0, answer.share(terms, 0, 1))];
        return CheckShares { at: Some(at), source: Source::Memory, shares, holds: Vec::new() };
    }
    let CheckAnswer { at, answers } =
        store.decide_all(slice::from_ref(check)).pop().expect("one check has one answer");
    let holds = CheckShares::holds_of(check, &answers);
    let answers = check.tiers().iter().zip(&answers).enumerate();
    let shares = answers.map(|(position, (tier, answer))| (position, answer.share(&tier.terms, 0, 1)));
    CheckShares { at: Some(at), source: Source::Memory, shares: shares.collect(), holds }
}
