//! Many callers who never stop asking, each with its own notes; whoever wants to know how it goes looks at shared counts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::SyncSender,
    },
    time::Duration,
};

use hdrhistogram::Histogram;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::Instant;
use tollgate::oracle::Admitted;

use super::{
    judge::{Call, KeyNumber},
    keys::Keys,
};

/// The longest time that is told apart, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;
/// How exact times are kept: to the thousandth.
const DIGITS: u8 = 3;
/// After how many calls a caller tells how it goes.
const TOLD_AFTER: u64 = 64;
/// How many admitted calls are handed to the judge at once.
const BATCH: usize = 1_024;

/// How much is asked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Extent {
    Time(Duration),
    Requests(u64),
}

/// What came of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Allowed,
    Refused,
    /// Refused without asking the store.
    RefusedHere,
    /// Decided without the store, since it did not answer.
    Degraded,
    /// Nobody could say.
    Failed(String),
}

/// What a load is made of, and how it goes.
pub(super) struct Load {
    pub(super) keys: Keys,
    pub(super) cost: u64,
    extent: Extent,
    begun: Instant,
    asked: AtomicU64,
    is_stopped: AtomicBool,
    told: Told,
    judge: SyncSender<Vec<Call>>,
}

/// How it goes.
#[derive(Default)]
struct Told {
    calls: AtomicU64,
    refused: AtomicU64,
}

/// Counts of what came of calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) allowed: u64,
    pub(super) refused: u64,
    /// Of these, without asking the store.
    pub(super) refused_here: u64,
    pub(super) degraded: u64,
    pub(super) failed: u64,
    pub(super) first_failure: Option<String>,
    /// Admitted, and more than the judge had time for.
    pub(super) unjudged: u64,
}

impl Counts {
    /// How many calls were answered.
    pub(super) fn decisions(&self) -> u64 {
        self.allowed + self.refused + self.degraded
    }
}

/// What one caller notes.
pub(super) struct Caller {
    load: Arc<Load>,
    random: SmallRng,
    latency: Histogram<u64>,
    counts: Counts,
    admitted: Vec<Call>,
    calls: u64,
    /// How many calls, and refused ones, others know of.
    told: (u64, u64),
}

/// What all callers noted.
pub(super) struct Notes {
    pub(super) latency: Histogram<u64>,
    pub(super) counts: Counts,
}

impl Load {
    pub(super) fn new(keys: Keys, cost: u64, extent: Extent, judge: SyncSender<Vec<Call>>) -> Self {
        Self {
            keys,
            cost,
            extent,
            begun: Instant::now(),
            asked: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            told: Told::default(),
            judge,
        }
    }

    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Relaxed);
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    /// How much of it is done, of how much: milliseconds or requests.
    pub(super) fn progress(&self) -> (u64, u64) {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        match self.extent {
            Extent::Time(all) => (millis(self.elapsed()).min(millis(all)), millis(all)),
            Extent::Requests(all) => (self.told.calls.load(Relaxed).min(all), all),
        }
    }

    /// How many calls were made, and how many of them refused, so far.
    pub(super) fn told(&self) -> (u64, u64) {
        (self.told.calls.load(Relaxed), self.told.refused.load(Relaxed))
    }

    /// Whether there is another call to make.
    fn goes_on(&self) -> bool {
        let has_more = match self.extent {
            Extent::Time(all) => self.begun.elapsed() < all,
            Extent::Requests(all) => self.asked.fetch_add(1, Relaxed) < all,
        };
        has_more && !self.is_stopped.load(Relaxed)
    }
}

impl Caller {
    pub(super) fn new(load: Arc<Load>) -> Self {
        Self {
            load,
            random: SmallRng::from_os_rng(),
            latency: latencies(),
            counts: Counts::default(),
            admitted: Vec::with_capacity(BATCH),
            calls: 0,
            told: (0, 0),
        }
    }

    /// Which key to ask for next, and when that is; none when all is done.
    pub(super) fn next(&mut self) -> Option<(KeyNumber, Instant)> {
        self.load.goes_on().then(|| (self.load.keys.next(&mut self.random), Instant::now()))
    }

    /// Takes note of what came of a call. Whether this caller had better let others go on for a moment.
    pub(super) fn note(&mut self, key: KeyNumber, sent: Instant, outcome: Outcome) -> bool {
        let received = Instant::now();
        self.calls += 1;
        let nanos = u64::try_from((received - sent).as_nanos()).unwrap_or(u64::MAX);
        self.latency.saturating_record(nanos);
        match outcome {
            Outcome::Allowed => {
                self.counts.allowed += 1;
                let since = |moment: Instant| moment - self.load.begun;
                let admitted =
                    Admitted { sent: since(sent), received: since(received), cost: self.load.cost };
                self.admitted.push(Call { key, admitted });
                if self.admitted.len() >= BATCH {
                    self.hand_over();
                }
            }
            Outcome::Refused => self.counts.refused += 1,
            Outcome::RefusedHere => {
                self.counts.refused += 1;
                self.counts.refused_here += 1;
            }
            Outcome::Degraded => self.counts.degraded += 1,
            Outcome::Failed(reason) => {
                self.counts.failed += 1;
                self.counts.first_failure.get_or_insert(reason);
            }
        }
        let is_time = self.calls.is_multiple_of(TOLD_AFTER);
        if is_time {
            self.tell();
        }
        is_time
    }

    fn tell(&mut self) {
        self.load.told.calls.fetch_add(self.calls - self.told.0, Relaxed);
        self.load.told.refused.fetch_add(self.counts.refused - self.told.1, Relaxed);
        self.told = (self.calls, self.counts.refused);
    }

    /// What the judge has no room for now is left out: the load must not wait.
    fn hand_over(&mut self) {
        let calls = std::mem::replace(&mut self.admitted, Vec::with_capacity(BATCH));
        let count = calls.len() as u64;
        if self.load.judge.try_send(calls).is_err() {
            self.counts.unjudged += count;
        }
    }

    pub(super) fn finish(mut self) -> Notes {
        self.hand_over();
        Notes { latency: self.latency, counts: self.counts }
    }
}

fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("these bounds are possible")
}

impl Notes {
    pub(super) fn none() -> Self {
        Self { latency: latencies(), counts: Counts::default() }
    }

    pub(super) fn join(&mut self, other: Self) {
        self.latency.add(other.latency).expect("all have the same bounds");
        let Counts { allowed, refused, refused_here, degraded, failed, first_failure, unjudged } =
            other.counts;
        let counts = &mut self.counts;
        counts.allowed += allowed;
        counts.refused += refused;
        counts.refused_here += refused_here;
        counts.degraded += degraded;
        counts.failed += failed;
        counts.unjudged += unjudged;
        counts.first_failure = counts.first_failure.take().or(first_failure);
    }
}
