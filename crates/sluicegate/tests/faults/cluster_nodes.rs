//! A Cluster in which one node dies, or all slots of a node move: calls that do not need that node are not affected.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sluicegate::{Limit, Limiter, Options, RedisStore, Source};
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
    Limiter::with_options(store, [], options).unwrap()
}

fn limit() -> Limit {
    Limit::sliding_log(MANY, HOUR).unwrap()
}

/// A task that checks one key repeatedly.
struct Caller {
    key: String,
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
    fn start(limiter: &Limiter, key: String) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, limiter, asked) = (Arc::clone(&stop), limiter.clone(), key.clone());
        let task = tokio::spawn(async move {
            let mut record = CallerRecord::default();
            while !stopped.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let decision = limiter.check_key(&asked, &limit(), 1.into()).await.unwrap();
                record.longest = record.longest.max(begun.elapsed());
                match decision.source {
                    Source::Store => record.admitted += 1,
                    _ => record.degraded.push(decision.failure.unwrap().to_string()),
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            record
        });
        Self { key, stop, task }
    }

    async fn finish(self) -> (String, CallerRecord) {
        self.stop.store(true, Ordering::Relaxed);
        (self.key, self.task.await.unwrap())
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
        assert_eq!(limiter.check_key(key, &limit(), 1.into()).await.unwrap().source, Source::Store);
    }

    block_in_place(|| cluster.node_mut(0).kill());
    let harmed = Caller::start(&limiter, dead.clone());
    let unharmed = [&well, &other, &well, &other].map(|key| Caller::start(&limiter, key.clone()));
    tokio::time::sleep(2 * NODE_TIMEOUT + Duration::from_secs(1)).await;
    for caller in unharmed {
        let (key, record) = caller.finish().await;
        assert!(record.degraded.is_empty(), "{key}: {:?}", record.degraded[0]);
        assert!(record.admitted > 50 && record.longest <= LONGEST_CALL, "{key}: {record:?}");
    }
    let (_, record) = harmed.finish().await;
    assert_eq!(record.admitted, 0, "no node serves its slots");
    assert!(record.longest <= LONGEST_CALL, "a call took {:?}", record.longest);

    block_in_place(|| cluster.node_mut(0).restart());
    let restarted = Instant::now();
    while limiter.check_key(&dead, &limit(), 1.into()).await.unwrap().source != Source::Store {
        assert!(restarted.elapsed() < RECOVERY_TIME, "not decided after {:?}", restarted.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn moving_all_slots_of_a_node_is_invisible_to_callers() {
    let _exclusive = run_exclusively().await;
    // Otherwise a node without slots becomes a replica, and a node busy with thousands of slots is considered dead.
    let setup = Setup::new(Flavor::Redis7).args(&["--cluster-allow-replica-migration", "no"]);
    let cluster = block_in_place(|| setup.node_timeout(Duration::from_secs(30)).start());
    // A call waits while keys of its slot migrate; this test does not measure how long.
    let patient = Options { deadline: Duration::from_secs(20), ..OPTIONS };
    let limiter = limiter(&cluster, patient).await;
    let keys = (0..12).map(|number| format!("key-{number}"));
    let keys = keys.chain([0, 1, 2].map(|node| block_in_place(|| cluster.limiter_key_on(node))));
    let callers: Vec<Caller> = keys.map(|key| Caller::start(&limiter, key)).collect();
    for (from, to) in [(0, 1), (1, 0), (2, 1)] {
        block_in_place(|| cluster.move_all_slots(from, to));
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    for caller in callers {
        let (key, record) = caller.finish().await;
        assert!(record.degraded.is_empty(), "{key}: {:?}", record.degraded[0]);
        assert!(record.admitted > 50, "{key} was checked {} times", record.admitted);
        let left = limiter.peek_key(&key, &limit(), 1.into()).await.unwrap().remaining();
        assert_eq!(left, Some(MANY - record.admitted), "{key}");
    }
}
