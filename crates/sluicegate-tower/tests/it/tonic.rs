//! The layer in a real tonic server with a real client.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{convert::Infallible, net::SocketAddr, time::Duration};

use http::HeaderName;
use sluicegate::{Labels, Limit, Limiter, MemoryStore, OnStoreFailure, Options, RedisStore, Rule};
use sluicegate_testkit::{
    proxy::Proxy,
    server::{Flavor, Server as Redis},
    wait,
};
use sluicegate_tower::{RateLimitLayer, client::ClientAddress};
use tokio::net::TcpListener;
use tonic::{
    Code, Request,
    body::Body,
    transport::{
        Channel, Server,
        server::{TcpConnectInfo, TcpIncoming},
    },
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tower::{Layer, ServiceExt, service_fn};

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, Duration::from_secs(60)).unwrap()
}

/// Serves gRPC health checks with the label `ip`.
async fn serve(layer: RateLimitLayer) -> HealthClient<Channel> {
    let layer = layer.client_ip_from(ClientAddress::default(), |request| {
        request.extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip())
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    HealthClient::new(Channel::from_shared(format!("http://{address}")).unwrap().connect_lazy())
}

#[tokio::test]
async fn exactly_the_limit_is_allowed_and_denials_have_a_status_with_the_wait() {
    let limiter = Limiter::new(MemoryStore::new(), [Rule::new("50% per ip", log(4)).per(["ip"])]).unwrap();
    let mut client = serve(RateLimitLayer::new(limiter)).await;
    for n in 0..10 {
        match client.check(HealthCheckRequest::default()).await {
            Ok(response) => {
                assert!(n < 4, "{n} passed");
                let fields = response.metadata();
                assert_eq!(fields.get("ratelimit-policy").unwrap(), r#""50% per ip";q=4;w=60"#);
                assert_eq!(
                    fields.get("ratelimit").unwrap(),
                    format!(r#""50% per ip";r={};t=60"#, 3 - n).as_str()
                );
            }
            Err(status) => {
                assert!(n >= 4, "{n} denied: {status}");
                assert_eq!(status.code(), Code::ResourceExhausted);
                let wait = status.metadata().get("retry-after").unwrap().to_str().unwrap();
                assert!((1..=60).contains(&wait.parse::<u64>().unwrap()), "{wait}");
                assert_eq!(status.message(), format!("limit exceeded: 50% per ip; retry in {wait} seconds"));
            }
        }
    }
}

#[tokio::test]
async fn a_call_is_in_flight_until_its_stream_ends_or_its_client_disconnects() {
    let limiter = Limiter::in_memory([Rule::new("in-flight", Limit::concurrency(2).unwrap())]).unwrap();
    let mut client = serve(RateLimitLayer::new(limiter.clone())).await;
    client.check(HealthCheckRequest::default()).await.unwrap();

    let mut first = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    first.message().await.unwrap().unwrap();
    let second = client.watch(HealthCheckRequest::default()).await.unwrap();
    assert_eq!(second.metadata().get("ratelimit").unwrap(), r#""in-flight";r=0"#);
    let denied = client.watch(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    let wait: u64 = denied.metadata().get("retry-after").unwrap().to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&wait), "{wait}");

    drop((first, second));
    wait::until_async("both slots are free", wait::PATIENCE, || async {
        limiter.peek(&Labels::default(), 1).await.unwrap().remaining() == Some(2)
    })
    .await;
    let holds = limiter.stats().holds;
    assert_eq!((holds.held, holds.settled), (3, 3));
}

#[tokio::test]
async fn a_request_that_cannot_be_checked_is_an_invalid_argument() {
    let limiter = Limiter::new(MemoryStore::new(), [Rule::new("r", log(4)).per(["key"])]).unwrap();
    let header = HeaderName::from_static("x-api-key");
    let mut client = serve(RateLimitLayer::new(limiter).header("key", header)).await;
    let mut request = Request::new(HealthCheckRequest::default());
    request.metadata_mut().append("x-api-key", "a".parse().unwrap());
    request.metadata_mut().append("x-api-key", "b".parse().unwrap());
    let status = client.check(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "header x-api-key is repeated: send it once");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_store_a_closed_rule_makes_the_service_unavailable() {
    let redis = Redis::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let rules = [Rule::new("closed", log(1)).on_store_failure(OnStoreFailure::Closed)];
    let options = Options::default().deadline(Duration::from_millis(200));
    let mut client = serve(RateLimitLayer::new(
        Limiter::builder().store(store).rules(rules).options(options).build().unwrap(),
    ))
    .await;
    client.check(HealthCheckRequest::default()).await.unwrap();
    redis.suspend();
    let status = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert_eq!(status.metadata().get("retry-after").unwrap(), "1");
    redis.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_grpc_timeout_does_not_bypass_the_store() {
    let redis = Redis::start(Flavor::Redis7);
    let slow = Proxy::start(redis.addr());
    let options = Options::default().deadline(Duration::from_secs(60));
    for content_type in ["application/grpc+proto", "application/json"] {
        let store = RedisStore::connect(&slow.url()).await.unwrap();
        slow.delay(Duration::from_millis(5));
        let rules = [Rule::new(content_type, log(2)).on_store_failure(OnStoreFailure::Open)];
        let limiter = Limiter::builder().store(store).rules(rules).options(options).build().unwrap();
        let within =
            service_fn(async |_: http::Request<()>| Ok::<_, Infallible>(http::Response::new(Body::empty())));
        let service = RateLimitLayer::new(limiter).layer(within);
        for left in [Some("1"), Some("0"), None] {
            let request = http::Request::post("/").header("content-type", content_type);
            let request = request.header("grpc-timeout", "1n").body(()).unwrap();
            let response = service.clone().oneshot(request).await.unwrap();
            let field = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap());
            let remaining = left.map(|left| format!(r#""{content_type}";r={left};t=60"#));
            match (remaining, content_type) {
                (Some(remaining), _) => assert_eq!(field("ratelimit"), Some(&*remaining)),
                (None, "application/json") => assert_eq!(response.status(), 429),
                (None, grpc) => {
                    assert_eq!((response.status().as_u16(), field("grpc-status")), (200, Some("8")));
                    assert_eq!(field("content-type"), Some(grpc));
                }
            }
        }
        slow.pass();
    }
}
