//! A network that parts: the primary and one sentinel on one side, the replicas and the other sentinels on the other, and an
//! instance on each. These tests need root, for network namespaces.

use std::{thread, time::Duration};

use tokio::time::Instant;
use tollgate::redis::RedisSettings;
use tollgate_testkit::{
    namespace::{Link, Side},
    sentinel::{Sentinels, Setup},
    server::Flavor,
    wait,
};

use crate::{
    bench::{alone, scripts_run},
    failover::url,
    watched::{AMOUNT, WINDOW, Watched, assert_bound},
};

/// How long the network stays parted, at least: sentinels that do not agree at once need longer to name another primary.
const PARTED: Duration = Duration::from_secs(7);
/// `min-replicas-max-lag`, and within which time after it a primary that is cut off decides nothing any more.
const MAX_LAG: Duration = Duration::from_secs(1);
const STOPS: Duration = MAX_LAG.saturating_add(Duration::from_secs(2 + 1));
/// What is promised after sentinels have named another primary, and slack.
const BACK: Duration = Duration::from_millis(3_000 + 1_500);

/// What an instance saw, before, during and after.
struct Seen {
    left: Watched,
    right: Watched,
    origin: Instant,
    parted: Duration,
    switched: Duration,
    healed: Duration,
}

/// Lets an instance on each side ask, parts the network, and heals it again.
fn part(link: &Link, sentinels: &Sentinels) -> Seen {
    let origin = Instant::now();
    let (left, right) = (Watched::new(origin), Watched::new(origin));
    let url = url(sentinels);
    let run_in = |side: &Side, instance: &Watched| {
        // sockets belong to the namespace of the thread that opens them
        side.run(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
            runtime.unwrap().block_on(instance.run(&url, &RedisSettings::default()));
        });
    };
    thread::scope(|scope| {
        scope.spawn(|| run_in(link.left(), &left));
        scope.spawn(|| run_in(link.right(), &right));
        let _stop = StopBoth(&left, &right);
        wait::until("there is load", wait::PATIENCE, || {
            let counts = [&left, &right].map(|one| one.record().admitted.len() as u64);
            counts[0] + counts[1] > AMOUNT && !counts.contains(&0)
        });
        link.down();
        let parted = origin.elapsed();
        let new = sentinels.wait_for_other_primary(0);
        let switched = origin.elapsed();
        wait_until(origin, parted + PARTED);
        link.up();
        let healed = origin.elapsed();
        wait::until("the old primary follows the new one", 2 * wait::PATIENCE, || {
            !sentinels.nodes()[0].is_primary()
        });
        let whole = origin.elapsed();
        let (before, run) = (scripts_run(&sentinels.nodes()[new]), scripts_run(&sentinels.nodes()[0]));
        for one in [&left, &right] {
            let back = one.wait_until_decided_since(whole + WINDOW);
            assert!(back < whole + WINDOW + BACK, "whole at {whole:?}, and decided at {back:?}");
        }
        assert!(scripts_run(&sentinels.nodes()[new]) > before);
        assert!(scripts_run(&sentinels.nodes()[0]) <= run + 2, "a replica is asked");
        Seen { left: left.clone(), right: right.clone(), origin, parted, switched, healed }
    })
}

/// Ends the instances also when the test fails: the scope waits for them.
struct StopBoth<'a>(&'a Watched, &'a Watched);

impl Drop for StopBoth<'_> {
    fn drop(&mut self) {
        self.0.stop();
        self.1.stop();
    }
}

fn wait_until(origin: Instant, moment: Duration) {
    wait::until("time passes", moment + wait::PATIENCE, || origin.elapsed() >= moment);
}

impl Seen {
    /// Asserts what holds for whoever is with most of the sentinels.
    fn assert_majority_goes_on(&self) {
        let record = self.right.record();
        let back = record.decided.iter().find(|moment| **moment > self.parted + Duration::from_millis(500));
        assert!(
            *back.unwrap() < self.switched + BACK,
            "switched at {:?}, decided at {back:?}",
            self.switched
        );
        assert!(self.origin.elapsed() > self.healed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parted_network_grants_two_quotas_at_most_and_all_come_together_again() {
    let _alone = alone().await;
    tokio::task::block_in_place(|| {
        let link = Link::create().unwrap();
        let sentinels = Setup::new(Flavor::Redis7).across(&link).start();
        let seen = part(&link, &sentinels);
        seen.assert_majority_goes_on();
        assert_bound(&[&seen.left, &seen.right], 2 * AMOUNT);
        // each side has a primary of its own, and so a quota: nothing less could be promised
        let late = seen.left.record().decided.iter().any(|moment| *moment > seen.parted + STOPS);
        assert!(late, "the side that was cut off decided nothing");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_needs_a_replica_decides_nothing_once_it_is_cut_off() {
    let _alone = alone().await;
    tokio::task::block_in_place(|| {
        let link = Link::create().unwrap();
        let lag = MAX_LAG.as_secs().to_string();
        let setup = Setup::new(Flavor::Redis7).across(&link).replicas(2);
        let sentinels = setup.args(&["--min-replicas-to-write", "1", "--min-replicas-max-lag", &lag]).start();
        let seen = part(&link, &sentinels);
        seen.assert_majority_goes_on();
        assert_bound(&[&seen.left, &seen.right], 2 * AMOUNT);
        let cut_off = seen.parted + STOPS..seen.healed;
        let record = seen.left.record();
        let admitted = record.admitted.iter().filter(|call| cut_off.contains(&call.sent)).count();
        assert_eq!(admitted, 0, "the primary that was cut off still admits");
    });
}
