//! Closed-loop callers, each with its own statistics, and shared counts for the progress display.

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
use sluicegate_core::oracle::Admitted;
use tokio::time::Instant;

use super::{
    keys::KeySpace,
    limit_verifier::{AdmittedCall, KeyNumber},
};

/// The longest latency that is recorded exactly, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;
/// Significant digits of recorded latencies.
const DIGITS: u8 = 3;
/// The number of calls after which a caller updates the shared counts.
const SHARE_INTERVAL: u64 = 64;
/// The number of admitted calls sent to the verifier at once.
const BATCH: usize = 1_024;

/// The extent of a load.
#[derive(Clone, Copy, Debug)]
pub(super) enum Extent {
    Time(Duration),
    Requests(u64),
}

/// The outcome of one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallOutcome {
    Allowed,
    Denied,
    /// Denied without a call to the store.
    DeniedLocally,
    /// Decided without the store, because it was unavailable.
    Degraded,
    Failed(String),
}

/// A load and its progress.
pub(super) struct Load {
    pub(super) keys: KeySpace,
    pub(super) cost: u64,
    extent: Extent,
    started: Instant,
    /// Calls started, if the extent is a number of requests.
    started_calls: AtomicU64,
    is_stopped: AtomicBool,
    shared: SharedCounts,
    verifier: SyncSender<Vec<AdmittedCall>>,
}

/// Counts of all callers, updated every [`SHARE_INTERVAL`] calls.
#[derive(Default)]
struct SharedCounts {
    calls: AtomicU64,
    denied: AtomicU64,
}

/// Counts of outcomes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) allowed: u64,
    pub(super) denied: u64,
    /// Of these, without a call to the store.
    pub(super) denied_locally: u64,
    pub(super) degraded: u64,
    pub(super) failed: u64,
    pub(super) first_failure: Option<String>,
    /// Admitted calls that were dropped because the verifier's queue was full.
    pub(super) unverified: u64,
}

impl Counts {
    /// The number of calls that were decided.
    pub(super) fn decisions(&self) -> u64 {
        self.allowed + self.denied + self.degraded
    }
}

/// One caller and its statistics.
pub(super) struct Caller {
    load: Arc<Load>,
    random: SmallRng,
    latency: Histogram<u64>,
    counts: Counts,
    admitted: Vec<AdmittedCall>,
    calls: u64,
    /// Calls and denials already added to the shared counts.
    shared: (u64, u64),
}

/// The merged statistics of callers.
pub(super) struct LoadResult {
    pub(super) latency: Histogram<u64>,
    pub(super) counts: Counts,
}

impl Load {
    pub(super) fn new(
        keys: KeySpace,
        cost: u64,
        extent: Extent,
        verifier: SyncSender<Vec<AdmittedCall>>,
    ) -> Self {
        Self {
            keys,
            cost,
            extent,
            started: Instant::now(),
            started_calls: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            shared: SharedCounts::default(),
            verifier,
        }
    }

    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Relaxed);
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Progress and total, in milliseconds or requests.
    pub(super) fn progress(&self) -> (u64, u64) {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        match self.extent {
            Extent::Time(all) => (millis(self.elapsed()).min(millis(all)), millis(all)),
            Extent::Requests(all) => (self.shared.calls.load(Relaxed).min(all), all),
        }
    }

    /// The number of calls and of denials so far.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.shared.calls.load(Relaxed), self.shared.denied.load(Relaxed))
    }

    /// Whether another call is to be made.
    fn start_call(&self) -> bool {
        let has_more = match self.extent {
            Extent::Time(all) => self.started.elapsed() < all,
            Extent::Requests(all) => self.started_calls.fetch_add(1, Relaxed) < all,
        };
        has_more && !self.is_stopped.load(Relaxed)
    }
}

impl Caller {
    pub(super) fn new(load: Arc<Load>) -> Self {
        Self {
            load,
            random: SmallRng::from_os_rng(),
            latency: new_histogram(),
            counts: Counts::default(),
            admitted: Vec::with_capacity(BATCH),
            calls: 0,
            shared: (0, 0),
        }
    }

    /// Returns the next key and the start time of its call; none when the load is complete.
    pub(super) fn next(&mut self) -> Option<(KeyNumber, Instant)> {
        self.load.start_call().then(|| (self.load.keys.next(&mut self.random), Instant::now()))
    }

    /// Records the outcome of a call. Returns whether the caller should yield to others.
    pub(super) fn record(&mut self, key: KeyNumber, sent: Instant, outcome: CallOutcome) -> bool {
        let received = Instant::now();
        self.calls += 1;
        let nanos = u64::try_from((received - sent).as_nanos()).unwrap_or(u64::MAX);
        self.latency.saturating_record(nanos);
        match outcome {
            CallOutcome::Allowed => {
                self.counts.allowed += 1;
                let since = |time: Instant| time - self.load.started;
                let admitted =
                    Admitted { sent: since(sent), received: since(received), cost: self.load.cost };
                self.admitted.push(AdmittedCall { key, admitted });
                if self.admitted.len() >= BATCH {
                    self.send_admitted();
                }
            }
            CallOutcome::Denied => self.counts.denied += 1,
            CallOutcome::DeniedLocally => {
                self.counts.denied += 1;
                self.counts.denied_locally += 1;
            }
            CallOutcome::Degraded => self.counts.degraded += 1,
            CallOutcome::Failed(reason) => {
                self.counts.failed += 1;
                self.counts.first_failure.get_or_insert(reason);
            }
        }
        let is_due = self.calls.is_multiple_of(SHARE_INTERVAL);
        if is_due {
            self.update_shared();
        }
        is_due
    }

    fn update_shared(&mut self) {
        self.load.shared.calls.fetch_add(self.calls - self.shared.0, Relaxed);
        self.load.shared.denied.fetch_add(self.counts.denied - self.shared.1, Relaxed);
        self.shared = (self.calls, self.counts.denied);
    }

    /// Sends admitted calls to the verifier. They are dropped if its queue is full: the load must not wait.
    fn send_admitted(&mut self) {
        let calls = std::mem::replace(&mut self.admitted, Vec::with_capacity(BATCH));
        let count = calls.len() as u64;
        if self.load.verifier.try_send(calls).is_err() {
            self.counts.unverified += count;
        }
    }

    pub(super) fn finish(mut self) -> LoadResult {
        self.send_admitted();
        LoadResult { latency: self.latency, counts: self.counts }
    }
}

fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("the bounds are valid")
}

impl LoadResult {
    pub(super) fn empty() -> Self {
        Self { latency: new_histogram(), counts: Counts::default() }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.latency.add(other.latency).expect("all histograms have the same bounds");
        let Counts { allowed, denied, denied_locally, degraded, failed, first_failure, unverified } =
            other.counts;
        let counts = &mut self.counts;
        counts.allowed += allowed;
        counts.denied += denied;
        counts.denied_locally += denied_locally;
        counts.degraded += degraded;
        counts.failed += failed;
        counts.unverified += unverified;
        counts.first_failure = counts.first_failure.take().or(first_failure);
    }
}
