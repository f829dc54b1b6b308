//! One shard: a table of counters, its memory use, and the removal of expired counters.
//!
//! The counters are in a slab. An index with four bytes per counter finds them by hash. A decision touches few cache lines, and
//! growing moves only the index.

use sluicegate_core::{
    Algorithm, Answer, Limit, Operation, Scale, Snapshot, State, Terms, Timestamp,
    hold::{Holds, LiveHolds},
    step::step,
};

use super::{
    budget::Budget,
    entry::{Entry, Log},
    hashing::Hashing,
    held_counters::HeldCounters,
    index::{Index, MAX_IDS},
    limit_class::{LimitClasses, is_same_rule},
    overflow::{OverflowCounters, with_exhausted_state},
    slab::Slab,
};
use crate::key::Key;

/// How long a counter is kept after it equals a fresh one, if memory allows, so that it still exists if the clock is set
/// back.
const GRACE_US: u64 = 60 * 1_000_000;
/// Minimum time between two sweeps of a shard for expired counters.
const SWEEP_INTERVAL_US: u64 = 100_000;
/// Number of counters per allocation: 3 KiB.
const CHUNK: usize = 64;

/// In this order, so that the fields that every decision reads are next to the lock.
#[repr(C)]
pub(super) struct Shard {
    index: Index,
    entries: Slab<Entry, CHUNK>,
    classes: LimitClasses,
    hashing: Hashing,
    overflow: OverflowCounters,
    /// The holds of counters that have any.
    holds: HeldCounters,
    /// Bytes of index, entries and classes that the budget includes.
    accounted_bytes: usize,
    /// Earliest time of the next sweep.
    next_sweep_us: u64,
}

/// The lookup of a counter for an operation.
pub(super) struct Lookup<'a> {
    pub(super) key: &'a Key,
    pub(super) hash: u64,
    pub(super) limit: &'a Limit,
    pub(super) operation: Operation,
    pub(super) room: Room,
}

/// Where a counter without memory is decided.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// By the overflow counter of its rule.
    Shared,
    /// By its own counter, whose memory is reserved. A counter with holds exceeds the memory if necessary, because a hold cannot be settled
    /// on an overflow counter.
    Own,
}

impl Shard {
    /// Creates an empty shard with memory reserved for `max_overflow` overflow counters.
    pub(super) fn new(max_overflow: usize, hashing: Hashing) -> Self {
        Self {
            index: Index::default(),
            entries: Slab::default(),
            classes: LimitClasses::default(),
            hashing,
            overflow: OverflowCounters::new(max_overflow),
            holds: HeldCounters::default(),
            accounted_bytes: 0,
            next_sweep_us: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of checks and charges that used an overflow counter.
    pub(super) fn overflow_decisions(&self) -> u64 {
        self.overflow.decisions()
    }

    /// Returns the counter of a check or peek if it exists and was written under the window or rate of the limit. A decision
    /// then changes only its numbers. This is the fast path of nearly every decision.
    #[inline(always)]
    fn packed_counter(&mut self, lookup: &Lookup<'_>) -> Option<(Scale, &mut [u64; 3])> {
        if !matches!(lookup.operation, Operation::Check | Operation::Peek) {
            return None;
        }
        let id = self.find(lookup.key, lookup.hash, lookup.limit.algorithm())?;
        match self.entries.get_mut(id) {
            Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. } => {
                let scale = self.classes.get(*class).scale;
                (Some(scale) == Scale::of(lookup.limit)).then_some((scale, numbers))
            }
            Entry::Log(_) => None,
        }
    }

    /// Decides for `count` identical requests.
    #[inline(always)]
    pub(super) fn decide(
        &mut self,
        lookup: &Lookup<'_>,
        terms: &Terms,
        count: u32,
        budget: &Budget,
        now: Timestamp,
    ) -> Answer {
        let operation = lookup.operation;
        match self.packed_counter(lookup) {
            Some((scale, numbers)) => scale.check(numbers, terms, operation, count, now),
            None => self.with(lookup, budget, now, &mut |state| step(state, terms, operation, count, now)),
        }
    }

    /// Runs `act` once on the state of a counter.
    pub(super) fn with<R>(
        &mut self,
        lookup: &Lookup<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let Some(id) = self.find(lookup.key, lookup.hash, lookup.limit.algorithm()) else {
            return self.with_new(lookup, budget, now, act);
        };
        match self.entries.get_mut(id) {
            Entry::Log(log) => within_budget(&mut log.state, budget, act),
            Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. } => {
                let scale = self.classes.get(*class).scale;
                if Some(scale) != Scale::of(lookup.limit) {
                    return self.with_changed_limit(id, lookup, budget, now, act);
                }
                let mut state = scale.unpack(*numbers);
                let result = act(&mut state);
                *numbers = packed(&state).1;
                result
            }
        }
    }

    /// Returns the holds of a counter, if it has any.
    pub(super) fn holds(&self, key: &Key, algorithm: Algorithm) -> Option<&Holds> {
        self.holds.get(key, algorithm)
    }

    /// Records that a hold was repeated.
    pub(super) fn record_repetition(&mut self, lookup: &Lookup<'_>, id: &[u8], now: Timestamp) {
        self.holds.record_repetition(lookup.key, lookup.limit.algorithm(), id, now);
    }

    /// Whether the id of any hold is kept.
    pub(super) fn keeps_hold_ids(&self) -> bool {
        self.holds.keeps_ids()
    }

    /// Returns when the first of the holds that have ended was settled or expired.
    pub(super) fn first_ended_hold(&self, now: Timestamp) -> Option<Timestamp> {
        self.holds.first_end(now)
    }

    /// Forgets a bounded number of holds that have ended, the oldest first, and returns whether there were any.
    pub(super) fn forget_ended_holds(&mut self, budget: &Budget, now: Timestamp) -> bool {
        self.holds.forget_ended(budget, now)
    }

    /// Returns the additional bytes for a counter: none if it exists. `None` if the shard has the maximum number of counters.
    pub(super) fn growth_bytes(&self, lookup: &Lookup<'_>) -> Option<usize> {
        if self.find(lookup.key, lookup.hash, lookup.limit.algorithm()).is_some() {
            return Some(self.classes.growth_bytes());
        }
        (self.entries.len() < MAX_IDS).then(|| self.new_counter_bytes(lookup))
    }

    fn new_counter_bytes(&self, lookup: &Lookup<'_>) -> usize {
        Entry::initial_heap_bytes(lookup.key, lookup.limit.algorithm())
            + self.entries.growth_bytes()
            + self.classes.growth_bytes()
            + self.index.growth_bytes()
    }

    /// Refunds expired holds. Returns the number of holds that were removed.
    pub(super) fn release_expired(&mut self, lookup: &Lookup<'_>, budget: &Budget, now: Timestamp) -> u32 {
        let algorithm = lookup.limit.algorithm();
        if self.holds(lookup.key, algorithm).is_none() {
            return 0;
        }
        if self.find(lookup.key, lookup.hash, algorithm).is_some() {
            return self.with_holds(lookup, budget, now, |state, holds| {
                holds.release_expired(state, lookup.limit, now)
            });
        }
        // the counter does not exist, so there is nothing to refund
        let mut taken = self.holds.take_or_new(lookup.key, algorithm);
        let released = taken.holds.release_expired(&mut State::fresh(algorithm), lookup.limit, now);
        self.holds.put_back(taken, budget);
        released
    }

    /// Returns the live holds of a counter.
    pub(super) fn live_holds(&self, key: &Key, algorithm: Algorithm, now: Timestamp) -> LiveHolds {
        self.holds(key, algorithm).map_or_else(LiveHolds::default, |holds| holds.live(now))
    }

    /// Runs `act` once on the state of a counter and its holds.
    pub(super) fn with_holds<R>(
        &mut self,
        lookup: &Lookup<'_>,
        budget: &Budget,
        now: Timestamp,
        mut act: impl FnMut(&mut State, &mut Holds) -> R,
    ) -> R {
        let algorithm = lookup.limit.algorithm();
        let mut taken = self.holds.take_or_new(lookup.key, algorithm);
        let result = self.with(lookup, budget, now, &mut |state| act(state, &mut taken.holds));
        if !algorithm.properties().has_window
            && !taken.holds.has_indexed()
            && let Some(id) = self.find(lookup.key, lookup.hash, algorithm)
        {
            self.remove(id, budget);
        }
        self.holds.put_back(taken, budget);
        result
    }

    /// Returns the snapshot of a counter at `now`; that of a fresh one if it does not exist.
    pub(super) fn snapshot(&self, key: &Key, hash: u64, limit: &Limit, now: Timestamp) -> Snapshot {
        let Some(id) = self.find(key, hash, limit.algorithm()) else {
            return State::fresh(limit.algorithm()).snapshot(limit, now);
        };
        match self.entries.get(id) {
            Entry::Log(log) => log.state.snapshot(limit, now),
            Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. } => {
                self.classes.get(*class).scale.unpack(*numbers).snapshot(limit, now)
            }
        }
    }

    pub(super) fn remove_counter(
        &mut self,
        key: &Key,
        hash: u64,
        algorithm: Algorithm,
        budget: &Budget,
    ) -> bool {
        if let Some(mut taken) = self.holds.take(key, algorithm) {
            taken.holds.reset();
            self.holds.put_back(taken, budget);
        }
        let found = self.find(key, hash, algorithm);
        if let Some(id) = found {
            self.remove(id, budget);
        }
        found.is_some()
    }

    /// Removes expired counters, unless that was done less than [`SWEEP_INTERVAL_US`] ago. Called when memory is nearly full.
    pub(super) fn sweep(&mut self, budget: &Budget, now: Timestamp) {
        if now.as_micros() >= self.next_sweep_us {
            self.next_sweep_us = now.as_micros() + SWEEP_INTERVAL_US;
            self.remove_expired(now.as_micros(), budget);
        }
    }

    #[inline(always)]
    fn find(&self, key: &Key, hash: u64, algorithm: Algorithm) -> Option<u32> {
        self.index.find(hash, |id| {
            let entry = self.entries.get(id);
            let (rule, entry_algorithm) = match entry {
                Entry::Short { class, .. } | Entry::Long { class, .. } => {
                    let class = self.classes.get(*class);
                    (class.rule.as_ref(), class.scale.algorithm())
                }
                Entry::Log(log) => (log.key.shared_rule(), Algorithm::SlidingLog),
            };
            entry.identity() == key.identity_bytes()
                && entry_algorithm == algorithm
                && is_same_rule(rule, key.shared_rule())
        })
    }

    /// Runs `act` on a counter that does not exist, and inserts it if its state changed.
    #[cold]
    fn with_new<R>(
        &mut self,
        lookup: &Lookup<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let bytes = self.new_counter_bytes(lookup);
        if lookup.room == Room::Own && self.entries.len() < MAX_IDS {
            budget.reserve_unchecked(bytes);
        } else if self.entries.len() == MAX_IDS || !budget.reserve(bytes) {
            return self.overflow.with(lookup, now, act);
        }
        let first = self.overflow.initial_state(lookup, now);
        let mut state = first.clone();
        let result = act(&mut state);
        if state != first {
            self.insert(lookup, state, budget, now);
        }
        budget.release(bytes);
        result
    }

    /// Runs `act` on a counter that was written under another window or rate and moves it to its new class. Without memory for
    /// that class, the limit is exhausted.
    fn with_changed_limit<R>(
        &mut self,
        id: u32,
        lookup: &Lookup<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let bytes = self.classes.growth_bytes();
        if lookup.room == Room::Own {
            budget.reserve_unchecked(bytes);
        } else if !budget.reserve(bytes) {
            self.overflow.record(lookup.operation);
            return with_exhausted_state(lookup, now, act);
        }
        let entry = self.entries.get_mut(id);
        let (Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. }) = entry else {
            unreachable!("a log has no limit class");
        };
        let mut state = self.classes.get(*class).scale.unpack(*numbers);
        let result = act(&mut state);
        let (scale, new_numbers) = packed(&state);
        let new_class = self.classes.acquire(lookup.key.shared_rule(), scale, &self.hashing);
        self.classes.release(*class, &self.hashing);
        (*class, *numbers) = (new_class, new_numbers);
        self.update_budget(budget);
        budget.release(bytes);
        result
    }

    fn insert(&mut self, lookup: &Lookup<'_>, state: State, budget: &Budget, now: Timestamp) {
        if self.index.is_full() {
            self.remove_expired(now.as_micros().saturating_sub(GRACE_US), budget);
            // grow unless many slots are free: otherwise the next insert would sweep again
            if self.index.is_nearly_full() {
                self.index.grow(|id| hash_of(self.entries.get(id), &self.classes, &self.hashing));
            }
        }
        let entry = if lookup.limit.algorithm().properties().is_log {
            Entry::Log(Box::new(Log { key: lookup.key.clone(), state }))
        } else {
            let (scale, numbers) = packed(&state);
            let class = self.classes.acquire(lookup.key.shared_rule(), scale, &self.hashing);
            Entry::new(lookup.key.identity_bytes(), class, numbers)
        };
        budget.reserve_unchecked(entry.heap_bytes());
        let id = self.entries.insert(entry);
        self.index.insert(lookup.hash, id);
        self.update_budget(budget);
    }

    fn remove(&mut self, id: u32, budget: &Budget) {
        let hash_of = |id| hash_of(self.entries.get(id), &self.classes, &self.hashing);
        self.index.remove(hash_of(id), id, hash_of);
        let entry = self.entries.remove(id);
        budget.release(entry.heap_bytes());
        if let Entry::Short { class, .. } | Entry::Long { class, .. } = entry {
            self.classes.release(class, &self.hashing);
        }
    }

    /// Removes every counter that has equalled a fresh one since `since_us`, and releases memory if more than half of it is
    /// free.
    fn remove_expired(&mut self, since_us: u64, budget: &Budget) {
        let classes = &self.classes;
        let is_fresh = |entry: &Entry| {
            let expires_at = match entry {
                Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. } => {
                    classes.get(*class).scale.unpack(*numbers).expires_at()
                }
                Entry::Log(log) => log.state.expires_at(),
            };
            expires_at.as_micros() <= since_us
        };
        for id in self.entries.find_all(is_fresh) {
            self.remove(id, budget);
        }
        let mut all_holds = std::mem::take(&mut self.holds);
        all_holds.update_all(budget, |key, algorithm, holds| {
            let has_counter = self.find(key, self.hashing.of_key(key, algorithm), algorithm).is_some();
            holds.remove_expired(has_counter, Timestamp::from_micros(since_us));
        });
        self.holds = all_holds;
        if self.entries.slots() > (2 * self.entries.len()).next_multiple_of(CHUNK) {
            self.compact();
        }
        self.update_budget(budget);
    }

    /// Moves all counters into as few chunks as possible.
    fn compact(&mut self) {
        let entries = std::mem::take(&mut self.entries);
        self.index = Index::with_capacity(entries.len() + entries.len() / 2);
        for entry in entries.into_values() {
            let hash = hash_of(&entry, &self.classes, &self.hashing);
            self.index.insert(hash, self.entries.insert(entry));
        }
    }

    /// Updates the budget with the current size of index, entries and classes.
    fn update_budget(&mut self, budget: &Budget) {
        let bytes = self.index.bytes() + self.entries.bytes() + self.classes.bytes();
        budget.replace(self.accounted_bytes, bytes);
        self.accounted_bytes = bytes;
    }
}

fn hash_of(entry: &Entry, classes: &LimitClasses, hashing: &Hashing) -> u64 {
    match entry {
        Entry::Short { class, .. } | Entry::Long { class, .. } => {
            let class = classes.get(*class);
            hashing.of(class.rule.as_deref(), entry.identity(), class.scale.algorithm())
        }
        Entry::Log(log) => hashing.of_key(&log.key, Algorithm::SlidingLog),
    }
}

/// Returns the packed form of a state that is not a log.
fn packed(state: &State) -> (Scale, [u64; 3]) {
    state.pack().expect("a log is stored as it is")
}

/// Runs `act` on an existing log. It grows only as far as memory allows; beyond that, it merges entries and never counts
/// less.
fn within_budget<R>(state: &mut State, budget: &Budget, act: &mut dyn FnMut(&mut State) -> R) -> R {
    let Some(growth) = state.next_growth_bytes() else {
        return act(state);
    };
    let before = state.heap_bytes();
    let is_reserved = budget.reserve(growth);
    state.set_max_entries(if is_reserved { usize::MAX } else { state.entries() });
    let result = act(state);
    if is_reserved {
        budget.reserve_unchecked(state.heap_bytes().saturating_sub(before));
        budget.release(growth);
    }
    result
}
