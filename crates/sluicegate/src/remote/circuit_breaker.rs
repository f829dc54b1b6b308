//! The circuit breaker of one server. After repeated failures no caller waits for that server any more; a background task
//! probes it and closes the breaker when it answers.

use std::{
    sync::{
        Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

use super::Upstream;
use crate::{
    hashing::random,
    stats::{TIMEOUT, error_kind},
    store::StoreError,
};

/// The breaker opens after this number of consecutive failures.
pub(super) const MAX_FAILURES: u32 = 5;
/// The pause before the first probe. It doubles after each failed probe.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest time between the starts of two probes.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How often a log line reports that an outage continues.
const OUTAGE_LOG_INTERVAL: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct CircuitBreaker {
    failures: AtomicU32,
    is_open: AtomicBool,
    last_failure: Mutex<Option<Failure>>,
}

/// A failed call or probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// The kind of the error in metrics.
    pub(super) kind: &'static str,
    pub(super) reason: String,
}

impl Failure {
    /// A call or probe without an answer in time.
    pub(super) fn timeout(reason: String) -> Self {
        Self { kind: TIMEOUT, reason }
    }
}

impl From<&StoreError> for Failure {
    fn from(error: &StoreError) -> Self {
        let reason = match error {
            StoreError::Rejected { code, detail } => format!("{code} {detail}"),
            StoreError::NotRun(reason) | StoreError::Ambiguous(reason) => reason.clone(),
            other => other.to_string(),
        };
        Self { kind: error_kind(error), reason }
    }
}

impl CircuitBreaker {
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// The error of a check that is not sent because the breaker is open.
    pub(super) fn error(&self) -> StoreError {
        let reason = self.reason();
        StoreError::NotRun(format!("circuit breaker open, probing in the background; last error: {reason}"))
    }

    pub(super) fn reason(&self) -> String {
        self.last_failure().reason
    }

    fn last_failure(&self) -> Failure {
        self.last_failure.lock().clone().unwrap_or_else(|| Failure::timeout("no answer in time".to_owned()))
    }

    pub(super) fn succeeded(&self) {
        // no write in the common case: the cache line is shared by all threads
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failure. Returns whether it opened the breaker: then the caller starts a [`Probe`].
    pub(super) fn failed(&self, failure: Failure) -> bool {
        self.record(failure);
        self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_FAILURES && self.open()
    }

    /// Opens the breaker. Returns whether it was closed: then the caller starts a [`Probe`].
    pub(super) fn open(&self) -> bool {
        !self.is_open.swap(true, Ordering::AcqRel)
    }

    pub(super) fn record(&self, failure: Failure) {
        *self.last_failure.lock() = Some(failure);
    }

    pub(super) fn close(&self) {
        *self.last_failure.lock() = None;
        self.failures.store(0, Ordering::Relaxed);
        self.is_open.store(false, Ordering::Release);
    }
}

/// Probes the server until it answers within the deadline, then closes the breaker. The breaker also closes if the probe is
/// dropped with its runtime, because otherwise callers on another runtime could never use the store again.
pub(super) struct Probe(pub(super) Weak<Upstream>);

impl Probe {
    pub(super) async fn run(self) {
        let Some(upstream) = self.0.upgrade() else { return };
        let mut outage = Outage::new(upstream.breaker.last_failure().kind);
        drop(upstream);
        let mut pause = FIRST_PAUSE;
        sleep(jittered(pause)).await;
        loop {
            let Some(upstream) = self.0.upgrade() else { return };
            let started = Instant::now();
            let Err(failure) = upstream.probe().await else { return };
            if outage.must_log(failure.kind) {
                upstream.log_outage(&failure.reason, outage.since.elapsed());
            }
            upstream.breaker.record(failure);
            drop(upstream);
            pause = LONGEST_PAUSE.min(pause * 2);
            sleep_until(started + jittered(pause)).await;
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(upstream) = self.0.upgrade() {
            upstream.queue.end_outage();
            upstream.breaker.close();
        }
    }
}

/// An outage, and which of its failures have been logged.
struct Outage {
    since: Instant,
    logged_at: Instant,
    /// Bounded by the number of kinds.
    logged_kinds: Vec<&'static str>,
}

impl Outage {
    /// An outage that starts now. Its first failure has been logged.
    fn new(kind: &'static str) -> Self {
        let now = Instant::now();
        Self { since: now, logged_at: now, logged_kinds: vec![kind] }
    }

    /// Returns whether a failure of this kind is to be logged: the first of each kind, and one per interval.
    fn must_log(&mut self, kind: &'static str) -> bool {
        let is_new = !self.logged_kinds.contains(&kind);
        if is_new {
            self.logged_kinds.push(kind);
        }
        let is_due = self.logged_at.elapsed() >= OUTAGE_LOG_INTERVAL;
        if is_new || is_due {
            self.logged_at = Instant::now();
        }
        is_new || is_due
    }
}

/// Returns between half and all of a pause, so that many processes do not probe at the same time.
fn jittered(pause: Duration) -> Duration {
    pause / 2 + pause * u32::try_from(random() % 512).expect("a small number") / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_breaker_reports_the_error_that_opened_it_and_not_an_earlier_one() {
        let breaker = CircuitBreaker::default();
        let failure = |reason: &str| Failure::timeout(reason.to_owned());
        assert!(!breaker.failed(failure("first outage")));
        breaker.succeeded();
        for failed in 1..=MAX_FAILURES {
            assert_eq!(breaker.failed(failure("second outage")), failed == MAX_FAILURES);
        }
        assert_eq!(breaker.reason(), "second outage");
        breaker.close();
        assert!(breaker.open());
        assert_eq!(breaker.reason(), "no answer in time", "the reason ends with the outage");
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_logged_once_per_kind_of_failure_and_once_a_minute() {
        let mut outage = Outage::new("timeout");
        let mut logged = Vec::new();
        for second in 1..=150 {
            tokio::time::advance(Duration::from_secs(1)).await;
            // two kinds that alternate are not logged each time
            let kind = if second % 2 == 0 { "OOM" } else { "timeout" };
            if outage.must_log(kind) {
                logged.push((second, kind));
            }
        }
        assert_eq!(logged, [(2, "OOM"), (62, "OOM"), (122, "OOM")]);
    }
}
