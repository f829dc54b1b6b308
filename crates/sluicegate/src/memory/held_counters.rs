//! The counters of a shard that have holds, ordered by the time at which the first of their ids is forgotten.
//!
//! The order serves to forget ended holds, oldest first, when memory is short.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use sluicegate_core::{
    Algorithm, Timestamp,
    hold::{HOLD_RETENTION, Holds},
};

use super::budget::{Budget, allocated};
use crate::{hashing::RandomKeyedHash, key::Key};

/// The most ended holds of a shard that are forgotten at once.
const MAX_FORGOTTEN: usize = 32;

/// The table keeps its memory while it has room for at most this many counters.
const MIN_CAPACITY: usize = 128;

type Counter = (Key, Algorithm);
/// Each counter that keeps ids, with the time until which the first one is kept.
type Order = BTreeSet<(Timestamp, Arc<Counter>)>;

/// The counters of a shard that have holds.
#[derive(Default)]
pub(super) struct HeldCounters {
    counters: HashMap<Arc<Counter>, Holds, RandomKeyedHash>,
    order: Order,
}

/// The holds of a counter, removed in order to change them.
pub(super) struct Taken {
    counter: Arc<Counter>,
    /// The position in the order.
    kept_until: Option<Timestamp>,
    bytes: usize,
    pub(super) holds: Holds,
}

impl HeldCounters {
    /// Returns the holds of a counter, if it has any.
    pub(super) fn get(&self, key: &Key, algorithm: Algorithm) -> Option<&Holds> {
        if self.counters.is_empty() { None } else { self.counters.get(&(key.clone(), algorithm)) }
    }

    /// Records that a hold was repeated.
    pub(super) fn record_repetition(&mut self, key: &Key, algorithm: Algorithm, id: &[u8], now: Timestamp) {
        if let Some(holds) = self.counters.get_mut(&(key.clone(), algorithm)) {
            holds.record_repetition(id, now);
        }
    }

    /// Removes the holds of a counter until [`HeldCounters::put_back`].
    pub(super) fn take(&mut self, key: &Key, algorithm: Algorithm) -> Option<Taken> {
        let (counter, holds) = self.counters.remove_entry(&(key.clone(), algorithm))?;
        Some(Taken {
            kept_until: holds.first_kept_until(),
            bytes: bytes_of(&counter, &holds),
            counter,
            holds,
        })
    }

    /// Removes the holds of a counter until [`HeldCounters::put_back`]. A counter without holds gets an empty set of them.
    pub(super) fn take_or_new(&mut self, key: &Key, algorithm: Algorithm) -> Taken {
        self.take(key, algorithm).unwrap_or_else(|| Taken {
            counter: Arc::new((key.clone(), algorithm)),
            kept_until: None,
            bytes: 0,
            holds: Holds::default(),
        })
    }

    /// Inserts the holds of a counter again, unless none is left, and updates the budget.
    pub(super) fn put_back(&mut self, taken: Taken, budget: &Budget) {
        let Taken { counter, kept_until: before, bytes, holds } = taken;
        budget.replace(bytes, bytes_of(&counter, &holds));
        move_counter(&mut self.order, &counter, before, holds.first_kept_until());
        if !holds.is_empty() {
            self.counters.insert(counter, holds);
        }
    }

    /// Calls `act` on the holds of every counter, removes those without any, and updates the budget.
    pub(super) fn update_all(&mut self, budget: &Budget, mut act: impl FnMut(&Key, Algorithm, &mut Holds)) {
        let Self { counters, order } = self;
        counters.retain(|counter, holds| {
            let (kept_until, bytes) = (holds.first_kept_until(), bytes_of(counter, holds));
            act(&counter.0, counter.1, holds);
            budget.replace(bytes, bytes_of(counter, holds));
            move_counter(order, counter, kept_until, holds.first_kept_until());
            !holds.is_empty()
        });
        if counters.capacity() > MIN_CAPACITY.max(2 * counters.len()) {
            counters.shrink_to_fit();
        }
    }

    /// Whether any id is kept.
    pub(super) fn keeps_ids(&self) -> bool {
        !self.order.is_empty()
    }

    /// Returns when the first of the holds that have ended was settled or expired.
    pub(super) fn first_end(&self, now: Timestamp) -> Option<Timestamp> {
        let (kept_until, _) = self.order.first()?;
        let ended = kept_until.minus(HOLD_RETENTION);
        (ended <= now).then_some(ended)
    }

    /// Forgets a bounded number of holds that have ended, the oldest first, and returns whether there were any.
    pub(super) fn forget_ended(&mut self, budget: &Budget, now: Timestamp) -> bool {
        let mut forgotten = 0;
        while forgotten < MAX_FORGOTTEN && self.first_end(now).is_some() {
            let (_, counter) = self.order.first().expect("the first one has ended");
            let (key, algorithm) = (counter.0.clone(), counter.1);
            // up to the first hold of the next counter
            let next =
                self.order.iter().nth(1).map_or(now, |(kept_until, _)| kept_until.minus(HOLD_RETENTION));
            let mut taken = self.take(&key, algorithm).expect("every counter in the order has holds");
            let of_counter = taken.holds.forget_ended(next.min(now), MAX_FORGOTTEN - forgotten);
            self.put_back(taken, budget);
            if of_counter == 0 {
                break;
            }
            forgotten += of_counter;
        }
        forgotten > 0
    }
}

/// Changes the position of a counter.
fn move_counter(
    order: &mut Order,
    counter: &Arc<Counter>,
    before: Option<Timestamp>,
    after: Option<Timestamp>,
) {
    if before != after {
        before.map(|before| order.remove(&(before, Arc::clone(counter))));
        after.map(|after| order.insert((after, Arc::clone(counter))));
    }
}

/// Returns the memory of a counter's holds.
fn bytes_of(counter: &Counter, holds: &Holds) -> usize {
    if holds.is_empty() { 0 } else { holds.bytes() + held_counter_bytes(&counter.0) }
}

/// Returns the memory of a counter that has holds, besides the counter and its holds: its key, its place in the table, up to half of which is
/// free, and its place in the order, whose nodes may be half full.
pub(super) fn held_counter_bytes(key: &Key) -> usize {
    let table = 2 * size_of::<(Arc<Counter>, Holds)>();
    let order = 2 * size_of::<(Timestamp, Arc<Counter>)>() + allocated(0);
    let counter = allocated(2 * size_of::<usize>() + size_of::<Counter>());
    table + order + counter + key.heap_bytes().map_or(0, allocated)
}
