//! How much a process uses counters: the demand determines how many units it draws.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use tokio::time::Instant;

/// The number of counts; checks with the same hash share one.
const COUNTS: usize = 65_536;
/// How many requests within the lifetime of a lease make a check hot. Colder ones draw nothing.
const HOT_REQUESTS: u32 = 4;

/// Finds the checks that are worth a lease, in constant memory.
pub(super) struct HotChecks {
    start: Instant,
    /// The period in the upper half, and the number of requests in it in the lower half.
    counts: Box<[AtomicU32]>,
}

impl HotChecks {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), counts: (0..COUNTS).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Counts a request, and returns whether its check is hot: there were several in this period, which lasts as long as a lease.
    pub(super) fn record(&self, hash: u64, lifetime: Duration, now: Instant) -> bool {
        let periods = now.duration_since(self.start).as_micros() / lifetime.as_micros().max(1);
        let period = u32::try_from(periods % 0xffff).expect("below 2^16") + 1;
        let counts = u64::try_from(COUNTS).expect("a small number");
        let count = &self.counts[usize::try_from(hash % counts).expect("below a small number")];
        let old = count.load(Ordering::Relaxed);
        let requests = if old >> 16 == period { (old & 0xffff) + 1 } else { 1 };
        // a request that is lost in a race makes the check hot a little later
        count.store(period << 16 | requests.min(0xffff), Ordering::Relaxed);
        requests >= HOT_REQUESTS
    }
}

/// The requests of one hot check: in the current period and in the one before.
pub(super) struct Demand {
    since: Instant,
    current: u64,
    previous: u64,
}

impl Demand {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, current: u64::from(HOT_REQUESTS), previous: 0 }
    }

    #[inline]
    pub(super) fn record(&mut self, now: Instant, period: Duration) {
        let elapsed = now.duration_since(self.since);
        if elapsed >= period {
            let is_next = elapsed < 2 * period;
            *self = Self { since: now, current: 0, previous: if is_next { self.current } else { 0 } };
        }
        self.current += 1;
    }

    /// Returns how many requests to expect in a period.
    pub(super) fn expected(&self) -> u64 {
        self.current.max(self.previous)
    }

    /// Whether there were requests in this period or the one before.
    pub(super) fn is_recent(&self, now: Instant, period: Duration) -> bool {
        now.duration_since(self.since) < 2 * period
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_check_is_hot_after_several_requests_within_a_period() {
        let hot = HotChecks::new();
        let now = Instant::now();
        let requests: Vec<bool> = (0..5).map(|_| hot.record(7, PERIOD, now)).collect();
        assert_eq!(requests, [false, false, false, true, true]);
        assert!(!hot.record(8, PERIOD, now), "another check");
        assert!(!hot.record(7, PERIOD, now + PERIOD), "the next period");
    }

    #[tokio::test(start_paused = true)]
    async fn the_busier_of_the_last_two_periods_is_expected() {
        let start = Instant::now();
        let mut demand = Demand::new(start);
        (0..96).for_each(|_| demand.record(start, PERIOD));
        assert_eq!(demand.expected(), 100);
        demand.record(start + PERIOD, PERIOD);
        assert_eq!(demand.expected(), 100, "the period before");
        demand.record(start + 2 * PERIOD, PERIOD);
        assert_eq!(demand.expected(), 1);
        (0..50).for_each(|_| demand.record(start + 2 * PERIOD, PERIOD));
        demand.record(start + 5 * PERIOD, PERIOD);
        assert_eq!(demand.expected(), 1, "after a pause");
        assert!(!demand.is_recent(start + 7 * PERIOD, PERIOD));
    }
}
