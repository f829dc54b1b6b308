//! Decisions during and after an outage of Redis: each rule applies its failure policy.

use std::time::Duration;

use sluicegate::{
    Key, Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, Source, StoreError,
};
use sluicegate_testkit::{
    cluster::{self, Cluster},
    server::{Flavor, Server},
    wait,
};

const MINUTE: Duration = Duration::from_secs(60);
/// Long enough for a busy machine, and short enough to wait for.
const DEADLINE: Duration = Duration::from_millis(200);

async fn limiter(server: &Server) -> Limiter {
    let rules = [
        Rule::new("local", Limit::sliding_log(10, MINUTE).unwrap())
            .when("route", "local")
            .per(["user"])
            .on_store_failure(OnStoreFailure::Local),
        Rule::new("closed", Limit::sliding_log(10, MINUTE).unwrap())
            .when("mixed", "yes")
            .on_store_failure(OnStoreFailure::Closed),
        Rule::new("open", Limit::sliding_log(1, MINUTE).unwrap()).per(["user"]),
    ];
    let store = RedisStore::connect(&server.url()).await.unwrap();
    Limiter::with_options(store, rules, Options { deadline: DEADLINE, ..Options::default() }).unwrap()
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    Labels::new(pairs.iter().copied()).unwrap()
}

/// Returns how many of twenty requests pass, all of them decided without the store.
async fn admitted_without_store(limiter: &Limiter, user: &str) -> usize {
    let mut admitted = 0;
    for _ in 0..20 {
        let decision = limiter.check(&labels(&[("route", "local"), ("user", user)]), 1).await.unwrap();
        assert_eq!((decision.source, decision.is_degraded()), (Source::Fallback, true));
        assert_eq!(decision.rule(), Some("local"), "the open rule does not decide");
        admitted += usize::from(decision.is_allowed());
    }
    admitted
}

/// Waits until the store decides again.
async fn wait_for_store(limiter: &Limiter) {
    wait::until_async("the store decides", wait::PATIENCE, || async {
        limiter.peek(&labels(&[("route", "local"), ("user", "x")]), 1).await.unwrap().source == Source::Store
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_two_instances_enforces_half_of_the_limit_across_repeated_outages() {
    let server = Server::start(Flavor::Redis7);
    let (one, two) = (limiter(&server).await, limiter(&server).await);
    wait_for_store(&one).await;
    wait_for_store(&two).await;
    // each learns of the other with its next heartbeat, within a few seconds
    wait::until("both instances are registered", wait::PATIENCE, || {
        let known: u32 = redis::cmd("ZCARD").arg("sg1:{instances}").query(&mut server.connection()).unwrap();
        known == 2
    });
    tokio::time::sleep(Duration::from_millis(2500)).await;

    server.suspend();
    assert_eq!((admitted_without_store(&one, "a").await, admitted_without_store(&two, "a").await), (5, 5));
    let mixed = labels(&[("route", "local"), ("mixed", "yes"), ("user", "b")]);
    let denied = one.check(&mixed, 1).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.source, denied.rule()), (false, Source::Closed, Some("closed")));
    assert_eq!(admitted_without_store(&one, "b").await, 5, "a denial by the closed rule charges nothing");
    let open = one.check(&labels(&[("user", "a")]), 1).await.unwrap();
    assert_eq!((open.is_allowed(), open.source), (true, Source::Open));
    assert!(open.failure.is_some());

    server.resume();
    wait_for_store(&one).await;
    wait_for_store(&two).await;
    server.suspend();
    assert_eq!((admitted_without_store(&one, "a").await, admitted_without_store(&two, "a").await), (0, 0));
    server.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_reaches_redis_after_its_deadline_charges_nothing() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server).await;
    let limit = Limit::sliding_log(100, MINUTE).unwrap();
    // the first answer contains the time of the server
    assert!(limiter.check_key("k", &limit, 1.into()).await.unwrap().is_allowed());
    for round in 0..3 {
        server.suspend();
        let mut sent = 0;
        while limiter
            .check_key("k", &limit, 1.into())
            .await
            .unwrap()
            .failure
            .is_some_and(|why| is_ambiguous(&why))
        {
            sent += 1;
        }
        // a call that is late by less than a round trip may still be charged
        tokio::time::sleep(DEADLINE / 2).await;
        server.resume();
        assert!(sent >= 1, "no call was in flight in round {round}");
        wait_for_store(&limiter).await;
        let left = limiter.peek_key("k", &limit, 1.into()).await.unwrap().remaining();
        assert_eq!(left, Some(99), "round {round}");
    }
}

/// Returns whether the outcome of the call is unknown.
fn is_ambiguous(why: &StoreError) -> bool {
    matches!(why, StoreError::Ambiguous(_))
}

/// Returns a key of each node.
fn keys_of_nodes(cluster: &Cluster) -> [String; 3] {
    let key_of = |node: usize| {
        let mut keys = (0..1000).map(|number| format!("key-{number}"));
        let key = keys.find(|key| {
            let tag = Key::without_rule(key).unwrap().tag();
            cluster.primary_of(cluster.slot_of(format!("{{{tag:08x}}}"))) == Some(node)
        });
        key.unwrap()
    };
    [0, 1, 2].map(key_of)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_cluster_node_does_not_delay_calls_to_other_nodes() {
    let setup = cluster::Setup::new(Flavor::Redis7).coverage(cluster::Coverage::Partial);
    let cluster = setup.node_timeout(Duration::from_secs(30)).start();
    let addresses: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    let store = RedisStore::connect(&format!("redis-cluster://{}", addresses.join(","))).await.unwrap();
    let options = Options { deadline: DEADLINE, ..Options::default() };
    let limiter = Limiter::with_options(store, [], options).unwrap();
    let limit = Limit::token_bucket(1_000_000, MINUTE).unwrap();
    let keys = keys_of_nodes(&cluster);
    for key in &keys {
        assert_eq!(limiter.check_key(key, &limit, 1.into()).await.unwrap().source, Source::Store);
    }

    cluster.nodes()[0].suspend();
    let ask = |key: String| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let mut sources = Vec::new();
            for _ in 0..100 {
                sources.push(limiter.check_key(&key, &limit, 1.into()).await.unwrap().source);
            }
            sources
        })
    };
    // several callers per key, so that calls to the silent node are always in flight
    let asking: Vec<_> = (0..12).map(|number| (number % 3, ask(keys[number % 3].clone()))).collect();
    for (node, sources) in asking {
        let expected = if node == 0 { Source::Open } else { Source::Store };
        assert!(sources.await.unwrap().iter().all(|source| *source == expected), "node {node}");
    }
    cluster.nodes()[0].resume();
    wait::until_async("the node decides again", wait::PATIENCE, || async {
        limiter.check_key(&keys[0], &limit, 1.into()).await.unwrap().source == Source::Store
    })
    .await;
}
