//! Refusals that are certain for a while, and so need not be asked for again.
//!
//! A counter that refuses a cost until some moment refuses it until then, whoever else comes: others can only use
//! up more. Only a reset, a refund or another limit changes that. Those of this process act at once; those of
//! others after [`super::Options::denial_cache`] at the latest. A larger cost is refused as well, but for how
//! long is not known here: the store is asked.

use std::{
    hash::BuildHasher,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use hashbrown::{HashTable, hash_table::Entry};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;
use tollgate_core::{
    Answer, Operation, Retry,
    step::{Mode, Share},
};

use super::Verdict;
use crate::{
    check::{Check, Tier},
    hashing::Keyed,
};

/// How many refusals are remembered; beyond that the store is asked.
const MAX_REFUSALS: usize = 65_536;
const SHARDS: usize = 16;

pub(super) struct Refusals {
    shards: Box<[Mutex<HashTable<Refusal>>]>,
    hasher: Keyed,
    longest: Duration,
    count: AtomicUsize,
    /// Rises with everything in this process that may turn a refusal into a pass.
    changes: AtomicU64,
}

struct Refusal {
    hash: u64,
    tier: Tier,
    /// From this moment on, the store is asked again.
    until: Instant,
    received: Instant,
    share: Share,
}

/// What was known when a call left.
pub(super) struct Sent {
    at: Instant,
    changes: u64,
}

impl Refusals {
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: Keyed::default(),
            longest,
            count: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
        }
    }

    pub(super) fn sent(&self, at: Instant) -> Sent {
        Sent { at, changes: self.changes.load(Ordering::Acquire) }
    }

    /// The refusal of a check by its tiers, if one of them refuses for certain.
    pub(super) fn of(&self, check: &Check) -> Option<Verdict> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let now = Instant::now();
        let refusing = (check.tiers().iter().enumerate())
            .filter(|(_, tier)| tier.terms.mode == Mode::Enforced)
            .filter_map(|(place, tier)| Some((place, self.of_tier(tier, now)?)));
        let shares: SmallVec<_> = refusing.collect();
        (!shares.is_empty()).then_some(Verdict { at: None, shares })
    }

    fn of_tier(&self, tier: &Tier, now: Instant) -> Option<Share> {
        let hash = self.hash(tier);
        let mut shard = self.shard(hash).lock();
        let known = shard.find_entry(hash, |refusal| refusal.tier == *tier).ok()?;
        let refusal = known.get();
        if now >= refusal.until {
            known.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(refusal.share_at(now))
    }

    /// Remembers which tiers refuse the next request of a check for certain.
    pub(super) fn remember(&self, check: &Check, answers: &[Answer], sent: &Sent) {
        if self.longest.is_zero() || check.operation() != Operation::Check {
            return;
        }
        let received = Instant::now();
        for (tier, answer) in check.tiers().iter().zip(answers) {
            if let Some(Retry::After(wait)) = answer.retry
                && tier.terms.mode == Mode::Enforced
            {
                let hash = self.hash(tier);
                // counted from when the call left: the store decided later, so this ends too early if anything
                let until = sent.at + wait.min(self.longest);
                let share = answer.share(&tier.terms, check.count() - 1, answer.charged);
                self.insert(Refusal { hash, tier: tier.clone(), until, received, share }, sent);
            }
        }
    }

    fn insert(&self, refusal: Refusal, sent: &Sent) {
        let mut shard = self.shard(refusal.hash).lock();
        // looked at under the lock: who changes something forgets under it too
        if self.changes.load(Ordering::Acquire) != sent.changes || refusal.received >= refusal.until {
            return;
        }
        if shard.len() >= MAX_REFUSALS / SHARDS {
            let before = shard.len();
            shard.retain(|other| other.until > refusal.received);
            self.count.fetch_sub(before - shard.len(), Ordering::Relaxed);
            if shard.len() >= MAX_REFUSALS / SHARDS {
                return;
            }
        }
        match shard.entry(refusal.hash, |other| other.tier == refusal.tier, |other| other.hash) {
            Entry::Occupied(mut known) => *known.get_mut() = refusal,
            Entry::Vacant(free) => {
                free.insert(refusal);
                self.count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Forgets every refusal, and keeps those that are on their way from being remembered.
    pub(super) fn forget_all(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        for shard in &self.shards {
            let mut shard = shard.lock();
            self.count.fetch_sub(shard.len(), Ordering::Relaxed);
            shard.clear();
        }
    }

    fn hash(&self, tier: &Tier) -> u64 {
        self.hasher.hash_one(tier)
    }

    fn shard(&self, hash: u64) -> &Mutex<HashTable<Refusal>> {
        // the table uses the low bits
        let shards = u64::try_from(SHARDS).expect("a small number");
        &self.shards[usize::try_from((hash >> 32) % shards).expect("below a small number")]
    }
}

impl Refusal {
    /// What the counter said, at `now`. Waits are counted from when the answer came: nobody is invited back too
    /// early.
    fn share_at(&self, now: Instant) -> Share {
        let elapsed_us = u64::try_from((now - self.received).as_micros()).unwrap_or(u64::MAX);
        let left = |wait: Duration| wait.saturating_sub(Duration::from_micros(elapsed_us));
        let retry = match self.share.retry {
            Some(Retry::After(wait)) => Some(Retry::After(left(wait))),
            other => other,
        };
        Share { retry, reset_after: left(self.share.reset_after), ..self.share }
    }
}
