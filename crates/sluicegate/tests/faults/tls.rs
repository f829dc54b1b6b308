//! Sentinel and Cluster over TLS, including connections to sentinels and to discovered nodes.

use std::{fs, time::Duration};

use sluicegate::{Limit, Limiter, RedisStore, Source, redis::RedisSettings};
use sluicegate_testkit::{
    cluster,
    sentinel::{self, NAME},
    server::{Flavor, Server},
    wait::{self, PATIENCE},
};
use tokio::{task::block_in_place, time::Instant};

use crate::scenario::{HOUR, MANY, OPTIONS, run_exclusively};

fn addresses(servers: &[Server]) -> String {
    let addresses: Vec<String> = servers.iter().map(|node| node.addr().to_string()).collect();
    addresses.join(",")
}

fn trusted_settings(server: &Server) -> RedisSettings {
    RedisSettings::default().authority(fs::read(&server.tls().authority).unwrap())
}

/// Connects, or returns the error. On a busy machine a handshake may take longer than the timeout of the store.
async fn connect(url: &str, settings: &RedisSettings) -> Result<RedisStore, String> {
    let begun = Instant::now();
    loop {
        match RedisStore::connect_with(url, settings).await {
            Err(error) if error.to_string().contains("does not answer") && begun.elapsed() < PATIENCE => {}
            outcome => return outcome.map_err(|error| error.to_string()),
        }
    }
}

async fn limiter(url: &str, settings: &RedisSettings) -> Limiter {
    let store = connect(url, settings).await.unwrap();
    let patient = OPTIONS.deadline(Duration::from_secs(5));
    Limiter::builder().store(store).rules([]).options(patient).build().unwrap()
}

async fn assert_decided(limiter: &Limiter, key: &str, left: u64) {
    let limit = Limit::sliding_log(MANY, HOUR).unwrap();
    let decision = limiter.check_key(key, &limit, 1.into()).await.unwrap();
    assert_eq!((decision.source, decision.remaining()), (Source::Store, Some(left)), "{decision:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sentinels_over_tls_are_queried_and_their_new_primary_is_followed() {
    let _exclusive = run_exclusively().await;
    let sentinels = block_in_place(|| sentinel::Setup::new(Flavor::Redis7).tls().start());
    let url = format!("rediss-sentinel://{}/{NAME}", addresses(sentinels.sentinels()));
    let limiter = limiter(&url, &trusted_settings(&sentinels.nodes()[0])).await;
    assert_decided(&limiter, "k", MANY - 1).await;
    let new = block_in_place(|| sentinels.failover());
    let limit = Limit::sliding_log(MANY, HOUR).unwrap();
    wait::until_async("the new primary decides", Duration::from_secs(5), async || {
        limiter.check_key("k", &limit, 1.into()).await.unwrap();
        crate::scenario::scripts_run(&sentinels.nodes()[new]) > 0
    })
    .await;

    let untrusted = connect(&url, &RedisSettings::default()).await.unwrap_err();
    assert!(untrusted.contains("certificate"), "{untrusted}");
    let plain = url.replace("rediss", "redis");
    assert!(RedisStore::connect(&plain).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_over_tls_is_discovered_from_one_node() {
    let _exclusive = run_exclusively().await;
    let cluster = block_in_place(|| cluster::Setup::new(Flavor::Redis7).tls().start());
    let url = format!("rediss-cluster://{}", cluster.nodes()[0].addr());
    let limiter = limiter(&url, &trusted_settings(&cluster.nodes()[0])).await;
    let keys = [0, 1, 2].map(|node| block_in_place(|| cluster.limiter_key_on(node)));
    for (node, key) in keys.into_iter().enumerate() {
        assert_decided(&limiter, &key, MANY - 1).await;
        let slot =
            cluster.slot_of(format!("{{{:08x}}}", sluicegate::store::Key::without_rule(&key).unwrap().tag()));
        block_in_place(|| cluster.begin_migration(slot, (node + 1) % cluster::PRIMARIES).finish());
        assert_decided(&limiter, &key, MANY - 2).await;
    }
    let untrusted = connect(&url, &RedisSettings::default()).await.unwrap_err();
    assert!(untrusted.contains("certificate"), "{untrusted}");
}
