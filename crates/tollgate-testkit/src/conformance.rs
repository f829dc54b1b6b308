//! What every store must do, one function a promise; the macro `conformance!` makes each of them a test of a
//! store.
//!
//! Time is moved by hand. A subject is a fresh store of its own for each test.

use std::time::Duration;

use tollgate::{
    Algorithm, Check, Cost, Deadline, Key, Limit, Operation, Retry, Snapshot, Store, Terms, Tier, Timestamp,
};
use tollgate_core::{
    snapshot::{MAX_CHARGES, Span},
    step::{Admission, Mode, Share},
};

use crate::subject::{START, Subject, decide};

const LARGEST: u64 = (1 << 53) - 1;
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const MICROSECOND: Duration = Duration::from_micros(1);

fn limits(amount: u64, window: Duration) -> [Limit; 4] {
    Algorithm::ALL.map(|algorithm| Limit::new(algorithm, amount, window).expect("a valid limit"))
}

fn wait(share: &Share) -> Duration {
    match share.retry {
        Some(Retry::After(wait)) => wait,
        other => panic!("expected a wait, found {other:?}"),
    }
}

/// Promises that take three quarters of all calls.
const LONG: [&str; 2] = ["a_bucket_does_not_drift", "windows_end_on_time_under_constant_traffic"];

macro_rules! promises {
    ($($(#[$doc:meta])* $name:ident($subject:ident) $body:block)*) => {
        $($(#[$doc])* pub async fn $name($subject: &Subject) $body)*

        /// Checks every promise in turn, each on a subject that `make` makes for it: for stores that take long to start.
        pub async fn all(mut make: impl AsyncFnMut() -> Subject) {
            $($name(&make().await).await;)*
        }

        /// Checks every promise in turn except the long ones, for stores whose every call takes a round trip.
        pub async fn all_but_long(mut make: impl AsyncFnMut() -> Subject) {
            $(if !LONG.contains(&stringify!($name)) {
                $name(&make().await).await;
            })*
        }

        /// Makes a test of every promise, for the store that `$subject().await` makes.
        #[macro_export]
        macro_rules! conformance {
            ($make:expr) => {
                $(#[tokio::test]
                async fn $name() {
                    $crate::conformance::$name(&$make.await).await;
                })*
            };
        }
    };
}

promises! {
    /// Allow within the limit, refuse the next.
    what_fits_passes_and_the_next_is_refused(subject) {
        for limit in limits(5, MINUTE) {
            for _ in 0..5 {
                assert!(subject.check("k", &limit, 1).await.passes, "{limit:?}");
            }
            assert!(!subject.check("k", &limit, 1).await.passes, "{limit:?}");
        }
    }

    /// Remaining counts down, by the cost.
    remaining_counts_down(subject) {
        for limit in limits(10, MINUTE) {
            for (cost, left) in [(1, 9), (3, 6), (0, 6), (6, 0), (0, 0)] {
                assert_eq!(subject.check("k", &limit, cost).await.remaining, left, "{limit:?}");
            }
        }
    }

    /// Once everything has left, all of it is there again.
    everything_is_back_after_the_reset_wait(subject) {
        for limit in limits(5, MINUTE) {
            subject.restart_clock();
            let reset_after = subject.check("k", &limit, 5).await.reset_after;
            subject.clock.advance(reset_after - MICROSECOND);
            assert!(subject.peek("k", &limit, 0).await.remaining < 5 || limit.algorithm() == Algorithm::TokenBucket);
            assert!(subject.peek("k", &limit, 0).await.reset_after == MICROSECOND);
            subject.clock.advance(MICROSECOND);
            assert_eq!(subject.peek("k", &limit, 0).await.remaining, 5);
            assert_eq!(subject.admitted_now("k", &limit).await, 5, "{limit:?}");
        }
    }

    /// A reset restores the full quota, of that counter alone.
    a_reset_restores_the_full_quota(subject) {
        for limit in limits(5, MINUTE) {
            subject.check("k", &limit, 5).await;
            subject.check("other", &limit, 5).await;
            assert_eq!(subject.reset("k", &limit).await, 1);
            assert_eq!(subject.reset("k", &limit).await, 0, "it is gone already");
            assert_eq!(subject.admitted_now("k", &limit).await, 5);
            assert_eq!(subject.admitted_now("other", &limit).await, 0);
        }
    }

    /// Users do not affect each other.
    one_users_use_is_no_other_users(subject) {
        for limit in limits(2, MINUTE) {
            assert_eq!(subject.admitted_now("a", &limit).await, 2);
            assert_eq!(subject.admitted_now("b", &limit).await, 2);
            assert_eq!(subject.admitted_now("a", &limit).await, 0);
        }
    }

    /// The same key under another algorithm is another counter.
    another_algorithm_starts_fresh(subject) {
        for limit in limits(2, MINUTE) {
            assert_eq!(subject.admitted_now("k", &limit).await, 2);
        }
    }

    /// Waiting exactly as long as told is admitted; a microsecond less is not. Also at odd rates, at the ends of
    /// the range, and for costs above one.
    waiting_as_told_is_admitted_and_a_microsecond_less_is_not(subject) {
        let table = [
            (3, MINUTE), (7, MINUTE), (1, Duration::from_millis(1)), (9_973, Duration::from_micros(1_000_003)),
            (1_000_000, Duration::from_secs(10 * 365 * 86_400)), (1_000_000, Duration::from_millis(1)),
        ];
        for (amount, window) in table {
            for limit in limits(amount, window) {
                for cost in [1, amount / 2 + 1, amount] {
                    subject.restart_clock();
                    subject.reset("k", &limit).await;
                    subject.check("k", &limit, amount - amount / 3).await;
                    subject.clock.advance(Duration::from_micros(137));
                    subject.check("k", &limit, amount / 3).await;
                    let refused = subject.check("k", &limit, cost).await;
                    if refused.passes {
                        continue; // what was used has drained within those 137 us
                    }
                    let told = wait(&refused);
                    subject.clock.advance(told - MICROSECOND);
                    let early = subject.peek("k", &limit, cost).await;
                    assert!(!early.passes, "{limit:?} cost {cost} came {told:?} less a microsecond later");
                    assert_eq!(wait(&early), MICROSECOND, "{limit:?} cost {cost}");
                    subject.clock.advance(MICROSECOND);
                    assert!(subject.check("k", &limit, cost).await.passes, "{limit:?} cost {cost} waited {told:?}");
                }
            }
        }
    }

    /// A caller who keeps trying while refused gets in as soon as one who does not.
    who_keeps_trying_gets_in_on_time(subject) {
        for limit in limits(3, SECOND) {
            subject.restart_clock();
            subject.check("k", &limit, 3).await;
            let told = wait(&subject.check("k", &limit, 1).await);
            let step = Duration::from_millis(3);
            for _ in 0..60 {
                subject.clock.advance(step);
                assert!(!subject.check("k", &limit, 1).await.passes, "{limit:?}");
            }
            subject.clock.advance(told - 60 * step);
            assert!(subject.check("k", &limit, 1).await.passes, "{limit:?}");
        }
    }

    /// What has expired refuses nobody.
    what_has_expired_refuses_nobody(subject) {
        for limit in limits(4, SECOND) {
            for _ in 0..20 {
                assert_eq!(subject.admitted_now("k", &limit).await, 4, "{limit:?}");
                subject.clock.advance(2 * SECOND);
            }
        }
    }

    /// A thousand requests in one microsecond count as a thousand.
    requests_in_one_microsecond_count_apart(subject) {
        for limit in limits(1_000, MINUTE) {
            for left in (0..1_000).rev() {
                assert_eq!(subject.check("k", &limit, 1).await.remaining, left, "{limit:?}");
            }
            assert!(!subject.check("k", &limit, 1).await.passes);
        }
    }

    /// However long a key was idle, no more than the capacity passes at once.
    idling_never_grants_more_than_the_capacity(subject) {
        for limit in limits(10, Duration::from_secs(10)) {
            subject.restart_clock();
            for idle_ms in [0, 1, 8_900, 9_999, 10_000, 15_000, 20_000, 86_400_000] {
                subject.reset("k", &limit).await;
                subject.check("k", &limit, 1).await;
                subject.clock.advance(Duration::from_millis(idle_ms));
                let admitted = subject.admitted_now("k", &limit).await;
                assert!((9..=10).contains(&admitted), "{limit:?}: {admitted} after {idle_ms} ms");
            }
        }
    }

    /// Nothing drifts: at 7 a minute, a caller who comes as soon as told gets exactly 10,080 in a day beyond
    /// the burst; at 300,000 a second exactly 300,000.
    a_bucket_does_not_drift(subject) {
        let slow = Limit::token_bucket(7, MINUTE).expect("valid").with_burst(2).expect("valid");
        let end = START.plus(Duration::from_secs(86_400));
        let mut admitted = 0;
        while subject.clock.now() <= end {
            admitted += subject.admitted_now("slow", &slow).await;
            let next = subject.peek("slow", &slow, 1).await;
            subject.clock.advance(wait(&next));
        }
        assert_eq!(admitted, 2 + 10_080, "the burst and a day's worth");

        let fast = Limit::token_bucket(300_000, SECOND).expect("valid").with_burst(3).expect("valid");
        subject.restart_clock();
        let mut admitted = subject.admitted_now("fast", &fast).await;
        for _ in 0..5_000 {
            subject.clock.advance(Duration::from_micros(10));
            admitted += subject.admitted_now("fast", &fast).await;
        }
        assert_eq!(admitted, 3 + 15_000, "50 ms at 3 per 10 us");
    }

    /// A steady caller below the rate is never refused: fractions of time are not lost.
    a_steady_caller_below_the_rate_never_starves(subject) {
        let limit = Limit::token_bucket(1, SECOND).expect("valid");
        for _ in 0..100 {
            assert!(subject.check("k", &limit, 1).await.passes);
            subject.clock.advance(Duration::from_millis(600));
            assert!(!subject.check("k", &limit, 1).await.passes);
            subject.clock.advance(Duration::from_millis(400));
        }
    }

    /// A refused cost takes nothing, and less may still pass.
    a_refused_cost_takes_nothing(subject) {
        for limit in limits(10, MINUTE) {
            subject.check("k", &limit, 8).await;
            for _ in 0..3 {
                let refused = subject.check("k", &limit, 5).await;
                assert_eq!((refused.passes, refused.remaining), (false, 2), "{limit:?}");
            }
            assert_eq!(subject.check("k", &limit, 2).await.remaining, 0);
        }
    }

    /// A cost above the capacity never passes, and says so; it takes nothing.
    a_cost_above_the_capacity_never_passes(subject) {
        for limit in limits(10, MINUTE) {
            for cost in [11, LARGEST] {
                let refused = subject.check("k", &limit, cost).await;
                assert_eq!((refused.retry, refused.remaining), (Some(Retry::Never), 10), "{limit:?}");
            }
        }
    }

    /// Windows work down to a millisecond.
    a_window_of_a_millisecond_ends(subject) {
        for limit in limits(3, Duration::from_millis(1)) {
            for _ in 0..50 {
                assert_eq!(subject.admitted_now("k", &limit).await, 3, "{limit:?}");
                assert_eq!(subject.admitted_now("k", &limit).await, 0, "{limit:?}");
                subject.clock.advance(Duration::from_millis(2));
            }
        }
    }

    /// Under constant traffic every window ends on time, and admits as much as the one before.
    windows_end_on_time_under_constant_traffic(subject) {
        for limit in limits(10, SECOND) {
            // the first window is full from its beginning, and so the same state returns with each
            subject.clock.set(Timestamp::from_micros(1_794_765_441_000_000));
            let mut admitted = Vec::new();
            for _ in 0..20 {
                let mut in_window = 0;
                for _ in 0..100 {
                    in_window += u64::from(subject.check("k", &limit, 1).await.passes);
                    subject.clock.advance(Duration::from_millis(10));
                }
                admitted.push(in_window);
            }
            // a sliding counter that was full stays one short: what fades is rounded up
            let expected = if limit.algorithm() == Algorithm::SlidingCounter { 9 } else { 10 };
            assert!(admitted[1..].iter().all(|in_window| *in_window == expected), "{limit:?}: {admitted:?}");
        }
    }

    /// A capacity of one admits exactly one.
    a_capacity_of_one_admits_exactly_one(subject) {
        for limit in limits(1, MINUTE) {
            assert!(subject.check("k", &limit, 1).await.passes);
            for _ in 0..3 {
                assert!(!subject.check("k", &limit, 1).await.passes, "{limit:?}");
            }
        }
    }

    /// A raised amount is there at once, less what was used; a lowered one leaves nothing, and no debt that
    /// was not there.
    a_changed_amount_keeps_what_was_used(subject) {
        for algorithm in Algorithm::ALL {
            let limit = |amount| Limit::new(algorithm, amount, Duration::from_secs(3600)).expect("valid");
            subject.check("k", &limit(10), 10).await;
            assert!(!subject.check("k", &limit(10), 1).await.passes);
            assert_eq!(subject.check("k", &limit(100), 1).await.remaining, 89, "{algorithm}");
            assert_eq!(subject.check("k", &limit(5), 1).await.remaining, 0, "{algorithm}");
            assert_eq!(subject.check("k", &limit(12), 1).await.remaining, 0, "{algorithm}");
            assert!(!subject.check("k", &limit(12), 1).await.passes, "{algorithm}");
        }
    }

    /// A changed window keeps what was used, and a shorter one frees it after one new window at the latest.
    a_changed_window_keeps_what_was_used(subject) {
        for algorithm in Algorithm::ALL {
            subject.restart_clock();
            let limit = |window| Limit::new(algorithm, 10, window).expect("valid");
            let (hour, ten_seconds) = (limit(60 * MINUTE), limit(10 * SECOND));
            subject.check("k", &hour, 7).await;
            assert_eq!(subject.peek("k", &ten_seconds, 1).await.remaining, 3, "{algorithm}");
            assert_eq!(subject.peek("k", &limit(24 * 60 * MINUTE), 1).await.remaining, 3, "{algorithm}");
            let told = wait(&subject.check("k", &ten_seconds, 10).await);
            assert!(told <= 10 * SECOND, "{algorithm}: {told:?}");
            subject.clock.advance(told);
            assert!(subject.check("k", &ten_seconds, 10).await.passes, "{algorithm}");
            assert_eq!(subject.peek("k", &hour, 1).await.remaining, 0, "{algorithm}: carried back");
        }
    }

    /// Cost 0 reads, and is refused only in debt.
    cost_zero_is_refused_only_in_debt(subject) {
        for limit in limits(10, MINUTE) {
            assert!(subject.check("k", &limit, 0).await.passes);
            subject.check("k", &limit, 10).await;
            assert!(subject.check("k", &limit, 0).await.passes, "{limit:?}: nothing left is no debt");
            subject.charge("k", &limit, 1).await;
            assert!(!subject.check("k", &limit, 0).await.passes, "{limit:?}");
        }
    }

    /// A charge is taken whatever the limit says, and paid off before anything passes.
    a_charge_goes_into_debt(subject) {
        for limit in limits(10, MINUTE) {
            subject.restart_clock();
            let charged = subject.charge("k", &limit, 25).await;
            assert_eq!((charged.passes, charged.remaining), (true, 0), "{limit:?}");
            let told = wait(&subject.check("k", &limit, 1).await);
            subject.clock.advance(told);
            assert!(subject.check("k", &limit, 1).await.passes, "{limit:?}");
            if limit.algorithm() == Algorithm::TokenBucket {
                assert_eq!(told, Duration::from_secs(16 * 6), "16 units too many, one leaves every 6 s");
            }
        }
    }

    /// A refund gives back at most what counts.
    a_refund_gives_back_at_most_what_counts(subject) {
        for limit in limits(10, MINUTE) {
            assert_eq!(subject.refund("k", &limit, 5, None).await.remaining, 10, "{limit:?}: nothing to give back");
            subject.check("k", &limit, 6).await;
            assert_eq!(subject.refund("k", &limit, 2, None).await.remaining, 6, "{limit:?}");
            assert_eq!(subject.refund("k", &limit, LARGEST, None).await.remaining, 10, "{limit:?}");
            assert_eq!(subject.admitted_now("k", &limit).await, 10, "{limit:?}");
        }
    }

    /// A refund of one charge is exact, and does nothing once its window has passed.
    a_refund_of_one_charge_is_exact(subject) {
        for limit in limits(10, MINUTE) {
            subject.restart_clock();
            subject.check("k", &limit, 3).await;
            let first = subject.clock.now();
            subject.clock.advance(Duration::from_millis(5));
            subject.check("k", &limit, 4).await;
            let before = subject.peek("k", &limit, 0).await.remaining;
            assert_eq!(subject.refund("k", &limit, 3, Some(first)).await.remaining, before + 3, "{limit:?}");
            subject.clock.advance(2 * MINUTE);
            subject.check("k", &limit, 5).await;
            let before = subject.peek("k", &limit, 0).await.remaining;
            assert_eq!(subject.refund("k", &limit, 3, Some(first)).await.remaining, before, "{limit:?}: too late");
        }
        let log = Limit::sliding_log(10, MINUTE).expect("valid");
        subject.reset("k", &log).await;
        subject.check("k", &log, 2).await;
        let charged_at = subject.clock.now();
        subject.clock.advance(MICROSECOND);
        let missed = subject.refund("k", &log, 2, Some(subject.clock.now())).await;
        assert_eq!(missed.remaining, 8, "nothing was charged at that time");
        assert_eq!(subject.refund("k", &log, 5, Some(charged_at)).await.remaining, 10, "only what was charged then");
    }

    /// Numbers at the end of the range neither wrap nor lose a unit.
    the_largest_numbers_are_exact(subject) {
        for limit in limits(10, MINUTE) {
            subject.charge("k", &limit, LARGEST).await;
            subject.charge("k", &limit, LARGEST).await;
            assert_eq!(subject.refund("k", &limit, LARGEST - 1, None).await.remaining, 9, "{limit:?}");
            assert_eq!(subject.refund("k", &limit, LARGEST, None).await.remaining, 10, "{limit:?}");
        }
    }

    /// The largest debt drains to the unit, also at the fastest rate, whose products pass 2^53 by far.
    the_largest_debt_drains_to_the_unit(subject) {
        let fast = Limit::token_bucket(999_999_999, Duration::from_millis(1)).expect("valid");
        subject.charge("k", &fast, LARGEST).await;
        let told = wait(&subject.check("k", &fast, 1).await);
        for early in [3_000, 1_000, 2, 1] {
            subject.clock.set(START.plus(told).minus(Duration::from_micros(early)));
            assert_eq!(wait(&subject.check("k", &fast, 1).await), Duration::from_micros(early));
        }
        subject.clock.set(START.plus(told));
        assert!(subject.check("k", &fast, 1).await.passes);
        subject.clock.set(START.plus(Duration::from_secs(50 * 365 * 86_400)));
        assert_eq!(subject.peek("k", &fast, 1).await.remaining, 999_999_999);
    }

    /// An overdraft rule admits while anything remains, charges in full, and then waits for one whole unit.
    overdraft_admits_while_anything_remains(subject) {
        for limit in limits(10, MINUTE) {
            subject.restart_clock();
            let terms = |cost: u32| Terms { admission: Admission::Overdraft, ..Terms::new(limit, Cost::from(cost)) };
            let answer = subject.ask(Operation::Check, &[("k", terms(9))], 1).await[0];
            assert_eq!((answer.charged, answer.available), (1, 1), "{limit:?}");
            let answer = subject.ask(Operation::Check, &[("k", terms(1_000))], 1).await[0];
            assert_eq!((answer.charged, answer.available), (1, -999), "{limit:?}: more than the capacity, into debt");
            let refused = subject.ask(Operation::Check, &[("k", terms(5))], 1).await[0];
            assert_eq!((refused.charged, refused.available), (0, -999), "{limit:?}");
            let told = wait(&refused.share(&terms(5), 0, 0));
            subject.clock.advance(told);
            assert_eq!(subject.ask(Operation::Check, &[("k", terms(5))], 1).await[0].charged, 1, "{limit:?}");
        }
    }

    /// All tiers are charged or none: a refusal leaves every other tier as it was.
    a_refusal_leaves_every_tier_untouched(subject) {
        let small = Limit::sliding_log(1, MINUTE).expect("valid");
        let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let mut tiers: Vec<(&str, Terms)> = (names.into_iter().zip(limits(10, MINUTE).into_iter().cycle()))
            .map(|(name, limit)| (name, Terms::new(limit, Cost::from(2))))
            .collect();
        tiers[5].1 = Terms::new(small, Cost::ONE);
        let first = subject.ask(Operation::Check, &tiers, 1).await;
        assert!(first.iter().all(|answer| answer.charged == 1));
        for _ in 0..10 {
            let refused = subject.ask(Operation::Check, &tiers, 1).await;
            for (index, answer) in refused.iter().enumerate() {
                let expected = if index == 5 { (0, 0, 0) } else { (1, 0, 8) };
                assert_eq!((answer.passes, answer.charged, answer.available), expected, "tier {index}");
                assert_eq!(answer.retry.is_some(), index == 5);
            }
        }
    }

    /// A shadow tier never refuses; it is charged only when the request passes and it would have let it.
    a_shadow_tier_never_refuses_and_never_pays_for_a_refusal(subject) {
        for limit in limits(3, MINUTE) {
            let enforced = Terms::new(limit, Cost::ONE);
            let shadow = |amount| {
                let limit = Limit::new(limit.algorithm(), amount, MINUTE).expect("valid");
                Terms { mode: Mode::Shadow, ..Terms::new(limit, Cost::ONE) }
            };
            let tiers = [("enforced", enforced), ("tight", shadow(2)), ("wide", shadow(9))];
            let answers = subject.ask(Operation::Check, &tiers, 5).await;
            let charged: Vec<_> = answers.iter().map(|answer| (answer.passes, answer.charged, answer.available)).collect();
            assert_eq!(charged, [(3, 3, 0), (2, 2, 0), (5, 3, 6)], "{limit:?}");
            assert!(answers[1].retry.is_some() && answers[2].retry.is_none());
        }
    }

    /// A peek changes nothing and says what a check would.
    a_peek_says_what_a_check_would(subject) {
        for limit in limits(3, MINUTE) {
            for left in [3, 2, 1] {
                for _ in 0..3 {
                    let peeked = subject.peek("k", &limit, 1).await;
                    assert_eq!((peeked.passes, peeked.remaining), (true, left), "{limit:?}");
                }
                subject.check("k", &limit, 1).await;
            }
            let (peeked, checked) = (subject.peek("k", &limit, 1).await, subject.check("k", &limit, 1).await);
            assert_eq!(peeked, checked, "{limit:?}");
        }
    }

    /// "Up to n" is n requests one after the other.
    many_at_once_are_one_after_the_other(subject) {
        for limit in limits(10, MINUTE) {
            let terms = Terms::new(limit, Cost::from(3));
            let together = subject.ask(Operation::Check, &[("together", terms)], 5).await[0];
            for index in 0..5 {
                let apart = subject.check("apart", &limit, 3).await;
                assert_eq!(together.share(&terms, index, together.charged), apart, "{limit:?} request {index}");
            }
        }
    }

    /// A clock set back adds at most one quota and locks nobody out for longer than two windows.
    a_clock_set_back_grants_one_quota_and_locks_nobody_out(subject) {
        for limit in limits(5, MINUTE) {
            for back in [MICROSECOND, SECOND, MINUTE, 2 * MINUTE, 1000 * MINUTE] {
                subject.restart_clock();
                subject.reset("k", &limit).await;
                assert_eq!(subject.admitted_now("k", &limit).await, 5);
                subject.clock.set(START.minus(back));
                let admitted = subject.admitted_now("k", &limit).await;
                let quota = if back <= MINUTE { 0 } else { 5 };
                assert_eq!(admitted, quota, "{limit:?} set back by {back:?}");
                let told = wait(&subject.check("k", &limit, 1).await);
                assert!(told <= 2 * MINUTE, "{limit:?} set back by {back:?}: {told:?}");
                subject.clock.advance(told);
                assert!(subject.check("k", &limit, 1).await.passes);
            }
        }
    }

    /// Each algorithm admits as much as documented in one window, and adversarial callers get no more.
    an_adversary_gets_the_documented_bound_and_no_more(subject) {
        let (amount, window) = (100, SECOND);
        for limit in limits(amount, window) {
            // all of one window in its last microsecond, then as fast as possible for one window
            subject.clock.set(Timestamp::from_micros(1_794_765_441_999_999));
            let mut admitted = subject.admitted_now("k", &limit).await;
            for _ in 0..999 {
                subject.clock.advance(Duration::from_millis(1));
                admitted += subject.admitted_now("k", &limit).await;
            }
            subject.clock.advance(Duration::from_micros(999));
            admitted += subject.admitted_now("k", &limit).await;
            let bound = match limit.algorithm() {
                Algorithm::FixedWindow => 2 * amount,
                Algorithm::SlidingLog => amount,
                Algorithm::SlidingCounter => 2 * amount - 1,
                Algorithm::TokenBucket => 2 * amount - 1, // the last one is due a microsecond later
            };
            assert_eq!(admitted, bound, "{limit:?}");
        }
    }

    /// Windows may be moved, so that not all of them end in the same instant.
    a_fixed_window_can_be_moved(subject) {
        let limit = Limit::fixed_window(1, MINUTE).expect("valid");
        let moved = limit.with_phase(Duration::from_secs(50)).expect("valid");
        let (share, moved_share) = (subject.check("k", &limit, 1).await, subject.check("moved", &moved, 1).await);
        assert_eq!(share.reset_after, Duration::from_micros(38_200_161), "to the full minute");
        assert_eq!(moved_share.reset_after, Duration::from_micros(28_200_161), "to second 50");
        assert!(!subject.check("k", &moved, 1).await.passes, "what was used before the move is used after it");
    }

    /// A log that is never empty counts on, however much it has counted before.
    a_log_that_is_never_empty_counts_on(subject) {
        let limit = Limit::sliding_log(1_000_000, MINUTE).expect("valid");
        for step in 0..120 {
            let share = subject.check("k", &limit, 300_000).await;
            let counting = (step + 1).min(3);
            assert_eq!((share.passes, share.remaining), (true, 1_000_000 - counting * 300_000), "step {step}");
            assert_eq!(subject.peek("k", &limit, 1).await.remaining, share.remaining, "step {step}");
            subject.clock.advance(Duration::from_secs(25));
        }
    }

    /// Checks of one batch see what the earlier ones charged.
    checks_of_one_batch_see_each_other(subject) {
        for limit in limits(3, MINUTE) {
            let terms = Terms::new(limit, Cost::from(2));
            let tier = || vec![Tier { key: Key::without_rule("k").expect("short"), terms }];
            let checks: Vec<Check> = [Operation::Check, Operation::Check, Operation::Refund { at: None }, Operation::Check]
                .map(|operation| Check::new(operation, tier()).expect("valid")).into();
            let decided = decide(&subject.store, &checks, None).await.expect("an answer");
            let charged: Vec<_> = decided.answers.iter().map(|answers| (answers[0].charged, answers[0].available)).collect();
            assert_eq!(charged, [(1, 1), (0, 1), (0, 3), (1, 1)], "{limit:?}");
        }
    }

    /// A look shows what counts, when it was charged and until when it counts, and changes nothing.
    a_look_shows_what_counts(subject) {
        for limit in limits(10, MINUTE) {
            subject.restart_clock();
            let look = async || subject.inspect("k", &limit).await;
            let us = |seconds: u64| START.as_micros() + seconds * 1_000_000;
            // a minute began 21.799839 s before
            let minute = START.as_micros() - 21_799_839;
            let units = |snapshot: &Snapshot| match snapshot {
                Snapshot::FixedWindow(span) => span.units,
                Snapshot::SlidingLog(charges) => charges.iter().map(|charge| charge.units).sum(),
                Snapshot::SlidingCounter { previous, current, .. } => previous.units + current.units,
                Snapshot::TokenBucket(level) => level.whole,
            };
            assert_eq!(units(&look().await.snapshot), 0, "{limit:?}");
            subject.check("k", &limit, 2).await;
            subject.clock.advance(3 * SECOND);
            subject.check("k", &limit, 3).await;
            subject.check("k", &limit, 6).await;
            subject.clock.advance(3 * SECOND);
            let before = subject.peek("k", &limit, 1).await;
            let seen = look().await;
            assert_eq!(seen.at, subject.clock.now());
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
                // one unit in six seconds
                Snapshot::TokenBucket(level) => assert_eq!((level.whole, level.part), (4, 0)),
            }
            assert_eq!(subject.peek("k", &limit, 1).await, before);
        }
    }

    /// Of a long log, a look shows the newest charges, also once its entries have gone round.
    a_look_shows_the_newest_charges(subject) {
        let (limit, count) = (Limit::sliding_log(3_000, MINUTE).expect("a valid limit"), 2_500);
        for number in 0..count {
            subject.check("k", &limit, 1 + number % 3).await;
            subject.clock.advance(Duration::from_millis(50));
        }
        let look = subject.inspect("k", &limit).await;
        let Snapshot::SlidingLog(charges) = look.snapshot else { panic!("{look:?}") };
        assert_eq!(charges.len(), MAX_CHARGES);
        for (charge, number) in charges.iter().zip(count - MAX_CHARGES as u64..) {
            let from_us = START.as_micros() + number * 50_000;
            assert_eq!(*charge, Span { from_us, until_us: from_us + 60_000_000, units: 1 + number % 3 });
        }
    }

    /// A call that arrives at a remote store after its deadline on the store's clock charges nothing and reports it. The memory
    /// store has no deadline.
    a_call_that_arrives_late_charges_nothing(subject) {
        if matches!(subject.store, Store::Memory(_)) {
            return;
        }
        for limit in limits(3, MINUTE) {
            let tier = Tier { key: Key::without_rule("k").expect("short"), terms: Terms::new(limit, Cost::ONE) };
            let check = Check::new(Operation::Check, vec![tier]).expect("valid");
            let late = decide(&subject.store, std::slice::from_ref(&check), Some(Deadline::Store(subject.clock.now().minus(MICROSECOND)))).await;
            assert_eq!(late, Err(tollgate::StoreError::Late(subject.clock.now())));
            assert_eq!(subject.peek("k", &limit, 1).await.remaining, 3);
            decide(&subject.store, &[check], Some(Deadline::Store(subject.clock.now()))).await.expect("in time");
            assert_eq!(subject.peek("k", &limit, 1).await.remaining, 2);
        }
    }
}
