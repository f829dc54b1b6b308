//! Failover with Sentinel, planned or not: only the primary gets calls.

use std::time::Duration;

use sluicegate::{
    Cost, Limit, RedisStore, StoreError,
    limiter::Operation,
    redis::RedisSettings,
    store::{Check, Key, Terms, Tier},
};
use sluicegate_testkit::{
    sentinel::{NAME, Sentinels, Setup},
    server::{Flavor, Server},
    store_fixture::DecideAll,
    wait,
};

const AMOUNT: i64 = 100_000;

fn url(sentinels: &Sentinels) -> String {
    let places: Vec<String> = sentinels.sentinels().iter().map(|node| node.addr().to_string()).collect();
    format!("redis-sentinel://{}/{NAME}", places.join(","))
}

fn check(operation: Operation) -> [Check; 1] {
    let limit = Limit::sliding_log(AMOUNT.unsigned_abs(), Duration::from_secs(3_600)).unwrap();
    let tier = Tier { key: Key::without_rule("k").unwrap(), terms: Terms::new(limit, Cost::ONE) };
    [Check::new(operation, vec![tier]).unwrap()]
}

async fn hit(store: &RedisStore) -> Result<i64, StoreError> {
    Ok(store.decide_all(&check(Operation::Check), None).await?[0].answers[0].available)
}

/// Returns how many scripts a server has run.
fn scripts_run(server: &Server) -> u64 {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let calls = |line: &str| line.split_once("calls=")?.1.split(',').next()?.parse::<u64>().ok();
    let scripts = info.lines().filter(|line| line.starts_with("cmdstat_eval"));
    scripts.filter_map(calls).sum()
}

/// The outcomes of a continuous caller during a failover.
#[derive(Default)]
struct Outcomes {
    passed: u64,
    failed: Vec<StoreError>,
}

async fn call_until(store: &RedisStore, mut is_over: impl FnMut() -> bool) -> Outcomes {
    let mut seen = Outcomes::default();
    let mut in_a_row = 0;
    let bound = tokio::time::Instant::now() + 2 * wait::PATIENCE;
    while in_a_row < 20 {
        assert!(tokio::time::Instant::now() < bound, "decisions did not resume: {:?}", seen.failed.last());
        match hit(store).await {
            Ok(_) => seen.passed += 1,
            Err(error) => seen.failed.push(error),
        }
        in_a_row = if is_over() && seen.failed.len() as u64 + seen.passed > 0 { in_a_row + 1 } else { 0 };
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    seen
}

fn assert_no_replica_error(seen: &Outcomes) {
    for error in &seen.failed {
        assert!(!error.to_string().contains("READONLY"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_primary_is_warmed_up_before_the_first_decision() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let store = RedisStore::connect_later(&url(&sentinels)).unwrap();
    store.warm_up().await.unwrap();
    let primary = sentinels.primary();
    let run = |place: usize| scripts_run(&sentinels.nodes()[place]);
    // by its digest, which is unknown, and then in full
    assert_eq!(run(primary), 2);
    assert_eq!(hit(&store).await.unwrap(), AMOUNT - 1);
    assert_eq!(run(primary), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_resume_after_a_killed_primary_is_replaced() {
    let mut sentinels = Sentinels::start(Flavor::Redis7);
    let store = RedisStore::connect(&url(&sentinels)).await.unwrap();
    assert_eq!(hit(&store).await.unwrap(), AMOUNT - 1);
    let old = sentinels.kill_primary();
    let new = tokio::task::block_in_place(|| sentinels.wait_for_other_primary(old));
    let seen = call_until(&store, || true).await;
    assert_no_replica_error(&seen);
    assert!(scripts_run(&sentinels.nodes()[new]) >= seen.passed, "the new primary decides");
    hit(&store).await.unwrap();

    sentinels.node_mut(old).restart();
    let old = &sentinels.nodes()[old];
    tokio::task::block_in_place(|| {
        wait::until("the old primary is a replica", 2 * wait::PATIENCE, || !old.is_primary());
    });
    hit(&store).await.unwrap();
    assert_eq!(scripts_run(old), 0, "a replica gets no calls");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_failover_is_noticed_and_the_old_primary_gets_no_more_calls() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let sentinels = Sentinels::start(flavor);
        let store = RedisStore::connect(&url(&sentinels)).await.unwrap();
        hit(&store).await.unwrap();
        let old = sentinels.primary();
        let new = tokio::task::block_in_place(|| sentinels.failover());
        // well before the old primary is demoted, which takes about ten seconds
        let called = async {
            let before = scripts_run(&sentinels.nodes()[new]);
            while scripts_run(&sentinels.nodes()[new]) == before {
                let _ = hit(&store).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(8), called).await.unwrap();
        let left = scripts_run(&sentinels.nodes()[old]);
        let seen = call_until(&store, || !sentinels.nodes()[old].is_primary()).await;
        assert_no_replica_error(&seen);
        assert_eq!(scripts_run(&sentinels.nodes()[old]), left, "{flavor}: the old primary gets no calls");
        assert!(seen.failed.is_empty(), "{flavor}: {:?}", seen.failed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_becomes_a_replica_unannounced_is_never_visible_to_callers() {
    // the sentinels notice it after a while, and promote it again or another server
    let sentinels = Setup::new(Flavor::Redis7).replicas(2).start();
    let store = RedisStore::connect(&url(&sentinels)).await.unwrap();
    hit(&store).await.unwrap();
    let (old, other) = (&sentinels.nodes()[0], &sentinels.nodes()[1]);
    tokio::task::block_in_place(|| old.replicate(other));
    let is_well = || sentinels.nodes()[sentinels.primary()].is_primary();
    let seen = call_until(&store, is_well).await;
    assert_no_replica_error(&seen);
    assert!(seen.failed.iter().all(|error| matches!(error, StoreError::NotRun(_))), "{:?}", seen.failed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_use_separate_passwords() {
    let sentinels = Setup::new(Flavor::Redis7).password("data").sentinel_password("watch").start();
    let page = include_str!("../../../../docs/redis.md");
    let line = page.lines().filter_map(|line| line.strip_prefix("user sluicegate ")).nth(1).unwrap();
    let rules: Vec<&str> = line.split(' ').collect();
    for sentinel in sentinels.sentinels() {
        sentinel.set_user("sluicegate", &rules);
    }
    let watcher = RedisSettings::default().sentinel_user("sluicegate").sentinel_password("change-me-too");
    let store = RedisStore::connect_with(&url(&sentinels), &watcher.clone().password("data")).await.unwrap();
    hit(&store).await.unwrap();
    let old = sentinels.primary();
    tokio::task::block_in_place(|| sentinels.failover());
    let seen = call_until(&store, || !sentinels.nodes()[old].is_primary()).await;
    assert_no_replica_error(&seen);

    for wrong in [watcher.clone().password("wrong"), watcher.password("data").sentinel_password("wrong")] {
        let error = RedisStore::connect_with(&url(&sentinels), &wrong).await.unwrap_err();
        assert!(error.to_string().contains("assword") || error.to_string().contains("WRONGPASS"), "{error}");
    }
    let unknown = url(&sentinels).replace(NAME, "missing");
    assert!(RedisStore::connect(&unknown).await.unwrap_err().to_string().contains("missing"));
}
