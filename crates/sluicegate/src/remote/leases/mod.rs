//! Leases: units of hot counters that this process has charged in advance. It spends them without a call to the store.
//!
//! ```text
//! a check whose limits all have a lease
//!   -> this process has leased enough units  -> allowed immediately                           (Leases::spend)
//!   -> otherwise it is sent to the store     -> the same call charges further requests        (Leases::plan, Leases::record)
//! a lease that is spent                      -> the next call for its counters reports it     (Leases::plan)
//! a lease that expires or is idle            -> the background task refunds what is left      (returns)
//! ```
//!
//! A unit is charged before it is spent, so the counter in the store never exceeds its limit. A lease belongs to a set of counters that
//! are checked together, so that one decrement admits a request or does not. The store limits how many units are leased at one time; this
//! process takes at most its share of them.

mod demand;
mod returns;

use std::{
    collections::BinaryHeap,
    hash::{BuildHasher, Hash, Hasher},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use hashbrown::{HashTable, hash_table::Entry};
use parking_lot::Mutex;
use sluicegate_core::{Answer, Cost, Operation, Terms, Timestamp, step::Share};
use smallvec::SmallVec;
use tokio::{sync::Notify, time::Instant};

use self::{
    demand::{Demand, HotChecks},
    returns::Due,
};
use crate::{
    backend::CheckShares,
    check::{Check, LeaseCall, Tier, Tiers},
    decision::Source,
    hashing::RandomKeyedHash,
    key::Key,
    stats::LeaseStats,
    store::{CheckAnswer, StoreError},
};

/// The most sets of counters with leases or recent demand; the checks of further sets go to the store.
const MAX_ENTRIES: usize = 65_536;
const SHARDS: usize = 16;
/// The shortest time between two searches of a full shard for inactive entries.
const SWEEP_PAUSE: Duration = Duration::from_millis(100);
/// The most leases of one set of counters: one that is being spent, and one that was drawn before it is used up.
const MAX_LEASES: usize = 2;
/// The shortest time after which the background task looks again at an entry without leases.
const LEAST_PAUSE_WITHOUT_LEASE: Duration = Duration::from_millis(50);
/// A lease is renewed when less than this part of it is left, or of its lifetime.
const RENEWAL_PART: u32 = 4;

/// The leases of this process.
pub(super) struct Leases {
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomKeyedHash,
    hot: HotChecks,
    count: AtomicUsize,
    /// When the background task has to look at which leases, the earliest first.
    due: Mutex<BinaryHeap<Due>>,
    has_returner: AtomicBool,
    /// Wakes the background task when there is a lease again, or when the limiter is dropped.
    returner_wakes: Arc<Notify>,
    counters: LeaseCounters,
}

impl Drop for Leases {
    fn drop(&mut self) {
        self.returner_wakes.notify_one();
    }
}

/// A part of the table.
#[derive(Default)]
struct Shard {
    table: HashTable<CheckLeases>,
    /// When inactive entries were last removed because the shard was full.
    swept: Option<Instant>,
}

impl Shard {
    fn find_mut(&mut self, hash: u64, check: &Check) -> Option<&mut CheckLeases> {
        self.table.find_mut(hash, |entry| entry.is_for(check))
    }

    /// Removes inactive entries if the shard is full, and returns how many.
    fn sweep(&mut self, now: Instant) -> usize {
        let is_recent = self.swept.is_some_and(|swept| now.duration_since(swept) < SWEEP_PAUSE);
        if self.table.len() < MAX_ENTRIES / SHARDS || is_recent {
            return 0;
        }
        self.swept = Some(now);
        let before = self.table.len();
        self.table.retain(|entry| entry.is_active(now));
        before - self.table.len()
    }
}

/// Counters behind [`LeaseStats`], in units.
#[derive(Default)]
struct LeaseCounters {
    drawn: AtomicU64,
    spent: AtomicU64,
    returned: AtomicU64,
    lost: AtomicU64,
}

/// The leases of the counters that one or more checks use together.
struct CheckLeases {
    hash: u64,
    /// The counters. Their costs are those of the check that came first, and not used.
    tiers: Tiers,
    lifetime: Duration,
    demand: Demand,
    /// The earliest first.
    leases: SmallVec<[Lease; MAX_LEASES]>,
    /// A lease is renewed when fewer requests are left.
    renew_below: u64,
    /// Until when a draw may be in flight; no other one is sent before that.
    drawing_until: Option<Instant>,
    /// Until when a check may be on its way to the store to renew a lease.
    renewing_until: Option<Instant>,
    last_spent: Instant,
}

/// The units of one draw.
struct Lease {
    /// The store's time of the draw.
    at: Timestamp,
    /// Counted from the time of sending, so that the lease never expires later here than in the store.
    expires: Instant,
    received: Instant,
    tiers: SmallVec<[TierLease; 1]>,
}

/// The units of one draw on one counter.
struct TierLease {
    left: u64,
    /// Whether the check that drew the lease has a cost on this counter.
    is_drawn: bool,
    /// Units that were spent and not yet reported to the store.
    unreported: u64,
    /// The time from `received` until the counter is empty.
    reset_after: Duration,
}

/// The checks of a call, with draws and reports of leases.
pub(super) struct LeasePlan {
    pub(super) checks: Vec<Check>,
    /// How many of them, at the start, end leases.
    ends: usize,
}

impl Leases {
    pub(super) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomKeyedHash::default(),
            hot: HotChecks::new(),
            count: AtomicUsize::new(0),
            due: Mutex::default(),
            has_returner: AtomicBool::new(false),
            returner_wakes: Arc::default(),
            counters: LeaseCounters::default(),
        }
    }

    /// Admits a check of one request if this process has leased enough units of all of its counters. When a lease is nearly used up,
    /// one check returns `None`: it goes to the store and renews the lease, for at most `renewal`, while others spend what is left.
    pub(super) fn spend(&self, check: &Check, renewal: Option<Duration>) -> Option<CheckShares> {
        let now = Instant::now();
        let hash = self.hash(check);
        let mut shard = self.shard(hash).lock();
        if let Some(entry) = shard.find_mut(hash, check) {
            if renewal.is_some() {
                entry.demand.record(now, entry.lifetime);
            }
            return entry.spend(check, now, renewal);
        }
        drop(shard);
        let lifetime = lifetime(check);
        if self.hot.record(hash, lifetime, now) {
            self.insert(CheckLeases::new(hash, check, lifetime, now));
        }
        None
    }

    fn insert(&self, entry: CheckLeases) {
        let mut shard = self.shard(entry.hash).lock();
        self.count.fetch_sub(shard.sweep(entry.last_spent), Ordering::Relaxed);
        if shard.table.len() >= MAX_ENTRIES / SHARDS {
            return;
        }
        let is_same = |other: &CheckLeases| same_counters(&other.tiers, &entry.tiers);
        let due = Due { at: entry.due_at(entry.last_spent), hash: entry.hash };
        if let Entry::Vacant(place) = shard.table.entry(entry.hash, is_same, |other| other.hash) {
            place.insert(entry);
            self.count.fetch_add(1, Ordering::Relaxed);
            drop(shard);
            self.push_due(due);
        }
    }

    /// Whether there are leases, or checks hot enough for them. A process without leases pays nothing.
    pub(super) fn is_in_use(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Adds draws and reports of leases to the checks of a call; `None` if there are none. `instances` is the number of processes that
    /// share each limit, if they have been counted. A draw is in flight for at most `timeout`.
    pub(super) fn plan(
        &self,
        checks: &[Check],
        instances: Option<u32>,
        sent_at: Instant,
        timeout: Duration,
    ) -> Option<LeasePlan> {
        let (mut ends, mut planned) = (Vec::new(), Vec::new());
        for (index, check) in checks.iter().enumerate() {
            if check.operation() != Operation::Check || !check.is_leasable() || is_free(check) {
                continue;
            }
            let hash = self.hash(check);
            let mut shard = self.shard(hash).lock();
            let Some(entry) = shard.find_mut(hash, check) else { continue };
            entry.report_spent(check, sent_at, &mut ends, &self.counters);
            let requests = entry.wanted(check, instances, sent_at);
            if requests > 0 {
                entry.drawing_until = Some(sent_at + timeout);
                planned.push((index, requests));
            }
        }
        if ends.is_empty() && planned.is_empty() {
            return None;
        }
        let count = ends.len();
        let mut all = ends;
        all.extend(checks.iter().cloned());
        for (index, requests) in planned {
            let check = &mut all[count + index];
            *check = check.clone().with_lease(LeaseCall::Draw { requests });
        }
        Some(LeasePlan { checks: all, ends: count })
    }

    /// Takes the leases out of the outcomes of a call, and returns those of its checks.
    pub(super) fn record(
        &self,
        plan: &LeasePlan,
        mut outcomes: Vec<Result<CheckAnswer, StoreError>>,
        sent_at: Instant,
    ) -> Vec<Result<CheckAnswer, StoreError>> {
        let ended = outcomes.drain(..plan.ends.min(outcomes.len()));
        for (check, outcome) in plan.checks.iter().zip(ended) {
            self.counters.count_unspent(check, outcome.ok().as_ref());
        }
        for (check, outcome) in plan.checks[plan.ends..].iter().zip(&mut outcomes) {
            if let Some(LeaseCall::Draw { .. }) = check.lease() {
                let lease = outcome.as_mut().ok().and_then(|answer| Lease::take(check, answer, sent_at));
                self.add(check, lease);
            }
        }
        outcomes
    }

    /// Records that a call was not answered.
    pub(super) fn record_no_answer(&self, plan: &LeasePlan) {
        for check in &plan.checks[..plan.ends] {
            self.counters.count_unspent(check, None);
        }
    }

    /// Adds the lease of a draw, or ends a draw without one.
    fn add(&self, check: &Check, lease: Option<Lease>) {
        let hash = self.hash(check);
        let mut shard = self.shard(hash).lock();
        let found = shard.find_mut(hash, check);
        let Some(lease) = lease else {
            // the next attempt to renew a lease waits until this one would have timed out
            if let Some(entry) = found {
                entry.drawing_until = None;
            }
            return;
        };
        self.counters.drawn.fetch_add(lease.units(), Ordering::Relaxed);
        let Some(entry) = found else {
            // the entry was removed while the call was in flight: its units count until their window ends
            self.counters.lost.fetch_add(lease.units(), Ordering::Relaxed);
            return;
        };
        (entry.drawing_until, entry.renewing_until) = (None, None);
        entry.renew_below = lease.requests(check) / u64::from(RENEWAL_PART);
        entry.last_spent = lease.received;
        entry.leases.push(lease);
    }

    /// Drops the leases of a counter that was reset.
    pub(super) fn forget(&self, key: &Key) {
        if !self.is_in_use() {
            return;
        }
        for shard in &self.shards {
            for entry in shard.lock().table.iter_mut() {
                if entry.tiers.iter().any(|tier| tier.key == *key) {
                    for lease in entry.leases.drain(..) {
                        self.counters.count_spent(&lease);
                        self.counters.lost.fetch_add(lease.left(), Ordering::Relaxed);
                    }
                }
            }
        }
    }

    pub(super) fn stats(&self) -> LeaseStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let LeaseCounters { drawn, spent, returned, lost } = &self.counters;
        LeaseStats { drawn: read(drawn), spent: read(spent), returned: read(returned), lost: read(lost) }
    }

    /// Hashes the counters of a check and their limits, without the costs.
    fn hash(&self, check: &Check) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        for tier in check.tiers() {
            tier.key.hash(&mut hasher);
            tier.terms.limit.hash(&mut hasher);
        }
        hasher.finish()
    }

    fn shard(&self, hash: u64) -> &Mutex<Shard> {
        // the table uses the low bits
        let shards = u64::try_from(SHARDS).expect("a small number");
        &self.shards[usize::try_from((hash >> 32) % shards).expect("below a small number")]
    }
}

impl LeaseCounters {
    fn count_spent(&self, lease: &Lease) {
        let spent = lease.tiers.iter().map(|tier| tier.unreported).sum();
        self.spent.fetch_add(spent, Ordering::Relaxed);
    }

    /// Counts the unspent units of the end of a lease, with the answer of the store, if there is one.
    fn count_unspent(&self, end: &Check, answer: Option<&CheckAnswer>) {
        if let Some(LeaseCall::End { unspent, .. }) = end.lease() {
            let refunded = answer.and_then(|answer| answer.answers.first()).map_or(0, |answer| answer.passes);
            let returned = refunded.min(unspent);
            self.returned.fetch_add(returned.into(), Ordering::Relaxed);
            self.lost.fetch_add((unspent - returned).into(), Ordering::Relaxed);
        }
    }
}

impl CheckLeases {
    fn new(hash: u64, check: &Check, lifetime: Duration, now: Instant) -> Self {
        Self {
            hash,
            tiers: check.tiers().into(),
            lifetime,
            demand: Demand::new(now),
            leases: SmallVec::new(),
            renew_below: 0,
            drawing_until: None,
            renewing_until: None,
            last_spent: now,
        }
    }

    fn is_for(&self, check: &Check) -> bool {
        same_counters(&self.tiers, check.tiers())
    }

    /// Whether there are leases, a draw in flight or recent demand.
    fn is_active(&self, now: Instant) -> bool {
        !self.leases.is_empty()
            || self.drawing_until.is_some_and(|until| now < until)
            || self.demand.is_recent(now, self.lifetime)
    }

    fn spend(&mut self, check: &Check, now: Instant, renewal: Option<Duration>) -> Option<CheckShares> {
        let place = self.leases.iter().position(|lease| lease.admits(check, now))?;
        if let Some(renewal) = renewal
            && !self.is_renewing(now)
            && (self.requests_left(check, now) <= self.renew_below
                || self.leases[place].is_ending(self.lifetime, now))
        {
            self.renewing_until = Some(now + renewal);
            return None;
        }
        self.last_spent = now;
        let lease = &mut self.leases[place];
        lease.spend(check);
        let elapsed = now.duration_since(lease.received);
        let shares = lease.tiers.iter().map(|tier| Share {
            passes: true,
            remaining: tier.left,
            debt: 0,
            retry: None,
            reset_after: tier.reset_after.saturating_sub(elapsed),
        });
        let shares = shares.enumerate().collect();
        Some(CheckShares { at: Some(lease.at), source: Source::Lease, shares, holds: Vec::new() })
    }

    fn is_renewing(&self, now: Instant) -> bool {
        self.renewing_until.is_some_and(|until| now < until)
            || self.drawing_until.is_some_and(|until| now < until)
            || self.live_leases(now) >= MAX_LEASES
    }

    /// Returns the number of leases with units. A lease that is used up is kept until it has been reported.
    fn live_leases(&self, now: Instant) -> usize {
        self.leases.iter().filter(|lease| now < lease.expires && !lease.is_used_up()).count()
    }

    /// Returns how many requests of this check the leases admit that do not end soon.
    fn requests_left(&self, check: &Check, now: Instant) -> u64 {
        let lasting = self.leases.iter().filter(|lease| !lease.is_ending(self.lifetime, now));
        lasting.map(|lease| lease.requests(check)).sum()
    }

    /// Returns for how many further requests to draw: as many as this process had in the last lifetime of a lease, less those that it
    /// still has units for, within its share of what may be leased.
    fn wanted(&self, check: &Check, instances: Option<u32>, now: Instant) -> u32 {
        let is_drawing = self.drawing_until.is_some_and(|until| now < until);
        let Some(instances) = instances.filter(|_| !is_drawing && self.live_leases(now) < MAX_LEASES) else {
            return 0;
        };
        let expected = self.demand.expected().saturating_sub(self.requests_left(check, now));
        let share = check.tiers().iter().enumerate().filter_map(|(place, tier)| {
            let cost = tier.terms.cost.units();
            let units = tier.terms.limit.lease()?.units() / u64::from(instances.max(1));
            let held: u64 = self.leases.iter().map(|lease| lease.tiers[place].left).sum();
            units.saturating_sub(held).checked_div(cost)
        });
        // a check without a cost needs no lease
        let requests = share.min().map_or(0, |share| share.min(expected));
        u32::try_from(requests).unwrap_or(u32::MAX)
    }

    /// Adds the calls that report spent units. Leases that are used up or have expired end; if there is no room for another lease, also
    /// those that do not admit a request of this check.
    fn report_spent(&mut self, check: &Check, now: Instant, ends: &mut Vec<Check>, counters: &LeaseCounters) {
        let is_full = self.live_leases(now) >= MAX_LEASES;
        let tiers = &self.tiers;
        self.leases.retain(|lease| {
            counters.count_spent(lease);
            let is_over =
                lease.is_used_up() || now >= lease.expires || (is_full && lease.requests(check) == 0);
            ends.extend(
                lease.end_calls(tiers, |tier| (tier.unreported, if is_over { tier.left } else { 0 })),
            );
            lease.tiers.iter_mut().for_each(|tier| tier.unreported = 0);
            !is_over
        });
    }

    /// Returns when the background task has to look at this entry: when a lease expires or may be idle. A lease that is drawn meanwhile
    /// is not idle before that.
    fn due_at(&self, now: Instant) -> Instant {
        let first = self.leases.iter().map(|lease| lease.expires).min();
        match first {
            Some(expires) => expires.min(self.last_spent + self.idle_time()),
            None => now + self.idle_time().max(LEAST_PAUSE_WITHOUT_LEASE),
        }
    }

    /// How long a lease is kept without being spent.
    fn idle_time(&self) -> Duration {
        self.lifetime / 2
    }
}

impl Lease {
    /// Takes the requests that were charged in advance out of an answer.
    fn take(check: &Check, answer: &mut CheckAnswer, sent_at: Instant) -> Option<Self> {
        let received = Instant::now();
        let take = |(tier, answer): (&Tier, &mut Answer)| {
            let requests = answer.charged.saturating_sub(check.count());
            answer.charged -= requests;
            answer.passes = answer.passes.min(check.count());
            let left = u64::from(requests).saturating_mul(tier.terms.cost.units());
            let reset_after = Duration::from_micros(answer.reset_after_us);
            TierLease { left, is_drawn: left > 0, unreported: 0, reset_after }
        };
        let tiers: SmallVec<_> = check.tiers().iter().zip(&mut answer.answers).map(take).collect();
        let lease = Self { at: answer.at, expires: sent_at + lifetime(check), received, tiers };
        (lease.left() > 0).then_some(lease)
    }

    fn admits(&self, check: &Check, now: Instant) -> bool {
        now < self.expires && self.requests(check) > 0
    }

    /// Whether little of the lifetime is left.
    fn is_ending(&self, lifetime: Duration, now: Instant) -> bool {
        now + lifetime / RENEWAL_PART > self.expires
    }

    /// Whether a counter has no units left.
    fn is_used_up(&self) -> bool {
        self.tiers.iter().any(|tier| tier.is_drawn && tier.left == 0)
    }

    /// Returns how many requests of this check are left.
    fn requests(&self, check: &Check) -> u64 {
        let costs = check.tiers().iter().map(|tier| tier.terms.cost.units());
        let requests = self.tiers.iter().zip(costs).filter_map(|(tier, cost)| tier.left.checked_div(cost));
        requests.min().unwrap_or(0)
    }

    fn spend(&mut self, check: &Check) {
        for (own, tier) in self.tiers.iter_mut().zip(check.tiers()) {
            let cost = tier.terms.cost.units();
            own.left -= cost;
            own.unreported += cost;
        }
    }

    /// Returns the units that are left, over all counters.
    fn left(&self) -> u64 {
        self.tiers.iter().map(|tier| tier.left).sum()
    }

    /// Returns the units of the draw, if nothing has been spent.
    fn units(&self) -> u64 {
        self.left()
    }

    /// Returns the calls that report spent units and return unspent ones, in this order.
    fn end_calls(&self, tiers: &[Tier], units: impl Fn(&TierLease) -> (u64, u64)) -> Vec<Check> {
        let operation = Operation::Refund { at: Some(self.at) };
        let end = |(tier, own): (&Tier, &TierLease)| {
            let (spent, unspent) = units(own);
            let number = |units: u64| u32::try_from(units).unwrap_or(u32::MAX);
            let lease = LeaseCall::End { spent: number(spent), unspent: number(unspent) };
            let tier = Tier { key: tier.key.clone(), terms: Terms::new(tier.terms.limit, Cost::ONE) };
            let check = Check::new(operation, vec![tier]).expect("one tier is a check");
            (spent + unspent > 0).then(|| check.with_lease(lease))
        };
        tiers.iter().zip(&self.tiers).filter_map(end).collect()
    }
}

/// Returns how long all leases of a check may be spent.
fn lifetime(check: &Check) -> Duration {
    let leases = check.tiers().iter().filter_map(|tier| tier.terms.limit.lease());
    leases.map(sluicegate_core::Lease::lifetime).min().unwrap_or_default()
}

/// Whether a check costs nothing: it needs no lease.
fn is_free(check: &Check) -> bool {
    check.tiers().iter().all(|tier| tier.terms.cost == Cost::ZERO)
}

/// Whether two checks use the same counters in the same way, except for their costs.
fn same_counters(one: &[Tier], other: &[Tier]) -> bool {
    let without_cost = |terms: &Terms| (terms.limit, terms.mode, terms.admission);
    one.len() == other.len()
        && one.iter().zip(other).all(|(one, other)| {
            one.key == other.key && without_cost(&one.terms) == without_cost(&other.terms)
        })
}

#[cfg(test)]
mod tests {
    use sluicegate_core::Limit;
    use tokio::time::advance;

    use super::*;

    const LIFETIME: Duration = Duration::from_millis(500);
    const DEADLINE: Duration = Duration::from_millis(50);

    fn check_of(key: &str, units: u64) -> Check {
        let limit = Limit::fixed_window(10_000, Duration::from_secs(60)).unwrap();
        let terms = Terms::new(limit.with_lease(1_000, LIFETIME).unwrap(), Cost::new(units).unwrap());
        let tier = Tier { key: Key::without_rule(key).unwrap(), terms };
        Check::new(Operation::Check, vec![tier]).unwrap()
    }

    fn check() -> Check {
        check_of("k", 1)
    }

    /// Makes a check hot.
    fn heat(leases: &Leases) {
        for _ in 0..20 {
            assert!(leases.spend(&check(), Some(DEADLINE)).is_none(), "nothing is leased");
        }
    }

    fn plan(leases: &Leases, instances: Option<u32>) -> Option<LeasePlan> {
        leases.plan(&[check()], instances, Instant::now(), DEADLINE)
    }

    /// The number of further requests that a plan asks for.
    fn wanted(plan: Option<LeasePlan>) -> u32 {
        match plan.and_then(|plan| plan.checks.last()?.lease()) {
            Some(LeaseCall::Draw { requests }) => requests,
            _ => 0,
        }
    }

    /// Sends the check, and the store charges this many further requests.
    fn draw(leases: &Leases, requests: u32) {
        let plan = plan(leases, Some(1)).expect("a draw");
        let charged = 1 + requests;
        let answer = Answer { passes: charged, charged, available: 500, reset_after_us: 1, ..Answer::NONE };
        let at = Timestamp::from_micros(7);
        let outcomes = plan.checks.iter().map(|_| Ok(CheckAnswer { at, answers: vec![answer] })).collect();
        let left = leases.record(&plan, outcomes, Instant::now());
        let answer = left[0].as_ref().unwrap().answers[0];
        assert_eq!((answer.passes, answer.charged), (1, 1), "the callers get only their own request");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_spent_until_it_is_used_up_or_expires() {
        let leases = Leases::new();
        heat(&leases);
        draw(&leases, 3);
        for left in (0..3).rev() {
            let spent = leases.spend(&check(), None).unwrap();
            assert_eq!((spent.source, spent.at), (Source::Lease, Some(Timestamp::from_micros(7))));
            assert_eq!(spent.shares[0].1.remaining, left);
        }
        assert!(leases.spend(&check(), None).is_none(), "it is used up");
        draw(&leases, 3);
        assert!(leases.spend(&check_of("k", 4), None).is_none(), "the cost is larger than the lease");
        advance(LIFETIME - Duration::from_millis(1)).await;
        assert!(leases.spend(&check(), None).is_some());
        advance(Duration::from_millis(1)).await;
        assert!(leases.spend(&check(), None).is_none(), "it has expired");
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_draws_what_it_expects_to_need_within_its_share() {
        let leases = Leases::new();
        heat(&leases);
        assert_eq!(wanted(plan(&leases, None)), 0, "the instances have not been counted");
        assert_eq!(wanted(plan(&leases, Some(2_000))), 0, "less than one unit per instance");
        assert_eq!(wanted(plan(&leases, Some(100))), 10, "its share");
        assert_eq!(wanted(plan(&leases, Some(1))), 0, "a draw is in flight");
        advance(DEADLINE).await;
        assert_eq!(wanted(plan(&leases, Some(1))), 20, "as many as there were requests");
    }

    #[tokio::test(start_paused = true)]
    async fn one_check_at_a_time_renews_a_lease_that_is_nearly_used_up() {
        let leases = Leases::new();
        heat(&leases);
        draw(&leases, 16);
        let mut renewals = 0;
        let mut spent = 0;
        while spent < 16 {
            match leases.spend(&check(), Some(DEADLINE)) {
                Some(_) => spent += 1,
                None => {
                    renewals += 1;
                    assert!(spent >= 12, "a quarter is left, or less: {spent} of 16 were spent");
                }
            }
        }
        assert_eq!(renewals, 1, "the others spend what is left");
    }

    #[tokio::test(start_paused = true)]
    async fn every_lease_is_renewed_before_it_is_used_up() {
        let leases = Leases::new();
        heat(&leases);
        draw(&leases, 16);
        let mut renewals = 0;
        for _ in 0..200 {
            if leases.spend(&check(), Some(DEADLINE)).is_none() {
                renewals += 1;
                assert!(leases.spend(&check(), None).is_some(), "units are left at renewal {renewals}");
                draw(&leases, 16);
            }
        }
        assert!(renewals >= 10, "{renewals}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_background_task_has_one_item_for_each_check_and_removes_those_without_demand() {
        let leases = Leases::new();
        heat(&leases);
        for _ in 0..300 {
            draw(&leases, 4);
            for _ in 0..4 {
                leases.spend(&check(), None).unwrap();
            }
            advance(Duration::from_millis(40)).await;
            leases.end_due(Instant::now());
            leases.spend(&check(), Some(DEADLINE));
            assert!(leases.due.lock().len() <= 1);
        }
        for _ in 0..10 {
            advance(LIFETIME).await;
            leases.end_due(Instant::now());
        }
        assert_eq!((leases.due.lock().len(), leases.count.load(Ordering::Relaxed)), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_lease_of_a_key_is_returned_when_it_is_idle() {
        let leases = Leases::new();
        heat(&leases);
        advance(Duration::from_millis(10)).await;
        draw(&leases, 4);
        advance(LIFETIME / 2).await;
        assert_eq!(leases.end_due(Instant::now()).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_that_a_lease_does_not_cover_leaves_it_to_others() {
        let leases = Leases::new();
        heat(&leases);
        draw(&leases, 16);
        for large in [check_of("k", 0), check_of("k", 500)] {
            let plan = leases.plan(&[large], Some(1), Instant::now(), DEADLINE);
            let ends = plan.map_or(0, |plan| plan.ends);
            assert_eq!(ends, 0, "nothing was spent, and the lease stays");
        }
        assert!(leases.spend(&check(), None).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_checks_with_leases_is_bounded() {
        let leases = Leases::new();
        for number in 0..MAX_ENTRIES + 10_000 {
            let check = check_of(&number.to_string(), 1);
            leases.insert(CheckLeases::new(leases.hash(&check), &check, LIFETIME, Instant::now()));
        }
        let count = leases.count.load(Ordering::Relaxed);
        assert!((MAX_ENTRIES * 9 / 10..=MAX_ENTRIES).contains(&count), "{count}");
        let bytes = size_of::<CheckLeases>();
        assert!(bytes <= 512, "docs/leases.md states the memory of a lease: {bytes} bytes");
    }
}
