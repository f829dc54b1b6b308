//! The table: locked shards, and the lock order.
//!
//! A check over several counters locks all their shards before it reads any of them, always in the order of the shards, so that
//! checks never deadlock.

use std::{
    ops::DerefMut,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use sluicegate_core::{
    Algorithm, Answer, HoldAnswer, HoldOutcome, Limit, Operation, State, Terms, Timestamp,
    hold::{Holds, NewHold},
    step::{Mode, granted},
};

use super::{
    MemoryUsage,
    budget::Budget,
    hashing::Hashing,
    held_counters::held_counter_bytes,
    overflow::{MIN_OVERFLOW, OVERFLOW_BYTES},
    shard::{Lookup, Room, Shard},
};
use crate::{
    check::{Check, HoldCall, HoldOperation, Tier},
    key::Key,
    store::CounterSnapshot,
};

/// Number of shards, and therefore of concurrent decisions. A power of two, and at most the number of bits of [`Table::with_hold_ids`].
const SHARDS: usize = u64::BITS as usize;
/// The most times that a hold without memory forgets ended holds before it fails.
const MAX_ATTEMPTS: usize = 4;
/// The memory divided by this is reserved for overflow counters.
const OVERFLOW_SHARE: usize = 16;

/// A mutex: the real one in the store, a simulated one in concurrency tests.
pub(super) trait Lock<T> {
    /// The guard of a held lock.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a,
        T: 'a;
    /// Creates an unlocked mutex.
    fn new(value: T) -> Self;
    /// Acquires the lock, blocking.
    fn lock(&self) -> Self::Guard<'_>;
    /// Acquires the lock if it is free.
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
    /// The next shard to sweep.
    next_to_sweep: AtomicUsize,
    /// Number of shards that remain to be swept.
    left_to_sweep: AtomicUsize,
    /// One bit for each shard that keeps ids of holds.
    with_hold_ids: AtomicU64,
}

/// A value on its own pair of cache lines, which processors fetch together, so that threads in different shards do not share
/// lines.
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
            next_to_sweep: AtomicUsize::new(0),
            left_to_sweep: AtomicUsize::new(0),
            with_hold_ids: AtomicU64::new(0),
        }
    }

    /// Decides a check of one counter. The clock is read while the lock is held: a time read before may be
    /// older than charges that other threads have made since.
    #[inline(always)]
    pub(super) fn decide_one(
        &self,
        key: &Key,
        terms: &Terms,
        operation: Operation,
        count: u32,
        clock: impl Fn() -> Timestamp,
    ) -> (Answer, Timestamp) {
        let (shard, hash) = self.locate(key, terms.limit.algorithm());
        let lookup = Lookup { key, hash, limit: &terms.limit, operation, room: Room::Shared };
        let mut shard = self.shards[shard].0.lock();
        let now = clock();
        if self.budget.is_nearly_full() {
            shard.sweep(&self.budget, now);
        }
        let answer = shard.decide(&lookup, terms, count, &self.budget, now);
        drop(shard);
        self.sweep_next_shard(now);
        (answer, now)
    }

    /// Decides checks in order, at one moment: every shard involved is locked before the clock is read.
    pub(super) fn decide(
        &self,
        checks: &[Check],
        clock: impl Fn() -> Timestamp,
    ) -> (Vec<Vec<Answer>>, Timestamp) {
        if let [check] = checks
            && let [tier] = check.tiers()
            && !check.uses_holds()
        {
            let (answer, now) =
                self.decide_one(&tier.key, &tier.terms, check.operation(), check.count(), clock);
            return (vec![vec![answer]], now);
        }
        let tiers = checks.iter().flat_map(Check::tiers);
        let locations: Vec<(usize, u64)> =
            tiers.map(|tier| self.locate(&tier.key, tier.terms.limit.algorithm())).collect();
        let mut order: Vec<usize> = locations.iter().map(|(shard, _)| *shard).collect();
        order.sort_unstable();
        order.dedup();
        let mut guards: Vec<L::Guard<'_>> = order.iter().map(|shard| self.shards[*shard].0.lock()).collect();
        let now = clock();
        if self.budget.is_nearly_full() {
            guards.iter_mut().for_each(|shard| shard.sweep(&self.budget, now));
        }
        let with_other_shard = |index: usize, act: &mut dyn FnMut(&mut Shard)| {
            if let Some(mut shard) = self.shards[index].0.try_lock() {
                act(&mut shard);
            }
        };
        let mut locked = Locked {
            order: &order,
            guards: &mut guards,
            budget: &self.budget,
            now,
            with_other_shard: &with_other_shard,
        };
        let mut locations = &*locations;
        let answers = checks.iter().map(|check| {
            let (own, rest) = locations.split_at(check.tiers().len());
            locations = rest;
            locked.decide(check, own)
        });
        let answers = answers.collect();
        if checks.iter().any(|check| check.hold().is_some()) {
            order.iter().zip(&guards).for_each(|(index, shard)| self.note_hold_ids(*index, shard));
        }
        drop(guards);
        self.sweep_next_shard(now);
        (answers, now)
    }

    /// Once memory is nearly full, sweeps one shard per decision until all shards were swept, even if the first ones free
    /// enough: the allocator cannot use scattered free memory.
    #[inline]
    fn sweep_next_shard(&self, now: Timestamp) {
        if self.budget.is_nearly_full() {
            self.left_to_sweep.store(SHARDS, Ordering::Relaxed);
            self.forget_ended_holds(now);
        }
        if self.left_to_sweep.load(Ordering::Relaxed) > 0 {
            self.sweep_one(now);
        }
    }

    /// Forgets ended holds of the next shard that may have any.
    #[cold]
    fn forget_ended_holds(&self, now: Timestamp) {
        let shards = self.with_hold_ids.load(Ordering::Relaxed);
        if shards == 0 {
            return;
        }
        let start = self.next_to_sweep.load(Ordering::Relaxed) % SHARDS;
        let rotation = u32::try_from(start).expect("less than 64");
        let index = (start + shards.rotate_right(rotation).trailing_zeros() as usize) % SHARDS;
        if let Some(mut shard) = self.shards[index].0.try_lock() {
            shard.forget_ended_holds(&self.budget, now);
            self.note_hold_ids(index, &shard);
        }
    }

    /// Records whether a locked shard keeps ids of holds.
    fn note_hold_ids(&self, index: usize, shard: &Shard) {
        let bit = 1 << index;
        let is_noted = self.with_hold_ids.load(Ordering::Relaxed) & bit != 0;
        if shard.keeps_hold_ids() == is_noted {
            return;
        }
        if is_noted {
            self.with_hold_ids.fetch_and(!bit, Ordering::Relaxed);
        } else {
            self.with_hold_ids.fetch_or(bit, Ordering::Relaxed);
        }
    }

    #[cold]
    fn sweep_one(&self, now: Timestamp) {
        // concurrent threads may sweep one shard more than needed
        let left = self.left_to_sweep.load(Ordering::Relaxed).saturating_sub(1);
        self.left_to_sweep.store(left, Ordering::Relaxed);
        let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % SHARDS;
        if let Some(mut shard) = self.shards[next].0.try_lock() {
            shard.sweep(&self.budget, now);
        }
    }

    pub(super) fn remove_counter(&self, key: &Key, algorithm: Algorithm) -> bool {
        let (shard, hash) = self.locate(key, algorithm);
        self.shards[shard].0.lock().remove_counter(key, hash, algorithm, &self.budget)
    }

    /// Returns the snapshot of a counter; that of a fresh one if it does not exist.
    pub(super) fn inspect(&self, key: &Key, limit: &Limit, clock: impl Fn() -> Timestamp) -> CounterSnapshot {
        let (shard, hash) = self.locate(key, limit.algorithm());
        let shard = self.shards[shard].0.lock();
        let at = clock();
        let holds = shard.live_holds(key, limit.algorithm(), at);
        CounterSnapshot { at, snapshot: shard.snapshot(key, hash, limit, at), leased: 0, holds }
    }

    /// Returns the number of counters, the memory in use and its bound.
    pub(super) fn usage(&self) -> MemoryUsage {
        let (bytes, max_bytes) = (self.budget.used(), self.budget.max());
        let usage = MemoryUsage { counters: 0, bytes, max_bytes, overflow_decisions: 0 };
        self.shards.iter().fold(usage, |usage, shard| {
            let shard = shard.0.lock();
            MemoryUsage {
                counters: usage.counters + shard.len(),
                overflow_decisions: usage.overflow_decisions + shard.overflow_decisions(),
                ..usage
            }
        })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.budget.used()
    }

    #[inline]
    fn locate(&self, key: &Key, algorithm: Algorithm) -> (usize, u64) {
        let hash = self.hashing.of_key(key, algorithm);
        // bits from the middle: the index of a shard uses the low bits and the highest eight
        let shard = usize::try_from(hash >> 32).expect("32 bits fit a usize") % SHARDS;
        (shard, hash)
    }
}

/// Runs a function on the shard with an index, unless that is locked.
type WithShard<'a> = dyn Fn(usize, &mut dyn FnMut(&mut Shard)) + 'a;

/// All locked shards of a batch.
struct Locked<'a, G> {
    order: &'a [usize],
    guards: &'a mut [G],
    budget: &'a Budget,
    now: Timestamp,
    with_other_shard: &'a WithShard<'a>,
}

impl<G: DerefMut<Target = Shard>> Locked<'_, G> {
    /// Decides one check, whose tiers have these locations.
    fn decide(&mut self, check: &Check, locations: &[(usize, u64)]) -> Vec<Answer> {
        if check.uses_holds() {
            return self.decide_held(check, locations);
        }
        let (operation, count, now) = (check.operation(), check.count(), self.now);
        let tiers = || check.tiers().iter().zip(locations);
        if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
            let adjusted = tiers().map(|(tier, location)| {
                self.with(operation, tier, location, |state| tier.terms.adjust(state, operation, count, now))
            });
            return adjusted.collect();
        }
        // the first pass only reads: the operation is recorded once, in the second
        let passes: Vec<u32> = tiers()
            .map(|(tier, location)| {
                self.with(Operation::Peek, tier, location, |state| tier.terms.passes(state, count, now))
            })
            .collect();
        let granted = match operation {
            Operation::Check => {
                granted(count, check.tiers().iter().map(|tier| &tier.terms).zip(passes.iter().copied()))
            }
            _ => 0,
        };
        let settled = tiers().zip(passes).map(|((tier, location), passes)| {
            self.with(operation, tier, location, |state| {
                tier.terms.settle(state, passes, granted, count, now)
            })
        });
        settled.collect()
    }

    /// Decides a check together with the holds of its counters. If only some counters have the hold already, the others decide: either they
    /// complete the hold, or it is reverted.
    fn decide_held(&mut self, check: &Check, locations: &[(usize, u64)]) -> Vec<Answer> {
        let tiers: Vec<_> = check.tiers().iter().zip(locations).collect();
        match check.hold() {
            None => self.decide_tiers(check, &tiers, None),
            Some(HoldCall {
                id,
                operation: operation @ (HoldOperation::Hold { ttl } | HoldOperation::HoldNew { ttl }),
            }) => {
                let id = id.as_str().as_bytes();
                let known = |(tier, location): &LocatedTier<'_>| {
                    let holds = self.holds_of(tier, location)?;
                    if operation.needs_new_id() {
                        holds.conflict(id, self.now)
                    } else {
                        holds.answer_to_existing(id, tier.terms.cost.units(), self.now)
                    }
                };
                let known: Vec<Option<Answer>> = tiers.iter().map(known).collect();
                if known.iter().flatten().any(|answer| answer.hold.outcome == HoldOutcome::Conflict) {
                    return known.into_iter().map(|answer| answer.unwrap_or(Answer::NONE)).collect();
                }
                self.decide_tiers(check, &tiers, Some(HoldInput { id, ttl: *ttl, known: &known }))
            }
            Some(HoldCall { id, operation }) => self.adjust_hold(&tiers, *operation, id.as_str().as_bytes()),
        }
    }

    /// Decides a check, or a hold that some tiers do not have yet.
    fn decide_tiers(
        &mut self,
        check: &Check,
        tiers: &[LocatedTier<'_>],
        hold: Option<HoldInput<'_>>,
    ) -> Vec<Answer> {
        let (operation, count, now) = (check.operation(), check.count(), self.now);
        let is_known = |index: usize| hold.is_some_and(|hold| hold.known[index].is_some());
        let (mut released, mut passes) = (vec![0; tiers.len()], vec![count; tiers.len()]);
        for (index, (tier, location)) in tiers.iter().enumerate().filter(|(index, _)| !is_known(*index)) {
            if operation == Operation::Check {
                released[index] = self.release_expired(tier, location);
            }
            // the operation is recorded once, in the second pass
            passes[index] =
                self.with(Operation::Peek, tier, location, |state| tier.terms.passes(state, count, now));
        }
        let mut reserved = 0;
        if let Some(hold) = hold {
            let mut is_full = vec![false; tiers.len()];
            for (index, (tier, location)) in tiers.iter().enumerate().filter(|(index, _)| !is_known(*index)) {
                if self.reserve_hold(tier, location, hold.id, &mut reserved) {
                    continue;
                }
                match tier.terms.mode {
                    Mode::Enforced => is_full[index] = true,
                    Mode::Shadow => passes[index] = 0, // it never denies
                }
            }
            if is_full.contains(&true) {
                self.budget.release(reserved);
                self.revert_known(tiers, hold);
                let outcome = |full| if full { HoldOutcome::Full } else { HoldOutcome::NotHeld };
                let hold = |full| HoldAnswer { outcome: outcome(full), ..HoldAnswer::NONE };
                return is_full.into_iter().map(|full| Answer { hold: hold(full), ..Answer::NONE }).collect();
            }
        }
        let terms = check.tiers().iter().map(|tier| &tier.terms);
        let granted = match operation {
            Operation::Check => granted(count, terms.zip(passes.iter().copied())),
            _ => 0,
        };
        let reverted = match hold {
            Some(hold) if granted == 0 => self.revert_known(tiers, hold),
            _ => vec![None; tiers.len()],
        };
        if let Some(hold) = hold.filter(|_| granted > 0) {
            self.record_repetition(tiers, hold);
        }
        let mut answers = Vec::with_capacity(tiers.len());
        for (index, (tier, location)) in tiers.iter().enumerate() {
            let known = hold.and_then(|hold| reverted[index].or(hold.known[index]));
            let answer = known.unwrap_or_else(|| {
                let (terms, passes) = (&tier.terms, passes[index]);
                let mut answer = match hold {
                    Some(HoldInput { id, ttl, .. }) if granted.min(passes) > 0 => {
                        self.with_holds(operation, tier, location, &terms.limit, |state, holds| {
                            let answer = terms.settle(state, passes, granted, count, now);
                            holds.add(state, terms, NewHold { id, ttl, answer }, now)
                        })
                    }
                    _ => self.with(operation, tier, location, |state| {
                        terms.settle(state, passes, granted, count, now)
                    }),
                };
                answer.hold.released = released[index];
                answer
            });
            answers.push(answer);
        }
        self.budget.release(reserved);
        answers
    }

    /// Reverts a hold on the tiers that have it. Returns their answers.
    fn revert_known(&mut self, tiers: &[LocatedTier<'_>], hold: HoldInput<'_>) -> Vec<Option<Answer>> {
        let reverted = tiers.iter().enumerate().map(|(index, tier)| {
            hold.known[index]?;
            let answer =
                self.with_known(tier, hold.id, |state, holds, now| holds.revert(state, hold.id, None, now));
            Some(Answer { hold: HoldAnswer::NONE, ..answer })
        });
        reverted.collect()
    }

    fn record_repetition(&mut self, tiers: &[LocatedTier<'_>], hold: HoldInput<'_>) {
        for (index, (tier, location)) in tiers.iter().enumerate() {
            if hold.known[index].is_some() {
                let (now, limit) = (self.now, &tier.terms.limit);
                let (shard, lookup) = self.lookup(Operation::Peek, tier, location, limit, Room::Own);
                shard.record_repetition(&lookup, hold.id, now);
            }
        }
    }

    /// Reserves memory for a hold and its counter, and adds it to `reserved`. Returns whether both fit.
    fn reserve_hold(
        &mut self,
        tier: &Tier,
        location: &(usize, u64),
        id: &[u8],
        reserved: &mut usize,
    ) -> bool {
        if self.holds_of(tier, location).is_some_and(Holds::is_full) {
            return false;
        }
        let mut attempts = 0;
        while let Some(bytes) = self.hold_bytes(tier, location, id) {
            if self.budget.reserve(bytes) {
                *reserved += bytes;
                return true;
            }
            if attempts == MAX_ATTEMPTS || !self.forget_ended_holds() {
                break;
            }
            attempts += 1;
        }
        false
    }

    /// Returns how many bytes a hold and its counter may add. `None` if the shard has the maximum number of counters.
    fn hold_bytes(&mut self, tier: &Tier, location: &(usize, u64), id: &[u8]) -> Option<usize> {
        let holds = self.holds_of(tier, location);
        let hold =
            Holds::growth_bytes(holds, id) + if holds.is_none() { held_counter_bytes(&tier.key) } else { 0 };
        let (shard, lookup) = self.lookup(Operation::Peek, tier, location, &tier.terms.limit, Room::Own);
        Some(shard.growth_bytes(&lookup)? + hold)
    }

    /// Forgets ended holds of the shard with the oldest one, and returns whether there were any. Skips shards that other threads have locked.
    fn forget_ended_holds(&mut self) -> bool {
        let (budget, now) = (self.budget, self.now);
        let mut oldest: Option<(Timestamp, usize)> = None;
        for index in 0..SHARDS {
            self.with_shard(index, &mut |shard| {
                if let Some(end) = shard.first_ended_hold(now) {
                    oldest = Some(oldest.map_or((end, index), |oldest| oldest.min((end, index))));
                }
            });
        }
        let Some((_, index)) = oldest else { return false };
        self.with_shard(index, &mut |shard| {
            shard.forget_ended_holds(budget, now);
        });
        true
    }

    fn with_shard(&mut self, index: usize, act: &mut dyn FnMut(&mut Shard)) {
        match self.order.binary_search(&index) {
            Ok(own) => act(&mut self.guards[own]),
            Err(_) => (self.with_other_shard)(index, act),
        }
    }

    fn release_expired(&mut self, tier: &Tier, location: &(usize, u64)) -> u32 {
        // the refund must reach the counter of the holds
        let (budget, now) = (self.budget, self.now);
        let (shard, lookup) = self.lookup(Operation::Peek, tier, location, &tier.terms.limit, Room::Own);
        shard.release_expired(&lookup, budget, now)
    }

    /// Settles, renews or reverts a hold.
    fn adjust_hold(&mut self, tiers: &[LocatedTier<'_>], operation: HoldOperation, id: &[u8]) -> Vec<Answer> {
        tiers.iter().enumerate().map(|(index, tier)| self.adjust_one(tier, operation, index, id)).collect()
    }

    /// Settles, renews or reverts the hold of one tier; `index` is its position in the check.
    fn adjust_one(
        &mut self,
        tier: &LocatedTier<'_>,
        operation: HoldOperation,
        index: usize,
        id: &[u8],
    ) -> Answer {
        let units = tier.0.terms.cost.units();
        self.with_known(tier, id, |state, holds, now| match operation {
            HoldOperation::Settle { kept, max_excess } => {
                let actual = (kept >> index & 1 == 0).then_some(units);
                holds.settle(state, id, actual, max_excess, now)
            }
            HoldOperation::Renew { ttl } => holds.renew(state, id, ttl, now),
            HoldOperation::Revert { until } => holds.revert(state, id, Some(until), now),
            HoldOperation::Hold { .. } | HoldOperation::HoldNew { .. } => {
                unreachable!("a hold is decided, not adjusted")
            }
        })
    }

    /// Runs `act` on a counter under the limit of one of its holds, if that is known.
    fn with_known(
        &mut self,
        (tier, location): &LocatedTier<'_>,
        id: &[u8],
        act: impl Fn(&mut State, &mut Holds, Timestamp) -> Answer,
    ) -> Answer {
        let now = self.now;
        let Some(limit) = self.holds_of(tier, location).and_then(|holds| holds.limit_of(id, now)) else {
            return Answer::UNKNOWN_HOLD;
        };
        self.with_holds(Operation::Charge, tier, location, &limit, |state, holds| act(state, holds, now))
    }

    fn holds_of(&self, tier: &Tier, &(shard, _): &(usize, u64)) -> Option<&Holds> {
        let guard = self.order.binary_search(&shard).expect("the shard of every tier is locked");
        self.guards[guard].holds(&tier.key, tier.terms.limit.algorithm())
    }

    /// Runs `act` on the counter of a tier, under the limit of its hold, and on its holds.
    fn with_holds<R>(
        &mut self,
        operation: Operation,
        tier: &Tier,
        location: &(usize, u64),
        limit: &Limit,
        act: impl FnMut(&mut State, &mut Holds) -> R,
    ) -> R {
        let (budget, now) = (self.budget, self.now);
        let (shard, lookup) = self.lookup(operation, tier, location, limit, Room::Own);
        shard.with_holds(&lookup, budget, now, act)
    }

    fn with<R>(
        &mut self,
        operation: Operation,
        tier: &Tier,
        location: &(usize, u64),
        mut act: impl FnMut(&mut State) -> R,
    ) -> R {
        let (budget, now) = (self.budget, self.now);
        let (shard, lookup) = self.lookup(operation, tier, location, &tier.terms.limit, Room::Shared);
        shard.with(&lookup, budget, now, &mut act)
    }

    fn lookup<'b>(
        &'b mut self,
        operation: Operation,
        tier: &'b Tier,
        &(shard, hash): &(usize, u64),
        limit: &'b Limit,
        room: Room,
    ) -> (&'b mut Shard, Lookup<'b>) {
        let guard = self.order.binary_search(&shard).expect("the shard of every tier is locked");
        (&mut self.guards[guard], Lookup { key: &tier.key, hash, limit, operation, room })
    }
}

/// A tier and its location.
type LocatedTier<'a> = (&'a Tier, &'a (usize, u64));

/// A hold to be made.
#[derive(Clone, Copy)]
struct HoldInput<'a> {
    id: &'a [u8],
    ttl: Duration,
    /// The answers of the tiers that have the hold already.
    known: &'a [Option<Answer>],
}
