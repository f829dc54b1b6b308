//! One shard: a table of counters, what they cost, and what may be forgotten.

use std::sync::Arc;

use hashbrown::HashTable;
use tollgate_core::{Algorithm, State, Timestamp};

use super::table::Budget;
use crate::key::Key;

/// How many entries a coarse sliding log holds.
const COARSE_LOG_ENTRIES: usize = 8;
/// What one coarse counter takes, in a vector that may just have doubled.
pub(super) const COARSE_BYTES: usize =
    2 * size_of::<(Arc<str>, State)>() + COARSE_LOG_ENTRIES * 16 + ALLOCATION_OVERHEAD;
/// How many coarse counters a shard has at least: one for each algorithm, shared by all rules.
pub(super) const MIN_COARSE: usize = Algorithm::ALL.len();
/// How long a counter stays after it equals a fresh one, while there is room: so that a clock that is set
/// back finds it again.
const GRACE_US: u64 = 60 * 1_000_000;
/// How long a shard is not searched again for something to forget.
const SEARCH_PAUSE_US: u64 = 100_000;
/// What the allocator adds to a small allocation, at least.
const ALLOCATION_OVERHEAD: usize = 16;
/// What a log takes for its first entries.
const FIRST_LOG_BYTES: usize = 64;

pub(super) struct Shard {
    counters: HashTable<Counter>,
    /// Counters that stand for all keys for which there was no room, by rule and algorithm. When there are
    /// too many rules for that, the others share those of the rule without a name.
    coarse: Vec<(Arc<str>, State)>,
    max_coarse: usize,
    /// Before this moment the shard is not searched for something to forget.
    search_from_us: u64,
}

struct Counter {
    hash: u64,
    rule: Arc<str>,
    identity: Box<str>,
    state: State,
}

/// A counter that is looked for.
pub(super) struct Slot<'a> {
    pub(super) key: &'a Key,
    pub(super) hash: u64,
    pub(super) algorithm: Algorithm,
}

impl Counter {
    fn is(&self, slot: &Slot<'_>) -> bool {
        self.hash == slot.hash
            && self.state.algorithm() == slot.algorithm
            && *self.identity == *slot.key.identity()
            && *self.rule == *slot.key.rule()
    }

    fn bytes(&self) -> usize {
        bytes_of(self.identity.len()) + self.state.heap_bytes()
    }
}

/// What a counter takes apart from its log. A table that has just grown is 7/16 full.
const fn bytes_of(identity: usize) -> usize {
    (size_of::<Counter>() + 1) * 16 / 7 + identity.next_multiple_of(8) + ALLOCATION_OVERHEAD
}

impl Shard {
    /// An empty shard that has room set aside for so many coarse counters, at least [`MIN_COARSE`].
    pub(super) fn new(max_coarse: usize) -> Self {
        Self { counters: HashTable::new(), coarse: Vec::new(), max_coarse, search_from_us: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.counters.len()
    }

    /// Runs `act` on the state of a counter.
    pub(super) fn with<R>(
        &mut self,
        slot: &Slot<'_>,
        budget: &Budget,
        now: Timestamp,
        act: impl FnOnce(&mut State) -> R,
    ) -> R {
        if let Some(counter) = self.counters.find_mut(slot.hash, |counter| counter.is(slot)) {
            return within_budget(&mut counter.state, budget, act);
        }
        let log = if slot.algorithm == Algorithm::SlidingLog { FIRST_LOG_BYTES } else { 0 };
        let bytes = bytes_of(slot.key.identity().len()) + log;
        if !self.take(bytes, budget, now) {
            return act(self.coarse_state(slot));
        }
        let mut state = self.first_state(slot, now);
        let result = act(&mut state);
        budget.give_back(bytes);
        if state != State::fresh(slot.algorithm) {
            self.insert(slot, state, budget, now);
        }
        result
    }

    pub(super) fn forget(&mut self, slot: &Slot<'_>, budget: &Budget) -> bool {
        match self.counters.find_entry(slot.hash, |counter| counter.is(slot)) {
            Ok(found) => {
                budget.give_back(found.remove().0.bytes());
                true
            }
            Err(_) => false,
        }
    }

    /// Takes memory for a new counter. When it gets tight, the shard first forgets what it can; so every shard
    /// does, before there is none left.
    fn take(&mut self, bytes: usize, budget: &Budget, now: Timestamp) -> bool {
        if budget.is_tight() && now.as_micros() >= self.search_from_us {
            self.search_from_us = now.as_micros() + SEARCH_PAUSE_US;
            self.forget_fresh(now.as_micros(), budget);
        }
        budget.take(bytes)
    }

    /// Forgets every counter that has equalled a fresh one since `moment_us`.
    fn forget_fresh(&mut self, moment_us: u64, budget: &Budget) {
        self.counters.retain(|counter| {
            let stays = counter.state.expires_at().as_micros() > moment_us;
            if !stays {
                budget.give_back(counter.bytes());
            }
            stays
        });
    }

    fn insert(&mut self, slot: &Slot<'_>, state: State, budget: &Budget, now: Timestamp) {
        if self.counters.len() == self.counters.capacity() {
            self.forget_fresh(now.as_micros().saturating_sub(GRACE_US), budget);
        }
        let (rule, identity) = (slot.key.shared_rule(), slot.key.identity().into());
        let counter = Counter { hash: slot.hash, rule, identity, state };
        budget.take_anyway(counter.bytes());
        self.counters.insert_unique(slot.hash, counter, |counter| counter.hash);
    }

    /// What a new counter starts from: nothing, unless its key may have been counted coarsely before. Then
    /// it starts from what the coarse counter holds, so that memory coming free grants nothing.
    fn first_state(&self, slot: &Slot<'_>, now: Timestamp) -> State {
        let mut state = match self.coarse_index(slot) {
            Some(index) if self.coarse[index].1.expires_at() > now => self.coarse[index].1.clone(),
            _ => return State::fresh(slot.algorithm),
        };
        state.limit_entries(usize::MAX);
        state
    }

    fn coarse_state(&mut self, slot: &Slot<'_>) -> &mut State {
        let index = self.coarse_index(slot).unwrap_or_else(|| {
            let own = self.coarse.len() + MIN_COARSE < self.max_coarse;
            let rule = if own { slot.key.shared_rule() } else { Arc::from("") };
            let mut state = State::fresh(slot.algorithm);
            state.limit_entries(COARSE_LOG_ENTRIES);
            self.coarse.push((rule, state));
            self.coarse.len() - 1
        });
        &mut self.coarse[index].1
    }

    fn coarse_index(&self, slot: &Slot<'_>) -> Option<usize> {
        let of_rule = |rule: &str| {
            let is =
                |(other, state): &(Arc<str>, State)| **other == *rule && state.algorithm() == slot.algorithm;
            self.coarse.iter().position(is)
        };
        of_rule(slot.key.rule()).or_else(|| of_rule(""))
    }
}

/// Runs `act` on a state that is there; a log grows only as far as memory allows, and counts more coarsely,
/// never less, beyond that.
fn within_budget<R>(state: &mut State, budget: &Budget, act: impl FnOnce(&mut State) -> R) -> R {
    let Some(growth) = state.next_growth_bytes() else {
        return act(state);
    };
    let before = state.heap_bytes();
    let has_room = budget.take(growth);
    state.limit_entries(if has_room { usize::MAX } else { state.entries() });
    let result = act(state);
    if has_room {
        budget.give_back(growth);
        budget.take_anyway(state.heap_bytes().saturating_sub(before));
    }
    result
}
