//! A Cluster in which one node dies or stops, or all slots of a node move: calls that do not need that node are not affected.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sluicegate::{
    Labels, Limit, Limiter, Options, RedisStore, Rule, Source, limiter::RuleSelection, store::Key,
};
use sluicegate_testkit::{
    cluster::{Cluster, Coverage, Setup},
    server::Flavor,
};
use tokio::{task::block_in_place, time::Instant};

use crate::scenario::{HOUR, LONGEST_CALL, MANY, OPTIONS, run_exclusively};

/// Time after which the other nodes consider a silent node dead.
const NODE_TIMEOUT: Duration = Duration::from_secs(1);
/// Recovery of a node restarted without data: the time of detection, three seconds, and slack.
const RECOVERY_TIME: Duration = NODE_TIMEOUT.saturating_add(Duration::from_secs(3 + 2));

fn url(cluster: &Cluster) -> String {
    let addresses: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    format!("redis-cluster://{}", addresses.join(","))
}

async fn limiter(cluster: &Cluster, options: Options) -> Limiter {
    let store = RedisStore::connect(&url(cluster)).await.unwrap();
    let rules = [
        Rule::new("per-user", limit()).per(["user"]),
        Rule::new("per-team", limit()).when("kind", "team").per(["team"]),
    ];
    Limiter::builder().store(store).rules(rules).options(options).build().unwrap()
}

/// Labels of a request with one counter.
fn user(key: &str) -> Labels {
    Labels::new([("user", key)]).unwrap()
}

/// Labels of a request with two counters.
fn user_and_team(user: &str, team: &str) -> Labels {
    Labels::new([("user", user), ("kind", "team"), ("team", team)]).unwrap()
}

fn limit() -> Limit {
    Limit::sliding_log(MANY, HOUR).unwrap()
}

/// A task that repeats one check.
struct Caller {
    labels: Labels,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<CallerRecord>,
}

/// The decisions of a caller.
#[derive(Debug, Default)]
struct CallerRecord {
    admitted: u64,
    /// Errors of decisions made without the store.
    degraded: Vec<String>,
    longest: Duration,
}

impl Caller {
    fn start(limiter: &Limiter, labels: Labels) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, limiter, checked) = (Arc::clone(&stop), limiter.clone(), labels.clone());
        let task = tokio::spawn(async move {
            let mut record = CallerRecord::default();
            while !stopped.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let decision = limiter.check(&checked, 1).await.unwrap();
                record.longest = record.longest.max(begun.elapsed());
                match decision.source {
                    Source::Store => record.admitted += 1,
                    _ => record.degraded.push(decision.failure.unwrap().to_string()),
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            record
        });
        Self { labels, stop, task }
    }

    async fn finish(self) -> (Labels, CallerRecord) {
        self.stop.store(true, Ordering::Relaxed);
        (self.labels, self.task.await.unwrap())
    }

    /// Asserts that the store decided every check in time.
    async fn assert_unaffected(self) {
        let (labels, record) = self.finish().await;
        let degraded = record.degraded.len();
        assert_eq!(degraded, 0, "{labels:?}: {degraded} degraded, such as {:?}", record.degraded[0]);
        assert!(record.admitted > 50 && record.longest <= LONGEST_CALL, "{labels:?}: {record:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_primary_does_not_affect_calls_to_other_primaries() {
    let _exclusive = run_exclusively().await;
    let setup = Setup::new(Flavor::Redis7).coverage(Coverage::Partial).node_timeout(NODE_TIMEOUT);
    let mut cluster = block_in_place(|| setup.start());
    let limiter = limiter(&cluster, OPTIONS).await;
    let [dead, well, other] = [0, 1, 2].map(|node| block_in_place(|| cluster.limiter_key_on(node)));
    for key in [&dead, &well, &other] {
        assert_eq!(limiter.check(&user(key), 1).await.unwrap().source, Source::Store);
    }

    block_in_place(|| cluster.node_mut(0).kill());
    let harmed = Caller::start(&limiter, user(&dead));
    let unharmed = [&well, &other, &well, &other].map(|key| Caller::start(&limiter, user(key)));
    tokio::time::sleep(2 * NODE_TIMEOUT + Duration::from_secs(1)).await;
    for caller in unharmed {
        caller.assert_unaffected().await;
    }
    let (_, record) = harmed.finish().await;
    assert_eq!(record.admitted, 0, "no node serves its slots");
    assert!(record.longest <= LONGEST_CALL, "a call took {:?}", record.longest);

    block_in_place(|| cluster.node_mut(0).restart());
    let restarted = Instant::now();
    while limiter.check(&user(&dead), 1).await.unwrap().source != Source::Store {
        assert!(restarted.elapsed() < RECOVERY_TIME, "not decided after {:?}", restarted.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_primary_does_not_affect_checks_resets_and_inspections_on_other_primaries() {
    let _exclusive = run_exclusively().await;
    let setup = Setup::new(Flavor::Redis7).coverage(Coverage::Partial).node_timeout(NODE_TIMEOUT);
    let cluster = block_in_place(|| setup.start());
    let limiter = limiter(&cluster, OPTIONS).await;
    let [stopped, well, other] = [0, 1, 2].map(|node| block_in_place(|| cluster.limiter_key_on(node)));
    for labels in [user_and_team(&well, &other), user_and_team(&well, &stopped)] {
        assert_eq!(limiter.check(&labels, 1).await.unwrap().source, Source::Store);
    }

    cluster.nodes()[0].suspend();
    let harmed = [user(&stopped), user_and_team(&stopped, &well), user_and_team(&other, &stopped)]
        .map(|labels| Caller::start(&limiter, labels));
    let unharmed = [user(&well), user(&other), user_and_team(&well, &other), user_and_team(&other, &well)]
        .map(|labels| Caller::start(&limiter, labels));
    let end = Instant::now() + 2 * NODE_TIMEOUT;
    let counters = |keys: &[&String]| {
        keys.iter().map(|key| (Key::without_rule(key).unwrap(), limit())).collect::<Vec<_>>()
    };
    while Instant::now() < end {
        limiter.reset_key(&well, &limit()).await.unwrap();
        limiter.reset(&user_and_team(&well, &other), &RuleSelection::All).await.unwrap();
        assert_eq!(limiter.inspect(&counters(&[&well, &other])).await.unwrap().len(), 2);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for labels in [user_and_team(&stopped, &other), user_and_team(&other, &stopped)] {
        let error = limiter.reset(&labels, &RuleSelection::All).await.unwrap_err().to_string();
        assert!(error.contains("circuit breaker open"), "{error}");
    }
    let error = limiter.inspect(&counters(&[&stopped, &other])).await.unwrap_err().to_string();
    assert!(error.contains("1 of 2 counters") && error.contains(&format!(":{stopped})")), "{error}");
    assert_eq!(limiter.stats().open_breakers, 1);

    for caller in unharmed {
        caller.assert_unaffected().await;
    }
    for caller in harmed {
        let (labels, record) = caller.finish().await;
        assert_eq!(record.admitted, 0, "{labels:?}");
        assert!(record.longest <= LONGEST_CALL, "{labels:?}: a check took {:?}", record.longest);
    }
    cluster.nodes()[0].resume();
    let resumed = Instant::now();
    for labels in [user(&stopped), user_and_team(&stopped, &well)] {
        while limiter.check(&labels, 1).await.unwrap().source != Source::Store {
            assert!(resumed.elapsed() < RECOVERY_TIME, "not decided after {:?}", resumed.elapsed());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_replica_of_a_stopped_primary_is_found_while_the_breaker_is_open() {
    let _exclusive = run_exclusively().await;
    let setup = Setup::new(Flavor::Redis7).replicas(1).node_timeout(NODE_TIMEOUT);
    let cluster = block_in_place(|| setup.start());
    let limiter = limiter(&cluster, OPTIONS).await;
    let key = block_in_place(|| cluster.limiter_key_on(0));
    assert_eq!(limiter.check(&user(&key), 1).await.unwrap().source, Source::Store);

    cluster.nodes()[0].suspend();
    let stopped = Instant::now();
    while limiter.check(&user(&key), 1).await.unwrap().source == Source::Store
        || limiter.stats().open_breakers == 0
    {
        assert!(stopped.elapsed() < RECOVERY_TIME, "the breaker has not opened");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // during this time the cluster promotes the replica, and no call is sent
    tokio::time::sleep(2 * NODE_TIMEOUT).await;
    while limiter.check(&user(&key), 1).await.unwrap().source != Source::Store {
        assert!(stopped.elapsed() < 2 * RECOVERY_TIME, "not decided after {:?}", stopped.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    cluster.nodes()[0].resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn moving_all_slots_of_a_node_is_invisible_to_callers() {
    let _exclusive = run_exclusively().await;
    // Otherwise a node without slots becomes a replica, and a node busy with thousands of slots is considered dead.
    let setup = Setup::new(Flavor::Redis7).args(&["--cluster-allow-replica-migration", "no"]);
    let cluster = block_in_place(|| setup.node_timeout(Duration::from_secs(30)).start());
    // A call waits while keys of its slot migrate; this test does not measure how long.
    let patient = OPTIONS.deadline(Duration::from_secs(20));
    let limiter = limiter(&cluster, patient).await;
    let keys = (0..12).map(|number| format!("key-{number}"));
    let keys = keys.chain([0, 1, 2].map(|node| block_in_place(|| cluster.limiter_key_on(node))));
    let callers: Vec<Caller> = keys.map(|key| Caller::start(&limiter, user(&key))).collect();
    for (from, to) in [(0, 1), (1, 0), (2, 1)] {
        block_in_place(|| cluster.move_all_slots(from, to));
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    for caller in callers {
        let (labels, record) = caller.finish().await;
        assert!(record.degraded.is_empty(), "{labels:?}: {:?}", record.degraded[0]);
        assert!(record.admitted > 50, "{labels:?} was checked {} times", record.admitted);
        let left = limiter.peek(&labels, 1).await.unwrap().remaining();
        assert_eq!(left, Some(MANY - record.admitted), "{labels:?}");
    }
}
