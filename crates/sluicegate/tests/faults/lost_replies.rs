//! Requests that run and whose replies are lost: no call is charged twice, and nothing is admitted that was not
//! charged.

use std::time::Duration;

use sluicegate::{Limiter, RedisStore, Source, StoreError};
use sluicegate_testkit::{
    cluster::Cluster,
    delay_proxy::DelayProxy,
    proxy::{Proxy, RequestFilter},
    server::{Flavor, Server},
};
use tokio::task::{JoinSet, block_in_place};

use crate::scenario::{MANY, OPTIONS, RuleMix, check, rules, run_exclusively};

/// Each instance makes one call after the other: a thousand in total.
const INSTANCES: u32 = 8;
const CALLS_EACH: u32 = 125;
/// Between two attempts that were not sent.
const PAUSE: Duration = Duration::from_millis(5);

async fn connected(url: &str) -> Limiter {
    let store = RedisStore::connect(url).await.unwrap();
    Limiter::builder().store(store).rules(rules()).options(OPTIONS).build().unwrap()
}

/// Makes a thousand calls while every tenth reply is lost, and compares with what was charged.
async fn lose_every_tenth_reply(url: &str, proxies: &[Proxy]) {
    let labels = RuleMix::OPEN.labels("lost");
    let mut limiters = Vec::new();
    for _ in 0..INSTANCES {
        limiters.push(connected(url).await);
    }
    proxies
        .iter()
        .for_each(|proxy| block_in_place(|| proxy.drop_every_nth_reply(10, RequestFilter::SCRIPTS)));
    let mut instances = JoinSet::new();
    for limiter in limiters {
        let labels = labels.clone();
        instances.spawn(async move {
            let (mut admitted, mut unknown) = (0, 0);
            let mut sent = 0;
            while sent < CALLS_EACH {
                let decision = check(&limiter, &labels, "lost").await;
                match decision.failure {
                    None => admitted += 1,
                    Some(StoreError::Ambiguous(_)) => unknown += 1,
                    // Known not to have run, as there was no connection.
                    Some(_) => {
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                }
                sent += 1;
            }
            (admitted, unknown)
        });
    }
    let reported = instances.join_all().await;
    let (admitted, unknown) = reported.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let lost: u64 = proxies.iter().map(|proxy| proxy.counters().dropped_replies).sum();
    proxies.iter().for_each(|proxy| block_in_place(|| proxy.pass()));

    let peeked = connected(url).await.peek(&labels, 1).await.unwrap();
    assert_eq!(peeked.source, Source::Store);
    let used = MANY - peeked.remaining().unwrap();
    let context = format!("{used} used, {admitted} admitted, {unknown} unknown, {lost} replies lost");
    assert!(lost >= 50 && admitted >= 700, "{context}");
    assert!(used >= admitted, "{context}");
    assert!(used <= u64::from(INSTANCES * CALLS_EACH) && used <= admitted + unknown, "{context}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_calls_with_every_tenth_reply_lost_are_charged_once_each() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    lose_every_tenth_reply(&proxy.url(), std::slice::from_ref(&proxy)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_calls_with_every_tenth_reply_lost_are_charged_once_each_over_a_network() {
    let _exclusive = run_exclusively().await;
    for round_trip in [1, 5].map(Duration::from_millis) {
        let server = Server::start(Flavor::Redis7);
        let delay_proxy = DelayProxy::start(server.addr(), round_trip);
        let proxy = Proxy::start(delay_proxy.addr());
        lose_every_tenth_reply(&proxy.url(), std::slice::from_ref(&proxy)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_calls_with_every_tenth_reply_lost_are_charged_once_each_on_a_cluster() {
    let _exclusive = run_exclusively().await;
    let cluster = block_in_place(|| Cluster::start(Flavor::Redis7));
    let proxies = block_in_place(|| cluster.start_proxies());
    let addresses: Vec<String> = proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
    lose_every_tenth_reply(&format!("redis-cluster://{}", addresses.join(",")), &proxies).await;
}
