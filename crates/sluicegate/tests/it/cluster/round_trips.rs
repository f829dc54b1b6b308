//! The number of calls of a check over several nodes, with and without a peek before the reservation, and that a denial after a
//! reservation changes nothing.

use std::time::Duration;

use sluicegate::{
    Algorithm, Cost, Limit, ManualClock, RedisStore, Timestamp,
    limiter::Operation,
    store::{Check, Key, RemoteStore, Terms, Tier},
};
use sluicegate_testkit::{
    cluster::Cluster,
    server::{Flavor, Server},
};

use super::{HOUR, MANY, ask, at, check, node_calls::scripts_run_by_all, passes, places, url, used};

/// Decides a check, and returns whether it passed and how many scripts ran for it.
async fn counted(cluster: &Cluster, store: &RedisStore, tiers: &[(&str, u64)]) -> (bool, u64) {
    let before = scripts_run_by_all(cluster);
    let answers = ask(store, check(Operation::Check, tiers)).await.unwrap();
    (passes(&answers), scripts_run_by_all(cluster) - before)
}

#[tokio::test]
async fn a_check_takes_as_many_calls_as_documented() {
    let cluster = Cluster::start(Flavor::Redis7);
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &store).await;
    let [first, last] = [0, 2].map(|node| at(&places, node).key);
    let neighbour = places.iter().rfind(|place| place.node == 0).unwrap().key.clone();

    assert_eq!(counted(&cluster, &store, &[(&first, MANY)]).await, (true, 1), "one slot");
    let one_node = [(&*first, MANY), (&*neighbour, MANY)];
    assert_eq!(counted(&cluster, &store, &one_node).await, (true, 1), "two slots of one node");

    let two_nodes = [(&*first, MANY), (&*last, 10)];
    assert_eq!(
        counted(&cluster, &store, &two_nodes).await,
        (true, 4),
        "unknown: two peeks, two reservations"
    );
    for left in (1..9).rev() {
        assert_eq!(counted(&cluster, &store, &two_nodes).await, (true, 2), "room is known, {left} left");
    }
    assert_eq!(counted(&cluster, &store, &two_nodes).await, (true, 4), "one left: peeked first");
    for _ in 0..3 {
        assert_eq!(counted(&cluster, &store, &two_nodes).await, (false, 2), "denied by the peek");
    }
}

#[tokio::test]
async fn a_reservation_that_loses_a_race_is_released() {
    let cluster = Cluster::start(Flavor::Redis7);
    let [store, other] = [(); 2].map(|()| url(&cluster));
    let (store, other) =
        (RedisStore::connect(&store).await.unwrap(), RedisStore::connect(&other).await.unwrap());
    let places = places(&cluster, &store).await;
    let [first, last] = [0, 2].map(|node| at(&places, node).key);
    for (tiers, exhausted, calls) in
        [([(&*first, 50), (&*last, 20)], (&*last, 20), 3), ([(&*first, 30), (&*last, 60)], (&*first, 30), 2)]
    {
        assert_eq!(counted(&cluster, &store, &tiers).await, (true, 4));
        assert_eq!(counted(&cluster, &store, &tiers).await, (true, 2), "room is known");
        let before = [used(&other, &first).await, used(&other, &last).await];
        while passes(&ask(&other, check(Operation::Check, &[exhausted])).await.unwrap()) {}
        assert_eq!(
            counted(&cluster, &store, &tiers).await,
            (false, calls),
            "reservations, one of which is denied, and a release or a peek at the rest"
        );
        let mut after = [used(&other, &first).await, used(&other, &last).await];
        if exhausted.0 == first {
            after[0] = before[0]
        } else {
            after[1] = before[1]
        }
        assert_eq!(after, before, "the reservation was released");
        assert_eq!(counted(&cluster, &store, &tiers).await, (false, 2), "now it peeks first");
        for key in [&first, &last] {
            let key = Key::without_rule(key).unwrap();
            store.reset(&[(key, Algorithm::SlidingLog)]).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_denial_after_a_reservation_answers_what_a_single_server_would_and_changes_nothing() {
    let cluster = Cluster::start(Flavor::Redis7);
    let server = Server::start(Flavor::Redis7);
    let clock = ManualClock::new(Timestamp::from_micros(1_800_000_000_000_000));
    let connected = RedisStore::connect(&url(&cluster)).await.unwrap();
    let places = places(&cluster, &connected).await;
    let keys = [0, 1, 2].map(|node| at(&places, node).key);
    let cluster_store = connected.with_clock(clock.clone());
    let other_process = RedisStore::connect(&url(&cluster)).await.unwrap().with_clock(clock.clone());
    let single_store = RedisStore::connect(&format!("redis://{}", server.addr())).await.unwrap();
    let single_store = single_store.with_clock(clock.clone());
    let mut late_denials = 0;
    for algorithm in Algorithm::WINDOWED {
        for exhausted in 0..3 {
            let prefix = format!("{algorithm}-{exhausted}");
            let stores =
                [&cluster_store, &single_store].map(|store| store.clone().with_prefix(&prefix).unwrap());
            let tier = |key: &String| Tier {
                key: Key::without_rule(key).unwrap(),
                terms: Terms::new(Limit::new(algorithm, 20, HOUR).unwrap(), Cost::from(2)),
            };
            let all = Check::new(Operation::Check, keys.iter().map(tier).collect()).unwrap();
            let charge = Check::new(Operation::Charge, vec![tier(&keys[exhausted])]).unwrap().times(8);
            let other_process = other_process.clone().with_prefix(&prefix).unwrap();
            let peek = Check::new(Operation::Peek, keys.iter().map(tier).collect()).unwrap();
            let before = scripts_run_by_all(&cluster);
            for (step, asked) in
                [&all, &all, &peek, &charge, &all, &peek, &all, &peek].into_iter().enumerate()
            {
                clock.advance(Duration::from_micros(777_777));
                let decided = scripts_run_by_all(&cluster);
                let of_cluster =
                    if asked.operation() == Operation::Charge { &other_process } else { &stores[0] };
                let of_cluster = ask(of_cluster, asked.clone()).await.unwrap();
                let of_single = ask(&stores[1], asked.clone()).await.unwrap();
                assert_eq!(of_cluster, of_single, "{algorithm}, tier {exhausted} exhausted, step {step}");
                if step == 4 && scripts_run_by_all(&cluster) - decided > 3 {
                    late_denials += 1;
                }
            }
            assert!(scripts_run_by_all(&cluster) > before);
        }
    }
    // by the third node: three reservations and two releases; by the second: two, one and a peek
    assert_eq!(late_denials, 2 * Algorithm::WINDOWED.len());
}
