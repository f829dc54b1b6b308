//! What the store reported last about the counters of this process, so that the fallback does not start from nothing.

use std::{hash::BuildHasher, time::Duration};

use parking_lot::Mutex;
use sluicegate_core::{Algorithm, Limit, step::Share};
use tokio::time::Instant;

use crate::{check::Tier, hashing::RandomKeyedHash, key::Key};

/// The number of counters that are remembered; a further one replaces the oldest of [`WAYS`].
const MAX_COUNTERS: usize = 65_536;
/// The number of places that a counter may take.
const WAYS: usize = 8;
const SETS: usize = MAX_COUNTERS / WAYS;

/// The last reported usage of recent counters. Counters are identified by a keyed hash: a collision only makes the
/// fallback stricter or more generous than it could be.
pub(super) struct KnownUsage {
    sets: Box<[Mutex<[Option<Report>; WAYS]>]>,
    hasher: RandomKeyedHash,
}

/// The state of a counter after a decision of the store.
#[derive(Clone, Copy)]
struct Report {
    hash: u64,
    received: Instant,
    used: u64,
    /// How long after `received` nothing counts any more.
    reset_after: Duration,
}

/// Units of a counter that are known to be in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) used: u64,
    /// The time until nothing of it counts.
    pub(super) reset_after: Duration,
}

impl Default for KnownUsage {
    fn default() -> Self {
        let sets = (0..SETS).map(|_| Mutex::new([None; WAYS])).collect();
        Self { sets, hasher: RandomKeyedHash::default() }
    }
}

impl KnownUsage {
    /// Records the store's answer for a tier.
    pub(super) fn record(&self, tier: &Tier, share: &Share) {
        let (hash, received) = (self.hash(&tier.key, tier.terms.limit.algorithm()), Instant::now());
        let used = tier.terms.limit.capacity().saturating_sub(share.remaining).saturating_add(share.debt);
        let report = Report { hash, received, used, reset_after: share.reset_after };
        let mut set = self.set(hash).lock();
        let known = set.iter_mut().flatten().find(|known| known.hash == hash);
        if let Some(known) = known {
            *known = report;
            return;
        }
        let is_replaced_before = |place: &&mut Option<Report>| place.map(|report| report.received);
        if let Some(place) = set.iter_mut().min_by_key(is_replaced_before) {
            *place = Some(report);
        }
    }

    /// Returns what is known to be used of a counter now.
    pub(super) fn lookup(&self, key: &Key, limit: &Limit) -> Option<Usage> {
        let hash = self.hash(key, limit.algorithm());
        let report = *self.set(hash).lock().iter().flatten().find(|known| known.hash == hash)?;
        let elapsed = report.received.elapsed();
        let left = report.reset_after.checked_sub(elapsed).filter(|left| !left.is_zero())?;
        let used = match limit.algorithm() {
            // drains evenly until nothing is left
            Algorithm::TokenBucket => {
                let (left, whole) = (left.as_micros(), report.reset_after.as_micros());
                u64::try_from((u128::from(report.used) * left).div_ceil(whole)).unwrap_or(report.used)
            }
            // when its parts end is not known
            Algorithm::FixedWindow | Algorithm::SlidingLog | Algorithm::SlidingCounter => report.used,
        };
        (used > 0).then_some(Usage { used, reset_after: left })
    }

    /// Removes what is known about these counters.
    pub(super) fn remove(&self, counters: &[(Key, Algorithm)]) {
        for (key, algorithm) in counters {
            let hash = self.hash(key, *algorithm);
            for place in self.set(hash).lock().iter_mut() {
                if place.is_some_and(|report| report.hash == hash) {
                    *place = None;
                }
            }
        }
    }

    fn hash(&self, key: &Key, algorithm: Algorithm) -> u64 {
        self.hasher.hash_one((key, algorithm))
    }

    fn set(&self, hash: u64) -> &Mutex<[Option<Report>; WAYS]> {
        let sets = u64::try_from(SETS).expect("a small number");
        &self.sets[usize::try_from(hash % sets).expect("below a small number")]
    }
}
