//! A Redis that loses data, by command, by a restart or by eviction: the additional quota is bounded.

use std::time::Duration;

use sluicegate::{Limit, Limiter, Options, RedisStore, Source};
use sluicegate_testkit::server::{Flavor, Server};
use tokio::{task::block_in_place, time::Instant};

use crate::scenario::{HOUR, RECOVERY, run_exclusively};

/// Generous, and without a denial cache: every denial comes from Redis.
const OPTIONS: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::ZERO);

async fn limiter(server: &Server) -> Limiter {
    Limiter::builder()
        .store(RedisStore::connect(&server.url()).await.unwrap())
        .rules([])
        .options(OPTIONS)
        .build()
        .unwrap()
}

/// Checks until it is denied, and returns how many checks were admitted.
async fn exhaust(limiter: &Limiter, key: &str, limit: &Limit) -> u64 {
    let begun = Instant::now();
    let mut admitted = 0;
    loop {
        let decision = limiter.check_key(key, limit, 1.into()).await.unwrap();
        match (decision.source, decision.is_allowed()) {
            (Source::Store, true) => admitted += 1,
            (Source::Store, false) => return admitted,
            _ => {
                assert!(begun.elapsed() < RECOVERY, "{decision:?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_data_loss_grants_at_most_one_more_quota() {
    const AMOUNT: u64 = 50;
    let _exclusive = run_exclusively().await;
    let mut server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server).await;
    for algorithm in sluicegate::Algorithm::WINDOWED {
        // A window of ten years does not end during the test, and a bucket does not refill.
        let limit = Limit::new(algorithm, AMOUNT, sluicegate_core::limit::MAX_WINDOW).unwrap();
        let mut admitted = exhaust(&limiter, "k", &limit).await;
        assert_eq!(admitted, AMOUNT, "{algorithm}");
        let losses: [fn(&mut Server); 2] = [
            |server| redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap(),
            |server| server.restart(),
        ];
        for (lost, lose) in (1..).zip(losses) {
            block_in_place(|| lose(&mut server));
            admitted += exhaust(&limiter, "k", &limit).await;
            assert_eq!(exhaust(&limiter, "k", &limit).await, 0);
            assert!(admitted <= (1 + lost) * AMOUNT, "{algorithm}: {admitted} after {lost} losses");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn eviction_grants_at_most_the_quotas_of_the_evicted_counters() {
    const AMOUNT: u64 = 5;
    const KEYS: u64 = 400;
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server).await;
    let limit = Limit::sliding_log(AMOUNT, HOUR).unwrap();
    let key = |number: u64| format!("user-{number}");
    for number in 0..KEYS {
        assert_eq!(exhaust(&limiter, &key(number), &limit).await, AMOUNT);
    }
    server.config_set("maxmemory-policy", "allkeys-lru");
    let used: u64 = server.info("used_memory").parse().unwrap();
    server.config_set("maxmemory", used - used / 40);
    let mut granted = 0;
    for number in 0..KEYS {
        granted += exhaust(&limiter, &key(number), &limit).await;
    }
    let evicted: u64 = server.info("evicted_keys").parse().unwrap();
    assert!(evicted > 0 && granted > 0, "{evicted} were evicted, {granted} granted");
    assert!(granted <= evicted * AMOUNT, "{granted} were granted for {evicted} evicted counters");
    server.config_set("maxmemory", 0);
}
