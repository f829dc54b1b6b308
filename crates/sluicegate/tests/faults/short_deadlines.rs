//! Callers with their own deadlines, such as Envoy with a timeout of 20 ms: they neither hide a silent server, nor
//! make a responsive server appear silent.

use std::time::Duration;

use sluicegate::{Limiter, RedisStore};
use sluicegate_testkit::{
    delay_proxy::DelayProxy,
    server::{Flavor, Server},
};
use tokio::time::Instant;

use crate::scenario::{RuleMix, rules, run_exclusively};

/// The remaining time of Envoy's default timeout.
const SHORT_DEADLINE: Duration = Duration::from_millis(15);

#[tokio::test(flavor = "multi_thread")]
async fn the_breaker_opens_for_a_silent_server_even_if_all_deadlines_are_short() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let limiter = Limiter::new(RedisStore::connect(&server.url()).await.unwrap(), rules()).unwrap();
    let (short_deadline, labels) =
        (limiter.with_deadline(SHORT_DEADLINE), RuleMix::OPEN.labels("short_deadline"));
    assert!(!short_deadline.check(&labels, 1).await.unwrap().is_degraded());
    server.suspend();
    let began = Instant::now();
    while limiter.stats().open_breakers == 0 {
        assert!(short_deadline.check(&labels, 1).await.unwrap().is_degraded());
        assert!(began.elapsed() < Duration::from_millis(1_000 + 250), "the server is silent");
    }
    server.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_breaker_stays_closed_when_only_short_deadlines_expire() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let far = DelayProxy::start(server.addr(), Duration::from_millis(25));
    let options = sluicegate::Options::default().deadline(Duration::from_secs(5));
    let store = RedisStore::connect(&far.url()).await.unwrap();
    let limiter = Limiter::builder().store(store).rules(rules()).options(options).build().unwrap();
    let (short_deadline, labels) = (limiter.with_deadline(SHORT_DEADLINE), RuleMix::OPEN.labels("far"));
    for _ in 0..50 {
        assert!(
            short_deadline.check(&labels, 1).await.unwrap().is_degraded(),
            "15 ms are less than the round trip of 25 ms"
        );
    }
    assert_eq!(limiter.stats().open_breakers, 0);
    assert!(
        !limiter.check(&labels, 1).await.unwrap().is_degraded(),
        "the store decides for callers with the long deadline"
    );
}
