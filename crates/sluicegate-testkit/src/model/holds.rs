//! Holds in the model: a list of all holds of each counter, live or not.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use sluicegate::{
    Algorithm, Limit, Timestamp,
    limiter::Operation,
    store::{Check, HoldCall, HoldOperation, Key, Tier},
};
use sluicegate_core::{
    HoldAnswer, HoldOutcome, OnExpiry,
    hold::{HOLD_RETENTION, MAX_CLOCK_SETBACK, MAX_HOLD_TTL, MAX_RELEASED},
    step::{Mode, Share},
};

use super::{Expected, LARGEST, Model, counter_of, micros, must_be_free};

type CounterId = (Key, Algorithm);

/// The Cluster slot and the node of each key. Without them, all counters are on one server.
pub type Places = HashMap<Key, (u16, usize)>;

/// The expected result of a check whose counters may have holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldExpected {
    /// The result of each request.
    pub requests: Vec<Expected>,
    /// The result of the hold operation on each tier.
    pub holds: Vec<HoldAnswer>,
}

/// A hold of one counter.
#[derive(Clone)]
pub(super) struct Record {
    id: String,
    limit: Limit,
    units: u64,
    made: u64,
    /// When it was made or last repeated.
    last_attempt: u64,
    expires: u64,
    kept_until: u64,
    is_settled: bool,
    /// Whether its estimate is still charged: it was not settled, released or reset.
    is_open: bool,
    charged: u64,
    /// The first answer.
    first: Share,
}

impl Record {
    fn is_same(&self, other: &Self) -> bool {
        self.id == other.id && self.made == other.made
    }

    fn releases(&self) -> bool {
        self.limit.on_expiry() == OnExpiry::Release
    }

    fn is_known(&self, now: u64) -> bool {
        let has_been_released = self.releases() && self.expires <= now;
        now < self.kept_until && (self.is_settled || has_been_released || self.is_open)
    }

    fn is_live(&self, now: u64) -> bool {
        !self.is_settled && now < self.expires
    }

    /// The time from which a check releases it or, if it stays charged, removes it.
    fn removal_time(&self) -> u64 {
        if self.releases() { self.expires } else { self.kept_until }
    }

    /// The order of holds that are removed at the same time, as stored.
    fn order(&self) -> (u64, Vec<u8>) {
        let flag = [u8::from(self.releases())];
        let [made, units] = [self.made, self.units].map(|number| (number as f64).to_le_bytes());
        (self.removal_time(), [&flag[..], &made, &units, self.id.as_bytes()].concat())
    }

    fn answer(&self, outcome: HoldOutcome) -> HoldAnswer {
        HoldAnswer {
            outcome,
            at: Timestamp::from_micros(self.made),
            expires_at: Timestamp::from_micros(self.expires),
            charged: self.charged,
            released: 0,
        }
    }
}

const NOTHING: Share =
    Share { passes: false, remaining: 0, debt: 0, retry: None, reset_after: Duration::ZERO };

fn outcome(outcome: HoldOutcome) -> HoldAnswer {
    HoldAnswer { outcome, ..HoldAnswer::NONE }
}

/// An attempt to make a hold, or an ordinary check.
struct Attempt<'a> {
    check: &'a Check,
    hold: Option<(&'a str, Duration)>,
    /// Whether the id of the hold must be unknown.
    needs_new_id: bool,
    now: u64,
    shares: Vec<Share>,
    holds: Vec<HoldAnswer>,
    /// The tiers that were charged, or whose hold was repeated.
    reached: Vec<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PartOutcome {
    Granted,
    Denied,
    Conflict,
}

impl Model {
    /// Decides a check, which may be an operation on a hold, and whose limits may release expired ones.
    pub fn decide_held(&mut self, check: &Check, now: Timestamp, places: &Places) -> HeldExpected {
        let releases = check.tiers().iter().any(|tier| tier.terms.limit.on_expiry() == OnExpiry::Release);
        let now_us = now.as_micros();
        match check.hold() {
            Some(HoldCall {
                id,
                operation: HoldOperation::Hold { ttl } | HoldOperation::HoldNew { ttl },
            }) => self.attempt(check, Some((id.as_str(), *ttl)), now_us, places),
            Some(HoldCall { id, operation }) => self.adjust_holds(check, id.as_str(), *operation, now_us),
            None if check.operation() == Operation::Check && releases => {
                let parts = parts(check, places);
                if let [_] = &*parts {
                    let released: Vec<u32> =
                        check.tiers().iter().map(|tier| self.release_expired(tier, now_us)).collect();
                    let requests = self.decide(check, now);
                    let holds =
                        released.into_iter().map(|released| HoldAnswer { released, ..HoldAnswer::NONE });
                    return HeldExpected { requests, holds: holds.collect() };
                }
                assert_eq!(check.count(), 1, "a check over several servers of one request");
                self.attempt(check, None, now_us, places)
            }
            None => {
                let holds = vec![HoldAnswer::NONE; check.tiers().len()];
                HeldExpected { requests: self.decide(check, now), holds }
            }
        }
    }

    /// Returns the earliest time to which the clock may be set back: stores may have forgotten the ids whose time had passed then.
    pub fn earliest_clock(&self, now: Timestamp) -> Timestamp {
        let kept = self.holds.values().flatten().map(|record| record.kept_until);
        Timestamp::from_micros(kept.filter(|until| *until <= now.as_micros()).max().unwrap_or(0))
    }

    /// Decides a check server by server: a denial reverts what was done on the servers before.
    fn attempt(
        &mut self,
        check: &Check,
        hold: Option<(&str, Duration)>,
        now: u64,
        places: &Places,
    ) -> HeldExpected {
        let count = check.tiers().len();
        let (shares, holds) = (vec![NOTHING; count], vec![HoldAnswer::NONE; count]);
        let needs_new_id =
            check.hold().is_some_and(|call| matches!(call.operation, HoldOperation::HoldNew { .. }));
        let mut attempt = Attempt { check, hold, needs_new_id, now, shares, holds, reached: Vec::new() };
        let (mut outcome, mut unreached) = (PartOutcome::Granted, Vec::new());
        for part in parts(check, places) {
            if outcome == PartOutcome::Granted {
                outcome = self.decide_part(&mut attempt, &part);
            } else {
                unreached.extend(part);
            }
        }
        if outcome != PartOutcome::Granted {
            self.revert(&mut attempt, outcome, &unreached);
        }
        let Attempt { shares, holds, .. } = attempt;
        let granted = outcome == PartOutcome::Granted;
        HeldExpected { requests: vec![Expected { granted, shares }], holds }
    }

    /// Decides the tiers of one server.
    fn decide_part(&mut self, attempt: &mut Attempt<'_>, part: &[usize]) -> PartOutcome {
        let (tiers, now) = (attempt.check.tiers(), attempt.now);
        let known: Vec<Option<Record>> = part
            .iter()
            .map(|tier| attempt.hold.and_then(|(id, _)| self.known(&tiers[*tier], id, now).cloned()))
            .collect();
        let needs_new_id = attempt.needs_new_id;
        let is_repeated = |record: &Record, tier: usize| {
            !needs_new_id && record.is_live(now) && record.units == tiers[tier].terms.cost.units()
        };
        let mut conflicts =
            known.iter().zip(part).filter_map(|(record, tier)| Some((record.as_ref()?, *tier)));
        if conflicts.any(|(record, tier)| !is_repeated(record, tier)) {
            for (record, tier) in known.iter().zip(part) {
                if let Some(record) = record {
                    let is_repeated = is_repeated(record, *tier);
                    let found = if is_repeated { HoldOutcome::Repeated } else { HoldOutcome::Conflict };
                    attempt.holds[*tier] = record.answer(found);
                    attempt.shares[*tier] = if is_repeated { record.first } else { NOTHING };
                }
            }
            return PartOutcome::Conflict;
        }
        let uses_holds = attempt.hold.is_some()
            || part.iter().any(|tier| tiers[*tier].terms.limit.on_expiry() == OnExpiry::Release);
        let mut passes = vec![true; part.len()];
        let mut is_granted = true;
        for (index, tier) in part.iter().enumerate().filter(|(index, _)| known[*index].is_none()) {
            let terms = &tiers[*tier].terms;
            if uses_holds {
                attempt.holds[*tier].released = self.release_expired(&tiers[*tier], now);
            }
            let used = self.used(&counter_of(&tiers[*tier]), &terms.limit, now);
            passes[index] = used + must_be_free(terms) <= terms.limit.capacity();
            is_granted &= passes[index] || terms.mode == Mode::Shadow;
        }
        for (index, tier) in part.iter().enumerate() {
            match &known[index] {
                Some(record) if is_granted => {
                    self.record_mut(&tiers[*tier], record).last_attempt = record.last_attempt.max(now);
                    attempt.holds[*tier] = record.answer(HoldOutcome::Repeated);
                    attempt.shares[*tier] = record.first;
                    attempt.reached.push(*tier);
                }
                Some(record) => attempt.shares[*tier] = self.remove(&tiers[*tier], record, now),
                None if is_granted && passes[index] => {
                    self.charge_tier(attempt, *tier);
                    attempt.reached.push(*tier);
                }
                None => {
                    let counter = counter_of(&tiers[*tier]);
                    attempt.shares[*tier] = self.share(&counter, &tiers[*tier].terms, passes[index], now);
                }
            }
        }
        if is_granted { PartOutcome::Granted } else { PartOutcome::Denied }
    }

    /// Charges a tier and records it as a hold.
    fn charge_tier(&mut self, attempt: &mut Attempt<'_>, tier: usize) {
        let (Tier { terms, .. }, now) = (&attempt.check.tiers()[tier], attempt.now);
        let counter = counter_of(&attempt.check.tiers()[tier]);
        let units = terms.cost.units();
        self.charge(&counter, &terms.limit, now, units);
        let Some((id, ttl)) = attempt.hold else {
            attempt.shares[tier] = self.share(&counter, terms, true, now);
            return;
        };
        let expires = now + micros(ttl);
        let record = Record {
            id: id.to_owned(),
            limit: terms.limit,
            units,
            made: now,
            last_attempt: now,
            expires,
            kept_until: expires + micros(HOLD_RETENTION),
            is_settled: false,
            is_open: true,
            charged: units,
            first: NOTHING,
        };
        attempt.holds[tier] =
            HoldAnswer { released: attempt.holds[tier].released, ..record.answer(HoldOutcome::Held) };
        let records = self.holds.entry(counter.clone()).or_default();
        // an id that was forgotten may be used again, while the earlier hold was not released yet
        records.retain(|other| other.is_open || other.id != id);
        records.push(record);
        let first = self.share(&counter, terms, true, now);
        self.holds.get_mut(&counter).and_then(|records| records.last_mut()).expect("just added").first =
            first;
        attempt.shares[tier] = first;
    }

    /// Reverts an attempt that a later server denied.
    fn revert(&mut self, attempt: &mut Attempt<'_>, outcome: PartOutcome, unreached: &[usize]) {
        let (tiers, now) = (attempt.check.tiers(), attempt.now);
        for tier in attempt.reached.clone() {
            let counter = counter_of(&tiers[tier]);
            let Some((id, _)) = attempt.hold else {
                let terms = &tiers[tier].terms;
                self.refund(&counter, &terms.limit, now, terms.cost.units(), Some(now));
                attempt.shares[tier] = self.share(&counter, terms, true, now);
                continue;
            };
            // a hold whose id belongs to another one is kept
            if outcome == PartOutcome::Denied || attempt.holds[tier].outcome == HoldOutcome::Held {
                let record = self.known(&tiers[tier], id, now).expect("it was reached").clone();
                attempt.shares[tier] = self.remove(&tiers[tier], &record, now);
                attempt.holds[tier] =
                    HoldAnswer { released: attempt.holds[tier].released, ..HoldAnswer::NONE };
            }
        }
        for tier in unreached {
            let earlier = attempt.hold.and_then(|(id, _)| self.known(&tiers[*tier], id, now).cloned());
            if let Some(record) = earlier.filter(|record| {
                record.is_live(now) && outcome == PartOutcome::Denied && !attempt.needs_new_id
            }) {
                self.remove(&tiers[*tier], &record, now);
            }
            let (counter, terms) = (counter_of(&tiers[*tier]), &tiers[*tier].terms);
            let used = self.used(&counter, &terms.limit, now);
            let passes = used + must_be_free(terms) <= terms.limit.capacity();
            attempt.shares[*tier] = self.share(&counter, terms, passes, now);
        }
    }

    /// Settles, renews or reverts a hold.
    fn adjust_holds(&mut self, check: &Check, id: &str, operation: HoldOperation, now: u64) -> HeldExpected {
        let adjusted = check.tiers().iter().enumerate().map(|(index, tier)| {
            let Some(record) = self.known(tier, id, now).cloned() else {
                return (NOTHING, outcome(HoldOutcome::Unknown));
            };
            match operation {
                HoldOperation::Revert { until } => {
                    let until = until.as_micros();
                    if record.is_settled || record.last_attempt > until || record.expires <= until {
                        return (NOTHING, outcome(HoldOutcome::Unknown));
                    }
                    (self.remove(tier, &record, now), record.answer(HoldOutcome::Settled))
                }
                _ if record.is_settled => (NOTHING, record.answer(HoldOutcome::Already)),
                HoldOperation::Renew { ttl } => self.renew(tier, record, ttl, now),
                HoldOperation::Settle { kept, max_excess } => {
                    let actual = if kept >> index & 1 == 1 { record.units } else { tier.terms.cost.units() };
                    let most = record.units + max_excess.unwrap_or(record.limit.max_excess());
                    self.settle(tier, record, actual.min(most).min(LARGEST), now)
                }
                HoldOperation::Hold { .. } | HoldOperation::HoldNew { .. } => {
                    unreachable!("a hold is decided")
                }
            }
        });
        let (shares, holds) = adjusted.unzip();
        HeldExpected { requests: vec![Expected { granted: true, shares }], holds }
    }

    fn renew(&mut self, tier: &Tier, mut record: Record, ttl: Duration, now: u64) -> (Share, HoldAnswer) {
        if !record.is_live(now) {
            return (NOTHING, record.answer(HoldOutcome::Late));
        }
        record.expires = record.expires.max(now + micros(ttl));
        record.kept_until = record.expires + micros(HOLD_RETENTION);
        *self.record_mut(tier, &record) = record.clone();
        (self.share_of(tier, &record, now), record.answer(HoldOutcome::Renewed))
    }

    fn settle(&mut self, tier: &Tier, mut record: Record, actual: u64, now: u64) -> (Share, HoldAnswer) {
        let counter = counter_of(tier);
        let (limit, units) = (record.limit, record.units);
        let found = if record.is_live(now) { HoldOutcome::Settled } else { HoldOutcome::Late };
        let was_open = record.is_open;
        record.is_open = false;
        record.is_settled = true;
        record.charged = actual;
        record.kept_until = now + micros(HOLD_RETENTION);
        *self.record_mut(tier, &record) = record.clone();
        if !was_open {
            self.charge_held(&counter, &limit, now, actual);
        } else if actual < units {
            self.refund_held(&counter, &record, now, units - actual);
        } else {
            self.charge_held(&counter, &limit, now, actual - units);
        }
        (self.share_of(tier, &record, now), record.answer(found))
    }

    /// Removes a hold as if it had not been made.
    fn remove(&mut self, tier: &Tier, record: &Record, now: u64) -> Share {
        let counter = counter_of(tier);
        self.holds.get_mut(&counter).expect("it has the hold").retain(|other| !other.is_same(record));
        if record.is_open {
            self.refund_held(&counter, record, now, record.units);
        }
        self.share_of(tier, record, now)
    }

    fn refund_held(&mut self, counter: &CounterId, record: &Record, now: u64, units: u64) {
        let own = self.limit_that_counts(counter, &record.limit, now);
        if own.algorithm() != Algorithm::TokenBucket {
            self.refund(counter, &own, now, units, Some(record.made));
        } else if let Some(bucket) = self.counters.get_mut(counter)
            && units > 0
            && bucket.counts_at_rate(&own, &record.limit, now)
        {
            bucket.refund_level(Some(&record.limit), &own, now, units, Some(record.made));
        }
    }

    /// Charges the excess of a hold that was made under `limit`.
    fn charge_held(&mut self, counter: &CounterId, limit: &Limit, now: u64, units: u64) {
        let own = self.limit_that_counts(counter, limit, now);
        if own.algorithm() != Algorithm::TokenBucket || own.rate() == limit.rate() {
            self.charge(counter, &own, now, units);
        } else if units > 0 {
            self.counters.get_mut(counter).expect("it has units").charge_level(&own, now, units);
        }
    }

    /// Returns the limit under which the units of a hold are corrected: with the window or rate under which a counter that has units was last
    /// charged. For a bucket, only its rate is used.
    fn limit_that_counts(&self, counter: &CounterId, limit: &Limit, now: u64) -> Limit {
        let Some(found) = self.counters.get(counter) else { return *limit };
        let (algorithm, window) = (limit.algorithm(), Duration::from_micros(found.limit.window_us()));
        let own = match algorithm {
            Algorithm::Concurrency => return *limit,
            Algorithm::TokenBucket => {
                let (units, under) = (found.level.units, found.level.under);
                let times = 1_000_u128.div_ceil(under);
                let [amount, micros] =
                    [units, under].map(|number| u64::try_from(number * times).expect("within the range"));
                let own = Limit::new(algorithm, amount, Duration::from_micros(micros));
                let own = own.expect("the numbers of a valid limit");
                let is_other = own.rate() != limit.rate();
                return if is_other && found.counts_at_rate(&own, limit, now) { own } else { *limit };
            }
            _ if found.limit.window_us() == limit.window_us() => return *limit,
            Algorithm::FixedWindow => Limit::new(algorithm, limit.amount(), window)
                .and_then(|own| own.with_phase(Duration::from_micros(found.ends % found.limit.window_us()))),
            _ => Limit::new(algorithm, limit.amount(), window),
        };
        let own = own.expect("the numbers of a valid limit");
        if self.used(counter, &own, now) > 0 { own } else { *limit }
    }

    /// Refunds the holds of a counter that have expired, a few at a time.
    fn release_expired(&mut self, tier: &Tier, now: u64) -> u32 {
        let counter = counter_of(tier);
        let Some(records) = self.holds.get_mut(&counter) else { return 0 };
        let (expired, others): (Vec<_>, Vec<_>) = records
            .iter_mut()
            .filter(|record| record.is_open)
            .partition(|record| record.removal_time() <= now);
        let latest = now + micros(MAX_HOLD_TTL + HOLD_RETENTION + MAX_CLOCK_SETBACK);
        let from_future = others.into_iter().filter(|record| record.removal_time() > latest);
        let is_forward = !expired.is_empty();
        let mut expired: Vec<&mut Record> = if is_forward { expired } else { from_future.collect() };
        expired.sort_by_key(|record| record.order());
        if !is_forward {
            expired.reverse();
        }
        expired.truncate(MAX_RELEASED);
        let mut refunds = Vec::new();
        for record in &mut expired {
            record.is_open = false;
            refunds.extend(record.releases().then_some((record.units, record.made)));
        }
        let released = u32::try_from(expired.len()).expect("a few");
        for (units, made) in refunds {
            self.refund(&counter, &tier.terms.limit, now, units, Some(made));
        }
        released
    }

    /// Removes the live holds of a counter that is deleted.
    pub(super) fn end_live_holds(&mut self, key: &Key, algorithm: Algorithm) {
        let records = self.holds.get_mut(&(key.clone(), algorithm));
        records.into_iter().flatten().for_each(|record| record.is_open = false);
    }

    /// Returns the units of the holds that were not released yet.
    pub(super) fn held_units(&self, counter: &CounterId) -> u64 {
        self.open(counter).map(|record| record.units).sum()
    }

    /// Returns the time until the first hold expires, at least a microsecond.
    pub(super) fn first_expiry(&self, counter: &CounterId, now: u64) -> Duration {
        let first = self.open(counter).map(|record| record.expires).min().unwrap_or(0);
        Duration::from_micros(first.saturating_sub(now).max(1))
    }

    /// Returns the time until the last hold expires, at least a microsecond while units are held.
    pub(super) fn last_expiry(&self, counter: &CounterId, now: u64) -> Duration {
        if self.held_units(counter) == 0 {
            return Duration::ZERO;
        }
        let last = self.open(counter).map(|record| record.expires).max().unwrap_or(0);
        Duration::from_micros(last.saturating_sub(now).max(1))
    }

    fn open(&self, counter: &CounterId) -> impl Iterator<Item = &Record> {
        self.holds.get(counter).into_iter().flatten().filter(|record| record.is_open)
    }

    fn known(&self, tier: &Tier, id: &str, now: u64) -> Option<&Record> {
        let records = self.holds.get(&counter_of(tier))?;
        records.iter().find(|record| record.id == id && record.is_known(now))
    }

    fn record_mut(&mut self, tier: &Tier, record: &Record) -> &mut Record {
        let records = self.holds.get_mut(&counter_of(tier)).expect("it has the hold");
        records.iter_mut().find(|other| other.is_same(record)).expect("it has the hold")
    }

    /// Returns the state of a counter after an operation on one of its holds, under the limit of the hold.
    fn share_of(&self, tier: &Tier, record: &Record, now: u64) -> Share {
        let terms = sluicegate_core::Terms::new(record.limit, sluicegate_core::Cost::ZERO);
        self.share(&counter_of(tier), &terms, true, now)
    }
}

/// Returns the tiers that are decided in one step, in the order of the steps.
fn parts(check: &Check, places: &Places) -> Vec<Vec<usize>> {
    let all: Vec<usize> = (0..check.tiers().len()).collect();
    let of = |tier: &usize| places.get(&check.tiers()[*tier].key);
    let mut nodes: Vec<usize> = all.iter().filter_map(|tier| Some(of(tier)?.1)).collect();
    nodes.dedup();
    if nodes.len() <= 1 {
        return vec![all];
    }
    let mut by_slot: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
    for tier in all {
        let (slot, _) = of(&tier).expect("the place of every key is known");
        by_slot.entry(*slot).or_default().push(tier);
    }
    by_slot.into_values().collect()
}
