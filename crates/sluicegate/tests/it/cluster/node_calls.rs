//! One call for the counters of several slots of one node: the number of calls, and that each check is charged exactly once during
//! migrations and after a failover.

use std::time::Duration;

use sluicegate::{
    Algorithm, Cost, Limit, RedisStore, StoreError,
    limiter::Operation,
    store::{Answer, Check, Key, RemoteStore, Terms, Tier},
};
use sluicegate_testkit::{
    cluster::{Cluster, Setup},
    server::{Flavor, Server},
    store_fixture::DecideAll,
};

use super::{HOUR, MANY, Place, check, hit, passes, places, scripts_run, url, used};

/// Number of keys of one node in a batch.
const KEYS: usize = 8;

pub(crate) fn scripts_run_by_all(cluster: &Cluster) -> u64 {
    cluster.nodes().iter().map(scripts_run).sum()
}

fn keys_of(places: &[Place], node: usize) -> Vec<Place> {
    let keys: Vec<Place> = places.iter().filter(|place| place.node == node).take(KEYS).cloned().collect();
    assert_eq!(keys.len(), KEYS, "node {node} has too few keys");
    keys
}

fn one_check_per_key(keys: &[Place]) -> Vec<Check> {
    keys.iter().map(|place| check(Operation::Check, &[(&place.key, MANY)])).collect()
}

/// Sends the same batch until stopped, and returns how often it was admitted as a whole.
fn caller(
    store: &RedisStore,
    keys: &[Place],
    stopped: &tokio::sync::watch::Receiver<bool>,
) -> tokio::task::JoinHandle<u64> {
    let (store, stopped, batch) = (store.clone(), stopped.clone(), one_check_per_key(keys));
    tokio::spawn(async move {
        let mut admitted = 0;
        while !*stopped.borrow() {
            let decided = store.decide_all(&batch, None).await.unwrap();
            assert!(decided.iter().all(|check| passes(&check.answers)));
            admitted += 1;
        }
        admitted
    })
}

#[tokio::test]
async fn checks_on_several_slots_of_one_node_are_decided_by_one_call() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let store = RedisStore::connect(&url(&cluster)).await.unwrap();
        let keys = keys_of(&places(&cluster, &store).await, 1);
        // every algorithm, and checks of one and of two slots
        let tier = |place: &Place, algorithm| Tier {
            key: Key::without_rule(&place.key).unwrap(),
            terms: Terms::new(Limit::new(algorithm, 3, HOUR).unwrap(), Cost::ONE),
        };
        let one = keys.iter().zip(Algorithm::WINDOWED.into_iter().cycle());
        let one = one.map(|(place, algorithm)| vec![tier(place, algorithm)]);
        let two = keys.windows(2).zip(Algorithm::WINDOWED.into_iter().cycle());
        let two = two.map(|(pair, algorithm)| vec![tier(&pair[0], algorithm), tier(&pair[1], algorithm)]);
        let batch: Vec<Check> =
            one.chain(two).map(|tiers| Check::new(Operation::Check, tiers).unwrap()).collect();

        let server = Server::start(flavor);
        let single = RedisStore::connect(&format!("redis://{}", server.addr())).await.unwrap();
        for round in 0..4 {
            let before = scripts_run_by_all(&cluster);
            let decided = store.decide_all(&batch, None).await.unwrap();
            assert_eq!(scripts_run_by_all(&cluster) - before, 1, "{flavor}, round {round}");
            let expected = single.decide_all(&batch, None).await.unwrap();
            for (found, expected) in decided.iter().zip(&expected) {
                let counts = |answers: &[Answer]| {
                    answers.iter().map(|one| (one.passes, one.charged, one.available)).collect::<Vec<_>>()
                };
                assert_eq!(counts(&found.answers), counts(&expected.answers), "{flavor}, round {round}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_over_slots_of_which_some_have_migrated_changes_nothing_and_is_sent_slot_by_slot() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let store = RedisStore::connect(&url(&cluster)).await.unwrap();
        let keys = keys_of(&places(&cluster, &store).await, 0);
        let batch = one_check_per_key(&keys);
        let all = check(Operation::Check, &keys.iter().map(|place| (&*place.key, MANY)).collect::<Vec<_>>());
        let mut expected = 0;
        let mut decide = async || {
            // a node that could not run a call over several slots gets one call per slot for a while
            tokio::time::sleep(Duration::from_millis(150)).await;
            for charged in [&batch[..], std::slice::from_ref(&all)] {
                let decided = store.decide_all(charged, None).await.unwrap();
                assert!(decided.iter().all(|check| passes(&check.answers)), "{flavor}");
                expected += 1;
            }
            for place in &keys {
                assert_eq!(used(&store, &place.key).await, expected, "{flavor}: {}", place.key);
            }
        };
        decide().await;
        // not the first key, which the call declares; two slots, so that the target imports one whose key is on the source
        let [first, last] = [&keys[1], &keys[KEYS - 1]].map(|place| cluster.begin_migration(place.slot, 1));
        decide().await;
        assert_eq!(first.move_keys(1), 1);
        decide().await;
        assert_eq!(last.move_keys(1), 1);
        decide().await;
        tokio::task::block_in_place(|| first.finish());
        decide().await;
        tokio::task::block_in_place(|| last.finish());
        decide().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_are_charged_exactly_once_while_their_slots_migrate() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let store = RedisStore::connect(&url(&cluster)).await.unwrap();
        let keys = keys_of(&places(&cluster, &store).await, 0);
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let callers = [0, 1, 2].map(|_| caller(&store, &keys, &stopped));
        for to in [1, 2, 0] {
            for place in &keys[2..5] {
                tokio::task::block_in_place(|| cluster.begin_migration(place.slot, to).finish());
            }
        }
        stop.send(true).unwrap();
        let mut admitted = 0;
        for caller in callers {
            admitted += caller.await.unwrap();
        }
        assert!(admitted > 20, "{flavor}: only {admitted} batches were decided");
        for place in &keys {
            assert_eq!(used(&store, &place.key).await, admitted, "{flavor}: {}", place.key);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_are_charged_exactly_once_while_valkey_migrates_their_slots_atomically() {
    let cluster = Cluster::start(Flavor::Valkey9);
    let store = RedisStore::connect(&url(&cluster)).await.unwrap();
    let keys = keys_of(&places(&cluster, &store).await, 0);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let callers = [0, 1, 2].map(|_| caller(&store, &keys, &stopped));
    for to in [1, 2, 0] {
        tokio::time::sleep(Duration::from_millis(100)).await;
        tokio::task::block_in_place(|| cluster.migrate_atomically(keys[3].slot, to));
    }
    stop.send(true).unwrap();
    let mut admitted = 0;
    for caller in callers {
        admitted += caller.await.unwrap();
    }
    assert!(admitted > 20, "only {admitted} batches were decided");
    for place in &keys {
        assert_eq!(used(&store, &place.key).await, admitted, "{}", place.key);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_takes_over_has_what_calls_over_several_slots_wrote() {
    for flavor in Flavor::ALL {
        let cluster = Setup::new(flavor).replicas(1).start();
        let store = RedisStore::connect(&url(&cluster)).await.unwrap();
        let keys = keys_of(&places(&cluster, &store).await, 1);
        for _ in 0..20 {
            let decided = store.decide_all(&one_check_per_key(&keys), None).await.unwrap();
            assert!(decided.iter().all(|check| passes(&check.answers)));
        }
        tokio::task::block_in_place(|| cluster.failover(4));
        let decided = store.decide_all(&one_check_per_key(&keys), None).await.unwrap();
        assert!(decided.iter().all(|check| passes(&check.answers)));
        for place in &keys {
            assert_eq!(used(&store, &place.key).await, 21, "{flavor}: {}", place.key);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_counter_affects_only_its_own_checks_on_a_cluster() {
    for flavor in Flavor::ALL {
        let cluster = Cluster::start(flavor);
        let store = RedisStore::connect(&url(&cluster)).await.unwrap();
        let all = places(&cluster, &store).await;
        let (here, there) = (keys_of(&all, 0), keys_of(&all, 1));
        let bad = &here[2];
        assert!(passes(&hit(&store, &bad.key).await.unwrap()));
        let mut node = cluster.nodes()[0].connection();
        let names: Vec<String> = redis::cmd("KEYS").arg("sg1:*").query(&mut node).unwrap();
        let name = names.into_iter().find(|name| name.ends_with(&format!(":{}", bad.key))).unwrap();
        let () = redis::cmd("DEL").arg(&name).query(&mut node).unwrap();
        let () = redis::cmd("RPUSH").arg(&name).arg("x").query(&mut node).unwrap();
        let () = redis::cmd("EXPIRE").arg(&name).arg(600).query(&mut node).unwrap();
        let unreadable = Err(StoreError::Unreadable { key: name.clone() });

        // one call over several slots of a node, and checks over several nodes
        let other = &there[0].key;
        let checks = [
            check(Operation::Check, &[(&here[0].key, MANY)]),
            check(Operation::Check, &[(&bad.key, MANY)]),
            check(Operation::Check, &[(&here[1].key, MANY), (&bad.key, MANY)]),
        ];
        let decided = store.decide(&checks, None).await;
        assert!(decided[0].is_ok(), "{flavor}: {decided:?}");
        assert_eq!(decided[1..], [unreadable.clone(), unreadable.clone()], "{flavor}");
        let spread = [
            check(Operation::Check, &[(other, MANY), (&bad.key, MANY)]),
            check(Operation::Check, &[(other, MANY), (&here[0].key, MANY)]),
        ];
        let decided = store.decide(&spread, None).await;
        assert_eq!(decided[0], unreadable, "{flavor}");
        assert!(decided[1].is_ok(), "{flavor}: {decided:?}");
        assert_eq!(used(&store, &here[0].key).await, 2, "{flavor}");
        assert_eq!(used(&store, &here[1].key).await, 0, "{flavor}");
        assert_eq!(used(&store, other).await, 1, "{flavor}: the reservation is released");
        let () = redis::cmd("DEL").arg(&name).query(&mut node).unwrap();
    }
}
