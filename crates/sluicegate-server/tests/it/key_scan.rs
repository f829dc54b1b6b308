//! The periodic scan for keys without a TTL, on real servers.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::time::Duration;

use futures_util::future::join_all;
use sluicegate::{Cost, Limit, Limiter, Options, RedisStore, redis::inspect::PAGE};
use sluicegate_server::{
    config::StoreSettings,
    engine::Engine,
    key_scan::{KeyScanError, KeyScanner, MAX_KEYS},
    observe::{key_scans::KeyCounts, logs::Settings},
};
use sluicegate_testkit::{
    cluster::Cluster,
    sentinel::{NAME, Sentinels},
    server::{Flavor, Server},
};
use tracing::subscriber::set_default;

use crate::{
    log_lines::{Lines, subscriber},
    metrics::value,
};

const REDIS_PAGE: &str = include_str!("../../../../docs/redis.md");

fn settings(url: &str) -> StoreSettings {
    let key_scan_interval = Some(Duration::from_secs(60));
    StoreSettings { url: url.parse().unwrap(), key_scan_interval, ..StoreSettings::default() }
}

fn scanner(url: &str) -> KeyScanner {
    KeyScanner::new(&settings(url)).unwrap()
}

/// Creates this many counters.
async fn charge(url: &str, counters: u32) {
    let options = Options::default().deadline(Duration::from_secs(5));
    let store = RedisStore::connect(url).await.unwrap();
    let limiter = Limiter::builder().store(store).rules([]).options(options).build().unwrap();
    let limit = Limit::token_bucket(10, Duration::from_secs(3_600)).unwrap();
    let keys: Vec<String> = (0..counters).map(|key| format!("user:{key}")).collect();
    let checks = keys.iter().map(|key| limiter.check_key(key, &limit, Cost::ONE));
    assert!(join_all(checks).await.into_iter().all(|decision| !decision.unwrap().is_degraded()));
}

/// Removes the TTL of some counters on this server.
fn persist(server: &Server, count: usize) {
    let mut connection = server.connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg("sg1:*user*").query(&mut connection).unwrap();
    assert!(keys.len() >= count, "{keys:?}");
    for key in &keys[..count] {
        redis::cmd("PERSIST").arg(key).exec(&mut connection).unwrap();
    }
}

/// Removes all keys: the testkit requires that every key of a server has a TTL at the end of a test.
fn flush(server: &Server) {
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_without_a_ttl_are_counted_and_foreign_keys_are_not() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        charge(&server.url(), 20).await;
        for foreign in ["sg1:session:7", "session:8"] {
            redis::cmd("SET").arg(foreign).arg(1).exec(&mut server.connection()).unwrap();
        }
        let scanner = scanner(&server.url());
        assert_eq!(scanner.count_keys(MAX_KEYS).await.unwrap(), KeyCounts { keys: 20, without_ttl: 0 });
        persist(&server, 3);
        assert_eq!(scanner.count_keys(MAX_KEYS).await.unwrap(), KeyCounts { keys: 20, without_ttl: 3 });
        flush(&server);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_primary_that_the_sentinels_name_is_scanned() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let addresses: Vec<_> = sentinels.sentinels().iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redis-sentinel://{}/{NAME}", addresses.join(","));
    charge(&url, 20).await;
    persist(&sentinels.nodes()[sentinels.primary()], 2);
    let counts = scanner(&url).count_keys(MAX_KEYS).await.unwrap();
    assert_eq!(counts, KeyCounts { keys: 20, without_ttl: 2 });
    flush(&sentinels.nodes()[sentinels.primary()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_primary_of_a_cluster_is_scanned_and_an_unreachable_one_fails_the_scan() {
    let mut cluster = Cluster::start(Flavor::Redis7);
    let addresses: Vec<_> = cluster.nodes().iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redis-cluster://{}", addresses.join(","));
    charge(&url, 60).await;
    cluster.nodes().iter().for_each(|server| persist(server, 1));
    let counts = scanner(&url).count_keys(MAX_KEYS).await.unwrap();
    assert_eq!(counts, KeyCounts { keys: 60, without_ttl: cluster.nodes().len() as u64 });
    cluster.nodes().iter().for_each(flush);

    let dead = cluster.nodes()[1].addr().to_string();
    cluster.node_mut(1).kill();
    match scanner(&url).count_keys(MAX_KEYS).await.unwrap_err() {
        KeyScanError::Unreachable { address, .. } => assert_eq!(address, dead),
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scan_examines_no_more_pages_than_its_bound() {
    const COUNTERS: u32 = 8 * PAGE;
    let server = Server::start(Flavor::Redis7);
    charge(&server.url(), COUNTERS).await;
    let scans = || {
        let statistics: String =
            redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
        let line = statistics.lines().find_map(|line| line.strip_prefix("cmdstat_scan:calls="));
        line.map_or(0, |line| line.split(',').next().unwrap().parse::<u32>().unwrap())
    };
    let scanner = scanner(&server.url());
    let counts = scanner.count_keys(u64::from(2 * PAGE)).await.unwrap();
    assert_eq!(scans(), 2);
    assert!(counts.keys > 0 && counts.keys < u64::from(COUNTERS), "{counts:?}");
    assert_eq!(scanner.count_keys(MAX_KEYS).await.unwrap().keys, u64::from(COUNTERS));
}

/// The metrics of the scan: keys, keys without a TTL, and whether the last scan succeeded.
fn metrics(engine: &Engine) -> [f64; 3] {
    let text = engine.metrics();
    ["store_scanned_keys", "store_keys_without_ttl", "store_last_key_scan_successful"]
        .map(|name| value(&text, &format!("sluicegate_{name}")))
}

#[tokio::test]
async fn metrics_and_log_show_the_last_successful_scan_and_whether_the_last_one_failed() {
    let server = Server::start(Flavor::Redis7);
    let line = REDIS_PAGE.lines().find_map(|line| line.strip_prefix("user sluicegate ")).unwrap();
    server.set_user("sluicegate", &line.split(' ').collect::<Vec<_>>());
    let url = format!("redis://sluicegate:change-me@{}", server.addr());
    charge(&url, 5).await;
    let (engine, scanner) =
        (Engine::new(Limiter::new(sluicegate::MemoryStore::new(), []).unwrap()), scanner(&url));
    assert_eq!(metrics(&engine), [0.0, 0.0, 1.0]);

    let lines = Lines::default();
    let writer = lines.clone();
    let (subscriber, _logs) = subscriber(&Settings::default(), move || writer.clone());
    let _guard = set_default(subscriber);
    let scan = || scanner.scan(engine.observer().key_scans());
    let new_lines = || std::mem::take(&mut *lines.0.lock());
    let logged = || String::from_utf8(new_lines()).unwrap();

    scan().await;
    assert_eq!(metrics(&engine), [0.0, 0.0, 0.0]);
    let text = logged();
    assert!(text.contains("WARN") && text.contains("key scan failed") && text.contains("NOPERM"), "{text}");
    assert!(text.contains("grant the Redis user +scan +pttl") && !text.contains("change-me"), "{text}");

    // the documented permissions
    server.set_user("sluicegate", &["+scan", "+pttl"]);
    persist(&server, 2);
    scan().await;
    assert_eq!(metrics(&engine), [5.0, 2.0, 1.0]);
    let text = logged();
    assert!(
        text.contains("WARN") && text.contains("keys in Redis without a TTL, which never expire: 2;"),
        "{text}"
    );
    scan().await;
    assert_eq!(logged(), "", "the warning is not repeated");

    server.set_user("sluicegate", &["-pttl"]);
    scan().await;
    assert_eq!(metrics(&engine), [5.0, 2.0, 0.0], "the previous counts are kept");

    server.set_user("sluicegate", &["+pttl"]);
    logged();
    flush(&server);
    scan().await;
    assert_eq!(metrics(&engine), [0.0, 0.0, 1.0]);
    let text = logged();
    assert!(text.contains("INFO") && text.contains("every scanned key in Redis has a TTL again"), "{text}");
}

#[test]
fn the_scan_is_off_unless_its_interval_is_set_and_the_store_is_redis() {
    assert!(KeyScanner::new(&StoreSettings::default()).is_none());
    assert!(KeyScanner::new(&settings("memory:")).is_none());
    assert!(KeyScanner::new(&StoreSettings { key_scan_interval: None, ..settings("redis://h") }).is_none());
}
