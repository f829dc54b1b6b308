//! The available units of counters in their last answers to this process.
//!
//! If all tiers of a check over several nodes had available units, the check is reserved without a peek first. This
//! never admits more than the limits allow, because the script decides, and a reservation is refunded if a later node
//! denies. The recorded units only determine whether to risk an unnecessary round trip for the peek, or a reservation
//! that has to be refunded.

use std::{
    collections::HashMap,
    hash::BuildHasher,
    iter::repeat,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use sluicegate_core::step::Mode;

use crate::{
    check::{Check, LeaseCall, Tier},
    hashing::RandomKeyedHash,
    store::{CheckAnswer, StoreError},
};

/// Number of recorded counters, at 8 bytes each. A counter replaces another one with the same index.
const MAX_COUNTERS: usize = 1 << 17;
/// For how many checks of the same size a counter must have had available units: one for this check, and one for
/// concurrent checks of other processes.
const REQUIRED_CHECKS: u64 = 2;

/// The free units of each counter in its last answer.
pub(super) struct RecentCapacity {
    /// The fingerprint of key and limit in the upper half, the free units in the lower half.
    counters: Box<[AtomicU64]>,
    hasher: RandomKeyedHash,
}

impl Default for RecentCapacity {
    fn default() -> Self {
        let counters = (0..MAX_COUNTERS).map(|_| AtomicU64::new(0)).collect();
        Self { counters, hasher: RandomKeyedHash::default() }
    }
}

/// The record of a counter. The limit is part of the fingerprint, so an answer under another limit is not used.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Entry {
    index: usize,
    fingerprint: u32,
}

impl RecentCapacity {
    /// Records the free units of the counters of each check; 0 for those without an answer.
    pub(super) fn record(&self, checks: &[Check], outcomes: &[Result<CheckAnswer, StoreError>]) {
        // the end of a lease does not report free units
        let is_end = |check: &Check| matches!(check.lease(), Some(LeaseCall::End { .. }));
        for (check, outcome) in checks.iter().zip(outcomes).filter(|(check, _)| !is_end(check)) {
            let answers = outcome.as_ref().map_or(&[][..], |answered| &answered.answers);
            let available = answers.iter().map(|answer| answer.available).chain(repeat(0));
            for (tier, available) in check.tiers().iter().zip(available) {
                let Entry { index, fingerprint } = self.entry(tier);
                let units = u32::try_from(available.max(0)).unwrap_or(u32::MAX);
                self.counters[index].store(u64::from(fingerprint) << 32 | u64::from(units), Relaxed);
            }
        }
    }

    /// Returns, for each check of a batch, whether all of its counters had enough free units for it and the checks before it.
    pub(super) fn is_sufficient(&self, checks: &[Check]) -> Vec<bool> {
        let mut taken: HashMap<Entry, u64> = HashMap::new();
        let is_sufficient = |check: &Check| {
            let mut is_enough = true;
            for tier in check.tiers() {
                let entry = self.entry(tier);
                let units = tier.terms.cost.units().saturating_mul(u64::from(check.count()));
                let taken = taken.entry(entry).or_default();
                let wanted = taken.saturating_add(units.saturating_mul(REQUIRED_CHECKS)).max(1);
                // a shadow tier does not deny
                is_enough &= tier.terms.mode == Mode::Shadow || self.units(entry) >= wanted;
                *taken = taken.saturating_add(units);
            }
            is_enough
        };
        checks.iter().map(is_sufficient).collect()
    }

    /// Returns the recorded free units, or 0 without a record.
    fn units(&self, entry: Entry) -> u64 {
        let counter = self.counters[entry.index].load(Relaxed);
        if counter >> 32 == u64::from(entry.fingerprint) { counter & u64::from(u32::MAX) } else { 0 }
    }

    fn entry(&self, tier: &Tier) -> Entry {
        let limit = &tier.terms.limit;
        let counter = self.hasher.hash_one((&tier.key, limit.algorithm()));
        let fingerprint = self.hasher.hash_one((counter, limit)) >> 32;
        Entry {
            index: usize::try_from(counter % MAX_COUNTERS as u64).expect("a remainder below MAX_COUNTERS"),
            fingerprint: u32::try_from(fingerprint).expect("the upper half of a hash"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sluicegate_core::{Answer, Cost, Limit, Operation, Terms, Timestamp};

    use super::*;
    use crate::key::Key;

    fn tier(key: &str, amount: u64, cost: u32) -> Tier {
        let limit = Limit::token_bucket(amount, Duration::from_secs(60)).unwrap();
        Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(limit, Cost::from(cost)) }
    }

    fn check(tiers: Vec<Tier>) -> Check {
        Check::new(Operation::Check, tiers).unwrap()
    }

    fn record(capacity: &RecentCapacity, tier: Tier, available: i64) {
        let answer = Answer { passes: 1, charged: 1, available, ..Answer::NONE };
        let answered = CheckAnswer { at: Timestamp::default(), answers: vec![answer] };
        capacity.record(&[check(vec![tier])], &[Ok(answered)]);
    }

    #[test]
    fn a_counter_needs_free_units_for_two_such_checks_under_the_same_limit() {
        let capacity = RecentCapacity::default();
        let is_sufficient = |check: Check| capacity.is_sufficient(&[check])[0];
        assert!(!is_sufficient(check(vec![tier("a", 10, 1)])), "nothing is recorded");
        record(&capacity, tier("a", 10, 1), 4);
        assert!(is_sufficient(check(vec![tier("a", 10, 2)])));
        assert!(!is_sufficient(check(vec![tier("a", 10, 3)])));
        assert!(is_sufficient(check(vec![tier("a", 10, 1)]).times(2)));
        assert!(!is_sufficient(check(vec![tier("a", 10, 1)]).times(3)));
        assert!(
            !is_sufficient(check(vec![tier("a", 10, 1), tier("b", 10, 1)])),
            "every tier needs free units"
        );
        record(&capacity, tier("b", 10, 1), i64::MAX);
        assert!(is_sufficient(check(vec![tier("a", 10, 1), tier("b", 10, 1)])));
        record(&capacity, tier("b", 10, 1), -5);
        assert!(!is_sufficient(check(vec![tier("b", 10, 0)])), "a counter in debt denies cost 0");
        record(&capacity, tier("a", 11, 1), 5);
        assert!(!is_sufficient(check(vec![tier("a", 10, 1)])), "the limit has changed since");
        assert!(is_sufficient(check(vec![tier("a", 11, 1)])));
        capacity.record(&[check(vec![tier("a", 11, 1)])], &[Err(StoreError::NotRun(String::new()))]);
        assert!(!is_sufficient(check(vec![tier("a", 11, 1)])), "there was no answer");
    }

    #[test]
    fn checks_of_one_batch_share_the_free_units() {
        let capacity = RecentCapacity::default();
        record(&capacity, tier("a", 10, 1), 4);
        let checks = |costs: [u32; 4]| costs.map(|cost| check(vec![tier("a", 10, cost)]));
        assert_eq!(capacity.is_sufficient(&checks([1, 1, 1, 1])), [true, true, true, false]);
        // they want 2, then 1 + 4, then 3 + 2, then 4 + 2
        assert_eq!(capacity.is_sufficient(&checks([1, 2, 1, 1])), [true, false, false, false]);
    }
}
