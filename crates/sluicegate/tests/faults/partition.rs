//! A network partition: the primary and one sentinel on one side, the replicas and the other sentinels on the other,
//! and an instance on each side. These tests require root for network namespaces.

use std::{thread, time::Duration};

use sluicegate::redis::RedisSettings;
use sluicegate_testkit::{
    namespace::{Link, Side},
    sentinel::{Sentinels, Setup},
    server::Flavor,
    wait,
};
use tokio::time::Instant;

use crate::{
    failover::url,
    monitored_instance::{AMOUNT, MonitoredInstance, WINDOW, assert_bound},
    scenario::{run_exclusively, scripts_run},
};

/// Minimum duration of the partition: sentinels that do not agree immediately need longer to elect another primary.
const PARTITION_TIME: Duration = Duration::from_secs(7);
/// `min-replicas-max-lag`, and the time after it by which a partitioned primary has stopped deciding.
const MAX_LAG: Duration = Duration::from_secs(1);
const STOP_TIME: Duration = MAX_LAG.saturating_add(Duration::from_secs(2 + 1));
/// The guaranteed recovery time after sentinels have elected another primary, and slack.
const RECOVERY_TIME: Duration = Duration::from_millis(3_000 + 1_500);

/// The records of both instances, and the times of the partition.
struct PartitionRecord {
    left: MonitoredInstance,
    right: MonitoredInstance,
    origin: Instant,
    partitioned: Duration,
    switched: Duration,
    healed: Duration,
}

/// Runs an instance on each side, partitions the network, and reconnects it.
fn partition(link: &Link, sentinels: &Sentinels) -> PartitionRecord {
    let origin = Instant::now();
    let (left, right) = (MonitoredInstance::new(origin), MonitoredInstance::new(origin));
    let url = url(sentinels);
    let run_in = |side: &Side, instance: &MonitoredInstance| {
        // Sockets belong to the namespace of the thread that opens them.
        side.run(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
            runtime.unwrap().block_on(instance.run(&url, &RedisSettings::default()));
        });
    };
    thread::scope(|scope| {
        scope.spawn(|| run_in(link.left(), &left));
        scope.spawn(|| run_in(link.right(), &right));
        let _stop = StopOnDrop(&left, &right);
        wait::until("there is load", wait::PATIENCE, || {
            let counts = [&left, &right].map(|one| one.record().admitted.len() as u64);
            counts[0] + counts[1] > AMOUNT && !counts.contains(&0)
        });
        link.down();
        let partitioned = origin.elapsed();
        let new = sentinels.wait_for_other_primary(0);
        let switched = origin.elapsed();
        wait_until(origin, partitioned + PARTITION_TIME);
        link.up();
        let healed = origin.elapsed();
        wait::until("the old primary is a replica", 2 * wait::PATIENCE, || {
            !sentinels.nodes()[0].is_primary()
        });
        let whole = origin.elapsed();
        let (before, run) = (scripts_run(&sentinels.nodes()[new]), scripts_run(&sentinels.nodes()[0]));
        for one in [&left, &right] {
            let back = one.wait_until_decided_since(whole + WINDOW);
            assert!(back < whole + WINDOW + RECOVERY_TIME, "reconnected at {whole:?}, decided at {back:?}");
        }
        assert!(scripts_run(&sentinels.nodes()[new]) > before);
        assert!(scripts_run(&sentinels.nodes()[0]) <= run + 2, "a replica was called");
        PartitionRecord { left: left.clone(), right: right.clone(), origin, partitioned, switched, healed }
    })
}

/// Stops the instances even if the test fails, because the scope waits for them.
struct StopOnDrop<'a>(&'a MonitoredInstance, &'a MonitoredInstance);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
        self.1.stop();
    }
}

fn wait_until(origin: Instant, moment: Duration) {
    wait::until("time passes", moment + wait::PATIENCE, || origin.elapsed() >= moment);
}

impl PartitionRecord {
    /// Asserts the guarantees of the side with the majority of the sentinels.
    fn assert_majority_continues(&self) {
        let record = self.right.record();
        let back =
            record.decided.iter().find(|moment| **moment > self.partitioned + Duration::from_millis(500));
        assert!(
            *back.unwrap() < self.switched + RECOVERY_TIME,
            "switched at {:?}, decided at {back:?}",
            self.switched
        );
        assert!(self.origin.elapsed() > self.healed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_partition_grants_at_most_two_quotas_and_both_sides_recover() {
    let _exclusive = run_exclusively().await;
    tokio::task::block_in_place(|| {
        let link = Link::create().unwrap();
        let sentinels = Setup::new(Flavor::Redis7).across(&link).start();
        let seen = partition(&link, &sentinels);
        seen.assert_majority_continues();
        assert_bound(&[&seen.left, &seen.right], 2 * AMOUNT);
        // Each side has its own primary and therefore its own quota.
        let late = seen.left.record().decided.iter().any(|moment| *moment > seen.partitioned + STOP_TIME);
        assert!(late, "the partitioned primary decided nothing");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_primary_with_min_replicas_stops_deciding() {
    let _exclusive = run_exclusively().await;
    tokio::task::block_in_place(|| {
        let link = Link::create().unwrap();
        let lag = MAX_LAG.as_secs().to_string();
        let setup = Setup::new(Flavor::Redis7).across(&link).replicas(2);
        let sentinels = setup.args(&["--min-replicas-to-write", "1", "--min-replicas-max-lag", &lag]).start();
        let seen = partition(&link, &sentinels);
        seen.assert_majority_continues();
        assert_bound(&[&seen.left, &seen.right], 2 * AMOUNT);
        let cut_off = seen.partitioned + STOP_TIME..seen.healed;
        let record = seen.left.record();
        let admitted = record.admitted.iter().filter(|call| cut_off.contains(&call.sent)).count();
        assert_eq!(admitted, 0, "the partitioned primary still admits");
    });
}
