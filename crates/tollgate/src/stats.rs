//! What a limiter has been through with its store: how long calls took, how they failed, and what is left alone now.
//!
//! Everything is counted from the start and only grows, unless it says what is so now. A metrics library reads it when it
//! is asked; nothing here knows one.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::{decision::Source, store::StoreError};

/// What a limiter has been through with its store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// How long calls to the store took that were answered.
    pub calls: Durations,
    /// How often calls to the store failed, by kind: the first word of what the server said, or `timeout`, `lost`,
    /// `unreachable`, `late`, `other`. Every kind is listed.
    pub errors: Vec<(&'static str, u64)>,
    /// Requests of which nobody knows whether they were charged.
    pub ambiguous: u64,
    /// Requests that were decided without the store, by what decided them: `fallback`, `open`, `closed`.
    pub degraded: Vec<(&'static str, u64)>,
    /// Servers that are not asked now, since they have not answered lately.
    pub left_alone: usize,
    /// Callers that wait for a call now.
    pub waiting: usize,
    /// Calls in flight now, over all servers.
    pub in_flight: usize,
    /// How many calls may be in flight to one server now; the largest, where there are several.
    pub call_limit: usize,
    /// The round trip that most calls of the last second took at least, of the slowest server. Callers with less time are
    /// not sent to the store.
    pub round_trip: Option<Duration>,
    /// Answers of the store that came after the caller's deadline.
    pub late_answers: u64,
    /// Requests that were not sent, and not charged, because less time was left than a round trip takes.
    pub unsent: u64,
    /// What the store itself noticed.
    pub store: StoreStats,
}

/// What a store noticed of its servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Connections that were made.
    pub connections: u64,
    /// How often a server did not know the script, and was sent it in full.
    pub script_reloads: u64,
    /// How often a server turned out to be another one than before, or to have restarted: counters may be lost.
    pub generation_changes: u64,
    /// Keys that servers have evicted for want of memory since they are watched: counters are lost.
    pub evicted_keys: u64,
    /// How far a server's clock is ahead of this machine's, of the one that is off the most.
    pub clock_skew: Option<Skew>,
    /// Counters that it holds, where it is in this process.
    pub keys: u64,
    /// Memory that it has asked for, in bytes, where it is in this process.
    pub bytes: u64,
}

/// How far one clock is from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skew {
    /// It shows a later time.
    Ahead(Duration),
    /// It shows an earlier time.
    Behind(Duration),
}

impl Skew {
    /// How far, either way.
    pub fn size(self) -> Duration {
        match self {
            Self::Ahead(size) | Self::Behind(size) => size,
        }
    }
}

/// How often something took how long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Durations {
    /// For each bound of [`BOUNDS`], how many took at most so long and longer than the bound before; then those that
    /// took longer than all.
    pub counts: [u64; BOUNDS.len() + 1],
    /// All of them together.
    pub total: Duration,
}

/// The bounds of [`Durations`].
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

/// How calls fail; the last is everything else.
const KINDS: [&str; 19] = [
    "timeout",
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

/// What decides without the store.
const STAND_INS: [Source; 3] = [Source::Fallback, Source::Open, Source::Closed];

/// Counts, for as many threads as there are.
#[derive(Default)]
pub(crate) struct Tally {
    call_counts: [AtomicU64; BOUNDS.len() + 1],
    call_micros: AtomicU64,
    errors: [AtomicU64; KINDS.len()],
    ambiguous: AtomicU64,
    degraded: [AtomicU64; STAND_INS.len()],
    late_answers: AtomicU64,
    unsent: AtomicU64,
}

impl Tally {
    /// A call was answered.
    pub(crate) fn called(&self, took: Duration) {
        let bucket = BOUNDS.iter().position(|bound| took <= *bound).unwrap_or(BOUNDS.len());
        add_one(&self.call_counts[bucket]);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.call_micros.fetch_add(micros, Ordering::Relaxed);
    }

    /// A call failed.
    pub(crate) fn failed(&self, error: &StoreError) {
        self.count(match error {
            StoreError::Rejected { code, .. } => code,
            StoreError::NotRun(_) => "unreachable",
            StoreError::Ambiguous(_) => "lost",
            StoreError::Late(_) => "late",
            StoreError::TooLarge { .. } => "other",
        });
    }

    /// A call was given up, since no answer came in time.
    pub(crate) fn timed_out(&self) {
        self.count("timeout");
    }

    /// Answers came after their callers had gone away.
    pub(crate) fn answered_late(&self, count: u64) {
        if count > 0 {
            self.late_answers.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Requests were not sent, because less time was left than a round trip takes.
    pub(crate) fn unsent(&self, count: u64) {
        self.unsent.fetch_add(count, Ordering::Relaxed);
    }

    fn count(&self, kind: &str) {
        let place = KINDS.iter().position(|known| *known == kind).unwrap_or(KINDS.len() - 1);
        add_one(&self.errors[place]);
    }

    /// A request got no answer, and may have been charged.
    pub(crate) fn left_unknown(&self) {
        add_one(&self.ambiguous);
    }

    /// A request was decided without the store.
    pub(crate) fn stood_in(&self, source: Source) {
        if let Some(place) = STAND_INS.iter().position(|known| *known == source) {
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
            errors: KINDS.into_iter().zip(self.errors.iter().map(read)).collect(),
            ambiguous: read(&self.ambiguous),
            late_answers: read(&self.late_answers),
            unsent: read(&self.unsent),
            degraded: STAND_INS
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
