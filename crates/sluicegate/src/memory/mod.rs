//! The memory store: counters in this process, decided under a lock, within a hard memory bound.
//!
//! A counter is removed only when it equals a fresh one. When the bound is reached and no counter can be removed, *new* keys of a
//! rule share overflow counters, and are denied together once those are exhausted. Memory stays bounded, and a flood of keys
//! never resets the limit of any key.

mod budget;
mod entry;
mod hashing;
mod held_counters;
mod index;
mod limit_class;
mod overflow;
mod shard;
mod slab;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;

use sluicegate_core::{Algorithm, Answer, Limit, Operation, Terms, Timestamp};

use self::table::Table;
use crate::{
    check::Check,
    clock::{Clock, ManualClock},
    key::Key,
    store::{CheckAnswer, CounterSnapshot},
};

/// The default memory bound: 256 MiB.
pub const DEFAULT_MAX_MEMORY: usize = 256 << 20;
/// The smallest memory bound: 1 MiB.
pub const MIN_MAX_MEMORY: usize = 1 << 20;

/// Counters in this process.
///
/// ```
/// use std::time::Duration;
/// use sluicegate::{Cost, Limit, MemoryStore, limiter::Operation, store::{Key, Terms}};
///
/// let store = MemoryStore::new();
/// let terms = Terms::new(Limit::sliding_log(1, Duration::from_secs(60))?, Cost::ONE);
/// let key = Key::without_rule("user:42")?;
/// assert_eq!(store.decide_one(&key, &terms, Operation::Check, 1).0.passes, 1);
/// assert_eq!(store.decide_one(&key, &terms, Operation::Check, 1).0.passes, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MemoryStore {
    table: Table<parking_lot::Mutex<shard::Shard>>,
    clock: Clock,
}

/// The size of a memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryUsage {
    /// Number of counters.
    pub(crate) counters: usize,
    /// Memory that is allocated or reserved, in bytes.
    pub(crate) bytes: usize,
    /// The maximum of `bytes`: the memory bound without the part that is reserved for the allocator.
    pub(crate) max_bytes: usize,
    /// Checks and charges, one for each tier, that used an overflow counter because the store was full.
    pub(crate) overflow_decisions: u64,
}

/// A memory bound that is too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("max_memory of {0} bytes is too small: use at least {MIN_MAX_MEMORY} (1 MiB)")]
pub struct MemoryBoundError(pub usize);

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (counters, bytes) = (self.len(), self.memory_bytes());
        f.debug_struct("MemoryStore")
            .field("counters", &counters)
            .field("bytes", &bytes)
            .finish_non_exhaustive()
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self { table: Table::new(DEFAULT_MAX_MEMORY), clock: Clock::steady() }
    }
}

impl MemoryStore {
    /// Creates an empty store with the default bound, on this machine's clock.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns an empty store that uses at most `bytes`.
    ///
    /// # Errors
    /// If the bound is below 1 MiB.
    pub fn with_max_memory(self, bytes: usize) -> Result<Self, MemoryBoundError> {
        if bytes < MIN_MAX_MEMORY {
            return Err(MemoryBoundError(bytes));
        }
        Ok(Self { table: Table::new(bytes), clock: self.clock })
    }

    /// Returns the same store on a manual clock, for tests and replays.
    pub fn with_clock(self, clock: ManualClock) -> Self {
        Self { clock: Clock::Manual(clock), ..self }
    }

    /// Decides a check of a single counter, without an allocation unless the counter is new.
    pub fn decide_one(
        &self,
        key: &Key,
        terms: &Terms,
        operation: Operation,
        count: u32,
    ) -> (Answer, Timestamp) {
        self.table.decide_one(key, terms, operation, count, || self.clock.now())
    }

    /// Decides `checks` in order, in one atomic step at one moment.
    pub fn decide_all(&self, checks: &[Check]) -> Vec<CheckAnswer> {
        let (answers, at) = self.table.decide(checks, || self.clock.now());
        answers.into_iter().map(|answers| CheckAnswer { at, answers }).collect()
    }

    /// Removes these counters, and returns how many existed.
    pub fn forget(&self, counters: &[(Key, Algorithm)]) -> u64 {
        counters.iter().map(|(key, algorithm)| u64::from(self.table.remove_counter(key, *algorithm))).sum()
    }

    /// Returns the state of these counters, each read at a slightly different time.
    pub fn inspect(&self, counters: &[(Key, Limit)]) -> Vec<CounterSnapshot> {
        counters.iter().map(|(key, limit)| self.table.inspect(key, limit, || self.clock.now())).collect()
    }

    /// Returns the time of the store's clock.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Returns the number of counters.
    pub fn len(&self) -> usize {
        self.usage().counters
    }

    /// Returns whether the store holds no counter.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn usage(&self) -> MemoryUsage {
        self.table.usage()
    }

    /// Returns the memory that is allocated or reserved, in bytes; never more than the bound. It excludes the overhead of the
    /// allocator, for which an eighth of the bound is kept free.
    pub fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
    }
}
