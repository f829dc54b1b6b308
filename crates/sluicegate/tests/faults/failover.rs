//! Sentinel: a primary is replaced, by a planned failover or after it died, while two instances keep calling.

use std::time::Duration;

use sluicegate::{Source, redis::RedisSettings};
use sluicegate_testkit::{
    sentinel::{NAME, Sentinels, Setup},
    server::Flavor,
    wait,
};
use tokio::{
    task::{JoinSet, block_in_place},
    time::Instant,
};

use crate::{
    monitored_instance::{AMOUNT, MonitoredInstance, assert_bound},
    scenario::{RuleMix, check, limiter, run_exclusively, scripts_run},
};

/// Time by which all callers use the new primary after a planned failover.
const SWITCH_TIME: Duration = Duration::from_secs(3);
/// Detection of a dead primary (a setting of the testkit), the guaranteed recovery time, and slack.
const RECOVERY_TIME: Duration = Duration::from_millis(500 + 3_000 + 1_500);

pub(crate) fn url(sentinels: &Sentinels) -> String {
    let addresses: Vec<String> = sentinels.sentinels().iter().map(|node| node.addr().to_string()).collect();
    format!("redis-sentinel://{}/{NAME}", addresses.join(","))
}

struct Instances {
    origin: Instant,
    watched: [MonitoredInstance; 2],
    running: JoinSet<()>,
}

impl Instances {
    fn start(sentinels: &Sentinels) -> Self {
        let origin = Instant::now();
        let watched = [MonitoredInstance::new(origin), MonitoredInstance::new(origin)];
        let mut running = JoinSet::new();
        for one in &watched {
            let (one, url) = (one.clone(), url(sentinels));
            running.spawn(async move { one.run(&url, &RedisSettings::default()).await });
        }
        // Until the limit has been reached and capacity is available again.
        block_in_place(|| {
            wait::until("there is load", wait::PATIENCE, || {
                watched.iter().map(|one| one.record().admitted.len()).sum::<usize>() as u64 > AMOUNT
            });
        });
        Self { origin, watched, running }
    }

    /// Returns when the last instance was served by the store again.
    fn decided_since(&self, moment: Duration) -> Duration {
        let decided = self.watched.iter().map(|one| one.wait_until_decided_since(moment));
        block_in_place(|| decided.max().unwrap())
    }

    async fn finish(mut self) {
        self.watched.iter().for_each(MonitoredInstance::stop);
        while let Some(ended) = self.running.join_next().await {
            ended.unwrap();
        }
        assert_bound(&[&self.watched[0], &self.watched[1]], 2 * AMOUNT);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_planned_failover_under_load_moves_every_caller_and_grants_at_most_two_quotas() {
    let _exclusive = run_exclusively().await;
    let sentinels = block_in_place(|| Sentinels::start(Flavor::Redis7));
    let instances = Instances::start(&sentinels);
    assert_eq!(scripts_run(&sentinels.nodes()[1]), 0, "a replica was called");
    let old = sentinels.primary();
    let new = block_in_place(|| sentinels.failover());
    let switched = instances.origin.elapsed();

    tokio::time::sleep(SWITCH_TIME).await;
    let left = scripts_run(&sentinels.nodes()[old]);
    let before = scripts_run(&sentinels.nodes()[new]);
    let back = instances.decided_since(switched + SWITCH_TIME);
    assert!(back < switched + 2 * SWITCH_TIME, "switched at {switched:?}, decided at {back:?}");
    assert!(sentinels.nodes()[old].is_primary(), "the old primary has not been demoted yet");
    tokio::time::sleep(SWITCH_TIME).await;
    assert_eq!(scripts_run(&sentinels.nodes()[old]), left, "a caller still uses the old primary");
    assert!(scripts_run(&sentinels.nodes()[new]) > before);
    instances.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_dies_under_load_is_replaced_in_time_and_grants_at_most_two_quotas() {
    let _exclusive = run_exclusively().await;
    let mut sentinels = block_in_place(|| Sentinels::start(Flavor::Redis7));
    let instances = Instances::start(&sentinels);
    let died = instances.origin.elapsed();
    let old = block_in_place(|| sentinels.kill_primary());
    // Skips decisions made at that moment.
    let died = died + Duration::from_millis(100);
    let back = instances.decided_since(died);
    assert!(back < died + RECOVERY_TIME, "died at {died:?}, recovered at {back:?}");
    let new = block_in_place(|| sentinels.wait_for_other_primary(old));
    assert!(scripts_run(&sentinels.nodes()[new]) > 0);
    instances.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_primary_each_sentinel_gets_at_most_two_connections_per_second() {
    const LASTING: Duration = Duration::from_secs(5);
    let _exclusive = run_exclusively().await;
    let mut sentinels = block_in_place(|| Setup::new(Flavor::Redis7).replicas(0).start());
    let limiter = limiter(&url(&sentinels)).await;
    let labels = RuleMix::OPEN.labels("missing");
    assert_eq!(check(&limiter, &labels, "before").await.source, Source::Store);
    block_in_place(|| sentinels.kill_primary());
    let connections = || {
        let accepted = sentinels.sentinels().iter().map(|one| one.info("total_connections_received"));
        accepted.map(|count| count.parse::<u64>().unwrap()).collect::<Vec<_>>()
    };
    let before = block_in_place(connections);
    let begun = Instant::now();
    while begun.elapsed() < LASTING {
        let decision = check(&limiter, &labels, "without a primary").await;
        assert_eq!((decision.source, decision.is_allowed()), (Source::Open, true));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // One connection is the query itself.
    let most = 2 * LASTING.as_secs() + 1 + 1;
    for (before, after) in before.into_iter().zip(block_in_place(connections)) {
        assert!((before + 2..=before + most).contains(&after), "{} connections", after - before);
    }
}
