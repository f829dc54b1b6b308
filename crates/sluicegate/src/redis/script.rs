//! The script: its source, assembled from `lua/`, and the encoding of its arguments and reply.
//!
//! `lua/prelude.lua` documents the format. All numbers are packed: converting them to text and back would cost Redis more than the
//! decision.

use std::{hash::BuildHasher, ops::Range, sync::LazyLock, time::Duration};

use hashbrown::HashTable;
use sluicegate_core::{
    Algorithm, Answer, Calendar, HoldAnswer, HoldOutcome, Lease, Limit, Operation, Retry, State, Terms,
    Timestamp,
    step::{Admission, Mode},
};
use tokio::time::Instant;

use super::keys::{write_hold_key, write_holds_key, write_lease_key, write_redis_key};
use crate::{
    check::{Check, HoldCall, HoldOperation, LeaseCall},
    hashing::RandomKeyedHash,
    store::{CheckAnswer, StoreError},
};

/// The largest number of tiers, and therefore of distinct keys, per call. It bounds how long a call blocks Redis, and
/// is far below the number of values that Lua can unpack.
pub const MAX_BATCH: usize = 1024;

pub(super) const SOURCE: &str = concat!(
    include_str!("lua/prelude.lua"),
    include_str!("lua/fast_bucket.lua"),
    include_str!("lua/fast/state.lua"),
    include_str!("lua/fast/fixed_window.lua"),
    include_str!("lua/fast/sliding_counter.lua"),
    include_str!("lua/fast/token_bucket.lua"),
    include_str!("lua/fast/sliding_log.lua"),
    include_str!("lua/lease.lua"),
    include_str!("lua/hold_groups.lua"),
    include_str!("lua/fast/hold.lua"),
    include_str!("lua/fast/checks.lua"),
    include_str!("lua/arithmetic.lua"),
    include_str!("lua/fixed_window.lua"),
    include_str!("lua/sliding_counter.lua"),
    include_str!("lua/token_bucket.lua"),
    include_str!("lua/sliding_log.lua"),
    include_str!("lua/concurrency.lua"),
    include_str!("lua/general.lua"),
    include_str!("lua/hold.lua"),
    include_str!("lua/run.lua"),
);

/// The SHA-1 digest of the script, for `EVALSHA`.
pub(super) static DIGEST: LazyLock<String> =
    LazyLock::new(|| redis::Script::new(SOURCE).get_hash().to_owned());

const SHADOW: u8 = 1;
const OVERDRAFT: u8 = 2;
const KEEP_ESTIMATE: u8 = 4;
const RELEASE_EXPIRED: u8 = 8;
const NONE: f64 = -1.0;
const STATUS_DECIDED: u8 = 0;
const STATUS_LATE: u8 = 1;
const STATUS_MISROUTED: u8 = 2;
const STATUS_NO_PERIOD: u8 = 3;
/// In the place of an algorithm: a fixed window that follows a calendar.
const CALENDAR_WINDOW: u8 = 5;
/// In the place of a retry time: the stored state of the tier cannot be read.
const UNREADABLE: f64 = -2.0;
const ANSWER_BYTES: usize = 48;
/// The result of a hold operation, after the answer.
const HOLD_BYTES: usize = 29;
const NUMBER_BYTES: usize = 8;
/// Status and time, before the answers.
const HEADER_BYTES: usize = 1 + NUMBER_BYTES;
/// How long the record of a lease counts units after the process stops to spend them: the time for which the process can return the rest.
const RETURN_TIME: Duration = Duration::from_secs(1);
/// Algorithm and six numbers.
const LIMIT_BYTES: usize = 1 + 6 * NUMBER_BYTES;
/// A bucket whose parts stay below this takes the fast bucket path of the script.
const MAX_FAST: u128 = 1 << 52;

/// An encoded call.
pub(super) struct Call {
    keys: Keys,
    /// The key and the limit of each tier, in the order of the checks.
    tiers: Vec<TierIndexes>,
    arguments: [Vec<u8>; 3],
    /// The limits that follow a calendar, by their position in the table of limits.
    calendars: Vec<(usize, &'static Calendar)>,
    /// The order in which the checks are sent: those of the fast bucket path first, grouped by limit.
    order: Vec<usize>,
    process_deadline: Option<Instant>,
    slots: Slots,
}

/// Whether the counters of a call share one Cluster slot.
#[derive(Clone, Copy)]
enum Slots {
    One,
    /// Several slots of one node. Redis accepts only keys of one slot in `KEYS`, so the other keys are arguments.
    Several,
}

/// The times of a call.
#[derive(Clone, Copy, Default)]
pub(super) struct CallTimes {
    /// The injected time, instead of the server's clock.
    pub(super) now: Option<Timestamp>,
    /// The deadline on the server's clock.
    pub(super) deadline: Option<Timestamp>,
    /// The deadline on this process's clock.
    pub(super) process_deadline: Option<Instant>,
}

/// The times that are known when a call is sent.
#[derive(Clone, Copy)]
pub(super) struct SendTimes {
    /// The deadline on the server's clock, if it replaces that of the call.
    pub(super) deadline: Option<Timestamp>,
    /// The estimated time of the server's clock, for calendars.
    pub(super) now: Timestamp,
}

/// How the script reads a counter.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KeyKind {
    String,
    Log,
    SortedSet,
}

impl KeyKind {
    fn of(algorithm: Algorithm) -> Self {
        let properties = algorithm.properties();
        match (properties.is_log, properties.has_window) {
            (true, _) => Self::Log,
            (false, true) => Self::String,
            (false, false) => Self::SortedSet,
        }
    }
}

/// The indexes of a tier's key and limit in the call.
#[derive(Clone, Copy, Default)]
struct TierIndexes {
    key: usize,
    limit: usize,
    /// The lease record, if the limit has a lease and the check uses it.
    lease: Option<usize>,
    /// The index of the counter's holds, if the check uses it and the counter is not the index.
    holds: Option<usize>,
    /// The record of the hold, if the check is about one.
    hold: Option<usize>,
}

/// The path of a group through the script.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GroupPath {
    Any = 0,
    /// Checks of one small token bucket each, which no other check of the call uses.
    FastBucket = 1,
    Leased = 2,
    Held = 3,
}

pub(super) fn encode(prefix: &str, checks: &[Check], times: CallTimes) -> Result<Call, StoreError> {
    let tiers: usize = checks.iter().map(|check| check.tiers().len()).sum();
    if tiers > MAX_BATCH {
        return Err(StoreError::TooLarge { tiers, max: MAX_BATCH });
    }
    let mut keys = Keys::default();
    let mut limits: Vec<Limit> = Vec::new();
    let mut indexes = vec![TierIndexes::default(); tiers];
    // sliding logs after other strings, and sorted sets last
    let mut counts = [0; 2];
    for kind in [KeyKind::String, KeyKind::Log, KeyKind::SortedSet] {
        let tiers = checks.iter().flat_map(|check| check.tiers().iter().map(move |tier| (check, tier)));
        for ((check, tier), index) in tiers.zip(&mut indexes) {
            let algorithm = tier.terms.limit.algorithm();
            if KeyKind::of(algorithm) == kind {
                index.key = keys.index_of(|name| write_redis_key(name, prefix, &tier.key, algorithm));
                index.limit = index_of_limit(tier.terms.limit, &mut limits);
            }
            match kind {
                KeyKind::String if tier.terms.limit.lease().is_some() && uses_leases(check) => {
                    let lease = keys.index_of(|name| write_lease_key(name, prefix, &tier.key, algorithm));
                    index.lease = Some(lease);
                }
                KeyKind::SortedSet if check.uses_holds() && algorithm.properties().has_window => {
                    let holds = keys.index_of(|name| write_holds_key(name, prefix, &tier.key, algorithm));
                    index.holds = Some(holds);
                }
                _ => {}
            }
            if let (KeyKind::String, Some(HoldCall { id, .. })) = (kind, check.hold()) {
                let hold = keys.index_of(|name| write_hold_key(name, prefix, &tier.key, algorithm, id));
                index.hold = Some(hold);
            }
        }
        if let KeyKind::String | KeyKind::Log = kind {
            counts[kind as usize] = keys.len();
        }
    }

    let mut header = Vec::with_capacity(20);
    push_time(&mut header, times.now);
    push_time(&mut header, times.deadline);
    counts.iter().for_each(|count| push_index(&mut header, *count));

    let mut limit_table = Vec::with_capacity(limits.len() * LIMIT_BYTES);
    for limit in &limits {
        push_limit(&mut limit_table, limit);
    }
    let calendars = limits.iter().enumerate();
    let calendars = calendars.filter_map(|(index, limit)| Some((index, limit.calendar()?))).collect();

    let mut planned = Vec::with_capacity(checks.len());
    let mut rest = &*indexes;
    for (index, check) in checks.iter().enumerate() {
        let (own, others) = rest.split_at(check.tiers().len());
        rest = others;
        let path = if check.uses_holds() {
            GroupPath::Held
        } else if uses_leases(check) {
            GroupPath::Leased
        } else if is_fast_bucket(check, own, &keys) {
            GroupPath::FastBucket
        } else {
            GroupPath::Any
        };
        planned.push(PlannedCheck { index, check, indexes: own, path });
    }
    // the order of checks that share no key with other checks does not matter
    planned.sort_by_key(|planned| match planned.path {
        GroupPath::FastBucket => (0, planned.indexes[0].limit),
        GroupPath::Held if planned.indexes.iter().all(|index| keys.uses[index.key] == 1) => {
            (1, usize::from(operation_code(planned.check)))
        }
        GroupPath::Any | GroupPath::Leased | GroupPath::Held => (2, 0),
    });

    let mut plan = Vec::with_capacity(32 + checks.len() * 4 + tiers * 2);
    for group in planned.chunk_by(PlannedCheck::is_like) {
        push_group(&mut plan, group);
    }
    let order = planned.iter().map(|planned| planned.index).collect();
    Ok(Call {
        keys,
        tiers: indexes,
        arguments: [header, limit_table, plan],
        calendars,
        order,
        process_deadline: times.process_deadline,
        slots: Slots::One,
    })
}

/// A check with the indexes of its keys and limits.
struct PlannedCheck<'a> {
    index: usize,
    check: &'a Check,
    indexes: &'a [TierIndexes],
    path: GroupPath,
}

impl PlannedCheck<'_> {
    /// Returns whether both checks can be in one group.
    fn is_like(&self, other: &Self) -> bool {
        let (own, others) = (self.check.tiers(), other.check.tiers());
        let terms_of = |check: &Check| check.hold().map(|hold| hold.operation);
        self.path == other.path
            && terms_of(self.check) == terms_of(other.check)
            && self.check.operation() == other.check.operation()
            && own.len() == others.len()
            && own.iter().zip(others).all(|(own, other)| self.has_terms_like(&own.terms, &other.terms))
    }
}

impl PlannedCheck<'_> {
    /// Returns whether the terms of two tiers can be in one group. Each hold of a group has its own costs.
    fn has_terms_like(&self, own: &Terms, other: &Terms) -> bool {
        match self.path {
            GroupPath::Held => *own == Terms { cost: own.cost, ..*other },
            _ => own == other,
        }
    }
}

/// Returns whether a check draws or ends a lease, or must report leased units if it is denied.
fn uses_leases(check: &Check) -> bool {
    if check.uses_holds() {
        return false;
    }
    let has_lease = || check.tiers().iter().any(|tier| tier.terms.limit.lease().is_some());
    check.lease().is_some() || (check.operation() == Operation::Check && has_lease())
}

/// Returns whether a check takes `lua/fast_bucket.lua`: it has one small token bucket, which no other check of the call uses.
fn is_fast_bucket(check: &Check, indexes: &[TierIndexes], keys: &Keys) -> bool {
    let ([tier], [index]) = (check.tiers(), indexes) else { return false };
    let Terms { limit, mode, admission, .. } = tier.terms;
    check.operation() == Operation::Check
        && limit.algorithm() == Algorithm::TokenBucket
        && !check.uses_holds()
        && mode == Mode::Enforced
        && admission == Admission::InFull
        && u128::from(limit.capacity()) * u128::from(limit.rate().micros) < MAX_FAST
        && keys.uses[index.key] == 1
}

fn push_group(plan: &mut Vec<u8>, group: &[PlannedCheck<'_>]) {
    let [first, ..] = group else { return };
    let operation = first.check.operation();
    plan.extend([operation_code(first.check), first.path as u8]);
    plan.push(u8::try_from(first.indexes.len()).expect("a check has at most MAX_TIERS tiers"));
    push_index(plan, group.len());
    let time = match (operation, first.check.hold().map(|hold| hold.operation)) {
        (Operation::Refund { at }, _) => at,
        (_, Some(HoldOperation::Revert { until })) => Some(until),
        _ => None,
    };
    push_time(plan, time);
    if first.path == GroupPath::Held {
        let mut held = Vec::with_capacity(64 * group.len());
        push_held_group(&mut held, group);
        let length = u32::try_from(held.len()).expect("a batch has at most MAX_BATCH tiers and ids");
        plan.extend(length.to_le_bytes());
        plan.extend(held);
        return;
    }
    for (tier, index) in first.check.tiers().iter().zip(first.indexes) {
        push_terms(plan, &tier.terms, 0, index);
        push_number(plan, tier.terms.cost.units());
        if first.path == GroupPath::Leased {
            let lease = tier.terms.limit.lease();
            push_number(plan, lease.map_or(0, Lease::units));
            let counted = lease.map_or(Duration::ZERO, Lease::lifetime) + RETURN_TIME;
            push_number(plan, u64::try_from(counted.as_micros()).expect("at most MAX_LEASE_LIFETIME"));
        }
    }
    for planned in group {
        let counts = match planned.check.lease() {
            None if planned.path == GroupPath::Leased => &[planned.check.count(), 0][..],
            None => &[planned.check.count()],
            Some(LeaseCall::Draw { requests }) => &[planned.check.count(), requests],
            Some(LeaseCall::End { spent, unspent }) => &[unspent, spent],
        };
        counts.iter().for_each(|count| plan.extend(count.to_le_bytes()));
        for index in planned.indexes {
            push_index(plan, index.key + 1);
            if planned.path == GroupPath::Leased {
                push_optional_index(plan, index.lease);
            }
        }
    }
}

/// Writes the flags and the limit of a tier.
fn push_terms(plan: &mut Vec<u8>, terms: &Terms, flags: u8, index: &TierIndexes) {
    let shadow = if terms.mode == Mode::Shadow { SHADOW } else { 0 };
    let overdraft = if terms.admission == Admission::Overdraft { OVERDRAFT } else { 0 };
    plan.push(flags + shadow + overdraft);
    push_index(plan, index.limit + 1);
}

/// Writes the tiers and the checks of a group with holds.
fn push_held_group(plan: &mut Vec<u8>, group: &[PlannedCheck<'_>]) {
    let [first, ..] = group else { return };
    let operation = first.check.hold().map(|hold| hold.operation);
    let (kept, excess) = match operation {
        Some(HoldOperation::Settle { kept, max_excess }) => (kept, Some(max_excess)),
        _ => (0, None),
    };
    for (position, (tier, index)) in first.check.tiers().iter().zip(first.indexes).enumerate() {
        let limit = &tier.terms.limit;
        let keep = if kept >> position & 1 == 1 { KEEP_ESTIMATE } else { 0 };
        let release = if limit.releases_expired() { RELEASE_EXPIRED } else { 0 };
        push_terms(plan, &tier.terms, keep + release, index);
        // a settlement uses the bound that was recorded with the hold, unless it has another one
        let excess = excess.unwrap_or(Some(limit.max_excess()));
        plan.extend(excess.map_or(NONE, exact).to_le_bytes());
    }
    let ttl = match operation {
        Some(HoldOperation::Renew { ttl }) => ttl,
        other => other.and_then(HoldOperation::new_ttl).unwrap_or(Duration::ZERO),
    };
    for planned in group {
        plan.extend(planned.check.count().to_le_bytes());
        push_number(plan, u64::try_from(ttl.as_micros()).expect("at most MAX_HOLD_TTL"));
        let id = planned.check.hold().map_or("", |hold| hold.id.as_str());
        push_index(plan, id.len());
        plan.extend(id.as_bytes());
        for (tier, index) in planned.check.tiers().iter().zip(planned.indexes) {
            push_number(plan, tier.terms.cost.units());
            push_index(plan, index.key + 1);
            push_optional_index(plan, index.holds);
            push_optional_index(plan, index.hold);
        }
    }
}

impl Call {
    /// Returns the deadline on this process's clock.
    pub(super) fn process_deadline(&self) -> Option<Instant> {
        self.process_deadline
    }

    /// Returns the name of the key of a check's tier.
    fn key_of(&self, checks: &[Check], check: usize, tier: usize) -> String {
        let before: usize = checks[..check].iter().map(|check| check.tiers().len()).sum();
        let range = self.keys.ranges[self.tiers[before + tier].key].clone();
        String::from_utf8_lossy(&self.keys.text[range]).into_owned()
    }

    /// Returns the same call for counters on several slots of one node.
    pub(super) fn over_several_slots(self) -> Self {
        Self { slots: Slots::Several, ..self }
    }

    /// Returns whether a limit of the call follows a calendar, so that the call needs the server's time.
    pub(super) fn has_calendars(&self) -> bool {
        !self.calendars.is_empty()
    }

    /// Writes the arguments of `EVALSHA` or `EVAL` after the script.
    pub(super) fn write_to(&self, request: &mut redis::Cmd, times: SendTimes) {
        let declared = match self.slots {
            Slots::One => self.keys.len(),
            Slots::Several => 1,
        };
        request.arg(declared);
        for name in self.keys.names().take(declared) {
            request.arg(name);
        }
        let [header, limits, plan] = &self.arguments;
        if times.deadline.is_none() && self.calendars.is_empty() {
            request.arg(header).arg(limits);
        } else {
            let (header, limits) = self.timed_arguments(times);
            request.arg(header).arg(limits);
        }
        request.arg(plan);
        for name in self.keys.names().skip(declared) {
            request.arg(name);
        }
    }

    /// Returns the header with another deadline, if there is one, and the limits with the periods around the present.
    fn timed_arguments(&self, times: SendTimes) -> (Vec<u8>, Vec<u8>) {
        let [header, limits, _] = &self.arguments;
        let (mut header, mut limits) = (header.clone(), limits.clone());
        if let Some(deadline) = times.deadline {
            header[NUMBER_BYTES..2 * NUMBER_BYTES]
                .copy_from_slice(&exact(deadline.as_micros()).to_le_bytes());
        }
        let (mut first_us, mut past_us) = (0, u64::MAX);
        for (index, calendar) in &self.calendars {
            let edges = calendar.edges_at(times.now);
            let mut numbers = Vec::with_capacity(3 * NUMBER_BYTES);
            for edge in [edges.start_us, edges.end_us, edges.next_end_us] {
                push_number(&mut numbers, edge);
            }
            let end = (index + 1) * LIMIT_BYTES;
            limits[end - numbers.len()..end].copy_from_slice(&numbers);
            (first_us, past_us) = (edges.start_us.max(first_us), edges.next_end_us.min(past_us));
        }
        if self.has_calendars() {
            push_number(&mut header, first_us);
            push_number(&mut header, past_us);
        }
        (header, limits)
    }
}

/// The distinct keys of a batch, with the number of tiers that use each.
#[derive(Default)]
struct Keys {
    text: Vec<u8>,
    ranges: Vec<Range<usize>>,
    uses: Vec<u32>,
    indexes: HashTable<usize>,
    hasher: RandomKeyedHash,
}

impl Keys {
    fn len(&self) -> usize {
        self.ranges.len()
    }

    fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.ranges.iter().map(|range| &self.text[range.clone()])
    }

    fn index_of(&mut self, write_name: impl FnOnce(&mut Vec<u8>)) -> usize {
        let start = self.text.len();
        write_name(&mut self.text);
        let (text, ranges, hasher) = (&self.text, &self.ranges, &self.hasher);
        let (name, name_at) = (&text[start..], |&index: &usize| &text[ranges[index].clone()]);
        let index = *self
            .indexes
            .entry(hasher.hash_one(name), |at| name_at(at) == name, |at| hasher.hash_one(name_at(at)))
            .or_insert(ranges.len())
            .get();
        if index == self.ranges.len() {
            self.ranges.push(start..self.text.len());
            self.uses.push(1);
        } else {
            self.text.truncate(start);
            self.uses[index] += 1;
        }
        index
    }
}

fn index_of_limit(limit: Limit, limits: &mut Vec<Limit>) -> usize {
    limits.iter().position(|other| *other == limit).unwrap_or_else(|| {
        limits.push(limit);
        limits.len() - 1
    })
}

/// The header of a reply: whether the call ran, and when.
#[derive(Clone, Copy)]
pub(super) struct ReplyHeader {
    pub(super) is_late: bool,
    /// Whether nothing ran because the time is in none of the periods that were sent.
    pub(super) has_no_period: bool,
    pub(super) at: Timestamp,
}

/// Reads the header of a reply. Returns `None` if it is malformed.
pub(super) fn read_header(reply: &[u8]) -> Option<ReplyHeader> {
    let (status, rest) = reply.split_first()?;
    let at = Timestamp::from_micros(whole(f64::from_le_bytes(*rest.first_chunk()?)));
    let (is_late, has_no_period) = (*status == STATUS_LATE, *status == STATUS_NO_PERIOD);
    Some(ReplyHeader { is_late, has_no_period, at })
}

/// Returns whether nothing ran because the node does not have all counters of a call over several slots.
pub(super) fn is_misrouted(reply: &[u8]) -> bool {
    reply.first() == Some(&STATUS_MISROUTED)
}

/// Decodes a reply. A check with an unreadable counter gets an error; the other checks are not affected.
pub(super) fn decode(
    reply: &[u8],
    call: &Call,
    checks: &[Check],
) -> Result<Vec<Result<CheckAnswer, StoreError>>, StoreError> {
    try_decode(reply, call, checks).unwrap_or_else(|| {
        Err(StoreError::Ambiguous(format!("malformed script reply of {} bytes", reply.len())))
    })
}

/// Returns `None` if the reply is malformed.
fn try_decode(
    reply: &[u8],
    call: &Call,
    checks: &[Check],
) -> Option<Result<Vec<Result<CheckAnswer, StoreError>>, StoreError>> {
    let ReplyHeader { is_late, has_no_period, at } = read_header(reply)?;
    if is_late {
        return Some(Err(StoreError::Late(at)));
    }
    if has_no_period {
        let micros = at.as_micros();
        let reason = format!("the store's clock was set to another calendar period (store time {micros} us)");
        return Some(Err(StoreError::NotRun(reason)));
    }
    if reply.first() != Some(&STATUS_DECIDED) {
        return None;
    }
    let rest = &reply[HEADER_BYTES..];
    let tiers: usize = checks.iter().map(|check| check.tiers().len()).sum();
    let (numbers, records) = rest.split_at_checked((checks.len() + tiers) * NUMBER_BYTES)?;
    let mut numbers = numbers.as_chunks::<NUMBER_BYTES>().0.iter().map(|number| f64::from_le_bytes(*number));
    let mut records = records;
    let mut decided = vec![Ok(CheckAnswer { at, answers: Vec::new() }); checks.len()];
    for &index in &call.order {
        let check = &checks[index];
        let passed = numbers.next()?;
        let levels = numbers.by_ref().take(check.tiers().len());
        decided[index] = if passed < 0.0 {
            levels.for_each(drop);
            let mut answers = Vec::with_capacity(check.tiers().len());
            let mut unreadable = None;
            for tier in 0..check.tiers().len() {
                let (record, rest) = records.split_first_chunk::<ANSWER_BYTES>()?;
                records = rest;
                let mut answer = decode_answer(record);
                if check.uses_holds() {
                    let (result, rest) = records.split_first_chunk::<HOLD_BYTES>()?;
                    records = rest;
                    answer.hold = decode_hold(result)?;
                }
                if is_unreadable(record) {
                    unreadable = unreadable.or(Some(tier));
                }
                answers.push(answer);
            }
            match unreadable {
                Some(tier) => Err(StoreError::Unreadable { key: call.key_of(checks, index, tier) }),
                None => Ok(CheckAnswer { at, answers }),
            }
        } else {
            let tiers = check.tiers().iter().zip(levels);
            let answers = tiers
                .map(|(tier, level)| answer(check, &tier.terms, whole(level), whole(passed), at))
                .collect();
            Ok(CheckAnswer { at, answers })
        };
    }
    records.is_empty().then_some(Ok(decided))
}

/// Computes the answer of a tier from its level before the call and the number of requests that passed all tiers.
fn answer(check: &Check, terms: &Terms, level: u64, passed: u64, at: Timestamp) -> Answer {
    // the script reports levels of algorithms other than the token bucket only if they were charged now
    let mut state = State::from_level(&terms.limit, at, level);
    let granted = match check.operation() {
        Operation::Check => u32::try_from(passed).unwrap_or(u32::MAX),
        _ => 0,
    };
    // more than the requests of the check if some were charged in advance
    let count = check.count().max(granted);
    let passes = terms.passes(&state, count, at);
    terms.settle(&mut state, passes, granted, count, at)
}

/// Returns whether the stored state of a tier cannot be read.
fn is_unreadable(record: &[u8; ANSWER_BYTES]) -> bool {
    retry_number(record) == UNREADABLE
}

/// Returns the microseconds until the next request passes, or one of the constants below zero.
fn retry_number(record: &[u8; ANSWER_BYTES]) -> f64 {
    f64::from_le_bytes(array(&record[16..24]))
}

fn decode_answer(record: &[u8; ANSWER_BYTES]) -> Answer {
    let count = |from: usize| u32::from_le_bytes(array(&record[from..from + 4]));
    let number = |from: usize| f64::from_le_bytes(array(&record[from..from + 8]));
    let retry = retry_number(record);
    Answer {
        passes: count(0),
        charged: count(4),
        available: number(8) as i64,
        retry: if retry < 0.0 {
            Some(Retry::Never)
        } else {
            (retry > 0.0).then(|| Retry::After(Duration::from_micros(whole(retry))))
        },
        reset_after_us: whole(number(24)),
        spare: whole(number(32)),
        leased: whole(number(40)),
        hold: HoldAnswer::NONE,
    }
}

/// Returns the result of a hold operation; `None` if the outcome is unknown.
fn decode_hold(record: &[u8; HOLD_BYTES]) -> Option<HoldAnswer> {
    let number = |from: usize| whole(f64::from_le_bytes(array(&record[from..from + 8])));
    let outcome = match record[0] {
        0 => HoldOutcome::NotHeld,
        1 => HoldOutcome::Held,
        2 => HoldOutcome::Repeated,
        3 => HoldOutcome::Renewed,
        4 => HoldOutcome::Settled,
        5 => HoldOutcome::Already,
        6 => HoldOutcome::Late,
        7 => HoldOutcome::Unknown,
        8 => HoldOutcome::Conflict,
        9 => HoldOutcome::Full,
        _ => return None,
    };
    Some(HoldAnswer {
        outcome,
        released: u32::from_le_bytes(array(&record[1..5])),
        at: Timestamp::from_micros(number(5)),
        expires_at: Timestamp::from_micros(number(13)),
        charged: number(21),
    })
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the slice has the requested length")
}

fn operation_code(check: &Check) -> u8 {
    match (check.hold().map(|hold| hold.operation), check.operation()) {
        (Some(HoldOperation::Settle { .. }), _) => 4,
        (Some(HoldOperation::Renew { .. }), _) => 5,
        (Some(HoldOperation::Revert { .. }), _) => 6,
        (Some(HoldOperation::HoldNew { .. }), _) => 7,
        (Some(HoldOperation::Hold { .. }) | None, Operation::Check) => 0,
        (_, Operation::Peek) => 1,
        (_, Operation::Charge) => 2,
        (_, Operation::Refund { .. }) => 3,
    }
}

fn push_limit(bytes: &mut Vec<u8>, limit: &Limit) {
    let algorithm = limit.algorithm().properties().script_code;
    bytes.push(if limit.calendar().is_some() { CALENDAR_WINDOW } else { algorithm });
    let rate = limit.rate();
    let numbers =
        [limit.amount(), limit.window_us(), limit.capacity(), limit.phase_us(), rate.units, rate.micros];
    for number in numbers {
        push_number(bytes, number);
    }
}

fn push_time(bytes: &mut Vec<u8>, time: Option<Timestamp>) {
    bytes.extend(time.map_or(NONE, |time| exact(time.as_micros())).to_le_bytes());
}

fn push_number(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(exact(number).to_le_bytes());
}

fn push_index(bytes: &mut Vec<u8>, index: usize) {
    bytes.extend(u16::try_from(index).expect("a batch has at most MAX_BATCH keys").to_le_bytes());
}

/// Writes an index that may be absent.
fn push_optional_index(bytes: &mut Vec<u8>, index: Option<usize>) {
    push_index(bytes, index.map_or(0, |index| index + 1));
}

/// Returns a whole number below 2^53 as a Lua number.
fn exact(number: u64) -> f64 {
    number as f64
}

/// Returns the whole number below 2^53 of a Lua number.
fn whole(number: f64) -> u64 {
    number as u64
}
