//! The required behaviour of every store, one function per property. The macros `conformance!` and `hold_conformance!` generate a test
//! for each.
//!
//! Tests advance a manual clock. Each test has a new store.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sluicegate::{
    Algorithm, Cost, Limit, Retry, Timestamp,
    calendar::{Anchor, CalendarUnit, Weekday, Zone},
    limiter::Operation,
    store::{Check, Deadline, Key, Snapshot, Store, Terms, Tier},
};
use sluicegate_core::{
    algorithm::sliding_log::REFUND_REACH,
    limit::{MAX_LOG_AMOUNT, MAX_LOG_UNITS},
    snapshot::{MAX_CHARGES, Span},
    step::{Admission, Mode, Share},
};

use crate::{
    reference_calendar,
    store_fixture::{START, StoreFixture, decide},
};

const LARGEST: u64 = (1 << 53) - 1;
pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MINUTE: Duration = Duration::from_secs(60);
pub(crate) const MICROSECOND: Duration = Duration::from_micros(1);
/// Starts of months of 2027 in UTC, in seconds since the epoch.
const FEBRUARY: u64 = 1_801_440_000;
pub(crate) const MARCH: u64 = 1_803_859_200;
pub(crate) const APRIL: u64 = 1_806_537_600;

pub(crate) fn limits(amount: u64, window: Duration) -> [Limit; 4] {
    Algorithm::WINDOWED.map(|algorithm| Limit::new(algorithm, amount, window).expect("a valid limit"))
}

/// Returns a limit of 10 per calendar period.
pub(crate) fn ten_per(unit: CalendarUnit, zone: &str, anchor: Option<Anchor>) -> Limit {
    let calendar = Zone::named(zone).and_then(|zone| zone.calendar(unit, anchor)).expect("a valid calendar");
    Limit::fixed_window(10, calendar).expect("a valid limit")
}

pub(crate) fn at_second(seconds: u64) -> Timestamp {
    Timestamp::from_micros(seconds * 1_000_000)
}

pub(crate) fn retry_after_of(share: &Share) -> Duration {
    match share.retry {
        Some(Retry::After(wait)) => wait,
        other => panic!("expected a retry_after, found {other:?}"),
    }
}

/// Tests that make three quarters of all calls.
pub(crate) const SLOW: [&str; 2] = ["a_bucket_does_not_drift", "windows_end_on_time_under_constant_traffic"];

macro_rules! conformance_tests {
    ($module:ident: $($(#[$doc:meta])* $name:ident($fixture:ident) $body:block)*) => {
        $($(#[$doc])* pub async fn $name($fixture: &StoreFixture) $body)*

        /// Runs all tests one after the other, each on a new fixture: for stores that take long to start.
        pub async fn all(mut make: impl AsyncFnMut() -> StoreFixture) {
            $($name(&make().await).await;)*
        }

        /// Runs all tests except the slow ones, for stores with a network round trip per call.
        pub async fn all_but_slow(mut make: impl AsyncFnMut() -> StoreFixture) {
            $(if !$crate::conformance::SLOW.contains(&stringify!($name)) {
                $name(&make().await).await;
            })*
        }

        /// Declares every test for the store that `$fixture().await` returns.
        #[macro_export]
        macro_rules! $module {
            ($make:expr) => {
                $(#[tokio::test]
                async fn $name() {
                    $crate::$module::$name(&$make.await).await;
                })*
            };
        }
    };
}

pub(crate) use conformance_tests;

conformance_tests! { conformance:
    /// A charge and its refund in one batch leave an empty counter that can be used.
    a_charge_that_is_refunded_in_the_same_batch_leaves_an_empty_counter(fixture) {
        for limit in limits(5, MINUTE) {
            let tier = Tier {
                key: Key::without_rule("k").expect("a short key"),
                terms: Terms::new(limit, Cost::ONE),
            };
            let operations = [Operation::Check, Operation::Refund { at: None }];
            let checks =
                operations.map(|operation| Check::new(operation, vec![tier.clone()]).expect("a valid check"));
            decide(&fixture.store, &checks, None).await.expect("the store answers");
            assert_eq!(fixture.admitted_now("k", &limit).await, 5, "{limit:?}");
        }
    }

    /// Requests within the limit are allowed, and the next one is denied.
    requests_within_the_limit_pass_and_the_next_is_denied(fixture) {
        for limit in limits(5, MINUTE) {
            for _ in 0..5 {
                assert!(fixture.check("k", &limit, 1).await.passes, "{limit:?}");
            }
            assert!(!fixture.check("k", &limit, 1).await.passes, "{limit:?}");
        }
    }

    /// Remaining decreases by the cost.
    remaining_decreases_by_the_cost(fixture) {
        for limit in limits(10, MINUTE) {
            for (cost, left) in [(1, 9), (3, 6), (0, 6), (6, 0), (0, 0)] {
                assert_eq!(fixture.check("k", &limit, cost).await.remaining, left, "{limit:?}");
            }
        }
    }

    /// After `reset_after`, the full quota is available.
    the_full_quota_is_available_after_reset_after(fixture) {
        for limit in limits(5, MINUTE) {
            fixture.reset_clock();
            let reset_after = fixture.check("k", &limit, 5).await.reset_after;
            fixture.clock.advance(reset_after - MICROSECOND);
            assert!(fixture.peek("k", &limit, 0).await.remaining < 5 || limit.algorithm() == Algorithm::TokenBucket);
            assert!(fixture.peek("k", &limit, 0).await.reset_after == MICROSECOND);
            fixture.clock.advance(MICROSECOND);
            assert_eq!(fixture.peek("k", &limit, 0).await.remaining, 5);
            assert_eq!(fixture.admitted_now("k", &limit).await, 5, "{limit:?}");
        }
    }

    /// A reset restores the full quota of that counter only.
    a_reset_restores_the_full_quota(fixture) {
        for limit in limits(5, MINUTE) {
            fixture.check("k", &limit, 5).await;
            fixture.check("other", &limit, 5).await;
            assert_eq!(fixture.reset("k", &limit).await, 1);
            assert_eq!(fixture.reset("k", &limit).await, 0, "already reset");
            assert_eq!(fixture.admitted_now("k", &limit).await, 5);
            assert_eq!(fixture.admitted_now("other", &limit).await, 0);
        }
    }

    /// Keys do not affect each other.
    keys_do_not_affect_each_other(fixture) {
        for limit in limits(2, MINUTE) {
            assert_eq!(fixture.admitted_now("a", &limit).await, 2);
            assert_eq!(fixture.admitted_now("b", &limit).await, 2);
            assert_eq!(fixture.admitted_now("a", &limit).await, 0);
        }
    }

    /// The same key under another algorithm is another counter.
    each_algorithm_has_its_own_counter(fixture) {
        for limit in limits(2, MINUTE) {
            assert_eq!(fixture.admitted_now("k", &limit).await, 2);
        }
    }

    /// A request passes after exactly `retry_after`, and not a microsecond earlier. Also at odd rates, at the ends of
    /// the range, and for costs above one.
    a_retry_passes_after_retry_after_and_not_a_microsecond_earlier(fixture) {
        let table = [
            (3, MINUTE), (7, MINUTE), (1, Duration::from_millis(1)), (9_973, Duration::from_micros(1_000_003)),
            (MAX_LOG_AMOUNT, Duration::from_secs(10 * 365 * 86_400)), (MAX_LOG_AMOUNT, Duration::from_millis(1)),
        ];
        for (amount, window) in table {
            for limit in limits(amount, window) {
                for cost in [1, amount / 2 + 1, amount] {
                    fixture.reset_clock();
                    fixture.reset("k", &limit).await;
                    fixture.check("k", &limit, amount - amount / 3).await;
                    fixture.clock.advance(Duration::from_micros(137));
                    fixture.check("k", &limit, amount / 3).await;
                    let denied = fixture.check("k", &limit, cost).await;
                    if denied.passes {
                        continue; // the usage has drained within those 137 us
                    }
                    let retry_after = retry_after_of(&denied);
                    fixture.clock.advance(retry_after - MICROSECOND);
                    let early = fixture.peek("k", &limit, cost).await;
                    assert!(!early.passes, "{limit:?} cost {cost} passed a microsecond before {retry_after:?}");
                    assert_eq!(retry_after_of(&early), MICROSECOND, "{limit:?} cost {cost}");
                    fixture.clock.advance(MICROSECOND);
                    assert!(fixture.check("k", &limit, cost).await.passes, "{limit:?} cost {cost} waited {retry_after:?}");
                }
            }
        }
    }

    /// A caller that retries while denied is admitted as early as one that does not.
    denied_attempts_do_not_delay_the_next_admission(fixture) {
        for limit in limits(3, SECOND) {
            fixture.reset_clock();
            fixture.check("k", &limit, 3).await;
            let retry_after = retry_after_of(&fixture.check("k", &limit, 1).await);
            let step = Duration::from_millis(3);
            for _ in 0..60 {
                fixture.clock.advance(step);
                assert!(!fixture.check("k", &limit, 1).await.passes, "{limit:?}");
            }
            fixture.clock.advance(retry_after - 60 * step);
            assert!(fixture.check("k", &limit, 1).await.passes, "{limit:?}");
        }
    }

    /// Expired usage does not count.
    expired_usage_does_not_count(fixture) {
        for limit in limits(4, SECOND) {
            for _ in 0..20 {
                assert_eq!(fixture.admitted_now("k", &limit).await, 4, "{limit:?}");
                fixture.clock.advance(2 * SECOND);
            }
        }
    }

    /// A thousand requests in one microsecond count as a thousand.
    requests_in_the_same_microsecond_count_separately(fixture) {
        for limit in limits(1_000, MINUTE) {
            for left in (0..1_000).rev() {
                assert_eq!(fixture.check("k", &limit, 1).await.remaining, left, "{limit:?}");
            }
            assert!(!fixture.check("k", &limit, 1).await.passes);
        }
    }

    /// No matter how long a key was idle, at most the capacity passes at one time.
    an_idle_key_never_admits_more_than_the_capacity(fixture) {
        for limit in limits(10, Duration::from_secs(10)) {
            fixture.reset_clock();
            for idle_ms in [0, 1, 8_900, 9_999, 10_000, 15_000, 20_000, 86_400_000] {
                fixture.reset("k", &limit).await;
                fixture.check("k", &limit, 1).await;
                fixture.clock.advance(Duration::from_millis(idle_ms));
                let admitted = fixture.admitted_now("k", &limit).await;
                assert!((9..=10).contains(&admitted), "{limit:?}: {admitted} after {idle_ms} ms");
            }
        }
    }

    /// A bucket does not drift: at 7 per minute, a caller that follows `retry_after` gets exactly 10,080 per day
    /// beyond the burst; at 300,000 per second exactly 300,000.
    a_bucket_does_not_drift(fixture) {
        let slow = Limit::token_bucket(7, MINUTE).expect("valid").with_burst(2).expect("valid");
        let end = START.plus(Duration::from_secs(86_400));
        let mut admitted = 0;
        while fixture.clock.now() <= end {
            admitted += fixture.admitted_now("slow", &slow).await;
            let next = fixture.peek("slow", &slow, 1).await;
            fixture.clock.advance(retry_after_of(&next));
        }
        assert_eq!(admitted, 2 + 10_080, "the burst and one day");

        let fast = Limit::token_bucket(300_000, SECOND).expect("valid").with_burst(3).expect("valid");
        fixture.reset_clock();
        let mut admitted = fixture.admitted_now("fast", &fast).await;
        for _ in 0..5_000 {
            fixture.clock.advance(Duration::from_micros(10));
            admitted += fixture.admitted_now("fast", &fast).await;
        }
        assert_eq!(admitted, 3 + 15_000, "50 ms at 3 per 10 us");
    }

    /// A steady caller below the rate is never denied: fractions of time are not lost.
    a_steady_caller_below_the_rate_is_never_denied(fixture) {
        let limit = Limit::token_bucket(1, SECOND).expect("valid");
        for _ in 0..100 {
            assert!(fixture.check("k", &limit, 1).await.passes);
            fixture.clock.advance(Duration::from_millis(600));
            assert!(!fixture.check("k", &limit, 1).await.passes);
            fixture.clock.advance(Duration::from_millis(400));
        }
    }

    /// A denied check charges nothing, and a smaller cost may still pass.
    a_denied_check_charges_nothing(fixture) {
        for limit in limits(10, MINUTE) {
            fixture.check("k", &limit, 8).await;
            for _ in 0..3 {
                let denied = fixture.check("k", &limit, 5).await;
                assert_eq!((denied.passes, denied.remaining), (false, 2), "{limit:?}");
            }
            assert_eq!(fixture.check("k", &limit, 2).await.remaining, 0);
        }
    }

    /// A cost above the capacity never passes, charges nothing, and returns `Retry::Never`.
    a_cost_above_the_capacity_never_passes(fixture) {
        for limit in limits(10, MINUTE) {
            for cost in [11, LARGEST] {
                let denied = fixture.check("k", &limit, cost).await;
                assert_eq!((denied.retry, denied.remaining), (Some(Retry::Never), 10), "{limit:?}");
            }
        }
    }

    /// Windows work down to a millisecond.
    a_window_of_one_millisecond_ends_on_time(fixture) {
        for limit in limits(3, Duration::from_millis(1)) {
            for _ in 0..50 {
                assert_eq!(fixture.admitted_now("k", &limit).await, 3, "{limit:?}");
                assert_eq!(fixture.admitted_now("k", &limit).await, 0, "{limit:?}");
                fixture.clock.advance(Duration::from_millis(2));
            }
        }
    }

    /// Under constant traffic every window ends on time, and admits as much as the previous one.
    windows_end_on_time_under_constant_traffic(fixture) {
        for limit in limits(10, SECOND) {
            // The first window is full from its start, so the same state returns with each window.
            fixture.clock.set(Timestamp::from_micros(1_794_765_441_000_000));
            let mut admitted = Vec::new();
            for _ in 0..20 {
                let mut in_window = 0;
                for _ in 0..100 {
                    in_window += u64::from(fixture.check("k", &limit, 1).await.passes);
                    fixture.clock.advance(Duration::from_millis(10));
                }
                admitted.push(in_window);
            }
            // A full sliding counter stays one short, as the weighted previous window is rounded up.
            let expected = if limit.algorithm() == Algorithm::SlidingCounter { 9 } else { 10 };
            assert!(admitted[1..].iter().all(|in_window| *in_window == expected), "{limit:?}: {admitted:?}");
        }
    }

    /// A capacity of one admits exactly one.
    a_capacity_of_one_admits_exactly_one(fixture) {
        for limit in limits(1, MINUTE) {
            assert!(fixture.check("k", &limit, 1).await.passes);
            for _ in 0..3 {
                assert!(!fixture.check("k", &limit, 1).await.passes, "{limit:?}");
            }
        }
    }

    /// A raised amount is available immediately, less the usage. A lowered amount leaves nothing, and creates no debt.
    a_changed_amount_keeps_the_usage(fixture) {
        for algorithm in Algorithm::WINDOWED {
            let limit = |amount| Limit::new(algorithm, amount, Duration::from_secs(3600)).expect("valid");
            fixture.check("k", &limit(10), 10).await;
            assert!(!fixture.check("k", &limit(10), 1).await.passes);
            assert_eq!(fixture.check("k", &limit(100), 1).await.remaining, 89, "{algorithm}");
            assert_eq!(fixture.check("k", &limit(5), 1).await.remaining, 0, "{algorithm}");
            assert_eq!(fixture.check("k", &limit(12), 1).await.remaining, 0, "{algorithm}");
            assert!(!fixture.check("k", &limit(12), 1).await.passes, "{algorithm}");
        }
    }

    /// A changed window keeps the usage, and a shorter one frees it after one new window at the latest.
    a_changed_window_keeps_the_usage(fixture) {
        for algorithm in Algorithm::WINDOWED {
            fixture.reset_clock();
            let limit = |window| Limit::new(algorithm, 10, window).expect("valid");
            let (hour, ten_seconds) = (limit(60 * MINUTE), limit(10 * SECOND));
            fixture.check("k", &hour, 7).await;
            assert_eq!(fixture.peek("k", &ten_seconds, 1).await.remaining, 3, "{algorithm}");
            assert_eq!(fixture.peek("k", &limit(24 * 60 * MINUTE), 1).await.remaining, 3, "{algorithm}");
            let retry_after = retry_after_of(&fixture.check("k", &ten_seconds, 10).await);
            assert!(retry_after <= 10 * SECOND, "{algorithm}: {retry_after:?}");
            fixture.clock.advance(retry_after);
            assert!(fixture.check("k", &ten_seconds, 10).await.passes, "{algorithm}");
            assert_eq!(fixture.peek("k", &hour, 1).await.remaining, 0, "{algorithm}: carried back");
        }
    }

    /// While instances use several windows for one fixed-window counter, as during a rollout, the end of one window does not
    /// empty the others: at most two quotas pass in the shortest window.
    several_windows_of_one_counter_admit_at_most_two_quotas(fixture) {
        const QUOTA: u64 = 10;
        let limit = |window| Limit::fixed_window(QUOTA, window).expect("valid");
        let shifted = limit(10 * SECOND).with_phase(3 * SECOND).expect("a fixed window");
        let versions = [limit(7 * SECOND), limit(10 * SECOND), shifted];
        let mut chance = StdRng::seed_from_u64(13);
        let mut admitted: Vec<(Timestamp, u64)> = Vec::new();
        for _ in 0..1_500 {
            fixture.clock.advance(Duration::from_millis(chance.random_range(0..400)));
            let version = versions.choose(&mut chance).expect("not empty");
            let units = if chance.random_bool(0.5) {
                fixture.admitted_now("k", version).await
            } else {
                u64::from(fixture.check("k", version, 1).await.passes)
            };
            admitted.push((fixture.clock.now(), units));
        }
        for (index, (from, _)) in admitted.iter().enumerate() {
            let end = from.plus(7 * SECOND);
            let within: u64 =
                admitted[index..].iter().take_while(|(at, _)| *at < end).map(|(_, units)| units).sum();
            assert!(within <= 2 * QUOTA, "{within} within 7 s from {from:?}");
        }
        let total: u64 = admitted.iter().map(|(_, units)| units).sum();
        assert!(total >= 10 * QUOTA, "only {total} in five minutes");
    }

    /// A cost of 0 reads, and is denied only in debt.
    a_cost_of_zero_is_denied_only_in_debt(fixture) {
        for limit in limits(10, MINUTE) {
            assert!(fixture.check("k", &limit, 0).await.passes);
            fixture.check("k", &limit, 10).await;
            assert!(fixture.check("k", &limit, 0).await.passes, "{limit:?}: zero remaining is not debt");
            fixture.charge("k", &limit, 1).await;
            assert!(!fixture.check("k", &limit, 0).await.passes, "{limit:?}");
        }
    }

    /// A charge is always applied, and must be paid off before anything passes.
    a_charge_above_the_limit_creates_debt(fixture) {
        for limit in limits(10, MINUTE) {
            fixture.reset_clock();
            let charged = fixture.charge("k", &limit, 25).await;
            assert_eq!((charged.passes, charged.remaining), (true, 0), "{limit:?}");
            let retry_after = retry_after_of(&fixture.check("k", &limit, 1).await);
            fixture.clock.advance(retry_after);
            assert!(fixture.check("k", &limit, 1).await.passes, "{limit:?}");
            if limit.algorithm() == Algorithm::TokenBucket {
                assert_eq!(retry_after, Duration::from_secs(16 * 6), "16 units of debt, one drains every 6 s");
            }
        }
    }

    /// A refund returns at most the usage.
    a_refund_returns_at_most_the_usage(fixture) {
        for limit in limits(10, MINUTE) {
            assert_eq!(fixture.refund("k", &limit, 5, None).await.remaining, 10, "{limit:?}: nothing to refund");
            fixture.check("k", &limit, 6).await;
            assert_eq!(fixture.refund("k", &limit, 2, None).await.remaining, 6, "{limit:?}");
            assert_eq!(fixture.refund("k", &limit, LARGEST, None).await.remaining, 10, "{limit:?}");
            assert_eq!(fixture.admitted_now("k", &limit).await, 10, "{limit:?}");
        }
    }

    /// A refund of one charge is exact, and has no effect once its window has passed.
    a_refund_of_one_charge_is_exact(fixture) {
        for limit in limits(10, MINUTE) {
            fixture.reset_clock();
            fixture.check("k", &limit, 3).await;
            let first = fixture.clock.now();
            fixture.clock.advance(Duration::from_millis(5));
            fixture.check("k", &limit, 4).await;
            let before = fixture.peek("k", &limit, 0).await.remaining;
            assert_eq!(fixture.refund("k", &limit, 3, Some(first)).await.remaining, before + 3, "{limit:?}");
            fixture.clock.advance(2 * MINUTE);
            fixture.check("k", &limit, 5).await;
            let before = fixture.peek("k", &limit, 0).await.remaining;
            assert_eq!(fixture.refund("k", &limit, 3, Some(first)).await.remaining, before, "{limit:?}: too late");
        }
        let log = Limit::sliding_log(10, MINUTE).expect("valid");
        fixture.reset("k", &log).await;
        fixture.check("k", &log, 2).await;
        let charged_at = fixture.clock.now();
        fixture.clock.advance(MICROSECOND);
        let missed = fixture.refund("k", &log, 2, Some(fixture.clock.now())).await;
        assert_eq!(missed.remaining, 8, "nothing was charged at that time");
        assert_eq!(fixture.refund("k", &log, 5, Some(charged_at)).await.remaining, 10, "only what was charged then");
    }

    /// Numbers at the end of the range neither wrap nor lose a unit.
    the_largest_numbers_are_exact(fixture) {
        for limit in limits(10, MINUTE) {
            let largest = if limit.algorithm() == Algorithm::SlidingLog { MAX_LOG_UNITS } else { LARGEST };
            fixture.charge("k", &limit, LARGEST).await;
            fixture.charge("k", &limit, LARGEST).await;
            assert_eq!(fixture.refund("k", &limit, largest - 1, None).await.remaining, 9, "{limit:?}");
            assert_eq!(fixture.refund("k", &limit, LARGEST, None).await.remaining, 10, "{limit:?}");
        }
    }

    /// A debt beyond the most units of a log changes no decision: the newest charges count in full.
    a_log_in_the_largest_debt_forgets_only_what_no_decision_needs(fixture) {
        let limit = Limit::sliding_log(MAX_LOG_AMOUNT, MINUTE).expect("valid");
        for units in [5, LARGEST, MAX_LOG_AMOUNT - 3] {
            fixture.charge("k", &limit, units).await;
            fixture.clock.advance(10 * SECOND);
        }
        // the second charge counts for another 40 s, the third one for 50 s
        assert_eq!(retry_after_of(&fixture.check("k", &limit, 1).await), 40 * SECOND);
        assert_eq!(retry_after_of(&fixture.check("k", &limit, 4).await), 50 * SECOND);
        fixture.clock.advance(40 * SECOND);
        assert_eq!(fixture.check("k", &limit, 1).await.remaining, 2);
    }

    /// A refund with a time is exact for the newest entries of a long log, and changes nothing for older ones.
    a_refund_with_a_time_reaches_the_newest_entries_of_a_log(fixture) {
        let limit = Limit::sliding_log(10_000, MINUTE).expect("valid");
        let mut times = Vec::new();
        for _ in 0..REFUND_REACH + 100 {
            times.push(fixture.clock.now());
            fixture.check("k", &limit, 2).await;
            fixture.clock.advance(MICROSECOND);
        }
        let used = 2 * (REFUND_REACH as u64 + 100);
        let older = fixture.refund("k", &limit, 2, Some(times[99])).await;
        assert_eq!(older.remaining, 10_000 - used, "beyond the reach");
        let oldest = fixture.refund("k", &limit, 1, Some(times[100])).await;
        assert_eq!(oldest.remaining, 10_000 - used + 1);
        let newest = fixture.refund("k", &limit, 2, Some(times[1_000])).await;
        assert_eq!(newest.remaining, 10_000 - used + 3);
        fixture.clock.set(times[100].plus(MINUTE));
        assert_eq!(fixture.peek("k", &limit, 0).await.remaining, 10_000 - used + 3 + 201, "that entry has one unit left");
    }

    /// The largest debt drains exactly, also at the fastest rate, where products are far above 2^53.
    the_largest_debt_drains_exactly(fixture) {
        let fast = Limit::token_bucket(999_999_999, Duration::from_millis(1)).expect("valid");
        fixture.charge("k", &fast, LARGEST).await;
        let retry_after = retry_after_of(&fixture.check("k", &fast, 1).await);
        for early in [3_000, 1_000, 2, 1] {
            fixture.clock.set(START.plus(retry_after).minus(Duration::from_micros(early)));
            assert_eq!(retry_after_of(&fixture.check("k", &fast, 1).await), Duration::from_micros(early));
        }
        fixture.clock.set(START.plus(retry_after));
        assert!(fixture.check("k", &fast, 1).await.passes);
        fixture.clock.set(START.plus(Duration::from_secs(50 * 365 * 86_400)));
        assert_eq!(fixture.peek("k", &fast, 1).await.remaining, 999_999_999);
    }

    /// An overdraft rule admits while any unit remains, charges the full cost, and then waits for one whole unit.
    overdraft_admits_while_any_unit_remains(fixture) {
        for limit in limits(10, MINUTE) {
            fixture.reset_clock();
            let terms = |cost: u32| Terms { admission: Admission::Overdraft, ..Terms::new(limit, Cost::from(cost)) };
            let answer = fixture.decide(Operation::Check, &[("k", terms(9))], 1).await[0];
            assert_eq!((answer.charged, answer.available), (1, 1), "{limit:?}");
            let answer = fixture.decide(Operation::Check, &[("k", terms(1_000))], 1).await[0];
            assert_eq!((answer.charged, answer.available), (1, -999), "{limit:?}: more than the capacity, into debt");
            let denied = fixture.decide(Operation::Check, &[("k", terms(5))], 1).await[0];
            assert_eq!((denied.charged, denied.available), (0, -999), "{limit:?}");
            let retry_after = retry_after_of(&denied.share(&terms(5), 0, 0));
            fixture.clock.advance(retry_after);
            assert_eq!(fixture.decide(Operation::Check, &[("k", terms(5))], 1).await[0].charged, 1, "{limit:?}");
        }
    }

    /// All tiers are charged or none: a denial leaves every other tier unchanged.
    a_denied_check_leaves_every_tier_unchanged(fixture) {
        let small = Limit::sliding_log(1, MINUTE).expect("valid");
        let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let mut tiers: Vec<(&str, Terms)> = (names.into_iter().zip(limits(10, MINUTE).into_iter().cycle()))
            .map(|(name, limit)| (name, Terms::new(limit, Cost::from(2))))
            .collect();
        tiers[5].1 = Terms::new(small, Cost::ONE);
        let first = fixture.decide(Operation::Check, &tiers, 1).await;
        assert!(first.iter().all(|answer| answer.charged == 1));
        for _ in 0..10 {
            let denied = fixture.decide(Operation::Check, &tiers, 1).await;
            for (index, answer) in denied.iter().enumerate() {
                let expected = if index == 5 { (0, 0, 0) } else { (1, 0, 8) };
                assert_eq!((answer.passes, answer.charged, answer.available), expected, "tier {index}");
                assert_eq!(answer.retry.is_some(), index == 5);
            }
        }
    }

    /// A shadow tier never denies. It is charged only if the request passes and the tier would have allowed it.
    a_shadow_tier_never_denies_and_is_not_charged_for_a_denied_check(fixture) {
        for limit in limits(3, MINUTE) {
            let enforced = Terms::new(limit, Cost::ONE);
            let shadow = |amount| {
                let limit = Limit::new(limit.algorithm(), amount, MINUTE).expect("valid");
                Terms { mode: Mode::Shadow, ..Terms::new(limit, Cost::ONE) }
            };
            let tiers = [("enforced", enforced), ("tight", shadow(2)), ("wide", shadow(9))];
            let answers = fixture.decide(Operation::Check, &tiers, 5).await;
            let charged: Vec<_> = answers.iter().map(|answer| (answer.passes, answer.charged, answer.available)).collect();
            assert_eq!(charged, [(3, 3, 0), (2, 2, 0), (5, 3, 6)], "{limit:?}");
            assert!(answers[1].retry.is_some() && answers[2].retry.is_none());
        }
    }

    /// A peek changes nothing and returns what a check would.
    a_peek_returns_what_a_check_would(fixture) {
        for limit in limits(3, MINUTE) {
            for left in [3, 2, 1] {
                for _ in 0..3 {
                    let peeked = fixture.peek("k", &limit, 1).await;
                    assert_eq!((peeked.passes, peeked.remaining), (true, left), "{limit:?}");
                }
                fixture.check("k", &limit, 1).await;
            }
            let (peeked, checked) = (fixture.peek("k", &limit, 1).await, fixture.check("k", &limit, 1).await);
            assert_eq!(peeked, checked, "{limit:?}");
        }
    }

    /// A check with a count of n equals n single requests.
    a_count_of_n_equals_n_single_requests(fixture) {
        for limit in limits(10, MINUTE) {
            let terms = Terms::new(limit, Cost::from(3));
            let together = fixture.decide(Operation::Check, &[("together", terms)], 5).await[0];
            for index in 0..5 {
                let apart = fixture.check("apart", &limit, 3).await;
                assert_eq!(together.share(&terms, index, together.charged), apart, "{limit:?} request {index}");
            }
        }
    }

    /// A clock set back adds at most one quota, and denies for at most two windows.
    a_clock_set_back_grants_at_most_one_quota_and_denies_for_at_most_two_windows(fixture) {
        for limit in limits(5, MINUTE) {
            for back in [MICROSECOND, SECOND, MINUTE, 2 * MINUTE, 1000 * MINUTE] {
                fixture.reset_clock();
                fixture.reset("k", &limit).await;
                assert_eq!(fixture.admitted_now("k", &limit).await, 5);
                fixture.clock.set(START.minus(back));
                let admitted = fixture.admitted_now("k", &limit).await;
                let quota = if back <= MINUTE { 0 } else { 5 };
                assert_eq!(admitted, quota, "{limit:?} set back by {back:?}");
                let retry_after = retry_after_of(&fixture.check("k", &limit, 1).await);
                assert!(retry_after <= 2 * MINUTE, "{limit:?} set back by {back:?}: {retry_after:?}");
                fixture.clock.advance(retry_after);
                assert!(fixture.check("k", &limit, 1).await.passes);
            }
        }
    }

    /// Each algorithm admits as much as documented in one window, and adversarial callers get no more.
    an_adversarial_caller_gets_exactly_the_documented_bound(fixture) {
        let (amount, window) = (100, SECOND);
        for limit in limits(amount, window) {
            // All of one window in its last microsecond, then as fast as possible for one window.
            fixture.clock.set(Timestamp::from_micros(1_794_765_441_999_999));
            let mut admitted = fixture.admitted_now("k", &limit).await;
            for _ in 0..999 {
                fixture.clock.advance(Duration::from_millis(1));
                admitted += fixture.admitted_now("k", &limit).await;
            }
            fixture.clock.advance(Duration::from_micros(999));
            admitted += fixture.admitted_now("k", &limit).await;
            let bound = match limit.algorithm() {
                Algorithm::FixedWindow => 2 * amount,
                Algorithm::SlidingLog => amount,
                Algorithm::SlidingCounter => 2 * amount - 1,
                Algorithm::TokenBucket => 2 * amount - 1, // the last one is due a microsecond later
                Algorithm::Concurrency => unreachable!("it has no window"),
            };
            assert_eq!(admitted, bound, "{limit:?}");
        }
    }

    /// Windows may be shifted, so that not all of them end at the same time.
    a_fixed_window_can_be_shifted_by_its_phase(fixture) {
        let limit = Limit::fixed_window(1, MINUTE).expect("valid");
        let moved = limit.with_phase(Duration::from_secs(50)).expect("valid");
        let (share, moved_share) = (fixture.check("k", &limit, 1).await, fixture.check("moved", &moved, 1).await);
        assert_eq!(share.reset_after, Duration::from_micros(38_200_161), "to the full minute");
        assert_eq!(moved_share.reset_after, Duration::from_micros(28_200_161), "to second 50");
        assert!(!fixture.check("k", &moved, 1).await.passes, "the usage is kept when the window is shifted");
    }

    /// A calendar window ends at the civil edge, also on days of 23 and 25 hours, in a zone that skips a day, in leap years, and with
    /// an anchor that a short month does not have.
    a_calendar_window_ends_at_the_civil_edge(fixture) {
        use CalendarUnit::{Day, Month, Quarter, Week, Year};
        let day = |day| Some(Anchor::DayOfMonth(day));
        let sunday = Some(Anchor::Weekday(Weekday::Sunday));
        // start and end in seconds since the epoch, and the same in UTC
        let table = [
            (Month, "Europe/Berlin", None, 1_793_487_600, 1_796_079_600), // 2026-10-31 23:00 to 2026-11-30 23:00
            (Month, "UTC", None, 1_832_976_000, 1_835_481_600), // 2028-02-01 00:00 to 2028-03-01 00:00
            (Month, "UTC", day(31), 1_801_353_600, 1_803_772_800), // 2027-01-31 00:00 to 2027-02-28 00:00
            (Month, "UTC", day(31), 1_803_772_800, 1_806_451_200), // 2027-02-28 00:00 to 2027-03-31 00:00
            (Month, "UTC", day(30), 1_835_395_200, 1_837_987_200), // 2028-02-29 00:00 to 2028-03-30 00:00
            (Day, "Europe/Berlin", None, 1_806_188_400, 1_806_271_200), // 2027-03-27 23:00 to 2027-03-28 22:00
            (Day, "Europe/Berlin", None, 1_824_933_600, 1_825_023_600), // 2027-10-30 22:00 to 2027-10-31 23:00
            (Day, "Pacific/Apia", None, 1_325_152_800, 1_325_239_200), // 2011-12-29 10:00 to 2011-12-30 10:00
            (Day, "Pacific/Apia", None, 1_325_239_200, 1_325_325_600), // 2011-12-30 10:00 to 2011-12-31 10:00
            (Month, "Pacific/Apia", None, 1_322_733_600, 1_325_325_600), // 2011-12-01 10:00 to 2011-12-31 10:00
            (Week, "America/New_York", None, 1_794_200_400, 1_794_805_200), // 2026-11-09 05:00 to 2026-11-16 05:00
            (Week, "America/New_York", sunday, 1_793_505_600, 1_794_114_000), // 2026-11-01 04:00 to 2026-11-08 05:00
            (Quarter, "Asia/Kolkata", day(15), 1_792_002_600, 1_799_951_400), // 2026-10-14 18:30 to 2027-01-14 18:30
            (Year, "Asia/Kolkata", None, 1_798_741_800, 1_830_277_800), // 2026-12-31 18:30 to 2027-12-31 18:30
        ];
        for (unit, zone, anchor, start, end) in table {
            let limit = ten_per(unit, zone, anchor);
            let (start, end) = (at_second(start), at_second(end));
            fixture.reset("k", &limit).await;
            fixture.clock.set(start.minus(MICROSECOND));
            assert_eq!(fixture.check("k", &limit, 10).await.reset_after, MICROSECOND, "{limit:?} before {start:?}");
            fixture.clock.set(start);
            let share = fixture.check("k", &limit, 4).await;
            let length = Duration::from_micros(end.as_micros() - start.as_micros());
            assert_eq!((share.remaining, share.reset_after), (6, length), "{limit:?} from {start:?}");
            assert_eq!(limit.window_at(start), length);
            fixture.clock.set(end.minus(MICROSECOND));
            assert_eq!(retry_after_of(&fixture.check("k", &limit, 7).await), MICROSECOND, "{limit:?} until {end:?}");
            assert_eq!(fixture.check("k", &limit, 6).await.remaining, 0);
            fixture.clock.set(end);
            assert_eq!(fixture.check("k", &limit, 1).await.remaining, 9, "{limit:?} from {end:?}");
        }
    }

    /// The store's clock selects the period, no matter which one the process expects: after jumps of many periods in both directions.
    the_clock_of_the_store_selects_the_calendar_period(fixture) {
        let limits = [
            ten_per(CalendarUnit::Day, "Europe/Berlin", None),
            ten_per(CalendarUnit::Month, "America/New_York", Some(Anchor::DayOfMonth(31))),
        ];
        for years in [0, 7, 1, 20, 3] {
            fixture.clock.set(START.plus(years * 365 * 24 * 60 * MINUTE));
            for (key, limit) in ["day", "month"].into_iter().zip(&limits) {
                fixture.reset(key, limit).await;
                for left in (7..10).rev() {
                    assert_eq!(fixture.check(key, limit, 1).await.remaining, left, "{limit:?} after {years} years");
                }
            }
        }
    }

    /// A clock that is set back across the edge of a calendar period continues the period of the last charge. One that is set back
    /// further starts again.
    a_clock_set_back_across_a_calendar_edge_stays_in_the_period_of_the_last_charge(fixture) {
        let month = ten_per(CalendarUnit::Month, "UTC", None);
        let (february, march, april) = (at_second(FEBRUARY), at_second(MARCH), at_second(APRIL));
        fixture.clock.set(february.plus(SECOND));
        fixture.check("k", &month, 4).await;
        fixture.clock.set(february.minus(SECOND));
        let share = fixture.check("k", &month, 1).await;
        let until_march = Duration::from_micros(march.as_micros() - february.as_micros()) + SECOND;
        assert_eq!((share.remaining, share.reset_after), (5, until_march));
        fixture.clock.set(march.minus(MICROSECOND));
        assert_eq!(fixture.peek("k", &month, 1).await.remaining, 5);
        fixture.clock.set(march);
        assert_eq!(fixture.peek("k", &month, 1).await.remaining, 10);
        fixture.clock.set(april);
        fixture.check("k", &month, 4).await;
        fixture.clock.set(february.minus(SECOND));
        assert_eq!(fixture.check("k", &month, 1).await.remaining, 9, "the charge is two periods ahead");
    }

    /// Another zone, anchor or unit keeps the units that were used in the period that contains the present.
    a_changed_calendar_keeps_the_usage_of_the_period(fixture) {
        let berlin = ten_per(CalendarUnit::Month, "Europe/Berlin", None);
        let others = [
            ten_per(CalendarUnit::Month, "America/New_York", None),
            ten_per(CalendarUnit::Month, "Europe/Berlin", Some(Anchor::DayOfMonth(15))),
            ten_per(CalendarUnit::Month, "Europe/Berlin", Some(Anchor::DayOfMonth(16))),
            ten_per(CalendarUnit::Quarter, "Europe/Berlin", None),
            ten_per(CalendarUnit::Year, "Asia/Kolkata", None),
            ten_per(CalendarUnit::Week, "Europe/Berlin", None),
            ten_per(CalendarUnit::Day, "UTC", None),
            Limit::fixed_window(10, 24 * 60 * MINUTE).expect("valid"),
        ];
        let second = 1_000_000;
        for other in others {
            for (from, to) in [(berlin, other), (other, berlin)] {
                fixture.reset_clock();
                fixture.reset("k", &from).await;
                fixture.check("k", &from, 3).await;
                fixture.clock.advance(SECOND);
                assert_eq!(fixture.peek("k", &to, 1).await.remaining, 7, "{from:?} to {to:?}");
                let share = fixture.check("k", &to, 2).await;
                assert_eq!(share.remaining, 5, "{from:?} to {to:?}");
                // the charge has converted them: they count until the end of the new period or longer
                let end = START.as_micros() + second + u64::try_from(share.reset_after.as_micros()).expect("fits");
                let to_end = match to.calendar() {
                    Some(calendar) => reference_calendar::edges(calendar, START.as_micros() + second)[1],
                    None => end,
                };
                assert!(end >= to_end, "{from:?} to {to:?}: until {end}, the period ends at {to_end}");
                fixture.clock.set(Timestamp::from_micros(end));
                assert_eq!(fixture.peek("k", &to, 1).await.remaining, 10, "{from:?} to {to:?}");
            }
        }
        // without another charge, in periods of the same unit: until the later one ends, however late in its period the charge was
        let from = ten_per(CalendarUnit::Month, "UTC", Some(Anchor::DayOfMonth(31)));
        let to = ten_per(CalendarUnit::Month, "UTC", None);
        fixture.clock.set(at_second(MARCH));
        fixture.reset("k", &from).await;
        fixture.check("k", &from, 3).await;
        fixture.clock.set(at_second(APRIL).minus(MICROSECOND));
        assert_eq!(fixture.peek("k", &to, 1).await.remaining, 7);
        fixture.clock.set(at_second(APRIL));
        assert_eq!(fixture.peek("k", &to, 1).await.remaining, 10);
    }

    /// Calendar tiers and ordinary ones are charged together or not at all, also if a batch repeats them.
    calendar_tiers_and_others_are_charged_together(fixture) {
        let month = ten_per(CalendarUnit::Month, "Europe/Berlin", None);
        let day = ten_per(CalendarUnit::Day, "America/New_York", None);
        let tier = |key: &str, limit: Limit| Tier {
            key: Key::without_rule(key).expect("short"),
            terms: Terms::new(limit, Cost::from(2)),
        };
        let tiers = || {
            let mut tiers: Vec<Tier> =
                ["a", "b", "c", "d"].into_iter().zip(limits(7, MINUTE)).map(|(key, limit)| tier(key, limit)).collect();
            tiers.extend([tier("month", month), tier("day", day)]);
            tiers
        };
        let checks: Vec<Check> =
            (0..5).map(|_| Check::new(Operation::Check, tiers()).expect("valid")).collect();
        let decided = decide(&fixture.store, &checks, None).await.expect("an answer");
        for (number, check) in decided.iter().enumerate() {
            let granted = u32::from(number < 3);
            assert!(check.answers.iter().all(|answer| answer.charged == granted), "check {number}: {check:?}");
        }
        assert_eq!(fixture.peek("month", &month, 1).await.remaining, 4);
        assert_eq!(fixture.peek("day", &day, 1).await.remaining, 4);
    }

    /// A refund with the time of a charge in an earlier calendar period changes nothing.
    a_refund_of_an_earlier_calendar_period_changes_nothing(fixture) {
        let month = ten_per(CalendarUnit::Month, "UTC", None);
        fixture.clock.set(at_second(MARCH).minus(SECOND));
        let charged = fixture.clock.now();
        fixture.check("k", &month, 5).await;
        assert_eq!(fixture.refund("k", &month, 1, Some(charged)).await.remaining, 6);
        fixture.clock.set(at_second(MARCH));
        let first = fixture.clock.now();
        fixture.check("k", &month, 5).await;
        fixture.clock.advance(SECOND);
        assert_eq!(fixture.refund("k", &month, 1, Some(charged)).await.remaining, 5);
        assert_eq!(fixture.refund("k", &month, 1, Some(first)).await.remaining, 6);
        let span = match fixture.inspect("k", &month).await.snapshot {
            Snapshot::FixedWindow(span) => span,
            other => panic!("{other:?}"),
        };
        assert_eq!(span, Span { from_us: MARCH * 1_000_000, until_us: APRIL * 1_000_000, units: 4 });
    }

    /// A log that is never empty stays exact, no matter how much it has counted before.
    a_log_that_is_never_empty_stays_exact(fixture) {
        let limit = Limit::sliding_log(200_000, MINUTE).expect("valid");
        for step in 0..400 {
            let share = fixture.check("k", &limit, 60_000).await;
            let counting = (step + 1).min(3);
            assert_eq!((share.passes, share.remaining), (true, 200_000 - counting * 60_000), "step {step}");
            assert_eq!(fixture.peek("k", &limit, 1).await.remaining, share.remaining, "step {step}");
            fixture.clock.advance(Duration::from_secs(25));
        }
    }

    /// Checks of one batch include the charges of earlier ones.
    checks_of_a_batch_see_earlier_charges(fixture) {
        for limit in limits(3, MINUTE) {
            let terms = Terms::new(limit, Cost::from(2));
            let tier = || vec![Tier { key: Key::without_rule("k").expect("short"), terms }];
            let checks: Vec<Check> = [Operation::Check, Operation::Check, Operation::Refund { at: None }, Operation::Check]
                .map(|operation| Check::new(operation, tier()).expect("valid")).into();
            let decided = decide(&fixture.store, &checks, None).await.expect("an answer");
            let charged: Vec<_> = decided.iter().map(|check| (check.answers[0].charged, check.answers[0].available)).collect();
            assert_eq!(charged, [(1, 1), (0, 1), (0, 3), (1, 1)], "{limit:?}");
        }
    }

    /// An inspection shows the usage, when it was charged and until when it counts, and changes nothing.
    an_inspection_shows_the_usage(fixture) {
        for limit in limits(10, MINUTE) {
            fixture.reset_clock();
            let inspect = async || fixture.inspect("k", &limit).await;
            let us = |seconds: u64| START.as_micros() + seconds * 1_000_000;
            // A minute began 21.799839 s earlier.
            let minute = START.as_micros() - 21_799_839;
            let units = |snapshot: &Snapshot| match snapshot {
                Snapshot::FixedWindow(span) => span.units,
                Snapshot::SlidingLog(charges) => charges.iter().map(|charge| charge.units).sum(),
                Snapshot::SlidingCounter { previous, current, .. } => previous.units + current.units,
                Snapshot::TokenBucket(level) => level.whole,
                Snapshot::Concurrency(span) => span.units,
            };
            assert_eq!(units(&inspect().await.snapshot), 0, "{limit:?}");
            fixture.check("k", &limit, 2).await;
            fixture.clock.advance(3 * SECOND);
            fixture.check("k", &limit, 3).await;
            fixture.check("k", &limit, 6).await;
            fixture.clock.advance(3 * SECOND);
            let before = fixture.peek("k", &limit, 1).await;
            let seen = inspect().await;
            assert_eq!(seen.at, fixture.clock.now());
            let span = |from_us, until_us, units| Span { from_us, until_us, units };
            match seen.snapshot {
                Snapshot::FixedWindow(window) => assert_eq!(window, span(minute, minute + 60_000_000, 5)),
                Snapshot::SlidingLog(charges) => {
                    assert_eq!(charges, [span(us(0), us(60), 2), span(us(3), us(63), 3)]);
                }
                Snapshot::SlidingCounter { previous, current, ends_us } => {
                    assert_eq!(previous, span(minute - 60_000_000, minute, 0));
                    assert_eq!((current, ends_us), (span(minute, minute + 60_000_000, 5), minute + 120_000_000));
                }
                // One unit per six seconds.
                Snapshot::TokenBucket(level) => assert_eq!((level.whole, level.part), (4, 0)),
                Snapshot::Concurrency(_) => unreachable!("it has no window"),
            }
            assert_eq!(fixture.peek("k", &limit, 1).await, before);
        }
    }

    /// An inspection of a long log shows the newest charges, also after its ring has wrapped around.
    an_inspection_shows_the_newest_charges(fixture) {
        let (limit, count) = (Limit::sliding_log(3_000, MINUTE).expect("a valid limit"), 2_500);
        for number in 0..count {
            fixture.check("k", &limit, 1 + number % 3).await;
            fixture.clock.advance(Duration::from_millis(50));
        }
        let look = fixture.inspect("k", &limit).await;
        let Snapshot::SlidingLog(charges) = look.snapshot else { panic!("{look:?}") };
        assert_eq!(charges.len(), MAX_CHARGES);
        for (charge, number) in charges.iter().zip(count - MAX_CHARGES as u64..) {
            let from_us = START.as_micros() + number * 50_000;
            assert_eq!(*charge, Span { from_us, until_us: from_us + 60_000_000, units: 1 + number % 3 });
        }
    }

    /// A call that arrives at a remote store after its deadline on the store's clock charges nothing and reports it. The memory
    /// store has no deadline.
    a_call_past_its_deadline_charges_nothing(fixture) {
        if matches!(fixture.store, Store::Memory(_)) {
            return;
        }
        for limit in limits(3, MINUTE) {
            let tier = Tier { key: Key::without_rule("k").expect("short"), terms: Terms::new(limit, Cost::ONE) };
            let check = Check::new(Operation::Check, vec![tier]).expect("valid");
            let late = decide(&fixture.store, std::slice::from_ref(&check), Some(Deadline::Store(fixture.clock.now().minus(MICROSECOND)))).await;
            assert_eq!(late, Err(sluicegate::StoreError::Late(fixture.clock.now())));
            assert_eq!(fixture.peek("k", &limit, 1).await.remaining, 3);
            decide(&fixture.store, &[check], Some(Deadline::Store(fixture.clock.now()))).await.expect("in time");
            assert_eq!(fixture.peek("k", &limit, 1).await.remaining, 2);
        }
    }
}
