//! The conformance suite, on every store.

use std::time::Duration;

use sluicegate::{ManualClock, MemoryStore, RedisStore};
use sluicegate_testkit::{
    cluster::Cluster,
    conformance,
    delay_proxy::DelayProxy,
    hold_conformance,
    sentinel::{NAME, Sentinels},
    server::{Flavor, Server},
    store_fixture::{START, StoreFixture},
};

async fn on_redis(flavor: Flavor) -> StoreFixture {
    let server = Server::start(flavor);
    let clock = ManualClock::new(START);
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    StoreFixture { store: store.into(), clock, server: Some(server) }
}

mod memory {
    use super::*;

    async fn fixture() -> StoreFixture {
        let clock = ManualClock::new(START);
        StoreFixture { store: MemoryStore::new().with_clock(clock.clone()).into(), clock, server: None }
    }

    sluicegate_testkit::conformance!(fixture());
    sluicegate_testkit::hold_conformance!(fixture());
}

mod redis_7 {
    use super::*;

    sluicegate_testkit::conformance!(on_redis(Flavor::Redis7));
    sluicegate_testkit::hold_conformance!(on_redis(Flavor::Redis7));
}

mod redis_6 {
    use super::*;

    sluicegate_testkit::conformance!(on_redis(Flavor::Redis6));
    sluicegate_testkit::hold_conformance!(on_redis(Flavor::Redis6));
}

mod valkey_9 {
    use super::*;

    sluicegate_testkit::conformance!(on_redis(Flavor::Valkey9));
    sluicegate_testkit::hold_conformance!(on_redis(Flavor::Valkey9));
}

/// Returns a factory of fixtures on one store, each with its own prefix.
fn fixtures_on(store: RedisStore) -> impl AsyncFnMut() -> StoreFixture {
    let mut number = 0;
    async move || {
        number += 1;
        let clock = ManualClock::new(START);
        let store = store.clone().with_prefix(&format!("p{number}-")).unwrap().with_clock(clock.clone());
        StoreFixture { store: store.into(), clock, server: None }
    }
}

/// Runs all tests on one store, each with its own prefix, as the servers take seconds to start.
async fn all_on(store: RedisStore) {
    let mut fixtures = fixtures_on(store);
    conformance::all(&mut fixtures).await;
    hold_conformance::all(fixtures).await;
}

fn addresses(servers: &[Server]) -> String {
    let addresses: Vec<String> = servers.iter().map(|server| server.addr().to_string()).collect();
    addresses.join(",")
}

#[tokio::test]
async fn a_primary_behind_sentinels_conforms() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let url = format!("redis-sentinel://{}/{NAME}", addresses(sentinels.sentinels()));
    all_on(RedisStore::connect(&url).await.unwrap()).await;
}

#[tokio::test]
async fn a_cluster_conforms() {
    let cluster = Cluster::start(Flavor::Redis7);
    let url = format!("redis-cluster://{}", addresses(cluster.nodes()));
    all_on(RedisStore::connect(&url).await.unwrap()).await;
}

#[tokio::test]
async fn a_redis_with_a_round_trip_of_1_ms_conforms() {
    let server = Server::start(Flavor::Redis7);
    let proxy = DelayProxy::start(server.addr(), Duration::from_millis(1));
    let mut fixtures = fixtures_on(RedisStore::connect(&proxy.url()).await.unwrap());
    conformance::all_but_slow(&mut fixtures).await;
    hold_conformance::all(fixtures).await;
}
