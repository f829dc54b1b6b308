//! Reads a stored counter for display. `lua/snapshot.lua` fetches it, and the Lua file of the algorithm describes its layout.

use redis::{Cmd, FromRedisValue, ParsingError, Value};
use sluicegate_core::{
    Algorithm, Limit, Snapshot, State, Timestamp,
    algorithm::StoredState,
    hold::{HOLD_RETENTION, LiveHolds},
    snapshot::{MAX_CHARGES, Span},
};

use super::connection::CallFailure;
use crate::store::CounterSnapshot;

const SNAPSHOT: &str = include_str!("lua/snapshot.lua");
const HOLDS_SNAPSHOT: &str = include_str!("lua/holds_snapshot.lua");
/// The most live holds of a counter that are read for display. They are those that expire first.
pub(super) const MAX_SHOWN_HOLDS: usize = 1_000;
/// Bytes of a member of the index before the id.
const MEMBER_BYTES: usize = 17;

/// The largest stored number: the end of a TTL may exceed 2^53 by a clock reading.
const MAX_STORED: f64 = 18_014_398_509_481_984.0;
/// The bytes that show whether a state is readable: all of its numbers, for a log those of its header.
pub(super) const HEADER_BYTES: usize = 72;

/// Returns the command that reads a counter.
pub(super) fn request(key: &[u8], algorithm: Algorithm) -> Cmd {
    // one more than is shown: the units of the first shown entry follow from the total before it
    let newest = if algorithm.properties().is_log { MAX_CHARGES + 1 } else { 0 };
    let mut request = redis::cmd("EVAL");
    request.arg(SNAPSHOT).arg(1).arg(key).arg(newest);
    request
}

/// Decodes the reply, at the server's time unless another is given. Returns `None` if the script cannot have stored the state.
pub(super) fn read(
    reply: Value,
    limit: &Limit,
    now: Option<Timestamp>,
) -> Result<Option<CounterSnapshot>, CallFailure> {
    let StoredCounter { at, state, .. } =
        decode(reply, limit.algorithm()).map_err(|error| CallFailure::ReplyLost(error.to_string()))?;
    let at = now.unwrap_or(at);
    let snapshot = |state: State| state.snapshot(limit, at);
    let holds = LiveHolds::default();
    Ok(state.map(|state| CounterSnapshot { at, snapshot: snapshot(state), leased: 0, holds }))
}

/// Returns the command that reads the index of a counter's holds, at the server's time unless another is given.
pub(super) fn holds_request(key: &[u8], limit: &Limit, now: Option<Timestamp>) -> Cmd {
    let now = now.map_or_else(String::new, |now| now.as_micros().to_string());
    let retention = if limit.releases_expired() { 0 } else { HOLD_RETENTION.as_micros() as u64 };
    let mut request = redis::cmd("EVAL");
    request.arg(HOLDS_SNAPSHOT).arg(1).arg(key).arg(MAX_SHOWN_HOLDS).arg(now).arg(retention);
    request
}

/// The index of a counter's holds.
pub(super) struct HoldIndex {
    /// The live holds. Above [`MAX_SHOWN_HOLDS`], they are partial, except the sum of a concurrency counter.
    pub(super) live: LiveHolds,
    /// The units of a concurrency counter.
    units: u64,
    first_us: u64,
    last_us: u64,
}

impl HoldIndex {
    /// Returns the snapshot of a concurrency counter.
    pub(super) fn snapshot(&self, at: Timestamp) -> CounterSnapshot {
        let span = Span { from_us: self.first_us, until_us: self.last_us, units: self.units };
        CounterSnapshot { at, snapshot: Snapshot::Concurrency(span), leased: 0, holds: self.live }
    }
}

/// A hold in the index of its counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IndexedHold<'a> {
    /// Whether its units are refunded when it expires.
    pub(super) is_released: bool,
    pub(super) at_us: u64,
    pub(super) expires_us: u64,
    pub(super) units: u64,
    pub(super) id: &'a [u8],
}

impl<'a> IndexedHold<'a> {
    /// Reads a member and its score, the time at which it is removed from the index. Returns `None` if the script cannot have stored it.
    pub(super) fn read(member: &'a [u8], removal_us: f64) -> Option<Self> {
        let (head, id) = member.split_first_chunk::<MEMBER_BYTES>()?;
        let (is_released, numbers) = (head[0] == 1, head[1..].as_chunks().0);
        let retention = if is_released { 0 } else { HOLD_RETENTION.as_micros() as u64 };
        let expires_us = (removal_us as u64).saturating_sub(retention);
        Some(Self {
            is_released,
            at_us: whole_number(numbers[0])?,
            expires_us,
            units: whole_number(numbers[1])?,
            id,
        })
    }
}

/// Returns the units of a concurrency counter, from the score of the empty member: -1 minus the units.
pub(super) fn units_of_score(score: f64) -> u64 {
    (-1.0 - score).max(0.0) as u64
}

/// Decodes the reply to a [`holds_request`]: the time, and the index unless something else wrote the key.
pub(super) fn read_holds(
    reply: Value,
    now: Option<Timestamp>,
) -> Result<(Timestamp, Option<HoldIndex>), CallFailure> {
    type Reply = (u64, u64, String, Value, Vec<(Vec<u8>, f64)>, String, String, String);
    let (seconds, micros, units, count, members, first, last, ended) =
        Reply::from_redis_value(reply).map_err(|error| CallFailure::ReplyLost(error.to_string()))?;
    let server = Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros));
    let at = now.unwrap_or(server);
    let Value::Int(count) = count else { return Ok((at, None)) };
    let mut live = LiveHolds::default();
    for (member, removal_us) in &members {
        let Some(hold) = IndexedHold::read(member, *removal_us) else { return Ok((at, None)) };
        if hold.expires_us > at.as_micros() {
            live = live.and(hold.at_us, hold.units);
        }
    }
    let counter_units = units.parse().ok().map(units_of_score);
    if members.len() > MAX_SHOWN_HOLDS {
        let expired = members.len() as u64 - live.count;
        live.count = u64::try_from(count).unwrap_or_default().saturating_sub(expired);
        live.is_partial = true;
        // a concurrency counter includes expired holds until they are released
        if let (Some(units), Ok(ended)) = (counter_units, ended.parse::<u64>()) {
            live.units = units.saturating_sub(ended);
        }
    }
    let micros = |score: &str| score.parse::<f64>().map_or(0, |score| score as u64);
    let (first_us, last_us) = (micros(&first), micros(&last));
    Ok((at, Some(HoldIndex { live, units: counter_units.unwrap_or(0), first_us, last_us })))
}

/// Returns the units that a lease record counts at a time; 0 if the script cannot have stored it. `lua/lease.lua` describes its layout.
pub(super) fn leased_units(record: &[u8], at: Timestamp) -> u64 {
    let Some(numbers) = whole_numbers(record) else { return 0 };
    let entries = numbers.get(1..).unwrap_or_default().as_chunks().0;
    let is_live = |[expires_us, _]: &&[u64; 2]| *expires_us > at.as_micros();
    entries.iter().filter(is_live).map(|[_, units]| units).fold(0, |sum, units| sum.saturating_add(*units))
}

/// A counter as it is stored.
pub(super) struct StoredCounter {
    /// The server's time.
    pub(super) at: Timestamp,
    /// The stored bytes; for a log, those of its header. Empty if the counter does not exist.
    pub(super) bytes: Vec<u8>,
    /// Its state; `None` if the script cannot have stored it.
    pub(super) state: Option<State>,
}

/// Decodes the reply to a [`request`].
pub(super) fn decode(reply: Value, algorithm: Algorithm) -> Result<StoredCounter, ParsingError> {
    let (seconds, micros, bytes, entries) = <(u64, u64, Vec<u8>, Vec<u8>)>::from_redis_value(reply)?;
    let at = Timestamp::from_micros(seconds.saturating_mul(1_000_000).saturating_add(micros));
    let state = if bytes.is_empty() {
        Some(State::fresh(algorithm))
    } else {
        stored_state(algorithm, &bytes, &entries)
    };
    Ok(StoredCounter { at, bytes, state })
}

/// Reads a stored state. Returns `None` if the script cannot have stored it.
fn stored_state(algorithm: Algorithm, stored: &[u8], entries: &[u8]) -> Option<State> {
    State::from_stored(algorithm, &StoredState { numbers: &whole_numbers(stored)?, entries })
}

/// Returns whether the script can have stored a state with these first [`HEADER_BYTES`].
pub(super) fn is_readable(algorithm: Algorithm, stored: &[u8]) -> bool {
    whole_numbers(stored).is_some_and(|numbers| State::are_stored_numbers(algorithm, &numbers))
}

fn whole_numbers(stored: &[u8]) -> Option<Vec<u64>> {
    let (numbers, []) = stored.as_chunks() else { return None };
    numbers.iter().copied().map(whole_number).collect()
}

/// Returns the number in a stored double if it is whole, not negative and at most 2^54, as the script writes it.
fn whole_number(bytes: [u8; 8]) -> Option<u64> {
    let value = f64::from_le_bytes(bytes);
    let is_exact = value.fract() == 0.0 && (0.0..=MAX_STORED).contains(&value);
    is_exact.then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use sluicegate_core::{
        Cost, Operation, Snapshot, Terms,
        algorithm::{sliding_counter, token_bucket},
        step::step,
    };

    use super::*;

    /// Bytes of the time of a log entry.
    const TIME_BYTES: usize = 7;
    /// Bytes of its running total.
    const TOTAL_BYTES: usize = 3;
    const START: u64 = 1_794_765_441_799_839;

    fn limit() -> impl Strategy<Value = Limit> {
        let algorithm = prop::sample::select(Algorithm::WINDOWED.to_vec());
        (algorithm, 1_u64..=200_000, 1_000_u64..=315_360_000_000_000).prop_map(
            |(algorithm, amount, micros)| {
                Limit::new(algorithm, amount, Duration::from_micros(micros)).unwrap()
            },
        )
    }

    /// Numbers as the script writes them, and others.
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

    /// Returns the stored entries of a log.
    fn slots(entries: &[(u64, u64)]) -> Vec<u8> {
        let slot = |(time_us, total): &(u64, u64)| {
            [&time_us.to_le_bytes()[..TIME_BYTES], &total.to_le_bytes()[..TOTAL_BYTES]].concat()
        };
        entries.iter().flat_map(slot).collect()
    }

    /// Stored states with their entries, valid and invalid.
    fn stored() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
        let any_bytes = || prop::collection::vec(any::<u8>(), 0..100);
        let entry = (START - 1_000..START + 1_000, 0_u64..1 << 25);
        let log = (prop::collection::vec(number(), 9), 1_u64..2_000, prop::collection::vec(entry, 0..8));
        // each number is valid in nine of ten cases
        let log = (log, any::<[u8; 6]>()).prop_map(|((mut numbers, window, entries), random)| {
            let length = entries.len() as f64;
            let fields = [(1, 0.0), (2, 0.0), (4, 0.0), (5, length), (7, window as f64), (8, length + 1.0)];
            for ((field, value), random) in fields.into_iter().zip(random) {
                if random > 25 {
                    numbers[field] = value;
                }
            }
            (bytes(numbers), slots(&entries))
        });
        let numbers = prop::collection::vec(number(), 0..12).prop_map(bytes);
        prop_oneof![3 => (numbers, any_bytes()), 3 => log, 1 => (any_bytes(), any_bytes())]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn any_stored_bytes_are_shown_or_rejected(
            limit in limit(), (stored, entries) in stored(), now in 0_u64..=1 << 53,
        ) {
            let Some(state) = stored_state(limit.algorithm(), &stored, &entries) else { return Ok(()) };
            for now in [now, START] {
                let at = Timestamp::from_micros(now);
                if let Snapshot::TokenBucket(level) = state.snapshot(&limit, at) {
                    prop_assert!(level.part < level.rate.micros);
                }
            }
        }

        #[test]
        fn every_state_that_the_script_stores_is_shown(
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
                    let shown = stored_state(limit.algorithm(), &numbers, &entries).unwrap();
                    let at = Timestamp::from_micros(now_us + pause_us);
                    prop_assert_eq!(shown.snapshot(limit, at), counter.snapshot(limit, at));
                }
                now_us += pause_us;
            }
        }
    }

    /// Returns the bytes that the script stores for this state.
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
            State::Concurrency(_) => unreachable!("it is stored as its holds"),
            State::SlidingLog(counter) => {
                let stored: Vec<_> =
                    counter.entries.iter().map(|entry| (entry.time_us, entry.total % (1 << 24))).collect();
                entries = slots(&stored);
                let length = counter.entries.len() as u64;
                vec![0, counter.base % (1 << 24), 0, 0, 0, length, 0, counter.window_us, length]
            }
        };
        (bytes(numbers.into_iter().map(|number| number as f64)), entries)
    }
}
