//! One of a thing for each thread: threads that write to the same memory wait for each other.

use std::{
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// How many threads do not meet; beyond so many, some share.
pub(super) const SHARDS: usize = 16;

/// One for each thread, or nearly.
#[derive(Default)]
pub(super) struct Sharded<T>([Apart<T>; SHARDS]);

/// Apart from its neighbours also in memory: processors fetch two lines of 64 bytes at a time.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

impl<T> Sharded<T> {
    /// This thread's.
    pub(super) fn own(&self) -> &T {
        &self.0[own_place()].0
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|shard| &shard.0)
    }
}

fn own_place() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<Option<usize>> = const { Cell::new(None) };
    }
    OWN.get().unwrap_or_else(|| {
        let own = NEXT.fetch_add(1, Relaxed) % SHARDS;
        OWN.set(Some(own));
        own
    })
}
