//! Stands in for the store while it is away, for the rules that want that: this process enforces its share of each
//! limit, which is the limit divided by how many processes there are.
//!
//! They are counted in the store, where each makes itself known every now and then; while the store is away, the
//! last count holds. What was admitted here is remembered, so that a store that comes and goes grants no more than
//! one that stays away. When it is back, it is the truth again.

use std::{
    slice,
    sync::{
        Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use tollgate_core::Terms;

use super::{Place, Shared, Verdict};
use crate::{
    check::{Check, Tier},
    hashing::random,
    memory::MemoryStore,
    store::Store,
};

/// How much memory the counters may take that stand in for the store's.
const MAX_MEMORY: usize = 32 << 20;
/// How often a process makes itself known.
const PERIOD: Duration = Duration::from_secs(2);
/// For how long it is counted then: it may miss some of its turns.
const LIFETIME: Duration = Duration::from_secs(10);

pub(super) struct Fallback {
    counters: MemoryStore,
    instances: AtomicU32,
    /// Whether this process makes itself known already.
    is_announced: AtomicBool,
}

impl Default for Fallback {
    fn default() -> Self {
        let counters = MemoryStore::new().with_max_memory(MAX_MEMORY).expect("the bound is above the least");
        Self { counters, instances: AtomicU32::new(1), is_announced: AtomicBool::new(false) }
    }
}

impl Fallback {
    /// Decides by this process's share of each limit.
    pub(super) fn decide(&self, check: &Check) -> (Verdict, Vec<Tier>) {
        let instances = self.instances.load(Ordering::Relaxed);
        let share = |tier: &Tier| {
            let terms = Terms { limit: tier.terms.limit.share_of(instances), ..tier.terms };
            Tier { key: tier.key.clone(), terms }
        };
        let shares: Vec<Tier> = check.tiers().iter().map(share).collect();
        let check =
            Check::new(check.operation(), shares.clone()).expect("the same counters as in a valid check");
        let decided = self.counters.decide_all(slice::from_ref(&check));
        (Verdict::of(&check, &decided.answers[0], Place::ALONE, decided.at), shares)
    }

    /// Whether this process is still to be made known; the one who is told so does it.
    pub(super) fn must_be_announced(&self) -> bool {
        !self.is_announced.load(Ordering::Relaxed) && !self.is_announced.swap(true, Ordering::AcqRel)
    }
}

/// Makes this process known in the store for as long as it asks it, and counts who else is.
pub(super) struct Presence<S: Store>(pub(super) Weak<Shared<S>>);

impl<S: Store> Presence<S> {
    pub(super) async fn run(self) {
        let instance = random();
        loop {
            let Some(shared) = self.0.upgrade() else { return };
            if let Ok(Ok(count)) =
                tokio::time::timeout(PERIOD, shared.store.announce(instance, LIFETIME)).await
            {
                shared.fallback.instances.store(count.max(1), Ordering::Relaxed);
            }
            drop(shared);
            tokio::time::sleep(PERIOD).await;
        }
    }
}

impl<S: Store> Drop for Presence<S> {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            // its runtime is gone; another one may go on
            shared.fallback.is_announced.store(false, Ordering::Release);
        }
    }
}
