//! The end of a response settles the hold, with the actual cost.

use std::convert::Infallible;

use axum::{Extension, response::IntoResponse};
use http_body_util::StreamBody;
use hyper::body::Frame;
use tower::{Layer, ServiceExt, service_fn};

use super::*;

#[tokio::test]
async fn a_request_is_in_flight_until_its_body_ends() {
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let mut server = Server::start(RateLimitLayer::new(limiter.clone())).await;
    let (mut response, stream) = server.open().await;
    assert_eq!(field(&response, "ratelimit-policy"), r#""in-flight";q=1"#);
    assert_eq!(field(&response, "ratelimit"), r#""in-flight";r=0"#);
    for chunk in ["a", "b"] {
        stream.send(chunk);
        assert_eq!(next_chunk(&mut response).await.unwrap(), chunk);
        assert_eq!(remaining(&limiter, "requests").await, 0);

        let denied = fetch(server.address, "/").await;
        assert_eq!(denied.status(), 429);
        let wait: u64 = field(&denied, "retry-after").parse().unwrap();
        assert!((1..=60).contains(&wait), "{wait}");
        assert_eq!(field(&denied, "ratelimit"), format!(r#""in-flight";r=0;t={wait}"#));
    }
    drop(stream);
    assert_eq!(next_chunk(&mut response).await, None);
    assert_eq!(remaining(&limiter, "requests").await, 1, "the slot is free when the client has the response");
    server.open().await;
}

#[tokio::test]
async fn a_client_that_disconnects_frees_its_slot() {
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let mut server = Server::start(RateLimitLayer::new(limiter.clone())).await;
    let (mut response, stream) = server.open().await;
    stream.send("a");
    next_chunk(&mut response).await.unwrap();
    assert_eq!(remaining(&limiter, "requests").await, 0);
    drop(response);
    until_remaining(&limiter, 1).await;
}

#[tokio::test]
async fn a_client_that_disconnects_before_the_response_frees_its_slot() {
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let (started, mut is_started) = mpsc::unbounded_channel();
    let handler = move || async move {
        started.send(()).unwrap();
        std::future::pending::<()>().await;
    };
    let app = Router::new().route("/", get(handler)).layer(RateLimitLayer::new(limiter.clone()));
    let address = serve(app).await;
    let request = tokio::spawn(async move { fetch(address, "/").await });
    is_started.recv().await.unwrap();
    assert_eq!(remaining(&limiter, "requests").await, 0);
    request.abort();
    until_remaining(&limiter, 1).await;
}

#[tokio::test]
async fn a_handler_that_panics_and_a_body_that_fails_free_their_slots() {
    let limiter = Limiter::in_memory([in_flight(1), tokens()]).unwrap();
    let mut server = Server::start(with_estimate(&limiter)).await;
    let (mut response, stream) = server.open().await;
    stream.fail();
    assert!(response.frame().await.unwrap().is_err());
    until_remaining(&limiter, 1).await;
    assert_eq!(
        remaining(&limiter, "tokens").await,
        500,
        "without an actual cost, the estimate stays charged"
    );

    let panics = async || -> () { panic!("the handler of this test panics") };
    let app = Router::new().route("/", get(panics)).layer(RateLimitLayer::new(limiter.clone()));
    assert!(try_fetch(serve(app).await, "/").await.is_err());
    until_remaining(&limiter, 1).await;
}

#[tokio::test]
async fn a_service_that_fails_frees_its_slot() {
    let limiter = Limiter::in_memory([in_flight(1)]).unwrap();
    let fails = service_fn(async |_: Request<()>| Err::<Response<Body>, _>("away"));
    let service = RateLimitLayer::new(limiter.clone()).layer(fails);
    for _ in 0..2 {
        assert_eq!(service.clone().oneshot(Request::new(())).await.unwrap_err(), "away");
        assert_eq!(remaining(&limiter, "requests").await, 1);
    }
}

#[tokio::test]
async fn the_actual_cost_replaces_the_estimate_when_the_body_has_ended() {
    let limiter = Limiter::in_memory([in_flight(1), tokens()]).unwrap();
    let mut server = Server::start(with_estimate(&limiter)).await;
    for (used, left) in [(120, 880), (0, 880), (900, 0)] {
        let (mut response, stream) = server.open().await;
        stream.send("the body has begun");
        next_chunk(&mut response).await.unwrap();
        stream.actual.set("tokens", 7);
        stream.actual.set("tokens", used);
        stream.actual.set("unknown", 1);
        assert_eq!(remaining(&limiter, "tokens").await, if used == 120 { 500 } else { 380 });
        drop(stream);
        assert_eq!(next_chunk(&mut response).await, None);
        assert_eq!(remaining(&limiter, "tokens").await, left);
        assert_eq!(remaining(&limiter, "requests").await, 1);
    }
    let denied = fetch(server.address, "/").await;
    assert_eq!(denied.status(), 429, "the last request used more than was left");
    assert_eq!(limiter.stats().holds.settled, 3);
}

#[tokio::test]
async fn costs_that_were_counted_until_a_disconnect_are_charged() {
    let limiter = Limiter::in_memory([in_flight(1), tokens()]).unwrap();
    let mut server = Server::start(with_estimate(&limiter)).await;
    let (mut response, stream) = server.open().await;
    for chunk in ["a", "b", "c"] {
        stream.actual.add("tokens", 1);
        stream.send(chunk);
        next_chunk(&mut response).await.unwrap();
    }
    drop(response);
    until_remaining(&limiter, 1).await;
    assert_eq!(remaining(&limiter, "tokens").await, 997);
    stream.actual.add("tokens", 100);
    assert_eq!(remaining(&limiter, "tokens").await, 997, "the hold has ended");
}

#[tokio::test]
async fn a_cancelled_request_costs_nothing() {
    let requests = Rule::new("requests", Limit::fixed_window(10, HOUR).unwrap());
    let limiter = Limiter::in_memory([requests, tokens()]).unwrap();
    let mut server = Server::start(with_estimate(&limiter)).await;
    let (response, stream) = server.open().await;
    assert_eq!(remaining(&limiter, "requests").await, 9);
    stream.actual.set("tokens", 120);
    stream.actual.cancel();
    drop((stream, response));
    until_remaining(&limiter, 10).await;
    assert_eq!(remaining(&limiter, "tokens").await, 1_000);
    assert_eq!(limiter.stats().holds.released, 1);
}

#[tokio::test]
async fn a_cost_that_is_too_large_keeps_the_estimate_and_frees_the_slot() {
    let expensive = tokens().cost(Cost::from(2));
    let limiter = Limiter::in_memory([in_flight(1), expensive]).unwrap();
    let mut server = Server::start(with_estimate(&limiter).estimate(|_| 1)).await;
    for cost in [u64::MAX, Cost::MAX.units()] {
        let (response, stream) = server.open().await;
        stream.actual.add("tokens", cost);
        stream.actual.add("tokens", cost);
        drop((stream, response));
        until_remaining(&limiter, 1).await;
        assert_eq!(remaining(&limiter, "tokens").await, 1_000);
    }
    let (response, stream) = server.open().await;
    (0..100).for_each(|unit| stream.actual.set(&format!("unit-{unit}"), 1));
    drop((stream, response));
    until_remaining(&limiter, 1).await;
}

/// A stream that sets the actual cost when it is dropped.
struct SetWhenDropped(ActualCosts);

impl Drop for SetWhenDropped {
    fn drop(&mut self) {
        self.0.set("tokens", 3);
    }
}

#[tokio::test]
async fn the_actual_cost_may_come_with_the_trailers_or_from_the_end_of_the_body() {
    for has_trailers in [true, false] {
        let limiter = Limiter::in_memory([tokens()]).unwrap();
        let inner = service_fn(move |request: Request<()>| async move {
            let actual: ActualCosts = request.extensions().get().cloned().unwrap();
            let frames = stream::unfold((0, SetWhenDropped(actual)), move |(position, held)| async move {
                let frame = match position {
                    0 => Frame::data(Bytes::from_static(b"a")),
                    1 if has_trailers => {
                        held.0.set("tokens", 2);
                        Frame::trailers(http::HeaderMap::new())
                    }
                    _ => return None,
                };
                Some((Ok::<_, Infallible>(frame), (position + 1, held)))
            });
            Ok::<_, Infallible>(Response::new(StreamBody::new(Box::pin(frames))))
        });
        let service = with_estimate(&limiter).layer(inner);
        let response = service.oneshot(Request::new(())).await.unwrap();
        let mut body = response.into_body();
        assert!(body.frame().await.unwrap().unwrap().is_data());
        assert_eq!(remaining(&limiter, "tokens").await, 500);
        if has_trailers {
            assert!(body.frame().await.unwrap().unwrap().is_trailers());
            drop(body);
        } else {
            assert!(body.frame().await.is_none());
            assert!(body.frame().await.is_none(), "a body that has ended can be polled again");
        }
        assert_eq!(remaining(&limiter, "tokens").await, 997, "the end of the body set the last value");
    }
}

#[tokio::test]
async fn costs_in_the_extensions_of_a_response_replace_those_of_the_request() {
    let limiter = Limiter::in_memory([tokens()]).unwrap();
    let handler = |ignored: ActualCosts| async move {
        ignored.set("tokens", 1);
        let actual = ActualCosts::new();
        actual.set("tokens", 120);
        (Extension(actual), "an answer").into_response()
    };
    let app = Router::new().route("/", get(handler)).layer(with_estimate(&limiter));
    let response = fetch(serve(app).await, "/").await;
    assert_eq!(field(&response, "content-length"), "9", "the length of the body is known");
    response.collect().await.unwrap();
    assert_eq!(remaining(&limiter, "tokens").await, 880);
}

#[tokio::test]
async fn two_layers_settle_their_holds_with_the_same_cost() {
    let (outer, inner) = (Limiter::in_memory([tokens()]).unwrap(), Limiter::in_memory([tokens()]).unwrap());
    let handler = |actual: ActualCosts| async move { actual.set("tokens", 120) };
    let app = Router::new().route("/", get(handler));
    let app = app.layer(with_estimate(&inner)).layer(with_estimate(&outer));
    fetch(serve(app).await, "/").await.collect().await.unwrap();
    for limiter in [outer, inner] {
        assert_eq!(remaining(&limiter, "tokens").await, 880);
    }
}

#[tokio::test]
async fn only_requests_that_need_it_are_held() {
    let streams = in_flight(1).when("path", "/stream");
    let per_path = Rule::new("requests", Limit::fixed_window(10, HOUR).unwrap()).when("path", "/*");
    let limiter = Limiter::in_memory([streams, per_path]).unwrap();
    let handler = |actual: ActualCosts| async move { actual.set("requests", 0) };
    let app = Router::new().fallback(get(handler));
    let layer = RateLimitLayer::new(limiter.clone()).path().skip(|request| request.uri.path() == "/healthz");
    let address = serve(app.clone().layer(layer.clone())).await;
    let held = async |path: &str| {
        fetch(address, path).await.collect().await.unwrap();
        limiter.stats().holds.held
    };
    assert_eq!(held("/healthz").await, 0);
    assert_eq!(held("/").await, 0);
    assert_eq!(held("/stream").await, 1, "an in-flight limit matches");

    // the last of `cost` and `estimate` counts
    let address = serve(app.clone().layer(layer.clone().estimate(|_| 1).cost(|_| 2))).await;
    let response = fetch(address, "/").await;
    assert!(field(&response, "ratelimit").starts_with(r#""requests";r=7;"#), "{response:?}");
    assert_eq!(limiter.stats().holds.held, 1);
    let address = serve(app.layer(layer.estimate(|_| 2))).await;
    fetch(address, "/").await.collect().await.unwrap();
    assert_eq!(limiter.stats().holds.held, 2);
    let labels = Labels::new([("path", "/")]).unwrap();
    let peeked = limiter.peek(&labels, 1).await.unwrap();
    assert_eq!(peeked.remaining(), Some(7), "the handler of the last request set its cost to zero");
}

#[tokio::test]
async fn a_shadow_concurrency_rule_counts_requests_and_denies_none() {
    let limiter = Limiter::in_memory([in_flight(1).shadow()]).unwrap();
    let app = Router::new().fallback(get(async || ())).layer(RateLimitLayer::new(limiter.clone()).path());
    let address = serve(app).await;
    let responses = [fetch(address, "/").await, fetch(address, "/").await];
    assert_eq!(responses.map(|response| response.status().as_u16()), [200, 200]);
    assert!(limiter.stats().holds.held > 0);
}

#[tokio::test]
async fn a_request_that_no_rule_matches_or_a_rule_blocks_is_not_held() {
    let blocked =
        in_flight(1).when("path", "/blocked").with_override(sluicegate::Override::default().blocked());
    let limiter = Limiter::in_memory([blocked]).unwrap();
    let app = Router::new().fallback(get(async |actual: ActualCosts| actual.cancel()));
    let layer = RateLimitLayer::new(limiter.clone()).path();
    for layer in [layer.clone(), layer.estimate(|_| 1)] {
        let address = serve(app.clone().layer(layer)).await;
        assert_eq!(fetch(address, "/").await.status(), 200);
        let denied = fetch(address, "/blocked").await;
        assert_eq!((denied.status().as_u16(), field(&denied, "retry-after")), (429, ""));
    }
    let holds = limiter.stats().holds;
    assert_eq!((holds.held, holds.settled, holds.released), (0, 0, 0));
}
