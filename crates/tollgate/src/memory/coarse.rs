//! Coarse counters: each stands for all keys of a rule for which there was no room.
//!
//! They only ever count more than each of their keys has used, so that flooding a store, or freeing its
//! memory, grants nobody anything.

use std::sync::Arc;

use tollgate_core::{Limit, Operation, State, Timestamp};

use super::{budget::allocated, kinds::is_same, shard::Slot};

/// How many entries a coarse sliding log holds.
const COARSE_LOG_ENTRIES: usize = 8;
/// What one coarse counter takes, in a vector that may just have doubled.
pub(super) const COARSE_BYTES: usize = 2 * size_of::<Coarse>() + allocated(COARSE_LOG_ENTRIES * 16);
/// How many coarse counters a shard has at least.
pub(super) const MIN_COARSE: usize = 8;

/// The coarse counters of one shard.
pub(super) struct CoarseCounters {
    counters: Vec<Coarse>,
    max: usize,
}

/// One counter for all keys of a rule under limits of the same windows and rate: others must not share it,
/// or what counts for a long time would be forgotten after a short one.
struct Coarse {
    rule: Option<Arc<str>>,
    limit: Limit,
    state: State,
}

impl Coarse {
    fn is_for(&self, slot: &Slot<'_>) -> bool {
        let kind = |limit: &Limit| (limit.algorithm(), limit.window_us(), limit.phase_us(), limit.rate());
        is_same(self.rule.as_ref(), slot.key.shared_rule()) && kind(&self.limit) == kind(slot.limit)
    }
}

impl CoarseCounters {
    /// None yet, and room set aside for `max`, at least [`MIN_COARSE`].
    pub(super) fn new(max: usize) -> Self {
        Self { counters: Vec::new(), max }
    }

    /// What a new counter starts from: nothing, unless its key may have been counted coarsely before. Then
    /// it starts from what the coarse counter holds, so that memory coming free grants nothing.
    pub(super) fn first_state(&self, slot: &Slot<'_>, now: Timestamp) -> State {
        let mut state = match self.counters.iter().find(|coarse| coarse.is_for(slot)) {
            Some(coarse) if coarse.state.expires_at() > now => coarse.state.clone(),
            _ => return State::fresh(slot.limit.algorithm()),
        };
        state.limit_entries(usize::MAX);
        state
    }

    /// Runs `act` on the counter that a key without one shares with others. What another may have charged is not
    /// refunded; and a key for which there is not even a coarse counter finds its limit used up.
    pub(super) fn with<R>(
        &mut self,
        slot: &Slot<'_>,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        match self.place_of(slot, now) {
            Some(place) if matches!(slot.operation, Operation::Refund { .. }) => {
                act(&mut self.counters[place].state.clone())
            }
            Some(place) => act(&mut self.counters[place].state),
            None => with_used_up(slot, now, act),
        }
    }

    fn place_of(&mut self, slot: &Slot<'_>, now: Timestamp) -> Option<usize> {
        let known = self.counters.iter().position(|coarse| coarse.is_for(slot));
        known.or_else(|| {
            let has_room = self.counters.len() < self.max || self.forget_fresh(now);
            has_room.then(|| {
                let mut state = State::fresh(slot.limit.algorithm());
                state.limit_entries(COARSE_LOG_ENTRIES);
                let rule = slot.key.shared_rule().cloned();
                self.counters.push(Coarse { rule, limit: *slot.limit, state });
                self.counters.len() - 1
            })
        })
    }

    /// Forgets the coarse counters that equal a fresh one. Whether there was one.
    fn forget_fresh(&mut self, now: Timestamp) -> bool {
        let before = self.counters.len();
        self.counters.retain(|coarse| coarse.state.expires_at() > now);
        self.counters.len() < before
    }
}

/// Runs `act` on a counter that has nothing left, and that nobody keeps.
pub(super) fn with_used_up<R>(slot: &Slot<'_>, now: Timestamp, act: &mut dyn FnMut(&mut State) -> R) -> R {
    let mut used_up = State::fresh(slot.limit.algorithm());
    used_up.charge(slot.limit, now, slot.limit.capacity());
    act(&mut used_up)
}
