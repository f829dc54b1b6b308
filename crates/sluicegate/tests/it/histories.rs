//! Random histories: model, memory and every Redis agree on every field.

use std::{sync::Arc, time::Duration};

use sluicegate::{Algorithm, ManualClock, MemoryStore, RedisStore, Timestamp, store::RemoteStore};
use sluicegate_testkit::{
    cluster::Cluster,
    delay_proxy::DelayProxy,
    history::{Plan, assert_agrees_with_model},
    hold_history::{assert_holds_agree_with_model, assert_holds_agree_with_model_on},
    lease_history::assert_leases_agree_with_model,
    sentinel::{NAME, Sentinels},
    server::{Flavor, Server},
};

#[tokio::test]
async fn memory_agrees_with_the_model() {
    for (seed, algorithm) in (100..).zip(Algorithm::WINDOWED) {
        let clock = ManualClock::new(Timestamp::default());
        let store = MemoryStore::new().with_clock(clock.clone());
        assert_agrees_with_model(store, &clock, &Plan::new(&[algorithm], seed)).await;
    }
}

#[tokio::test]
async fn memory_agrees_with_the_model_on_mixed_algorithms() {
    let clock = ManualClock::new(Timestamp::default());
    let store = MemoryStore::new().with_clock(clock.clone());
    assert_agrees_with_model(store, &clock, &Plan::new(&Algorithm::WINDOWED, 200)).await;
}

async fn redis_agrees(flavor: Flavor, plan: Plan) {
    let server = Server::start(flavor);
    let clock = ManualClock::new(Timestamp::default());
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    assert_agrees_with_model(store, &clock, &plan).await;
}

#[tokio::test]
async fn redis_6_agrees_with_the_model() {
    for (seed, algorithm) in (310..).zip(Algorithm::WINDOWED) {
        redis_agrees(Flavor::Redis6, Plan::new(&[algorithm], seed).steps(2_500)).await;
    }
}

#[tokio::test]
async fn redis_7_agrees_with_the_model() {
    for (seed, algorithm) in (300..).zip(Algorithm::WINDOWED) {
        redis_agrees(Flavor::Redis7, Plan::new(&[algorithm], seed)).await;
    }
}

#[tokio::test]
async fn valkey_9_agrees_with_the_model() {
    for (seed, algorithm) in (320..).zip(Algorithm::WINDOWED) {
        redis_agrees(Flavor::Valkey9, Plan::new(&[algorithm], seed).steps(2_500)).await;
    }
}

#[tokio::test]
async fn every_server_agrees_with_the_model_on_mixed_algorithms() {
    for (seed, flavor) in (400..).zip(Flavor::ALL) {
        redis_agrees(flavor, Plan::new(&Algorithm::WINDOWED, seed)).await;
    }
}

#[tokio::test]
async fn memory_and_redis_agree_with_the_model_on_long_logs() {
    let plan = Plan::new(&[Algorithm::SlidingLog], 500).dense();
    let clock = ManualClock::new(Timestamp::default());
    assert_agrees_with_model(MemoryStore::new().with_clock(clock.clone()), &clock, &plan).await;
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    assert_agrees_with_model(store, &clock, &plan).await;
}

#[tokio::test]
async fn leases_agree_with_the_model_on_every_server() {
    for (seed, flavor) in (900..).zip(Flavor::ALL) {
        let server = Server::start(flavor);
        let clock = ManualClock::new(Timestamp::default());
        let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
        let store: Arc<dyn RemoteStore> = Arc::new(store);
        for algorithm in Algorithm::WINDOWED {
            assert_leases_agree_with_model(&store, &clock, &[algorithm], seed, 1_200).await;
        }
        assert_leases_agree_with_model(&store, &clock, &Algorithm::WINDOWED, seed + 50, 1_200).await;
    }
}

#[tokio::test]
async fn holds_on_memory_agree_with_the_model() {
    for (seed, algorithm) in (1_000..).zip(Algorithm::ALL) {
        let clock = ManualClock::new(Timestamp::default());
        let store = MemoryStore::new().with_clock(clock.clone());
        assert_holds_agree_with_model(store, &clock, &Plan::new(&[algorithm], seed)).await;
    }
    let clock = ManualClock::new(Timestamp::default());
    let store = MemoryStore::new().with_clock(clock.clone());
    assert_holds_agree_with_model(store, &clock, &Plan::new(&Algorithm::ALL, 1_050)).await;
}

async fn holds_agree(flavor: Flavor, algorithms: &[Algorithm], seed: u64) {
    let server = Server::start(flavor);
    let clock = ManualClock::new(Timestamp::default());
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    assert_holds_agree_with_model(store, &clock, &Plan::new(algorithms, seed)).await;
}

#[tokio::test]
async fn holds_on_redis_6_agree_with_the_model() {
    for (seed, algorithm) in (1_110..).zip(Algorithm::ALL) {
        holds_agree(Flavor::Redis6, &[algorithm], seed).await;
    }
}

#[tokio::test]
async fn holds_on_redis_7_agree_with_the_model() {
    for (seed, algorithm) in (1_100..).zip(Algorithm::ALL) {
        holds_agree(Flavor::Redis7, &[algorithm], seed).await;
    }
}

#[tokio::test]
async fn holds_on_valkey_9_agree_with_the_model() {
    for (seed, algorithm) in (1_120..).zip(Algorithm::ALL) {
        holds_agree(Flavor::Valkey9, &[algorithm], seed).await;
    }
}

#[tokio::test]
async fn holds_on_every_server_agree_with_the_model_on_mixed_algorithms() {
    for (seed, flavor) in (1_200..).zip(Flavor::ALL) {
        holds_agree(flavor, &Algorithm::ALL, seed).await;
    }
}

#[tokio::test]
async fn holds_behind_sentinels_agree_with_the_model() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let url = format!("redis-sentinel://{}/{NAME}", addresses(sentinels.sentinels()));
    let clock = ManualClock::new(Timestamp::default());
    let store = RedisStore::connect(&url).await.unwrap().with_clock(clock.clone());
    assert_holds_agree_with_model(store, &clock, &Plan::new(&Algorithm::ALL, 1_300).steps(3_000)).await;
}

/// Most of these holds have tiers on several nodes.
#[tokio::test]
async fn holds_on_every_cluster_agree_with_the_model() {
    for (seed, flavor) in (1_400..).zip(Flavor::ALL) {
        let cluster = Cluster::start(flavor);
        let clock = ManualClock::new(Timestamp::default());
        let url = format!("redis-cluster://{}", addresses(cluster.nodes()));
        let store = RedisStore::connect(&url).await.unwrap().with_clock(clock.clone());
        let plan = Plan::new(&Algorithm::ALL, seed).one_at_a_time().steps(4_000);
        assert_holds_agree_with_model_on(&cluster, store, &clock, &plan).await;
    }
}

fn addresses(servers: &[Server]) -> String {
    let addresses: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    addresses.join(",")
}

#[tokio::test]
async fn a_primary_behind_sentinels_agrees_with_the_model() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let url = format!("redis-sentinel://{}/{NAME}", addresses(sentinels.sentinels()));
    let clock = ManualClock::new(Timestamp::default());
    let store = RedisStore::connect(&url).await.unwrap().with_clock(clock.clone());
    assert_agrees_with_model(store, &clock, &Plan::new(&Algorithm::WINDOWED, 600).steps(3_000)).await;
}

/// Nearly every check of these histories has tiers on several nodes.
#[tokio::test]
async fn every_cluster_agrees_with_the_model() {
    for (seed, flavor) in (700..).zip(Flavor::ALL) {
        let cluster = Cluster::start(flavor);
        let clock = ManualClock::new(Timestamp::default());
        let url = format!("redis-cluster://{}", addresses(cluster.nodes()));
        let store = RedisStore::connect(&url).await.unwrap().with_clock(clock.clone());
        let plan = Plan::new(&Algorithm::WINDOWED, seed).one_at_a_time().steps(4_000);
        assert_agrees_with_model(store, &clock, &plan).await;
    }
}

#[tokio::test]
async fn a_redis_with_a_round_trip_of_1_ms_agrees_with_the_model() {
    let server = Server::start(Flavor::Redis7);
    let proxy = DelayProxy::start(server.addr(), Duration::from_millis(1));
    let clock = ManualClock::new(Timestamp::default());
    let store = RedisStore::connect(&proxy.url()).await.unwrap().with_clock(clock.clone());
    assert_agrees_with_model(store, &clock, &Plan::new(&Algorithm::WINDOWED, 800).steps(3_000)).await;
}
