//! The number of instances among which the fallback divides a limit.
//!
//! A count that is too low admits too much, so a higher count applies immediately, and a lower one only after it has
//! been stable for [`HOLD`]. After the store has lost its data, each instance registers again within that time.

use std::time::Duration;

use tokio::time::Instant;

/// How long instances must have been counted without interruption before a lower count applies.
const HOLD: Duration = Duration::from_secs(10);

pub(super) struct InstanceCount {
    current: u32,
    lower: Option<LowerCounts>,
    is_counted: bool,
}

/// Counts below the current one.
struct LowerCounts {
    since: Instant,
    largest: u32,
}

impl InstanceCount {
    /// With the expected number of instances.
    pub(super) fn new(expected: u32) -> Self {
        Self { current: expected.max(1), lower: None, is_counted: false }
    }

    pub(super) fn current(&self) -> u32 {
        self.current
    }

    /// Whether the store has counted the instances at least once.
    pub(super) fn is_counted(&self) -> bool {
        self.is_counted
    }

    /// Records how many instances the store has counted.
    pub(super) fn counted(&mut self, count: u32, now: Instant) {
        let count = count.max(1);
        self.is_counted = true;
        if count >= self.current {
            (self.current, self.lower) = (count, None);
            return;
        }
        let lower = self.lower.get_or_insert(LowerCounts { since: now, largest: count });
        lower.largest = lower.largest.max(count);
        if now.duration_since(lower.since) >= HOLD {
            (self.current, self.lower) = (lower.largest, None);
        }
    }

    /// Records that the store did not count.
    pub(super) fn not_counted(&mut self) {
        self.lower = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn the_expected_number_applies_until_a_lower_count_has_held() {
        let (mut instances, now) = (InstanceCount::new(4), Instant::now());
        instances.not_counted();
        assert_eq!(instances.current(), 4);
        // instances that start together register one after the other
        instances.counted(1, now);
        instances.counted(2, now + PERIOD);
        assert_eq!(instances.current(), 4);
        instances.counted(2, now + HOLD);
        assert_eq!(instances.current(), 2);
        assert_eq!(InstanceCount::new(0).current(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lower_count_applies_once_it_has_held_and_a_higher_one_at_once() {
        let (mut instances, mut now) = (InstanceCount::new(1), Instant::now());
        instances.counted(4, now);
        // the store has lost its data, and the instances register again one after the other
        for count in [1, 2, 3, 3, 2] {
            now += PERIOD;
            instances.counted(count, now);
            assert_eq!(instances.current(), 4);
        }
        now += PERIOD;
        instances.counted(2, now);
        assert_eq!(instances.current(), 3, "the largest count of the period");
        instances.counted(5, now);
        assert_eq!(instances.current(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_keeps_the_count_and_starts_the_period_again() {
        let (mut instances, mut now) = (InstanceCount::new(1), Instant::now());
        instances.counted(4, now);
        instances.counted(1, now + PERIOD);
        for _ in 0..100 {
            now += PERIOD;
            instances.not_counted();
        }
        instances.counted(1, now);
        assert_eq!(instances.current(), 4);
        instances.counted(1, now + HOLD);
        assert_eq!(instances.current(), 1);
    }
}
