//! Statistics of a limiter and its store: call durations, errors, and current state.
//!
//! Counters only grow; fields with "now" are gauges. A metrics exporter reads them on demand.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::{decision::Source, store::StoreError};

/// Statistics of a limiter and its store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Durations of answered calls to the store.
    pub calls: Durations,
    /// Failed calls to the store and failed probes of an open circuit breaker by kind: the error code of the server, or `timeout`,
    /// `lost`, `unreachable`, `late`, `other`. Every kind is listed.
    pub errors: Vec<(&'static str, u64)>,
    /// Requests that may or may not have been charged.
    pub ambiguous: u64,
    /// Requests that were decided without the store, by source: `fallback`, `open`, `closed`.
    pub degraded: Vec<(&'static str, u64)>,
    /// Servers whose circuit breaker is open now.
    pub open_breakers: usize,
    /// Callers waiting for the store now.
    pub waiting: usize,
    /// Calls in flight now, over all servers.
    pub in_flight: usize,
    /// Limit of concurrent calls to one server now; the largest over all servers.
    pub call_limit: usize,
    /// Lower quartile of the last second's round trips to the slowest server. Requests with less time left are not
    /// sent.
    pub round_trip: Option<Duration>,
    /// Answers of the store after the caller's deadline.
    pub late_answers: u64,
    /// Requests that were neither sent nor charged, because less time was left than a round trip.
    pub unsent: u64,
    /// Checks that were not decided by the store, because the stored state of one of their counters cannot be read.
    pub unreadable: u64,
    /// Statistics of the store.
    pub store: StoreStats,
    /// Units that were charged in advance.
    pub leases: LeaseStats,
    /// Holds by outcome.
    pub holds: HoldStats,
    /// Checks that skipped a concurrency rule.
    pub skipped_concurrency: u64,
}

/// Holds that this process has made or ended, by outcome. An expired hold is counted by the process that finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldStats {
    /// Holds that were made.
    pub held: u64,
    /// Holds that were made, once for each counter that releases expired holds: the unit of `expired`.
    pub releasing: u64,
    /// Holds that were settled.
    pub settled: u64,
    /// Holds whose estimate was refunded.
    pub released: u64,
    /// Holds that expired before they were settled, once for each counter that releases expired holds.
    pub expired: u64,
    /// Settlements of holds that were settled before.
    pub already: u64,
    /// Settlements of holds that had expired.
    pub late: u64,
    /// Settlements of holds that do not exist.
    pub unknown: u64,
    /// Settlements that were queued because the store did not respond.
    pub queued: u64,
    /// Settlements that are queued now.
    pub waiting: usize,
}

/// Units that this process has charged in advance, over all limits with a lease. The units that it holds now are those drawn and neither
/// spent, returned nor lost. Spent units are counted when they are reported to the store, at the latest when the lease ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseStats {
    /// Units charged in advance.
    pub drawn: u64,
    /// Units of them that requests have used.
    pub spent: u64,
    /// Units that were returned to the store.
    pub returned: u64,
    /// Units that were neither spent nor returned: they count until their window ends.
    pub lost: u64,
}

/// Statistics of a store and its servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Established connections.
    pub connections: u64,
    /// How often a server did not have the script and received it in full.
    pub script_reloads: u64,
    /// How often a server restarted or was replaced; counters may be lost.
    pub generation_changes: u64,
    /// Keys that servers have evicted; counters are lost.
    pub evicted_keys: u64,
    /// Reservations of denied or failed checks over several Cluster nodes that were not confirmed as released; their units may count
    /// until their window ends.
    pub unreleased_reservations: u64,
    /// The largest skew between a server's clock and this machine's.
    pub clock_skew: Option<Skew>,
    /// Number of counters of a memory store.
    pub keys: u64,
    /// Memory of a memory store in bytes.
    pub bytes: u64,
    /// The maximum of `bytes`: seven eighths of the configured bound; the rest is reserved for the allocator.
    pub max_bytes: u64,
    /// Checks and charges that a full memory store decided with overflow counters, one for each matching rule. Keys
    /// that share an overflow counter are denied together once it is exhausted.
    pub overflow_decisions: u64,
}

/// The difference between two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skew {
    /// The clock is ahead.
    Ahead(Duration),
    /// The clock is behind.
    Behind(Duration),
}

impl Skew {
    /// Returns the absolute difference.
    pub fn size(self) -> Duration {
        match self {
            Self::Ahead(size) | Self::Behind(size) => size,
        }
    }
}

/// A histogram of durations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    /// The count of each bucket of [`BOUNDS`], then the count of longer durations.
    pub counts: [u64; BOUNDS.len() + 1],
    /// Sum of all durations.
    pub total: Duration,
}

/// The upper bounds of the buckets of [`Durations`].
pub const BOUNDS: [Duration; 12] = [
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_micros(1_000),
    Duration::from_micros(2_500),
    Duration::from_micros(5_000),
    Duration::from_micros(10_000),
    Duration::from_micros(25_000),
    Duration::from_micros(50_000),
    Duration::from_micros(100_000),
    Duration::from_micros(250_000),
    Duration::from_micros(1_000_000),
];

/// Kinds of failed calls; the last one is everything else.
const ERROR_KINDS: [&str; 19] = [
    TIMEOUT,
    "lost",
    "unreachable",
    "late",
    "OOM",
    "READONLY",
    "LOADING",
    "BUSY",
    "NOREPLICAS",
    "MISCONF",
    "NOAUTH",
    "WRONGPASS",
    "NOPERM",
    "MOVED",
    "ASK",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "MASTERDOWN",
    "other",
];

/// The kind of a call or probe without an answer in time.
pub(crate) const TIMEOUT: &str = "timeout";

/// Returns the kind of an error, one of [`ERROR_KINDS`].
pub(crate) fn error_kind(error: &StoreError) -> &'static str {
    match error {
        StoreError::Rejected { code, .. } => {
            ERROR_KINDS.into_iter().find(|known| known == code).unwrap_or("other")
        }
        StoreError::NotRun(_) => "unreachable",
        StoreError::Ambiguous(_) => "lost",
        StoreError::Late(_) => "late",
        StoreError::TooLarge { .. } | StoreError::Unreadable { .. } => "other",
    }
}

/// Sources of decisions without the store.
const DEGRADED_SOURCES: [Source; 3] = [Source::Fallback, Source::Open, Source::Closed];

/// The atomic counters behind the [`Stats`] of a remote store.
#[derive(Default)]
pub(crate) struct RemoteCounters {
    call_counts: [AtomicU64; BOUNDS.len() + 1],
    call_micros: AtomicU64,
    errors: [AtomicU64; ERROR_KINDS.len()],
    ambiguous: AtomicU64,
    degraded: [AtomicU64; DEGRADED_SOURCES.len()],
    late_answers: AtomicU64,
    unsent: AtomicU64,
    unreadable: AtomicU64,
}

impl RemoteCounters {
    /// Records an answered call.
    pub(crate) fn record_call(&self, took: Duration) {
        let bucket = BOUNDS.iter().position(|bound| took <= *bound).unwrap_or(BOUNDS.len());
        add_one(&self.call_counts[bucket]);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.call_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// Records a failed call.
    pub(crate) fn record_error(&self, error: &StoreError) {
        self.count_error(error_kind(error));
    }

    /// Records a call without an answer in time.
    pub(crate) fn record_timeout(&self) {
        self.count_error(TIMEOUT);
    }

    /// Records a probe that failed with an error of this kind.
    pub(crate) fn record_failed_probe(&self, kind: &'static str) {
        self.count_error(kind);
    }

    /// Records answers after the deadline of their callers.
    pub(crate) fn record_late_answers(&self, count: u64) {
        if count > 0 {
            self.late_answers.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Records requests that were not sent, because less time was left than a round trip.
    pub(crate) fn record_unsent(&self, count: u64) {
        self.unsent.fetch_add(count, Ordering::Relaxed);
    }

    /// Records checks that use a counter whose stored state cannot be read.
    pub(crate) fn record_unreadable(&self, checks: usize) {
        if checks > 0 {
            self.unreadable.fetch_add(checks as u64, Ordering::Relaxed);
        }
    }

    fn count_error(&self, kind: &'static str) {
        let place = ERROR_KINDS.iter().position(|known| *known == kind).unwrap_or(ERROR_KINDS.len() - 1);
        add_one(&self.errors[place]);
    }

    /// Records a request without an answer that may have been charged.
    pub(crate) fn record_ambiguous(&self) {
        add_one(&self.ambiguous);
    }

    /// Records a request that was decided without the store.
    pub(crate) fn record_degraded(&self, source: Source) {
        if let Some(place) = DEGRADED_SOURCES.iter().position(|known| *known == source) {
            add_one(&self.degraded[place]);
        }
    }

    pub(crate) fn snapshot(&self) -> Stats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Stats {
            calls: Durations {
                counts: self.call_counts.each_ref().map(read),
                total: Duration::from_micros(read(&self.call_micros)),
            },
            errors: ERROR_KINDS.into_iter().zip(self.errors.iter().map(read)).collect(),
            ambiguous: read(&self.ambiguous),
            late_answers: read(&self.late_answers),
            unsent: read(&self.unsent),
            unreadable: read(&self.unreadable),
            degraded: DEGRADED_SOURCES
                .iter()
                .map(|source| source.name())
                .zip(self.degraded.iter().map(read))
                .collect(),
            ..Stats::default()
        }
    }
}

fn add_one(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}
