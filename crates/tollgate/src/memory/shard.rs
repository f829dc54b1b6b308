//! One shard: a table of counters, what they cost, and what may be forgotten.

use std::sync::Arc;

use hashbrown::HashTable;
use tollgate_core::{Algorithm, Limit, Operation, State, Timestamp};

use super::table::Budget;
use crate::key::Key;

/// How many entries a coarse sliding log holds.
const COARSE_LOG_ENTRIES: usize = 8;
/// What one coarse counter takes, in a vector that may just have doubled.
pub(super) const COARSE_BYTES: usize = 2 * size_of::<Coarse>() + allocated(COARSE_LOG_ENTRIES * 16);
/// How many coarse counters a shard has at least.
pub(super) const MIN_COARSE: usize = 8;
/// How long a counter stays after it equals a fresh one, while there is room: so that a clock that is set
/// back finds it again.
const GRACE_US: u64 = 60 * 1_000_000;
/// How long a shard is not searched again for something to forget.
const SEARCH_PAUSE_US: u64 = 100_000;
/// What a log takes for its first entries.
const FIRST_LOG_BYTES: usize = allocated(64);
/// How many counters a table has room for when it is first made.
const FIRST_TABLE: usize = 4;

pub(super) struct Shard {
    counters: HashTable<Counter>,
    /// Counters that stand for all keys for which there was no room.
    coarse: Vec<Coarse>,
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

/// One counter for all keys of a rule under limits of the same windows and rate: others must not share it,
/// or what counts for a long time would be forgotten after a short one.
struct Coarse {
    rule: Arc<str>,
    limit: Limit,
    state: State,
}

/// A counter that is looked for, and what for.
pub(super) struct Slot<'a> {
    pub(super) key: &'a Key,
    pub(super) hash: u64,
    pub(super) limit: &'a Limit,
    pub(super) operation: Operation,
}

impl Slot<'_> {
    fn algorithm(&self) -> Algorithm {
        self.limit.algorithm()
    }
}

impl Counter {
    fn is(&self, key: &Key, hash: u64, algorithm: Algorithm) -> bool {
        self.hash == hash
            && self.state.algorithm() == algorithm
            && *self.identity == *key.identity()
            && *self.rule == *key.rule()
    }

    /// What it takes outside of the table.
    fn bytes(&self) -> usize {
        allocated(self.identity.len()) + self.state.heap_bytes()
    }
}

/// What the allocator takes for an allocation of so many bytes.
const fn allocated(bytes: usize) -> usize {
    let with_header = (bytes + 8).next_multiple_of(16);
    if with_header < 32 { 32 } else { with_header }
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
        let is_it = |counter: &Counter| counter.is(slot.key, slot.hash, slot.algorithm());
        if let Some(counter) = self.counters.find_mut(slot.hash, is_it) {
            return within_budget(&mut counter.state, budget, act);
        }
        let bytes = self.bytes_for(slot);
        if !budget.take(bytes) {
            return self.with_coarse(slot, now, act);
        }
        let first = self.first_state(slot, now);
        let mut state = first.clone();
        let result = act(&mut state);
        budget.give_back(bytes);
        if state != first {
            self.insert(slot, state, budget, now);
        }
        result
    }

    pub(super) fn forget(&mut self, key: &Key, hash: u64, algorithm: Algorithm, budget: &Budget) -> bool {
        match self.counters.find_entry(hash, |counter| counter.is(key, hash, algorithm)) {
            Ok(found) => {
                budget.give_back(found.remove().0.bytes());
                true
            }
            Err(_) => false,
        }
    }

    /// Forgets what equals a fresh counter, unless that was done a moment ago. For when memory gets tight.
    pub(super) fn make_room(&mut self, budget: &Budget, now: Timestamp) {
        if now.as_micros() >= self.search_from_us {
            self.search_from_us = now.as_micros() + SEARCH_PAUSE_US;
            self.forget_fresh(now.as_micros(), budget);
        }
    }

    /// Forgets every counter that has equalled a fresh one since `moment_us`.
    fn forget_fresh(&mut self, moment_us: u64, budget: &Budget) {
        let table_before = self.counters.allocation_size();
        self.counters.retain(|counter| {
            let stays = counter.state.expires_at().as_micros() > moment_us;
            if !stays {
                budget.give_back(counter.bytes());
            }
            stays
        });
        if self.counters.len() < self.counters.capacity() / 4 {
            self.counters.shrink_to(self.counters.len() * 2, |counter| counter.hash);
            budget.give_back(table_before - self.counters.allocation_size());
        }
    }

    /// What a new counter takes, with the table's growth if it has to grow.
    fn bytes_for(&self, slot: &Slot<'_>) -> usize {
        let log = if slot.algorithm() == Algorithm::SlidingLog { FIRST_LOG_BYTES } else { 0 };
        let full = self.counters.len() == self.counters.capacity();
        let first_table = 2 * FIRST_TABLE * size_of::<Counter>();
        let growth = if full { self.counters.allocation_size().max(first_table) } else { 0 };
        allocated(slot.key.identity().len()) + log + growth
    }

    fn insert(&mut self, slot: &Slot<'_>, state: State, budget: &Budget, now: Timestamp) {
        if self.counters.len() == self.counters.capacity() {
            self.forget_fresh(now.as_micros().saturating_sub(GRACE_US), budget);
        }
        let table_before = self.counters.allocation_size();
        let (rule, identity) = (slot.key.shared_rule(), slot.key.identity().into());
        let counter = Counter { hash: slot.hash, rule, identity, state };
        budget.take_anyway(counter.bytes());
        self.counters.insert_unique(slot.hash, counter, |counter| counter.hash);
        budget.take_anyway(self.counters.allocation_size() - table_before);
    }

    /// What a new counter starts from: nothing, unless its key may have been counted coarsely before. Then
    /// it starts from what the coarse counter holds, so that memory coming free grants nothing.
    fn first_state(&self, slot: &Slot<'_>, now: Timestamp) -> State {
        let mut state = match self.coarse.iter().find(|coarse| coarse.is_for(slot)) {
            Some(coarse) if coarse.state.expires_at() > now => coarse.state.clone(),
            _ => return State::fresh(slot.algorithm()),
        };
        state.limit_entries(usize::MAX);
        state
    }

    /// Runs `act` on the counter that a key without one shares with others. What another may have charged is not
    /// refunded; and a key for which there is not even a coarse counter finds its limit used up.
    fn with_coarse<R>(&mut self, slot: &Slot<'_>, now: Timestamp, act: impl FnOnce(&mut State) -> R) -> R {
        let known = self.coarse.iter().position(|coarse| coarse.is_for(slot));
        let place = known.or_else(|| {
            let has_room = self.coarse.len() < self.max_coarse || self.forget_coarse(now);
            has_room.then(|| {
                let mut state = State::fresh(slot.algorithm());
                state.limit_entries(COARSE_LOG_ENTRIES);
                self.coarse.push(Coarse { rule: slot.key.shared_rule(), limit: *slot.limit, state });
                self.coarse.len() - 1
            })
        });
        match place {
            Some(place) if matches!(slot.operation, Operation::Refund { .. }) => {
                act(&mut self.coarse[place].state.clone())
            }
            Some(place) => act(&mut self.coarse[place].state),
            None => {
                let mut used_up = State::fresh(slot.algorithm());
                used_up.charge(slot.limit, now, slot.limit.capacity());
                act(&mut used_up)
            }
        }
    }

    /// Forgets a coarse counter that equals a fresh one. Whether there was one.
    fn forget_coarse(&mut self, now: Timestamp) -> bool {
        let before = self.coarse.len();
        self.coarse.retain(|coarse| coarse.state.expires_at() > now);
        self.coarse.len() < before
    }
}

impl Coarse {
    fn is_for(&self, slot: &Slot<'_>) -> bool {
        let kind = |limit: &Limit| (limit.algorithm(), limit.window_us(), limit.phase_us(), limit.rate());
        *self.rule == *slot.key.rule() && kind(&self.limit) == kind(slot.limit)
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
