//! The table: shards behind locks, and the order in which they are taken.
//!
//! A check over several counters takes the locks of all their shards before it looks at any, always in the
//! order of the shards, so that two checks never wait for each other in a circle.

use std::{
    hash::{BuildHasher, RandomState},
    ops::DerefMut,
    sync::atomic::{AtomicUsize, Ordering},
};

use tollgate_core::{
    Algorithm, Answer, Operation, Terms, Timestamp,
    step::{granted, step},
};

use super::shard::{COARSE_BYTES, MIN_COARSE, Shard, Slot};
use crate::{
    check::{Check, Tier},
    key::Key,
};

/// How many shards, and so how many decisions can be under way at once. A power of two.
const SHARDS: usize = 64;
/// Which part of the memory is set aside for coarse counters: one in so many.
const COARSE_SHARE: usize = 16;

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
}

pub(super) struct Table<L> {
    shards: Box<[L]>,
    hasher: RandomState,
    budget: Budget,
}

/// Memory, counted across all shards.
pub(super) struct Budget {
    used: AtomicUsize,
    max: usize,
}

impl Budget {
    /// Takes `bytes` if they are there.
    pub(super) fn take(&self, bytes: usize) -> bool {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > self.max {
            self.give_back(bytes);
            return false;
        }
        true
    }

    /// Whether less than an eighth is left.
    pub(super) fn is_tight(&self) -> bool {
        self.used.load(Ordering::Relaxed) > self.max / 8 * 7
    }

    /// Takes `bytes` that have been found to be there.
    pub(super) fn take_anyway(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl<L: Lock<Shard>> Table<L> {
    pub(super) fn new(max_memory: usize) -> Self {
        let coarse = (max_memory / COARSE_SHARE / SHARDS / COARSE_BYTES).max(MIN_COARSE);
        let shards: Box<[L]> = (0..SHARDS).map(|_| L::new(Shard::new(coarse))).collect();
        let fixed = SHARDS * (size_of::<L>() + coarse * COARSE_BYTES);
        let budget = Budget { used: AtomicUsize::new(fixed), max: max_memory };
        Self { shards, hasher: RandomState::new(), budget }
    }

    pub(super) fn decide_one(
        &self,
        key: &Key,
        terms: &Terms,
        operation: Operation,
        count: u32,
        now: Timestamp,
    ) -> Answer {
        let (shard, hash) = self.place(key, terms.limit.algorithm());
        let mut shard = self.shards[shard].lock();
        shard.with(&Slot { key, hash, algorithm: terms.limit.algorithm() }, &self.budget, now, |state| {
            step(state, terms, operation, count, now)
        })
    }

    pub(super) fn decide(&self, check: &Check, now: Timestamp) -> Vec<Answer> {
        let (operation, count) = (check.operation(), check.count());
        if let [tier] = check.tiers() {
            return vec![self.decide_one(&tier.key, &tier.terms, operation, count, now)];
        }
        let places: Vec<(usize, u64)> =
            check.tiers().iter().map(|tier| self.place(&tier.key, tier.terms.limit.algorithm())).collect();
        let mut order: Vec<usize> = places.iter().map(|(shard, _)| *shard).collect();
        order.sort_unstable();
        order.dedup();
        let mut guards: Vec<L::Guard<'_>> = order.iter().map(|shard| self.shards[*shard].lock()).collect();
        let mut locked =
            Locked { order: &order, guards: &mut guards, places: &places, budget: &self.budget, now };

        match operation {
            Operation::Check | Operation::Peek => {
                let passes: Vec<u32> = (check.tiers().iter().enumerate())
                    .map(|(index, tier)| {
                        locked.with(index, tier, |state| tier.terms.passes(state, count, now))
                    })
                    .collect();
                let granted = match operation {
                    Operation::Check => granted(
                        count,
                        check.tiers().iter().map(|tier| &tier.terms).zip(passes.iter().copied()),
                    ),
                    _ => 0,
                };
                (check.tiers().iter().enumerate().zip(passes))
                    .map(|((index, tier), passes)| {
                        locked
                            .with(index, tier, |state| tier.terms.settle(state, passes, granted, count, now))
                    })
                    .collect()
            }
            Operation::Charge | Operation::Refund { .. } => (check.tiers().iter().enumerate())
                .map(|(index, tier)| {
                    locked.with(index, tier, |state| tier.terms.adjust(state, operation, count, now))
                })
                .collect(),
        }
    }

    pub(super) fn forget(&self, key: &Key, algorithm: Algorithm) -> bool {
        let (shard, hash) = self.place(key, algorithm);
        self.shards[shard].lock().forget(&Slot { key, hash, algorithm }, &self.budget)
    }

    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.budget.used.load(Ordering::Relaxed)
    }

    fn place(&self, key: &Key, algorithm: Algorithm) -> (usize, u64) {
        let hash = self.hasher.hash_one((key.rule(), key.identity(), algorithm));
        // the high bits choose the shard, the low ones the place in it
        let shard = usize::try_from(hash >> (64 - SHARDS.ilog2())).expect("a shard index fits a usize");
        (shard, hash)
    }
}

/// All shards that a check touches, held together.
struct Locked<'a, G> {
    order: &'a [usize],
    guards: &'a mut [G],
    places: &'a [(usize, u64)],
    budget: &'a Budget,
    now: Timestamp,
}

impl<G: DerefMut<Target = Shard>> Locked<'_, G> {
    fn with<R>(&mut self, index: usize, tier: &Tier, act: impl FnOnce(&mut tollgate_core::State) -> R) -> R {
        let (shard, hash) = self.places[index];
        let held = self.order.binary_search(&shard).expect("every tier's shard has been locked");
        let slot = Slot { key: &tier.key, hash, algorithm: tier.terms.limit.algorithm() };
        self.guards[held].with(&slot, self.budget, self.now, act)
    }
}
