//! Overflow counters: each one is shared by all keys of a rule that do not fit into memory.
//!
//! An overflow counter never counts less than any of its keys has used, so neither flooding the store nor freeing its memory
//! admits additional requests.

use std::sync::Arc;

use sluicegate_core::{Algorithm, Limit, Operation, State, Timestamp, Window, limit::Rate};

use super::{budget::allocated, limit_class::is_same_rule, shard::Lookup};

/// Number of entries of a sliding log that is an overflow counter.
const OVERFLOW_LOG_ENTRIES: usize = 8;
/// Bytes of one overflow counter, in a vector that may just have doubled.
pub(super) const OVERFLOW_BYTES: usize =
    2 * size_of::<OverflowCounter>() + allocated(OVERFLOW_LOG_ENTRIES * 16);
/// Smallest number of overflow counters per shard.
pub(super) const MIN_OVERFLOW: usize = 8;

/// The overflow counters of one shard.
pub(super) struct OverflowCounters {
    counters: Vec<OverflowCounter>,
    max: usize,
    /// Number of checks and charges that used an overflow counter. The lock of the shard protects it, so that decisions of other shards do
    /// not contend for it.
    decisions: u64,
}

/// One counter for all keys of a rule under limits of the same window and rate. Other limits must not share it: units that
/// count for a long window would expire after a short one.
struct OverflowCounter {
    rule: Option<Arc<str>>,
    parameters: Parameters,
    state: State,
}

/// The parts of a limit that determine how long units count.
#[derive(PartialEq, Eq)]
struct Parameters {
    algorithm: Algorithm,
    window: Window,
    phase_us: u64,
    rate: Rate,
}

impl Parameters {
    fn of(limit: &Limit) -> Self {
        Self {
            algorithm: limit.algorithm(),
            window: limit.window_setting(),
            phase_us: limit.phase_us(),
            rate: limit.rate(),
        }
    }
}

impl OverflowCounter {
    fn is_for(&self, lookup: &Lookup<'_>) -> bool {
        is_same_rule(self.rule.as_ref(), lookup.key.shared_rule())
            && self.parameters == Parameters::of(lookup.limit)
    }
}

impl OverflowCounters {
    /// Creates an empty set with memory reserved for `max` counters, at least [`MIN_OVERFLOW`].
    pub(super) fn new(max: usize) -> Self {
        Self { counters: Vec::new(), max, decisions: 0 }
    }

    /// Returns the initial state of a new counter: fresh, or a copy of the overflow counter if the key may have used it before, so
    /// that freed memory admits no additional requests.
    pub(super) fn initial_state(&self, lookup: &Lookup<'_>, now: Timestamp) -> State {
        let mut state = match self.counters.iter().find(|counter| counter.is_for(lookup)) {
            Some(counter) if counter.state.expires_at() > now => counter.state.clone(),
            _ => return State::fresh(lookup.limit.algorithm()),
        };
        state.set_max_entries(usize::MAX);
        state
    }

    /// Returns the number of checks and charges that used an overflow counter.
    pub(super) fn decisions(&self) -> u64 {
        self.decisions
    }

    /// Records that an operation used an overflow counter.
    pub(super) fn record(&mut self, operation: Operation) {
        if matches!(operation, Operation::Check | Operation::Charge) {
            self.decisions += 1;
        }
    }

    /// Runs `act` on the overflow counter of a key. A refund changes nothing, because another key may have charged the units. If
    /// there is no overflow counter either, the limit is exhausted.
    pub(super) fn with<R>(
        &mut self,
        lookup: &Lookup<'_>,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        self.record(lookup.operation);
        match self.find_or_insert(lookup, now) {
            Some(index) if matches!(lookup.operation, Operation::Refund { .. }) => {
                act(&mut self.counters[index].state.clone())
            }
            Some(index) => act(&mut self.counters[index].state),
            None => with_exhausted_state(lookup, now, act),
        }
    }

    fn find_or_insert(&mut self, lookup: &Lookup<'_>, now: Timestamp) -> Option<usize> {
        let known = self.counters.iter().position(|counter| counter.is_for(lookup));
        known.or_else(|| {
            let has_room = self.counters.len() < self.max || self.remove_expired(now);
            has_room.then(|| {
                let mut state = State::fresh(lookup.limit.algorithm());
                state.set_max_entries(OVERFLOW_LOG_ENTRIES);
                let rule = lookup.key.shared_rule().cloned();
                let parameters = Parameters::of(lookup.limit);
                self.counters.push(OverflowCounter { rule, parameters, state });
                self.counters.len() - 1
            })
        })
    }

    /// Removes the overflow counters that equal a fresh one, and returns whether there was one.
    fn remove_expired(&mut self, now: Timestamp) -> bool {
        let before = self.counters.len();
        self.counters.retain(|counter| counter.state.expires_at() > now);
        self.counters.len() < before
    }
}

/// Runs `act` on a temporary counter whose limit is exhausted.
pub(super) fn with_exhausted_state<R>(
    lookup: &Lookup<'_>,
    now: Timestamp,
    act: &mut dyn FnMut(&mut State) -> R,
) -> R {
    let mut exhausted = State::fresh(lookup.limit.algorithm());
    exhausted.charge(lookup.limit, now, lookup.limit.capacity());
    act(&mut exhausted)
}

#[cfg(test)]
mod tests {
    use sluicegate_core::{Cost, Terms};

    use super::{
        super::{
            MemoryStore,
            tests::{HOUR, check, fill, limits, small_store},
        },
        *,
    };
    use crate::{
        check::{Check, Tier},
        key::Key,
    };

    fn overflow_decisions(store: &MemoryStore) -> u64 {
        store.usage().overflow_decisions
    }

    #[test]
    fn only_checks_and_charges_of_keys_without_a_counter_are_recorded() {
        for limit in limits(3, HOUR) {
            let (store, _) = small_store();
            check(&store, "known", &limit);
            assert_eq!(overflow_decisions(&store), 0, "{limit:?}: the store has room");
            fill(&store, &limit);
            let before = overflow_decisions(&store);
            assert!(before >= 5_000, "{limit:?}: the last keys do not fit");
            let apply = |name: &str, operation| {
                let key = Key::without_rule(name).unwrap();
                store.decide_one(&key, &Terms::new(limit, Cost::ONE), operation, 1);
            };
            apply("late", Operation::Check);
            apply("late", Operation::Charge);
            apply("late", Operation::Peek);
            apply("late", Operation::Refund { at: None });
            apply("known", Operation::Check);
            assert_eq!(overflow_decisions(&store), before + 2, "{limit:?}");
        }
    }

    #[test]
    fn each_tier_of_a_check_is_recorded_once() {
        for limit in limits(3, HOUR) {
            let (store, _) = small_store();
            check(&store, "known", &limit);
            fill(&store, &limit);
            let before = overflow_decisions(&store);
            let tier = |name: &str| Tier {
                key: Key::without_rule(name).unwrap(),
                terms: Terms::new(limit, Cost::ONE),
            };
            let tiers = || vec![tier("late"), tier("later"), tier("known")];
            store.decide_all(&[Check::new(Operation::Check, tiers()).unwrap()]);
            assert_eq!(overflow_decisions(&store), before + 2, "{limit:?}");
            store.decide_all(&[Check::new(Operation::Peek, tiers()).unwrap()]);
            assert_eq!(overflow_decisions(&store), before + 2, "{limit:?}");
        }
    }

    #[test]
    fn a_known_key_that_is_denied_for_lack_of_memory_is_recorded() {
        let limit = Limit::token_bucket(3, HOUR).unwrap();
        let (store, _) = small_store();
        fill(&store, &limit);
        let before = overflow_decisions(&store);
        // a separate window for each key needs a separate limit class
        let denied = (0..20_000_u64)
            .map(|key| Limit::token_bucket(3, HOUR + std::time::Duration::from_micros(key + 1)).unwrap())
            .enumerate()
            .find(|(key, own)| check(&store, &format!("flood:{key}"), own).charged == 0);
        assert!(denied.is_some() && overflow_decisions(&store) > before);
    }

    #[test]
    fn a_full_store_has_used_nearly_all_memory_that_is_not_kept_free() {
        let (store, _) = small_store();
        fill(&store, &Limit::token_bucket(3, HOUR).unwrap());
        let usage = store.usage();
        assert!(usage.bytes <= usage.max_bytes && usage.bytes > usage.max_bytes / 100 * 95, "{usage:?}");
    }
}
