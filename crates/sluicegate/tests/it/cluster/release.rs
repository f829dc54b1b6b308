//! Releases of reservations that do not run, or whose reply is lost.

use std::time::Duration;

use sluicegate::{
    Algorithm, Cost, Limit, Limiter, RedisStore, Source, StoreError,
    limiter::Operation,
    store::{Check, Deadline, RemoteStore},
};
use sluicegate_testkit::{
    cluster::Cluster,
    proxy::{Mode, Proxy, RequestFilter},
    server::Flavor,
    wait,
};
use tokio::{
    task::{JoinHandle, block_in_place},
    time::Instant,
};

use super::{HOUR, MANY, ask, at, check, hit, passes, places, scripts_run, start_proxies, url, used};

/// The delay of the last node, during which a reservation on the first node lasts.
const DELAY: Duration = Duration::from_millis(300);

/// A check that the first node allows and the last node denies.
struct Scenario {
    cluster: Cluster,
    proxies: Vec<Proxy>,
    store: RedisStore,
    direct: RedisStore,
    /// The counter on the first node.
    first: String,
    /// Another counter on the first node.
    neighbour: String,
    denied: Check,
    /// The usage of the counter on the first node without reservations.
    usage: u64,
}

impl Scenario {
    async fn start() -> Self {
        let cluster = Cluster::start(Flavor::Redis7);
        let direct = RedisStore::connect(&url(&cluster)).await.unwrap();
        let places = places(&cluster, &direct).await;
        let [first, last] = [0, 2].map(|node| at(&places, node).key);
        let neighbour = places.iter().rfind(|place| place.node == 0).unwrap().key.clone();
        let (store, proxies) = start_proxies(&cluster).await;
        let denied = check(Operation::Check, &[(&first, MANY), (&last, 20)]);
        // from the second check on, the room is known and nothing is peeked
        for _ in 0..2 {
            assert!(passes(&ask(&store, denied.clone()).await.unwrap()));
        }
        while passes(&ask(&direct, check(Operation::Check, &[(&last, 20)])).await.unwrap()) {}
        Self { cluster, proxies, store, direct, first, neighbour, denied, usage: 2 }
    }

    /// Starts the check, and returns when it has reserved a unit on the first node and waits for the last node.
    async fn reserve(&self) -> JoinHandle<bool> {
        block_in_place(|| self.proxies[2].delay(DELAY));
        let (store, denied) = (self.store.clone(), self.denied.clone());
        let decided = tokio::spawn(async move { passes(&ask(&store, denied).await.unwrap()) });
        self.wait_for_usage(self.usage + 1).await;
        // the reply of the first node arrives
        tokio::time::sleep(DELAY / 3).await;
        decided
    }

    /// Makes the room on the last node appear sufficient to the store, so that the next check reserves again.
    async fn restore_room(&mut self) {
        block_in_place(|| self.proxies[2].pass());
        let last = self.denied.tiers()[1].key.clone();
        self.direct.reset(&[(last, Algorithm::SlidingLog)]).await.unwrap();
        assert!(passes(&ask(&self.store, self.denied.clone()).await.unwrap()));
        self.usage += 1;
        let rest = Check::new(Operation::Check, vec![self.denied.tiers()[1].clone()]).unwrap();
        while passes(&ask(&self.direct, rest.clone()).await.unwrap()) {}
    }

    async fn wait_for_usage(&self, expected: u64) {
        wait::until_async(format!("{expected} units are used"), wait::PATIENCE, async || {
            used(&self.direct, &self.first).await == expected
        })
        .await;
    }

    fn unreleased(&self) -> u64 {
        self.store.stats().unreleased_reservations
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_redis_rejects_is_repeated_until_it_runs() {
    let mut scenario = Scenario::start().await;
    for (setting, rejecting, normal) in [("maxmemory", 1, 0), ("min-replicas-to-write", 1, 0)] {
        let decided = scenario.reserve().await;
        let node = &scenario.cluster.nodes()[0];
        block_in_place(|| node.config_set(setting, rejecting));
        assert!(!decided.await.unwrap(), "{setting}: the last node denies");
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(used(&scenario.direct, &scenario.first).await, scenario.usage + 1, "{setting}");
        block_in_place(|| node.config_set(setting, normal));
        scenario.wait_for_usage(scenario.usage).await;
        scenario.restore_room().await;
    }
    assert_eq!(scenario.unreleased(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_due_to_a_reservation_of_another_process_is_not_cached() {
    let scenario = Scenario::start().await;
    let other_process =
        Limiter::new(RedisStore::connect(&url(&scenario.cluster)).await.unwrap(), []).unwrap();
    let limit = Limit::sliding_log(scenario.usage + 1, HOUR).unwrap();
    let check = async || other_process.check_key(&scenario.first, &limit, Cost::ONE).await.unwrap();
    let decided = scenario.reserve().await;
    let denied = check().await;
    assert_eq!((denied.is_allowed(), denied.source), (false, Source::Store), "the last unit is reserved");
    assert!(!decided.await.unwrap());
    let admitted = check().await;
    assert_eq!((admitted.is_allowed(), admitted.source), (true, Source::Store), "it has been released");
    wait::until_async("the exhausted counter is denied from the cache", wait::PATIENCE, async || {
        check().await.source == Source::Cache
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_cannot_be_sent_is_repeated_until_it_runs() {
    let scenario = Scenario::start().await;
    let decided = scenario.reserve().await;
    block_in_place(|| scenario.proxies[0].set(Mode::Refuse));
    // the open connection fails with the first call, which may have run
    let _ = hit(&scenario.store, &scenario.neighbour).await;
    assert!(!decided.await.unwrap());
    assert_eq!(used(&scenario.direct, &scenario.first).await, scenario.usage + 1);
    block_in_place(|| scenario.proxies[0].pass());
    scenario.wait_for_usage(scenario.usage).await;
    assert_eq!(scenario.unreleased(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_whose_reply_is_lost_is_counted_and_not_repeated() {
    let scenario = Scenario::start().await;
    let decided = scenario.reserve().await;
    block_in_place(|| scenario.proxies[0].drop_next_reply(RequestFilter::SCRIPTS));
    assert!(!decided.await.unwrap());
    assert_eq!(scenario.unreleased(), 1);
    let scripts = || scripts_run(&scenario.cluster.nodes()[0]);
    let before = scripts();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(scripts(), before);
    scenario.wait_for_usage(scenario.usage).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_is_released_at_the_deadline_if_another_node_is_silent() {
    let scenario = Scenario::start().await;
    block_in_place(|| scenario.proxies[2].stall());
    let deadline = Instant::now() + Duration::from_millis(200);
    let call =
        scenario.store.decide(std::slice::from_ref(&scenario.denied), Some(Deadline::Process(deadline)));
    let outcome = tokio::time::timeout(wait::PATIENCE, call).await.unwrap().remove(0);
    assert!(matches!(outcome, Err(StoreError::Ambiguous(_))), "{outcome:?}");
    let late = deadline.elapsed();
    assert!(late < Duration::from_millis(500), "released {late:?} after the deadline");
    assert_eq!(used(&scenario.direct, &scenario.first).await, scenario.usage);
}
