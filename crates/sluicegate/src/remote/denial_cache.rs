//! The denial cache: denials that need no call to the store.
//!
//! If a counter denies a cost until some time, it denies that cost until then regardless of other requests, because these can only
//! increase the usage. Only a reset, a refund or a changed limit ends the denial earlier. In this process they take effect immediately,
//! in other processes within [`super::Options::denial_cache`]. A larger cost would also be denied, but this process cannot calculate
//! its wait, so it is sent to the store.
//!
//! On a store with reservations (a Cluster), a denial is cached only if the counter has denied, without an admission in between, for
//! longer than a reservation of another check lasts, because such a reservation may be the cause and is released soon.

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
    key::Key,
};

/// The most cached denials; beyond that the store decides.
const MAX_DENIALS: usize = 65_536;
const SHARDS: usize = 16;
/// The number of slots for the last changes of keys. A change of one key also ends the cached denials of keys with the
/// same slot.
const CHANGE_PLACES: usize = 65_536;

pub(super) struct DenialCache {
    shards: Box<[Mutex<HashTable<Denial>>]>,
    hasher: RandomKeyedHash,
    longest: Duration,
    /// How long a reservation of another check may cause denials; zero if the store has no reservations.
    longest_reservation: Duration,
    count: AtomicUsize,
    /// The number of operations in this process that may end a denial: resets and refunds.
    changes: AtomicU64,
    /// The number of the last of them, by the hash of the key.
    last_changes: Box<[AtomicU64]>,
}

struct Denial {
    hash: u64,
    tier: Tier,
    /// When the entry expires.
    until: Instant,
    received: Instant,
    /// When the first of the denials without an admission in between was received.
    since: Instant,
    /// Whether no reservation can be the cause of the denial.
    is_certain: bool,
    /// The number of changes when the call was sent.
    changes: u64,
    share: Share,
}

/// When a call was sent, and how many changes had been made by then.
pub(super) struct Sent {
    at: Instant,
    changes: u64,
}

impl DenialCache {
    pub(super) fn new(longest: Duration, longest_reservation: Duration) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomKeyedHash::default(),
            longest,
            longest_reservation,
            count: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            last_changes: (0..CHANGE_PLACES).map(|_| AtomicU64::new(0)).collect(),
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
        (!shares.is_empty()).then_some(CheckShares {
            at: None,
            source: Source::Cache,
            shares,
            holds: Vec::new(),
        })
    }

    fn lookup_tier(&self, tier: &Tier, now: Instant) -> Option<Share> {
        let hash = self.hash(tier);
        let mut shard = self.shard(hash).lock();
        let known = shard.find_entry(hash, |denial| denial.tier == *tier).ok()?;
        let denial = known.get();
        if now >= denial.until + self.longest_reservation || self.has_changed(denial) {
            known.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        (denial.is_certain && now < denial.until).then(|| denial.share_at(now))
    }

    /// Caches which tiers are certain to deny the next request of a check. A denial that a settled or expired hold can end is not certain.
    pub(super) fn insert_certain(&self, check: &Check, answers: &[Answer], sent: &Sent) {
        if self.longest.is_zero() || check.operation() != Operation::Check || check.uses_holds() {
            return;
        }
        let received = Instant::now();
        for (tier, answer) in check.tiers().iter().zip(answers) {
            if let Some(Retry::After(wait)) = answer.retry
                // leased units may be returned at any time, which may end the denial
                && answer.leased == 0
                && tier.terms.mode == Mode::Enforced
            {
                let hash = self.hash(tier);
                // counted from the time of sending: the store decides later, so the entry never expires too late
                let until = sent.at + wait.min(self.longest);
                let share = answer.share(&tier.terms, check.count() - 1, answer.charged);
                let is_certain = self.longest_reservation.is_zero();
                let (tier, since, changes) = (tier.clone(), received, sent.changes);
                let denial = Denial { hash, tier, until, received, since, is_certain, changes, share };
                if answer.passes > 0 {
                    self.end_denials(&denial.tier);
                }
                self.insert(denial, sent.at);
            } else if answer.retry.is_none() {
                self.end_denials(tier);
            }
        }
    }

    /// Records that a counter admitted a request. Denials by a counter with reservations must be consecutive to be certain.
    fn end_denials(&self, tier: &Tier) {
        if self.longest_reservation.is_zero() || self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let hash = self.hash(tier);
        if let Ok(known) = self.shard(hash).lock().find_entry(hash, |denial| denial.tier == *tier) {
            known.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn insert(&self, mut denial: Denial, sent_at: Instant) {
        if self.has_changed(&denial) || denial.received >= denial.until {
            return;
        }
        let mut shard = self.shard(denial.hash).lock();
        if shard.len() >= MAX_DENIALS / SHARDS {
            let before = shard.len();
            shard.retain(|other| other.until > denial.received && !self.has_changed(other));
            self.count.fetch_sub(before - shard.len(), Ordering::Relaxed);
            if shard.len() >= MAX_DENIALS / SHARDS {
                return;
            }
        }
        match shard.entry(denial.hash, |other| other.tier == denial.tier, |other| other.hash) {
            Entry::Occupied(mut known) => {
                let known = known.get_mut();
                if sent_at < known.until + self.longest_reservation && !self.has_changed(known) {
                    denial.since = known.since;
                    denial.is_certain |= sent_at >= known.since + self.longest_reservation;
                }
                *known = denial;
            }
            Entry::Vacant(free) => {
                free.insert(denial);
                self.count.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Records a reset or refund of these counters, which ends their denials, including those of calls in flight.
    pub(super) fn record_change<'a>(&self, keys: impl IntoIterator<Item = &'a Key>) {
        let change = self.changes.fetch_add(1, Ordering::AcqRel) + 1;
        for key in keys {
            self.last_change(key).fetch_max(change, Ordering::AcqRel);
        }
    }

    /// Returns whether the counter of a denial may have changed since the call was sent.
    fn has_changed(&self, denial: &Denial) -> bool {
        self.last_change(&denial.tier.key).load(Ordering::Acquire) > denial.changes
    }

    fn last_change(&self, key: &Key) -> &AtomicU64 {
        let places = u64::try_from(CHANGE_PLACES).expect("a small number");
        &self.last_changes[usize::try_from(self.hasher.hash_one(key) % places).expect("below a small number")]
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

#[cfg(test)]
mod tests {
    use sluicegate_core::{Cost, Limit, Terms};
    use tokio::time::{advance, sleep};

    use super::*;
    use crate::key::Key;

    const LONGEST: Duration = Duration::from_secs(1);
    const RESERVATION: Duration = Duration::from_millis(100);

    fn check() -> Check {
        check_of("k")
    }

    fn check_of(key: &str) -> Check {
        let limit = Limit::fixed_window(10, Duration::from_secs(3_600)).unwrap();
        let tier = Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(limit, Cost::ONE) };
        Check::new(Operation::Check, vec![tier]).unwrap()
    }

    /// Records a reply of the store that took 1 ms. It admits this many of two requests.
    async fn reply(cache: &DenialCache, passes: u32) {
        let sent = cache.sent(Instant::now());
        advance(Duration::from_millis(1)).await;
        record(cache, &check(), &sent, passes);
    }

    fn record(cache: &DenialCache, check: &Check, sent: &Sent, passes: u32) {
        let retry = (passes < 2).then_some(Retry::After(Duration::from_secs(60)));
        let answer = Answer { passes, charged: passes, retry, reset_after_us: 60_000_000, ..Answer::NONE };
        cache.insert_certain(&check.clone().times(2), &[answer], sent);
    }

    fn is_cached(cache: &DenialCache) -> bool {
        cache.lookup(&check()).is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn without_reservations_the_first_denial_is_cached() {
        let cache = DenialCache::new(LONGEST, Duration::ZERO);
        reply(&cache, 0).await;
        assert!(is_cached(&cache));
        sleep(LONGEST).await;
        assert!(!is_cached(&cache));
    }

    #[tokio::test(start_paused = true)]
    async fn with_reservations_a_denial_is_cached_once_it_has_lasted_longer_than_they_do() {
        let cache = DenialCache::new(LONGEST, RESERVATION);
        reply(&cache, 0).await;
        assert!(!is_cached(&cache), "a reservation may be the cause");
        sleep(RESERVATION / 2).await;
        reply(&cache, 0).await;
        assert!(!is_cached(&cache));
        sleep(RESERVATION / 2).await;
        reply(&cache, 0).await;
        assert!(is_cached(&cache));
        sleep(LONGEST).await;
        assert!(!is_cached(&cache), "it has expired");
        reply(&cache, 0).await;
        assert!(is_cached(&cache), "the denials continue");
        sleep(LONGEST + RESERVATION).await;
        reply(&cache, 0).await;
        assert!(!is_cached(&cache), "after a gap they start again");
    }

    #[tokio::test(start_paused = true)]
    async fn with_reservations_an_admission_in_between_starts_again() {
        for passes in [1, 2] {
            let cache = DenialCache::new(LONGEST, RESERVATION);
            for admitted in [0, passes, 0] {
                reply(&cache, admitted).await;
                sleep(RESERVATION / 3).await;
            }
            reply(&cache, 0).await;
            assert!(!is_cached(&cache), "{passes} of 2 passed within the time");
            sleep(RESERVATION).await;
            reply(&cache, 0).await;
            assert!(is_cached(&cache));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_of_one_key_ends_its_denials_and_no_others() {
        let cache = DenialCache::new(LONGEST, Duration::ZERO);
        let checks: Vec<Check> = (0..100).map(|key| check_of(&key.to_string())).collect();
        let deny_all = |sent: &Sent| checks.iter().for_each(|check| record(&cache, check, sent, 0));
        let cached = || checks.iter().filter(|check| cache.lookup(check).is_some()).count();
        let sent = cache.sent(Instant::now());
        deny_all(&sent);
        assert_eq!(cached(), 100);
        cache.record_change([&checks[7].tiers()[0].key]);
        assert!(cache.lookup(&checks[7]).is_none());
        assert!(cached() >= 90, "{} of 100 denials are left", cached());
        deny_all(&sent);
        assert!(cache.lookup(&checks[7]).is_none(), "the call was sent before the change");
        deny_all(&cache.sent(Instant::now()));
        assert_eq!(cached(), 100);
    }
}
