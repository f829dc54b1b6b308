//! Callers with deadlines of their own, such as those behind an Envoy that waits 20 ms: they neither hide that a server is
//! silent, nor make a server that answers look silent.

use std::time::Duration;

use tokio::time::Instant;
use tollgate::{Limiter, RedisStore};
use tollgate_testkit::{
    delay_proxy::DelayProxy,
    server::{Flavor, Server},
};

use crate::scenario::{RuleMix, rules, run_exclusively};

/// What Envoy leaves of its default timeout.
const SHORT_DEADLINE: Duration = Duration::from_millis(15);

#[tokio::test(flavor = "multi_thread")]
async fn the_breaker_opens_for_a_silent_server_even_if_all_deadlines_are_short() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let limiter = Limiter::new(RedisStore::connect(&server.url()).await.unwrap(), rules()).unwrap();
    let (hurried, labels) = (limiter.with_deadline(SHORT_DEADLINE), RuleMix::OPEN.labels("hurried"));
    assert!(!hurried.check(&labels, 1).await.unwrap().is_degraded());
    server.suspend();
    let began = Instant::now();
    while limiter.stats().left_alone == 0 {
        assert!(hurried.check(&labels, 1).await.unwrap().is_degraded());
        assert!(began.elapsed() < Duration::from_millis(1_000 + 250), "the server is silent");
    }
    server.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_breaker_stays_closed_when_only_short_deadlines_expire() {
    let _exclusive = run_exclusively().await;
    let server = Server::start(Flavor::Redis7);
    let far = DelayProxy::start(server.addr(), Duration::from_millis(25));
    let options = tollgate::Options { deadline: Duration::from_secs(5), ..tollgate::Options::default() };
    let store = RedisStore::connect(&far.url()).await.unwrap();
    let limiter = Limiter::with_options(store, rules(), options).unwrap();
    let (hurried, labels) = (limiter.with_deadline(SHORT_DEADLINE), RuleMix::OPEN.labels("far"));
    for _ in 0..50 {
        assert!(hurried.check(&labels, 1).await.unwrap().is_degraded(), "15 ms do not suffice for 25");
    }
    assert_eq!(limiter.stats().left_alone, 0);
    assert!(
        !limiter.check(&labels, 1).await.unwrap().is_degraded(),
        "patient callers are decided by the store"
    );
}
