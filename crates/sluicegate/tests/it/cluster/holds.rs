//! Holds over several nodes: repeating a partial hold completes or reverts it, and a denied hold is never partial.

use std::{
    slice,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use sluicegate::{
    Cost, Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, StoreError,
    limiter::Operation,
    store::{Answer, Check, HoldId, HoldOperation, HoldOutcome, Key, LiveHolds, RemoteStore, Terms, Tier},
};
use sluicegate_testkit::{
    cluster::Cluster,
    proxy::{Mode, Proxy, RequestFilter},
    server::Flavor,
    store_fixture::DecideAll,
    wait,
};
use tokio::task::block_in_place;

use super::{HOUR, at, places, start_proxies, url};

const HOLD: HoldOperation = HoldOperation::Hold { ttl: HOUR };
const SETTLE: HoldOperation = HoldOperation::Settle { kept: 0, max_excess: None };
const DEADLINE: Duration = Duration::from_secs(5);

fn limits() -> [Limit; 2] {
    [Limit::concurrency(2).unwrap(), Limit::sliding_log(2, HOUR).unwrap()]
}

/// A store behind proxies, with a counter on the first node and one on the last, which is decided later.
struct Scenario {
    proxies: Vec<Proxy>,
    store: RedisStore,
    direct: RedisStore,
    keys: [String; 2],
    _cluster: Cluster,
}

impl Scenario {
    async fn start() -> Self {
        let cluster = Cluster::start(Flavor::Redis7);
        let direct = RedisStore::connect(&url(&cluster)).await.unwrap();
        let places = places(&cluster, &direct).await;
        let keys = [0, 2].map(|node| at(&places, node).key);
        let (store, proxies) = start_proxies(&cluster).await;
        Self { proxies, store, direct, keys, _cluster: cluster }
    }

    fn check(&self, limit: &Limit, id: &str, counters: &[usize], operation: HoldOperation) -> Check {
        let tier = |counter: &usize| Tier {
            key: Key::without_rule(&self.keys[*counter]).unwrap(),
            terms: Terms::new(*limit, if operation == SETTLE { Cost::ZERO } else { Cost::ONE }),
        };
        let check = Check::new(Operation::Charge, counters.iter().map(tier).collect()).unwrap();
        check.with_hold(HoldId::new(id).unwrap(), operation)
    }

    async fn on_hold(
        &self,
        limit: &Limit,
        id: &str,
        operation: HoldOperation,
    ) -> Result<Vec<HoldOutcome>, StoreError> {
        let check = self.check(limit, id, &[0, 1], operation);
        let decided = self.store.decide_all(slice::from_ref(&check), None).await?;
        Ok(decided[0].answers.iter().map(|answer: &Answer| answer.hold.outcome).collect())
    }

    /// Makes holds of one counter until it is full.
    async fn fill(&self, limit: &Limit, counter: usize) {
        for number in 0..2 {
            let check = self.check(limit, &format!("fill-{counter}-{number}"), &[counter], HOLD);
            self.direct.decide_all(&[check], None).await.unwrap();
        }
    }

    async fn empty(&self, limit: &Limit, counter: usize) {
        for number in 0..2 {
            let check = self.check(limit, &format!("fill-{counter}-{number}"), &[counter], SETTLE);
            self.direct.decide_all(&[check], None).await.unwrap();
        }
    }

    /// Returns the live holds of both counters.
    async fn live(&self, limit: &Limit) -> [u64; 2] {
        let counters = [0, 1].map(|counter| (Key::without_rule(&self.keys[counter]).unwrap(), *limit));
        let seen = self.direct.inspect(&counters).await.unwrap();
        let live = |counter: usize| seen[counter].as_ref().map(|seen| seen.holds);
        [0, 1].map(|counter| live(counter).unwrap_or_default()).map(|LiveHolds { count, .. }| count)
    }

    async fn reset(&self, limit: &Limit) {
        let counters =
            [0, 1].map(|key: usize| (Key::without_rule(&self.keys[key]).unwrap(), limit.algorithm()));
        self.direct.reset(&counters).await.unwrap();
    }

    fn lose_reply(&self, node: usize) {
        block_in_place(|| self.proxies[node].drop_next_reply(RequestFilter::SCRIPTS));
    }
}

use HoldOutcome::{Already, Held, NotHeld, Repeated, Settled};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partial_hold_is_completed_when_it_is_repeated() {
    let scenario = Scenario::start().await;
    for limit in &limits() {
        // the last node made its part, and that of the first node was reverted
        scenario.lose_reply(2);
        let error = scenario.on_hold(limit, "last", HOLD).await.unwrap_err();
        assert!(matches!(error, StoreError::Ambiguous(_)), "{error}");
        assert_eq!(scenario.live(limit).await, [0, 1], "{limit:?}");
        assert_eq!(scenario.on_hold(limit, "last", HOLD).await.unwrap(), [Held, Repeated]);
        // the first node made its part, and the last one was not reached
        scenario.lose_reply(0);
        scenario.on_hold(limit, "first", HOLD).await.unwrap_err();
        assert_eq!(scenario.live(limit).await, [2, 1], "{limit:?}");
        assert_eq!(scenario.on_hold(limit, "first", HOLD).await.unwrap(), [Repeated, Held]);
        assert_eq!(scenario.live(limit).await, [2, 2], "{limit:?}");
        assert_eq!(scenario.on_hold(limit, "denied", HOLD).await.unwrap(), [NotHeld, NotHeld]);
        for id in ["last", "first"] {
            assert_eq!(scenario.on_hold(limit, id, SETTLE).await.unwrap(), [Settled, Settled]);
        }
        assert_eq!(scenario.live(limit).await, [0, 0], "{limit:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partial_hold_is_reverted_when_it_is_repeated_and_denied() {
    let scenario = Scenario::start().await;
    for limit in &limits() {
        scenario.lose_reply(0);
        scenario.on_hold(limit, "first", HOLD).await.unwrap_err();
        assert_eq!(scenario.live(limit).await, [1, 0], "{limit:?}");
        scenario.fill(limit, 1).await;
        assert_eq!(scenario.on_hold(limit, "first", HOLD).await.unwrap(), [NotHeld, NotHeld]);
        assert_eq!(scenario.live(limit).await, [0, 2], "{limit:?}");
        scenario.empty(limit, 1).await;

        // here the denial comes first, on the node that does not know the hold
        scenario.lose_reply(2);
        scenario.on_hold(limit, "last", HOLD).await.unwrap_err();
        assert_eq!(scenario.live(limit).await, [0, 1], "{limit:?}");
        scenario.fill(limit, 0).await;
        assert_eq!(scenario.on_hold(limit, "last", HOLD).await.unwrap(), [NotHeld, NotHeld]);
        assert_eq!(scenario.live(limit).await, [2, 0], "{limit:?}");
        scenario.reset(limit).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partial_hold_is_kept_when_it_is_repeated_and_a_node_cannot_be_reached() {
    let scenario = Scenario::start().await;
    for limit in &limits() {
        scenario.lose_reply(0);
        scenario.on_hold(limit, "id", HOLD).await.unwrap_err();
        block_in_place(|| scenario.proxies[2].set(Mode::Refuse));
        let error = scenario.on_hold(limit, "id", HOLD).await.unwrap_err();
        assert!(matches!(error, StoreError::Ambiguous(_)), "the first node has the hold: {error}");
        assert_eq!(scenario.live(limit).await, [1, 0], "{limit:?}");
        block_in_place(|| scenario.proxies[2].pass());
        let mut outcomes = Vec::new();
        wait::until_async("the node is reached again", wait::PATIENCE, async || {
            outcomes = scenario.on_hold(limit, "id", HOLD).await.unwrap_or_default();
            !outcomes.is_empty()
        })
        .await;
        assert_eq!(outcomes, [Repeated, Held], "{limit:?}");
        assert_eq!(scenario.live(limit).await, [1, 1], "{limit:?}");
        scenario.reset(limit).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_a_node_denies_or_cannot_make_leaves_nothing_on_the_others() {
    let scenario = Scenario::start().await;
    for limit in &limits() {
        scenario.fill(limit, 1).await;
        for number in 0..3 {
            assert_eq!(
                scenario.on_hold(limit, &format!("denied-{number}"), HOLD).await.unwrap(),
                [NotHeld; 2]
            );
            assert_eq!(scenario.live(limit).await, [0, 2], "{limit:?}");
        }
        scenario.empty(limit, 1).await;
        block_in_place(|| scenario.proxies[2].set(Mode::Refuse));
        for number in 0..3 {
            scenario.on_hold(limit, &format!("down-{number}"), HOLD).await.unwrap_err();
            assert_eq!(scenario.live(limit).await, [0, 0], "{limit:?}");
        }
        block_in_place(|| scenario.proxies[2].pass());
        wait::until_async("the node is reached again", wait::PATIENCE, async || {
            scenario.on_hold(limit, "down-0", HOLD).await.is_ok()
        })
        .await;
        assert_eq!(scenario.live(limit).await, [1, 1], "{limit:?}");
        scenario.reset(limit).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_is_reverted_even_if_the_reply_is_lost() {
    let scenario = Scenario::start().await;
    let [_, limit] = &limits();
    // every node has the script
    for operation in [HOLD, SETTLE] {
        scenario.on_hold(limit, "first", operation).await.unwrap();
    }
    scenario.fill(limit, 1).await;
    // the last node denies after the first one has replied, and the reply to the reversal is lost
    block_in_place(|| scenario.proxies[2].stall());
    let replies = scenario.proxies[0].counters().replies;
    let denied = tokio::spawn({
        let (store, check) = (scenario.store.clone(), scenario.check(limit, "id", &[0, 1], HOLD));
        async move { store.decide_all(slice::from_ref(&check), None).await }
    });
    wait::until_async("the first node has made the hold and replied", wait::PATIENCE, async || {
        scenario.live(limit).await[0] == 1 && scenario.proxies[0].counters().replies > replies
    })
    .await;
    scenario.lose_reply(0);
    block_in_place(|| scenario.proxies[2].pass());
    denied.await.unwrap().unwrap();
    wait::until_async("the hold is taken back", wait::PATIENCE, async || {
        scenario.live(limit).await == [0, 2]
    })
    .await;
    assert_eq!(scenario.proxies[0].counters().dropped_replies, 1);
    assert_eq!(scenario.store.stats().unreleased_reservations, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_over_several_nodes_is_done_once_where_its_reply_is_lost() {
    let scenario = Scenario::start().await;
    for limit in &limits() {
        for node in [0, 2] {
            let id = format!("id-{node}");
            assert_eq!(scenario.on_hold(limit, &id, HOLD).await.unwrap(), [Held, Held]);
            scenario.lose_reply(node);
            let error = scenario.on_hold(limit, &id, SETTLE).await.unwrap_err();
            assert!(matches!(error, StoreError::Ambiguous(_)), "{error}");
            assert_eq!(scenario.live(limit).await, [0, 0], "{limit:?}");
            assert_eq!(scenario.on_hold(limit, &id, SETTLE).await.unwrap(), [Already, Already]);
        }
    }
}

/// Two nodes, each with an in-flight limit, lose every few replies. The admitted requests never exceed the limit,
/// and no hold is live after all requests have ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_in_flight_over_two_nodes_stay_within_the_limit_while_replies_are_lost() {
    const LIMIT: i64 = 4;
    let scenario = Scenario::start().await;
    let limit = Limit::concurrency(LIMIT as u64).unwrap();
    let rule =
        |name: &'static str| Rule::new(name, limit).per([name]).on_store_failure(OnStoreFailure::Closed);
    let options = Options::default().deadline(DEADLINE);
    let builder = Limiter::builder().store(scenario.store.clone()).rules([rule("a"), rule("b")]);
    let limiter = builder.options(options).build().unwrap();
    let labels = Labels::new([("a", &*scenario.keys[0]), ("b", &*scenario.keys[1])]).unwrap();
    block_in_place(|| {
        scenario.proxies[0].drop_every_nth_reply(7, RequestFilter::SCRIPTS);
        scenario.proxies[2].drop_every_nth_reply(11, RequestFilter::SCRIPTS);
    });
    let in_flight = Arc::new(AtomicI64::new(0));
    let callers = (0..12).map(|_| {
        let (limiter, labels, in_flight) = (limiter.clone(), labels.clone(), Arc::clone(&in_flight));
        tokio::spawn(async move {
            let mut admitted = 0;
            for _ in 0..25 {
                // the id is random: a hold without an answer is released
                let Ok(held) = limiter.hold(&labels, 1).decide().await else { continue };
                let Some(token) = held.token.filter(|_| held.decision.is_allowed()) else { continue };
                let now = in_flight.fetch_add(1, Ordering::SeqCst) + 1;
                assert!(now <= LIMIT, "{now} requests are in flight");
                admitted += 1;
                tokio::task::yield_now().await;
                in_flight.fetch_sub(1, Ordering::SeqCst);
                limiter.settle(&token, 1).await.unwrap();
            }
            admitted
        })
    });
    let callers: Vec<_> = callers.collect();
    let mut admitted = 0;
    for caller in callers {
        admitted += caller.await.unwrap();
    }
    assert!(admitted > 20, "only {admitted} were admitted");
    block_in_place(|| scenario.proxies.iter().for_each(Proxy::pass));
    wait::until_async("no request is in flight in the store", wait::PATIENCE, async || {
        let counters = [("a", 0), ("b", 1)].map(|(rule, key): (&str, usize)| {
            let values = [Some(scenario.keys[key].as_bytes())];
            (Key::of_rule(&sluicegate::store::encoded_rule(rule), &values, None), limit)
        });
        let seen = scenario.direct.inspect(&counters).await.unwrap();
        seen.iter().all(|seen| seen.as_ref().is_none_or(|seen| seen.holds.count == 0))
    })
    .await;
}
