//! The reference model: the algorithms, written for readability and not for speed.
//!
//! It keeps every charge, computes the usage at a time by definition, and finds every wait by binary search. It shares
//! no arithmetic with the implementation.

mod holds;

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use sluicegate::{
    Algorithm, Limit, Retry, Timestamp,
    limiter::Operation,
    store::{Check, Key, Tier},
};
use sluicegate_core::{
    algorithm::sliding_log::REFUND_REACH,
    limit::MAX_LOG_UNITS,
    step::{Admission, Mode, Share, Terms},
    time::{MAX_EXACT, MAX_WAIT_US},
};

use self::holds::Record;
pub use self::holds::{HeldExpected, Places};
use crate::reference_calendar;

/// The largest number of units.
const LARGEST: u64 = MAX_EXACT;

/// All counters of a model store.
#[derive(Clone, Default)]
pub struct Model {
    counters: HashMap<(Key, Algorithm), Counter>,
    leases: HashMap<(Key, Algorithm), LeaseRecord>,
    /// The holds of each counter, also those that have ended.
    holds: HashMap<(Key, Algorithm), Vec<Record>>,
}

/// The leased units of a counter.
#[derive(Clone)]
struct LeaseRecord {
    /// When the record was created. Leases from before that are unknown.
    since: u64,
    /// Units by the time at which they stop counting as leased.
    units: BTreeMap<u64, u64>,
}

/// The expected result of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Whether all enforced tiers let it pass.
    pub granted: bool,
    /// The expected share of each tier.
    pub shares: Vec<Share>,
}

/// One counter: a list of charges or the level of a bucket, and the limit it was written under.
#[derive(Clone)]
struct Counter {
    limit: Limit,
    /// The time of the last charge.
    last: u64,
    charges: Vec<(u64, u64)>,
    /// For a fixed window: until when the charges count under the limit of the last one.
    ends: u64,
    level: Level,
}

/// `over / under` units that drain at `units / under` per microsecond.
#[derive(Clone, Copy)]
struct Level {
    over: u128,
    under: u128,
    units: u128,
}

impl Model {
    /// Decides one check, request by request, and returns one expectation for each.
    pub fn decide(&mut self, check: &Check, now: Timestamp) -> Vec<Expected> {
        let now = now.as_micros();
        (0..check.count()).map(|_| self.one_request(check, now)).collect()
    }

    /// Deletes a counter and its leases.
    pub fn reset(&mut self, key: &Key, algorithm: Algorithm) {
        self.counters.remove(&(key.clone(), algorithm));
        self.leases.remove(&(key.clone(), algorithm));
        self.end_live_holds(key, algorithm);
    }

    /// Charges further requests of a check in advance, after those of the callers have passed. Returns how many: one at a time, while half of
    /// the units that were free remain, and the lease of each limit has room.
    pub fn draw(&mut self, check: &Check, most: u32, now: Timestamp) -> u32 {
        let now = now.as_micros();
        let free = |model: &Self, tier: &Tier| {
            let used = model.used(&counter_of(tier), &tier.terms.limit, now);
            tier.terms.limit.capacity().saturating_sub(used)
        };
        let free_before: Vec<u64> = check.tiers().iter().map(|tier| free(self, tier)).collect();
        let before = self.clone();
        let mut drawn = 0;
        while drawn < most
            && check.tiers().iter().zip(&free_before).all(|(tier, free_before)| {
                let (cost, lease) = (tier.terms.cost.units(), tier.terms.limit.lease().expect("a lease"));
                let drawn_then = (u64::from(drawn) + 1) * cost;
                let leased = self.leased(&counter_of(tier), now);
                cost == 0 || (2 * drawn_then <= *free_before && leased + cost <= lease.units())
            })
        {
            for tier in check.tiers().iter().filter(|tier| tier.terms.cost.units() > 0) {
                let units = tier.terms.cost.units();
                self.charge(&counter_of(tier), &tier.terms.limit, now, units);
                self.add_lease(tier, units, now);
            }
            drawn += 1;
        }
        if u64::from(drawn) * 8 < u64::from(most) {
            // less than an eighth is not worth a lease
            *self = before;
            return 0;
        }
        let has_cost = check.tiers().iter().any(|tier| tier.terms.cost.units() > 0);
        if has_cost { drawn } else { most }
    }

    /// Ends a lease of a counter that was drawn at a time, and refunds its unspent units. Nothing changes if the lease is unknown.
    pub fn end_lease(&mut self, tier: &Tier, at: Timestamp, spent: u64, unspent: u64, now: Timestamp) {
        let (at, now) = (at.as_micros(), now.as_micros());
        let counter = counter_of(tier);
        let expires = lease_expiry(tier, at);
        let is_known = |record: &&mut LeaseRecord| record.since.min(now) <= at;
        let Some(record) = self.leases.get_mut(&counter).filter(is_known) else { return };
        if expires <= now {
            return;
        }
        let mut removed = 0;
        for (_, units) in record.units.range_mut(expires..) {
            let part = (*units).min(spent + unspent - removed);
            *units -= part;
            removed += part;
        }
        if removed > 0 {
            record.since = record.since.min(now);
            record.units.retain(|until, units| *until > now && *units > 0);
        }
        self.refund(&counter, &tier.terms.limit, now, removed.saturating_sub(spent), Some(at));
    }

    /// Returns the leased units of a counter.
    pub fn leased_units(&self, tier: &Tier, now: Timestamp) -> u64 {
        self.leased(&counter_of(tier), now.as_micros())
    }

    fn leased(&self, counter: &(Key, Algorithm), now: u64) -> u64 {
        self.leases
            .get(counter)
            .map_or(0, |record| record.units.range(now + 1..).map(|(_, units)| units).sum())
    }

    fn add_lease(&mut self, tier: &Tier, units: u64, now: u64) {
        let new = || LeaseRecord { since: now, units: BTreeMap::new() };
        let record = self.leases.entry(counter_of(tier)).or_insert_with(new);
        record.since = record.since.min(now);
        record.units.retain(|until, _| *until > now);
        *record.units.entry(lease_expiry(tier, now)).or_default() += units;
    }

    fn one_request(&mut self, check: &Check, now: u64) -> Expected {
        let keys: Vec<_> =
            check.tiers().iter().map(|tier| (tier.key.clone(), tier.terms.limit.algorithm())).collect();
        let terms: Vec<&Terms> = check.tiers().iter().map(|tier| &tier.terms).collect();
        let used = |model: &Self, index: usize, now: u64| model.used(&keys[index], &terms[index].limit, now);
        let passes: Vec<bool> = (0..keys.len())
            .map(|index| {
                let limit = &terms[index].limit;
                used(self, index, now) + must_be_free(terms[index]) <= limit.capacity()
            })
            .collect();
        let decides = matches!(check.operation(), Operation::Check | Operation::Peek);
        let granted =
            !decides || (0..keys.len()).all(|index| passes[index] || terms[index].mode == Mode::Shadow);
        for index in 0..keys.len() {
            let units = terms[index].cost.units();
            match check.operation() {
                Operation::Check if granted && passes[index] => {
                    self.charge(&keys[index], &terms[index].limit, now, units)
                }
                Operation::Charge => self.charge(&keys[index], &terms[index].limit, now, units),
                Operation::Refund { at } => {
                    self.refund(&keys[index], &terms[index].limit, now, units, at.map(Timestamp::as_micros));
                }
                Operation::Check | Operation::Peek => {}
            }
        }
        let shares = (0..keys.len())
            .map(|index| self.share(&keys[index], terms[index], passes[index] || !decides, now))
            .collect();
        Expected { granted, shares }
    }

    /// Returns the answer of a counter in its current state.
    fn share(&self, key: &(Key, Algorithm), terms: &Terms, passes: bool, now: u64) -> Share {
        let (limit, room) = (&terms.limit, terms.limit.capacity().checked_sub(must_be_free(terms)));
        let used = |now: u64| self.used(key, limit, now);
        let wait = |room: u64| match limit.algorithm() {
            Algorithm::Concurrency => self.first_expiry(key, now),
            _ => first_moment(|wait| used(now + wait) <= room),
        };
        Share {
            passes,
            remaining: limit.capacity().saturating_sub(used(now)),
            debt: used(now).saturating_sub(limit.capacity()),
            retry: (!passes).then(|| room.map_or(Retry::Never, |room| Retry::After(wait(room)))),
            reset_after: match limit.algorithm() {
                Algorithm::Concurrency => self.last_expiry(key, now),
                _ => first_moment(|wait| used(now + wait) == 0),
            },
        }
    }

    /// Returns the usage against `limit` at `now`.
    fn used(&self, key: &(Key, Algorithm), limit: &Limit, now: u64) -> u64 {
        if limit.algorithm() == Algorithm::Concurrency {
            return self.held_units(key);
        }
        self.counters.get(key).map_or(0, |counter| counter.used(limit, now))
    }

    fn charge(&mut self, key: &(Key, Algorithm), limit: &Limit, now: u64, units: u64) {
        // only holds change live holds
        if units == 0 || limit.algorithm() == Algorithm::Concurrency {
            return;
        }
        let is_log = limit.algorithm() == Algorithm::SlidingLog;
        let units =
            if is_log { units.min(MAX_LOG_UNITS) } else { units.min(MAX_EXACT - self.used(key, limit, now)) };
        let mut counter = match self.counters.get(key) {
            Some(counter) => counter.carried_over(limit, now),
            None => Counter::fresh(limit, now),
        };
        counter.level.over += u128::from(units) * counter.level.under;
        if is_log {
            counter.drop_oldest(MAX_LOG_UNITS - units);
        }
        let full = is_log && counter.charges.len() >= usize::try_from(limit.amount()).expect("fits");
        match counter.charges.last_mut() {
            Some(newest) if newest.0 == counter.last || full => *newest = (counter.last, newest.1 + units),
            _ => counter.charges.push((counter.last, units)),
        }
        self.counters.insert(key.clone(), counter);
    }

    fn refund(&mut self, key: &(Key, Algorithm), limit: &Limit, now: u64, units: u64, at: Option<u64>) {
        let used = self.used(key, limit, now);
        if let Some(counter) = self.counters.get_mut(key)
            && used > 0
            && units > 0
        {
            match limit.algorithm() {
                // the charge may have been made under another limit
                Algorithm::TokenBucket => counter.refund_level(None, limit, now, units, at),
                _ => counter.refund_charges(limit, now, units, at),
            }
        }
    }
}

impl Counter {
    fn fresh(limit: &Limit, now: u64) -> Self {
        let ends = end_of_window(limit, now);
        Self { limit: *limit, last: now, charges: Vec::new(), ends, level: Level::empty(limit) }
    }

    /// Returns whether the time of the counter is so far ahead that the clock must have been set back.
    fn is_absent(&self, limit: &Limit, now: u64) -> bool {
        match limit.calendar() {
            // at the end of the next period
            Some(calendar) => self.last >= reference_calendar::edges(calendar, now)[2],
            None => self.last > now + limit.window_us(),
        }
    }

    /// Returns whether the limit has other windows than the limit the counter was written under.
    fn changed(&self, limit: &Limit) -> bool {
        (self.limit.window_us(), self.limit.phase_us()) != (limit.window_us(), limit.phase_us())
    }

    fn used(&self, limit: &Limit, now: u64) -> u64 {
        if self.is_absent(limit, now) {
            return 0;
        }
        let at = now.max(self.last);
        if limit.algorithm() == Algorithm::TokenBucket {
            return self.level_at(limit, at).units_up();
        }
        if limit.algorithm() == Algorithm::FixedWindow {
            let counts = at < self.window_ends(limit);
            return if counts { self.charges.iter().map(|(_, units)| *units).sum() } else { 0 };
        }
        if self.changed(limit) && at >= self.last + limit.window_us() {
            return 0;
        }
        let window = self.limit.window_us();
        let sum = |counts: &dyn Fn(u64) -> bool| -> u64 {
            self.charges.iter().filter(|(time, _)| counts(*time)).map(|(_, units)| *units).sum()
        };
        match self.limit.algorithm() {
            Algorithm::SlidingLog => sum(&|time| time + window > at),
            Algorithm::SlidingCounter => {
                let current = sum(&|time| time / window == at / window);
                let previous = sum(&|time| time / window + 1 == at / window);
                let left = u128::from(window - at % window);
                let faded = (u128::from(previous) * left).div_ceil(u128::from(window));
                current + u64::try_from(faded).expect("less than before")
            }
            Algorithm::FixedWindow | Algorithm::TokenBucket => unreachable!("answered above"),
            Algorithm::Concurrency => unreachable!("it has no window"),
        }
    }

    /// Returns until when the charges of a fixed window count under `limit`. Under another limit than that of the last
    /// charge, they count until the end of their window or of the limit's window that contains the last charge,
    /// whichever is later, but for at most one window of each limit.
    fn window_ends(&self, limit: &Limit) -> u64 {
        let after_last = |limit: &Limit| self.last + limit.window_us();
        let under_limit = end_of_window(limit, self.last).min(after_last(&self.limit));
        self.ends.min(after_last(limit)).max(under_limit)
    }

    /// Returns the level of a bucket, drained at its stored rate or the limit's, whichever is faster.
    fn level_at(&self, limit: &Limit, at: u64) -> Level {
        let faster = Level::empty(limit).is_faster_than(&self.level);
        let level = if faster { self.level.at_rate_of(limit) } else { self.level };
        Level { over: level.over.saturating_sub(u128::from(at - self.last) * level.units), ..level }
    }

    /// Returns the counter at `now` as the next charge under `limit` finds it.
    fn carried_over(&self, limit: &Limit, now: u64) -> Self {
        if self.is_absent(limit, now) {
            return Self::fresh(limit, now);
        }
        let last = now.max(self.last);
        let used = self.used(limit, now);
        let ends = match (limit.algorithm(), used) {
            (Algorithm::FixedWindow, 1..) => self.window_ends(limit).max(end_of_window(limit, last)),
            _ => end_of_window(limit, last),
        };
        let charges = if limit.algorithm() == Algorithm::FixedWindow || self.changed(limit) {
            [(last, used)].into_iter().filter(|(_, units)| *units > 0).collect()
        } else {
            let longest = match limit.algorithm() {
                Algorithm::SlidingLog => limit.window_us(),
                _ => 2 * limit.window_us(),
            };
            self.charges.iter().copied().filter(|(time, _)| time + longest > last).collect()
        };
        Self { limit: *limit, last, charges, ends, level: self.level_at(limit, last).at_rate_of(limit) }
    }

    /// Drops the oldest units of a log, so that at most `most` are left.
    fn drop_oldest(&mut self, most: u64) {
        let total: u64 = self.charges.iter().map(|(_, units)| *units).sum();
        let mut excess = total.saturating_sub(most);
        for (_, units) in &mut self.charges {
            let dropped = excess.min(*units);
            *units -= dropped;
            excess -= dropped;
        }
        self.charges.retain(|(_, units)| *units > 0);
    }

    /// Returns whether any units of a bucket count under `limit` if they drain at `rate`.
    fn counts_at_rate(&self, rate: &Limit, limit: &Limit, now: u64) -> bool {
        !self.is_absent(limit, now) && self.level_at(rate, now.max(self.last)).over > 0
    }

    /// Charges a bucket without another rate.
    fn charge_level(&mut self, rate: &Limit, now: u64, units: u64) {
        let last = now.max(self.last);
        let level = self.level_at(rate, last);
        let charged = u128::from(units.min(MAX_EXACT - level.units_up())) * level.under;
        self.level = Level { over: level.over + charged, ..level };
        self.last = last;
    }

    /// Refunds a charge, while the level drains at `rate`. It is refunded after a window only if it was made under a limit with this rate.
    fn refund_level(&mut self, made: Option<&Limit>, rate: &Limit, now: u64, units: u64, at: Option<u64>) {
        let last = now.max(self.last);
        let level = self.level_at(rate, last);
        let has_same_rate = made.is_some_and(|made| level.has_rate_of(made));
        let reach = if has_same_rate { u64::MAX } else { made.unwrap_or(rate).window_us() };
        if at.is_some_and(|at| at > last || last - at >= reach) {
            return;
        }
        // The rest of a single charge has drained since it was made.
        let drained = at.map_or(0, |at| u128::from(last - at) * level.units);
        let back = (u128::from(units) * level.under).saturating_sub(drained);
        if back > 0 {
            self.level = Level { over: level.over.saturating_sub(back), ..level };
            self.last = last;
        }
    }

    fn refund_charges(&mut self, limit: &Limit, now: u64, units: u64, at: Option<u64>) {
        let (own, last) = (self.limit, now.max(self.last));
        debug_assert!(!self.is_absent(limit, now));
        let window = own.window_us();
        let start_of_period =
            limit.calendar().map_or(0, |calendar| reference_calendar::edges(calendar, last)[0]);
        let counts = |time: u64| match own.algorithm() {
            Algorithm::FixedWindow => true,
            Algorithm::SlidingCounter => last / window - time / window <= 1,
            _ => time + window > last,
        };
        let is_meant = |time: u64, at: u64| match own.algorithm() {
            Algorithm::FixedWindow => at < self.ends && at + window >= self.ends && at >= start_of_period,
            Algorithm::SlidingCounter => time / window == at / window,
            _ => time == at,
        };
        let unreachable = match own.algorithm() {
            Algorithm::SlidingLog if at.is_some() => self.charges.len().saturating_sub(REFUND_REACH),
            _ => 0,
        };
        let mut left = units;
        for (time, charged) in self.charges[unreachable..].iter_mut().rev() {
            if counts(*time) && at.is_none_or(|at| is_meant(*time, at)) {
                let back = left.min(*charged);
                *charged -= back;
                left -= back;
            }
        }
        self.charges.retain(|(_, charged)| *charged > 0);
        if own.algorithm() == Algorithm::SlidingLog {
            self.last = self.charges.last().map_or(0, |(time, _)| *time);
        }
    }
}

impl Level {
    fn empty(limit: &Limit) -> Self {
        Self { over: 0, under: u128::from(limit.rate().micros), units: u128::from(limit.rate().units) }
    }

    fn has_rate_of(&self, limit: &Limit) -> bool {
        let other = Self::empty(limit);
        (self.units, self.under) == (other.units, other.under)
    }

    fn is_faster_than(&self, other: &Self) -> bool {
        self.units * other.under > other.units * self.under
    }

    fn units_up(&self) -> u64 {
        u64::try_from(self.over.div_ceil(self.under)).expect("a level stays below 2^53")
    }

    fn at_rate_of(self, limit: &Limit) -> Self {
        let target = Self::empty(limit);
        let (whole, part) = (self.over / self.under, self.over % self.under);
        Self { over: whole * target.under + (part * target.under).div_ceil(self.under), ..target }
    }
}

fn counter_of(tier: &Tier) -> (Key, Algorithm) {
    (tier.key.clone(), tier.terms.limit.algorithm())
}

/// Returns until when a lease that was drawn at a time counts as leased: for its lifetime and one second for its return, rounded up to a
/// quarter of both.
fn lease_expiry(tier: &Tier, at: u64) -> u64 {
    let lease = tier.terms.limit.lease().expect("a limit with a lease");
    let counted = u64::try_from(lease.lifetime().as_micros()).expect("at most an hour") + 1_000_000;
    (at + counted).next_multiple_of(counted.div_ceil(4))
}

/// Returns the end of the window that contains a time.
fn end_of_window(limit: &Limit, time: u64) -> u64 {
    if let Some(calendar) = limit.calendar() {
        return reference_calendar::edges(calendar, time)[1];
    }
    let (window, phase) = (limit.window_us(), limit.phase_us());
    // the first window begins one window before the phase
    (0..)
        .map(|number| ((time + window - phase) / window + number) * window + phase)
        .find(|end| *end > time)
        .expect("there is a later end")
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).expect("at most a day")
}

/// Returns the units that must be free. Overdraft has no effect on live holds.
fn must_be_free(terms: &Terms) -> u64 {
    match terms.admission {
        Admission::Overdraft if terms.limit.algorithm() != Algorithm::Concurrency => {
            terms.cost.units().min(1)
        }
        Admission::Overdraft | Admission::InFull => terms.cost.units(),
    }
}

/// Returns the smallest wait at which `holds`. Unless it holds immediately, it stays true from then on: a state that is
/// ignored because its time is too far ahead may count later.
fn first_moment(holds: impl Fn(u64) -> bool) -> Duration {
    if holds(0) {
        return Duration::ZERO;
    }
    let (mut low, mut high) = (1, MAX_WAIT_US);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) { high = middle } else { low = middle + 1 }
    }
    Duration::from_micros(low)
}
