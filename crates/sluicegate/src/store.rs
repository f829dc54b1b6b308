//! Where counters live: the memory store of this process, or a remote store.
//!
//! [`RemoteStore`] is the interface of a store on another host. The limiter handles the deadline, batching, circuit breaker, denial
//! cache and failure policies; an implementation only sends calls.

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use sluicegate_core::{Algorithm, Limit, Timestamp};
use tokio::time::Instant;

use crate::{memory::MemoryStore, stats::StoreStats};

pub use sluicegate_core::{
    Answer, HoldAnswer, HoldOutcome, Snapshot, Terms,
    hold::LiveHolds,
    step::{Admission, Share},
};

pub use crate::{
    check::{Check, CheckError, HoldCall, HoldOperation, LeaseCall, MAX_TIERS, Tier},
    key::{HoldId, HoldIdError, Key, KeyError, MAX_KEY, MAX_PLAIN_IDENTITY, encoded_rule},
};

/// A boxed future, which keeps [`RemoteStore`] object safe.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The store of a [`Limiter`](crate::Limiter), chosen when the limiter is built.
///
/// Every store converts into it, so that `Limiter::new` takes a [`MemoryStore`], a `RedisStore` or any other
/// [`RemoteStore`].
pub enum Store {
    /// Counters in this process.
    Memory(MemoryStore),
    /// Counters on another host.
    Remote(Arc<dyn RemoteStore>),
}

impl From<MemoryStore> for Store {
    fn from(store: MemoryStore) -> Self {
        Self::Memory(store)
    }
}

impl<R: RemoteStore> From<R> for Store {
    fn from(store: R) -> Self {
        Self::Remote(Arc::new(store))
    }
}

impl<R: RemoteStore> From<Arc<R>> for Store {
    fn from(store: Arc<R>) -> Self {
        Self::Remote(store)
    }
}

impl From<Arc<dyn RemoteStore>> for Store {
    fn from(store: Arc<dyn RemoteStore>) -> Self {
        Self::Remote(store)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(store) => store.fmt(f),
            Self::Remote(_) => f.write_str("RemoteStore"),
        }
    }
}

/// A store on another host. It keeps counters, owns their clock and decides each check in one atomic step.
///
/// The futures are boxed: one allocation per call to the store, which serves many callers.
pub trait RemoteStore: Send + Sync + 'static {
    /// Decides `checks` in order and returns the outcome of each. A check includes the charges of earlier ones and, if
    /// counters are on several servers, their reservations. A call that arrives after its deadline charges nothing.
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        deadline: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>>;

    /// Returns the number of the server that has a counter, or 0 if there is one server or the number is unknown. A server that is
    /// down affects only checks, resets and inspections of its counters.
    fn server(&self, key: &Key) -> u64 {
        let _ = key;
        0
    }

    /// Returns the address of the server with this number, for log lines; `None` if it is unknown.
    fn server_name(&self, server: u64) -> Option<String> {
        let _ = server;
        None
    }

    /// Returns why there is no connection to a server; `None` if there is one, or the reason is unknown. This explains a probe that
    /// waits for a connection.
    fn connect_error(&self, server: u64) -> Option<String> {
        let _ = server;
        None
    }

    /// Checks that a server is able to decide. Changes nothing. May wait for a connection: the limiter limits the time.
    fn probe(&self, server: u64) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Registers a process as a user of this store for `lifetime` and returns how many processes are registered.
    fn announce(&self, instance: u64, lifetime: Duration) -> BoxFuture<'_, Result<u32, StoreError>>;

    /// Deletes these counters and returns how many of them existed.
    fn reset<'a>(&'a self, counters: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>>;

    /// Connects ahead of the first decision.
    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    /// Returns the state of these counters for display, each read at a slightly different time; `None` for a counter
    /// whose state is corrupt.
    fn inspect<'a>(
        &'a self,
        counters: &'a [(Key, Limit)],
    ) -> BoxFuture<'a, Result<Vec<Option<CounterSnapshot>>, StoreError>> {
        let _ = counters;
        Box::pin(async { Err(StoreError::NotRun("this store does not support inspect".to_owned())) })
    }

    /// Returns the statistics of the store and its servers.
    fn stats(&self) -> StoreStats {
        StoreStats::default()
    }

    /// Whether a denial may be due to a reservation: units that another check over several servers has charged, and that are refunded
    /// if a later server denies.
    fn has_reservations(&self) -> bool {
        false
    }

    /// Whether the store can draw and end leases ([`LeaseCall`]).
    fn has_leases(&self) -> bool {
        false
    }

    /// Whether the store uses a real clock, as opposed to a [`ManualClock`](crate::ManualClock). Denials are cached only on a real clock.
    fn has_real_clock(&self) -> bool {
        true
    }
}

/// The time after which the result of a call is no longer needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deadline {
    /// A time of the store's clock.
    Store(Timestamp),
    /// A time of this process's clock. A remote store converts it to its own clock once the offset is measured.
    Process(Instant),
}

/// The outcome of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckAnswer {
    /// The time of the decision; if the tiers were decided at several times, the latest.
    pub at: Timestamp,
    /// The answer of each tier. If the check draws a lease, the requests beyond its count that passed are leased.
    pub answers: Vec<Answer>,
}

/// The state of a counter at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CounterSnapshot {
    /// The time of the snapshot.
    pub at: Timestamp,
    /// The state at that time.
    pub snapshot: Snapshot,
    /// The units that processes have leased and not spent, which count as used.
    pub leased: u64,
    /// The live holds.
    pub holds: LiveHolds,
}

/// Returns the outcome of each of `count` checks; the error of a batch is that of each check.
#[cfg(feature = "redis")]
pub(crate) fn per_check(
    batch: Result<Vec<Result<CheckAnswer, StoreError>>, StoreError>,
    count: usize,
) -> Vec<Result<CheckAnswer, StoreError>> {
    batch.unwrap_or_else(|error| vec![Err(error); count])
}

/// Why a store did not decide, by whether a charge was made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The call arrived after its deadline, and changed nothing.
    #[error("call reached the store after its deadline, nothing changed (store time {} us)", .0.as_micros())]
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
    /// No reply arrived. The call may have taken effect and must not be repeated.
    #[error("no reply from the store, the call may have taken effect: {0}")]
    Ambiguous(String),
    /// The stored state of a counter cannot be read, because something other than the limiter wrote its key. Nothing changed. The
    /// store itself works.
    #[error("the stored state of {key} cannot be read, nothing changed: run `sluicegate doctor`")]
    Unreadable {
        /// The name of the key.
        key: String,
    },
    /// The batch is larger than one atomic step may be.
    #[error("a batch of {tiers} tiers is too large: use at most {max}")]
    TooLarge {
        /// Tiers in the batch.
        tiers: usize,
        /// The maximum number of tiers in a batch.
        max: usize,
    },
}
