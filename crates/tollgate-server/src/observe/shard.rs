//! One of a thing for each thread: threads that write to the same memory wait for each other.

use std::{
    cell::Cell,
    marker::PhantomData,
    ops::Deref,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// One for each of the first threads that ask, and the last one for all others.
pub(super) const SHARDS: usize = 16;

/// One for each thread, or nearly.
#[derive(Default)]
pub(super) struct Sharded<T>([Apart<T>; SHARDS]);

/// Apart from its neighbours also in memory: processors fetch two lines of 64 bytes at a time.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// A thread's own.
pub(super) struct Own<'a, T> {
    shard: &'a T,
    place: Place,
    /// It stays with its thread.
    own: PhantomData<*const ()>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nobody else writes there.
    Alone(usize),
    /// The last one.
    Shared,
}

impl<T> Sharded<T> {
    /// This thread's.
    pub(super) fn own(&self) -> Own<'_, T> {
        let place = own_place();
        let at = match place {
            Place::Alone(at) => at,
            Place::Shared => SHARDS - 1,
        };
        Own { shard: &self.0[at].0, place, own: PhantomData }
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|shard| &shard.0)
    }
}

impl<T> Own<'_, T> {
    /// Adds to one of its counts. Where nobody else writes there, that takes a fraction of the time.
    pub(super) fn add(&self, count: impl Fn(&T) -> &AtomicU64, number: u64) {
        let count = count(self.shard);
        match self.place {
            Place::Alone(_) => count.store(count.load(Relaxed).wrapping_add(number), Relaxed),
            Place::Shared => {
                count.fetch_add(number, Relaxed);
            }
        }
    }
}

impl<T> Deref for Own<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.shard
    }
}

fn own_place() -> Place {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<Option<Place>> = const { Cell::new(None) };
    }
    OWN.get().unwrap_or_else(|| {
        let next = NEXT.fetch_add(1, Relaxed);
        let own = if next < SHARDS - 1 { Place::Alone(next) } else { Place::Shared };
        OWN.set(Some(own));
        own
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn nothing_is_lost_however_many_threads_count() {
        const TIMES: u64 = 10_000;
        let counts = Sharded::<AtomicU64>::default();
        thread::scope(|scope| {
            for _ in 0..3 * SHARDS {
                scope.spawn(|| (0..TIMES).for_each(|_| counts.own().add(|count| count, 1)));
            }
        });
        let sum: u64 = counts.all().map(|count| count.load(Relaxed)).sum();
        assert_eq!(sum, 3 * SHARDS as u64 * TIMES);
    }
}
