//! The failure policy `local`: while the store is down, this process enforces its share of each limit, which is the limit divided
//! by the number of instances.
//!
//! Instances register in the store periodically and are counted there; while it is down, the last count applies. The fallback's
//! counters persist, so that repeated outages admit no more than one long outage. The usage that the store last reported for a
//! counter counts as well, divided like the limit. As soon as the store recovers, its counters are authoritative again.

use std::{
    slice,
    sync::{
        Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use sluicegate_core::{
    Algorithm, Cost, HoldOutcome, Operation, Retry, Terms, Timestamp,
    hold::MIN_HOLD_TTL,
    step::{Mode, Share},
};
use smallvec::SmallVec;
use tokio::time::{Instant, sleep, timeout};

use super::{
    Position, Shared,
    instance_count::InstanceCount,
    known_usage::{KnownUsage, Usage},
};
use crate::{
    backend::CheckShares,
    check::{Check, HoldCall, HoldOperation, Tier},
    decision::Source,
    hashing::random,
    key::Key,
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
    known: KnownUsage,
    /// Whether a failure policy has ever made a hold in this process.
    has_holds: AtomicBool,
    /// Held while a decision depends on known usage, which is compared with the counters before they are charged.
    comparison: Mutex<()>,
    instances: Mutex<InstanceCount>,
    /// Whether an [`Announcer`] is running.
    is_announced: AtomicBool,
}

impl Fallback {
    /// With the number of instances to expect until they have been counted.
    pub(super) fn new(instances: u32) -> Self {
        let counters = MemoryStore::new().with_max_memory(MAX_MEMORY).expect("the bound is above the least");
        Self {
            counters,
            known: KnownUsage::default(),
            has_holds: AtomicBool::new(false),
            comparison: Mutex::default(),
            instances: Mutex::new(InstanceCount::new(instances)),
            is_announced: AtomicBool::new(false),
        }
    }

    /// Records what the store reported about a tier.
    pub(super) fn record(&self, tier: &Tier, share: &Share, at: Timestamp) {
        self.known.record(tier, share, at);
    }

    /// Records what the store reported about the counters of a hold that was settled, released or renewed.
    pub(super) fn record_adjustment(&self, check: &Check, shares: &CheckShares) {
        let Some(at) = shares.at else { return };
        for (position, share) in &shares.shares {
            use HoldOutcome::{Late, Renewed, Settled};
            let is_renewal =
                matches!(check.hold(), Some(HoldCall { operation: HoldOperation::Renew { .. }, .. }));
            let has_usage = match shares.holds[*position].outcome {
                Settled | Renewed => true,
                Late => !is_renewal,
                _ => false,
            };
            if has_usage {
                self.known.replace(&check.tiers()[*position], share, at);
            }
        }
    }

    /// Deletes the known usage and the fallback counters of counters that the store has deleted.
    pub(super) fn reset(&self, counters: &[(Key, Algorithm)]) {
        self.known.remove(counters);
        self.counters.forget(counters);
    }

    /// Records how many instances the store has counted; `None` if it did not.
    fn record_count(&self, count: Option<u32>) {
        let mut instances = self.instances.lock();
        match count {
            Some(count) => instances.counted(count, Instant::now()),
            None => instances.not_counted(),
        }
    }

    /// Returns the number of instances, once the store has counted them.
    pub(super) fn counted_instances(&self) -> Option<u32> {
        let instances = self.instances.lock();
        instances.is_counted().then(|| instances.current())
    }

    /// Decides by this process's share of each limit.
    pub(super) fn decide(&self, check: &Check) -> (CheckShares, Vec<Tier>) {
        let instances = self.instances.lock().current();
        let share = |tier: &Tier| {
            let terms = Terms { limit: tier.terms.limit.share_of(instances), ..tier.terms };
            Tier { key: tier.key.clone(), terms }
        };
        let shares: Vec<Tier> = check.tiers().iter().map(share).collect();
        let known = |tier: &Tier| {
            let usage = self.known.lookup(&tier.key, &tier.terms.limit)?;
            Some(Usage { used: usage.used.div_ceil(instances.into()), ..usage })
        };
        let known: SmallVec<[Option<Usage>; 1]> = check.tiers().iter().map(known).collect();
        // a hold that is repeated has its units already
        if known.iter().all(Option::is_none) || self.has_hold(check) {
            return (self.decide_by_counters(&like(check, &shares)), shares);
        }
        let _comparison = self.comparison.lock();
        let denied = self.denied_by_known_usage(&shares, &known);
        if !denied.shares.is_empty() {
            return (denied, shares);
        }
        let mut decided = self.decide_by_counters(&like(check, &shares));
        for (position, share) in &mut decided.shares {
            if let Some(usage) = known[*position] {
                share.remaining = share.remaining.saturating_sub(usage.used);
                share.reset_after = share.reset_after.max(usage.reset_after);
            }
        }
        (decided, shares)
    }

    /// Settles, releases or renews a hold that this process made. Returns `None` for other holds.
    pub(super) fn adjust_hold(&self, check: &Check) -> Option<CheckShares> {
        if !self.has_holds.load(Ordering::Relaxed) {
            return None;
        }
        let adjusted = self.decide_by_counters(check);
        adjusted.holds.iter().any(|hold| hold.outcome != HoldOutcome::Unknown).then_some(adjusted)
    }

    /// Whether this process made the hold, and a check repeats it.
    fn has_hold(&self, check: &Check) -> bool {
        let Some(HoldCall { id, operation: HoldOperation::Hold { .. } }) = check.hold() else { return false };
        // moves no expiry: every hold lasts longer
        let renewal = HoldOperation::Renew { ttl: MIN_HOLD_TTL };
        self.adjust_hold(&check.clone().with_hold(id.clone(), renewal)).is_some()
    }

    fn decide_by_counters(&self, check: &Check) -> CheckShares {
        let answer =
            self.counters.decide_all(slice::from_ref(check)).pop().expect("one check has one answer");
        if answer.answers.iter().any(|answer| answer.hold.outcome == HoldOutcome::Held) {
            self.has_holds.store(true, Ordering::Relaxed);
        }
        let answer = CheckShares::from_store(check, &answer.answers, Position::ALONE, answer.at);
        CheckShares { source: Source::Fallback, ..answer }
    }

    /// Returns the tiers whose available units, less the known usage, are not sufficient.
    fn denied_by_known_usage(&self, tiers: &[Tier], known: &[Option<Usage>]) -> CheckShares {
        let free = |tier: &Tier| {
            let terms = Terms { cost: Cost::ZERO, ..tier.terms };
            let tier = Tier { key: tier.key.clone(), terms };
            self.decide_by_counters(&peek(tier)).shares[0].1.remaining
        };
        let denied = tiers.iter().zip(known).enumerate().filter_map(|(position, (tier, usage))| {
            let usage = (*usage).filter(|_| tier.terms.mode == Mode::Enforced)?;
            let needed = tier.terms.required_units();
            let remaining = free(tier).saturating_sub(usage.used);
            let is_denied = remaining < needed && needed <= tier.terms.limit.capacity();
            let retry = Some(Retry::After(usage.reset_after));
            let share = Share { passes: false, remaining, debt: 0, retry, reset_after: usage.reset_after };
            is_denied.then_some((position, share))
        });
        CheckShares { at: None, source: Source::Fallback, shares: denied.collect(), holds: Vec::new() }
    }

    /// Returns `true` once: to the caller that has to start the [`Announcer`].
    pub(super) fn must_be_announced(&self) -> bool {
        !self.is_announced.load(Ordering::Relaxed) && !self.is_announced.swap(true, Ordering::AcqRel)
    }
}

/// Returns the same operation on other tiers.
fn like(check: &Check, tiers: &[Tier]) -> Check {
    let own = Check::new(check.operation(), tiers.to_vec()).expect("the same counters as in a valid check");
    match check.hold() {
        Some(HoldCall { id, operation }) => own.with_hold(id.clone(), *operation),
        None => own,
    }
}

fn peek(tier: Tier) -> Check {
    Check::new(Operation::Peek, vec![tier]).expect("one counter is a check")
}

/// Registers this instance in the store for as long as the limiter exists, and counts the instances.
pub(super) struct Announcer(pub(super) Weak<Shared>);

impl Announcer {
    pub(super) async fn run(self) {
        let instance = random();
        loop {
            let Some(shared) = self.0.upgrade() else { return };
            let counted = timeout(PERIOD, shared.store.announce(instance, LIFETIME)).await;
            shared.fallback.record_count(counted.ok().and_then(Result::ok));
            drop(shared);
            sleep(PERIOD).await;
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
