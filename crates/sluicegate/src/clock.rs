//! The only module that reads the system clock.

use std::{
    cell::Cell,
    sync::{
        Arc, LazyLock, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use sluicegate_core::Timestamp;

/// A clock that advances only by calls, for tests and replays.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use sluicegate::{Cost, Limit, Limiter, ManualClock, MemoryStore, Timestamp};
///
/// let clock = ManualClock::new(Timestamp::from_micros(0));
/// let limiter = Limiter::new(MemoryStore::new().with_clock(clock.clone()), [])?;
/// let limit = Limit::sliding_log(1, Duration::from_secs(60))?;
/// assert!(limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
/// assert!(!limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
/// clock.advance(Duration::from_secs(60)); // tests do not have to wait
/// assert!(limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Creates a clock at `now`.
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_micros())))
    }

    /// Returns the current time.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::Relaxed))
    }

    /// Sets the time, forwards or backwards.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::Relaxed);
    }

    /// Advances the time.
    pub fn advance(&self, duration: Duration) {
        self.set(self.now().plus(duration));
    }
}

/// The memory store's clock.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    /// The wall clock when the store was created, then the monotonic clock: steps of the system clock have no effect.
    Steady {
        /// The wall clock when [`steady_ns`] was zero.
        epoch_us: u64,
    },
    /// A manual clock.
    Manual(ManualClock),
}

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the real clock")]
    pub(crate) fn steady() -> Self {
        let since_zero = Duration::from_nanos(steady_ns());
        let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self::Steady { epoch_us: micros(epoch.saturating_sub(since_zero)) }
    }

    pub(crate) fn now(&self) -> Timestamp {
        match self {
            Self::Steady { epoch_us } => Timestamp::from_micros(epoch_us + steady_ns() / 1_000),
            Self::Manual(clock) => clock.now(),
        }
    }
}

/// Returns the wall clock, to measure the skew of a store's clock.
#[cfg(feature = "redis")]
#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the real clock")]
pub(crate) fn wall_clock() -> Timestamp {
    Timestamp::from_micros(micros(
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
    ))
}

/// How long a thread extrapolates with the processor's counter before it reads the system clock again. A counter that is off by a tenth
/// shifts the time by a tenth of this.
const MAX_EXTRAPOLATION_NS: u64 = 1_000_000;

/// The maximum duration of a reading of the system clock that is used for extrapolation: the time may be late by this
/// much.
const MAX_GAP_NS: u64 = 10_000;

/// The last reading of the system clock by this thread.
#[derive(Clone, Copy)]
struct Reading {
    counter: u64,
    steady_ns: u64,
}

/// Returns the nanoseconds on the monotonic clock since the first call. Reading the system clock takes longer than the rest of a decision,
/// so most calls extrapolate from the last reading with the processor's counter.
fn steady_ns() -> u64 {
    thread_local! {
        static LAST: Cell<Option<Reading>> = const { Cell::new(None) };
    }
    static COUNTER: LazyLock<quanta::Clock> = LazyLock::new(quanta::Clock::new);
    static ZERO: OnceLock<Instant> = OnceLock::new();

    let counter = COUNTER.raw();
    // a counter that went backwards, for example after a live migration, is unusable
    if let Some(last) = LAST.get().filter(|last| counter >= last.counter) {
        let extrapolated = COUNTER.delta_as_nanos(last.counter, counter);
        if extrapolated < MAX_EXTRAPOLATION_NS {
            return last.steady_ns + extrapolated;
        }
    }
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the real clock")]
    let now = Instant::now();
    let since_zero = now.saturating_duration_since(*ZERO.get_or_init(|| now));
    let steady_ns = u64::try_from(since_zero.as_nanos()).unwrap_or(u64::MAX);
    let after = COUNTER.raw();
    // if the thread was preempted in between, the counter does not match the time
    let is_precise = COUNTER.delta_as_nanos(counter, after) < MAX_GAP_NS;
    LAST.set(is_precise.then_some(Reading { counter: after, steady_ns }));
    steady_ns
}

fn micros(duration: Duration) -> u64 {
    duration.as_secs() * 1_000_000 + u64::from(duration.subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the extrapolated time with the system clock.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "the real clock is what is tested")]
    fn the_steady_clock_follows_the_system_clock() {
        steady_ns(); // the first call calibrates the counter
        let (start, first) = (Instant::now(), steady_ns());
        while start.elapsed() < Duration::from_millis(50) {
            let before = start.elapsed().as_nanos();
            let shown = u128::from(steady_ns() - first);
            let after = start.elapsed().as_nanos();
            let slack = 5 * u128::from(MAX_GAP_NS);
            assert!(shown + slack >= before && shown <= after + slack, "{before} <= {shown} <= {after}");
        }
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(Clock::steady().now().as_micros().abs_diff(micros(wall)) < 1_000_000);
    }
}
