//! A counter as it is stored, read back for people to look at. `lua/snapshot.lua` fetches it; the files of the algorithms there
//! say how it is stored.

use redis::{Cmd, FromRedisValue, Value};
use tollgate_core::{
    Algorithm, Limit, State, Timestamp,
    algorithm::{fixed_window, sliding_counter, sliding_log, token_bucket},
    limit::Rate,
    snapshot::MAX_CHARGES,
};

use super::connection::CallFailure;
use crate::store::CounterSnapshot;

const LOOK: &str = include_str!("lua/snapshot.lua");

/// How many bytes the time of a log's entry takes.
const TIME_BYTES: usize = 7;

/// Up to here, a double holds every whole number.
const MAX_DOUBLE: f64 = 9_007_199_254_740_992.0;

/// The command that reads a counter.
pub(super) fn request(key: &[u8], algorithm: Algorithm) -> Cmd {
    // one more than is shown: its total is what the first one shown is counted from
    let newest = if algorithm == Algorithm::SlidingLog { MAX_CHARGES + 1 } else { 0 };
    let mut request = redis::cmd("EVAL");
    request.arg(LOOK).arg(1).arg(key).arg(newest);
    request
}

/// What the reply shows, on the server's clock unless another is given; nothing if no script of ours can have stored it.
pub(super) fn read(
    reply: Value,
    limit: &Limit,
    now: Option<Timestamp>,
) -> Result<Option<CounterSnapshot>, CallFailure> {
    let (seconds, micros, stored, entries) = <(u64, u64, Vec<u8>, Vec<u8>)>::from_redis_value(reply)
        .map_err(|error| CallFailure::ReplyLost(error.to_string()))?;
    let server_us = seconds.saturating_mul(1_000_000).saturating_add(micros);
    let at = now.unwrap_or(Timestamp::from_micros(server_us));
    let state = if stored.is_empty() {
        Some(State::fresh(limit.algorithm()))
    } else {
        state(limit.algorithm(), &stored, &entries)
    };
    Ok(state.map(|state| CounterSnapshot { at, snapshot: state.snapshot(limit, at) }))
}

/// The state that is stored. The arithmetic of pictures relies on what is checked here.
fn state(algorithm: Algorithm, stored: &[u8], entries: &[u8]) -> Option<State> {
    let (numbers, []) = stored.as_chunks() else { return None };
    let numbers: Vec<u64> = numbers.iter().copied().map(double).collect::<Option<_>>()?;
    Some(match (algorithm, &*numbers) {
        (Algorithm::FixedWindow, &[last_us, end_us, used, window_us, _]) if window_us > 0 => {
            State::FixedWindow(fixed_window::State { last_us, end_us, used, window_us })
        }
        (Algorithm::SlidingCounter, &[last_us, start_us, current, previous, window_us, _])
            if window_us > 0 && start_us <= last_us && start_us.is_multiple_of(window_us) =>
        {
            State::SlidingCounter(sliding_counter::State { last_us, start_us, current, previous, window_us })
        }
        (Algorithm::TokenBucket, &[last_us, whole, part, units, micros, _]) if units > 0 && part < micros => {
            let level = token_bucket::Level { whole, part, rate: Rate { units, micros } };
            State::TokenBucket(token_bucket::State { last_us, level })
        }
        (Algorithm::SlidingLog, &[_, base, _, _, _, length, _, window_us, _, width]) if window_us > 0 => {
            State::SlidingLog(log(window_us, base, length, width, entries)?)
        }
        _ => return None,
    })
}

/// The newest entries of a log. Stored totals wrap round at their width; these do not.
fn log(window_us: u64, base: u64, length: u64, width: u64, entries: &[u8]) -> Option<sliding_log::State> {
    // as the script wraps them
    let (width, wrap) = match width {
        3 => (3, 1 << 24),
        7 => (7, 1 << 53),
        _ => return None,
    };
    let stored = entries.chunks_exact(TIME_BYTES + width);
    let fetched = length.min(MAX_CHARGES as u64 + 1);
    if stored.len() as u64 != fetched || !stored.remainder().is_empty() {
        return None;
    }
    let mut stored = stored.map(|slot| {
        let (time, total) = slot.split_at(TIME_BYTES);
        (little_endian(time), little_endian(total))
    });
    let has_more = length > MAX_CHARGES as u64;
    let mut before = if has_more { stored.next()?.1 } else { base };
    let mut state = sliding_log::State { window_us, ..sliding_log::State::default() };
    let (mut last_us, mut total) = (0, 0);
    for (time_us, after) in stored {
        if time_us < last_us || before >= wrap || after >= wrap {
            return None;
        }
        total += (after + wrap - before) % wrap;
        (last_us, before) = (time_us, after);
        state.entries.push_back(sliding_log::Entry { time_us, total });
    }
    Some(state)
}

/// A number that is stored as a double: whole, not negative and at most 2^53, as the scripts write them.
fn double(bytes: [u8; 8]) -> Option<u64> {
    let value = f64::from_le_bytes(bytes);
    let is_exact = value.fract() == 0.0 && (0.0..=MAX_DOUBLE).contains(&value);
    is_exact.then_some(value as u64)
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tollgate_core::{Cost, Operation, Snapshot, Terms, step::step};

    use super::*;

    const START: u64 = 1_794_765_441_799_839;

    fn limit() -> impl Strategy<Value = Limit> {
        let algorithm = prop::sample::select(Algorithm::ALL.to_vec());
        (algorithm, 1_u64..=1_000_000, 1_000_u64..=315_360_000_000_000).prop_map(
            |(algorithm, amount, micros)| {
                Limit::new(algorithm, amount, Duration::from_micros(micros)).unwrap()
            },
        )
    }

    /// Numbers as scripts write them, and others.
    fn number() -> impl Strategy<Value = f64> {
        prop_oneof![
            4 => (0_u64..20).prop_map(|number| number as f64),
            4 => (0_u64..=1 << 53).prop_map(|number| number as f64),
            4 => (START - 100_000_000..START + 100_000_000).prop_map(|number| number as f64),
            1 => any::<f64>(),
            1 => prop::sample::select(vec![0.5, -1.0, -0.0, f64::NAN, f64::INFINITY, 9_007_199_254_740_994.0]),
        ]
    }

    fn bytes(numbers: impl IntoIterator<Item = f64>) -> Vec<u8> {
        numbers.into_iter().flat_map(f64::to_le_bytes).collect()
    }

    /// The entries of a log whose totals have so many bytes.
    fn slots(entries: &[(u64, u64)], width: usize) -> Vec<u8> {
        let slot = |(time_us, total): &(u64, u64)| {
            [&time_us.to_le_bytes()[..TIME_BYTES], &total.to_le_bytes()[..width]].concat()
        };
        entries.iter().flat_map(slot).collect()
    }

    /// What is stored of a counter, and its entries.
    fn stored() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
        let any_bytes = || prop::collection::vec(any::<u8>(), 0..100);
        let entry = (START - 1_000..START + 1_000, 0_u64..1 << 25);
        let log = (
            prop::collection::vec(number(), 9),
            1_u64..2_000,
            prop::collection::vec(entry, 0..8),
            prop::sample::select(vec![3, 7]),
        );
        // each number as it should be but for one in ten
        let log = (log, any::<[u8; 3]>()).prop_map(|((mut numbers, window, entries, width), odd)| {
            for (field, value, odd) in
                [(1, 0.0, odd[0]), (5, entries.len() as f64, odd[1]), (7, window as f64, odd[2])]
            {
                if odd > 25 {
                    numbers[field] = value;
                }
            }
            numbers.push(width as f64);
            (bytes(numbers), slots(&entries, width))
        });
        let numbers = prop::collection::vec(number(), 0..12).prop_map(bytes);
        prop_oneof![3 => (numbers, any_bytes()), 3 => log, 1 => (any_bytes(), any_bytes())]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn whatever_is_stored_is_shown_or_unknown(
            limit in limit(), (stored, entries) in stored(), now in 0_u64..=1 << 53,
        ) {
            let Some(state) = state(limit.algorithm(), &stored, &entries) else { return Ok(()) };
            for now in [now, START] {
                let at = Timestamp::from_micros(now);
                if let Snapshot::TokenBucket(level) = state.snapshot(&limit, at) {
                    prop_assert!(level.part < level.rate.micros);
                }
            }
        }

        #[test]
        fn whatever_a_script_can_store_is_shown(
            limits in prop::collection::vec(limit(), 1..4),
            charges in prop::collection::vec((any::<prop::sample::Index>(), 1_u64..=1 << 52, 0_u64..50_000_000), 1..12),
        ) {
            let mut counter = State::fresh(limits[0].algorithm());
            let mut now_us = START;
            for (limit, units, pause_us) in charges {
                let limit = limit.get(&limits);
                if limit.algorithm() == counter.algorithm() {
                    let terms = Terms::new(*limit, Cost::new(units).unwrap());
                    step(&mut counter, &terms, Operation::Charge, 1, Timestamp::from_micros(now_us));
                    let (numbers, entries) = as_stored(&counter);
                    let shown = state(limit.algorithm(), &numbers, &entries).unwrap();
                    let at = Timestamp::from_micros(now_us + pause_us);
                    prop_assert_eq!(shown.snapshot(limit, at), counter.snapshot(limit, at));
                }
                now_us += pause_us;
            }
        }
    }

    /// What the scripts write for this state; its last field is when it may be forgotten.
    fn as_stored(counter: &State) -> (Vec<u8>, Vec<u8>) {
        let mut entries = Vec::new();
        let numbers = match counter {
            State::FixedWindow(counter) => {
                vec![counter.last_us, counter.end_us, counter.used, counter.window_us, 0]
            }
            State::SlidingCounter(counter) => {
                let sliding_counter::State { last_us, start_us, current, previous, window_us } = *counter;
                vec![last_us, start_us, current, previous, window_us, 0]
            }
            State::TokenBucket(counter) => {
                let token_bucket::Level { whole, part, rate } = counter.level;
                vec![counter.last_us, whole, part, rate.units, rate.micros, 0]
            }
            State::SlidingLog(counter) => {
                let stored: Vec<_> =
                    counter.entries.iter().map(|entry| (entry.time_us, entry.total % (1 << 53))).collect();
                entries = slots(&stored, 7);
                let length = counter.entries.len() as u64;
                vec![0, counter.base % (1 << 53), 0, 0, 0, length, 0, counter.window_us, length, 7]
            }
        };
        (bytes(numbers.into_iter().map(|number| number as f64)), entries)
    }
}
