//! Decisions during and after an outage of Redis: each rule applies its failure policy.

use std::time::Duration;

use futures_util::future::join_all;
use sluicegate::{
    Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, Source, StoreError,
    limiter::RuleSelection, store::Key,
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
    Limiter::builder()
        .store(store)
        .rules(rules)
        .options(Options::default().deadline(DEADLINE))
        .build()
        .unwrap()
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
async fn without_the_store_the_usage_that_it_last_reported_still_counts() {
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let rule = |name, limit| {
        Rule::new(name, limit).when("rule", name).per(["user"]).on_store_failure(OnStoreFailure::Local)
    };
    let rules = [
        rule("log", Limit::sliding_log(10, MINUTE).unwrap()),
        rule("window", Limit::fixed_window(10, 60 * MINUTE).unwrap()),
        rule("counter", Limit::sliding_counter(10, MINUTE).unwrap()),
        rule("bucket", Limit::token_bucket(10, 60 * MINUTE).unwrap()),
    ];
    let options = Options::default().deadline(DEADLINE).denial_cache(Duration::ZERO);
    let limiter = Limiter::builder().store(store).rules(rules).options(options).build().unwrap();
    let names = ["log", "window", "counter", "bucket"];
    for name in names {
        for (user, used) in [("full", 10), ("half", 5), ("reset", 10)] {
            let decision = limiter.check(&labels(&[("rule", name), ("user", user)]), used).await.unwrap();
            assert_eq!((decision.source, decision.is_allowed()), (Source::Store, true));
        }
        limiter.reset(&labels(&[("rule", name), ("user", "reset")]), &RuleSelection::Keyed).await.unwrap();
    }
    server.suspend();
    for name in names {
        for (user, expected) in [("full", 0), ("half", 5), ("reset", 10), ("new", 10)] {
            let labels = labels(&[("rule", name), ("user", user)]);
            let mut admitted = 0;
            for _ in 0..20 {
                let decision = limiter.check(&labels, 1).await.unwrap();
                assert_eq!(decision.source, Source::Fallback, "{name} {user}");
                admitted += usize::from(decision.is_allowed());
                assert!(decision.is_allowed() || decision.retry_after().is_some());
            }
            assert_eq!(admitted, expected, "{name} {user}");
        }
    }
    server.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn until_instances_are_counted_a_limit_is_divided_by_the_expected_number() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    drop(server);
    let rules = [Rule::new("local", Limit::sliding_log(20, MINUTE).unwrap())
        .per(["user"])
        .on_store_failure(OnStoreFailure::Local)];
    let options = Options::default().deadline(DEADLINE).instances(4);
    let store = RedisStore::connect_later(&url).unwrap();
    let limiter = Limiter::builder().store(store).rules(rules).options(options).build().unwrap();
    let mut admitted = 0;
    for _ in 0..20 {
        let decision = limiter.check(&labels(&[("user", "a")]), 1).await.unwrap();
        assert_eq!(decision.source, Source::Fallback);
        admitted += usize::from(decision.is_allowed());
    }
    assert_eq!(admitted, 5, "a quarter of 20");
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
        // until after the deadline: a probe replaces the silent connection, which ends the calls in flight before it
        tokio::time::sleep(DEADLINE * 3 / 2).await;
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
    let options = Options::default().deadline(DEADLINE);
    let limiter = Limiter::builder().store(store).rules([]).options(options).build().unwrap();
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

/// Makes the key of one counter a list.
fn make_unreadable(server: &Server, rule: &str, user: &str) -> String {
    let key = keys(server).into_iter().find(|key| key.ends_with(&format!(":{rule}:{user}"))).unwrap();
    let mut replace = redis::pipe();
    replace.del(&key).rpush(&key, "x").expire(&key, 600);
    let () = replace.query(&mut server.connection()).unwrap();
    key
}

fn keys(server: &Server) -> Vec<String> {
    redis::cmd("KEYS").arg("sg1:*").query(&mut server.connection()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_counter_applies_its_policy_and_other_callers_are_not_affected() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server).await;
    for user in ["bad", "good"] {
        limiter.check(&labels(&[("route", "local"), ("user", user)]), 1).await.unwrap();
    }
    let key = make_unreadable(&server, "open", "bad");
    let ask = async |user: &str| limiter.peek(&labels(&[("user", user)]), 1).await.unwrap();
    let together = (0..200).map(|round| ask(if round % 2 == 0 { "bad" } else { "good" }));
    for (round, decision) in join_all(together).await.into_iter().enumerate() {
        if round % 2 == 0 {
            assert_eq!((decision.source, decision.is_allowed()), (Source::Open, true));
            assert_eq!(decision.failure, Some(StoreError::Unreadable { key: key.clone() }));
        } else {
            assert_eq!((decision.source, decision.is_allowed()), (Source::Store, false));
        }
    }
    // without another caller, no check of a call is decided
    for _ in 0..20 {
        assert_eq!(ask("bad").await.source, Source::Open);
    }
    let decision = limiter.check(&labels(&[("route", "local"), ("user", "bad")]), 1).await.unwrap();
    assert_eq!((decision.source, decision.rule()), (Source::Fallback, Some("local")));
    let charge = limiter.charge(&labels(&[("user", "bad")]), 1).await.unwrap_err();
    assert!(charge.to_string().contains(&key), "{charge}");
    let stats = limiter.stats();
    assert_eq!(stats.open_breakers, 0);
    assert_eq!(stats.errors.iter().map(|(_, count)| count).sum::<u64>(), 0, "{:?}", stats.errors);
    assert!(stats.unreadable >= 22, "{}", stats.unreadable);
    let kind: String = redis::cmd("TYPE").arg(&key).query(&mut server.connection()).unwrap();
    assert_eq!(kind, "list");
}
