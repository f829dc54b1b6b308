//! The memory store: counters in this process, decided under a lock, within a hard bound of memory.
//!
//! A counter is forgotten only when it equals a fresh one. When the bound is reached and nothing can be
//! forgotten, *new* keys of a rule share coarse counters, and are refused together once those are used up:
//! memory stays bounded, and flooding the store with keys never frees anybody.

mod budget;
mod entry;
mod hashing;
mod index;
mod limit_class;
mod overflow;
mod shard;
mod slab;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;

use tollgate_core::{Algorithm, Answer, Limit, Operation, Terms, Timestamp};

use self::table::Table;
use crate::{
    check::Check,
    clock::{Clock, ManualClock},
    key::Key,
    store::{CounterSnapshot, Decided},
};

/// The bound on memory unless another is set: 256 MiB.
pub const DEFAULT_MAX_MEMORY: usize = 256 << 20;
/// The smallest bound on memory: 1 MiB.
pub const MIN_MAX_MEMORY: usize = 1 << 20;

/// Counters in this process.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Cost, Key, Limit, MemoryStore, Operation, Terms};
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

/// A bound on memory that is too small to work with.
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
    /// An empty store with the default bound, on this machine's clock.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store that holds at most `bytes`.
    ///
    /// # Errors
    /// When the bound is below 1 MiB.
    pub fn with_max_memory(self, bytes: usize) -> Result<Self, MemoryBoundError> {
        if bytes < MIN_MAX_MEMORY {
            return Err(MemoryBoundError(bytes));
        }
        Ok(Self { table: Table::new(bytes), clock: self.clock })
    }

    /// The same store on a clock that is moved by hand: for tests and replays.
    pub fn with_clock(self, clock: ManualClock) -> Self {
        Self { clock: Clock::Manual(clock), ..self }
    }

    /// Decides over a single counter, without allocating unless the counter is new.
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
    pub fn decide_all(&self, checks: &[Check]) -> Decided {
        let (answers, at) = self.table.decide(checks, || self.clock.now());
        Decided { at, answers }
    }

    /// Forgets these counters. How many of them were there.
    pub fn forget(&self, counters: &[(Key, Algorithm)]) -> u64 {
        counters.iter().map(|(key, algorithm)| u64::from(self.table.forget(key, *algorithm))).sum()
    }

    /// Returns the state of these counters, each at a moment of its own.
    pub fn inspect(&self, counters: &[(Key, Limit)]) -> Vec<CounterSnapshot> {
        counters.iter().map(|(key, limit)| self.table.inspect(key, limit, || self.clock.now())).collect()
    }

    /// The store's clock.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// How many counters it holds.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// Whether it holds no counter.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How much memory it has asked the allocator for, or set aside: never more than its bound. What the allocator
    /// itself needs is not in it; an eighth of the bound is left for that.
    pub fn memory_bytes(&self) -> usize {
        self.table.memory_bytes()
    }
}
