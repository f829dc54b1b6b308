//! The memory budget shared by all shards.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The bound divided by this is reserved for the overhead and fragmentation of the allocator.
const ALLOCATOR_SHARE: usize = 8;

/// The memory in use and its bound.
pub(super) struct Budget {
    used: AtomicUsize,
    max: usize,
}

impl Budget {
    /// Creates a budget of `max_memory` bytes, of which `fixed` are permanently in use.
    pub(super) fn new(max_memory: usize, fixed: usize) -> Self {
        Self { used: AtomicUsize::new(fixed), max: max_memory - max_memory / ALLOCATOR_SHARE }
    }

    /// Returns the bytes in use.
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the bound of [`Budget::used`].
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Returns whether less than an eighth is free.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.used() > self.max / 8 * 7
    }

    /// Reserves `bytes` if they are available, and returns whether they were. Zero bytes are always available.
    pub(super) fn reserve(&self, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > self.max {
            self.release(bytes);
            return false;
        }
        true
    }

    /// Reserves `bytes` that are known to be available.
    pub(super) fn reserve_unchecked(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Replaces a reservation of `before` bytes by one of `after`.
    pub(super) fn replace(&self, before: usize, after: usize) {
        if after > before {
            self.reserve_unchecked(after - before);
        } else if before > after {
            self.release(before - after);
        }
    }
}

/// Returns the bytes that the allocator uses for an allocation of `bytes`.
pub(super) const fn allocated(bytes: usize) -> usize {
    let with_header = (bytes + 8).next_multiple_of(16);
    if with_header < 32 { 32 } else { with_header }
}
