//! States of fixed size in a compact form: three numbers per counter, read at a scale that many counters share.
//!
//! Every state except a log fits this form.

use crate::{
    algorithm::{Algorithm, Counter, State, with_counter, with_counter_type},
    limit::Limit,
    step::{Answer, Operation, Terms},
    time::Timestamp,
};

/// The parameters shared by all states that were written under one window or rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    algorithm: Algorithm,
    parameters: [u64; 2],
}

impl Scale {
    /// Returns the scale of a state that this limit has charged. `None` for a log.
    #[inline]
    pub fn of(limit: &Limit) -> Option<Self> {
        let algorithm = limit.algorithm();
        let parameters = with_counter_type!(algorithm, C => C::scale(limit))?;
        Some(Self { algorithm, parameters })
    }

    /// Returns the algorithm of the states.
    #[inline]
    pub fn algorithm(self) -> Algorithm {
        self.algorithm
    }

    /// Returns the parameters as bytes.
    pub fn to_bytes(self) -> [u8; 16] {
        let [first, second] = self.parameters;
        (u128::from(first) << 64 | u128::from(second)).to_le_bytes()
    }

    /// Returns the state that was packed into `numbers` at this scale.
    pub fn unpack(self, numbers: [u64; 3]) -> State {
        with_counter_type!(self.algorithm, C => C::unpack(self.parameters, numbers).into())
    }

    /// Decides a check or a peek on the counter that was packed into `numbers` at this scale, which is the scale of the
    /// limit and stays so.
    #[inline]
    pub fn check(
        self,
        numbers: &mut [u64; 3],
        terms: &Terms,
        operation: Operation,
        count: u32,
        now: Timestamp,
    ) -> Answer {
        // Not through [`State`]: the numbers of a counter go to registers and back.
        with_counter_type!(self.algorithm, C => {
            let mut counter = C::unpack(self.parameters, *numbers);
            let answer = terms.check(&mut counter, operation, count, now);
            if let Some((_, packed)) = counter.pack() {
                *numbers = packed;
            }
            answer
        })
    }
}

impl State {
    /// Returns the scale of the state and its three numbers. `None` for a log.
    pub fn pack(&self) -> Option<(Scale, [u64; 3])> {
        let (parameters, numbers) = with_counter!(self, counter => counter.pack())?;
        Some((Scale { algorithm: self.algorithm(), parameters }, numbers))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{cost::Cost, step::step};

    const START: u64 = 1_794_765_441_799_839;

    fn limits() -> impl Strategy<Value = Vec<Limit>> {
        let packed: Vec<Algorithm> =
            Algorithm::WINDOWED.into_iter().filter(|algorithm| !algorithm.properties().is_log).collect();
        let numbers = (1_u64..=1_000_000_000, 1_000_u64..=315_360_000_000_000);
        (prop::sample::select(packed), prop::collection::vec(numbers, 1..4)).prop_map(
            |(algorithm, numbers)| {
                let limit = |(amount, micros)| Limit::new(algorithm, amount, Duration::from_micros(micros));
                numbers.into_iter().map(|numbers| limit(numbers).unwrap()).collect()
            },
        )
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

        /// Every reachable state survives packing. Once a limit has charged it, its scale is that of the limit.
        #[test]
        fn every_reachable_state_survives_packing(
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
                let (scale, numbers) = state.pack().unwrap();
                prop_assert_eq!(&scale.unpack(numbers), &state);
                let (scale_before, mut numbers_before) = before.pack().unwrap();
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
    fn a_log_has_no_scale() {
        let log = Limit::sliding_log(1, Duration::from_secs(1)).unwrap();
        assert_eq!((Scale::of(&log), State::fresh(Algorithm::SlidingLog).pack()), (None, None));
    }
}
