//! Refusals that are certain for a while, and so need not be asked for again.
//!
//! A counter that refuses a cost until some moment refuses it, and every larger one, until then, whoever else
//! comes: others can only use up more. Only a reset, a refund or another limit changes that. Those of this
//! process act at once; those of others after [`super::Options::refusal_cache`] at the latest.

use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use hashbrown::{HashTable, hash_table::Entry};
use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::{
    Answer, Operation, Retry, Terms,
    step::{Admission, Mode, Share},
};

use super::Verdict;
use crate::{
    check::{Check, Tier},
    key::Key,
};

/// How many refusals are remembered; beyond that the store is asked.
const MAX_REFUSALS: usize = 65_536;
const SHARDS: usize = 16;

pub(super) struct Refusals {
    shards: Box<[Mutex<HashTable<Refusal>>]>,
    hasher: RandomState,
    longest: Duration,
    count: AtomicUsize,
    /// Rises with everything in this process that may turn a refusal into a pass.
    changes: AtomicU64,
}

struct Refusal {
    hash: u64,
    key: Key,
    terms: Terms,
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
            hasher: RandomState::new(),
            longest,
            count: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
        }
    }

    pub(super) fn sent(&self, at: Instant) -> Sent {
        Sent { at, changes: self.changes.load(Ordering::Acquire) }
    }

    /// The refusal of a check by one of its tiers, if it is certain.
    pub(super) fn of(&self, check: &Check) -> Option<Verdict> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let now = Instant::now();
        let enforced = check.tiers().iter().enumerate().filter(|(_, tier)| tier.terms.mode == Mode::Enforced);
        enforced.into_iter().find_map(|(place, tier)| {
            let share = self.of_tier(tier, now)?;
            Some(Verdict { at: None, shares: vec![(place, share)] })
        })
    }

    fn of_tier(&self, tier: &Tier, now: Instant) -> Option<Share> {
        let hash = self.hash(tier);
        let mut shard = self.shard(hash).lock();
        let known = shard.find_entry(hash, |refusal| refusal.is_of(hash, tier)).ok()?;
        let refusal = known.get();
        if now >= refusal.until {
            known.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        refusal.covers(&tier.terms).then(|| refusal.share_at(now, &tier.terms))
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
                let (key, terms) = (tier.key.clone(), tier.terms);
                self.insert(Refusal { hash, key, terms, until, received, share }, tier, sent);
            }
        }
    }

    fn insert(&self, refusal: Refusal, tier: &Tier, sent: &Sent) {
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
        match shard.entry(refusal.hash, |other| other.is_of(refusal.hash, tier), |other| other.hash) {
            Entry::Occupied(mut known) => *known.get_mut() = refusal,
            Entry::Vacant(free) => {
                free.insert(refusal);
                self.count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Forgets the refusals of these tiers, and keeps those that are on their way from being remembered.
    pub(super) fn forget(&self, tiers: &[Tier]) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        for tier in tiers {
            let hash = self.hash(tier);
            if let Ok(known) = self.shard(hash).lock().find_entry(hash, |refusal| refusal.is_of(hash, tier)) {
                known.remove();
                self.count.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Forgets every refusal.
    pub(super) fn forget_all(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        for shard in &self.shards {
            let mut shard = shard.lock();
            self.count.fetch_sub(shard.len(), Ordering::Relaxed);
            shard.clear();
        }
    }

    fn hash(&self, tier: &Tier) -> u64 {
        self.hasher.hash_one((&tier.key, tier.terms.limit.algorithm()))
    }

    fn shard(&self, hash: u64) -> &Mutex<HashTable<Refusal>> {
        // the table uses the low bits
        let shards = u64::try_from(SHARDS).expect("a small number");
        &self.shards[usize::try_from((hash >> 32) % shards).expect("below a small number")]
    }
}

impl Refusal {
    fn is_of(&self, hash: u64, tier: &Tier) -> bool {
        self.hash == hash
            && self.key == tier.key
            && self.terms.limit.algorithm() == tier.terms.limit.algorithm()
    }

    /// Whether what was refused says anything about these terms.
    fn covers(&self, terms: &Terms) -> bool {
        self.terms.limit == terms.limit
            && self.terms.admission == terms.admission
            && terms.cost >= self.terms.cost
    }

    /// What the counter would say now. Waits are counted from when the answer came, and those of a larger cost
    /// last until nothing counts any more: nobody is invited back too early.
    fn share_at(&self, now: Instant, terms: &Terms) -> Share {
        let elapsed_us = u64::try_from((now - self.received).as_micros()).unwrap_or(u64::MAX);
        let left = |wait: Duration| wait.saturating_sub(Duration::from_micros(elapsed_us));
        let retry = match self.share.retry {
            _ if terms.admission == Admission::InFull && terms.cost.units() > terms.limit.capacity() => {
                Retry::Never
            }
            Some(Retry::After(wait)) if terms.cost == self.terms.cost => Retry::After(left(wait)),
            _ => Retry::After(left(self.share.reset_after)),
        };
        Share { retry: Some(retry), reset_after: left(self.share.reset_after), ..self.share }
    }
}
