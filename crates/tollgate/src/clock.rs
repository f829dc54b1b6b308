//! The only place that asks the time. Everything else is given it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use tollgate_core::Timestamp;

/// A clock that stands still until it is moved: for tests, and for replaying the past.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that shows `now`.
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_micros())))
    }

    /// What it shows.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Relaxed))
    }

    /// Sets it, also back.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::Relaxed);
    }

    /// Moves it forward.
    pub fn advance(&self, duration: Duration) {
        self.set(self.now().plus(duration));
    }
}

/// The memory store's clock.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    /// The wall clock when the store was made, and steady from then on: steps of the system's clock do
    /// not reach it.
    Steady { since: Instant, epoch_us: u64 },
    /// Moved by hand.
    Manual(ManualClock),
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the real clock")]
    pub(crate) fn steady() -> Self {
        let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self::Steady { since: Instant::now(), epoch_us: micros(epoch) }
    }

    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::Steady { since, epoch_us } => Timestamp::from_micros(epoch_us + micros(since.elapsed())),
            Self::Manual(clock) => clock.now(),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    duration.as_secs() * 1_000_000 + u64::from(duration.subsec_micros())
}
