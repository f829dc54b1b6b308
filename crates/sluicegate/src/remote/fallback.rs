//! The failure policy `local`: while the store is down, this process enforces its share of each limit, which is the limit divided
//! by the number of instances.
//!
//! Instances register in the store periodically and are counted there; while it is down, the last count applies. The fallback's
//! counters persist, so that repeated outages admit no more than one long outage. The store's counters are authoritative again
//! as soon as it is back.

use std::{
    slice,
    sync::{
        Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use sluicegate_core::Terms;

use super::{Position, Shared};
use crate::{
    backend::CheckShares,
    check::{Check, Tier},
    decision::Source,
    hashing::random,
    memory::MemoryStore,
};

/// The memory bound of the fallback's counters.
const MAX_MEMORY: usize = 32 << 20;
/// How often an instance registers.
const PERIOD: Duration = Duration::from_secs(2);
/// How long a registration lasts. Several may fail before the instance is no longer counted.
const LIFETIME: Duration = Duration::from_secs(10);

pub(super) struct Fallback {
    counters: MemoryStore,
    instances: AtomicU32,
    /// Whether an [`Announcer`] is running.
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
    pub(super) fn decide(&self, check: &Check) -> (CheckShares, Vec<Tier>) {
        let instances = self.instances.load(Ordering::Relaxed);
        let share = |tier: &Tier| {
            let terms = Terms { limit: tier.terms.limit.share_of(instances), ..tier.terms };
            Tier { key: tier.key.clone(), terms }
        };
        let shares: Vec<Tier> = check.tiers().iter().map(share).collect();
        let check =
            Check::new(check.operation(), shares.clone()).expect("the same counters as in a valid check");
        let answer =
            self.counters.decide_all(slice::from_ref(&check)).pop().expect("one check has one answer");
        let answer = CheckShares::from_store(&check, &answer.answers, Position::ALONE, answer.at);
        (CheckShares { source: Source::Fallback, ..answer }, shares)
    }

    /// Returns `true` once: to the caller that has to start the [`Announcer`].
    pub(super) fn must_be_announced(&self) -> bool {
        !self.is_announced.load(Ordering::Relaxed) && !self.is_announced.swap(true, Ordering::AcqRel)
    }
}

/// Registers this instance in the store for as long as the limiter exists, and counts the instances.
pub(super) struct Announcer(pub(super) Weak<Shared>);

impl Announcer {
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

impl Drop for Announcer {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            // the runtime has stopped: a task on another one may take over
            shared.fallback.is_announced.store(false, Ordering::Release);
        }
    }
}
