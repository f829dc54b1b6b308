//! The connection to Redis: how often it is opened, and when it is replaced.

use std::time::Duration;

use sluicegate::{
    Cost, Limit, RedisStore, StoreError,
    limiter::Operation,
    store::{Check, Key, RemoteStore, Terms, Tier},
};
use sluicegate_testkit::{
    proxy::{Mode, Proxy, RequestFilter},
    server::{Flavor, Server},
    wait,
};
use tokio::time::{Instant, sleep, timeout};

fn hit() -> [Check; 1] {
    let limit = Limit::sliding_log(100_000, Duration::from_secs(60)).unwrap();
    let tier = Tier { key: Key::without_rule("k").unwrap(), terms: Terms::new(limit, Cost::ONE) };
    [Check::new(Operation::Check, vec![tier]).unwrap()]
}

/// Calls the store with a timeout, as the limiter does.
async fn ask(store: &RedisStore) -> Option<Result<(), StoreError>> {
    let answer = timeout(Duration::from_millis(50), store.decide(&hit(), None)).await.ok()?;
    Some(answer.into_iter().try_for_each(|answer| answer.map(|_| ())))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_resets_every_connection_gets_at_most_two_per_second() {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    for mode in [Mode::Cut, Mode::Refuse] {
        proxy.set(mode);
        let start = Instant::now();
        let (mut not_run, mut before) = (0, None);
        while start.elapsed() < Duration::from_secs(5) {
            if let Some(Err(StoreError::NotRun(_))) = ask(&store).await {
                not_run += 1;
            }
            sleep(Duration::from_millis(1)).await;
            // after the quick attempts
            if start.elapsed() > Duration::from_secs(1) {
                before.get_or_insert(proxy.counters().accepted);
            }
        }
        assert!(not_run > 10, "calls that were never sent are reported as not run");
        let attempts = proxy.counters().accepted - before.unwrap();
        assert!(attempts <= 8, "{attempts} connections in 4 s");
        if mode == Mode::Cut {
            assert!(attempts >= 2, "only {attempts} attempts");
        }
    }
    proxy.pass();
    let back = Instant::now();
    while ask(&store).await != Some(Ok(())) {
        sleep(Duration::from_millis(10)).await;
    }
    assert!(back.elapsed() < Duration::from_secs(3), "{:?}", back.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_connection_is_replaced_even_if_every_caller_gives_up_earlier() {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    assert_eq!(ask(&store).await, Some(Ok(())));
    proxy.drop_next_reply_and_stall(RequestFilter::SCRIPTS);
    let start = Instant::now();
    while ask(&store).await != Some(Ok(())) {
        assert!(start.elapsed() < wait::PATIENCE, "the connection was not replaced");
        sleep(Duration::from_millis(10)).await;
    }
    assert!(start.elapsed() > Duration::from_millis(500), "the connection was replaced too early");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_attempts_to_a_stopped_server_are_bounded_and_it_recovers() {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    assert_eq!(ask(&store).await, Some(Ok(())));
    let before = proxy.counters().accepted;
    server.suspend();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        assert_ne!(ask(&store).await, Some(Ok(())));
        sleep(Duration::from_millis(5)).await;
    }
    let attempts = proxy.counters().accepted - before;
    assert!((1..=10).contains(&attempts), "{attempts} connections in 5 s");
    server.resume();
    let back = Instant::now();
    while ask(&store).await != Some(Ok(())) {
        sleep(Duration::from_millis(10)).await;
    }
    assert!(back.elapsed() < Duration::from_secs(3), "{:?}", back.elapsed());
}
