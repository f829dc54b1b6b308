//! One shard: a table of counters, what they cost, and what may be forgotten.
//!
//! The counters lie in a slab; an index of their places, four bytes each, finds them by hash. Few lines of
//! memory are touched per decision, and growing moves the index only.

use std::hint::black_box;

use tollgate_core::{Algorithm, Answer, Limit, Operation, Picture, State, Terms, Timestamp, step::step};

use super::{
    budget::Budget,
    coarse::{CoarseCounters, with_used_up},
    entry::{Entry, Log, Scale, pack},
    hashing::Hashing,
    index::{Index, MAX_IDS},
    kinds::{Kinds, is_same},
    slab::Slab,
};
use crate::key::Key;

/// How long a counter stays after it equals a fresh one, while there is room: so that a clock that is set
/// back finds it again.
const GRACE_US: u64 = 60 * 1_000_000;
/// How long a shard is not searched again for something to forget.
const SEARCH_PAUSE_US: u64 = 100_000;
/// How many counters an allocation holds: 3 KiB.
const CHUNK: usize = 64;

/// In this order, so that what every decision reads lies next to the lock.
#[repr(C)]
pub(super) struct Shard {
    index: Index,
    entries: Slab<Entry, CHUNK>,
    kinds: Kinds,
    hashing: Hashing,
    coarse: CoarseCounters,
    /// What index, entries and kinds were last counted as.
    counted_bytes: usize,
    /// Before this moment the shard is not searched for something to forget.
    search_from_us: u64,
}

/// A counter that is looked for, and what for.
pub(super) struct Slot<'a> {
    pub(super) key: &'a Key,
    pub(super) hash: u64,
    pub(super) limit: &'a Limit,
    pub(super) operation: Operation,
}

impl Shard {
    /// An empty shard that has room set aside for so many coarse counters.
    pub(super) fn new(max_coarse: usize, hashing: Hashing) -> Self {
        Self {
            index: Index::default(),
            entries: Slab::default(),
            kinds: Kinds::default(),
            hashing,
            coarse: CoarseCounters::new(max_coarse),
            counted_bytes: 0,
            search_from_us: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The counter, if it is to be checked or peeked at, is there, and was written under the limit's own window or
    /// rate: then a decision changes nothing but its numbers. That is so nearly always, and so has a short way.
    #[inline(always)]
    fn numbers_to_check(&mut self, slot: &Slot<'_>) -> Option<(Scale, &mut [u64; 3])> {
        if !matches!(slot.operation, Operation::Check | Operation::Peek) {
            return None;
        }
        let id = self.find(slot.key, slot.hash, slot.limit.algorithm())?;
        match self.entries.get_mut(id) {
            Entry::Short { kind, numbers, .. } | Entry::Long { kind, numbers, .. } => {
                let scale = self.kinds.get(*kind).scale;
                (Some(scale) == Scale::of(slot.limit)).then_some((scale, numbers))
            }
            Entry::Log(_) => None,
        }
    }

    /// Decides for `count` identical requests.
    #[inline(always)]
    pub(super) fn decide(
        &mut self,
        slot: &Slot<'_>,
        terms: &Terms,
        count: u32,
        budget: &Budget,
        now: Timestamp,
    ) -> Answer {
        let operation = slot.operation;
        match self.numbers_to_check(slot) {
            Some((scale, numbers)) => scale.check(numbers, terms, operation, count, now),
            None => self.with(slot, budget, now, &mut |state| step(state, terms, operation, count, now)),
        }
    }

    /// Where the counter of a hash lies, most likely.
    #[inline]
    pub(super) fn likely(&self, hash: u64) -> Option<u32> {
        self.index.first(hash)
    }

    /// Has the memory of a counter fetched, before it is needed.
    #[inline]
    pub(super) fn fetch(&self, id: Option<u32>) {
        if let Some(id) = id {
            black_box(matches!(self.entries.get(id), Entry::Log(_)));
        }
    }

    /// Runs `act` on the state of a counter, once.
    pub(super) fn with<R>(
        &mut self,
        slot: &Slot<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let Some(id) = self.find(slot.key, slot.hash, slot.limit.algorithm()) else {
            return self.with_new(slot, budget, now, act);
        };
        match self.entries.get_mut(id) {
            Entry::Log(log) => within_budget(&mut log.state, budget, act),
            Entry::Short { kind, numbers, .. } | Entry::Long { kind, numbers, .. } => {
                let scale = self.kinds.get(*kind).scale;
                if Some(scale) != Scale::of(slot.limit) {
                    return self.with_changed_limit(id, slot, budget, now, act);
                }
                let mut state = scale.unpack(*numbers);
                let result = act(&mut state);
                *numbers = pack(&state).1;
                result
            }
        }
    }

    /// What a counter holds at `now`; nothing, if it is not there.
    pub(super) fn picture(&self, key: &Key, hash: u64, limit: &Limit, now: Timestamp) -> Picture {
        let Some(id) = self.find(key, hash, limit.algorithm()) else {
            return State::fresh(limit.algorithm()).picture(limit, now);
        };
        match self.entries.get(id) {
            Entry::Log(log) => log.state.picture(limit, now),
            Entry::Short { kind, numbers, .. } | Entry::Long { kind, numbers, .. } => {
                self.kinds.get(*kind).scale.unpack(*numbers).picture(limit, now)
            }
        }
    }

    pub(super) fn forget(&mut self, key: &Key, hash: u64, algorithm: Algorithm, budget: &Budget) -> bool {
        let found = self.find(key, hash, algorithm);
        if let Some(id) = found {
            self.remove(id, budget);
        }
        found.is_some()
    }

    /// Forgets what equals a fresh counter, unless that was done a moment ago. For when memory gets tight.
    pub(super) fn make_room(&mut self, budget: &Budget, now: Timestamp) {
        if now.as_micros() >= self.search_from_us {
            self.search_from_us = now.as_micros() + SEARCH_PAUSE_US;
            self.forget_fresh(now.as_micros(), budget);
        }
    }

    #[inline(always)]
    fn find(&self, key: &Key, hash: u64, algorithm: Algorithm) -> Option<u32> {
        self.index.find(hash, |id| {
            let entry = self.entries.get(id);
            let (rule, of) = match entry {
                Entry::Short { kind, .. } | Entry::Long { kind, .. } => {
                    let kind = self.kinds.get(*kind);
                    (kind.rule.as_ref(), kind.scale.algorithm())
                }
                Entry::Log(log) => (log.key.shared_rule(), Algorithm::SlidingLog),
            };
            entry.identity() == key.identity_bytes() && of == algorithm && is_same(rule, key.shared_rule())
        })
    }

    /// Runs `act` on a counter that is not there, and keeps it if it is no longer what it began as.
    #[cold]
    fn with_new<R>(
        &mut self,
        slot: &Slot<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let bytes = Entry::first_heap_bytes(slot.key, slot.limit.algorithm())
            + self.entries.growth_bytes()
            + self.kinds.growth_bytes()
            + self.index.growth_bytes();
        if self.entries.len() == MAX_IDS || !budget.take(bytes) {
            return self.coarse.with(slot, now, act);
        }
        let first = self.coarse.first_state(slot, now);
        let mut state = first.clone();
        let result = act(&mut state);
        if state != first {
            self.insert(slot, state, budget, now);
        }
        budget.give_back(bytes);
        result
    }

    /// Runs `act` on a counter that was written under another window or rate: once it is charged, it is of another
    /// kind. Where there is no room for that kind, it finds its limit used up.
    fn with_changed_limit<R>(
        &mut self,
        id: u32,
        slot: &Slot<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let bytes = self.kinds.growth_bytes();
        if !budget.take(bytes) {
            return with_used_up(slot, now, act);
        }
        let entry = self.entries.get_mut(id);
        let (Entry::Short { kind, numbers, .. } | Entry::Long { kind, numbers, .. }) = entry else {
            unreachable!("a log is the same under every limit");
        };
        let mut state = self.kinds.get(*kind).scale.unpack(*numbers);
        let result = act(&mut state);
        let (scale, packed) = pack(&state);
        let new_kind = self.kinds.join(slot.key.shared_rule(), scale, &self.hashing);
        self.kinds.leave(*kind, &self.hashing);
        (*kind, *numbers) = (new_kind, packed);
        self.count_bytes(budget);
        budget.give_back(bytes);
        result
    }

    fn insert(&mut self, slot: &Slot<'_>, state: State, budget: &Budget, now: Timestamp) {
        if self.index.is_full() {
            self.forget_fresh(now.as_micros().saturating_sub(GRACE_US), budget);
            // it grows unless there is room for a while: else the next insert would search all of it again
            if self.index.is_nearly_full() {
                self.index.grow(|id| hash_of(self.entries.get(id), &self.kinds, &self.hashing));
            }
        }
        let entry = if slot.limit.algorithm() == Algorithm::SlidingLog {
            Entry::Log(Box::new(Log { key: slot.key.clone(), state }))
        } else {
            let (scale, numbers) = pack(&state);
            let kind = self.kinds.join(slot.key.shared_rule(), scale, &self.hashing);
            Entry::new(slot.key.identity_bytes(), kind, numbers)
        };
        budget.take_anyway(entry.heap_bytes());
        let id = self.entries.insert(entry);
        self.index.insert(slot.hash, id);
        self.count_bytes(budget);
    }

    fn remove(&mut self, id: u32, budget: &Budget) {
        let hash_of = |id| hash_of(self.entries.get(id), &self.kinds, &self.hashing);
        self.index.remove(hash_of(id), id, hash_of);
        let entry = self.entries.remove(id);
        budget.give_back(entry.heap_bytes());
        if let Entry::Short { kind, .. } | Entry::Long { kind, .. } = entry {
            self.kinds.leave(kind, &self.hashing);
        }
    }

    /// Forgets every counter that has equalled a fresh one since `moment_us`, and gives memory back when more than
    /// half of it has come free.
    fn forget_fresh(&mut self, moment_us: u64, budget: &Budget) {
        let kinds = &self.kinds;
        let is_fresh = |entry: &Entry| {
            let expires_at = match entry {
                Entry::Short { kind, numbers, .. } | Entry::Long { kind, numbers, .. } => {
                    kinds.get(*kind).scale.unpack(*numbers).expires_at()
                }
                Entry::Log(log) => log.state.expires_at(),
            };
            expires_at.as_micros() <= moment_us
        };
        for id in self.entries.find_all(is_fresh) {
            self.remove(id, budget);
        }
        if self.entries.places() > (2 * self.entries.len()).next_multiple_of(CHUNK) {
            self.compact();
        }
        self.count_bytes(budget);
    }

    /// Moves all counters together, into as few chunks as hold them.
    fn compact(&mut self) {
        let entries = std::mem::take(&mut self.entries);
        self.index = Index::with_room_for(entries.len() + entries.len() / 2);
        for entry in entries.into_values() {
            let hash = hash_of(&entry, &self.kinds, &self.hashing);
            self.index.insert(hash, self.entries.insert(entry));
        }
    }

    /// Has the budget know what index, entries and kinds take now.
    fn count_bytes(&mut self, budget: &Budget) {
        let bytes = self.index.bytes() + self.entries.bytes() + self.kinds.bytes();
        budget.correct(self.counted_bytes, bytes);
        self.counted_bytes = bytes;
    }
}

fn hash_of(entry: &Entry, kinds: &Kinds, hashing: &Hashing) -> u64 {
    match entry {
        Entry::Short { kind, .. } | Entry::Long { kind, .. } => {
            let kind = kinds.get(*kind);
            hashing.of(kind.rule.as_deref(), entry.identity(), kind.scale.algorithm())
        }
        Entry::Log(log) => hashing.of_key(&log.key, Algorithm::SlidingLog),
    }
}

/// Runs `act` on a log that is there; it grows only as far as memory allows, and counts more coarsely,
/// never less, beyond that.
fn within_budget<R>(state: &mut State, budget: &Budget, act: &mut dyn FnMut(&mut State) -> R) -> R {
    let Some(growth) = state.next_growth_bytes() else {
        return act(state);
    };
    let before = state.heap_bytes();
    let has_room = budget.take(growth);
    state.limit_entries(if has_room { usize::MAX } else { state.entries() });
    let result = act(state);
    if has_room {
        budget.take_anyway(state.heap_bytes().saturating_sub(before));
        budget.give_back(growth);
    }
    result
}
