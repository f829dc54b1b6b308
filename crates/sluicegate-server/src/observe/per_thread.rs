//! One cell per thread, so that threads do not contend for a cache line.

use std::{
    cell::Cell,
    marker::PhantomData,
    ops::Deref,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// Number of cells: one for each of the first threads, and the last for all others.
pub(super) const CELLS: usize = 16;

/// A value with one cell per thread.
#[derive(Default)]
pub(super) struct PerThread<T>([CachePadded<T>; CELLS]);

/// Padded to 128 bytes, since processors prefetch pairs of 64-byte cache lines.
#[derive(Default)]
#[repr(align(128))]
struct CachePadded<T>(T);

/// The cell of the current thread.
pub(super) struct ThreadCell<'a, T> {
    cell: &'a T,
    place: CellIndex,
    /// Makes this type neither `Send` nor `Sync`.
    own: PhantomData<*const ()>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CellIndex {
    /// Only this thread writes to the cell.
    Exclusive(usize),
    /// Several threads share the last cell.
    Shared,
}

impl<T> PerThread<T> {
    /// Returns the cell of the current thread.
    pub(super) fn own(&self) -> ThreadCell<'_, T> {
        let place = own_cell();
        let at = match place {
            CellIndex::Exclusive(at) => at,
            CellIndex::Shared => CELLS - 1,
        };
        ThreadCell { cell: &self.0[at].0, place, own: PhantomData }
    }

    /// Returns all cells.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|cell| &cell.0)
    }
}

impl<T> ThreadCell<'_, T> {
    /// Adds to a counter of the cell. An exclusive cell needs no atomic read-modify-write.
    pub(super) fn add(&self, count: impl Fn(&T) -> &AtomicU64, number: u64) {
        let count = count(self.cell);
        match self.place {
            CellIndex::Exclusive(_) => count.store(count.load(Relaxed).wrapping_add(number), Relaxed),
            CellIndex::Shared => {
                count.fetch_add(number, Relaxed);
            }
        }
    }
}

impl<T> Deref for ThreadCell<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.cell
    }
}

fn own_cell() -> CellIndex {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<Option<CellIndex>> = const { Cell::new(None) };
    }
    OWN.get().unwrap_or_else(|| {
        let next = NEXT.fetch_add(1, Relaxed);
        let own = if next < CELLS - 1 { CellIndex::Exclusive(next) } else { CellIndex::Shared };
        OWN.set(Some(own));
        own
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn no_count_is_lost_with_more_threads_than_cells() {
        const TIMES: u64 = 10_000;
        let counts = PerThread::<AtomicU64>::default();
        thread::scope(|scope| {
            for _ in 0..3 * CELLS {
                scope.spawn(|| (0..TIMES).for_each(|_| counts.own().add(|count| count, 1)));
            }
        });
        let sum: u64 = counts.all().map(|count| count.load(Relaxed)).sum();
        assert_eq!(sum, 3 * CELLS as u64 * TIMES);
    }
}
