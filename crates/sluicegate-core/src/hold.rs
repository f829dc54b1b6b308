//! Holds: admitted requests whose cost is corrected later. A hold is live until it is settled, released or expires.
//!
//! A hold charges its estimate like a check, and records it under an id. Settling replaces the estimate with the actual cost, once:
//! it refunds the difference to the charge of the hold, or charges the excess. A hold that is not settled expires. Then its estimate stays
//! charged and ages with its window, or it is refunded ([`OnExpiry`]).
//!
//! [`Holds`] contains the holds of one counter. Like a counter, it is a pure function of state and time; the Redis script (`hold.lua`)
//! does the same. A store decides a hold over several counters as described in [`crate::step`], and then adds the hold to each of them.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use crate::{
    algorithm::State,
    cost::Cost,
    limit::Limit,
    step::{Answer, Operation, Terms},
    time::{MAX_EXACT, Timestamp},
};

/// The longest id of a hold, in bytes.
pub const MAX_HOLD_ID: usize = 128;
/// The shortest time until a hold expires.
pub const MIN_HOLD_TTL: Duration = Duration::from_millis(1);
/// The longest time until a hold expires. Renew it for longer work.
pub const MAX_HOLD_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// The time until a hold expires if neither the request nor a rule sets it.
pub const DEFAULT_HOLD_TTL: Duration = Duration::from_secs(60);
/// How long the id of a settled or expired hold is kept.
pub const HOLD_RETENTION: Duration = Duration::from_secs(60);
/// How far the clock can be set back without an effect on live holds. If it is set back further, holds that would last longer than any new one
/// are removed.
pub const MAX_CLOCK_SETBACK: Duration = Duration::from_secs(10 * 60);
/// The most holds of one counter that are live, or expired and not released yet.
pub const MAX_LIVE_HOLDS: usize = 100_000;
/// The most expired holds of a counter that one check releases. The others count as live until the next one.
pub const MAX_RELEASED: usize = 16;

const RETENTION_US: u64 = HOLD_RETENTION.as_secs() * 1_000_000;
/// The table of records shrinks when it has more than this many places for each record.
const MAX_SLOTS_PER_RECORD: usize = 8;
/// The most ids that one operation forgets.
const MAX_FORGOTTEN: usize = 32;
/// What the allocator adds to an allocation, on average.
const ALLOCATION_BYTES: usize = 16;
/// The memory of an entry of a set. The nodes of a tree are half full if entries are added in order.
const ENTRY_BYTES: usize = 2 * size_of::<(u64, Member)>() + ALLOCATION_BYTES;
/// The memory of a set with few entries: a node for 11.
const NODE_BYTES: usize = 11 * size_of::<(u64, Member)>() + 2 * ALLOCATION_BYTES;
/// The memory of a place for a record.
const SLOT_BYTES: usize = size_of::<(Box<[u8]>, Box<Record>)>() + 1;
/// The memory of a record, without the two copies of its id.
const RECORD_BYTES: usize = size_of::<Record>() + 3 * ALLOCATION_BYTES;
/// The fewest places for records.
const MIN_SLOTS: usize = 4;

/// What happens to the units of a hold that expires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnExpiry {
    /// The estimate stays charged and ages with its window.
    #[default]
    Charge,
    /// The estimate is refunded.
    Release,
}

impl OnExpiry {
    /// The name in configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Charge => "charge",
            Self::Release => "release",
        }
    }
}

/// The outcome of a hold operation on one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HoldOutcome {
    /// There is no hold: it was denied, or this is the counter of a shadow rule that would have denied it.
    NotHeld,
    /// The hold was made.
    Held,
    /// A live hold with this id and cost exists: this is its first answer.
    Repeated,
    /// The expiry was moved.
    Renewed,
    /// The actual cost replaced the estimate.
    Settled,
    /// The hold was settled before. Nothing changed.
    Already,
    /// The hold had expired. Settling charged the actual cost; renewing changed nothing.
    Late,
    /// There is no such hold. Nothing changed.
    Unknown,
    /// The id belongs to a hold with another cost, or to one that has ended. Nothing changed.
    Conflict,
    /// The counter has [`MAX_LIVE_HOLDS`] holds, or the memory store is full. Nothing changed.
    Full,
}

/// The result of a hold operation on one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldAnswer {
    /// The outcome.
    pub outcome: HoldOutcome,
    /// When the hold was made.
    pub at: Timestamp,
    /// When it expires.
    pub expires_at: Timestamp,
    /// The units that the hold has charged: its estimate, or the actual cost once it is settled.
    pub charged: u64,
    /// The number of other, expired holds of the counter that this operation released.
    pub released: u32,
}

impl HoldAnswer {
    /// The result of an operation without a hold.
    pub const NONE: Self = Self::new(HoldOutcome::NotHeld);

    const fn new(outcome: HoldOutcome) -> Self {
        let never = Timestamp::from_micros(0);
        Self { outcome, at: never, expires_at: never, charged: 0, released: 0 }
    }
}

/// A hold of one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Record {
    limit: Limit,
    units: u64,
    at_us: u64,
    expires_us: u64,
    /// The time until which the id is kept.
    kept_until_us: u64,
    is_settled: bool,
    charged: u64,
    /// The time at which it was made or last repeated.
    last_attempt_us: u64,
    answer: Answer,
}

/// An entry of the index, in the format of the script: '<Bdd', whether the hold is released when it expires, its time and its units; then
/// the id. Holds that expire at the same time are ordered by these bytes.
type Member = Box<[u8]>;

const MEMBER_BYTES: usize = 17;
/// The memory of a member, without its id.
const INDEXED_BYTES: usize = MEMBER_BYTES + ALLOCATION_BYTES;

impl Record {
    fn member(&self, id: &[u8]) -> Member {
        let mut member = Vec::with_capacity(MEMBER_BYTES + id.len());
        member.push(u8::from(self.limit.releases_expired()));
        member.extend((self.at_us as f64).to_le_bytes());
        member.extend((self.units as f64).to_le_bytes());
        member.extend(id);
        member.into()
    }

    /// The time at which the hold is removed from the index: its expiry if it is then released, otherwise the time at which its id is forgotten.
    fn removal_us(&self) -> u64 {
        if self.limit.releases_expired() { self.expires_us } else { self.kept_until_us }
    }

    /// Adds the result of an operation on this hold to the answer of its counter.
    fn with_outcome(&self, answer: Answer, outcome: HoldOutcome) -> Answer {
        let hold = HoldAnswer {
            outcome,
            at: Timestamp::from_micros(self.at_us),
            expires_at: Timestamp::from_micros(self.expires_us),
            charged: self.charged,
            released: 0,
        };
        Answer { hold, ..answer }
    }
}

/// Returns the memory of a table with room for so many records.
const fn slot_bytes(capacity: usize) -> usize {
    // at most seven of eight places are used
    ALLOCATION_BYTES + capacity * 8 / 7 * SLOT_BYTES
}

/// Returns the memory of a set, without what its entries refer to.
const fn set_bytes(entries: usize) -> usize {
    match entries * ENTRY_BYTES {
        0 => 0,
        bytes if bytes < NODE_BYTES => NODE_BYTES,
        bytes => bytes,
    }
}

fn decode_member(member: &Member) -> (bool, u64, u64) {
    let number =
        |from: usize| f64::from_le_bytes(*member[from..].first_chunk().expect("a member has 17 bytes"));
    (member[0] == 1, number(1) as u64, number(9) as u64)
}

/// The holds of one counter.
#[derive(Clone, Debug, Default)]
pub struct Holds {
    index: Index,
    /// Boxed, because up to half of the places are free.
    records: HashMap<Box<[u8]>, Box<Record>>,
    /// The ids, ordered by the time until which they are kept.
    known: BTreeSet<(u64, Box<[u8]>)>,
    id_bytes: usize,
}

/// Holds that are live or not released yet, ordered by the time at which they are removed.
#[derive(Clone, Debug, Default)]
struct Index {
    entries: BTreeSet<(u64, Member)>,
    id_bytes: usize,
}

impl Index {
    fn len(&self) -> usize {
        self.entries.len()
    }

    fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn bytes(&self) -> usize {
        set_bytes(self.len()) + self.len() * INDEXED_BYTES + self.id_bytes
    }

    fn insert(&mut self, record: &Record, id: &[u8]) {
        if self.entries.insert((record.removal_us(), record.member(id))) {
            self.id_bytes += id.len();
        }
    }

    /// Returns whether the hold was in the index.
    fn remove(&mut self, record: &Record, id: &[u8]) -> bool {
        let was_present = self.entries.remove(&(record.removal_us(), record.member(id)));
        self.id_bytes -= if was_present { id.len() } else { 0 };
        was_present
    }

    /// Removes and returns the first hold whose time of removal has passed.
    fn pop_due(&mut self, now: Timestamp) -> Option<Member> {
        self.entries.first().filter(|(removal_us, _)| *removal_us <= now.as_micros())?;
        let first = self.entries.pop_first();
        self.popped(first)
    }

    /// Removes the last hold if it would be removed later than any new one: it is from before the clock was set back.
    fn pop_from_future(&mut self, now: Timestamp) -> Option<Member> {
        let latest_us = now.plus(MAX_HOLD_TTL + HOLD_RETENTION + MAX_CLOCK_SETBACK).as_micros();
        self.entries.last().filter(|(removal_us, _)| *removal_us > latest_us)?;
        let last = self.entries.pop_last();
        self.popped(last)
    }

    fn popped(&mut self, entry: Option<(u64, Member)>) -> Option<Member> {
        let (_, member) = entry?;
        self.id_bytes -= member.len() - MEMBER_BYTES;
        Some(member)
    }
}

/// A new hold.
#[derive(Clone, Copy, Debug)]
pub struct NewHold<'a> {
    /// The id.
    pub id: &'a [u8],
    /// How long it lasts.
    pub ttl: Duration,
    /// The answer of the check that made it.
    pub answer: Answer,
}

impl Holds {
    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty() && self.index.is_empty()
    }

    /// Whether any hold is live or not released yet.
    pub fn has_indexed(&self) -> bool {
        !self.index.is_empty()
    }

    /// Whether no further hold is accepted.
    pub fn is_full(&self) -> bool {
        self.index.len() >= MAX_LIVE_HOLDS
    }

    /// Returns the estimated memory in bytes.
    pub fn bytes(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        let records = self.records.len() * RECORD_BYTES + 2 * self.id_bytes;
        slot_bytes(self.records.capacity()) + set_bytes(self.known.len()) + records + self.index.bytes()
    }

    /// Returns how many bytes a hold with this id may add to those of its counter.
    pub fn growth_bytes(holds: Option<&Self>, id: &[u8]) -> usize {
        let (records, places, indexed) = holds
            .map_or((0, 0, 0), |holds| (holds.records.len(), holds.records.capacity(), holds.index.len()));
        let sets = [records, indexed].map(|entries| set_bytes(entries + 1) - set_bytes(entries));
        let slots = if records < places { 0 } else { slot_bytes(places.max(MIN_SLOTS)) };
        RECORD_BYTES + INDEXED_BYTES + 3 * id.len() + sets[0] + sets[1] + slots
    }

    /// Returns the limit under which the hold with this id was made, if the id is known.
    pub fn limit_of(&self, id: &[u8], now: Timestamp) -> Option<Limit> {
        self.record(id, now).map(|record| record.limit)
    }

    /// Returns the time until which the id that is forgotten first is kept, if any id is.
    pub fn first_kept_until(&self) -> Option<Timestamp> {
        self.known.first().map(|(until_us, _)| Timestamp::from_micros(*until_us))
    }

    /// Returns the number of live holds, the sum of their units and the time of the oldest one.
    pub fn live(&self, now: Timestamp) -> LiveHolds {
        let now = now.as_micros();
        let live = self.index.entries.iter().filter_map(|(removal_us, member)| {
            let (is_released, at_us, units) = decode_member(member);
            let expires_us = if is_released { *removal_us } else { removal_us - RETENTION_US };
            (expires_us > now).then_some((at_us, units))
        });
        live.fold(LiveHolds::default(), |sum, (at_us, units)| sum.and(at_us, units))
    }

    fn record(&self, id: &[u8], now: Timestamp) -> Option<&Record> {
        let record = self
            .records
            .get(id)
            .map(|record| &**record)
            .filter(|record| record.kept_until_us > now.as_micros())?;
        let is_valid = record.is_settled
            || (record.limit.releases_expired() && record.expires_us <= now.as_micros())
            || self.index.entries.contains(&(record.removal_us(), record.member(id)));
        is_valid.then_some(record)
    }

    /// Returns the answer to a hold whose id is known. See [`Holds::record_repetition`].
    pub fn answer_to_existing(&self, id: &[u8], units: u64, now: Timestamp) -> Option<Answer> {
        let record = self.record(id, now)?;
        let is_live = !record.is_settled && record.expires_us > now.as_micros();
        if is_live && record.units == units {
            return Some(record.with_outcome(record.answer, HoldOutcome::Repeated));
        }
        self.conflict(id, now)
    }

    /// Returns the answer to a hold whose id must be new, but is known.
    pub fn conflict(&self, id: &[u8], now: Timestamp) -> Option<Answer> {
        Some(self.record(id, now)?.with_outcome(Answer::NONE, HoldOutcome::Conflict))
    }

    /// Records that a hold was repeated, so that the denial of an earlier attempt does not revert it.
    pub fn record_repetition(&mut self, id: &[u8], now: Timestamp) {
        if let Some(record) = self.records.get_mut(id) {
            record.last_attempt_us = record.last_attempt_us.max(now.as_micros());
        }
    }

    /// Removes up to [`MAX_RELEASED`] holds that are due for removal, and refunds those that release on expiry. Returns their number. If none is
    /// due, removes holds whose removal time is too far in the future: the clock has been set back since.
    pub fn release_expired(&mut self, state: &mut State, limit: &Limit, now: Timestamp) -> u32 {
        let mut removed = 0;
        let has_due =
            self.index.entries.first().is_some_and(|(removal_us, _)| *removal_us <= now.as_micros());
        while removed < MAX_RELEASED
            && let Some(member) =
                if has_due { self.index.pop_due(now) } else { self.index.pop_from_future(now) }
        {
            let (is_released, at_us, units) = decode_member(&member);
            if is_released {
                state.refund(limit, now, units, Some(Timestamp::from_micros(at_us)));
            }
            removed += 1;
        }
        self.update_expiries(state);
        u32::try_from(removed).expect("at most MAX_RELEASED")
    }

    /// Adds a hold that was charged to the counter. Returns its answer, with the expiry.
    pub fn add(&mut self, state: &mut State, terms: &Terms, hold: NewHold<'_>, now: Timestamp) -> Answer {
        self.forget(now);
        let (at_us, units) = (now.as_micros(), terms.cost.units());
        let expires_us = at_us + micros(hold.ttl);
        let limit = terms.limit;
        if !limit.algorithm().properties().has_window {
            state.charge(&limit, now, units);
        }
        let mut record = Record {
            limit,
            units,
            at_us,
            expires_us,
            kept_until_us: expires_us + RETENTION_US,
            is_settled: false,
            charged: units,
            last_attempt_us: at_us,
            answer: hold.answer,
        };
        self.index.insert(&record, hold.id);
        self.update_expiries(state);
        let Answer { available, reset_after_us, spare, .. } = current(state, &limit, now);
        record.answer = Answer { charged: 1, available, reset_after_us, spare, ..hold.answer };
        let answer = record.with_outcome(record.answer, HoldOutcome::Held);
        self.insert(hold.id, record);
        answer
    }

    /// Replaces the estimate of a hold with the actual cost; `None` keeps the estimate. The excess is at most `max_excess`; `None` stands for
    /// the bound of the limit.
    pub fn settle(
        &mut self,
        state: &mut State,
        id: &[u8],
        actual: Option<u64>,
        max_excess: Option<u64>,
        now: Timestamp,
    ) -> Answer {
        let Some(record) = self.record(id, now) else {
            return Answer::UNKNOWN_HOLD;
        };
        if record.is_settled {
            return record.with_outcome(Answer::NONE, HoldOutcome::Already);
        }
        let mut record = record.clone();
        let Record { limit, units, at_us, .. } = record;
        let most = units.saturating_add(max_excess.unwrap_or(limit.max_excess())).min(MAX_EXACT);
        let actual = actual.unwrap_or(units).min(most);
        let was_charged = self.index.remove(&record, id);
        let at = Timestamp::from_micros(at_us);
        if !limit.algorithm().properties().has_window {
            if was_charged {
                state.refund(&limit, now, units, None);
            }
        } else if was_charged && actual < units {
            state.refund_correction(&limit, now, units - actual, at);
        } else {
            let excess = if was_charged { actual - units } else { actual };
            // even a charge of 0 would convert the counter to the window of the hold
            if excess > 0 {
                state.charge(&state.correction_limit(&limit, now), now, excess);
            }
        }
        self.update_expiries(state);
        let is_late = record.expires_us <= now.as_micros();
        record.is_settled = true;
        record.charged = actual;
        record.kept_until_us = now.as_micros() + RETENTION_US;
        let outcome = if is_late { HoldOutcome::Late } else { HoldOutcome::Settled };
        let answer = record.with_outcome(current(state, &limit, now), outcome);
        self.insert(id, record);
        answer
    }

    /// Moves the expiry of a live hold to `ttl` from now, if that is later.
    pub fn renew(&mut self, state: &mut State, id: &[u8], ttl: Duration, now: Timestamp) -> Answer {
        let Some(record) = self.record(id, now) else {
            return Answer::UNKNOWN_HOLD;
        };
        if record.is_settled {
            return record.with_outcome(Answer::NONE, HoldOutcome::Already);
        }
        if record.expires_us <= now.as_micros() {
            return record.with_outcome(Answer::NONE, HoldOutcome::Late);
        }
        let mut record = record.clone();
        self.index.remove(&record, id);
        record.expires_us = record.expires_us.max(now.as_micros() + micros(ttl));
        record.kept_until_us = record.expires_us + RETENTION_US;
        self.index.insert(&record, id);
        self.update_expiries(state);
        let answer = record.with_outcome(current(state, &record.limit, now), HoldOutcome::Renewed);
        self.insert(id, record);
        answer
    }

    /// Reverts a hold as if it had not been made. With `until`, the time at which another server denied it, does so only if the hold was live
    /// then and was not repeated since. Without `until`, reverts any hold that was not settled.
    pub fn revert(
        &mut self,
        state: &mut State,
        id: &[u8],
        until: Option<Timestamp>,
        now: Timestamp,
    ) -> Answer {
        let was_live = |record: &Record| {
            until.is_none_or(|until| (record.last_attempt_us..record.expires_us).contains(&until.as_micros()))
        };
        let record = self.record(id, now).filter(|record| !record.is_settled && was_live(record)).cloned();
        let Some(record) = record else {
            return Answer::UNKNOWN_HOLD;
        };
        if self.index.remove(&record, id) {
            let at = Timestamp::from_micros(record.at_us);
            state.refund_correction(&record.limit, now, record.units, at);
        }
        self.remove(id);
        self.update_expiries(state);
        record.with_outcome(current(state, &record.limit, now), HoldOutcome::Settled)
    }

    /// Removes all live holds, because their counter was deleted. Ids of settled holds are kept.
    pub fn reset(&mut self) {
        self.index = Index::default();
    }

    /// Removes everything that no longer has an effect. The next check of an existing counter refunds its expired holds.
    pub fn remove_expired(&mut self, has_counter: bool, now: Timestamp) {
        while self.forget(now) > 0 {}
        while let Some((_, member)) = self.index.entries.first()
            && (!has_counter || !decode_member(member).0)
            && self.index.pop_due(now).is_some()
        {}
    }

    fn insert(&mut self, id: &[u8], record: Record) {
        self.known.insert((record.kept_until_us, id.into()));
        if let Some(place) = self.records.get_mut(id) {
            if place.kept_until_us != record.kept_until_us {
                self.known.remove(&(place.kept_until_us, id.into()));
            }
            **place = record;
            return;
        }
        self.id_bytes += id.len();
        self.records.insert(id.into(), Box::new(record));
    }

    fn remove(&mut self, id: &[u8]) {
        if let Some(record) = self.records.remove(id) {
            self.known.remove(&(record.kept_until_us, id.into()));
            self.id_bytes -= id.len();
        }
    }

    /// Forgets at most [`MAX_FORGOTTEN`] ids whose time has passed. Returns their number.
    fn forget(&mut self, now: Timestamp) -> usize {
        let mut forgotten = 0;
        while forgotten < MAX_FORGOTTEN
            && self.known.first().is_some_and(|(until_us, _)| *until_us <= now.as_micros())
        {
            let (_, id) = self.known.pop_first().expect("there is a first one");
            self.id_bytes -= id.len();
            self.records.remove(&id);
            forgotten += 1;
        }
        self.shrink();
        forgotten
    }

    fn shrink(&mut self) {
        if self.records.capacity() > MAX_SLOTS_PER_RECORD * self.records.len().max(MIN_SLOTS) {
            self.records.shrink_to(2 * self.records.len());
        }
    }

    /// Forgets at most `most` holds that were settled or expired by `ended_by`, although their ids would be kept for longer. Those that ended first
    /// are forgotten first. Returns their number.
    pub fn forget_ended(&mut self, ended_by: Timestamp, most: usize) -> usize {
        let kept_until_us = ended_by.plus(HOLD_RETENTION).as_micros();
        let mut forgotten = 0;
        while forgotten < most && self.known.first().is_some_and(|(until_us, _)| *until_us <= kept_until_us) {
            let (_, id) = self.known.pop_first().expect("there is a first one");
            self.id_bytes -= id.len();
            // a hold that is released when it expires stays in the index until its units are refunded
            if let Some(record) = self.records.remove(&id)
                && !record.limit.releases_expired()
            {
                self.index.remove(&record, &id);
            }
            forgotten += 1;
        }
        self.shrink();
        forgotten
    }

    /// Records in the state of a concurrency limit when holds expire.
    fn update_expiries(&self, state: &mut State) {
        if let State::Concurrency(counter) = state {
            let expiry = |entry: Option<&(u64, Member)>| entry.map_or(0, |(removal_us, _)| *removal_us);
            counter.first_expiry_us = expiry(self.index.entries.first());
            counter.last_expiry_us = expiry(self.index.entries.last());
        }
    }
}

/// The live holds of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveHolds {
    /// Their number.
    pub count: u64,
    /// The sum of their units.
    pub units: u64,
    /// When the oldest of them was made; 0 without any.
    pub oldest_us: u64,
    /// Whether there are too many to read each of them. Then there may be more units and an older hold. The units of a concurrency limit are exact
    /// unless many expired holds have not been released.
    pub is_partial: bool,
}

impl LiveHolds {
    /// Adds a hold.
    #[must_use]
    pub fn and(self, at_us: u64, units: u64) -> Self {
        let oldest_us = if self.count == 0 { at_us } else { self.oldest_us.min(at_us) };
        Self { count: self.count + 1, units: self.units.saturating_add(units), oldest_us, ..self }
    }
}

/// Returns the current state of a counter as the answer to an operation that is not denied.
fn current(state: &mut State, limit: &Limit, now: Timestamp) -> Answer {
    Terms::new(*limit, Cost::ZERO).adjust(state, Operation::Charge, 1, now)
}

fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap_or(MAX_EXACT)
}
