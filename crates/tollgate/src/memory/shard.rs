//! One shard: a table of counters, what they cost, and what may be forgotten.
//!
//! The counters lie in a slab; an index of their places, four bytes each, finds them by hash. Few lines of
//! memory are touched per decision, and growing moves the index only.

use tollgate_core::{Algorithm, Answer, Limit, Operation, Snapshot, State, Terms, Timestamp, step::step};

use super::{
    budget::Budget,
    entry::{Entry, Log, Scale, pack},
    hashing::Hashing,
    index::{Index, MAX_IDS},
    limit_class::{LimitClasses, is_same},
    overflow::{OverflowCounters, with_exhausted_state},
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
    classes: LimitClasses,
    hashing: Hashing,
    overflow: OverflowCounters,
    /// What index, entries and classes were last counted as.
    counted_bytes: usize,
    /// Before this moment the shard is not searched for something to forget.
    search_from_us: u64,
}

/// A counter that is looked for, and what for.
pub(super) struct Lookup<'a> {
    pub(super) key: &'a Key,
    pub(super) hash: u64,
    pub(super) limit: &'a Limit,
    pub(super) operation: Operation,
}

impl Shard {
    /// An empty shard that has room set aside for so many coarse counters.
    pub(super) fn new(max_overflow: usize, hashing: Hashing) -> Self {
        Self {
            index: Index::default(),
            entries: Slab::default(),
            classes: LimitClasses::default(),
            hashing,
            overflow: OverflowCounters::new(max_overflow),
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
    fn numbers_to_check(&mut self, lookup: &Lookup<'_>) -> Option<(Scale, &mut [u64; 3])> {
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
        match self.numbers_to_check(lookup) {
            Some((scale, numbers)) => scale.check(numbers, terms, operation, count, now),
            None => self.with(lookup, budget, now, &mut |state| step(state, terms, operation, count, now)),
        }
    }

    /// Runs `act` on the state of a counter, once.
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
                *numbers = pack(&state).1;
                result
            }
        }
    }

    /// What a counter holds at `now`; nothing, if it is not there.
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
            self.remove_expired(now.as_micros(), budget);
        }
    }

    #[inline(always)]
    fn find(&self, key: &Key, hash: u64, algorithm: Algorithm) -> Option<u32> {
        self.index.find(hash, |id| {
            let entry = self.entries.get(id);
            let (rule, of) = match entry {
                Entry::Short { class, .. } | Entry::Long { class, .. } => {
                    let class = self.classes.get(*class);
                    (class.rule.as_ref(), class.scale.algorithm())
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
        lookup: &Lookup<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let bytes = Entry::first_heap_bytes(lookup.key, lookup.limit.algorithm())
            + self.entries.growth_bytes()
            + self.classes.growth_bytes()
            + self.index.growth_bytes();
        if self.entries.len() == MAX_IDS || !budget.take(bytes) {
            return self.overflow.with(lookup, now, act);
        }
        let first = self.overflow.first_state(lookup, now);
        let mut state = first.clone();
        let result = act(&mut state);
        if state != first {
            self.insert(lookup, state, budget, now);
        }
        budget.give_back(bytes);
        result
    }

    /// Runs `act` on a counter that was written under another window or rate: once it is charged, it is of another
    /// class. Where there is no room for that class, it finds its limit used up.
    fn with_changed_limit<R>(
        &mut self,
        id: u32,
        lookup: &Lookup<'_>,
        budget: &Budget,
        now: Timestamp,
        act: &mut dyn FnMut(&mut State) -> R,
    ) -> R {
        let bytes = self.classes.growth_bytes();
        if !budget.take(bytes) {
            return with_exhausted_state(lookup, now, act);
        }
        let entry = self.entries.get_mut(id);
        let (Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. }) = entry else {
            unreachable!("a log is the same under every limit");
        };
        let mut state = self.classes.get(*class).scale.unpack(*numbers);
        let result = act(&mut state);
        let (scale, packed) = pack(&state);
        let new_class = self.classes.join(lookup.key.shared_rule(), scale, &self.hashing);
        self.classes.leave(*class, &self.hashing);
        (*class, *numbers) = (new_class, packed);
        self.count_bytes(budget);
        budget.give_back(bytes);
        result
    }

    fn insert(&mut self, lookup: &Lookup<'_>, state: State, budget: &Budget, now: Timestamp) {
        if self.index.is_full() {
            self.remove_expired(now.as_micros().saturating_sub(GRACE_US), budget);
            // it grows unless there is room for a while: else the next insert would search all of it again
            if self.index.is_nearly_full() {
                self.index.grow(|id| hash_of(self.entries.get(id), &self.classes, &self.hashing));
            }
        }
        let entry = if lookup.limit.algorithm() == Algorithm::SlidingLog {
            Entry::Log(Box::new(Log { key: lookup.key.clone(), state }))
        } else {
            let (scale, numbers) = pack(&state);
            let class = self.classes.join(lookup.key.shared_rule(), scale, &self.hashing);
            Entry::new(lookup.key.identity_bytes(), class, numbers)
        };
        budget.take_anyway(entry.heap_bytes());
        let id = self.entries.insert(entry);
        self.index.insert(lookup.hash, id);
        self.count_bytes(budget);
    }

    fn remove(&mut self, id: u32, budget: &Budget) {
        let hash_of = |id| hash_of(self.entries.get(id), &self.classes, &self.hashing);
        self.index.remove(hash_of(id), id, hash_of);
        let entry = self.entries.remove(id);
        budget.give_back(entry.heap_bytes());
        if let Entry::Short { class, .. } | Entry::Long { class, .. } = entry {
            self.classes.leave(class, &self.hashing);
        }
    }

    /// Forgets every counter that has equalled a fresh one since `moment_us`, and gives memory back when more than
    /// half of it has come free.
    fn remove_expired(&mut self, moment_us: u64, budget: &Budget) {
        let classes = &self.classes;
        let is_fresh = |entry: &Entry| {
            let expires_at = match entry {
                Entry::Short { class, numbers, .. } | Entry::Long { class, numbers, .. } => {
                    classes.get(*class).scale.unpack(*numbers).expires_at()
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
            let hash = hash_of(&entry, &self.classes, &self.hashing);
            self.index.insert(hash, self.entries.insert(entry));
        }
    }

    /// Has the budget know what index, entries and classes take now.
    fn count_bytes(&mut self, budget: &Budget) {
        let bytes = self.index.bytes() + self.entries.bytes() + self.classes.bytes();
        budget.correct(self.counted_bytes, bytes);
        self.counted_bytes = bytes;
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
