//! A Cluster of which one node dies, or all of whose slots move: who does not need that node notices nothing.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{task::block_in_place, time::Instant};
use tollgate::{Limit, Limiter, Options, RedisStore, Source};
use tollgate_testkit::{
    cluster::{Cluster, Coverage, Setup},
    server::Flavor,
};

use crate::bench::{HOUR, LONGEST_CALL, MANY, OPTIONS, alone};

/// How long the others take a silent node for alive.
const NODE_TIMEOUT: Duration = Duration::from_secs(1);
/// A node that is restarted without its data: what the others need to notice, three seconds, and slack.
const BACK: Duration = NODE_TIMEOUT.saturating_add(Duration::from_secs(3 + 2));

fn url(cluster: &Cluster) -> String {
    let places: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    format!("redis-cluster://{}", places.join(","))
}

async fn limiter(cluster: &Cluster, options: Options) -> Limiter {
    let store = RedisStore::connect(&url(cluster)).await.unwrap();
    Limiter::with_options(store, [], options).unwrap()
}

fn limit() -> Limit {
    Limit::sliding_log(MANY, HOUR).unwrap()
}

/// Somebody who asks for one key without end.
struct Caller {
    key: String,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<Told>,
}

/// What a caller was told.
#[derive(Debug, Default)]
struct Told {
    admitted: u64,
    /// By somebody else than the store, and why.
    degraded: Vec<String>,
    longest: Duration,
}

impl Caller {
    fn start(limiter: &Limiter, key: String) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, limiter, asked) = (Arc::clone(&stop), limiter.clone(), key.clone());
        let task = tokio::spawn(async move {
            let mut told = Told::default();
            while !stopped.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let decision = limiter.check_key(&asked, &limit(), 1.into()).await.unwrap();
                told.longest = told.longest.max(begun.elapsed());
                match decision.source {
                    Source::Store => told.admitted += 1,
                    _ => told.degraded.push(decision.failure.unwrap().to_string()),
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            told
        });
        Self { key, stop, task }
    }

    async fn finish(self) -> (String, Told) {
        self.stop.store(true, Ordering::Relaxed);
        (self.key, self.task.await.unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_three_primaries_that_dies_disturbs_nobody_who_needs_another() {
    let _alone = alone().await;
    let setup = Setup::new(Flavor::Redis7).coverage(Coverage::Partial).node_timeout(NODE_TIMEOUT);
    let mut cluster = block_in_place(|| setup.start());
    let limiter = limiter(&cluster, OPTIONS).await;
    let [dead, well, other] = [0, 1, 2].map(|node| block_in_place(|| cluster.identity_at(node)));
    for key in [&dead, &well, &other] {
        assert_eq!(limiter.check_key(key, &limit(), 1.into()).await.unwrap().source, Source::Store);
    }

    block_in_place(|| cluster.node_mut(0).stop_hard());
    let harmed = Caller::start(&limiter, dead.clone());
    let unharmed = [&well, &other, &well, &other].map(|key| Caller::start(&limiter, key.clone()));
    tokio::time::sleep(2 * NODE_TIMEOUT + Duration::from_secs(1)).await;
    for caller in unharmed {
        let (key, told) = caller.finish().await;
        assert!(told.degraded.is_empty(), "{key}: {:?}", told.degraded[0]);
        assert!(told.admitted > 50 && told.longest <= LONGEST_CALL, "{key}: {told:?}");
    }
    let (_, told) = harmed.finish().await;
    assert_eq!(told.admitted, 0, "nobody serves its slots");
    assert!(told.longest <= LONGEST_CALL, "a call took {:?}", told.longest);

    block_in_place(|| cluster.node_mut(0).restart());
    let restarted = Instant::now();
    while limiter.check_key(&dead, &limit(), 1.into()).await.unwrap().source != Source::Store {
        assert!(restarted.elapsed() < BACK, "not decided after {:?}", restarted.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_slots_of_a_node_move_to_another_and_back_and_no_caller_hears_of_it() {
    let _alone = alone().await;
    // or a node without slots becomes a replica, and one that is busy with thousands of them is taken for dead
    let setup = Setup::new(Flavor::Redis7).args(&["--cluster-allow-replica-migration", "no"]);
    let cluster = block_in_place(|| setup.node_timeout(Duration::from_secs(30)).start());
    // a caller waits as long as keys of its slot are on their way; how fast they are is not the question here
    let patient = Options { deadline: Duration::from_secs(20), ..OPTIONS };
    let limiter = limiter(&cluster, patient).await;
    let keys = (0..12).map(|number| format!("key-{number}"));
    let keys = keys.chain([0, 1, 2].map(|node| block_in_place(|| cluster.identity_at(node))));
    let callers: Vec<Caller> = keys.map(|key| Caller::start(&limiter, key)).collect();
    for (from, to) in [(0, 1), (1, 0), (2, 1)] {
        block_in_place(|| cluster.move_every_slot(from, to));
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    for caller in callers {
        let (key, told) = caller.finish().await;
        assert!(told.degraded.is_empty(), "{key}: {:?}", told.degraded[0]);
        assert!(told.admitted > 50, "{key} was asked for {} times", told.admitted);
        let left = limiter.peek_key(&key, &limit(), 1.into()).await.unwrap().remaining();
        assert_eq!(left, Some(MANY - told.admitted), "{key}");
    }
}
