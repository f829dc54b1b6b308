//! The required behaviour of holds, and of the algorithm `concurrency`.

use std::{
    slice,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use sluicegate::{
    Algorithm, Cost, Limit, Timestamp,
    calendar::CalendarUnit,
    limiter::Operation,
    store::{
        Answer, Check, CounterSnapshot, HoldOperation, HoldOutcome, Key, LiveHolds, Snapshot, Store, Terms,
        Tier,
    },
};
use sluicegate_core::{
    hold::{HOLD_RETENTION, MAX_HOLD_TTL, MAX_LIVE_HOLDS, MAX_RELEASED, OnExpiry},
    snapshot::Span,
    step::{Admission, Mode, Share},
};

use crate::{
    conformance::{
        APRIL, MARCH, MICROSECOND, MINUTE, SECOND, at_second, conformance_tests, limits, retry_after_of,
        ten_per,
    },
    store_fixture::{START, StoreFixture, decide, held},
};

/// The start is 6 hours before the end of a day.
const DAY: Duration = Duration::from_secs(86_400);
const HOLD: HoldOperation = HoldOperation::Hold { ttl: MINUTE };
/// A settlement of one counter, whose excess is bounded by the limit.
const SETTLE: HoldOperation = HoldOperation::Settle { kept: 0, max_excess: None };
const KEEP: HoldOperation = HoldOperation::Settle { kept: 1, max_excess: None };

fn revert(until: Timestamp) -> HoldOperation {
    HoldOperation::Revert { until }
}

fn renew(ttl: Duration) -> HoldOperation {
    HoldOperation::Renew { ttl }
}

fn terms(limit: &Limit, cost: u64) -> Terms {
    Terms::new(*limit, Cost::new(cost).expect("a valid cost"))
}

fn concurrency(amount: u64) -> Limit {
    Limit::concurrency(amount).expect("a valid limit")
}

/// Returns limits of 10 per day that release expired holds, and one of 10 live holds.
fn releasing() -> Vec<Limit> {
    let windowed =
        limits(10, DAY).map(|limit| limit.with_on_expiry(OnExpiry::Release).expect("without a lease"));
    windowed.into_iter().chain([concurrency(10)]).collect()
}

/// Returns limits of 10 per day and one of 10 live holds.
fn all_limits() -> Vec<Limit> {
    limits(10, DAY).into_iter().chain([concurrency(10)]).collect()
}

/// Returns an arbitrary limit of the same algorithm. A token contains no limit, so the store must not use this one.
fn any_limit(limit: &Limit) -> Limit {
    let algorithm = limit.algorithm();
    if algorithm.properties().has_window {
        Limit::new(algorithm, 1, SECOND).expect("a valid limit")
    } else {
        concurrency(1)
    }
}

fn outcomes(answers: &[Answer]) -> Vec<HoldOutcome> {
    answers.iter().map(|answer| answer.hold.outcome).collect()
}

/// A counter that no other test case uses, and with it new ids: those of ended holds are kept.
struct Counter<'a> {
    fixture: &'a StoreFixture,
    key: String,
}

impl StoreFixture {
    /// Returns a new counter, and sets the clock to its start.
    fn new_counter(&self) -> Counter<'_> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        self.reset_clock();
        Counter { fixture: self, key: format!("k{}", NUMBER.fetch_add(1, Ordering::Relaxed)) }
    }
}

impl Counter<'_> {
    /// Applies an operation to one of its holds.
    async fn on_hold(&self, id: &str, limit: &Limit, cost: u64, operation: HoldOperation) -> Answer {
        let terms = match operation {
            HoldOperation::Hold { .. } | HoldOperation::HoldNew { .. } => terms(limit, cost),
            _ => terms(&any_limit(limit), cost),
        };
        self.fixture.decide_held(&[(&self.key, terms)], id, operation).await[0]
    }

    /// Returns the available units.
    async fn left(&self, limit: &Limit) -> i64 {
        self.fixture.decide(Operation::Peek, &[(&self.key, terms(limit, 0))], 1).await[0].available
    }

    async fn check(&self, limit: &Limit, cost: u64) -> Share {
        self.fixture.check(&self.key, limit, cost).await
    }

    async fn peek(&self, limit: &Limit, cost: u64) -> Share {
        self.fixture.peek(&self.key, limit, cost).await
    }

    async fn inspect(&self, limit: &Limit) -> CounterSnapshot {
        self.fixture.inspect(&self.key, limit).await
    }

    async fn reset(&self, limit: &Limit) -> u64 {
        self.fixture.reset(&self.key, limit).await
    }
}

conformance_tests! { hold_conformance:
    /// A hold charges its estimate in all tiers, or in none, and the answer has the store's time of the hold and its expiry.
    a_hold_charges_all_tiers_or_none(fixture) {
        let names = ["a", "b", "c", "d", "e"];
        let mut tiers: Vec<_> = names.into_iter().zip(all_limits()).map(|(name, limit)| (name, terms(&limit, 3))).collect();
        for (id, left) in [("one", 7), ("two", 4), ("three", 1)] {
            for answer in fixture.decide_held(&tiers, id, HOLD).await {
                let hold = answer.hold;
                assert_eq!((answer.passes, answer.charged, answer.available), (1, 1, left), "{id}");
                assert_eq!((hold.outcome, hold.charged, hold.released), (HoldOutcome::Held, 3, 0));
                assert_eq!((hold.at, hold.expires_at), (fixture.clock.now(), fixture.clock.now().plus(MINUTE)));
            }
            fixture.clock.advance(SECOND);
        }
        fixture.decide_held(&[("c", terms(&tiers[2].1.limit, 0))], "one", SETTLE).await;
        for (_, terms) in &mut tiers {
            terms.cost = Cost::from(2);
        }
        for answer in fixture.decide_held(&tiers, "four", HOLD).await {
            assert_eq!((answer.charged, answer.hold.outcome), (0, HoldOutcome::NotHeld));
        }
        for (tier, (_, terms)) in tiers.iter().enumerate() {
            let expected = if tier == 2 { 4 } else { 1 };
            let peek = fixture.decide(Operation::Peek, &[(tiers[tier].0, *terms)], 1).await[0];
            assert_eq!(peek.available, expected, "{:?}", terms.limit);
            let settled = fixture.decide_held(&tiers[tier..=tier], "four", SETTLE).await;
            assert_eq!(outcomes(&settled), [HoldOutcome::Unknown]);
        }
    }

    /// A repeated hold with the same cost gets the first answer and is not charged again, even if the usage, the time to live or the limit has
    /// changed.
    a_repeated_hold_gets_the_first_answer(fixture) {
        for limit in all_limits() {
            let counter = fixture.new_counter();
            let first = counter.on_hold("id", &limit, 3, HOLD).await;
            fixture.clock.advance(SECOND);
            counter.on_hold("other", &limit, 5, HOLD).await;
            let left = counter.left(&limit).await;
            let other = Limit::with_max_excess(limit, 1);
            for (limit, operation) in [(limit, HOLD), (other, HoldOperation::Hold { ttl: SECOND })] {
                let again = counter.on_hold("id", &limit, 3, operation).await;
                assert_eq!(again.hold.outcome, HoldOutcome::Repeated, "{limit:?}");
                let expected = Answer { hold: first.hold, ..again };
                assert_eq!(expected, first, "{limit:?}");
                assert_eq!((again.hold.at, again.hold.expires_at), (START, START.plus(MINUTE)));
                assert_eq!(again.hold.charged, 3);
                assert_eq!(counter.left(&limit).await, left, "{limit:?}");
            }
            fixture.clock.set(START.plus(MINUTE).minus(MICROSECOND));
            assert_eq!(counter.on_hold("id", &limit, 3, HOLD).await.hold.outcome, HoldOutcome::Repeated);
        }
    }

    /// An id conflicts if the cost differs, or if its hold was settled, released or has expired, until it is forgotten.
    an_id_with_another_cost_or_an_ended_one_conflicts(fixture) {
        let known = [HOLD_RETENTION - MICROSECOND, HOLD_RETENTION];
        for limit in all_limits() {
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 3, HOLD).await;
            let left = counter.left(&limit).await;
            for cost in [0, 2, 4] {
                let conflict = counter.on_hold("id", &limit, cost, HOLD).await;
                assert_eq!((conflict.hold.outcome, conflict.charged), (HoldOutcome::Conflict, 0), "{limit:?}");
            }
            assert_eq!(counter.left(&limit).await, left, "{limit:?}");
            for (id, cost) in [("settled", 1), ("released", 0)] {
                let counter = fixture.new_counter();
                counter.on_hold(id, &limit, 1, HOLD).await;
                counter.on_hold(id, &limit, cost, SETTLE).await;
                for (after, expected) in known.into_iter().zip([HoldOutcome::Conflict, HoldOutcome::Held]) {
                    fixture.clock.set(START.plus(after));
                    assert_eq!(counter.on_hold(id, &limit, 1, HOLD).await.hold.outcome, expected, "{limit:?} {id}");
                }
            }
            let counter = fixture.new_counter();
            counter.on_hold("expired", &limit, 1, HOLD).await;
            fixture.clock.set(START.plus(MINUTE));
            assert_eq!(counter.on_hold("expired", &limit, 1, HOLD).await.hold.outcome, HoldOutcome::Conflict);
            for (after, expected) in known.into_iter().zip([HoldOutcome::Conflict, HoldOutcome::Held]) {
                fixture.clock.set(START.plus(MINUTE + after));
                assert_eq!(counter.on_hold("expired", &limit, 1, HOLD).await.hold.outcome, expected, "{limit:?}");
            }
        }
    }

    /// A settlement replaces the estimate with a cost below, equal to or above it, or with zero. A kept unit keeps its estimate.
    a_settlement_replaces_the_estimate(fixture) {
        for limit in limits(10, DAY) {
            for (actual, left) in [(0, 8), (1, 7), (4, 4), (6, 2), (9, -1)] {
                let counter = fixture.new_counter();
                counter.on_hold("before", &limit, 1, HOLD).await;
                fixture.clock.advance(SECOND);
                let made = counter.on_hold("id", &limit, 4, HOLD).await;
                fixture.clock.advance(SECOND);
                counter.on_hold("after", &limit, 1, HOLD).await;
                fixture.clock.advance(SECOND);
                let settled = counter.on_hold("id", &limit, actual, SETTLE).await;
                let hold = settled.hold;
                assert_eq!((hold.outcome, hold.charged), (HoldOutcome::Settled, actual), "{limit:?}");
                assert_eq!((hold.at, hold.expires_at), (made.hold.at, made.hold.expires_at), "{limit:?}");
                assert_eq!(settled.available, left, "{limit:?} settled with {actual}");
                assert_eq!(counter.left(&limit).await, left, "{limit:?} settled with {actual}");
            }
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 4, HOLD).await;
            let kept = counter.on_hold("id", &limit, 0, KEEP).await;
            assert_eq!((kept.hold.outcome, kept.hold.charged, kept.available), (HoldOutcome::Settled, 4, 6), "{limit:?}");
        }
        let counter = fixture.new_counter();
        for actual in [0, 4, 9] {
            counter.on_hold("id", &concurrency(10), 4, HOLD).await;
            let settled = counter.on_hold("id", &concurrency(10), actual, SETTLE).await;
            assert_eq!((settled.hold.outcome, settled.available), (HoldOutcome::Settled, 10), "whatever the actual cost is");
            fixture.clock.advance(HOLD_RETENTION);
        }
    }

    /// Each of several tiers is settled with its own cost, or keeps its estimate.
    each_tier_is_settled_with_its_own_cost(fixture) {
        let limits = all_limits();
        let tiers = |costs: [u64; 5]| -> Vec<_> {
            let tier = |((name, limit), cost)| (name, terms(limit, cost));
            ["a", "b", "c", "d", "e"].into_iter().zip(&limits).zip(costs).map(tier).collect()
        };
        fixture.decide_held(&tiers([5, 4, 3, 2, 1]), "id", HOLD).await;
        let settle = HoldOperation::Settle { kept: 0b01010, max_excess: None };
        let settled = fixture.decide_held(&tiers([1, 9, 7, 9, 9]), "id", settle).await;
        let charged: Vec<_> = settled.iter().map(|answer| (answer.hold.charged, answer.available)).collect();
        assert_eq!(charged, [(1, 9), (4, 6), (7, 3), (2, 8), (9, 10)]);
    }

    /// The excess of a settlement is at most the bound that the limit had when the hold was made, unless the caller has another bound.
    the_excess_of_a_settlement_is_bounded(fixture) {
        let settle = |max_excess| HoldOperation::Settle { kept: 0, max_excess };
        for limit in limits(10, DAY) {
            let narrow = limit.with_max_excess(3);
            let unbounded = Some(Cost::MAX.units());
            for (limit, max_excess, actual, charged) in [
                (limit, None, 12, 12),
                (limit, None, 1_000, 12),
                (narrow, None, 5, 5),
                (narrow, None, 6, 5),
                (narrow, Some(0), 6, 2),
                (narrow, Some(4), 6, 6),
                (narrow, unbounded, 1_000, 1_000),
            ] {
                let counter = fixture.new_counter();
                counter.on_hold("id", &limit, 2, HOLD).await;
                let settled = counter.on_hold("id", &limit, actual, settle(max_excess)).await;
                let left = 10 - i64::try_from(charged).expect("small");
                assert_eq!((settled.hold.charged, settled.available), (charged, left), "{limit:?} {max_excess:?}");
            }
        }
        let bucket = Limit::token_bucket(10, DAY).expect("a valid limit");
        let largest = Cost::MAX.units();
        let counter = fixture.new_counter();
        counter.on_hold("id", &bucket, 2, HOLD).await;
        let settled = counter.on_hold("id", &bucket, largest, settle(Some(largest))).await;
        let debt = i64::try_from(largest).expect("below 2^53") - 10;
        assert_eq!((settled.hold.charged, settled.available), (largest, -debt));
    }

    /// A hold is settled once: later settlements, releases and renewals change nothing.
    a_hold_is_settled_once(fixture) {
        for limit in all_limits() {
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 4, HOLD).await;
            counter.on_hold("id", &limit, 6, SETTLE).await;
            let left = counter.left(&limit).await;
            for operation in [SETTLE, KEEP, renew(MINUTE)] {
                for cost in [0, 6, 9] {
                    let again = counter.on_hold("id", &limit, cost, operation).await.hold;
                    assert_eq!((again.outcome, again.charged), (HoldOutcome::Already, 6), "{limit:?}");
                    assert_eq!((again.at, again.expires_at), (START, START.plus(MINUTE)), "{limit:?}");
                }
            }
            assert_eq!(counter.on_hold("id", &limit, 0, revert(fixture.clock.now())).await.hold.outcome, HoldOutcome::Unknown);
            assert_eq!(counter.left(&limit).await, left, "{limit:?}");
            fixture.clock.set(START.plus(HOLD_RETENTION - MICROSECOND));
            assert_eq!(counter.on_hold("id", &limit, 0, SETTLE).await.hold.outcome, HoldOutcome::Already, "{limit:?}");
            fixture.clock.advance(MICROSECOND);
            assert_eq!(counter.on_hold("id", &limit, 0, SETTLE).await.hold.outcome, HoldOutcome::Unknown, "{limit:?}");
        }
    }

    /// A settlement refunds exactly the charge of its hold: the units of a log that were charged at that time.
    a_settlement_refunds_exactly_the_charge_of_the_hold(fixture) {
        let limit = Limit::sliding_log(10, MINUTE).expect("a valid limit");
        let us = |seconds: u64| START.as_micros() + seconds * 1_000_000;
        let counter = fixture.new_counter();
        for (id, cost) in [("a", 2), ("b", 3), ("c", 4)] {
            counter.on_hold(id, &limit, cost, HOLD).await;
            fixture.clock.advance(10 * SECOND);
        }
        counter.on_hold("b", &limit, 1, SETTLE).await;
        counter.on_hold("a", &limit, 0, SETTLE).await;
        let look = counter.inspect(&limit).await;
        let span = |seconds, units| Span { from_us: us(seconds), until_us: us(seconds + 60), units };
        assert_eq!(look.snapshot, Snapshot::SlidingLog(vec![span(10, 1), span(20, 4)]));
        // a charge that has left its window is not refunded
        fixture.clock.set(Timestamp::from_micros(us(75)));
        counter.on_hold("new", &limit, 3, HOLD).await;
        fixture.clock.advance(4 * SECOND);
        counter.on_hold("c", &limit, 1, SETTLE).await;
        assert_eq!(counter.left(&limit).await, 6, "3 of the new hold, 1 of the settled one");
        fixture.clock.advance(2 * SECOND);
        counter.on_hold("new", &limit, 0, SETTLE).await;
        assert_eq!(counter.left(&limit).await, 10);
    }

    /// A bucket refunds what has not drained of a hold, also when more than a window has passed: a burst drains for several windows.
    a_bucket_refunds_what_has_not_drained_after_a_window(fixture) {
        let limit = Limit::token_bucket(10, SECOND).and_then(|limit| limit.with_burst(1_000)).expect("a valid limit");
        for (seconds, actual, other, left) in [
            (0, 0, 0, 1_000),
            (1, 0, 0, 1_000),
            (2, 0, 0, 1_000),
            (50, 0, 0, 1_000),
            (2, 400, 0, 600),
            // what has drained is not refunded to other charges
            (50, 0, 500, 500),
            (50, 400, 500, 100),
            (99, 0, 990, 10),
            (100, 0, 1_000, 0),
        ] {
            let counter = fixture.new_counter();
            let hold = HoldOperation::Hold { ttl: 10 * MINUTE };
            assert_eq!(counter.on_hold("id", &limit, 1_000, hold).await.available, 0);
            fixture.clock.advance(seconds * SECOND);
            assert!(counter.check(&limit, other).await.passes);
            let settled = counter.on_hold("id", &limit, actual, SETTLE).await;
            assert_eq!(settled.available, left, "after {seconds} s, settled with {actual}");
        }
        // a debt
        let counter = fixture.new_counter();
        counter.on_hold("id", &limit, 1_000, HOLD).await;
        counter.fixture.decide(Operation::Charge, &[(&*counter.key, terms(&limit, 700))], 1).await;
        fixture.clock.advance(2 * SECOND);
        assert_eq!(counter.on_hold("id", &limit, 200, SETTLE).await.available, 100);
    }

    /// A bucket that was charged at another rate since refunds a hold only within the window of its limit: how much of it has drained is unknown.
    a_bucket_with_another_rate_refunds_only_within_a_window(fixture) {
        let limit = |amount| Limit::token_bucket(amount, SECOND).and_then(|limit| limit.with_burst(1_000)).expect("a valid limit");
        let (fast, slow) = (limit(10), limit(1));
        for (old, new, elapsed, left) in
            [(slow, fast, SECOND - MICROSECOND, 999), (slow, fast, SECOND, 9), (fast, slow, SECOND, 9)]
        {
            let counter = fixture.new_counter();
            counter.on_hold("id", &old, 1_000, HOLD).await;
            fixture.clock.advance(elapsed);
            counter.fixture.decide(Operation::Charge, &[(&*counter.key, terms(&new, 1))], 1).await;
            let settled = counter.on_hold("id", &old, 0, SETTLE).await;
            assert_eq!(settled.available, left, "{old:?} after {elapsed:?}");
        }
    }

    /// The release of an expired hold does not know the rate at which the hold was charged.
    a_bucket_releases_an_expired_hold_only_within_a_window(fixture) {
        let limit = |amount| {
            let limit = Limit::token_bucket(amount, SECOND).and_then(|limit| limit.with_burst(1_000));
            limit.and_then(|limit| limit.with_on_expiry(OnExpiry::Release)).expect("a valid limit")
        };
        let (fast, slow) = (limit(100), limit(1));
        for (ttl, left) in [(SECOND / 2, 999), (2 * SECOND, 199)] {
            let counter = fixture.new_counter();
            counter.on_hold("id", &fast, 1_000, HoldOperation::Hold { ttl }).await;
            fixture.clock.advance(ttl);
            let next = counter.on_hold("next", &fast, 1, HOLD).await;
            assert_eq!((next.hold.released, next.available), (1, left), "{ttl:?}");
        }
        // all of the hold had drained when the rate changed: a refund would be that of the other charge
        let counter = fixture.new_counter();
        counter.on_hold("id", &fast, 1_000, HoldOperation::Hold { ttl: MINUTE }).await;
        fixture.clock.advance(50 * SECOND);
        assert!(counter.check(&slow, 1_000).await.passes);
        fixture.clock.advance(10 * SECOND);
        let next = counter.on_hold("next", &slow, 1, HOLD).await;
        assert_eq!((next.hold.released, next.available), (1, 9));
    }

    /// A refund applies to the window in which the hold was made. In the next window it changes nothing; only an excess is charged there.
    a_hold_that_is_settled_in_the_next_window_changes_only_that_of_its_hold(fixture) {
        let month = ten_per(CalendarUnit::Month, "UTC", None);
        let minute = Limit::fixed_window(10, MINUTE).expect("a valid limit");
        for (limit, start) in [(month, at_second(MARCH)), (minute, at_second(MARCH + 60))] {
            for (actual, left) in [(1, 8), (5, 8), (7, 6)] {
                let counter = fixture.new_counter();
                fixture.clock.set(start.minus(SECOND));
                counter.on_hold("id", &limit, 5, HOLD).await;
                fixture.clock.set(start);
                counter.on_hold("next", &limit, 2, HOLD).await;
                counter.on_hold("id", &limit, actual, SETTLE).await;
                assert_eq!(counter.left(&limit).await, left, "{limit:?} settled with {actual}");
            }
        }
        // an excess in a month that is beyond the two that were known when the hold was made
        let counter = fixture.new_counter();
        fixture.clock.set(at_second(MARCH).minus(SECOND));
        counter.on_hold("id", &month, 5, HoldOperation::Hold { ttl: DAY }).await;
        let may = at_second(APRIL).plus(30 * DAY);
        while fixture.clock.now().plus(DAY) < may.plus(10 * DAY) {
            fixture.clock.advance(DAY - SECOND);
            assert_eq!(counter.on_hold("id", &month, 0, renew(DAY)).await.hold.outcome, HoldOutcome::Renewed);
        }
        counter.on_hold("next", &month, 2, HOLD).await;
        counter.on_hold("id", &month, 8, SETTLE).await;
        assert_eq!(counter.left(&month).await, 5);
        fixture.clock.set(may.plus(31 * DAY).minus(MICROSECOND));
        assert_eq!(counter.left(&month).await, 5, "until the end of May");
        fixture.clock.advance(MICROSECOND);
        assert_eq!(counter.left(&month).await, 10);
    }

    /// Settlements in a calendar period beyond the two that were known when the holds were made add up, and count until the end of that period.
    late_settlements_in_a_later_calendar_period_add_up(fixture) {
        let ten = ten_per(CalendarUnit::Day, "UTC", None);
        let day = ten.with_amount_and_window(1_000, ten.window_setting()).expect("a valid limit");
        let midnight = at_second(MARCH);
        let counter = fixture.new_counter();
        fixture.clock.set(midnight.minus(SECOND));
        for id in ["a", "b", "c", "d", "e"] {
            counter.on_hold(id, &day, 10, HoldOperation::Hold { ttl: DAY }).await;
        }
        fixture.clock.set(midnight.plus(DAY + 30 * SECOND));
        assert_eq!(counter.left(&day).await, 1_000);
        for (id, actual, left) in [("a", 500, 510), ("b", 300, 220), ("c", 0, 220)] {
            let late = counter.on_hold(id, &day, actual, SETTLE).await;
            assert_eq!((late.hold.outcome, late.available), (HoldOutcome::Late, left), "{id}");
            assert_eq!(counter.left(&day).await, left, "{id}");
            fixture.clock.advance(5 * SECOND);
        }
        assert!(counter.check(&day, 20).await.passes);
        for (id, left) in [("d", 110), ("e", 20)] {
            assert_eq!(counter.on_hold(id, &day, 100, SETTLE).await.available, left, "{id}: after a check");
            fixture.clock.advance(5 * SECOND);
        }
        fixture.clock.set(midnight.plus(2 * DAY).minus(MICROSECOND));
        assert_eq!(counter.left(&day).await, 20);
        fixture.clock.advance(MICROSECOND);
        assert_eq!(counter.left(&day).await, 1_000);
    }

    /// Settlements in two such periods without a check between them may all count, but only until the end of the second period.
    late_settlements_in_two_later_calendar_periods_count_until_the_second_ends(fixture) {
        let ten = ten_per(CalendarUnit::Day, "UTC", None);
        let day = ten.with_amount_and_window(1_000, ten.window_setting()).expect("a valid limit");
        let midnight = at_second(MARCH);
        let counter = fixture.new_counter();
        fixture.clock.set(midnight.minus(SECOND));
        for id in ["a", "b"] {
            counter.on_hold(id, &day, 10, HoldOperation::Hold { ttl: DAY }).await;
        }
        fixture.clock.set(midnight.plus(DAY - 2 * SECOND));
        for id in ["a", "b"] {
            counter.on_hold(id, &day, 0, renew(DAY)).await;
        }
        fixture.clock.set(midnight.plus(2 * DAY - 2 * SECOND).minus(MICROSECOND));
        counter.on_hold("b", &day, 0, renew(DAY)).await;
        counter.on_hold("a", &day, 500, SETTLE).await;
        assert_eq!(counter.left(&day).await, 510);
        fixture.clock.advance(3 * SECOND);
        counter.on_hold("b", &day, 300, SETTLE).await;
        let left = counter.left(&day).await;
        // in memory, each excess counts in its own period
        let expected = if matches!(counter.fixture.store, Store::Memory(_)) { 710 } else { 220 };
        assert_eq!(left, expected);
        fixture.clock.set(midnight.plus(3 * DAY).minus(MICROSECOND));
        assert_eq!(counter.left(&day).await, left);
        fixture.clock.advance(MICROSECOND);
        assert_eq!(counter.left(&day).await, 1_000);
    }

    /// A hold is settled under the limit with which it was made. The usage counts under the limit of the next check.
    a_hold_is_settled_under_its_own_limit(fixture) {
        for algorithm in Algorithm::WINDOWED {
            let limit = |amount, window| Limit::new(algorithm, amount, window).expect("a valid limit");
            let (day, second) = (limit(10, DAY), limit(10, SECOND));
            let counter = fixture.new_counter();
            counter.on_hold("id", &day, 4, HOLD).await;
            counter.check(&second, 1).await;
            let settled = counter.on_hold("id", &day, 6, SETTLE).await;
            assert_eq!((settled.hold.outcome, settled.available), (HoldOutcome::Settled, 3), "{algorithm}");
            assert_eq!(counter.peek(&day, 0).await.remaining, 3, "{algorithm}");
            fixture.clock.advance(2 * SECOND);
            assert_eq!(counter.peek(&second, 0).await.remaining, 10, "{algorithm}");
        }
    }

    /// A renewal moves the expiry of a live hold, if that makes it later.
    a_renewal_moves_the_expiry(fixture) {
        for limit in all_limits().into_iter().chain(releasing()) {
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 4, HOLD).await;
            fixture.clock.advance(30 * SECOND);
            let early = counter.on_hold("id", &limit, 0, renew(SECOND)).await.hold;
            assert_eq!((early.outcome, early.expires_at), (HoldOutcome::Renewed, START.plus(MINUTE)), "{limit:?}");
            let renewed = counter.on_hold("id", &limit, 0, renew(MINUTE)).await;
            let expires_at = START.plus(30 * SECOND + MINUTE);
            assert_eq!((renewed.hold.outcome, renewed.hold.expires_at), (HoldOutcome::Renewed, expires_at), "{limit:?}");
            assert_eq!((renewed.hold.at, renewed.hold.charged, renewed.available), (START, 4, 6), "{limit:?}");
            fixture.clock.set(expires_at.minus(MICROSECOND));
            counter.check(&limit, 0).await;
            assert_eq!(counter.left(&limit).await, 6, "{limit:?}");
            let again = counter.on_hold("id", &limit, 4, HOLD).await.hold;
            assert_eq!((again.outcome, again.expires_at), (HoldOutcome::Repeated, expires_at), "{limit:?}");
            fixture.clock.set(expires_at);
            let late = counter.on_hold("id", &limit, 0, renew(MINUTE)).await.hold;
            assert_eq!((late.outcome, late.expires_at), (HoldOutcome::Late, expires_at), "{limit:?}");
            let left = if limit.releases_expired() { 10 } else { 6 };
            counter.check(&limit, 0).await;
            assert_eq!(counter.left(&limit).await, left, "{limit:?}");
        }
    }

    /// An expired hold with on_expiry = "charge" keeps its estimate. A late settlement replaces it.
    an_expired_hold_stays_charged(fixture) {
        for limit in limits(10, DAY) {
            for (actual, left) in [(1, 9), (4, 6), (6, 4)] {
                let counter = fixture.new_counter();
                counter.on_hold("id", &limit, 4, HOLD).await;
                fixture.clock.set(START.plus(MINUTE));
                counter.check(&limit, 0).await;
                assert_eq!(counter.left(&limit).await, 6, "{limit:?}");
                fixture.clock.set(START.plus(MINUTE + HOLD_RETENTION - MICROSECOND));
                let late = counter.on_hold("id", &limit, actual, SETTLE).await;
                assert_eq!((late.hold.outcome, late.hold.charged, late.available), (HoldOutcome::Late, actual, left), "{limit:?}");
                assert_eq!(counter.on_hold("id", &limit, 0, SETTLE).await.hold.outcome, HoldOutcome::Already, "{limit:?}");
                assert_eq!(counter.left(&limit).await, left, "{limit:?}");
            }
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 4, HOLD).await;
            fixture.clock.set(START.plus(MINUTE + HOLD_RETENTION));
            assert_eq!(counter.on_hold("id", &limit, 0, SETTLE).await.hold.outcome, HoldOutcome::Unknown, "{limit:?}");
            assert_eq!(counter.left(&limit).await, 6, "{limit:?}");
        }
    }

    /// An expired hold with on_expiry = "release" is refunded by the next check, also by a denied one. Until then it counts. A late settlement
    /// charges the actual cost once, before and after the release, and frees no further units of a concurrency limit.
    an_expired_hold_is_released_by_the_next_check(fixture) {
        for limit in releasing() {
            let has_window = limit.algorithm().properties().has_window;
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 4, HOLD).await;
            counter.on_hold("long", &limit, 3, HoldOperation::Hold { ttl: 10 * MINUTE }).await;
            fixture.clock.set(START.plus(MINUTE).minus(MICROSECOND));
            let denied = counter.on_hold("denied", &limit, 10, HOLD).await;
            assert_eq!((denied.available, denied.hold.released), (3, 0), "{limit:?}");
            fixture.clock.set(START.plus(MINUTE));
            assert_eq!(counter.left(&limit).await, 3, "{limit:?}: a peek releases nothing");
            let denied = counter.on_hold("denied", &limit, 10, HOLD).await;
            assert_eq!((denied.charged, denied.available, denied.hold.released), (0, 7, 1), "{limit:?}");
            let late = counter.on_hold("id", &limit, 2, SETTLE).await;
            let left = if has_window { 5 } else { 7 };
            assert_eq!((late.hold.outcome, late.available), (HoldOutcome::Late, left), "{limit:?}");
            let again = counter.on_hold("id", &limit, 2, SETTLE).await;
            assert_eq!((again.hold.outcome, counter.left(&limit).await), (HoldOutcome::Already, left), "{limit:?}");

            let counter = fixture.new_counter();
            counter.on_hold("early", &limit, 4, HOLD).await;
            fixture.clock.set(START.plus(MINUTE));
            let late = counter.on_hold("early", &limit, 2, SETTLE).await;
            let left = if has_window { 8 } else { 10 };
            assert_eq!((late.hold.outcome, late.available), (HoldOutcome::Late, left), "{limit:?}");
            let next = counter.on_hold("next", &limit, 1, HOLD).await;
            assert_eq!((next.available, next.hold.released), (left - 1, 0), "{limit:?}");
        }
    }

    /// An ordinary check releases expired holds as well.
    an_ordinary_check_releases_expired_holds(fixture) {
        for limit in releasing().into_iter().filter(|limit| limit.algorithm().properties().has_window) {
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 10, HOLD).await;
            fixture.clock.set(START.plus(MINUTE).minus(MICROSECOND));
            assert!(!counter.check(&limit, 1).await.passes, "{limit:?}");
            fixture.clock.advance(MICROSECOND);
            assert!(!counter.peek(&limit, 1).await.passes, "{limit:?}");
            assert_eq!(fixture.admitted_now(&counter.key, &limit).await, 10, "{limit:?}");
        }
    }

    /// A check releases a bounded number of expired holds, those that expired first. The others count as live.
    a_check_releases_a_bounded_number_of_expired_holds(fixture) {
        let many = MAX_RELEASED as u64;
        let total = 2 * many + 5;
        for limit in releasing() {
            let limit = limit.with_amount_and_window(total, limit.window_setting()).expect("a valid limit");
            let counter = fixture.new_counter();
            // in the reverse order of their expiry
            for number in 0..total {
                let ttl = MINUTE - Duration::from_millis(number);
                let made = counter.on_hold(&format!("id-{number}"), &limit, 1, HoldOperation::Hold { ttl }).await;
                assert_eq!(made.charged, 1, "{limit:?}");
            }
            fixture.clock.set(START.plus(MINUTE));
            for (released, free) in [(many, many), (many, 2 * many), (5, total), (0, total)] {
                let denied = counter.on_hold("denied", &limit, total + 1, HOLD).await;
                assert_eq!(u64::from(denied.hold.released), released, "{limit:?}");
                // what has drained since the holds were made is refunded only once
                let rounding = u64::from(limit.algorithm() == Algorithm::TokenBucket && free > 0);
                assert_eq!(denied.available.unsigned_abs(), free - rounding, "{limit:?}");
            }
        }
    }

    /// Operations on an unknown hold change nothing and create no counter.
    an_operation_on_an_unknown_hold_changes_nothing(fixture) {
        for limit in all_limits() {
            let counter = fixture.new_counter();
            for operation in [SETTLE, KEEP, renew(MINUTE), revert(fixture.clock.now())] {
                let unknown = counter.on_hold("unknown", &limit, 3, operation).await.hold;
                assert_eq!((unknown.outcome, unknown.charged), (HoldOutcome::Unknown, 0), "{limit:?}");
                assert_eq!(unknown.expires_at, Timestamp::default());
            }
        }
        match (&fixture.store, &fixture.server) {
            (Store::Memory(store), _) => assert!(store.is_empty()),
            (_, Some(server)) => {
                let keys: u64 = redis::cmd("DBSIZE").query(&mut server.connection()).expect("the server answers");
                assert_eq!(keys, 0);
            }
            _ => {}
        }
    }

    /// After a hold is reverted, its units are free and its id is unknown.
    a_reverted_hold_leaves_nothing(fixture) {
        for limit in all_limits().into_iter().chain(releasing()) {
            let counter = fixture.new_counter();
            counter.on_hold("id", &limit, 4, HOLD).await;
            counter.on_hold("id", &limit, 0, revert(fixture.clock.now())).await;
            assert_eq!(counter.left(&limit).await, 10, "{limit:?}");
            assert_eq!(counter.on_hold("id", &limit, 4, SETTLE).await.hold.outcome, HoldOutcome::Unknown, "{limit:?}");
            assert_eq!(counter.on_hold("id", &limit, 3, HOLD).await.hold.outcome, HoldOutcome::Held, "{limit:?}");
            assert_eq!(counter.left(&limit).await, 7, "{limit:?}");
            // a later attempt to make the hold keeps it
            fixture.clock.advance(SECOND);
            counter.on_hold("id", &limit, 3, HOLD).await;
            let until = fixture.clock.now().minus(MICROSECOND);
            let kept = counter.on_hold("id", &limit, 0, revert(until)).await.hold.outcome;
            assert_eq!((kept, counter.left(&limit).await), (HoldOutcome::Unknown, 7), "{limit:?}");
            // and so does its expiry
            let kept = counter.on_hold("id", &limit, 0, revert(START.plus(MINUTE))).await.hold.outcome;
            assert_eq!((kept, counter.left(&limit).await), (HoldOutcome::Unknown, 7), "{limit:?}");
            counter.on_hold("id", &limit, 0, revert(fixture.clock.now())).await;
            assert_eq!(counter.left(&limit).await, 10, "{limit:?}");
        }
    }

    /// A reset clears live holds: settling one of them later has no effect.
    a_reset_ends_live_holds(fixture) {
        for limit in all_limits().into_iter().chain(releasing()) {
            let counter = fixture.new_counter();
            counter.on_hold("settled", &limit, 1, HOLD).await;
            counter.on_hold("settled", &limit, 1, SETTLE).await;
            counter.on_hold("live", &limit, 4, HOLD).await;
            assert_eq!(counter.reset(&limit).await, 1, "{limit:?}");
            assert_eq!(counter.inspect(&limit).await.holds, LiveHolds::default(), "{limit:?}");
            for operation in [renew(MINUTE), SETTLE, KEEP] {
                let unknown = counter.on_hold("live", &limit, 9, operation).await.hold;
                assert_eq!(unknown.outcome, HoldOutcome::Unknown, "{limit:?}");
            }
            assert_eq!(counter.on_hold("settled", &limit, 1, SETTLE).await.hold.outcome, HoldOutcome::Already, "{limit:?}");
            assert_eq!(counter.left(&limit).await, 10, "{limit:?}");
            counter.on_hold("next", &limit, 2, HOLD).await;
            fixture.clock.advance(MINUTE);
            counter.check(&limit, 0).await;
            let left = if limit.releases_expired() { 10 } else { 8 };
            assert_eq!(counter.left(&limit).await, left, "{limit:?}: nothing of the hold before the reset is refunded");
        }
    }

    /// A repeated hold is completed on counters that lost it. If one of them denies, the hold is reverted on the others.
    a_repeated_hold_is_completed_or_reverted(fixture) {
        for limit in all_limits() {
            for is_full in [false, true] {
                let (first, second) = (fixture.new_counter(), fixture.new_counter());
                let tiers = [(&*first.key, terms(&limit, 4)), (&*second.key, terms(&limit, 4))];
                fixture.decide_held(&tiers, "id", HOLD).await;
                first.reset(&limit).await;
                if is_full {
                    first.on_hold("other", &limit, 9, HOLD).await;
                }
                fixture.clock.advance(SECOND);
                let again = fixture.decide_held(&tiers, "id", HOLD).await;
                let (expected, charged, left) = if is_full {
                    ([HoldOutcome::NotHeld, HoldOutcome::NotHeld], 0, [1, 10])
                } else {
                    ([HoldOutcome::Held, HoldOutcome::Repeated], 1, [6, 6])
                };
                assert_eq!(outcomes(&again), expected, "{limit:?}");
                assert_eq!((again[1].passes, again[1].charged), (1, charged), "{limit:?}");
                assert_eq!([first.left(&limit).await, second.left(&limit).await], left, "{limit:?}");
                let ended = fixture.decide_held(&tiers, "id", SETTLE).await;
                let expected = if is_full { HoldOutcome::Unknown } else { HoldOutcome::Settled };
                assert_eq!(outcomes(&ended), [expected; 2], "{limit:?}");
            }
        }
    }

    /// An id that must be new conflicts with a hold of the same id in any of its tiers. That hold does not change, even if another tier denies.
    an_id_that_must_be_new_never_changes_a_hold_that_exists(fixture) {
        for limit in all_limits() {
            let counters = [fixture.new_counter(), fixture.new_counter(), fixture.new_counter()];
            let [first, second, third] = &counters;
            let new = HoldOperation::HoldNew { ttl: MINUTE };
            let hold = async |counters: &[&Counter<'_>], cost| {
                let tiers: Vec<_> = counters.iter().map(|counter| (&*counter.key, terms(&limit, cost))).collect();
                outcomes(&fixture.decide_held(&tiers, "id", new).await)
            };
            let left = async || (first.left(&limit).await, second.left(&limit).await, third.left(&limit).await);
            assert_eq!(hold(&[first, second], 4).await, [HoldOutcome::Held; 2], "{limit:?}");
            for (tiers, cost) in [(vec![first, second], 4), (vec![first], 1), (vec![first, third], 4)] {
                let outcomes = hold(&tiers, cost).await;
                assert!(outcomes.contains(&HoldOutcome::Conflict), "{limit:?}: {outcomes:?}");
                assert!(!outcomes.contains(&HoldOutcome::Held), "{limit:?}: {outcomes:?}");
                assert_eq!(left().await, (6, 6, 10), "{limit:?}");
            }
            let denied = hold(&[second, third], 11).await;
            assert!(!denied.contains(&HoldOutcome::Held), "{denied:?}");
            assert_eq!(left().await, (6, 6, 10), "{limit:?}: a denial does not take back the hold");
            let tiers = [first, second].map(|counter| (&*counter.key, terms(&any_limit(&limit), 1)));
            let settled = outcomes(&fixture.decide_held(&tiers, "id", SETTLE).await);
            assert_eq!(settled, [HoldOutcome::Settled; 2], "{limit:?}");
        }
    }

    /// A shadow tier that would deny is not held. One that admits is held and settled like the others.
    a_shadow_tier_that_would_deny_is_not_held(fixture) {
        for limit in all_limits() {
            let shadow = |cost| Terms { mode: Mode::Shadow, ..terms(&limit, cost) };
            let [enforced, tight, wide] = [0; 3].map(|_| fixture.new_counter().key);
            let tiers = [(&*enforced, terms(&limit, 3)), (&*tight, shadow(11)), (&*wide, shadow(2))];
            let made = fixture.decide_held(&tiers, "id", HOLD).await;
            assert_eq!(outcomes(&made), [HoldOutcome::Held, HoldOutcome::NotHeld, HoldOutcome::Held], "{limit:?}");
            assert_eq!(made.iter().map(|answer| answer.available).collect::<Vec<_>>(), [7, 10, 8], "{limit:?}");
            let again = fixture.decide_held(&tiers, "id", HOLD).await;
            assert_eq!(outcomes(&again), [HoldOutcome::Repeated, HoldOutcome::NotHeld, HoldOutcome::Repeated], "{limit:?}");
            let settled = fixture.decide_held(&tiers, "id", SETTLE).await;
            assert_eq!(outcomes(&settled), [HoldOutcome::Settled, HoldOutcome::Unknown, HoldOutcome::Settled], "{limit:?}");
        }
    }

    /// A tier of cost 0 is held, so that settling it can charge the actual cost.
    a_tier_of_cost_0_is_held(fixture) {
        for limit in all_limits() {
            let counter = fixture.new_counter();
            let made = counter.on_hold("id", &limit, 0, HOLD).await;
            assert_eq!((made.hold.outcome, made.hold.charged, made.available), (HoldOutcome::Held, 0, 10), "{limit:?}");
            assert_eq!(counter.on_hold("id", &limit, 0, HOLD).await.hold.outcome, HoldOutcome::Repeated, "{limit:?}");
            let settled = counter.on_hold("id", &limit, 3, SETTLE).await;
            let left = if limit.algorithm().properties().has_window { 7 } else { 10 };
            assert_eq!((settled.hold.outcome, settled.available), (HoldOutcome::Settled, left), "{limit:?}");
        }
    }

    /// With overdraft, a hold is made while a unit is free, and its estimate is charged in full.
    a_hold_with_overdraft_may_leave_a_debt(fixture) {
        for limit in all_limits().into_iter().filter(|limit| limit.algorithm() != Algorithm::Concurrency) {
            let overdraft = |cost| Terms { admission: Admission::Overdraft, ..terms(&limit, cost) };
            let counter = fixture.new_counter();
            counter.on_hold("first", &limit, 9, HOLD).await;
            let made = fixture.decide_held(&[(&*counter.key, overdraft(20))], "id", HOLD).await[0];
            assert_eq!((made.hold.outcome, made.available), (HoldOutcome::Held, -19), "{limit:?}");
            let denied = fixture.decide_held(&[(&*counter.key, overdraft(1))], "denied", HOLD).await[0];
            assert_eq!((denied.hold.outcome, denied.available), (HoldOutcome::NotHeld, -19), "{limit:?}");
            let settled = counter.on_hold("id", &limit, 0, SETTLE).await;
            assert_eq!(settled.available, 1, "{limit:?}");
        }
    }

    /// Overdraft does not admit more live holds than the limit: the request waits for its full cost, or for ever if that exceeds the limit.
    overdraft_does_not_exceed_a_limit_of_concurrency(fixture) {
        let limit = concurrency(5);
        let overdraft = |cost| Terms { admission: Admission::Overdraft, ..terms(&limit, cost) };
        let counter = fixture.new_counter();
        let hold = async |id: &str, cost| fixture.decide_held(&[(&*counter.key, overdraft(cost))], id, HOLD).await[0];
        assert_eq!(hold("first", 4).await.available, 1);
        let denied = hold("denied", 5).await;
        assert_eq!((denied.hold.outcome, denied.passes, denied.available), (HoldOutcome::NotHeld, 0, 1));
        assert_eq!(retry_after_of(&denied.share(&overdraft(5), 0, 0)), MINUTE);
        assert_eq!(hold("large", 6).await.retry, Some(sluicegate::Retry::Never));
        let peeked = fixture.decide(Operation::Peek, &[(&*counter.key, overdraft(2))], 3).await[0];
        assert_eq!((peeked.passes, peeked.available), (0, 1));
        assert_eq!(hold("second", 1).await.available, 0);
    }

    /// At any time, the units of live holds are at most the limit. The wait is the time until the first expiry, and the reset is the time
    /// until the last one.
    live_holds_never_exceed_a_limit_of_concurrency(fixture) {
        let limit = concurrency(5);
        let counter = fixture.new_counter();
        let hold = async |id: &str, cost, ttl| counter.on_hold(id, &limit, cost, HoldOperation::Hold { ttl }).await;
        assert_eq!(hold("a", 2, 30 * SECOND).await.available, 3);
        assert_eq!(hold("b", 3, 20 * SECOND).await.reset_after_us, 30_000_000);
        fixture.clock.advance(SECOND);
        let denied = hold("c", 1, MINUTE).await;
        assert_eq!((denied.charged, denied.available, denied.reset_after_us), (0, 0, 29_000_000));
        assert_eq!(retry_after_of(&denied.share(&terms(&limit, 1), 0, 0)), 19 * SECOND);
        assert_eq!(hold("c", 6, MINUTE).await.retry, Some(sluicegate::Retry::Never));
        assert_eq!(counter.on_hold("b", &limit, 0, SETTLE).await.available, 3);
        assert_eq!(hold("c", 3, MINUTE).await.available, 0);
        let denied = counter.peek(&limit, 1).await;
        assert_eq!((retry_after_of(&denied), denied.reset_after), (29 * SECOND, MINUTE));
        fixture.clock.advance(29 * SECOND);
        let denied = counter.peek(&limit, 1).await;
        assert_eq!(retry_after_of(&denied), MICROSECOND, "the next check releases it");
        let made = hold("d", 2, MINUTE).await;
        assert_eq!((made.charged, made.available, made.hold.released), (1, 0, 1));
        fixture.clock.advance(DAY);
        let idle = counter.peek(&limit, 1).await;
        assert_eq!((idle.remaining, idle.reset_after), (0, MICROSECOND), "expired holds count until the next check");
        assert_eq!(hold("e", 5, MINUTE).await.available, 0);
        counter.on_hold("e", &limit, 0, SETTLE).await;
        let idle = counter.peek(&limit, 5).await;
        assert_eq!((idle.passes, idle.remaining, idle.reset_after), (true, 5, Duration::ZERO));
    }

    /// An operation without a hold does not change live holds, because nothing would release its units.
    an_operation_without_a_hold_never_changes_live_holds(fixture) {
        let limit = concurrency(5);
        let window = Limit::fixed_window(10, DAY).expect("a valid limit");
        let counter = fixture.new_counter();
        counter.on_hold("id", &limit, 2, HOLD).await;
        let operations =
            [Operation::Check, Operation::Peek, Operation::Charge, Operation::Refund { at: None }, Operation::Refund { at: Some(START) }];
        for operation in operations {
            let tiers = [(&*counter.key, terms(&limit, 1)), ("window", terms(&window, 1))];
            let answers = fixture.decide(operation, &tiers, 1).await;
            assert_eq!((answers[0].available, answers[0].hold.outcome), (3, HoldOutcome::NotHeld), "{operation:?}");
        }
        assert_eq!(fixture.peek("window", &window, 0).await.remaining, 10, "charged twice and refunded twice");
        counter.on_hold("id", &limit, 0, SETTLE).await;
        let idle = counter.peek(&limit, 0).await;
        assert_eq!((idle.remaining, idle.reset_after), (5, Duration::ZERO));
        assert_eq!(counter.reset(&limit).await, 0, "no counter is left");
    }

    /// Holds and settlements in one batch are decided in order.
    holds_of_one_batch_are_decided_in_order(fixture) {
        for limit in all_limits() {
            let counter = fixture.new_counter();
            let of_hold = |id, cost, operation| held(&[(&*counter.key, terms(&limit, cost))], id, operation);
            let tier = Tier { key: Key::without_rule(&counter.key).expect("short"), terms: terms(&limit, 1) };
            let plain = Check::new(Operation::Peek, vec![tier]).expect("valid");
            let checks = [
                of_hold("a", 4, HOLD),
                plain.clone(),
                of_hold("a", 4, HOLD),
                of_hold("b", 5, HOLD),
                of_hold("c", 2, HOLD),
                of_hold("a", 1, SETTLE),
                of_hold("a", 1, SETTLE),
                of_hold("c", 2, HOLD),
                of_hold("b", 0, revert(fixture.clock.now())),
                of_hold("b", 3, HOLD),
                plain,
            ];
            let decided = decide(&fixture.store, &checks, None).await.expect("an answer");
            let found: Vec<_> =
                decided.iter().map(|check| (check.answers[0].hold.outcome, check.answers[0].available)).collect();
            use HoldOutcome::{Already, Held, NotHeld, Repeated, Settled};
            let used = if limit.algorithm().properties().has_window { 1 } else { 0 };
            assert_eq!(
                found,
                [
                    (Held, 6), (NotHeld, 6), (Repeated, 6), (Held, 1), (NotHeld, 1), (Settled, 5 - used), (Already, 0),
                    (Held, 3 - used), (Settled, 8 - used), (Held, 5 - used), (NotHeld, 5 - used)
                ],
                "{limit:?}"
            );
        }
    }

    /// An inspection shows the live holds: their number, the sum of their units and the oldest one.
    an_inspection_shows_the_live_holds(fixture) {
        for limit in all_limits().into_iter().chain(releasing()) {
            let counter = fixture.new_counter();
            fixture.clock.advance(SECOND);
            for (id, cost, ttl) in [("a", 1, 10), ("b", 2, 30), ("c", 3, 20)] {
                counter.on_hold(id, &limit, cost, HoldOperation::Hold { ttl: ttl * SECOND }).await;
                fixture.clock.advance(SECOND);
            }
            let us = |seconds: u64| START.as_micros() + seconds * 1_000_000;
            let live = |count, units, oldest| LiveHolds { count, units, oldest_us: us(oldest), is_partial: false };
            let look = counter.inspect(&limit).await;
            assert_eq!((look.at, look.holds), (fixture.clock.now(), live(3, 6, 1)), "{limit:?}");
            if limit.algorithm() == Algorithm::Concurrency {
                let span = Span { from_us: us(11), until_us: us(32), units: 6 };
                assert_eq!(look.snapshot, Snapshot::Concurrency(span));
            }
            fixture.clock.set(Timestamp::from_micros(us(11)));
            assert_eq!(counter.inspect(&limit).await.holds, live(2, 5, 2), "{limit:?}");
            counter.on_hold("b", &limit, 2, SETTLE).await;
            assert_eq!(counter.inspect(&limit).await.holds, live(1, 3, 3), "{limit:?}");
            counter.on_hold("c", &limit, 0, renew(MINUTE)).await;
            fixture.clock.set(Timestamp::from_micros(us(70)));
            assert_eq!(counter.inspect(&limit).await.holds, live(1, 3, 3), "{limit:?}");
            fixture.clock.advance(SECOND);
            assert_eq!(counter.inspect(&limit).await.holds, LiveHolds::default(), "{limit:?}");
        }
    }

    /// An inspection shows the exact number of live holds, however many have expired. If there are too many to read, the sum and the oldest are
    /// marked as partial; the sum of a concurrency limit is still exact.
    an_inspection_of_many_holds_is_exact_or_marked_as_partial(fixture) {
        let bucket = Limit::token_bucket(10_000, DAY).expect("a valid limit");
        let releasing = bucket.with_on_expiry(OnExpiry::Release).expect("without a lease");
        for limit in [concurrency(10_000), bucket, releasing] {
            fixture.reset_clock();
            let counter = fixture.new_counter();
            let hold = async |name: &str, count: u32, ttl: Duration| {
                let terms = terms(&limit, 2);
                let checks: Vec<_> = (0..count)
                    .map(|number| held(&[(&*counter.key, terms)], &format!("{name}-{number}"), HoldOperation::Hold { ttl }))
                    .collect();
                for checks in checks.chunks(100) {
                    let made = decide(&fixture.store, checks, None).await.expect("the store answers");
                    assert!(made.iter().all(|check| check.answers[0].hold.outcome == HoldOutcome::Held), "{limit:?}");
                }
            };
            let us = |seconds: u64| START.as_micros() + seconds * 1_000_000;
            let live = |count, oldest_us| LiveHolds { count, units: 2 * count, oldest_us, is_partial: false };
            hold("expired", 1_200, SECOND).await;
            fixture.clock.advance(SECOND);
            hold("oldest", 1, 10 * MINUTE).await;
            assert_eq!(counter.inspect(&limit).await.holds, live(1, us(1)), "{limit:?}");
            fixture.clock.advance(2 * MINUTE);
            // releases the expired holds
            for _ in 0..1_200_usize.div_ceil(MAX_RELEASED) {
                fixture.decide(Operation::Check, &[(&*counter.key, terms(&limit, 0))], 1).await;
            }
            hold("expired-again", 100, SECOND).await;
            fixture.clock.advance(SECOND);
            hold("live", 999, MINUTE).await;
            assert_eq!(counter.inspect(&limit).await.holds, live(1_000, us(1)), "{limit:?}");
            hold("further", 201, MINUTE).await;
            let found = counter.inspect(&limit).await.holds;
            if matches!(fixture.store, Store::Memory(_)) {
                assert_eq!(found, live(1_201, us(1)), "{limit:?}");
                continue;
            }
            let LiveHolds { count, units, oldest_us, is_partial } = found;
            assert_eq!((count, oldest_us, is_partial), (1_201, us(122), true), "{limit:?}");
            let most = if limit.algorithm() == Algorithm::Concurrency { 2_402 } else { 2_002 };
            assert_eq!(units, most, "{limit:?}");
        }
    }

    /// A settlement after the limit has changed keeps what was charged under the new limit.
    a_settlement_keeps_the_usage_of_a_changed_limit(fixture) {
        let slow = limits(10, DAY);
        for (old, new) in limits(10, SECOND).into_iter().zip(slow) {
            for actual in [0, 1, 2] {
                let counter = fixture.new_counter();
                let hold = HoldOperation::Hold { ttl: 10 * MINUTE };
                assert_eq!(counter.on_hold("id", &old, 1, hold).await.hold.outcome, HoldOutcome::Held);
                assert!(counter.check(&new, 9).await.passes);
                fixture.clock.advance(2 * MINUTE);
                counter.on_hold("id", &old, actual, SETTLE).await;
                let left = counter.left(&new).await;
                assert!(left <= 1, "{old:?} actual {actual}: {left}");
            }
        }
    }

    /// If a further tier denies the repetition of a hold, the hold is reverted, also after the clock was set back.
    a_denied_repetition_reverts_the_hold_after_the_clock_was_set_back(fixture) {
        for limit in all_limits() {
            // two counters of one key, which are on one server
            let counter = fixture.new_counter();
            let further = if limit.algorithm() == Algorithm::FixedWindow { concurrency(10) } else { Limit::fixed_window(10, DAY).expect("a valid limit") };
            fixture.clock.advance(SECOND);
            counter.on_hold("id", &limit, 4, HOLD).await;
            counter.on_hold("other", &further, 10, HOLD).await;
            fixture.reset_clock();
            let tiers = [&limit, &further].map(|limit| (&*counter.key, terms(limit, 4)));
            let denied = fixture.decide_held(&tiers, "id", HOLD).await;
            assert_eq!(outcomes(&denied), [HoldOutcome::NotHeld; 2], "{limit:?}");
            let settled = counter.on_hold("id", &limit, 0, SETTLE).await;
            assert_eq!(settled.hold.outcome, HoldOutcome::Unknown, "{limit:?}");
            assert_eq!((denied[0].available, counter.left(&limit).await), (10, 10), "{limit:?}");
        }
    }

    /// A shadow tier never denies, also if it has too many holds.
    a_shadow_tier_with_too_many_holds_is_not_held(fixture) {
        let limit = concurrency(1_000_000);
        let counter = fixture.new_counter();
        if !fill_with_holds(&counter, &limit).await {
            return;
        }
        let other = concurrency(2);
        let shadow = Terms { mode: Mode::Shadow, ..terms(&limit, 1) };
        let tiers = [(&*counter.key, shadow), ("other", terms(&other, 1))];
        let full = fixture.decide_held(&tiers, "further", HOLD).await;
        assert_eq!(outcomes(&full), [HoldOutcome::NotHeld, HoldOutcome::Held]);
        assert_eq!((full[0].charged, full[0].available), (0, 1_000_000 - MAX_LIVE_HOLDS as i64));
        let again = fixture.decide_held(&tiers, "further", HOLD).await;
        assert_eq!(outcomes(&again), [HoldOutcome::NotHeld, HoldOutcome::Repeated]);
    }

    /// A clock that is set back by up to ten minutes removes no hold, not even one with the longest time to live.
    a_clock_that_is_set_back_by_ten_minutes_keeps_all_holds(fixture) {
        let steps = [
            (MICROSECOND, HoldOutcome::Settled),
            (Duration::from_millis(1), HoldOutcome::Settled),
            (10 * MINUTE, HoldOutcome::Settled),
            (12 * MINUTE, HoldOutcome::Unknown),
        ];
        for limit in all_limits().into_iter().chain(releasing()) {
            for (step, outcome) in steps {
                let counter = fixture.new_counter();
                fixture.clock.advance(60 * MINUTE);
                counter.on_hold("longest", &limit, 4, HoldOperation::Hold { ttl: MAX_HOLD_TTL }).await;
                fixture.clock.set(fixture.clock.now().minus(step));
                counter.on_hold("next", &limit, 1, HOLD).await;
                let settled = counter.on_hold("longest", &limit, 2, SETTLE).await;
                assert_eq!(settled.hold.outcome, outcome, "{limit:?} after {step:?}");
            }
        }
    }

    /// A hold from before the clock was set back is released by the next check, if it would last longer than any new one.
    a_clock_that_is_set_back_does_not_lock_out(fixture) {
        let limit = concurrency(2);
        let counter = fixture.new_counter();
        fixture.clock.advance(365 * DAY);
        counter.on_hold("a", &limit, 2, HOLD).await;
        fixture.reset_clock();
        fixture.clock.advance(2 * DAY);
        let made = counter.on_hold("b", &limit, 2, HOLD).await;
        assert_eq!(made.hold.outcome, HoldOutcome::Held);
    }

    /// A counter has a bounded number of live holds. A further one is an error that changes nothing; the end of a hold allows another one.
    the_live_holds_of_a_counter_are_bounded(fixture) {
        let limit = concurrency(1_000_000);
        let counter = fixture.new_counter();
        if !fill_with_holds(&counter, &limit).await {
            return;
        }
        let other = concurrency(2);
        let tiers = [(&*counter.key, terms(&limit, 1)), ("other", terms(&other, 1))];
        let full = fixture.decide_held(&tiers, "further", HOLD).await;
        assert_eq!(outcomes(&full), [HoldOutcome::Full, HoldOutcome::NotHeld]);
        let peek = fixture.decide(Operation::Peek, &tiers, 1).await;
        assert_eq!(peek[0].available, 1_000_000 - MAX_LIVE_HOLDS as i64);
        assert_eq!(peek[1].available, 2);
        assert_eq!(counter.on_hold("last", &limit, 1, HOLD).await.hold.outcome, HoldOutcome::Repeated);
        counter.on_hold("last", &limit, 0, SETTLE).await;
        let made = fixture.decide_held(&tiers, "further", HOLD).await;
        assert_eq!(outcomes(&made), [HoldOutcome::Held, HoldOutcome::Held]);
        assert_eq!(outcomes(&fixture.decide_held(&tiers, "beyond", HOLD).await), [HoldOutcome::Full, HoldOutcome::NotHeld]);
    }
}

/// Fills a counter with live holds of one unit, the last of which has the id `last`. In Redis, the others are written without the store.
/// Returns `false` if the server is not known.
async fn fill_with_holds(counter: &Counter<'_>, limit: &Limit) -> bool {
    let others = MAX_LIVE_HOLDS - 1;
    match (&counter.fixture.store, &counter.fixture.server) {
        (Store::Memory(store), _) => {
            for number in 0..others {
                let made = store.decide_all(slice::from_ref(&held(
                    &[(&*counter.key, terms(limit, 1))],
                    &number.to_string(),
                    HOLD,
                )));
                assert_eq!(made[0].answers[0].hold.outcome, HoldOutcome::Held);
            }
        }
        (_, Some(server)) => {
            counter.on_hold("first", limit, 1, HOLD).await;
            let mut connection = server.connection();
            let keys: Vec<String> = redis::cmd("KEYS")
                .arg(format!("sg1:*}}:concurrency:!key:{}", counter.key))
                .query(&mut connection)
                .expect("an answer");
            let fill = "local last = redis.call('ZREVRANGE', KEYS[1], '0', '0', 'WITHSCORES') \
                        for number = 2, tonumber(ARGV[1]) do \
                          redis.call('ZADD', KEYS[1], last[2], string.sub(last[1], 1, 17) .. number) \
                        end \
                        redis.call('ZADD', KEYS[1], -1 - ARGV[1], '')";
            let [key] = &*keys else { panic!("one counter: {keys:?}") };
            redis::cmd("EVAL")
                .arg(fill)
                .arg(1)
                .arg(key)
                .arg(others)
                .exec(&mut connection)
                .expect("an answer");
        }
        _ => return false,
    }
    let last = counter.on_hold("last", limit, 1, HOLD).await;
    assert_eq!(last.hold.outcome, HoldOutcome::Held);
    true
}
