//! Memory, counted across all shards: what may be taken, and what an allocation takes.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Which part of the memory is left to the allocator, for what it cannot use: one in so many.
const ALLOCATOR_SHARE: usize = 8;

/// How much of the memory is in use.
pub(super) struct Budget {
    used: AtomicUsize,
    max: usize,
}

impl Budget {
    /// So much memory, of which `fixed` is in use for good.
    pub(super) fn new(max_memory: usize, fixed: usize) -> Self {
        Self { used: AtomicUsize::new(fixed), max: max_memory - max_memory / ALLOCATOR_SHARE }
    }

    /// What is in use.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether less than an eighth is left.
    pub(super) fn is_tight(&self) -> bool {
        self.used() > self.max / 8 * 7
    }

    /// Takes `bytes` if they are there. No bytes always are.
    pub(super) fn take(&self, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > self.max {
            self.give_back(bytes);
            return false;
        }
        true
    }

    /// Takes `bytes` that have been found to be there.
    pub(super) fn take_anyway(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts what took `before` bytes as `after`.
    pub(super) fn correct(&self, before: usize, after: usize) {
        if after > before {
            self.take_anyway(after - before);
        } else if before > after {
            self.give_back(before - after);
        }
    }
}

/// What the allocator takes for an allocation of so many bytes.
pub(super) const fn allocated(bytes: usize) -> usize {
    let with_header = (bytes + 8).next_multiple_of(16);
    if with_header < 32 { 32 } else { with_header }
}
