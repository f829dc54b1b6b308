//! One counter as a shard keeps it: who it is for, its class, and three numbers, in 48 bytes.
//!
//! Every state but that of a log is three numbers, read at the [`Scale`] that many counters share. A log
//! varies in size, and is kept as it is.

use tollgate_core::{
    Algorithm, Answer, Limit, Operation, State, Terms, Timestamp,
    algorithm::{fixed_window, sliding_counter, token_bucket},
    limit::Rate,
};

use super::budget::allocated;
use crate::key::Key;

/// The longest identity that needs no allocation of its own.
const MAX_SHORT: usize = 18;

// a counter's size is most of what a key costs
const _: () = assert!(size_of::<Entry>() == 48);

/// One counter.
pub(super) enum Entry {
    /// At most [`MAX_SHORT`] bytes of identity; those beyond `len` mean nothing.
    Short { len: u8, identity: [u8; MAX_SHORT], class: u32, numbers: [u64; 3] },
    /// More than that.
    Long { identity: Box<[u8]>, class: u32, numbers: [u64; 3] },
    /// What does not fit three numbers.
    Log(Box<Log>),
}

/// A counter with the state of a sliding log.
pub(super) struct Log {
    pub(super) key: Key,
    pub(super) state: State,
}

/// What a log takes before its first entry.
const LOG_BYTES: usize = allocated(size_of::<Log>());
/// What a log takes for its first entries.
const FIRST_LOG_ENTRIES_BYTES: usize = allocated(64);

/// What is the same for all states that were written under one window or rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    FixedWindow { window_us: u64 },
    SlidingCounter { window_us: u64 },
    TokenBucket(Rate),
}

impl Entry {
    /// A counter of a class.
    pub(super) fn new(identity: &[u8], class: u32, numbers: [u64; 3]) -> Self {
        let mut short = [0; MAX_SHORT];
        match (short.get_mut(..identity.len()), u8::try_from(identity.len())) {
            (Some(place), Ok(len)) => {
                place.copy_from_slice(identity);
                Self::Short { len, identity: short, class, numbers }
            }
            _ => Self::Long { identity: identity.into(), class, numbers },
        }
    }

    pub(super) fn identity(&self) -> &[u8] {
        match self {
            Self::Short { len, identity, .. } => &identity[..usize::from(*len)],
            Self::Long { identity, .. } => identity,
            Self::Log(log) => log.key.identity_bytes(),
        }
    }

    /// What it takes outside of its 48 bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Short { .. } => 0,
            Self::Long { identity, .. } => allocated(identity.len()),
            Self::Log(log) => LOG_BYTES + log.key.heap_bytes().map_or(0, allocated) + log.state.heap_bytes(),
        }
    }

    /// The most that a new counter takes outside of its 48 bytes.
    pub(super) fn first_heap_bytes(key: &Key, algorithm: Algorithm) -> usize {
        let len = key.identity_bytes().len();
        let identity = if len > MAX_SHORT { allocated(len) } else { 0 };
        match algorithm {
            Algorithm::SlidingLog => LOG_BYTES + FIRST_LOG_ENTRIES_BYTES + identity,
            Algorithm::FixedWindow | Algorithm::SlidingCounter | Algorithm::TokenBucket => identity,
        }
    }
}

impl Scale {
    /// What a state is written under once this limit has charged it. A log has none.
    #[inline]
    pub(super) fn of(limit: &Limit) -> Option<Self> {
        let window_us = limit.window_us();
        match limit.algorithm() {
            Algorithm::FixedWindow => Some(Self::FixedWindow { window_us }),
            Algorithm::SlidingCounter => Some(Self::SlidingCounter { window_us }),
            Algorithm::TokenBucket => Some(Self::TokenBucket(limit.rate())),
            Algorithm::SlidingLog => None,
        }
    }

    pub(super) fn algorithm(self) -> Algorithm {
        match self {
            Self::FixedWindow { .. } => Algorithm::FixedWindow,
            Self::SlidingCounter { .. } => Algorithm::SlidingCounter,
            Self::TokenBucket(_) => Algorithm::TokenBucket,
        }
    }

    /// Both of its numbers.
    pub(super) fn to_bytes(self) -> [u8; 16] {
        let (first, second) = match self {
            Self::FixedWindow { window_us } | Self::SlidingCounter { window_us } => (window_us, 0),
            Self::TokenBucket(rate) => (rate.units, rate.micros),
        };
        (u128::from(first) << 64 | u128::from(second)).to_le_bytes()
    }

    /// The state that was packed into `numbers` at this scale.
    pub(super) fn unpack(self, numbers: [u64; 3]) -> State {
        match self {
            Self::FixedWindow { window_us } => State::FixedWindow(fixed_window(window_us, numbers)),
            Self::SlidingCounter { window_us } => State::SlidingCounter(sliding_counter(window_us, numbers)),
            Self::TokenBucket(rate) => State::TokenBucket(token_bucket(rate, numbers)),
        }
    }

    /// Decides a check or a peek over the counter that was packed into `numbers` at this scale. It is the limit's own,
    /// so it stays that, whatever is decided.
    #[inline]
    pub(super) fn check(
        self,
        numbers: &mut [u64; 3],
        terms: &Terms,
        operation: Operation,
        count: u32,
        now: Timestamp,
    ) -> Answer {
        // no detour by way of [`State`]: the numbers of a counter go to registers, and back
        match self {
            Self::FixedWindow { window_us } => {
                let mut state = fixed_window(window_us, *numbers);
                let answer = terms.check(&mut state, operation, count, now);
                *numbers = numbers_of_fixed_window(&state);
                answer
            }
            Self::SlidingCounter { window_us } => {
                let mut state = sliding_counter(window_us, *numbers);
                let answer = terms.check(&mut state, operation, count, now);
                *numbers = numbers_of_sliding_counter(&state);
                answer
            }
            Self::TokenBucket(rate) => {
                let mut state = token_bucket(rate, *numbers);
                let answer = terms.check(&mut state, operation, count, now);
                *numbers = numbers_of_token_bucket(&state);
                answer
            }
        }
    }
}

/// A state as a scale and three numbers at it.
///
/// # Panics
/// When it is that of a log.
pub(super) fn pack(state: &State) -> (Scale, [u64; 3]) {
    match state {
        State::FixedWindow(state) => {
            (Scale::FixedWindow { window_us: state.window_us }, numbers_of_fixed_window(state))
        }
        State::SlidingCounter(state) => {
            (Scale::SlidingCounter { window_us: state.window_us }, numbers_of_sliding_counter(state))
        }
        State::TokenBucket(state) => (Scale::TokenBucket(state.level.rate), numbers_of_token_bucket(state)),
        State::SlidingLog(_) => unreachable!("a log is kept as it is"),
    }
}

fn fixed_window(window_us: u64, [last_us, end_us, used]: [u64; 3]) -> fixed_window::State {
    fixed_window::State { last_us, end_us, used, window_us }
}

fn numbers_of_fixed_window(state: &fixed_window::State) -> [u64; 3] {
    [state.last_us, state.end_us, state.used]
}

/// A state is charged in the window of its last charge, so that one tells the other.
fn sliding_counter(window_us: u64, [last_us, current, previous]: [u64; 3]) -> sliding_counter::State {
    let start_us = window_start(last_us, window_us);
    sliding_counter::State { last_us, start_us, current, previous, window_us }
}

fn numbers_of_sliding_counter(state: &sliding_counter::State) -> [u64; 3] {
    debug_assert_eq!(state.start_us, window_start(state.last_us, state.window_us));
    [state.last_us, state.current, state.previous]
}

fn token_bucket(rate: Rate, [last_us, whole, part]: [u64; 3]) -> token_bucket::State {
    token_bucket::State { last_us, level: token_bucket::Level { whole, part, rate } }
}

fn numbers_of_token_bucket(state: &token_bucket::State) -> [u64; 3] {
    [state.last_us, state.level.whole, state.level.part]
}

fn window_start(last_us: u64, window_us: u64) -> u64 {
    last_us - last_us.checked_rem(window_us).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tollgate_core::{Cost, step::step};

    use super::*;

    const START: u64 = 1_794_765_441_799_839;

    fn limits() -> impl Strategy<Value = Vec<Limit>> {
        let algorithm = prop::sample::select(vec![
            Algorithm::FixedWindow,
            Algorithm::SlidingCounter,
            Algorithm::TokenBucket,
        ]);
        let numbers = (1_u64..=1_000_000_000, 1_000_u64..=315_360_000_000_000);
        (algorithm, prop::collection::vec(numbers, 1..4)).prop_map(|(algorithm, numbers)| {
            let limit = |(amount, micros)| Limit::new(algorithm, amount, Duration::from_micros(micros));
            numbers.into_iter().map(|numbers| limit(numbers).unwrap()).collect()
        })
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            Just(Operation::Check),
            Just(Operation::Charge),
            Just(Operation::Refund { at: None }),
            (0_u64..100_000_000)
                .prop_map(|at| Operation::Refund { at: Some(Timestamp::from_micros(START + at)) }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Whatever was done to a counter, under whichever limits, its state is read back as it was; and its
        /// scale is the limit's once it has been charged under it, and stays that.
        #[test]
        fn every_state_that_can_be_reached_is_read_back(
            limits in limits(),
            steps in prop::collection::vec(
                (operation(), any::<prop::sample::Index>(), 1_u64..=(1 << 53) - 1, 0_u64..50_000_000), 1..12
            ),
        ) {
            let mut state = State::fresh(limits[0].algorithm());
            let mut now = START;
            for (operation, limit, units, pause) in steps {
                let limit = limit.get(&limits);
                let before = state.clone();
                let terms = Terms::new(*limit, Cost::new(units).unwrap());
                let at = Timestamp::from_micros(now);
                let answer = step(&mut state, &terms, operation, 1, at);
                let (scale, numbers) = pack(&state);
                prop_assert_eq!(&scale.unpack(numbers), &state);
                let (scale_before, mut numbers_before) = pack(&before);
                if Some(scale_before) == Scale::of(limit) && operation == Operation::Check {
                    prop_assert_eq!(scale.check(&mut numbers_before, &terms, operation, 1, at), answer);
                    prop_assert_eq!(numbers_before, numbers);
                }
                prop_assert!(scale == scale_before || Some(scale) == Scale::of(limit));
                now += pause;
            }
        }
    }

    #[test]
    fn identities_of_any_length_are_kept_whole() {
        for len in 0..=64 {
            let identity = vec![b'x'; len];
            let entry = Entry::new(&identity, 0, [0; 3]);
            assert_eq!(entry.identity(), identity);
            assert_eq!(entry.heap_bytes() > 0, len > MAX_SHORT);
        }
    }
}
