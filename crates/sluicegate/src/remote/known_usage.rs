//! The usage that the store last reported for the counters of this process, so that the fallback does not start with
//! empty counters.

use std::{hash::BuildHasher, sync::OnceLock, time::Duration};

use parking_lot::Mutex;
use sluicegate_core::{Algorithm, Limit, Timestamp, step::Share};
use tokio::time::Instant;

use crate::{check::Tier, hashing::RandomKeyedHash, key::Key};

/// The number of recorded counters; a further one replaces the oldest of [`WAYS`].
const MAX_COUNTERS: usize = 65_536;
/// The number of entries in which a counter can be recorded.
const WAYS: usize = 8;
const SETS: usize = MAX_COUNTERS / WAYS;
/// Answers of one call are recorded by their callers, in any order and within this time. Of those, the latest decision applies.
const REORDERING: Duration = Duration::from_secs(1);

/// The last reported usage of recent counters. Counters are identified by a keyed hash: a collision can make the fallback too strict or
/// too generous for one key.
#[derive(Default)]
pub(super) struct KnownUsage {
    /// Allocated by the first report: only rules with the failure policy `local` need it.
    sets: OnceLock<Box<[Set]>>,
    hasher: RandomKeyedHash,
}

type Set = Mutex<[Option<Report>; WAYS]>;

/// The state of a counter after a decision of the store.
#[derive(Clone, Copy)]
struct Report {
    hash: u64,
    /// The time of the decision on the store's clock.
    at: Timestamp,
    received: Instant,
    capacity: u64,
    used: u64,
    /// The time from `received` until no unit counts.
    reset_after: Duration,
}

/// Units of a counter that are known to be in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) used: u64,
    /// The time until nothing of it counts.
    pub(super) reset_after: Duration,
}

impl KnownUsage {
    /// Records the store's answer for a tier, from a decision at this time of the store.
    pub(super) fn record(&self, tier: &Tier, share: &Share, at: Timestamp) {
        let hash = self.hash(&tier.key, tier.terms.limit.algorithm());
        let report = Report::new(hash, tier.terms.limit.capacity(), share, at);
        let sets = self.sets.get_or_init(|| (0..SETS).map(|_| Set::default()).collect());
        let mut set = sets[place(hash)].lock();
        if let Some(known) = set.iter_mut().flatten().find(|known| known.hash == hash) {
            known.update(report);
            return;
        }
        let is_replaced_before = |place: &&mut Option<Report>| place.map(|report| report.received);
        if let Some(place) = set.iter_mut().min_by_key(is_replaced_before) {
            *place = Some(report);
        }
    }

    /// Records the store's answer to the end of a hold, if the counter is recorded. The answer is about the limit that the hold was made
    /// under, which is not known here: it is assumed to have the capacity of the last report.
    pub(super) fn replace(&self, tier: &Tier, share: &Share, at: Timestamp) {
        let Some(sets) = self.sets.get() else { return };
        let hash = self.hash(&tier.key, tier.terms.limit.algorithm());
        let mut set = sets[place(hash)].lock();
        if let Some(known) = set.iter_mut().flatten().find(|known| known.hash == hash)
            && share.remaining <= known.capacity
        {
            known.update(Report::new(hash, known.capacity, share, at));
        }
    }

    /// Returns what is known to be used of a counter now.
    pub(super) fn lookup(&self, key: &Key, limit: &Limit) -> Option<Usage> {
        let hash = self.hash(key, limit.algorithm());
        let set = self.sets.get()?[place(hash)].lock();
        let report = *set.iter().flatten().find(|known| known.hash == hash)?;
        let elapsed = report.received.elapsed();
        let left = report.reset_after.checked_sub(elapsed).filter(|left| !left.is_zero())?;
        let used = match limit.algorithm() {
            // drains evenly until nothing is left
            Algorithm::TokenBucket => {
                let (left, whole) = (left.as_micros(), report.reset_after.as_micros());
                u64::try_from((u128::from(report.used) * left).div_ceil(whole)).unwrap_or(report.used)
            }
            // the times at which its units expire are not known
            Algorithm::FixedWindow
            | Algorithm::SlidingLog
            | Algorithm::SlidingCounter
            | Algorithm::Concurrency => report.used,
        };
        (used > 0).then_some(Usage { used, reset_after: left })
    }

    /// Removes what is known about these counters.
    pub(super) fn remove(&self, counters: &[(Key, Algorithm)]) {
        let Some(sets) = self.sets.get() else { return };
        for (key, algorithm) in counters {
            let hash = self.hash(key, *algorithm);
            for known in sets[place(hash)].lock().iter_mut() {
                if known.is_some_and(|report| report.hash == hash) {
                    *known = None;
                }
            }
        }
    }

    fn hash(&self, key: &Key, algorithm: Algorithm) -> u64 {
        self.hasher.hash_one((key, algorithm))
    }
}

impl Report {
    fn new(hash: u64, capacity: u64, share: &Share, at: Timestamp) -> Self {
        let used = capacity.saturating_sub(share.remaining).saturating_add(share.debt);
        Self { hash, at, received: Instant::now(), capacity, used, reset_after: share.reset_after }
    }

    /// Replaces this report by another one of the same counter, unless it was made before.
    fn update(&mut self, other: Self) {
        let is_recent = other.received.duration_since(self.received) < REORDERING;
        if !is_recent || (other.at, other.used) >= (self.at, self.used) {
            *self = other;
        }
    }
}

/// Returns the index of the set of a counter.
fn place(hash: u64) -> usize {
    let sets = u64::try_from(SETS).expect("a small number");
    usize::try_from(hash % sets).expect("below a small number")
}

#[cfg(test)]
mod tests {
    use sluicegate_core::{Cost, Terms};

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Answers of one call are recorded in any order: that of the last request has the most units used.
    #[tokio::test(start_paused = true)]
    async fn of_reordered_answers_the_latest_decision_applies() {
        let limit = Limit::fixed_window(10, MINUTE).unwrap();
        let tier = Tier { key: Key::without_rule("k").unwrap(), terms: Terms::new(limit, Cost::ONE) };
        let known = KnownUsage::default();
        let record = |used: u64, at_us: u64| {
            let share =
                Share { passes: true, remaining: 10 - used, debt: 0, retry: None, reset_after: MINUTE };
            known.record(&tier, &share, Timestamp::from_micros(at_us));
        };
        let used = || known.lookup(&tier.key, &limit).map(|usage| usage.used);
        assert_eq!(used(), None);
        for position in [3, 10, 1, 7] {
            record(position, 1_000);
        }
        assert_eq!(used(), Some(10), "of one call");
        record(4, 999);
        assert_eq!(used(), Some(10), "of an earlier call");
        record(2, 1_001);
        assert_eq!(used(), Some(2), "of a later call, after a refund");
        tokio::time::advance(REORDERING).await;
        record(1, 500);
        assert_eq!(used(), Some(1), "the store's clock was set back");
    }
}
