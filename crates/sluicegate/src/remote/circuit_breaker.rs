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
use crate::{hashing::random, store::StoreError};

/// The breaker opens after this number of consecutive failures.
pub(super) const MAX_FAILURES: u32 = 5;
/// The pause before the first probe. It doubles after each failed probe.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest time between the starts of two probes.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct CircuitBreaker {
    failures: AtomicU32,
    is_open: AtomicBool,
    /// The last error.
    reason: Mutex<Option<String>>,
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
        self.reason.lock().clone().unwrap_or_else(|| "no answer in time".to_owned())
    }

    pub(super) fn succeeded(&self) {
        // no write in the common case: the cache line is shared by all threads
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failure. Returns whether it opened the breaker: then the caller starts a [`Probe`].
    pub(super) fn failed(&self, error: &StoreError) -> bool {
        self.record_reason(error);
        self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_FAILURES && self.open()
    }

    /// Opens the breaker. Returns whether it was closed: then the caller starts a [`Probe`].
    pub(super) fn open(&self) -> bool {
        !self.is_open.swap(true, Ordering::AcqRel)
    }

    pub(super) fn record_reason(&self, error: &StoreError) {
        *self.reason.lock() = Some(match error {
            StoreError::Rejected { code, detail } => format!("{code} {detail}"),
            StoreError::NotRun(reason) | StoreError::Ambiguous(reason) => reason.clone(),
            other => other.to_string(),
        });
    }

    pub(super) fn close(&self) {
        *self.reason.lock() = None;
        self.failures.store(0, Ordering::Relaxed);
        self.is_open.store(false, Ordering::Release);
    }
}

/// Probes the server until it answers within the deadline, then closes the breaker. The breaker also closes if the probe is
/// dropped with its runtime, because otherwise callers on another runtime could never use the store again.
pub(super) struct Probe(pub(super) Weak<Upstream>);

impl Probe {
    pub(super) async fn run(self) {
        let mut pause = FIRST_PAUSE;
        sleep(jittered(pause)).await;
        loop {
            let Some(upstream) = self.0.upgrade() else { return };
            let started = Instant::now();
            match upstream.probe().await {
                Ok(()) => return,
                Err(error) => upstream.breaker.record_reason(&error),
            }
            drop(upstream);
            pause = LONGEST_PAUSE.min(pause * 2);
            sleep_until(started + jittered(pause)).await;
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(upstream) = self.0.upgrade() {
            upstream.queue.clear_round_trips();
            upstream.breaker.close();
        }
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
        let failure = |reason: &str| StoreError::NotRun(reason.to_owned());
        assert!(!breaker.failed(&failure("first outage")));
        breaker.succeeded();
        for failed in 1..=MAX_FAILURES {
            assert_eq!(breaker.failed(&failure("second outage")), failed == MAX_FAILURES);
        }
        assert_eq!(breaker.reason(), "second outage");
        breaker.close();
        assert!(breaker.open());
        assert_eq!(breaker.reason(), "no answer in time", "the reason ends with the outage");
    }
}
