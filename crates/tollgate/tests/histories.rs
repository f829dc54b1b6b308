//! Random histories: model, memory and every Redis agree on every field.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use tollgate::{Algorithm, ManualClock, MemoryStore, RedisStore, Timestamp};
use tollgate_testkit::{
    history::{Plan, agrees_with_model},
    server::{Flavor, Server},
};

#[tokio::test]
async fn memory_agrees_with_the_model() {
    for (seed, algorithm) in (100..).zip(Algorithm::ALL) {
        let clock = ManualClock::new(Timestamp::default());
        let store = MemoryStore::new().with_clock(clock.clone());
        agrees_with_model(&store, &clock, &Plan::new(&[algorithm], seed)).await;
    }
}

#[tokio::test]
async fn memory_agrees_with_the_model_on_mixed_algorithms() {
    let clock = ManualClock::new(Timestamp::default());
    let store = MemoryStore::new().with_clock(clock.clone());
    agrees_with_model(&store, &clock, &Plan::new(&Algorithm::ALL, 200)).await;
}

async fn redis_agrees(flavor: Flavor, algorithms: &[Algorithm], seed: u64) {
    let server = Server::start(flavor);
    let clock = ManualClock::new(Timestamp::default());
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    agrees_with_model(&store, &clock, &Plan::new(algorithms, seed)).await;
}

#[tokio::test]
async fn redis_7_agrees_with_the_model() {
    for (seed, algorithm) in (300..).zip(Algorithm::ALL) {
        redis_agrees(Flavor::Redis7, &[algorithm], seed).await;
    }
}

#[tokio::test]
async fn every_server_agrees_with_the_model_on_mixed_algorithms() {
    for (seed, flavor) in (400..).zip(Flavor::ALL) {
        redis_agrees(flavor, &Algorithm::ALL, seed).await;
    }
}

#[tokio::test]
async fn memory_and_redis_agree_with_the_model_on_long_logs() {
    let plan = Plan::new(&[Algorithm::SlidingLog], 500).dense();
    let clock = ManualClock::new(Timestamp::default());
    agrees_with_model(&MemoryStore::new().with_clock(clock.clone()), &clock, &plan).await;
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    agrees_with_model(&store, &clock, &plan).await;
}
