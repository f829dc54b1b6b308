//! A counter as it is stored, read back for people to look at. `lua/look.lua` fetches it; the files of the algorithms there
//! say how it is stored.

use redis::{Cmd, FromRedisValue, Value};
use tollgate_core::{
    Algorithm, Limit, State, Timestamp,
    algorithm::{fixed_window, sliding_counter, sliding_log, token_bucket},
    limit::Rate,
    picture::MAX_CHARGES,
};

use super::link::Failure;
use crate::store::Look;

const LOOK: &str = include_str!("lua/look.lua");

/// How many bytes the time of a log's entry takes.
const TIME_BYTES: usize = 7;

/// The command that reads a counter.
pub(super) fn request(key: &[u8], algorithm: Algorithm) -> Cmd {
    // one more than is shown: its total is what the first one shown is counted from
    let newest = if algorithm == Algorithm::SlidingLog { MAX_CHARGES + 1 } else { 0 };
    let mut request = redis::cmd("EVAL");
    request.arg(LOOK).arg(1).arg(key).arg(newest);
    request
}

/// What the reply shows, on the server's clock unless another is given.
pub(super) fn read(reply: Value, limit: &Limit, now: Option<Timestamp>) -> Result<Look, Failure> {
    let (seconds, micros, stored, entries) = <(u64, u64, Vec<u8>, Vec<u8>)>::from_redis_value(reply)
        .map_err(|error| Failure::Lost(error.to_string()))?;
    let at = now.unwrap_or(Timestamp::from_micros(seconds * 1_000_000 + micros));
    let state = if stored.is_empty() {
        State::fresh(limit.algorithm())
    } else {
        state(limit.algorithm(), &stored, &entries)
            .ok_or_else(|| Failure::Lost("the counter is not stored as it should be".to_owned()))?
    };
    Ok(Look { at, picture: state.picture(limit, at) })
}

fn state(algorithm: Algorithm, stored: &[u8], entries: &[u8]) -> Option<State> {
    let numbers: Vec<u64> = stored.chunks_exact(8).map(double).collect();
    Some(match (algorithm, &*numbers) {
        (Algorithm::FixedWindow, &[last_us, end_us, used, window_us, _]) => {
            State::FixedWindow(fixed_window::State { last_us, end_us, used, window_us })
        }
        (Algorithm::SlidingCounter, &[last_us, start_us, current, previous, window_us, _]) => {
            State::SlidingCounter(sliding_counter::State { last_us, start_us, current, previous, window_us })
        }
        (Algorithm::TokenBucket, &[last_us, whole, part, units, micros, _]) => {
            let level = token_bucket::Level { whole, part, rate: Rate { units, micros } };
            State::TokenBucket(token_bucket::State { last_us, level })
        }
        (Algorithm::SlidingLog, &[_, base, _, _, _, length, _, window_us, _, width]) => {
            State::SlidingLog(log(window_us, base, length, width, entries)?)
        }
        _ => return None,
    })
}

/// The newest entries of a log. Stored totals wrap round at their width; these do not.
fn log(window_us: u64, base: u64, length: u64, width: u64, entries: &[u8]) -> Option<sliding_log::State> {
    let width = usize::try_from(width).ok().filter(|width| matches!(width, 3 | 7))?;
    // as the script wraps them
    let wrap = if width == 3 { 1 << 24 } else { 1 << 53 };
    let mut stored = entries.chunks_exact(TIME_BYTES + width).map(|slot| {
        let (time, total) = slot.split_at(TIME_BYTES);
        (little_endian(time), little_endian(total))
    });
    let has_more = length > MAX_CHARGES as u64;
    let mut before = if has_more { stored.next()?.1 } else { base };
    let mut state = sliding_log::State { window_us, ..sliding_log::State::default() };
    let mut total = 0;
    for (time_us, after) in stored {
        total += (after + wrap - before) % wrap;
        before = after;
        state.entries.push_back(sliding_log::Entry { time_us, total });
    }
    Some(state)
}

/// A whole number that is stored as a double.
fn double(bytes: &[u8]) -> u64 {
    let value = f64::from_le_bytes(bytes.try_into().expect("a chunk has eight bytes"));
    // whole, not negative and below 2^53: as the scripts write them
    value as u64
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
