//! OverflowCounter counters: each stands for all keys of a rule for which there was no room.
//!
//! They only ever count more than each of their keys has used, so that flooding a store, or freeing its
//! memory, grants nobody anything.

use std::sync::Arc;

use tollgate_core::{Limit, Operation, State, Timestamp};

use super::{budget::allocated, limit_class::is_same, shard::Lookup};

/// How many entries a coarse sliding log holds.
const OVERFLOW_LOG_ENTRIES: usize = 8;
/// What one coarse counter takes, in a vector that may just have doubled.
pub(super) const OVERFLOW_BYTES: usize =
    2 * size_of::<OverflowCounter>() + allocated(OVERFLOW_LOG_ENTRIES * 16);
/// How many coarse counters a shard has at least.
pub(super) const MIN_OVERFLOW: usize = 8;

/// The coarse counters of one shard.
pub(super) struct OverflowCounters {
    counters: Vec<OverflowCounter>,
    max: usize,
}

/// One counter for all keys of a rule under limits of the same windows and rate: others must not share it,
/// or what counts for a long time would be forgotten after a short one.
struct OverflowCounter {
    rule: Option<Arc<str>>,
    limit: Limit,
    state: State,
}

impl OverflowCounter {
    fn is_for(&self, lookup: &Lookup<'_>) -> bool {
        let class = |limit: &Limit| (limit.algorithm(), limit.window_us(), limit.phase_us(), limit.rate());
        is_same(self.rule.as_ref(), lookup.key.shared_rule()) && class(&self.limit) == class(lookup.limit)
    }
}

impl OverflowCounters {
    /// None yet, and room set aside for `max`, at least [`MIN_OVERFLOW`].
    pub(super) fn new(max: usize) -> Self {
        Self { counters: Vec::new(), max }
    }

    /// What a new counter starts from: nothing, unless its key may have been counted coarsely before. Then
    /// it starts from what the coarse counter holds, so that memory coming free grants nothing.
    pub(super) fn first_state(&self, lookup: &Lookup<'_>, now: Timestamp) -> State {
        let mut state = match self.counters.iter().find(|counter| counter.is_for(lookup)) {
            Some(counter) if counter.state.expires_at() > now => counter.state.clone(),
            _ => return State::fresh(lookup.limit.algorithm()),
        };
        state.limit_entries(usize::MAX);
        state
    }

    /// Runs `act` on the counter that a key without one shares with others. What another may have charged is not
    /// refunded; and a key for which there is not even a coarse counter finds its limit used up.
    pub(super) fn with<R>(
        &mut self,
        lookup: &Lookup<'_>,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        match self.place_of(lookup, now) {
            Some(place) if matches!(lookup.operation, Operation::Refund { .. }) => {
                act(&mut self.counters[place].state.clone())
            }
            Some(place) => act(&mut self.counters[place].state),
            None => with_exhausted_state(lookup, now, act),
        }
    }

    fn place_of(&mut self, lookup: &Lookup<'_>, now: Timestamp) -> Option<usize> {
        let known = self.counters.iter().position(|counter| counter.is_for(lookup));
        known.or_else(|| {
            let has_room = self.counters.len() < self.max || self.remove_expired(now);
            has_room.then(|| {
                let mut state = State::fresh(lookup.limit.algorithm());
                state.limit_entries(OVERFLOW_LOG_ENTRIES);
                let rule = lookup.key.shared_rule().cloned();
                self.counters.push(OverflowCounter { rule, limit: *lookup.limit, state });
                self.counters.len() - 1
            })
        })
    }

    /// Forgets the coarse counters that equal a fresh one. Whether there was one.
    fn remove_expired(&mut self, now: Timestamp) -> bool {
        let before = self.counters.len();
        self.counters.retain(|counter| counter.state.expires_at() > now);
        self.counters.len() < before
    }
}

/// Runs `act` on a counter that has nothing left, and that nobody keeps.
pub(super) fn with_exhausted_state<R>(
    lookup: &Lookup<'_>,
    now: Timestamp,
    act: &mut dyn FnMut(&mut State) -> R,
) -> R {
    let mut used_up = State::fresh(lookup.limit.algorithm());
    used_up.charge(lookup.limit, now, lookup.limit.capacity());
    act(&mut used_up)
}
