//! Properties of every algorithm for limits, costs and times of any size, especially at the ends of the ranges.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::time::Duration;

use proptest::prelude::*;
use sluicegate_core::{
    Algorithm, Calendar, Cost, Limit, Operation, Retry, State, Terms, Timestamp,
    calendar::{CalendarUnit, PeriodEdges, PeriodSource},
    limit::MAX_LOG_UNITS,
    step::{Share, step},
    time::{MAX_EXACT, MAX_WAIT_US},
};

/// Numbers of any size up to `max`, mostly small ones and those at the ends.
fn sized(max: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        1..=10.min(max),
        1..=max,
        max.saturating_sub(3).max(1)..=max,
        (0..=53_u32).prop_map(move |bits| (1_u64 << bits).clamp(1, max)),
    ]
}

fn limit_of(algorithm: Algorithm) -> impl Strategy<Value = Limit> {
    (sized(algorithm.max_amount()), sized(315_360_000_000_000), sized(1_000_000_000)).prop_map(
        move |(amount, micros, burst)| {
            let limit = Limit::new(algorithm, amount, Duration::from_micros(micros.max(1_000))).unwrap();
            if algorithm == Algorithm::TokenBucket { limit.with_burst(burst).unwrap() } else { limit }
        },
    )
}

fn limit() -> impl Strategy<Value = Limit> {
    prop::sample::select(&Algorithm::WINDOWED[..]).prop_flat_map(limit_of)
}

fn start_time() -> impl Strategy<Value = u64> {
    prop_oneof![1_794_765_441_799_839_u64..1_894_765_441_799_839, Just(1_794_765_441_000_000)]
}

fn apply(state: &mut State, limit: &Limit, operation: Operation, cost: u64, now: u64) -> Share {
    let terms = Terms::new(*limit, Cost::new(cost).unwrap());
    step(state, &terms, operation, 1, Timestamp::from_micros(now)).share(&terms, 0, 1)
}

fn micros(wait: Duration) -> u64 {
    u64::try_from(wait.as_micros()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    /// A request passes after exactly the reported wait and not a microsecond earlier, and a denial changes nothing.
    #[test]
    fn every_retry_wait_is_exact(
        limit in limit(),
        start in start_time(),
        charges in prop::collection::vec((sized(MAX_EXACT), 0_u64..10_000_000_000), 1..6),
        cost in sized(1_000_000_000),
    ) {
        let mut state = State::fresh(limit.algorithm());
        let mut now = start;
        for (units, pause) in charges {
            apply(&mut state, &limit, Operation::Charge, units, now);
            now += pause;
        }
        let before = state.clone();
        let share = apply(&mut state, &limit, Operation::Check, cost, now);
        match share.retry {
            None => prop_assert!(share.passes && cost <= limit.capacity()),
            Some(Retry::Never) => prop_assert!(cost > limit.capacity()),
            Some(Retry::After(wait)) => {
                prop_assert_eq!(&state, &before);
                let wait = micros(wait);
                prop_assert!(wait > 0 && wait <= MAX_WAIT_US);
                if wait < MAX_WAIT_US - now {
                    prop_assert!(!apply(&mut state, &limit, Operation::Peek, cost, now + wait - 1).passes);
                    prop_assert!(apply(&mut state, &limit, Operation::Peek, cost, now + wait).passes);
                }
            }
        }
    }

    /// Units count until the reset and not afterwards; the state then equals a fresh one.
    #[test]
    fn every_reset_wait_is_exact(
        limit in limit(), start in start_time(), units in sized(MAX_EXACT), pause in 0_u64..1_000_000_000,
    ) {
        let mut state = State::fresh(limit.algorithm());
        apply(&mut state, &limit, Operation::Charge, units, start);
        let now = start + pause;
        let reset = micros(apply(&mut state, &limit, Operation::Peek, 0, now).reset_after);
        if reset < MAX_WAIT_US - now {
            let used = |now: u64| state.used(&limit, Timestamp::from_micros(now));
            prop_assert_eq!(used(now + reset), 0);
            if reset > 0 {
                prop_assert!(used(now + reset - 1) > 0);
                let (expires, end) = (state.expires_at(), Timestamp::from_micros(now + reset));
                // under another limit, a fixed window may count for one window after its last charge
                let is_window = limit.algorithm() == Algorithm::FixedWindow;
                let longest = if is_window { end.plus(limit.window()) } else { end };
                prop_assert!(end <= expires && expires <= longest);
            }
        }
    }

    /// A bucket whose estimates are refunded later, in any order, is never emptier than one that was charged only the actual costs. So its bound
    /// holds for the actual costs.
    #[test]
    fn a_refund_of_a_bucket_frees_at_most_what_has_not_drained(
        limit in limit_of(Algorithm::TokenBucket),
        start in start_time(),
        charges in prop::collection::vec(
            (sized(1_000_000_000), any::<prop::sample::Index>(), 0_u64..10_000_000, any::<prop::sample::Index>()), 1..10,
        ),
    ) {
        let [mut estimated, mut actual] = [0; 2].map(|_| State::fresh(limit.algorithm()));
        let (mut now, mut refunds) = (start, Vec::new());
        for (number, (estimate, refunded, pause, settled)) in charges.iter().enumerate() {
            now += pause;
            let refunded = refunded.index(usize::try_from(*estimate).unwrap() + 1) as u64;
            apply(&mut estimated, &limit, Operation::Charge, *estimate, now);
            apply(&mut actual, &limit, Operation::Charge, estimate - refunded, now);
            refunds.push((number + settled.index(charges.len() - number), refunded, now));
            for (_, refunded, at) in refunds.extract_if(.., |(settled, ..)| *settled == number) {
                let at = Some(Timestamp::from_micros(at));
                apply(&mut estimated, &limit, Operation::Refund { at }, refunded, now);
                let used = [&estimated, &actual].map(|state| state.used(&limit, Timestamp::from_micros(now)));
                prop_assert!(used[0] >= used[1], "{:?}", used);
            }
        }
    }

    /// While several versions of a fixed-window limit use one counter, at most two quotas pass in the shortest window, and a counter
    /// whose expiry time has passed counts nothing under any version.
    #[test]
    fn several_windows_of_one_counter_admit_at_most_two_quotas(
        windows in prop::collection::vec((1_000_u64..20_000, any::<prop::sample::Index>()), 1..4),
        start in start_time(),
        steps in prop::collection::vec((any::<prop::sample::Index>(), 1_u64..=5, 0_u64..4_000), 1..60),
    ) {
        const QUOTA: u64 = 5;
        let version = |(window, phase): &(u64, prop::sample::Index)| {
            let phase = Duration::from_micros(phase.index(usize::try_from(*window).unwrap()) as u64);
            Limit::fixed_window(QUOTA, Duration::from_micros(*window)).unwrap().with_phase(phase).unwrap()
        };
        let versions: Vec<Limit> = windows.iter().map(version).collect();
        let shortest = windows.iter().map(|(window, _)| *window).min().unwrap();
        let mut state = State::fresh(Algorithm::FixedWindow);
        let (mut now, mut admitted) = (start, Vec::new());
        for (version, cost, pause) in steps {
            if state.expires_at().as_micros() <= now {
                for limit in &versions {
                    prop_assert_eq!(state.used(limit, Timestamp::from_micros(now)), 0);
                }
            }
            let limit = version.get(&versions);
            if apply(&mut state, limit, Operation::Check, cost, now).passes {
                admitted.push((now, cost));
            }
            now += pause;
        }
        for (index, (from, _)) in admitted.iter().enumerate() {
            let within = admitted[index..].iter().take_while(|(at, _)| *at < from + shortest);
            prop_assert!(within.map(|(_, units)| units).sum::<u64>() <= 2 * QUOTA);
        }
    }

    /// The answer after a charge equals the next peek: a decision reads its counter once.
    #[test]
    fn the_answer_after_a_charge_equals_the_next_peek(
        limits in prop::sample::select(&Algorithm::WINDOWED[..])
            .prop_flat_map(|algorithm| prop::collection::vec(limit_of(algorithm), 2)),
        start in start_time(),
        steps in prop::collection::vec(
            (any::<bool>(), any::<bool>(), sized(MAX_EXACT), -20_000_000_i64..100_000_000_000), 1..8
        ),
    ) {
        let mut state = State::fresh(limits[0].algorithm());
        let mut now = start;
        for (first, charge, units, pause) in steps {
            let limit = &limits[usize::from(first)];
            let terms = Terms::new(*limit, Cost::new(units).unwrap());
            let operation = if charge { Operation::Charge } else { Operation::Check };
            let answer = step(&mut state, &terms, operation, 1, Timestamp::from_micros(now));
            let peek = step(&mut state, &terms, Operation::Peek, 1, Timestamp::from_micros(now));
            prop_assert_eq!(
                (answer.available, answer.reset_after_us, answer.spare),
                (peek.available, peek.reset_after_us, peek.spare)
            );
            now = now.saturating_add_signed(pause);
        }
    }

    /// A bucket drains the same whether or not it is written in between: no fraction is lost.
    #[test]
    fn a_bucket_loses_no_fraction(
        limit in limit_of(Algorithm::TokenBucket),
        start in start_time(),
        units in sized(1_000_000_000),
        pauses in prop::collection::vec(sized(1_000_000), 1..10),
    ) {
        let mut written = State::fresh(Algorithm::TokenBucket);
        apply(&mut written, &limit, Operation::Charge, units, start);
        let untouched = written.clone();
        let mut now = start;
        for pause in pauses {
            now += pause;
            let at = Timestamp::from_micros(now);
            if untouched.used(&limit, at) == 0 {
                break;
            }
            apply(&mut written, &limit, Operation::Charge, 1, now);
            apply(&mut written, &limit, Operation::Refund { at: None }, 1, now);
            prop_assert_eq!(written.used(&limit, at), untouched.used(&limit, at));
            prop_assert_eq!(written.reset(&limit, at), untouched.reset(&limit, at));
        }
    }

    /// A bucket never admits more than its burst and the refill of the elapsed time.
    #[test]
    fn a_bucket_admits_no_more_than_burst_and_rate(
        limit in limit_of(Algorithm::TokenBucket),
        start in start_time(),
        pauses in prop::collection::vec(sized(1_000_000_000), 1..20),
    ) {
        let terms = Terms::new(limit, Cost::ONE);
        let (mut state, mut elapsed, mut admitted) = (State::fresh(Algorithm::TokenBucket), 0_u64, 0_u128);
        for pause in pauses {
            let now = Timestamp::from_micros(start + elapsed);
            admitted += u128::from(step(&mut state, &terms, Operation::Check, u32::MAX, now).charged);
            let earned = u128::from(elapsed) * u128::from(limit.amount()) / u128::from(limit.window_us());
            prop_assert!(admitted <= u128::from(limit.capacity()) + earned);
            elapsed += pause;
        }
    }

    /// A charge and a refund of the same size leave the used units unchanged.
    #[test]
    fn a_refund_undoes_its_charge(
        limit in limit(), start in start_time(), before in sized(MAX_EXACT / 2), units in sized(MAX_EXACT / 2),
    ) {
        let is_log = limit.algorithm() == Algorithm::SlidingLog;
        let most = if is_log { MAX_LOG_UNITS / 2 } else { MAX_EXACT };
        let (before, units) = (before.min(most), units.min(most));
        let now = Timestamp::from_micros(start);
        let mut state = State::fresh(limit.algorithm());
        apply(&mut state, &limit, Operation::Charge, before, start);
        let used = state.used(&limit, now);
        apply(&mut state, &limit, Operation::Charge, units, start);
        apply(&mut state, &limit, Operation::Refund { at: None }, units, start);
        prop_assert_eq!(state.used(&limit, now), used);
    }
}

/// Periods of 10, 3 and 30 seconds in turn.
struct UnequalPeriods;

const PERIODS_US: [u64; 3] = [10_000_000, 3_000_000, 30_000_000];

impl PeriodSource for UnequalPeriods {
    fn edges_at(&self, at: Timestamp) -> PeriodEdges {
        let mut start_us = at.as_micros() / 43_000_000 * 43_000_000;
        for number in 0.. {
            let end_us = start_us + PERIODS_US[number % 3];
            if at.as_micros() < end_us {
                return PeriodEdges { start_us, end_us, next_end_us: end_us + PERIODS_US[(number + 1) % 3] };
            }
            start_us = end_us;
        }
        unreachable!("every time is in a period")
    }
}

fn unequal_periods(amount: u64) -> Limit {
    let calendar = Calendar::new(CalendarUnit::Day, None, "test", &UnequalPeriods).unwrap();
    Limit::fixed_window(amount, &*Box::leak(Box::new(calendar))).unwrap()
}

proptest! {
    /// A counter admits exactly its amount in each period, and every wait ends with the period.
    #[test]
    fn a_calendar_window_admits_its_amount_in_each_period(
        amount in 1_u64..20, start in start_time(), pauses in prop::collection::vec(0_u64..2_000_000, 1..400),
    ) {
        let (limit, mut state, mut now) = (unequal_periods(amount), State::fresh(Algorithm::FixedWindow), start);
        let mut admitted = std::collections::HashMap::new();
        for pause in pauses {
            now += pause;
            let end_us = UnequalPeriods.edges_at(Timestamp::from_micros(now)).end_us;
            let used = admitted.entry(end_us).or_insert(0);
            let share = apply(&mut state, &limit, Operation::Check, 1, now);
            prop_assert_eq!(share.passes, *used < amount);
            *used += u64::from(share.passes);
            prop_assert_eq!(share.remaining, amount - *used);
            prop_assert_eq!(now + micros(share.reset_after), end_us);
            if let Some(Retry::After(wait)) = share.retry {
                prop_assert_eq!(now + micros(wait), end_us);
            }
        }
    }

    /// A clock that is set back adds at most one quota to the periods that it passes again.
    #[test]
    fn a_clock_set_back_adds_at_most_one_quota_to_a_calendar_window(
        start in start_time(), back in 0_u64..100_000_000, ahead in prop::collection::vec(0_u64..5_000_000, 1..100),
    ) {
        let (limit, mut state) = (unequal_periods(5), State::fresh(Algorithm::FixedWindow));
        let mut admitted = std::collections::HashMap::new();
        let mut check = |now: u64| {
            let period = UnequalPeriods.edges_at(Timestamp::from_micros(now)).end_us;
            let passes = apply(&mut state, &limit, Operation::Check, 1, now).passes;
            *admitted.entry(period).or_insert(0) += u64::from(passes);
        };
        let mut now = start;
        for pause in &ahead {
            now += pause;
            check(now);
        }
        now -= back;
        for pause in &ahead {
            now += pause;
            check(now);
        }
        prop_assert!(admitted.values().all(|units| *units <= 10), "{:?}", admitted);
    }
}
