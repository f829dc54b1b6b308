//! How much a process uses counters: the demand determines how many units it draws.

use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// The number of counts. Of several checks with one count, the most frequent one keeps it, and in the next period each has another one.
const COUNTS: usize = 65_536;
/// How many requests within the lifetime of a lease make a check hot. Colder ones draw nothing.
const HOT_REQUESTS: u16 = 4;

/// Finds the checks that are worth a lease, in constant memory.
pub(super) struct HotChecks {
    start: Instant,
    /// Allocated by the first request of a limit with a lease.
    counts: OnceLock<Box<[AtomicU64]>>,
}

/// The requests of one check in one period, packed into 64 bits.
struct Count {
    /// The upper half of the hash of the check.
    check: u32,
    period: u16,
    requests: u16,
}

impl Count {
    fn unpack(packed: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = packed.to_be_bytes();
        Self {
            check: u32::from_be_bytes([a, b, c, d]),
            period: u16::from_be_bytes([e, f]),
            requests: u16::from_be_bytes([g, h]),
        }
    }

    fn pack(self) -> u64 {
        u64::from(self.check) << 32 | u64::from(self.period) << 16 | u64::from(self.requests)
    }

    /// Counts a request of a check.
    fn record(self, check: u32, period: u16) -> Self {
        let requests = self.requests;
        match (self.period == period, self.check == check) {
            (true, true) => Self { requests: requests.saturating_add(1), ..self },
            (true, false) if requests > 1 => Self { requests: requests - 1, ..self },
            _ => Self { check, period, requests: 1 },
        }
    }
}

impl HotChecks {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), counts: OnceLock::new() }
    }

    /// Counts a request, and returns whether its check is hot: there were several in this period, which lasts as long as a lease.
    pub(super) fn record(&self, hash: u64, lifetime: Duration, now: Instant) -> bool {
        let periods = now.duration_since(self.start).as_micros() / lifetime.as_micros().max(1);
        let period = u16::try_from(periods % 0xffff).expect("below 2^16") + 1;
        let check = u32::try_from(hash >> 32).expect("the upper half");
        let (place, counts) =
            (hash.wrapping_mul(2 * u64::from(period) + 1), u64::try_from(COUNTS).expect("small"));
        let all = self.counts.get_or_init(|| (0..COUNTS).map(|_| AtomicU64::new(0)).collect());
        let count = &all[usize::try_from((place >> 16) % counts).expect("below a small number")];
        let counted = Count::unpack(count.load(Ordering::Relaxed)).record(check, period);
        let is_hot = counted.check == check && counted.requests >= HOT_REQUESTS;
        // a request that is lost in a race makes the check hot a little later
        count.store(counted.pack(), Ordering::Relaxed);
        is_hot
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

    /// Returns when there will have been no request in two periods.
    pub(super) fn ends(&self, period: Duration) -> Instant {
        self.since + 2 * period
    }

    /// Whether there were requests in this period or the one before.
    pub(super) fn is_recent(&self, now: Instant, period: Duration) -> bool {
        now < self.ends(period)
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
        let (one, other) = (7 << 32, 8 << 32);
        let requests: Vec<bool> = (0..5).map(|_| hot.record(one, PERIOD, now)).collect();
        assert_eq!(requests, [false, false, false, true, true]);
        assert!(!hot.record(other, PERIOD, now), "another check");
        assert!(!hot.record(one, PERIOD, now + PERIOD), "the next period");
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
