//! The script: its text, composed from one file per algorithm, and the bytes that go in and come out.
//!
//! `lua/head.lua` describes the format; this module is its other half. Everything is packed: turning
//! numbers into text and back costs Redis more than the decision.

use std::{
    hash::{BuildHasher, RandomState},
    sync::LazyLock,
    time::Duration,
};

use hashbrown::HashTable;
use tollgate_core::{
    Algorithm, Answer, Limit, Operation, Retry, Timestamp,
    step::{Admission, Mode},
};

use super::keys::redis_key;
use crate::{
    check::Check,
    store::{Decided, StoreError},
};

/// The most tiers, and the most distinct keys, of one call: it bounds how long others on that Redis wait,
/// and stays far below what Lua can unpack.
pub const MAX_BATCH: usize = 1024;

pub(super) const SOURCE: &str = concat!(
    include_str!("lua/head.lua"),
    include_str!("lua/straight.lua"),
    include_str!("lua/arithmetic.lua"),
    include_str!("lua/fixed_window.lua"),
    include_str!("lua/sliding_counter.lua"),
    include_str!("lua/token_bucket.lua"),
    include_str!("lua/sliding_log.lua"),
    include_str!("lua/main.lua"),
);

/// The SHA-1 by which Redis knows the script.
pub(super) static DIGEST: LazyLock<String> =
    LazyLock::new(|| redis::Script::new(SOURCE).get_hash().to_owned());

const SHADOW: u8 = 1;
const OVERDRAFT: u8 = 2;
const MORE: u8 = 4;
const ALONE: u8 = 8;
const NONE: f64 = -1.0;
const STATUS_DECIDED: u8 = 0;
const ANSWER_BYTES: usize = 40;

/// One call, encoded.
pub(super) struct Call {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) arguments: [Vec<u8>; 3],
}

/// What is injected into a call.
#[derive(Clone, Copy, Default)]
pub(super) struct Moments {
    pub(super) now: Option<Timestamp>,
    pub(super) deadline: Option<Timestamp>,
}

pub(super) fn encode(prefix: &str, checks: &[Check], moments: Moments) -> Result<Call, StoreError> {
    let mut plain = Keys::default();
    let mut logs = Keys::default();
    let mut limits: Vec<Limit> = Vec::new();
    let mut places = Vec::new();
    for tier in checks.iter().flat_map(Check::tiers) {
        let algorithm = tier.terms.limit.algorithm();
        let keys = if algorithm == Algorithm::SlidingLog { &mut logs } else { &mut plain };
        let key = keys.place_of(redis_key(prefix, &tier.key, algorithm));
        places.push((key, place_of_limit(tier.terms.limit, &mut limits)));
    }
    let (tier_count, key_count) = (places.len(), plain.names.len() + logs.names.len());
    if tier_count > MAX_BATCH || key_count > MAX_BATCH {
        return Err(StoreError::TooLarge { tiers: tier_count, keys: key_count, max: MAX_BATCH });
    }

    let mut header = Vec::with_capacity(18);
    push_moment(&mut header, moments.now);
    push_moment(&mut header, moments.deadline);
    push_index(&mut header, plain.names.len());

    let mut limit_table = Vec::with_capacity(limits.len() * 49);
    for limit in &limits {
        push_limit(&mut limit_table, limit);
    }

    let mut plan = Vec::with_capacity(tier_count * 18);
    let mut places = places.into_iter();
    for check in checks {
        let tier_count = check.tiers().len();
        for (index, tier) in check.tiers().iter().enumerate() {
            let (key, limit) = places.next().expect("every tier has been given its place");
            let (keys, offset) = match tier.terms.limit.algorithm() {
                Algorithm::SlidingLog => (&logs, plain.names.len()),
                _ => (&plain, 0),
            };
            let flags = [
                (tier.terms.mode == Mode::Shadow, SHADOW),
                (tier.terms.admission == Admission::Overdraft, OVERDRAFT),
                (index + 1 < tier_count, MORE),
                (tier_count == 1 && keys.uses[key] == 1, ALONE),
            ];
            let flags = flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, flag)| flag).sum();
            plan.extend([operation_code(check.operation()), flags]);
            plan.extend(check.count().to_le_bytes());
            push_index(&mut plan, offset + key + 1);
            push_index(&mut plan, limit + 1);
            push_number(&mut plan, tier.terms.cost.units());
            if let Operation::Refund { at } = check.operation() {
                push_moment(&mut plan, at);
            }
        }
    }

    let mut keys = plain.names;
    keys.append(&mut logs.names);
    Ok(Call { keys, arguments: [header, limit_table, plan] })
}

/// The distinct keys of a batch, and how many tiers each has.
#[derive(Default)]
struct Keys {
    names: Vec<Vec<u8>>,
    uses: Vec<u32>,
    places: HashTable<usize>,
    hasher: RandomState,
}

impl Keys {
    fn place_of(&mut self, name: Vec<u8>) -> usize {
        let (names, hasher) = (&self.names, &self.hasher);
        let hash = hasher.hash_one(&name);
        let place = *self
            .places
            .entry(hash, |&place| names[place] == name, |&place| hasher.hash_one(&names[place]))
            .or_insert(names.len())
            .get();
        if place == self.names.len() {
            self.names.push(name);
            self.uses.push(0);
        }
        self.uses[place] += 1;
        place
    }
}

fn place_of_limit(limit: Limit, limits: &mut Vec<Limit>) -> usize {
    limits.iter().position(|other| *other == limit).unwrap_or_else(|| {
        limits.push(limit);
        limits.len() - 1
    })
}

pub(super) fn decode(reply: &[u8], checks: &[Check]) -> Result<Decided, StoreError> {
    let malformed =
        || StoreError::Ambiguous(format!("the script's reply of {} bytes is malformed", reply.len()));
    let (status, rest) = reply.split_first().ok_or_else(malformed)?;
    let (at, rest) = rest.split_first_chunk().ok_or_else(malformed)?;
    let at = Timestamp::from_micros(whole(f64::from_le_bytes(*at)));
    if *status != STATUS_DECIDED {
        return Err(StoreError::Late(at));
    }
    let tiers: usize = checks.iter().map(|check| check.tiers().len()).sum();
    let (records, []) = rest.as_chunks::<ANSWER_BYTES>() else {
        return Err(malformed());
    };
    if records.len() != tiers {
        return Err(malformed());
    }
    let mut answers = records.iter().map(decode_answer);
    let answers = checks.iter().map(|check| answers.by_ref().take(check.tiers().len()).collect()).collect();
    Ok(Decided { at, answers })
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
