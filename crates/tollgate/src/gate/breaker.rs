//! Stops asking a store that does not answer, and finds out in the background when it does again: no caller waits for
//! an answer that will not come, and none pays for the attempt that succeeds.

use std::{
    sync::{
        Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use super::Lane;
use crate::{
    hashing::random,
    store::{Store, StoreError},
};

/// After so many calls in a row without a decision, the store is not asked any more.
pub(super) const MAX_FAILURES: u32 = 5;
/// How long after that it is tried for the first time; each time it fails, the pause doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause: a store that is back is found within this and one answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Breaker {
    failures: AtomicU32,
    is_open: AtomicBool,
    /// What was wrong the last time.
    reason: Mutex<Option<String>>,
}

impl Breaker {
    /// Whether the store is left alone.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// What is said instead of asking.
    pub(super) fn left_alone(&self) -> StoreError {
        let reason = self.reason();
        StoreError::NotRun(format!("circuit breaker open, probing in the background; last error: {reason}"))
    }

    /// What was wrong the last time.
    pub(super) fn reason(&self) -> String {
        self.reason.lock().clone().unwrap_or_else(|| "no answer in time".to_owned())
    }

    /// Remembers what was wrong.
    pub(super) fn note(&self, error: &StoreError) {
        *self.reason.lock() = Some(match error {
            StoreError::Rejected { code, detail } => format!("{code} {detail}"),
            StoreError::NotRun(reason) | StoreError::Ambiguous(reason) => reason.clone(),
            other => other.to_string(),
        });
    }

    pub(super) fn succeeded(&self) {
        // a store that works is written to by nobody
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Whether this is one failure too many, and the first: whoever is told so must see to it that the store is tried.
    pub(super) fn failed(&self) -> bool {
        self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_FAILURES
            && !self.is_open.swap(true, Ordering::AcqRel)
    }

    fn close(&self) {
        *self.reason.lock() = None;
        self.failures.store(0, Ordering::Relaxed);
        self.is_open.store(false, Ordering::Release);
    }
}

/// Tries the store until it answers within the deadline, and then closes the breaker. Also when it is dropped before,
/// with the runtime that ran it: callers of another one shall not be locked out for ever.
pub(super) struct Probe<S: Store>(pub(super) Weak<Lane<S>>);

impl<S: Store> Probe<S> {
    pub(super) async fn run(self) {
        let mut pause = FIRST_PAUSE;
        loop {
            tokio::time::sleep(jittered(pause)).await;
            let Some(lane) = self.0.upgrade() else { return };
            let probe = lane.shared.store.probe(lane.number);
            let answer = tokio::time::timeout(lane.shared.options.deadline, probe).await;
            if let Ok(Err(error)) = &answer {
                lane.breaker.note(error);
            }
            if matches!(answer, Ok(Ok(()))) {
                tracing::info!("store available again");
                return;
            }
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }
}

impl<S: Store> Drop for Probe<S> {
    fn drop(&mut self) {
        if let Some(lane) = self.0.upgrade() {
            lane.queue.forget_round_trips();
            lane.breaker.close();
        }
    }
}

/// Between half and all of it, so that many processes do not come at once.
fn jittered(pause: Duration) -> Duration {
    pause / 2 + pause * u32::try_from(random() % 512).expect("a small number") / 1024
}
