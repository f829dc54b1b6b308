//! The script: its text, composed from one file per algorithm, and the bytes that go in and come out.
//!
//! `lua/prelude.lua` describes the format; this module is its other half. Everything is packed: turning
//! numbers into text and back costs Redis more than the decision.

use std::{hash::BuildHasher, ops::Range, sync::LazyLock, time::Duration};

use hashbrown::HashTable;
use tokio::time::Instant;
use tollgate_core::{
    Algorithm, Answer, Limit, Operation, Retry, State, Terms, Timestamp,
    algorithm::token_bucket::{self, Level},
    step::{Admission, Mode},
};

use super::keys::write_redis_key;
use crate::{
    check::Check,
    hashing::RandomKeyedHash,
    store::{Decided, StoreError},
};

/// The most tiers, and so the most distinct keys, of one call: it bounds how long others on that Redis wait,
/// and stays far below what Lua can unpack.
pub const MAX_BATCH: usize = 1024;

pub(super) const SOURCE: &str = concat!(
    include_str!("lua/prelude.lua"),
    include_str!("lua/fast_bucket.lua"),
    include_str!("lua/fast/state.lua"),
    include_str!("lua/fast/fixed_window.lua"),
    include_str!("lua/fast/sliding_counter.lua"),
    include_str!("lua/fast/token_bucket.lua"),
    include_str!("lua/fast/sliding_log.lua"),
    include_str!("lua/fast/checks.lua"),
    include_str!("lua/arithmetic.lua"),
    include_str!("lua/fixed_window.lua"),
    include_str!("lua/sliding_counter.lua"),
    include_str!("lua/token_bucket.lua"),
    include_str!("lua/sliding_log.lua"),
    include_str!("lua/general.lua"),
);

/// The SHA-1 by which Redis knows the script.
pub(super) static DIGEST: LazyLock<String> =
    LazyLock::new(|| redis::Script::new(SOURCE).get_hash().to_owned());

const SHADOW: u8 = 1;
const OVERDRAFT: u8 = 2;
const NONE: f64 = -1.0;
const STATUS_DECIDED: u8 = 0;
const STATUS_LATE: u8 = 1;
const STATUS_MISROUTED: u8 = 2;
const ANSWER_BYTES: usize = 40;
const NUMBER_BYTES: usize = 8;
/// The status and the time before the answers.
const HEADER_BYTES: usize = 1 + NUMBER_BYTES;
/// A bucket whose parts stay below this is calculated in plain doubles.
const SMALL: u128 = 1 << 52;

/// One call, encoded.
pub(super) struct Call {
    keys: Keys,
    arguments: [Vec<u8>; 3],
    /// In which order the checks are sent: those that are plain come first, and those of one limit together.
    order: Vec<usize>,
    by: Option<Instant>,
    slots: Slots,
}

/// Whether the counters of a call share one Cluster slot.
#[derive(Clone, Copy)]
enum Slots {
    One,
    /// Several slots of one node. Redis accepts only keys of one slot in `KEYS`, so the others are arguments.
    Several,
}

/// What is injected into a call.
#[derive(Clone, Copy, Default)]
pub(super) struct CallTimes {
    pub(super) now: Option<Timestamp>,
    pub(super) deadline: Option<Timestamp>,
    /// Until when the call is of use, on this process's clock.
    pub(super) by: Option<Instant>,
}

/// Where a tier's key and its limit stand in the call.
#[derive(Clone, Copy)]
struct Place {
    key: usize,
    limit: usize,
}

pub(super) fn encode(prefix: &str, checks: &[Check], times: CallTimes) -> Result<Call, StoreError> {
    let tiers: usize = checks.iter().map(|check| check.tiers().len()).sum();
    if tiers > MAX_BATCH {
        return Err(StoreError::TooLarge { tiers, max: MAX_BATCH });
    }
    // two passes, so that the keys of logs come last
    let mut keys = Keys::default();
    let mut limits: Vec<Limit> = Vec::new();
    let mut places = vec![Place { key: 0, limit: 0 }; tiers];
    let mut plain_keys = 0;
    for of_logs in [false, true] {
        for (tier, place) in checks.iter().flat_map(Check::tiers).zip(&mut places) {
            let algorithm = tier.terms.limit.algorithm();
            if (algorithm == Algorithm::SlidingLog) == of_logs {
                let key = keys.place_of(|name| write_redis_key(name, prefix, &tier.key, algorithm));
                *place = Place { key, limit: place_of_limit(tier.terms.limit, &mut limits) };
            }
        }
        if !of_logs {
            plain_keys = keys.len();
        }
    }

    let mut header = Vec::with_capacity(18);
    push_moment(&mut header, times.now);
    push_moment(&mut header, times.deadline);
    push_index(&mut header, plain_keys);

    let mut limit_table = Vec::with_capacity(limits.len() * 49);
    for limit in &limits {
        push_limit(&mut limit_table, limit);
    }

    let mut planned = Vec::with_capacity(checks.len());
    let mut rest = &*places;
    for (index, check) in checks.iter().enumerate() {
        let (own, others) = rest.split_at(check.tiers().len());
        rest = others;
        planned.push(PlannedCheck {
            index,
            check,
            places: own,
            is_fast_bucket: is_fast_bucket(check, own, &keys),
        });
    }
    // what is plain shares no key with anything, so that its place does not matter
    planned.sort_by_key(|planned| if planned.is_fast_bucket { planned.places[0].limit } else { usize::MAX });

    let mut plan = Vec::with_capacity(32 + checks.len() * 4 + tiers * 2);
    for group in planned.chunk_by(PlannedCheck::is_like) {
        push_group(&mut plan, group);
    }
    let order = planned.iter().map(|planned| planned.index).collect();
    Ok(Call { keys, arguments: [header, limit_table, plan], order, by: times.by, slots: Slots::One })
}

/// A check and where its keys and limits stand.
struct PlannedCheck<'a> {
    index: usize,
    check: &'a Check,
    places: &'a [Place],
    is_fast_bucket: bool,
}

impl PlannedCheck<'_> {
    /// Whether both can be told in one group.
    fn is_like(&self, other: &Self) -> bool {
        let (own, others) = (self.check.tiers(), other.check.tiers());
        self.is_fast_bucket == other.is_fast_bucket
            && self.check.operation() == other.check.operation()
            && own.len() == others.len()
            && own.iter().zip(others).all(|(own, other)| own.terms == other.terms)
    }
}

/// A check of one small bucket alone, which no other check of the call has: `lua/fast_bucket.lua` is for these.
fn is_fast_bucket(check: &Check, places: &[Place], keys: &Keys) -> bool {
    let ([tier], [place]) = (check.tiers(), places) else { return false };
    let Terms { limit, mode, admission, .. } = tier.terms;
    check.operation() == Operation::Check
        && limit.algorithm() == Algorithm::TokenBucket
        && mode == Mode::Enforced
        && admission == Admission::InFull
        && u128::from(limit.capacity()) * u128::from(limit.rate().micros) < SMALL
        && keys.uses[place.key] == 1
}

fn push_group(plan: &mut Vec<u8>, group: &[PlannedCheck<'_>]) {
    let [first, ..] = group else { return };
    let operation = first.check.operation();
    plan.extend([operation_code(operation), u8::from(first.is_fast_bucket)]);
    plan.push(u8::try_from(first.places.len()).expect("a check has at most MAX_TIERS tiers"));
    push_index(plan, group.len());
    push_moment(plan, if let Operation::Refund { at } = operation { at } else { None });
    for (tier, place) in first.check.tiers().iter().zip(first.places) {
        let shadow = if tier.terms.mode == Mode::Shadow { SHADOW } else { 0 };
        let overdraft = if tier.terms.admission == Admission::Overdraft { OVERDRAFT } else { 0 };
        plan.push(shadow + overdraft);
        push_index(plan, place.limit + 1);
        push_number(plan, tier.terms.cost.units());
    }
    for planned in group {
        plan.extend(planned.check.count().to_le_bytes());
        for place in planned.places {
            push_index(plan, place.key + 1);
        }
    }
}

impl Call {
    /// Until when it is of use, on this process's clock.
    pub(super) fn by(&self) -> Option<Instant> {
        self.by
    }

    /// Returns the same call for counters on several slots of one node.
    pub(super) fn over_several_slots(self) -> Self {
        Self { slots: Slots::Several, ..self }
    }

    /// The arguments of `EVALSHA` or `EVAL` after the script, with another deadline if there is one.
    pub(super) fn write_to(&self, request: &mut redis::Cmd, deadline: Option<Timestamp>) {
        let declared = match self.slots {
            Slots::One => self.keys.len(),
            Slots::Several => 1,
        };
        request.arg(declared);
        for name in self.keys.names().take(declared) {
            request.arg(name);
        }
        let [header, limits, plan] = &self.arguments;
        match deadline {
            Some(_) => {
                let mut dated = header[..NUMBER_BYTES].to_vec();
                push_moment(&mut dated, deadline);
                dated.extend(&header[2 * NUMBER_BYTES..]);
                request.arg(dated);
            }
            None => {
                request.arg(header);
            }
        }
        request.arg(limits).arg(plan);
        for name in self.keys.names().skip(declared) {
            request.arg(name);
        }
    }
}

/// The distinct keys of a batch, and how many tiers each has.
#[derive(Default)]
struct Keys {
    text: Vec<u8>,
    ranges: Vec<Range<usize>>,
    uses: Vec<u32>,
    places: HashTable<usize>,
    hasher: RandomKeyedHash,
}

impl Keys {
    fn len(&self) -> usize {
        self.ranges.len()
    }

    fn names(&self) -> impl Iterator<Item = &[u8]> {
        self.ranges.iter().map(|range| &self.text[range.clone()])
    }

    fn place_of(&mut self, write_name: impl FnOnce(&mut Vec<u8>)) -> usize {
        let start = self.text.len();
        write_name(&mut self.text);
        let (text, ranges, hasher) = (&self.text, &self.ranges, &self.hasher);
        let (name, name_at) = (&text[start..], |&place: &usize| &text[ranges[place].clone()]);
        let place = *self
            .places
            .entry(hasher.hash_one(name), |at| name_at(at) == name, |at| hasher.hash_one(name_at(at)))
            .or_insert(ranges.len())
            .get();
        if place == self.ranges.len() {
            self.ranges.push(start..self.text.len());
            self.uses.push(1);
        } else {
            self.text.truncate(start);
            self.uses[place] += 1;
        }
        place
    }
}

fn place_of_limit(limit: Limit, limits: &mut Vec<Limit>) -> usize {
    limits.iter().position(|other| *other == limit).unwrap_or_else(|| {
        limits.push(limit);
        limits.len() - 1
    })
}

/// What a reply says about itself: whether the call came in time, and when it ran.
#[derive(Clone, Copy)]
pub(super) struct ReplyHeader {
    pub(super) is_late: bool,
    pub(super) at: Timestamp,
}

/// `None` when the reply is malformed.
pub(super) fn read_header(reply: &[u8]) -> Option<ReplyHeader> {
    let (status, rest) = reply.split_first()?;
    let at = Timestamp::from_micros(whole(f64::from_le_bytes(*rest.first_chunk()?)));
    Some(ReplyHeader { is_late: *status == STATUS_LATE, at })
}

/// Whether nothing ran because the node does not have all counters of a call over several slots.
pub(super) fn is_misrouted(reply: &[u8]) -> bool {
    reply.first() == Some(&STATUS_MISROUTED)
}

pub(super) fn decode(reply: &[u8], call: &Call, checks: &[Check]) -> Result<Decided, StoreError> {
    decoded(reply, call, checks).unwrap_or_else(|| {
        Err(StoreError::Ambiguous(format!("the script's reply of {} bytes is malformed", reply.len())))
    })
}

/// `None` when the reply is malformed.
fn decoded(reply: &[u8], call: &Call, checks: &[Check]) -> Option<Result<Decided, StoreError>> {
    let ReplyHeader { is_late, at } = read_header(reply)?;
    if is_late {
        return Some(Err(StoreError::Late(at)));
    }
    if reply.first() != Some(&STATUS_DECIDED) {
        return None;
    }
    let rest = &reply[HEADER_BYTES..];
    let tiers: usize = checks.iter().map(|check| check.tiers().len()).sum();
    let (numbers, records) = rest.split_at_checked((checks.len() + tiers) * NUMBER_BYTES)?;
    let mut numbers = numbers.as_chunks::<NUMBER_BYTES>().0.iter().map(|number| f64::from_le_bytes(*number));
    let (records, []) = records.as_chunks::<ANSWER_BYTES>() else { return None };
    let mut records = records.iter();
    let mut answers = vec![Vec::new(); checks.len()];
    for &index in &call.order {
        let check = &checks[index];
        let passed = numbers.next()?;
        let levels = numbers.by_ref().take(check.tiers().len());
        answers[index] = if passed < 0.0 {
            levels.for_each(drop);
            check.tiers().iter().map(|_| records.next().map(decode_answer)).collect::<Option<_>>()?
        } else {
            let tiers = check.tiers().iter().zip(levels);
            tiers.map(|(tier, level)| answer(check, &tier.terms, whole(level), whole(passed), at)).collect()
        };
    }
    records.next().is_none().then_some(Ok(Decided { at, answers }))
}

/// What a tier says that held so much when `passed` requests passed all tiers: the core says what that means.
fn answer(check: &Check, terms: &Terms, level: u64, passed: u64, at: Timestamp) -> Answer {
    let mut state = holding(level, &terms.limit, at);
    let passes = terms.passes(&state, check.count(), at);
    let granted = match check.operation() {
        Operation::Check => u32::try_from(passed).unwrap_or(u32::MAX),
        _ => 0,
    };
    terms.settle(&mut state, passes, granted, check.count(), at)
}

/// A counter that holds so much `at` this time. When it came to hold that matters only for a bucket, and is part of
/// its level: the script answers this way for others only when they were charged now.
fn holding(level: u64, limit: &Limit, at: Timestamp) -> State {
    if limit.algorithm() == Algorithm::TokenBucket {
        let rate = limit.rate();
        let level = Level { whole: level / rate.micros, part: level % rate.micros, rate };
        return State::TokenBucket(token_bucket::State { last_us: at.as_micros(), level });
    }
    let mut state = State::fresh(limit.algorithm());
    if level > 0 {
        state.charge(limit, at, level);
    }
    state
}

fn decode_answer(record: &[u8; ANSWER_BYTES]) -> Answer {
    let count = |from: usize| u32::from_le_bytes(array(&record[from..from + 4]));
    let number = |from: usize| f64::from_le_bytes(array(&record[from..from + 8]));
    let retry = number(16);
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
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the slice has the length that was asked for")
}

fn operation_code(operation: Operation) -> u8 {
    match operation {
        Operation::Check => 0,
        Operation::Peek => 1,
        Operation::Charge => 2,
        Operation::Refund { .. } => 3,
    }
}

fn algorithm_code(algorithm: Algorithm) -> u8 {
    match algorithm {
        Algorithm::FixedWindow => 1,
        Algorithm::SlidingCounter => 2,
        Algorithm::TokenBucket => 3,
        Algorithm::SlidingLog => 4,
    }
}

fn push_limit(bytes: &mut Vec<u8>, limit: &Limit) {
    bytes.push(algorithm_code(limit.algorithm()));
    let rate = limit.rate();
    let numbers =
        [limit.amount(), limit.window_us(), limit.capacity(), limit.phase_us(), rate.units, rate.micros];
    for number in numbers {
        push_number(bytes, number);
    }
}

fn push_moment(bytes: &mut Vec<u8>, moment: Option<Timestamp>) {
    bytes.extend(moment.map_or(NONE, |moment| exact(moment.as_micros())).to_le_bytes());
}

fn push_number(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(exact(number).to_le_bytes());
}

fn push_index(bytes: &mut Vec<u8>, index: usize) {
    bytes.extend(u16::try_from(index).expect("a batch has at most MAX_BATCH places").to_le_bytes());
}

/// A whole number below 2^53 as the double that Lua knows.
fn exact(number: u64) -> f64 {
    number as f64
}

/// A whole number below 2^53 that Lua sent.
fn whole(number: f64) -> u64 {
    number as u64
}
