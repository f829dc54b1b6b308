//! Cached denials that need no call to the store.
//!
//! A counter that denies a cost until some time denies it until then regardless of other requests, which can only increase the
//! usage. Only a reset, a refund or a changed limit ends the denial earlier. In this process they take effect immediately, in other
//! processes within [`super::Options::denial_cache`]. A larger cost is denied as well, but its wait is unknown here, so it is sent to
//! the store.

use std::{
    hash::BuildHasher,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use hashbrown::{HashTable, hash_table::Entry};
use parking_lot::Mutex;
use sluicegate_core::{
    Answer, Operation, Retry,
    step::{Mode, Share},
};
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    backend::CheckShares,
    check::{Check, Tier},
    decision::Source,
    hashing::RandomKeyedHash,
};

/// The most cached denials; beyond that the store decides.
const MAX_DENIALS: usize = 65_536;
const SHARDS: usize = 16;

pub(super) struct DenialCache {
    shards: Box<[Mutex<HashTable<Denial>>]>,
    hasher: RandomKeyedHash,
    longest: Duration,
    count: AtomicUsize,
    /// The number of operations in this process that may end a denial: resets and refunds.
    changes: AtomicU64,
}

struct Denial {
    hash: u64,
    tier: Tier,
    /// When the entry expires.
    until: Instant,
    received: Instant,
    share: Share,
}

/// When a call was sent, and how many changes had been made by then.
pub(super) struct Sent {
    at: Instant,
    changes: u64,
}

impl DenialCache {
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomKeyedHash::default(),
            longest,
            count: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
        }
    }

    pub(super) fn sent(&self, at: Instant) -> Sent {
        Sent { at, changes: self.changes.load(Ordering::Acquire) }
    }

    /// Returns the tiers that are certain to deny a check, if there are any.
    pub(super) fn lookup(&self, check: &Check) -> Option<CheckShares> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let now = Instant::now();
        let denying = (check.tiers().iter().enumerate())
            .filter(|(_, tier)| tier.terms.mode == Mode::Enforced)
            .filter_map(|(position, tier)| Some((position, self.lookup_tier(tier, now)?)));
        let shares: SmallVec<_> = denying.collect();
        (!shares.is_empty()).then_some(CheckShares { at: None, source: Source::Cache, shares })
    }

    fn lookup_tier(&self, tier: &Tier, now: Instant) -> Option<Share> {
        let hash = self.hash(tier);
        let mut shard = self.shard(hash).lock();
        let known = shard.find_entry(hash, |denial| denial.tier == *tier).ok()?;
        let denial = known.get();
        if now >= denial.until {
            known.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(denial.share_at(now))
    }

    /// Caches which tiers are certain to deny the next request of a check.
    pub(super) fn insert_certain(&self, check: &Check, answers: &[Answer], sent: &Sent) {
        if self.longest.is_zero() || check.operation() != Operation::Check {
            return;
        }
        let received = Instant::now();
        for (tier, answer) in check.tiers().iter().zip(answers) {
            if let Some(Retry::After(wait)) = answer.retry
                && tier.terms.mode == Mode::Enforced
            {
                let hash = self.hash(tier);
                // counted from the time of sending: the store decides later, so the entry never expires too late
                let until = sent.at + wait.min(self.longest);
                let share = answer.share(&tier.terms, check.count() - 1, answer.charged);
                self.insert(Denial { hash, tier: tier.clone(), until, received, share }, sent);
            }
        }
    }

    fn insert(&self, denial: Denial, sent: &Sent) {
        let mut shard = self.shard(denial.hash).lock();
        // read under the lock, under which `clear` removes denials too
        if self.changes.load(Ordering::Acquire) != sent.changes || denial.received >= denial.until {
            return;
        }
        if shard.len() >= MAX_DENIALS / SHARDS {
            let before = shard.len();
            shard.retain(|other| other.until > denial.received);
            self.count.fetch_sub(before - shard.len(), Ordering::Relaxed);
            if shard.len() >= MAX_DENIALS / SHARDS {
                return;
            }
        }
        match shard.entry(denial.hash, |other| other.tier == denial.tier, |other| other.hash) {
            Entry::Occupied(mut known) => *known.get_mut() = denial,
            Entry::Vacant(free) => {
                free.insert(denial);
                self.count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Removes all denials, and prevents those of calls in flight from being cached.
    pub(super) fn clear(&self) {
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

    fn shard(&self, hash: u64) -> &Mutex<HashTable<Denial>> {
        // the table uses the low bits
        let shards = u64::try_from(SHARDS).expect("a small number");
        &self.shards[usize::try_from((hash >> 32) % shards).expect("below a small number")]
    }
}

impl Denial {
    /// The answer of the counter at `now`. Waits count from the arrival of the answer, so that no client retries too early.
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
