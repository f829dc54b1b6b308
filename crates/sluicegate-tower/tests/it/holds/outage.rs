//! Holds on a store that is slow, full or does not answer.

use sluicegate::{MemoryStore, OnStoreFailure, Options, RedisStore, Source, store::HoldId};
use sluicegate_testkit::{
    gated_store::GatedStore,
    server::{Flavor, Server as Redis},
};
use tower::{Layer, ServiceExt, service_fn};

use super::*;

/// Waits until the store decides that this many slots remain.
async fn until_store_reports(limiter: &Limiter, expected: u64) {
    wait::until_async(format!("{expected} slots are free"), wait::PATIENCE, || async {
        let peeked = limiter.peek(&Labels::default(), 1).await.unwrap();
        peeked.source == Source::Store && peeked.remaining() == Some(expected)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hold_that_ends_during_an_outage_is_settled_afterwards() {
    let redis = Redis::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let rules = [in_flight(1), tokens()].map(|rule| rule.on_store_failure(OnStoreFailure::Closed));
    let options = Options::new().deadline(Duration::from_millis(500));
    let limiter = Limiter::builder().store(store).rules(rules).options(options).build().unwrap();
    let mut server = Server::start(with_estimate(&limiter)).await;
    let (mut response, stream) = server.open().await;
    stream.actual.set("tokens", 120);
    redis.suspend();
    drop(stream);
    assert_eq!(next_chunk(&mut response).await, None, "the end of the response does not wait for the store");
    wait::until_async("the settlement is queued", wait::PATIENCE, || async {
        limiter.stats().holds.waiting == 1
    })
    .await;
    let denied = fetch(server.address, "/").await;
    assert_eq!((denied.status().as_u16(), field(&denied, "retry-after")), (503, "1"));
    redis.resume();
    until_store_reports(&limiter, 1).await;
    assert_eq!(remaining(&limiter, "tokens").await, 880);
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_that_fail_open_allow_requests_during_an_outage_and_leave_no_hold() {
    let redis = Redis::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let limiter = Limiter::new(store, [in_flight(1)]).unwrap();
    let mut server = Server::start(RateLimitLayer::new(limiter.clone())).await;
    redis.suspend();
    let opened = [server.open().await, server.open().await];
    drop(opened);
    redis.resume();
    until_store_reports(&limiter, 1).await;
}

#[tokio::test]
async fn a_client_that_disconnects_while_the_store_decides_leaves_no_hold() {
    let store = GatedStore::closed();
    let options = Options::new().deadline(Duration::from_secs(60));
    let limiter =
        Limiter::builder().store(store.clone()).rules([in_flight(1)]).options(options).build().unwrap();
    let inner = service_fn(async |_: Request<()>| Ok::<_, io::Error>(Response::new(Body::empty())));
    let service = RateLimitLayer::new(limiter.clone()).layer(inner);
    let request = tokio::spawn(service.oneshot(Request::new(())));
    store.received().await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());
    store.permit(1_000);
    wait::until_async("the hold is released", wait::PATIENCE, || async {
        limiter.stats().holds.released == 1
    })
    .await;
    until_store_reports(&limiter, 1).await;
    assert_eq!(limiter.stats().holds.held, 1);
}

#[tokio::test]
async fn a_hold_with_an_id_that_is_dropped_while_the_store_decides_can_be_repeated() {
    let store = GatedStore::closed();
    let options = Options::new().deadline(Duration::from_secs(60));
    let limiter =
        Limiter::builder().store(store.clone()).rules([in_flight(1)]).options(options).build().unwrap();
    let hold = {
        let limiter = limiter.clone();
        async move || {
            let id = HoldId::new("request 1").unwrap();
            limiter.hold(&Labels::default(), 1).id(id).decide().await.unwrap()
        }
    };
    let dropped = tokio::spawn({
        let hold = hold.clone();
        async move { hold().await }
    });
    store.received().await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    store.permit(1_000);
    assert!(hold().await.is_repeated);
    assert_eq!(remaining(&limiter, "requests").await, 0);
}

#[tokio::test]
async fn a_response_that_is_dropped_outside_of_the_runtime_frees_its_slot() {
    let limiter = Limiter::new(GatedStore::open(), [in_flight(1)]).unwrap();
    let inner = service_fn(async |_: Request<()>| Ok::<_, io::Error>(Response::new(Body::empty())));
    let service = RateLimitLayer::new(limiter.clone()).layer(inner);
    let response = service.oneshot(Request::new(())).await.unwrap();
    assert_eq!(remaining(&limiter, "requests").await, 0);
    std::thread::spawn(move || drop(response)).join().unwrap();
    until_remaining(&limiter, 1).await;
}

#[tokio::test]
async fn too_many_holds_make_the_service_unavailable() {
    let store = MemoryStore::new().with_max_memory(1 << 20).unwrap();
    let limiter = Limiter::new(store, [in_flight(1_000_000)]).unwrap();
    let server = Server::start(RateLimitLayer::new(limiter.clone())).await;
    let mut holds = Vec::new();
    while let Ok(hold) = limiter.hold(&Labels::default(), 1).await {
        holds.push(hold);
    }
    let response = fetch(server.address, "/").await;
    assert_eq!(response.status(), 503);
    let body = response.collect().await.unwrap().to_bytes();
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(body["detail"], "too many requests are in flight");
}
