//! The only place that asks the time. Everything else is given it.

use std::{
    cell::Cell,
    sync::{
        Arc, LazyLock, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use tollgate_core::Timestamp;

/// A clock that stands still until it is moved: for tests, and for replaying the past.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use tollgate::{Cost, Limit, Limiter, ManualClock, MemoryStore, Timestamp};
///
/// let clock = ManualClock::new(Timestamp::from_micros(0));
/// let limiter = Limiter::new(MemoryStore::new().with_clock(clock.clone()), [])?;
/// let limit = Limit::sliding_log(1, Duration::from_secs(60))?;
/// assert!(limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
/// assert!(!limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
/// clock.advance(Duration::from_secs(60)); // no test has to wait
/// assert!(limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
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
    Steady {
        /// The wall clock when [`steady_ns`] showed zero.
        epoch_us: u64,
    },
    /// Moved by hand.
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

/// What this machine's clock shows: only to tell how far the store's is from it.
#[expect(clippy::disallowed_methods, reason = "this is the one place that reads the real clock")]
pub(crate) fn wall_clock() -> Timestamp {
    Timestamp::from_micros(micros(
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
    ))
}

/// For how long a thread goes by the processor's counter before it asks the system again: a counter whose pace is off by a
/// tenth puts the time off by a tenth of this.
const MAX_STRETCH_NS: u64 = 1_000_000;

/// How long asking the system may take for its answer to be gone on from: by so much the time may be late.
const MAX_GAP_NS: u64 = 10_000;

/// The last time that this thread asked the system.
#[derive(Clone, Copy)]
struct Asked {
    counter: u64,
    steady_ns: u64,
}

/// Nanoseconds on the system's steady clock since this was first called. Asking the system takes longer than the rest
/// of a decision, so that most calls go on from the last answer by the processor's counter.
fn steady_ns() -> u64 {
    thread_local! {
        static LAST: Cell<Option<Asked>> = const { Cell::new(None) };
    }
    static COUNTER: LazyLock<quanta::Clock> = LazyLock::new(quanta::Clock::new);
    static ZERO: OnceLock<Instant> = OnceLock::new();

    let counter = COUNTER.raw();
    // a counter that was set back, as on another machine, says nothing
    if let Some(last) = LAST.get().filter(|last| counter >= last.counter) {
        let stretch = COUNTER.delta_as_nanos(last.counter, counter);
        if stretch < MAX_STRETCH_NS {
            return last.steady_ns + stretch;
        }
    }
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the real clock")]
    let now = Instant::now();
    let since_zero = now.saturating_duration_since(*ZERO.get_or_init(|| now));
    let steady_ns = u64::try_from(since_zero.as_nanos()).unwrap_or(u64::MAX);
    let after = COUNTER.raw();
    // a thread that was stopped in between does not know which counter goes with that time
    let went_on = COUNTER.delta_as_nanos(counter, after) < MAX_GAP_NS;
    LAST.set(went_on.then_some(Asked { counter: after, steady_ns }));
    steady_ns
}

fn micros(duration: Duration) -> u64 {
    duration.as_secs() * 1_000_000 + u64::from(duration.subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time by the processor's counter against the system's own.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "the real clock is what is tested")]
    fn the_steady_clock_keeps_the_time_of_the_system() {
        steady_ns(); // the first call finds out how fast the counter is
        let (begun, first) = (Instant::now(), steady_ns());
        while begun.elapsed() < Duration::from_millis(50) {
            let before = begun.elapsed().as_nanos();
            let shown = u128::from(steady_ns() - first);
            let after = begun.elapsed().as_nanos();
            let slack = 5 * u128::from(MAX_GAP_NS);
            assert!(shown + slack >= before && shown <= after + slack, "{before} <= {shown} <= {after}");
        }
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert!(Clock::steady().now().as_micros().abs_diff(micros(wall)) < 1_000_000);
    }
}
