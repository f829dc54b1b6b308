//! A remote store whose replies the test controls.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use sluicegate::{
    Algorithm, Limit, MemoryStore, StoreError,
    store::{BoxFuture, Check, CheckAnswer, CounterSnapshot, Deadline, Key, RemoteStore},
};
use tokio::sync::Semaphore;

/// A remote store over counters in memory. Every call to decide waits for a permit, or fails at once while the store is down; `inspect` never
/// answers.
pub struct GatedStore {
    counters: MemoryStore,
    is_down: AtomicBool,
    received: Semaphore,
    permits: Semaphore,
    inspections: AtomicU32,
}

impl GatedStore {
    /// A store that answers nothing until it has permits.
    pub fn closed() -> Arc<Self> {
        Self::with_permits(0)
    }

    /// A store that answers every call.
    pub fn open() -> Arc<Self> {
        Self::with_permits(Semaphore::MAX_PERMITS)
    }

    fn with_permits(permits: usize) -> Arc<Self> {
        Arc::new(Self {
            counters: MemoryStore::new(),
            is_down: AtomicBool::new(false),
            received: Semaphore::new(0),
            permits: Semaphore::new(permits),
            inspections: AtomicU32::new(0),
        })
    }

    /// Waits until another call has arrived.
    pub async fn received(&self) {
        self.received.acquire().await.expect("the semaphore is never closed").forget();
    }

    /// Permits this many calls to be answered.
    pub fn permit(&self, calls: usize) {
        self.permits.add_permits(calls);
    }

    /// Starts or ends an outage: meanwhile no call runs.
    pub fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }

    fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    /// How often `inspect` was called.
    pub fn inspections(&self) -> u32 {
        self.inspections.load(Ordering::Relaxed)
    }
}

fn not_run() -> StoreError {
    StoreError::NotRun("the store is down".to_owned())
}

impl RemoteStore for GatedStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async move {
            if self.is_down() {
                return vec![Err(not_run()); checks.len()];
            }
            self.received.add_permits(1);
            self.permits.acquire().await.expect("the semaphore is never closed").forget();
            self.counters.decide_all(checks).into_iter().map(Ok).collect()
        })
    }

    fn probe(&self, _: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async {
            if self.is_down() {
                return Err(not_run());
            }
            if self.permits.available_permits() > 0 { Ok(()) } else { pending().await }
        })
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async { Ok(1) })
    }

    fn reset<'a>(&'a self, counters: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async { Ok(self.counters.forget(counters)) })
    }

    fn inspect<'a>(
        &'a self,
        _: &'a [(Key, Limit)],
    ) -> BoxFuture<'a, Result<Vec<Option<CounterSnapshot>>, StoreError>> {
        self.inspections.fetch_add(1, Ordering::Relaxed);
        Box::pin(pending())
    }
}
