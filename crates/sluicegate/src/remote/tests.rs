//! Batching, the denial cache and the circuit breaker, over a store whose replies the test controls.

use std::{
    collections::VecDeque,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use sluicegate_core::{Algorithm, Cost, Limit, Operation, Retry, Terms, Timestamp, step::Share};
use tokio::{sync::Semaphore, task::JoinHandle};

use super::{circuit_breaker::MAX_FAILURES, *};
use crate::{
    ManualClock, MemoryStore,
    check::Tier,
    key::Key,
    store::{BoxFuture, Deadline, per_check},
};

const MINUTE: Duration = Duration::from_secs(60);

/// The number of a server that never answers.
const SILENT: u64 = 1;

/// A remote store whose calls each wait for a permit and are recorded.
struct GatedStore {
    counters: MemoryStore,
    permits: Semaphore,
    calls: Mutex<VecDeque<Vec<u32>>>,
    is_broken: AtomicBool,
}

impl GatedStore {
    fn check_health(&self) -> Result<(), StoreError> {
        let broken = self.is_broken.load(Ordering::Relaxed);
        if broken { Err(StoreError::NotRun("broken".to_owned())) } else { Ok(()) }
    }

    async fn decide(&self, checks: &[Check]) -> Result<Vec<CheckAnswer>, StoreError> {
        let is_poison = |tier: &Tier| tier.key.identity() == "poison";
        assert!(
            !checks.iter().flat_map(Check::tiers).any(is_poison),
            "the key poison makes this store panic"
        );
        self.calls.lock().push_back(checks.iter().map(Check::count).collect());
        self.check_health()?;
        if checks.iter().flat_map(Check::tiers).any(|tier| self.server(&tier.key) == SILENT) {
            return pending().await;
        }
        self.permits.acquire().await.unwrap().forget();
        self.check_health()?;
        Ok(self.counters.decide_all(checks))
    }
}

impl RemoteStore for GatedStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async move {
            let decided = self.decide(checks).await;
            per_check(decided.map(|answers| answers.into_iter().map(Ok).collect()), checks.len())
        })
    }

    fn server(&self, key: &Key) -> u64 {
        u64::from(key.identity() == "silent")
    }

    fn probe(&self, server: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { if server == SILENT { pending().await } else { self.check_health() } })
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async { Ok(1) })
    }

    fn reset<'a>(&'a self, counters: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async move { Ok(self.counters.forget(counters)) })
    }
}

impl Remote {
    /// Decides one request as a limiter does.
    async fn decide_cached(
        self: &Arc<Self>,
        check: &Check,
        deadline: Option<Duration>,
    ) -> Result<CheckShares, StoreError> {
        match self.decide_here(check) {
            Some(denial) => Ok(denial),
            None => self.decide(check, deadline).await,
        }
    }
}

struct Subject {
    store: Arc<GatedStore>,
    remote: Arc<Remote>,
    clock: ManualClock,
}

impl Subject {
    fn new() -> Self {
        Self::with_deadline(MINUTE)
    }

    fn with_deadline(deadline: Duration) -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let counters = MemoryStore::new().with_clock(clock.clone());
        let (permits, is_broken) = (Semaphore::new(0), AtomicBool::new(false));
        let store = Arc::new(GatedStore { counters, permits, calls: Mutex::default(), is_broken });
        let options = Options::default().deadline(deadline);
        let remote = Arc::new(Remote::new(Arc::clone(&store) as Arc<dyn RemoteStore>, options));
        remote.upstreams.first().queue.set_limit(2);
        Self { store, remote, clock }
    }

    /// Starts a request in its own task and runs it until it waits.
    async fn start(&self, check: &Check) -> JoinHandle<Result<CheckShares, StoreError>> {
        let (remote, check) = (Arc::clone(&self.remote), check.clone());
        let task = tokio::spawn(async move { remote.decide_cached(&check, None).await });
        settle().await;
        task
    }

    /// The same for a caller with its own deadline.
    async fn start_within(
        &self,
        check: &Check,
        budget: Duration,
    ) -> JoinHandle<Result<CheckShares, StoreError>> {
        let (remote, check) = (Arc::clone(&self.remote), check.clone());
        let task = tokio::spawn(async move { remote.decide_cached(&check, Some(budget)).await });
        settle().await;
        task
    }

    /// Makes several calls that take this long.
    async fn measure_round_trip(&self, round_trip: Duration) {
        for _ in 0..16 {
            let caller = self.start(&check("measured", limit(99), 1)).await;
            tokio::time::advance(round_trip).await;
            self.answer(1).await;
            assert!(share(caller).await.passes);
        }
        self.calls();
    }

    async fn answer(&self, calls: usize) {
        self.store.permits.add_permits(calls);
        settle().await;
    }

    /// The calls since the last call of this method: for each, the counts of its checks.
    fn calls(&self) -> Vec<Vec<u32>> {
        self.store.calls.lock().drain(..).collect()
    }

    /// Decides one request with a store that answers immediately.
    async fn decide(&self, check: &Check) -> CheckShares {
        self.store.permits.add_permits(1);
        let verdict = self.remote.decide_cached(check, None).await.unwrap();
        if verdict.at.is_none() {
            self.store.permits.acquire().await.unwrap().forget();
        }
        verdict
    }

    /// Moves both clocks: that of the store and that of this process.
    async fn advance(&self, duration: Duration) {
        self.clock.advance(duration);
        tokio::time::advance(duration).await;
    }
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn limit(amount: u64) -> Limit {
    Limit::sliding_log(amount, MINUTE).unwrap()
}

fn check(key: &str, limit: Limit, cost: u32) -> Check {
    operation(Operation::Check, key, limit, cost)
}

fn operation(operation: Operation, key: &str, limit: Limit, cost: u32) -> Check {
    let tier = Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(limit, Cost::from(cost)) };
    Check::new(operation, vec![tier]).unwrap()
}

async fn share(task: JoinHandle<Result<CheckShares, StoreError>>) -> Share {
    task.await.unwrap().unwrap().shares[0].1
}

#[tokio::test(start_paused = true)]
async fn a_check_is_sent_alone_and_at_once_when_nothing_is_in_flight() {
    let subject = Subject::new();
    for left in [2, 1, 0] {
        assert_eq!(subject.decide(&check("k", limit(3), 1)).await.shares[0].1.remaining, left);
    }
    assert_eq!(subject.calls(), [[1], [1], [1]]);
}

#[tokio::test(start_paused = true)]
async fn checks_that_arrive_while_calls_are_in_flight_form_the_next_batch() {
    let subject = Subject::new();
    let mut tasks = Vec::new();
    for key in ["a", "b", "hot", "c", "hot", "hot", "d"] {
        tasks.push(subject.start(&check(key, limit(9), 1)).await);
    }
    assert_eq!(subject.calls(), [[1], [1]], "two calls are out, the others wait");
    subject.answer(1).await;
    assert_eq!(subject.calls(), [[3, 1, 1]], "three of hot, one each of c and d");
    subject.answer(2).await;
    let mut left = Vec::new();
    for task in tasks {
        left.push(share(task).await.remaining);
    }
    assert_eq!(left, [8, 8, 8, 8, 7, 6, 8], "first come, first served");
}

#[tokio::test(start_paused = true)]
async fn requests_are_admitted_in_order_of_arrival_and_each_caller_gets_its_own_answer() {
    let subject = Subject::new();
    let busy = [subject.start(&check("x", limit(9), 1)).await, subject.start(&check("y", limit(9), 1)).await];
    let mut tasks = Vec::new();
    for _ in 0..5 {
        tasks.push(subject.start(&check("hot", limit(10), 3)).await);
    }
    subject.answer(3).await;
    let mut shares = Vec::new();
    for task in tasks {
        let share = share(task).await;
        shares.push((share.passes, share.remaining, share.retry));
    }
    let after = Some(Retry::After(MINUTE));
    assert_eq!(
        shares,
        [(true, 7, None), (true, 4, None), (true, 1, None), (false, 1, after), (false, 1, after)]
    );
    drop(busy);
}

#[tokio::test(start_paused = true)]
async fn a_caller_dropped_while_queued_is_not_charged_and_does_not_block_others() {
    let subject = Subject::new();
    let first = subject.start(&check("x", limit(9), 1)).await;
    let second = subject.start(&check("y", limit(9), 1)).await;
    let gone = subject.start(&check("k", limit(9), 1)).await;
    let alone = subject.start(&check("only", limit(9), 1)).await;
    let stays = subject.start(&check("k", limit(9), 1)).await;
    assert_eq!(subject.calls(), [[1], [1]]);
    gone.abort();
    alone.abort();
    // the caller that made the call is dropped too: its call continues
    first.abort();
    settle().await;
    assert!(subject.calls().is_empty());
    subject.answer(1).await;
    assert_eq!(subject.calls(), [[1]], "one of k, none of only");
    subject.answer(2).await;
    assert_eq!(share(stays).await.remaining, 8);
    assert_eq!(share(second).await.remaining, 8);
    assert_eq!(subject.decide(&check("k", limit(9), 1)).await.shares[0].1.remaining, 7);
}

#[tokio::test(start_paused = true)]
async fn a_panicking_store_does_not_break_later_calls() {
    let subject = Subject::new();
    for _ in 0..3 {
        let busy =
            [subject.start(&check("x", limit(99), 1)).await, subject.start(&check("y", limit(99), 1)).await];
        let poison = subject.start(&check("poison", limit(9), 1)).await;
        subject.answer(2).await;
        let error = poison.await.unwrap().unwrap_err();
        assert_eq!(error, StoreError::Ambiguous("call ended without an answer".to_owned()));
        for task in busy {
            assert!(share(task).await.passes);
        }
    }
    assert!(subject.decide(&check("k", limit(9), 1)).await.shares[0].1.passes);
}

#[tokio::test(start_paused = true)]
async fn the_batch_and_the_queue_are_bounded() {
    let subject = Subject::new();
    let mut tasks = Vec::new();
    for key in 0..150 {
        tasks.push(subject.start(&check(&key.to_string(), limit(9), 1)).await);
    }
    subject.answer(1).await;
    subject.answer(1).await;
    subject.answer(1).await;
    let sizes: Vec<usize> = subject.calls().iter().map(Vec::len).collect();
    assert_eq!(sizes, [1, 1, 64, 64, 20]);

    let subject = Subject::new();
    let hot = check("hot", limit(9), 1);
    for _ in 0..2 + 16_384 {
        let (remote, check) = (Arc::clone(&subject.remote), hot.clone());
        tokio::spawn(async move { remote.decide_cached(&check, None).await });
        tokio::task::yield_now().await;
    }
    settle().await;
    let error = subject.remote.decide_cached(&hot, None).await.unwrap_err();
    assert!(matches!(&error, StoreError::NotRun(reason) if reason.contains("16384 callers")), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_certain_denial_is_answered_from_the_cache_until_it_expires() {
    let subject = Subject::new();
    let one = check("k", limit(2), 1);
    subject.decide(&check("k", limit(2), 2)).await;
    assert!(subject.decide(&one).await.at.is_some(), "the store makes the first denial");
    subject.calls();
    subject.advance(Duration::from_millis(400)).await;
    let denied = subject.decide(&one).await;
    assert_eq!((denied.at, denied.shares.len()), (None, 1));
    let share = denied.shares[0].1;
    let left = Retry::After(MINUTE - Duration::from_millis(400));
    assert_eq!((share.passes, share.remaining, share.retry), (false, 0, Some(left)));
    assert!(subject.calls().is_empty());
    assert!(
        subject.decide(&check("k", limit(2), 2)).await.at.is_some(),
        "the wait of a larger cost is not known"
    );
    assert!(subject.decide(&check("k", limit(2), 2)).await.at.is_none());
    subject.calls();
    subject.decide(&check("other", limit(2), 1)).await;
    subject.decide(&operation(Operation::Peek, "k", limit(2), 1)).await;
    assert!(
        subject.decide(&check("k", limit(3), 1)).await.shares[0].1.passes,
        "a cached denial applies only to its limit"
    );
    assert_eq!(subject.calls().len(), 3);
    subject.advance(Duration::from_millis(600)).await;
    assert!(subject.decide(&one).await.at.is_some(), "a second is over");
}

#[tokio::test(start_paused = true)]
async fn another_cost_is_sent_and_a_cached_denial_ends_on_time() {
    let subject = Subject::new();
    let limit = Limit::token_bucket(10, Duration::from_secs(1)).unwrap();
    subject.decide(&check("k", limit, 9)).await;
    assert!(!subject.decide(&check("k", limit, 2)).await.shares[0].1.passes);
    assert!(subject.decide(&check("k", limit, 1)).await.shares[0].1.passes, "less may fit");
    subject.calls();
    let denied = subject.decide(&check("k", limit, 2)).await;
    assert_eq!(
        denied.shares[0].1.retry,
        Some(Retry::After(Duration::from_millis(100))),
        "the cached wait is exact"
    );
    assert!(subject.calls().is_empty());
    subject.advance(Duration::from_millis(100)).await;
    let denied = subject.decide(&check("k", limit, 2)).await;
    assert_eq!(
        denied.shares[0].1.retry,
        Some(Retry::After(Duration::from_millis(100))),
        "one more request has arrived since"
    );
    assert_eq!(subject.calls().len(), 1);
    subject.advance(Duration::from_millis(100)).await;
    assert!(subject.decide(&check("k", limit, 2)).await.shares[0].1.passes);
}

#[tokio::test(start_paused = true)]
async fn a_reset_and_a_refund_in_this_process_take_effect_immediately() {
    let subject = Subject::new();
    let hit = check("k", limit(1), 1);
    subject.decide(&hit).await;
    assert!(!subject.decide(&hit).await.shares[0].1.passes);
    subject.remote.reset(&(Key::without_rule("k").unwrap(), Algorithm::SlidingLog), None).await.unwrap();
    assert!(subject.decide(&hit).await.shares[0].1.passes);
    assert!(!subject.decide(&hit).await.shares[0].1.passes);
    subject.decide(&operation(Operation::Refund { at: None }, "k", limit(1), 1)).await;
    assert!(subject.decide(&hit).await.shares[0].1.passes);
}

#[tokio::test(start_paused = true)]
async fn a_denial_in_flight_during_a_reset_is_not_cached() {
    let subject = Subject::new();
    let hit = check("k", limit(1), 1);
    subject.decide(&hit).await;
    subject.calls();
    let denied = subject.start(&hit).await;
    subject.remote.shared.denials.record_change(hit.keys());
    subject.answer(1).await;
    assert!(!share(denied).await.passes);
    subject.decide(&hit).await;
    assert_eq!(subject.calls().len(), 2, "the store decides again");
}

#[tokio::test(start_paused = true)]
async fn a_cached_denial_names_the_tiers_that_deny() {
    let subject = Subject::new();
    let tier = |key: &str, amount, window| Tier {
        key: Key::without_rule(key).unwrap(),
        terms: Terms::new(Limit::sliding_log(amount, window).unwrap(), Cost::ONE),
    };
    let tiers = vec![tier("wide", 9, MINUTE), tier("short", 1, MINUTE / 30), tier("long", 1, MINUTE)];
    let check = Check::new(Operation::Check, tiers).unwrap();
    subject.decide(&check).await;
    subject.decide(&check).await;
    subject.calls();
    let denied = subject.decide(&check).await;
    let shares: Vec<_> = denied.shares.iter().map(|(place, share)| (*place, share.retry)).collect();
    assert_eq!(shares, [(1, Some(Retry::After(MINUTE / 30))), (2, Some(Retry::After(MINUTE)))]);
    assert!(subject.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_reply_ends_at_the_deadline() {
    let silent = std::future::pending::<Result<(), StoreError>>();
    let error = with_deadline(Options::default().deadline, silent).await.unwrap_err();
    assert_eq!(error, StoreError::Ambiguous("no answer within 50ms".to_owned()));
}

#[test]
fn a_ready_answer_needs_no_runtime() {
    let mut call = pin!(with_deadline(MINUTE, async { Ok::<_, StoreError>(7) }));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    assert_eq!(call.as_mut().poll(&mut context), Poll::Ready(Ok(7)));
}

#[tokio::test(start_paused = true)]
async fn repeated_failures_open_the_breaker_until_the_store_answers() {
    let subject = Subject::new();
    let request = check("k", limit(100), 1);
    subject.store.is_broken.store(true, Ordering::Relaxed);
    for _ in 0..2 * MAX_FAILURES {
        assert!(matches!(subject.remote.decide_cached(&request, None).await, Err(StoreError::NotRun(_))));
    }
    assert_eq!(subject.calls().len(), usize::try_from(MAX_FAILURES).unwrap());
    let counter = (Key::without_rule("k").unwrap(), Algorithm::SlidingLog);
    assert!(matches!(subject.remote.reset(&counter, None).await, Err(StoreError::NotRun(_))));
    tokio::time::sleep(MINUTE).await;
    assert!(subject.remote.decide_cached(&request, None).await.is_err());
    assert_eq!(subject.calls(), [[0; 0]; 0], "no caller waits for a store that is still unavailable");

    subject.store.is_broken.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(subject.decide(&request).await.shares[0].1.remaining, 99);
}

#[tokio::test(start_paused = true)]
async fn failures_with_successes_in_between_do_not_open_the_breaker() {
    let subject = Subject::new();
    for _ in 0..2 * MAX_FAILURES {
        subject.store.is_broken.store(true, Ordering::Relaxed);
        for _ in 1..MAX_FAILURES {
            assert!(subject.remote.decide_cached(&check("k", limit(100), 1), None).await.is_err());
        }
        subject.store.is_broken.store(false, Ordering::Relaxed);
        subject.decide(&check("k", limit(100), 1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_opens_the_breaker_and_no_caller_exceeds_the_deadline() {
    let deadline = Duration::from_millis(10);
    let subject = Subject::with_deadline(deadline);
    let begun = Instant::now();
    for _ in 0..MAX_FAILURES {
        let before = Instant::now();
        assert!(matches!(
            subject.remote.decide_cached(&check("k", limit(9), 1), None).await,
            Err(StoreError::Ambiguous(_))
        ));
        assert_eq!(before.elapsed(), deadline);
    }
    let waiting = begun.elapsed();
    settle().await;
    for _ in 0..100 {
        assert!(matches!(
            subject.remote.decide_cached(&check("k", limit(9), 1), None).await,
            Err(StoreError::NotRun(_))
        ));
    }
    assert_eq!((begun.elapsed(), waiting), (waiting, deadline * MAX_FAILURES));
}

#[tokio::test(start_paused = true)]
async fn the_breaker_reports_how_long_the_store_has_not_replied() {
    let subject = Subject::with_deadline(ms(100));
    subject.measure_round_trip(ms(10)).await;
    // idle time before the first unanswered call is no silence
    tokio::time::advance(MINUTE).await;
    let began = Instant::now();
    while subject.remote.stats().open_breakers == 0 {
        subject.start(&check("k", limit(9), 1)).await;
        tokio::time::advance(ms(1)).await;
        settle().await;
    }
    let silence = began.elapsed();
    assert!(silence > ms(150), "the first call has ended: {silence:?}");
    assert_eq!(subject.remote.upstreams.first().breaker.reason(), format!("no reply for {silence:.0?}"));
}

#[tokio::test(start_paused = true)]
async fn failed_probes_are_counted_by_kind_while_the_breaker_is_open() {
    let subject = Subject::with_deadline(ms(50));
    let errors = |kind: &str| {
        let errors = subject.remote.stats().errors;
        errors.into_iter().find(|(known, _)| *known == kind).unwrap().1
    };
    subject.store.is_broken.store(true, Ordering::Relaxed);
    for _ in 0..MAX_FAILURES {
        assert!(subject.remote.decide_cached(&check("k", limit(9), 1), None).await.is_err());
    }
    assert_eq!(errors("unreachable"), u64::from(MAX_FAILURES), "each call once");
    tokio::time::sleep(MINUTE).await;
    let probes = errors("unreachable") - u64::from(MAX_FAILURES);
    assert!((60..=130).contains(&probes), "{probes}");

    while !matches!(
        subject.remote.decide_cached(&check("silent", limit(9), 1), None).await,
        Err(StoreError::NotRun(reason)) if reason.contains("circuit breaker open")
    ) {}
    let before = errors("timeout");
    tokio::time::sleep(MINUTE).await;
    let probes = errors("timeout") - before;
    assert!((30..=60).contains(&probes), "a probe waits for a second: {probes}");
}

#[tokio::test(start_paused = true)]
async fn a_call_outlives_its_caller_and_its_own_outcome_counts() {
    let subject = Subject::with_deadline(ms(100));
    let request = check("k", limit(99), 1);
    for round in 1..=2 * u64::from(MAX_FAILURES) {
        let caller = subject.start_within(&request, ms(5)).await;
        tokio::time::advance(ms(6)).await;
        assert!(matches!(caller.await.unwrap(), Err(StoreError::Ambiguous(_))));
        subject.answer(1).await;
        assert_eq!(subject.remote.stats().late_answers, round);
    }
    assert_eq!(subject.remote.stats().open_breakers, 0, "the store answered every call within the deadline");
}

#[tokio::test(start_paused = true)]
async fn callers_with_short_deadlines_do_not_keep_the_breaker_from_opening() {
    let subject = Subject::with_deadline(ms(50));
    let began = Instant::now();
    while subject.remote.stats().open_breakers == 0 {
        let caller = subject.start_within(&check("k", limit(9), 1), ms(20)).await;
        assert!(caller.await.unwrap().is_err());
        assert!(began.elapsed() < ms(1_000), "the store never answers");
    }
}

#[tokio::test(start_paused = true)]
async fn calls_that_fail_together_are_one_failure() {
    let subject = Subject::new();
    subject.remote.upstreams.first().queue.set_limit(16);
    for round in 1..=MAX_FAILURES {
        assert_eq!(subject.remote.stats().open_breakers, 0, "round {round}");
        let mut callers = Vec::new();
        for key in 0..10 {
            callers.push(subject.start(&check(&key.to_string(), limit(9), 1)).await);
        }
        tokio::time::advance(ms(1)).await;
        subject.store.is_broken.store(true, Ordering::Relaxed);
        subject.answer(callers.len()).await;
        for caller in callers {
            assert!(caller.await.unwrap().is_err());
        }
        subject.store.is_broken.store(false, Ordering::Relaxed);
    }
    assert_eq!(subject.remote.stats().open_breakers, 1, "several consecutive failures open the breaker");
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_still_queued_at_its_deadline_was_not_sent() {
    let subject = Subject::new();
    let busy = [subject.start(&check("x", limit(9), 1)).await, subject.start(&check("y", limit(9), 1)).await];
    let queued = subject.start_within(&check("k", limit(9), 1), ms(5)).await;
    tokio::time::advance(ms(6)).await;
    let outcome = queued.await.unwrap();
    assert!(matches!(&outcome, Err(StoreError::NotRun(reason)) if reason.contains("queued")), "{outcome:?}");
    subject.answer(2).await;
    for caller in busy {
        assert!(share(caller).await.passes);
    }
    assert_eq!(subject.remote.stats().ambiguous, 0);
}

#[tokio::test(start_paused = true)]
async fn a_refund_whose_caller_is_dropped_still_ends_the_cached_denial() {
    let subject = Subject::new();
    let hit = check("k", limit(1), 1);
    subject.decide(&hit).await;
    assert!(!subject.decide(&hit).await.shares[0].1.passes);
    let refund = operation(Operation::Refund { at: None }, "k", limit(1), 1);
    let caller = subject.start(&refund).await;
    caller.abort();
    settle().await;
    // the denial is cached again before the refund runs
    assert!(
        !subject
            .remote
            .decide_cached(&hit, Some(ms(0)))
            .await
            .is_ok_and(|verdict| verdict.shares[0].1.passes)
    );
    subject.answer(1).await;
    assert!(subject.decide(&hit).await.shares[0].1.passes);
}

#[tokio::test(start_paused = true)]
async fn replies_to_other_calls_end_the_silence() {
    let subject = Subject::with_deadline(ms(50));
    let mut lost = Vec::new();
    for round in 0..4 * MAX_FAILURES {
        lost.push(subject.start(&check(&format!("{round}-a"), limit(9), 1)).await);
        let other = subject.start(&check(&format!("{round}-b"), limit(9), 1)).await;
        tokio::time::advance(ms(9)).await;
        subject.answer(2).await;
        assert!(share(other).await.passes);
    }
    assert_eq!(subject.remote.stats().open_breakers, 0);
}

#[tokio::test(start_paused = true)]
async fn a_check_with_less_time_than_a_round_trip_is_neither_sent_nor_charged() {
    let subject = Subject::with_deadline(ms(200));
    subject.measure_round_trip(ms(60)).await;
    let (patient, hurried) = (check("patient", limit(9), 1), check("hurried", limit(9), 1));

    let in_flight = subject.start(&patient).await;
    let unsent = subject.start_within(&hurried, ms(20)).await.await.unwrap();
    assert!(matches!(&unsent, Err(StoreError::NotRun(reason)) if reason.contains("60.0ms")), "{unsent:?}");
    assert_eq!((subject.calls().len(), subject.remote.stats().unsent), (1, 1));
    assert_eq!(subject.remote.stats().round_trip, Some(ms(60)));

    // with enough time it is sent, also from the queue
    let sent = subject.start_within(&hurried, ms(61)).await;
    let queued = subject.start_within(&check("queued", limit(9), 1), ms(65)).await;
    assert_eq!(subject.calls().len(), 1, "the limit is two calls");
    tokio::time::advance(ms(10)).await;
    subject.answer(1).await;
    assert!(share(in_flight).await.passes);
    assert!(matches!(queued.await.unwrap(), Err(StoreError::NotRun(_))), "10 of 65 ms have passed");
    assert!(subject.calls().is_empty());
    subject.answer(1).await;
    assert!(share(sent).await.passes);
}

#[tokio::test(start_paused = true)]
async fn one_call_at_a_time_is_always_sent_so_that_a_faster_store_is_noticed() {
    let subject = Subject::with_deadline(ms(200));
    subject.measure_round_trip(ms(60)).await;
    let hurried = check("k", limit(99), 1);
    for _ in 0..6 {
        let sent = subject.start_within(&hurried, ms(20)).await;
        tokio::time::advance(ms(1)).await;
        subject.answer(1).await;
        assert!(share(sent).await.passes);
    }
    assert_eq!(subject.remote.stats().round_trip, Some(ms(1)));
    let both = [
        subject.start_within(&hurried, ms(20)).await,
        subject.start_within(&check("other", limit(9), 1), ms(20)).await,
    ];
    subject.answer(2).await;
    for sent in both {
        assert!(share(sent).await.passes);
    }
}

#[tokio::test(start_paused = true)]
async fn after_one_stall_the_store_decides_again() {
    let subject = Subject::with_deadline(ms(1_000));
    subject.measure_round_trip(ms(1)).await;
    let stalled = subject.start(&check("k", limit(99), 1)).await;
    tokio::time::advance(ms(200)).await;
    subject.answer(1).await;
    assert!(share(stalled).await.passes);
    let both = [
        subject.start_within(&check("a", limit(9), 1), ms(20)).await,
        subject.start_within(&check("b", limit(9), 1), ms(20)).await,
    ];
    subject.answer(2).await;
    for sent in both {
        assert!(share(sent).await.passes);
    }
}

#[test]
fn shares_of_a_limit_never_exceed_it_in_total() {
    let limits = [Limit::token_bucket(10, MINUTE).unwrap().with_burst(7).unwrap(), limit(10)];
    for limit in limits {
        for count in 1..=7 {
            let share = limit.share_of(count);
            assert!(share.amount() * u64::from(count) <= limit.amount(), "{share:?}");
            assert!(share.capacity() * u64::from(count) <= limit.capacity(), "{share:?}");
            assert_eq!(share.window_us(), limit.window_us());
        }
        assert_eq!((limit.share_of(0), limit.share_of(1000).amount()), (limit, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_does_not_delay_checks_for_another() {
    let subject = Subject::with_deadline(Duration::from_millis(10));
    let silent = check("silent", limit(9), 1);
    // as many calls as the limit admits, and more that are queued
    for _ in 0..10 {
        subject.start(&silent).await;
    }
    let before = Instant::now();
    assert_eq!(subject.decide(&check("k", limit(9), 1)).await.shares[0].1.remaining, 8);
    assert_eq!(before.elapsed(), Duration::ZERO);
    while !matches!(subject.remote.decide_cached(&silent, None).await, Err(StoreError::NotRun(_))) {}
    assert_eq!(subject.decide(&check("k", limit(9), 1)).await.shares[0].1.remaining, 7);
}

#[tokio::test(start_paused = true)]
async fn a_caller_can_shorten_the_deadline_but_not_extend_it() {
    let subject = Subject::with_deadline(ms(100));
    for (budget_ms, waited_ms) in [(3, 3), (1_000, 100)] {
        let before = Instant::now();
        let answer = subject.remote.decide_cached(&check("silent", limit(9), 1), Some(ms(budget_ms))).await;
        assert!(matches!(answer, Err(StoreError::Ambiguous(_))));
        assert_eq!(before.elapsed(), ms(waited_ms));
    }
}

/// A store whose answers lack tiers or checks.
struct MalformedStore(Vec<Result<CheckAnswer, StoreError>>);

impl RemoteStore for MalformedStore {
    fn decide<'a>(
        &'a self,
        _: &'a [Check],
        _: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async { self.0.clone() })
    }

    fn probe(&self, _: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    fn announce(&self, _: u64, _: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async { Ok(1) })
    }

    fn reset<'a>(&'a self, _: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async { Ok(0) })
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_does_not_fit_the_call_is_an_error_and_admits_nothing() {
    let without_tiers = CheckAnswer { at: Timestamp::default(), answers: Vec::new() };
    for answer in [Vec::new(), vec![Ok(without_tiers)]] {
        let remote = Arc::new(Remote::new(Arc::new(MalformedStore(answer)), Options::default()));
        let outcome = remote.decide(&check("k", limit(9), 1), None).await;
        assert!(matches!(outcome, Err(StoreError::Ambiguous(_))), "{outcome:?}");
    }
}
