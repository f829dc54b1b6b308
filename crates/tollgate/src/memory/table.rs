//! The table: shards behind locks, and the order in which they are taken.
//!
//! A check over several counters takes the locks of all their shards before it looks at any, always in the
//! order of the shards, so that two checks never wait for each other in a circle.

use std::{
    ops::DerefMut,
    sync::atomic::{AtomicUsize, Ordering},
};

use tollgate_core::{Algorithm, Answer, Limit, Operation, Terms, Timestamp, step::granted};

use super::{
    budget::Budget,
    hashing::Hashing,
    overflow::{MIN_OVERFLOW, OVERFLOW_BYTES},
    shard::{Lookup, Shard},
};
use crate::{
    check::{Check, Tier},
    key::Key,
    store::CounterSnapshot,
};

/// How many shards, and so how many decisions can be under way at once. A power of two.
const SHARDS: usize = 64;
/// Which part of the memory is set aside for coarse counters: one in so many.
const OVERFLOW_SHARE: usize = 16;

/// A mutual exclusion lock: real in the store, simulated where its use is checked.
pub(super) trait Lock<T> {
    /// What holding the lock gives.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a,
        T: 'a;
    /// An open lock.
    fn new(value: T) -> Self;
    /// Waits for the lock and takes it.
    fn lock(&self) -> Self::Guard<'_>;
    /// Takes the lock if it is open.
    fn try_lock(&self) -> Option<Self::Guard<'_>>;
}

impl<T> Lock<T> for parking_lot::Mutex<T> {
    type Guard<'a>
        = parking_lot::MutexGuard<'a, T>
    where
        T: 'a;

    fn new(value: T) -> Self {
        Self::new(value)
    }

    fn lock(&self) -> Self::Guard<'_> {
        self.lock()
    }

    fn try_lock(&self) -> Option<Self::Guard<'_>> {
        self.try_lock()
    }
}

pub(super) struct Table<L> {
    shards: Box<[CachePadded<L>]>,
    hashing: Hashing,
    budget: Budget,
    /// Which shard makes room next, and how many are still to do so.
    next_to_search: AtomicUsize,
    left_to_search: AtomicUsize,
}

/// A lock on cache lines of its own, which processors fetch in pairs: threads in different shards do not slow
/// each other down.
#[repr(align(128))]
struct CachePadded<L>(L);

impl<L: Lock<Shard>> Table<L> {
    pub(super) fn new(max_memory: usize) -> Self {
        let overflow = (max_memory / OVERFLOW_SHARE / SHARDS / OVERFLOW_BYTES).max(MIN_OVERFLOW);
        let hashing = Hashing::new();
        let shard = |_| CachePadded(L::new(Shard::new(overflow, hashing.clone())));
        let shards: Box<[CachePadded<L>]> = (0..SHARDS).map(shard).collect();
        let fixed = SHARDS * (size_of::<CachePadded<L>>() + overflow * OVERFLOW_BYTES);
        let budget = Budget::new(max_memory, fixed);
        Self {
            shards,
            hashing,
            budget,
            next_to_search: AtomicUsize::new(0),
            left_to_search: AtomicUsize::new(0),
        }
    }

    /// Decides over one counter. The clock is read once its lock is held: a time read before may be older, by the
    /// time it counts, than what others have charged meanwhile.
    #[inline(always)]
    pub(super) fn decide_one(
        &self,
        key: &Key,
        terms: &Terms,
        operation: Operation,
        count: u32,
        clock: impl Fn() -> Timestamp,
    ) -> (Answer, Timestamp) {
        let (shard, hash) = self.place(key, terms.limit.algorithm());
        let lookup = Lookup { key, hash, limit: &terms.limit, operation };
        let mut shard = self.shards[shard].0.lock();
        let now = clock();
        if self.budget.is_tight() {
            shard.make_room(&self.budget, now);
        }
        let answer = shard.decide(&lookup, terms, count, &self.budget, now);
        drop(shard);
        self.make_room_elsewhere(now);
        (answer, now)
    }

    /// Decides checks in order, all at one moment: every shard that they touch is locked before the clock is read.
    pub(super) fn decide(
        &self,
        checks: &[Check],
        clock: impl Fn() -> Timestamp,
    ) -> (Vec<Vec<Answer>>, Timestamp) {
        if let [check] = checks
            && let [tier] = check.tiers()
        {
            let (answer, now) =
                self.decide_one(&tier.key, &tier.terms, check.operation(), check.count(), clock);
            return (vec![vec![answer]], now);
        }
        let tiers = checks.iter().flat_map(Check::tiers);
        let places: Vec<(usize, u64)> =
            tiers.map(|tier| self.place(&tier.key, tier.terms.limit.algorithm())).collect();
        let mut order: Vec<usize> = places.iter().map(|(shard, _)| *shard).collect();
        order.sort_unstable();
        order.dedup();
        let mut guards: Vec<L::Guard<'_>> = order.iter().map(|shard| self.shards[*shard].0.lock()).collect();
        let now = clock();
        if self.budget.is_tight() {
            guards.iter_mut().for_each(|shard| shard.make_room(&self.budget, now));
        }
        let mut locked = Locked { order: &order, guards: &mut guards, budget: &self.budget, now };
        let mut places = &*places;
        let answers = checks.iter().map(|check| {
            let (own, rest) = places.split_at(check.tiers().len());
            places = rest;
            locked.decide(check, own)
        });
        let answers = answers.collect();
        drop(guards);
        self.make_room_elsewhere(now);
        (answers, now)
    }

    /// Once memory is tight, lets one shard after the other forget what it can, whoever is busy with which: all of them,
    /// also when the first ones make room enough. What lies between what was forgotten is of no use to the allocator.
    #[inline]
    fn make_room_elsewhere(&self, now: Timestamp) {
        if self.budget.is_tight() {
            self.left_to_search.store(SHARDS, Ordering::Relaxed);
        }
        if self.left_to_search.load(Ordering::Relaxed) > 0 {
            self.search_next(now);
        }
    }

    #[cold]
    fn search_next(&self, now: Timestamp) {
        // threads that count at once may search one shard more than they need to
        let left = self.left_to_search.load(Ordering::Relaxed).saturating_sub(1);
        self.left_to_search.store(left, Ordering::Relaxed);
        let next = self.next_to_search.fetch_add(1, Ordering::Relaxed) % SHARDS;
        if let Some(mut shard) = self.shards[next].0.try_lock() {
            shard.make_room(&self.budget, now);
        }
    }

    pub(super) fn forget(&self, key: &Key, algorithm: Algorithm) -> bool {
        let (shard, hash) = self.place(key, algorithm);
        self.shards[shard].0.lock().forget(key, hash, algorithm, &self.budget)
    }

    /// What a counter holds; nothing, if it has none of its own.
    pub(super) fn inspect(&self, key: &Key, limit: &Limit, clock: impl Fn() -> Timestamp) -> CounterSnapshot {
        let (shard, hash) = self.place(key, limit.algorithm());
        let shard = self.shards[shard].0.lock();
        let at = clock();
        CounterSnapshot { at, snapshot: shard.snapshot(key, hash, limit, at) }
    }

    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.0.lock().len()).sum()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.budget.used()
    }

    #[inline]
    fn place(&self, key: &Key, algorithm: Algorithm) -> (usize, u64) {
        let hash = self.hashing.of_key(key, algorithm);
        // bits from the middle: the index in a shard tells its counters apart by the low ones and the highest eight
        let shard = usize::try_from(hash >> 32).expect("32 bits fit a usize") % SHARDS;
        (shard, hash)
    }
}

/// All shards that a batch touches, held together.
struct Locked<'a, G> {
    order: &'a [usize],
    guards: &'a mut [G],
    budget: &'a Budget,
    now: Timestamp,
}

impl<G: DerefMut<Target = Shard>> Locked<'_, G> {
    /// Decides one check, whose tiers have these places.
    fn decide(&mut self, check: &Check, places: &[(usize, u64)]) -> Vec<Answer> {
        let (operation, count, now) = (check.operation(), check.count(), self.now);
        let tiers = || check.tiers().iter().zip(places);
        if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
            let adjusted = tiers().map(|(tier, place)| {
                self.with(operation, tier, place, |state| tier.terms.adjust(state, operation, count, now))
            });
            return adjusted.collect();
        }
        let passes: Vec<u32> = tiers()
            .map(|(tier, place)| {
                self.with(operation, tier, place, |state| tier.terms.passes(state, count, now))
            })
            .collect();
        let granted = match operation {
            Operation::Check => {
                granted(count, check.tiers().iter().map(|tier| &tier.terms).zip(passes.iter().copied()))
            }
            _ => 0,
        };
        let settled = tiers().zip(passes).map(|((tier, place), passes)| {
            self.with(operation, tier, place, |state| tier.terms.settle(state, passes, granted, count, now))
        });
        settled.collect()
    }

    fn with<R>(
        &mut self,
        operation: Operation,
        tier: &Tier,
        &(shard, hash): &(usize, u64),
        mut act: impl FnMut(&mut tollgate_core::State) -> R,
    ) -> R {
        let held = self.order.binary_search(&shard).expect("every tier's shard has been locked");
        let lookup = Lookup { key: &tier.key, hash, limit: &tier.terms.limit, operation };
        self.guards[held].with(&lookup, self.budget, self.now, &mut act)
    }
}
