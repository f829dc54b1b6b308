//! Holds over a store whose replies the test controls: attempts whose outcome is unknown, callers that are dropped, and holds that the
//! failure policy `local` makes.

use std::{collections::VecDeque, future::pending, slice, sync::Arc, time::Duration};

use futures_util::{FutureExt, future::join_all};
use parking_lot::Mutex;
use sluicegate::stats::HoldStats;
use sluicegate::{
    Algorithm, Cost, Costs, Error, Labels, Limit, Limiter, ManualClock, MemoryStore, OnStoreFailure, Options,
    Rule, Source, StoreError, Timestamp,
    limiter::{HoldToken, OnExpiry, Operation, Request, RuleSelection, SettleOutcome},
    store::{BoxFuture, Check, CheckAnswer, Deadline, HoldId, Key, RemoteStore, Store, encoded_rule},
};
use sluicegate_testkit::wait;
use tokio::time::sleep;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const DEADLINE: Duration = Duration::from_millis(100);

/// What happens to a call.
#[derive(Clone, Debug)]
enum Call {
    /// It is decided, and answered after this time.
    Answered(Duration),
    /// It is decided, and its reply is lost after this time.
    ReplyLost(Duration),
    /// It is decided and never answered.
    Unanswered,
    /// It fails with this error after this time, and nothing is decided.
    Failed(Duration, StoreError),
}

/// A store over counters in memory. Calls beyond the plan are answered at once, or fail at once while it is down.
struct PlannedStore {
    counters: MemoryStore,
    plan: Mutex<VecDeque<Call>>,
    is_down: Mutex<bool>,
    /// Whether the server with the counters of tokens is down.
    is_half_down: Mutex<bool>,
}

/// The number of the server with the counters of tokens.
const TOKENS: u64 = 1;

impl PlannedStore {
    fn new() -> Arc<Self> {
        Self::over(MemoryStore::new())
    }

    fn with_clock(clock: &ManualClock) -> Arc<Self> {
        Self::over(MemoryStore::new().with_clock(clock.clone()))
    }

    fn over(counters: MemoryStore) -> Arc<Self> {
        let (plan, is_down, is_half_down) = Default::default();
        Arc::new(Self { counters, plan, is_down, is_half_down })
    }

    fn plan(&self, calls: impl IntoIterator<Item = Call>) {
        self.plan.lock().extend(calls);
    }

    fn set_down(&self, is_down: bool) {
        *self.is_down.lock() = is_down;
    }

    fn set_half_down(&self, is_half_down: bool) {
        *self.is_half_down.lock() = is_half_down;
    }

    /// Decides the checks that need no server that is down.
    fn decide_reachable(&self, checks: &[Check]) -> Vec<Result<CheckAnswer, StoreError>> {
        let is_half_down = *self.is_half_down.lock();
        let is_lost =
            |check: &Check| is_half_down && check.tiers().iter().any(|tier| self.server(&tier.key) == TOKENS);
        let decided = checks.iter().map(|check| {
            if is_lost(check) {
                Err(not_run())
            } else {
                Ok(self.counters.decide_all(slice::from_ref(check)).remove(0))
            }
        });
        decided.collect()
    }

    fn is_planned(&self) -> bool {
        !self.plan.lock().is_empty()
    }

    fn next(&self) -> Call {
        let is_down = *self.is_down.lock();
        let other =
            if is_down { Call::Failed(Duration::ZERO, not_run()) } else { Call::Answered(Duration::ZERO) };
        self.plan.lock().pop_front().unwrap_or(other)
    }
}

fn not_run() -> StoreError {
    StoreError::NotRun("the store is down".to_owned())
}

impl RemoteStore for PlannedStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async move {
            let call = self.next();
            let decide = || self.decide_reachable(checks);
            let wait = async |time: Duration| {
                if !time.is_zero() {
                    sleep(time).await;
                }
            };
            match call {
                Call::Answered(after) => {
                    let decided = decide();
                    wait(after).await;
                    decided
                }
                Call::ReplyLost(after) => {
                    decide();
                    wait(after).await;
                    vec![Err(StoreError::Ambiguous("the reply was lost".to_owned())); checks.len()]
                }
                Call::Unanswered => {
                    decide();
                    pending().await
                }
                Call::Failed(after, error) => {
                    wait(after).await;
                    vec![Err(error); checks.len()]
                }
            }
        })
    }

    fn server(&self, key: &Key) -> u64 {
        if key.rule() == "tokens" { TOKENS } else { TOKENS + 1 }
    }

    fn probe(&self, server: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        let is_down = *self.is_down.lock() || (server == TOKENS && *self.is_half_down.lock());
        Box::pin(async move { if is_down { Err(not_run()) } else { Ok(()) } })
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async { Ok(1) })
    }

    fn reset<'a>(&'a self, counters: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async { Ok(self.counters.forget(counters)) })
    }
}

/// A limiter with a budget of 100 tokens and 3 requests in flight.
fn limiter(policy: OnStoreFailure) -> (Limiter, Arc<PlannedStore>) {
    let store = PlannedStore::new();
    let rules = [
        Rule::new("tokens", Limit::fixed_window(100, DAY).unwrap()).unit("tokens").on_store_failure(policy),
        Rule::new("in-flight", Limit::concurrency(3).unwrap()).on_store_failure(policy),
    ];
    let options = Options::new().deadline(DEADLINE);
    (Limiter::builder().store(store.clone()).rules(rules).options(options).build().unwrap(), store)
}

static ANY: std::sync::LazyLock<Labels> = std::sync::LazyLock::new(Labels::default);

fn tokens(units: u64) -> Costs {
    Costs::new([("requests", Cost::ONE), ("tokens", Cost::new(units).unwrap())]).unwrap()
}

/// Returns the free tokens and requests in the store.
async fn left(limiter: &Limiter) -> [u64; 2] {
    let peeked = limiter.peek(&ANY, 0).await.unwrap();
    assert_eq!(peeked.source, Source::Store, "{peeked:?}");
    [0, 1].map(|tier: usize| peeked.tiers[tier].remaining)
}

/// Runs tasks in the background.
async fn settle_down() {
    sleep(Duration::from_secs(5)).await;
}

/// During a failover, the first attempt runs on the old primary, which dies before it replies, and the new one is not ready.
#[tokio::test(start_paused = true)]
async fn a_hold_may_exist_if_a_later_attempt_is_rejected_or_late() {
    let loading = StoreError::Rejected { code: "LOADING".to_owned(), detail: "loading".to_owned() };
    for error in [loading, StoreError::Late(Timestamp::default()), not_run()] {
        let failed = || Call::Failed(Duration::ZERO, error.clone());
        let attempts = [Call::ReplyLost(Duration::ZERO), failed(), failed(), failed()];
        let (limiter, store) = self::limiter(OnStoreFailure::Open);
        store.plan(attempts.clone());
        let held = limiter.hold(&ANY, tokens(50)).decide().await.unwrap();
        assert_eq!(held.decision.source, Source::Open);
        limiter.settle(&held.token.unwrap(), tokens(10)).await.unwrap();
        assert_eq!(left(&limiter).await, [90, 3], "it is settled: {attempts:?}");

        let (limiter, store) = self::limiter(OnStoreFailure::Closed);
        store.plan(attempts.clone());
        let held = limiter.hold(&ANY, tokens(50)).decide().await.unwrap();
        assert_eq!(held.decision.source, Source::Closed);
        settle_down().await;
        assert_eq!(left(&limiter).await, [100, 3], "it is released: {attempts:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_lost_reply_a_hold_is_sent_again_even_if_an_attempt_is_rejected() {
    let (limiter, store) = limiter(OnStoreFailure::Closed);
    let loading = StoreError::Rejected { code: "LOADING".to_owned(), detail: "loading".to_owned() };
    store.plan([Call::ReplyLost(Duration::ZERO), Call::Failed(Duration::ZERO, loading)]);
    let held = limiter.hold(&ANY, tokens(50)).decide().await.unwrap();
    assert_eq!((held.decision.source, held.is_repeated), (Source::Store, true), "{held:?}");
}

/// The first attempt is denied, and answered late. Meanwhile another request ends, so that the second attempt makes the hold.
#[tokio::test(start_paused = true)]
async fn a_hold_that_an_unanswered_attempt_made_after_a_denial_is_released() {
    let (limiter, store) = limiter(OnStoreFailure::Open);
    let others = limiter.hold(&ANY, tokens(100)).await.unwrap();
    store.plan([Call::Answered(DEADLINE * 7 / 10)]);
    let caller = limiter.clone();
    let caller = tokio::spawn(async move { caller.hold(&ANY, tokens(50)).decide().await.unwrap() });
    sleep(DEADLINE / 4).await;
    others.release().await.unwrap();
    store.plan([Call::Unanswered]);
    let held = caller.await.unwrap();
    assert!(!held.decision.is_allowed(), "{held:?}");
    settle_down().await;
    assert_eq!(left(&limiter).await, [100, 3]);
}

/// For example because a client disconnected.
#[tokio::test(start_paused = true)]
async fn a_settlement_whose_caller_is_dropped_is_completed() {
    for failure in [StoreError::Ambiguous("lost".to_owned()), not_run()] {
        let (limiter, store) = limiter(OnStoreFailure::Open);
        let [one, other] =
            [limiter.hold(&ANY, tokens(50)).await.unwrap(), limiter.hold(&ANY, tokens(50)).await.unwrap()];
        let later = DEADLINE / 5;
        store.plan([Call::Failed(later, failure.clone()), Call::Failed(later, failure)]);
        for settling in [one.settle(tokens(10)).boxed(), other.release().boxed()] {
            assert!(tokio::time::timeout(DEADLINE / 10, settling).await.is_err(), "it is dropped");
        }
        settle_down().await;
        assert_eq!(left(&limiter).await, [90, 3]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_policy_local_counts_the_usage_after_a_settlement() {
    let (limiter, store) = limiter(OnStoreFailure::Local);
    let [one, other] =
        [limiter.hold(&ANY, tokens(50)).await.unwrap(), limiter.hold(&ANY, tokens(50)).await.unwrap()];
    let last = limiter.hold(&ANY, tokens(0)).await.unwrap();
    last.release().await.unwrap();
    one.settle(tokens(10)).await.unwrap();
    assert_eq!(other.release().await.unwrap().tiers[0].remaining, Some(90));
    store.set_down(true);
    let held = limiter.hold(&ANY, tokens(50)).decide().await.unwrap();
    assert_eq!((held.decision.source, held.decision.is_allowed()), (Source::Fallback, true), "{held:?}");
    let denied = limiter.hold(&ANY, tokens(50)).decide().await.unwrap();
    assert_eq!((denied.decision.source, denied.decision.rule()), (Source::Fallback, Some("tokens")));
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_the_policy_local_made_can_be_repeated() {
    let (limiter, store) = limiter(OnStoreFailure::Local);
    let _in_store = limiter.hold(&ANY, tokens(10)).decide().await.unwrap();
    store.set_down(true);
    let hold = async |id: &str| {
        let request = limiter.hold(&ANY, tokens(10)).id(HoldId::new(id).unwrap());
        request.decide().await.unwrap()
    };
    for id in ["one", "other"] {
        let held = hold(id).await;
        assert!(held.decision.is_allowed() && !held.is_repeated, "{held:?}");
    }
    assert!(!hold("beyond").await.decision.is_allowed());
    let repeated = hold("one").await;
    assert!(repeated.decision.is_allowed() && repeated.is_repeated, "{repeated:?}");
    limiter.settle(&repeated.token.unwrap(), tokens(10)).await.unwrap();
    assert!(hold("next").await.decision.is_allowed());
}

/// The answers to such holds do not contain the usage of the counter.
#[tokio::test(start_paused = true)]
async fn an_exhausted_limit_stays_exhausted_for_the_policy_local_after_an_id_conflicts() {
    let (limiter, store) = limiter(OnStoreFailure::Local);
    let id = HoldId::new("id").unwrap();
    limiter.hold(&ANY, tokens(100)).id(id.clone()).decide().await.unwrap();
    let conflict = limiter.hold(&ANY, tokens(1)).id(id.clone()).decide().await;
    assert_eq!(conflict, Err(Error::HoldConflict(id)));
    store.set_down(true);
    let held = limiter.hold(&ANY, tokens(1)).decide().await.unwrap();
    assert_eq!((held.decision.source, held.decision.rule()), (Source::Fallback, Some("tokens")), "{held:?}");
}

/// The store may have the hold, too. If it was not renewed there, another request could take its place.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_the_store_does_not_answer_is_an_error_even_if_this_process_has_the_hold() {
    let (limiter, store) = limiter(OnStoreFailure::Local);
    store.plan([Call::ReplyLost(Duration::ZERO), Call::ReplyLost(Duration::ZERO)]);
    store.plan([Call::ReplyLost(Duration::ZERO), Call::ReplyLost(Duration::ZERO)]);
    let held = limiter.hold(&ANY, tokens(10)).decide().await.unwrap();
    assert_eq!((held.decision.source, held.decision.is_allowed()), (Source::Fallback, true), "{held:?}");
    let token = held.token.unwrap();
    store.set_down(true);
    assert!(limiter.renew(&token, DAY).await.is_err());
    store.set_down(false);
    settle_down().await;
    assert_eq!(limiter.renew(&token, DAY).await.unwrap().outcome, SettleOutcome::Renewed);
}

#[tokio::test(start_paused = true)]
async fn settling_a_hold_that_only_this_process_made_reports_no_units_of_the_store() {
    let (limiter, store) = limiter(OnStoreFailure::Local);
    store.set_down(true);
    let held = limiter.hold(&ANY, tokens(10)).decide().await.unwrap();
    assert_eq!(held.decision.source, Source::Fallback, "{held:?}");
    store.set_down(false);
    settle_down().await;
    assert_eq!(left(&limiter).await, [100, 3]);
    let settled = limiter.settle(&held.token.unwrap(), tokens(5)).await.unwrap();
    assert_eq!(settled.outcome, SettleOutcome::Settled);
    let remaining: Vec<_> = settled.tiers.iter().map(|tier| tier.remaining).collect();
    assert_eq!(remaining, [None, None]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_the_policy_open_allows_without_the_store_has_an_unknown_hold() {
    let (limiter, store) = limiter(OnStoreFailure::Open);
    store.set_down(true);
    let token = limiter.hold(&ANY, tokens(10)).decide().await.unwrap().token.unwrap();
    let token: HoldToken = token.to_string().parse().unwrap();
    assert!(token.is_empty());
    store.set_down(false);
    settle_down().await;
    assert_eq!(limiter.settle(&token, tokens(5)).await.unwrap().outcome, SettleOutcome::Unknown);
    assert_eq!(left(&limiter).await, [100, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_is_unknown_if_one_of_its_counters_was_reset() {
    let (limiter, _store) = limiter(OnStoreFailure::Open);
    let token = limiter.hold(&ANY, tokens(10)).await.unwrap().into_token();
    limiter.reset(&ANY, &RuleSelection::Named(vec!["tokens".to_owned()])).await.unwrap();
    let settled = limiter.settle(&token, tokens(5)).await.unwrap();
    let outcomes: Vec<_> = settled.tiers.iter().map(|tier| tier.outcome).collect();
    assert_eq!(outcomes, [SettleOutcome::Unknown, SettleOutcome::Settled]);
    assert_eq!(settled.outcome, SettleOutcome::Unknown);
}

#[tokio::test(start_paused = true)]
async fn a_queued_settlement_of_a_hold_that_the_store_has_lost_is_counted() {
    let (limiter, store) = limiter(OnStoreFailure::Open);
    let hold = limiter.hold(&ANY, tokens(10)).await.unwrap();
    store.set_down(true);
    assert_eq!(hold.settle(tokens(5)).await.unwrap().outcome, SettleOutcome::Queued);
    let day = Limit::fixed_window(100, DAY).unwrap().algorithm();
    let counters = [("tokens", day), ("in-flight", Algorithm::Concurrency)]
        .map(|(rule, algorithm)| (Key::of_rule(&encoded_rule(rule), &[], None), algorithm));
    assert_eq!(store.reset(&counters).await.unwrap(), 2);
    store.set_down(false);
    settle_down().await;
    let HoldStats { waiting, unknown, .. } = limiter.stats().holds;
    assert_eq!((waiting, unknown), (0, 2), "one on each server");
}

#[tokio::test]
async fn a_guard_that_is_dropped_outside_of_a_runtime_releases_its_hold() {
    let (limiter, _store) = limiter(OnStoreFailure::Open);
    let hold = limiter.hold(&ANY, tokens(10)).await.unwrap();
    std::thread::spawn(move || drop(hold)).join().unwrap();
    assert_eq!(limiter.flush_settlements(wait::PATIENCE).await, 0);
    assert_eq!(left(&limiter).await, [100, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_flush_waits_for_settlements_in_the_background() {
    let (limiter, store) = limiter(OnStoreFailure::Open);
    let slow = || Call::Answered(DEADLINE / 3);
    let token = limiter.hold(&ANY, tokens(50)).await.unwrap().into_token();
    store.plan([slow()]);
    limiter.settle_later(token, tokens(10));
    assert_eq!(limiter.flush_settlements(Duration::ZERO).await, 1);
    assert_eq!(limiter.flush_settlements(Duration::MAX).await, 0);
    assert_eq!(left(&limiter).await, [90, 3]);

    let dropped = limiter.hold(&ANY, tokens(50));
    store.plan([slow()]);
    assert!(tokio::time::timeout(DEADLINE / 10, dropped.decide()).await.is_err(), "its caller is dropped");
    assert_eq!(limiter.flush_settlements(DEADLINE).await, 0);
    assert_eq!(left(&limiter).await, [90, 3]);

    let queued = limiter.hold(&ANY, tokens(50)).await.unwrap();
    store.set_down(true);
    assert_eq!(queued.release().await.unwrap().outcome, SettleOutcome::Queued);
    assert_eq!(limiter.flush_settlements(DEADLINE).await, 2, "one on each server");
    store.set_down(false);
    assert_eq!(limiter.flush_settlements(DAY).await, 0);
    assert_eq!(left(&limiter).await, [90, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_hold_that_only_this_process_made_is_not_counted_as_unknown() {
    let (limiter, store) = limiter(OnStoreFailure::Local);
    store.set_down(true);
    let token = limiter.hold(&ANY, tokens(10)).decide().await.unwrap().token.unwrap();
    assert_eq!(limiter.settle(&token, tokens(5)).await.unwrap().outcome, SettleOutcome::Settled);
    store.set_down(false);
    settle_down().await;
    let HoldStats { settled, waiting, unknown, .. } = limiter.stats().holds;
    assert_eq!((settled, waiting, unknown), (1, 0, 0));
}

#[test]
fn a_flush_sends_settlements_that_a_stopped_runtime_has_queued() {
    let (limiter, store) = limiter(OnStoreFailure::Open);
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    runtime().block_on(async {
        let hold = limiter.hold(&ANY, tokens(10)).await.unwrap();
        store.set_down(true);
        assert_eq!(hold.release().await.unwrap().outcome, SettleOutcome::Queued);
    });
    store.set_down(false);
    runtime().block_on(async {
        assert_eq!(limiter.flush_settlements(wait::PATIENCE).await, 0);
        assert_eq!(left(&limiter).await, [100, 3]);
    });
}

#[tokio::test(start_paused = true)]
async fn a_settlement_ends_cached_denials_and_a_renewal_does_not() {
    let store = PlannedStore::new();
    let rule = Rule::new("tokens", Limit::fixed_window(100, DAY).unwrap()).unit("tokens");
    let limiter = Limiter::new(store, [rule]).unwrap();
    let used = || Costs::new([("tokens", Cost::new(1).unwrap())]).unwrap();
    let source = async || limiter.check(&ANY, used()).await.unwrap().source;
    let hold = limiter.hold(&ANY, tokens(100)).await.unwrap();
    assert_eq!([source().await, source().await], [Source::Store, Source::Cache]);
    hold.renew(DAY).await.unwrap();
    assert_eq!(source().await, Source::Cache);
    hold.settle(tokens(99)).await.unwrap();
    assert_eq!(limiter.check(&ANY, used()).await.unwrap().source, Source::Store);
}

/// The end or the expiry of a hold may admit the next request at any time.
#[tokio::test(start_paused = true)]
async fn only_a_denial_that_no_hold_can_end_is_cached() {
    let window = Limit::fixed_window(1, DAY).unwrap();
    let releasing = window.with_on_expiry(OnExpiry::Release).unwrap();
    for (limit, repeated) in [(window, Source::Cache), (releasing, Source::Store)] {
        let limiter = Limiter::new(PlannedStore::new(), [Rule::new("limit", limit)]).unwrap();
        limiter.hold(&ANY, 1).await.unwrap().into_token();
        for (nth, source) in [Source::Store, repeated, repeated].into_iter().enumerate() {
            let denied = limiter.check(&ANY, 1).await.unwrap();
            assert_eq!((denied.is_allowed(), denied.source), (false, source), "{limit:?}: check {nth}");
        }
    }
    let limits = [window, releasing, Limit::concurrency(1).unwrap()];
    for limit in limits {
        let limiter = Limiter::new(PlannedStore::new(), [Rule::new("limit", limit)]).unwrap();
        limiter.hold(&ANY, 1).await.unwrap().into_token();
        for nth in 0..3 {
            let denied = limiter.hold(&ANY, 1).decide().await.unwrap().decision;
            assert_eq!((denied.is_allowed(), denied.source), (false, Source::Store), "{limit:?}: hold {nth}");
        }
    }
    // one rule is enough: its denial, or that of another rule of the same check, is not cached
    let rules = [Rule::new("window", window), Rule::new("releasing", releasing)];
    let limiter = Limiter::new(PlannedStore::new(), rules).unwrap();
    for expected in [true, false, false] {
        let decision = limiter.check(&ANY, 1).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.source), (expected, Source::Store));
    }
}

/// The most settlements that are queued, and the most counters of all of them.
const MOST_QUEUED: usize = 16_384;
const MOST_QUEUED_TIERS: usize = 65_536;

#[tokio::test(start_paused = true)]
async fn the_queue_of_settlements_is_bounded_by_their_number_and_by_their_counters() {
    for (tiers, most) in [(1, MOST_QUEUED), (5, MOST_QUEUED_TIERS / 5)] {
        let store = PlannedStore::new();
        let rules =
            (0..tiers).map(|tier| Rule::new(&format!("in-flight-{tier}"), Limit::concurrency(1).unwrap()));
        let limiter = Limiter::new(store.clone(), rules).unwrap();
        let hold = limiter.hold(&ANY, 1).await.unwrap();
        store.set_down(true);
        let mut queued = 0;
        let token = hold.into_token();
        let error = loop {
            match limiter.release(&token).await {
                Ok(settled) => assert_eq!(settled.outcome, SettleOutcome::Queued),
                Err(error) => break error,
            }
            queued += 1;
            assert!(queued <= most, "{tiers} counters: the queue is not full");
        };
        assert_eq!(queued, most, "{tiers} counters: {error}");
        assert!(matches!(error, Error::Store(StoreError::NotRun(_))), "{error:?}");
        assert_eq!(limiter.stats().holds.waiting, most);

        // what is queued is sent after the outage, and there is room again
        store.set_down(false);
        assert_eq!(limiter.flush_settlements(DAY).await, 0);
        let next = limiter.hold(&ANY, 1).await.unwrap();
        store.set_down(true);
        assert_eq!(next.release().await.unwrap().outcome, SettleOutcome::Queued);
    }
}

/// By then, most holds have expired.
#[tokio::test(start_paused = true)]
async fn a_queued_settlement_is_dropped_after_ten_minutes() {
    let age = Duration::from_secs(600);
    for (outage, left_after) in [(age - DEADLINE * 20, [90, 3]), (age + DEADLINE * 20, [50, 2])] {
        let (limiter, store) = limiter(OnStoreFailure::Closed);
        let hold = limiter.hold(&ANY, tokens(50)).await.unwrap();
        store.set_down(true);
        assert_eq!(hold.settle(tokens(10)).await.unwrap().outcome, SettleOutcome::Queued);
        sleep(outage).await;
        let is_kept = outage < age;
        assert_eq!(limiter.stats().holds.waiting, if is_kept { 2 } else { 0 }, "one on each server");
        store.set_down(false);
        settle_down().await;
        assert_eq!(left(&limiter).await, left_after, "after {outage:?}");
    }
}

#[test]
fn a_hold_that_is_answered_at_once_needs_no_runtime() {
    let (limiter, _store) = limiter(OnStoreFailure::Open);
    let held = limiter.hold(&ANY, tokens(50)).decide().now_or_never().expect("it is answered").unwrap();
    let settled = limiter.settle(&held.token.unwrap(), tokens(10)).now_or_never().expect("it is answered");
    assert_eq!(settled.unwrap().outcome, SettleOutcome::Settled);
}

/// A process may have several runtimes, of which one stops.
#[test]
fn queued_settlements_survive_the_end_of_the_runtime_that_sends_them() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (limiter, store) = limiter(OnStoreFailure::Open);
    let holds = runtime().block_on(async {
        let one = limiter.hold(&ANY, tokens(50)).await.unwrap();
        let other = limiter.hold(&ANY, tokens(50)).await.unwrap().into_token();
        let unanswered = || Call::Failed(DAY, not_run());
        store.plan([Call::Failed(Duration::ZERO, not_run()), unanswered(), unanswered()]);
        assert_eq!(one.settle(tokens(10)).await.unwrap().outcome, SettleOutcome::Queued);
        while store.is_planned() {
            sleep(Duration::from_millis(1)).await;
        }
        other
    });
    assert_eq!(limiter.stats().holds.waiting, 2, "one on each server");
    runtime().block_on(async {
        store.plan([Call::Failed(Duration::ZERO, not_run())]);
        assert_eq!(limiter.release(&holds).await.unwrap().outcome, SettleOutcome::Queued);
        assert_eq!(limiter.stats().holds.waiting, 4);
        wait::until_async("both are settled", wait::PATIENCE, async || limiter.stats().holds.waiting == 0)
            .await;
        assert_eq!(left(&limiter).await, [90, 3]);
    });
}

#[tokio::test(start_paused = true)]
async fn a_queued_settlement_does_not_wait_for_another_server() {
    let (limiter, store) = limiter(OnStoreFailure::Closed);
    let [one, other] =
        [limiter.hold(&ANY, tokens(50)).await.unwrap(), limiter.hold(&ANY, tokens(50)).await.unwrap()];
    store.set_half_down(true);
    assert_eq!(one.settle(tokens(10)).await.unwrap().outcome, SettleOutcome::Queued);
    assert_eq!(other.release().await.unwrap().outcome, SettleOutcome::Queued);
    settle_down().await;
    let in_flight = Request::new(ANY.clone(), 0)
        .rules(RuleSelection::Named(vec!["in-flight".to_owned()]))
        .operation(Operation::Peek);
    let peeked = limiter.start(&in_flight).unwrap().decision().await.unwrap();
    assert_eq!((peeked.source, peeked.remaining()), (Source::Store, Some(3)));
    assert_eq!(limiter.stats().holds.waiting, 2);
    store.set_half_down(false);
    settle_down().await;
    assert_eq!(left(&limiter).await, [90, 3]);
}

#[tokio::test]
async fn renewing_a_hold_that_has_expired_reports_no_units() {
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let limiter = Limiter::new(MemoryStore::new().with_clock(clock.clone()), []).unwrap();
    let limit = Limit::fixed_window(100, DAY).unwrap();
    let hold = limiter.hold_key("k", &limit, Cost::ONE).await.unwrap();
    clock.advance(Duration::from_secs(61));
    let renewed = hold.renew(Duration::from_secs(60)).await.unwrap();
    assert_eq!((renewed.outcome, renewed.tiers[0].remaining), (SettleOutcome::Late, None));
    let released = hold.release().await.unwrap();
    assert_eq!((released.outcome, released.tiers[0].remaining), (SettleOutcome::Late, Some(100)));
}

/// A check releases them, whether it is a hold or not.
#[tokio::test(start_paused = true)]
async fn holds_that_are_found_to_have_expired_are_counted_once() {
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let remote = PlannedStore::with_clock(&clock);
    let local = MemoryStore::new().with_clock(clock.clone());
    let limit = Limit::fixed_window(100, DAY).unwrap().with_on_expiry(OnExpiry::Release).unwrap();
    for store in [Store::from(local), Store::from(remote.clone())] {
        let limiter = Limiter::new(store, []).unwrap();
        for _ in 0..3 {
            limiter.hold_key("k", &limit, Cost::ONE).await.unwrap().into_token();
        }
        clock.advance(Duration::from_secs(61));
        // while one call is in flight, the others form a batch, in which equal checks are one
        remote.plan([Call::Answered(DEADLINE / 10)]);
        let checks = join_all((0..8).map(|number| {
            let key = if number == 0 { "other" } else { "k" };
            limiter.check_key(key, &limit, Cost::ONE)
        }));
        for decision in checks.await {
            assert!(decision.unwrap().is_allowed());
        }
        let HoldStats { held, expired, .. } = limiter.stats().holds;
        assert_eq!((held, expired), (3, 3));
        limiter.peek_key("k", &limit, Cost::ONE).await.unwrap();
        assert_eq!(limiter.stats().holds.expired, 3);
    }
}
