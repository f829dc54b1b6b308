//! The script: its text, composed from one file per algorithm, and the bytes that go in and come out.
//!
//! `lua/head.lua` describes the format; this module is its other half. Everything is packed: turning
//! numbers into text and back costs Redis more than the decision.

use std::{sync::LazyLock, time::Duration};

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
const NEWEST: f64 = -1.0;
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
    let tiers = || checks.iter().flat_map(Check::tiers);
    let mut plain: Vec<Vec<u8>> = Vec::new();
    let mut logs: Vec<Vec<u8>> = Vec::new();
    let mut limits: Vec<Limit> = Vec::new();
    let mut places = Vec::new();
    for tier in tiers() {
        let algorithm = tier.terms.limit.algorithm();
        let key = redis_key(prefix, &tier.key, algorithm);
        let is_log = algorithm == Algorithm::SlidingLog;
        let place = place_of(key, if is_log { &mut logs } else { &mut plain });
        places.push((is_log, place, place_of(tier.terms.limit, &mut limits)));
    }
    let (tier_count, key_count) = (places.len(), plain.len() + logs.len());
    if tier_count > MAX_BATCH || key_count > MAX_BATCH {
        return Err(StoreError::TooLarge { tiers: tier_count, keys: key_count, max: MAX_BATCH });
    }

    let mut header = Vec::with_capacity(18);
    push_moment(&mut header, moments.now);
    push_moment(&mut header, moments.deadline);
    push_index(&mut header, plain.len());

    let mut limit_table = Vec::with_capacity(limits.len() * 49);
    for limit in &limits {
        push_limit(&mut limit_table, limit);
    }

    let mut plan = Vec::with_capacity(tier_count * 18);
    let mut places = places.into_iter();
    for check in checks {
        for (index, tier) in check.tiers().iter().enumerate() {
            let (is_log, key, limit) = places.next().expect("every tier has been given its place");
            let mut flags = 0;
            if tier.terms.mode == Mode::Shadow {
                flags |= SHADOW;
            }
            if tier.terms.admission == Admission::Overdraft {
                flags |= OVERDRAFT;
            }
            if index + 1 < check.tiers().len() {
                flags |= MORE;
            }
            plan.extend([operation_code(check.operation()), flags]);
            plan.extend(check.count().to_le_bytes());
            push_index(&mut plan, if is_log { plain.len() + key } else { key } + 1);
            push_index(&mut plan, limit + 1);
            push_number(&mut plan, tier.terms.cost.units());
            if let Operation::Refund { at } = check.operation() {
                let at = at.map_or(NEWEST, |at| exact(at.as_micros()));
                plan.extend(at.to_le_bytes());
            }
        }
    }

    plain.append(&mut logs);
    Ok(Call { keys: plain, arguments: [header, limit_table, plan] })
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

fn place_of<T: PartialEq>(item: T, items: &mut Vec<T>) -> usize {
    items.iter().position(|other| *other == item).unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    })
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
    push_number(bytes, moment.map_or(0, Timestamp::as_micros));
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
