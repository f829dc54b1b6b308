//! The layer in a real axum server with a real client.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::HashMap,
    convert::Infallible,
    future, io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{Extension, Router, body::Body, routing::get};
use bytes::Bytes;
use http::{HeaderName, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Empty};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use sluicegate::{
    Cost, Decision, Labels, Limit, Limiter, MemoryStore, OnStoreFailure, Options, RedisStore, Rule, Source,
};
use sluicegate_testkit::{
    server::{Flavor, Server},
    wait,
};
use sluicegate_tower::{RateLimitLayer, client::ClientAddress, headers::Dialect};
use tokio::net::TcpListener;
use tower::{Layer, Service, ServiceExt};

const MINUTE: Duration = Duration::from_secs(60);
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, MINUTE).unwrap()
}

fn memory(rules: impl IntoIterator<Item = Rule>) -> Limiter {
    Limiter::new(MemoryStore::new(), rules).unwrap()
}

/// A layer with the labels `ip` and `route`.
fn layer(limiter: Limiter, client: ClientAddress) -> RateLimitLayer {
    RateLimitLayer::new(limiter).client_ip_behind(client).matched_path("route")
}

/// Serves a handler that responds with the remaining quota and the source of the decision.
async fn serve(layer: RateLimitLayer) -> SocketAddr {
    let handler = |Extension(decision): Extension<Arc<Decision>>| async move {
        format!("{:?} {}", decision.remaining(), decision.source.name())
    };
    let routes = Router::new().route("/users/{id}", get(handler)).route("/", get(handler)).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = routes.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
}

async fn fetch(server: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Response<String> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let mut request = Request::get(format!("http://{server}{path}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let (head, body) = client.request(request.body(Empty::new()).unwrap()).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Response::from_parts(head, String::from_utf8(body.to_vec()).unwrap())
}

fn field<'a>(response: &'a Response<String>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

fn body(response: &Response<String>) -> serde_json::Value {
    serde_json::from_str(response.body()).unwrap()
}

#[tokio::test]
async fn exactly_the_limit_is_allowed_and_denials_have_retry_after() {
    let server =
        serve(layer(memory([Rule::new("per-ip", log(7)).per(["ip"])]), ClientAddress::default())).await;
    let requests = (0..20).map(|_| tokio::spawn(async move { fetch(server, "/", &[]).await }));
    let mut statuses: HashMap<StatusCode, usize> = HashMap::new();
    for answer in requests.collect::<Vec<_>>() {
        let response = answer.await.unwrap();
        *statuses.entry(response.status()).or_default() += 1;
        assert_eq!(field(&response, "ratelimit-policy"), r#""per-ip";q=7;w=60"#);
        let denied = response.status() == StatusCode::TOO_MANY_REQUESTS;
        assert_eq!(denied, response.headers().contains_key(header::RETRY_AFTER));
        if denied {
            let wait: u64 = field(&response, "retry-after").parse().unwrap();
            assert!((1..=60).contains(&wait), "{wait}");
            assert_eq!(field(&response, "ratelimit"), format!(r#""per-ip";r=0;t={wait}"#));
            assert_eq!(field(&response, "cache-control"), "no-store");
        } else {
            assert!(field(&response, "ratelimit").starts_with(r#""per-ip";r="#));
        }
    }
    let (passed, denied) = (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(statuses, HashMap::from([(passed, 7), (denied, 13)]));
}

#[cfg(feature = "toml")]
#[tokio::test]
async fn labels_are_normalized_by_the_policy_of_a_rules_file() {
    let file = sluicegate::config::RulesFile::parse(
        r#"
        [labels]
        api_key = { secret = true }
        address = { kind = "ip" }
        [[rule]]
        name = "per-key"
        when = { api_key = "alice" }
        per = ["api_key"]
        amount = 5
        window = "1m"
        "#,
    )
    .unwrap();
    let stored = file.labels.clean([("api_key", "alice")]).unwrap();
    assert_ne!(stored.get("api_key"), Some(&b"alice"[..]), "a secret label is hashed");
    let limiter = memory(file.rules);
    let layer = RateLimitLayer::new(limiter.clone())
        .header("api_key", "x-api-key")
        .header("address", "x-address")
        .label_policy(file.labels);
    let server = serve(layer).await;
    fetch(server, "/", &[("x-api-key", "alice")]).await;
    assert_eq!(limiter.peek(&stored, Cost::ONE).await.unwrap().remaining(), Some(4));
    let response = fetch(server, "/", &[("x-address", "localhost")]).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert!(response.body().contains("is not an IP address"), "{}", response.body());
}

#[tokio::test]
async fn a_denial_lists_the_violated_policies() {
    let server = serve(layer(memory([Rule::new("a \"b\"", log(1))]), ClientAddress::default())).await;
    fetch(server, "/", &[]).await;
    let response = fetch(server, "/", &[]).await;
    assert_eq!(field(&response, "content-type"), "application/problem+json");
    let mut body = body(&response);
    let wait_ms = body["retry_after_ms"].take().as_u64().unwrap();
    assert!((1..=60_000).contains(&wait_ms), "{wait_ms}");
    let seconds = wait_ms.div_ceil(1_000);
    assert_eq!(
        body,
        serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Quota Exceeded",
            "status": 429,
            "detail": format!("limit exceeded: a \"b\"; retry in {seconds} seconds"),
            "violated-policies": ["a \"b\""],
            "retry_after_ms": null,
        })
    );
}

#[tokio::test]
async fn a_cost_above_the_limit_is_denied_without_retry_after() {
    let layer = layer(memory([Rule::new("r", log(1))]), ClientAddress::default()).cost(|_| 2);
    let response = fetch(serve(layer).await, "/", &[]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!response.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(body(&response)["detail"], "denied: r; a retry cannot succeed");
    assert!(body(&response).get("retry_after_ms").is_none());
}

#[tokio::test]
async fn a_forged_address_changes_nothing() {
    let rule = || memory([Rule::new("per-ip", log(3)).per(["ip"])]);
    let forged = |n: usize| format!("203.0.113.{n}");
    let open = serve(layer(rule(), ClientAddress::default())).await;
    for n in 0..6 {
        let response =
            fetch(open, "/", &[("x-forwarded-for", &forged(n)), ("forwarded", "for=1.1.1.1")]).await;
        assert_eq!(response.status() == StatusCode::OK, n < 3, "no proxy is trusted: {n}");
    }
    let behind = serve(layer(rule(), ClientAddress::trusting(["127.0.0.0/8"]).unwrap())).await;
    for n in 0..6 {
        let chain = format!("{}, 198.51.100.4", forged(n));
        let response = fetch(behind, "/", &[("x-forwarded-for", &chain)]).await;
        assert_eq!(response.status() == StatusCode::OK, n < 3, "a proxy adds 198.51.100.4: {n}");
    }
    let other = fetch(behind, "/", &[("x-forwarded-for", "198.51.100.4, 198.51.100.5")]).await;
    assert_eq!(other.status(), StatusCode::OK, "another client of the proxy has its own counter");
}

#[tokio::test]
async fn the_paths_of_one_route_share_its_template() {
    let rules = || memory([Rule::new("per-route", log(1)).per(["route"])]);
    let server = serve(layer(rules(), ClientAddress::default())).await;
    let table = [
        ("/users/1", StatusCode::OK),
        ("/users/2", StatusCode::TOO_MANY_REQUESTS),
        ("/users/%31?a=b", StatusCode::TOO_MANY_REQUESTS),
        ("/", StatusCode::OK),
        ("/nowhere", StatusCode::NOT_FOUND),
        ("/nowhere", StatusCode::NOT_FOUND),
    ];
    for (path, expected) in table {
        assert_eq!(fetch(server, path, &[]).await.status(), expected, "{path}");
    }

    let router = Router::new().route("/", get(|| async { "served" }));
    let around = RateLimitLayer::new(rules()).matched_path("route").layer(router);
    for _ in 0..2 {
        let response = around.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "a layer around the router has no route");
    }
}

#[tokio::test]
async fn labels_come_from_the_method_the_path_the_host_and_headers() {
    let rules = [
        Rule::new("key", log(1)).per(["api_key"]),
        Rule::new("host", log(1)).when("host", "example.com").when("method", "GET").when("path", "/"),
    ];
    let layer = layer(memory(rules), ClientAddress::default())
        .method()
        .host()
        .path()
        .header("api_key", HeaderName::from_static("x-other"))
        .header("api_key", API_KEY);
    let server = serve(layer).await;
    let passes = async |path: &str, headers: &[(&str, &str)]| {
        fetch(server, path, headers).await.status() == StatusCode::OK
    };
    assert!(passes("/", &[("x-api-key", "a"), ("x-other", "b")]).await);
    assert!(!passes("/", &[("x-api-key", "a")]).await, "the last source of a label is used");
    assert!(passes("/", &[("x-api-key", "b")]).await);
    assert!(passes("/", &[("host", "example.com")]).await);
    assert!(!passes("/", &[("host", "EXAMPLE.com.:8080")]).await, "a host has one canonical form");
}

#[tokio::test]
async fn a_request_with_two_hosts_is_rejected() {
    let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), []).unwrap()).host();
    let app = Router::new().fallback(|| async { "served" }).layer(layer);
    for (target, expected) in
        [("http://limited.example/", 200), ("http://LIMITED.example.:80/", 200), ("http://other/", 400)]
    {
        let request = Request::get(target).header("host", "limited.example").body(Body::empty()).unwrap();
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), expected, "{target}");
    }
}

#[tokio::test]
async fn rules_match_long_paths_and_unusual_hosts() {
    let rules = [
        Rule::new("users", log(1)).when("path", "/users/*").per(["path"]),
        Rule::new("odd", log(1)).when("host", "a<b"),
    ];
    let server = serve(layer(memory(rules), ClientAddress::default()).path().host()).await;
    for (length, expected) in [(2000, StatusCode::OK), (3000, StatusCode::TOO_MANY_REQUESTS)] {
        let long = format!("/users/{}", "7".repeat(length));
        assert_eq!(fetch(server, &long, &[]).await.status(), expected, "{length}");
        assert_eq!(fetch(server, "/", &[("host", "A<b:80")]).await.status(), expected);
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_checked_is_rejected() {
    let rule = Rule::new("per-key", log(100)).per(["api_key"]).cost(Cost::MAX);
    let shadow = layer(memory([rule]), ClientAddress::default()).header("api_key", API_KEY).cost(|_| 2);
    let server = serve(shadow).await;
    let table: [(&[(&str, &str)], &str); 3] = [
        (&[("x-api-key", "a"), ("x-api-key", "b")], "header x-api-key is repeated: send it once"),
        (
            &[("x-api-key", &"k".repeat(1025))],
            "label \"api_key\" has a value of 1025 bytes: use at most 1024",
        ),
        (&[("x-api-key", "a")], "cost 2 of \"requests\" is too large for rule \"per-key\""),
    ];
    for (headers, detail) in table {
        let response = fetch(server, "/", headers).await;
        assert_eq!(response.status(), StatusCode::BAD_REQUEST, "{detail}");
        assert_eq!(field(&response, "content-type"), "application/problem+json");
        assert!(body(&response)["detail"].as_str().unwrap().starts_with(detail), "{}", response.body());
    }
}

/// Collects log lines.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn without_the_peer_address_clients_get_a_plain_500_and_the_log_has_one_line_with_the_remedy() {
    let limit_of_one = || log(1);
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer({
        let log = log.clone();
        move || log.clone()
    });
    let _subscribed = tracing::subscriber::set_default(subscriber.finish());
    let layer = RateLimitLayer::new(memory([Rule::new("r", limit_of_one()).per(["ip"])])).client_ip();
    // not served with connect info
    let mut app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
    for _ in 0..3 {
        let response = app.call(Request::get("/").body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(
            response.status(),
            StatusCode::INTERNAL_SERVER_ERROR,
            "limits per address would not apply"
        );
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert!(
            body.contains("the request could not be checked") && !body.contains("connect_info"),
            "{body}"
        );
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(
        log.contains("ERROR") && log.contains("into_make_service_with_connect_info::<SocketAddr>()"),
        "{log}"
    );
}

#[test]
fn a_rule_whose_label_the_layer_does_not_set_is_logged_once() {
    let rules = [
        Rule::new("login", log(1)).when("route", "/login").per(["ip"]),
        Rule::new("per-key", log(1)).per(["api_key"]),
        Rule::new("per-ip", log(1)).per(["ip"]),
    ];
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_writer({
        let log = log.clone();
        move || log.clone()
    });
    tracing::subscriber::with_default(subscriber.finish(), || {
        let layer = RateLimitLayer::new(memory(rules)).client_ip();
        // axum calls the layer for every route
        let _app: Router =
            Router::new().route("/", get(|| async {})).route("/a", get(|| async {})).layer(layer);
    });
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert_eq!(log.lines().count(), 2, "{log}");
    assert!(log.contains(r#"rule "login" applies to no request: the layer does not set label "route"; add .matched_path("route")"#), "{log}");
    assert!(log.contains(r#"rule "per-key" applies to no request: the layer does not set label "api_key"; add .header("api_key", …)"#), "{log}");
}

#[tokio::test]
async fn skipped_requests_are_neither_checked_nor_counted() {
    let layer = layer(memory([Rule::new("r", log(1))]), ClientAddress::default())
        .skip(|request| request.uri.path() == "/users/health");
    let routes =
        Router::new().route("/", get(|| async { "hello" })).route("/users/{id}", get(|| async { "ok" }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let service = routes.layer(layer).into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    for _ in 0..3 {
        let response = fetch(server, "/users/health", &[]).await;
        assert_eq!((response.status(), field(&response, "ratelimit")), (StatusCode::OK, ""));
    }
    assert_eq!(fetch(server, "/", &[]).await.status(), StatusCode::OK);
    assert_eq!(fetch(server, "/", &[]).await.status(), StatusCode::TOO_MANY_REQUESTS);
}

#[test]
#[should_panic(expected = "\"x api key\" is not the name of a header")]
fn an_invalid_header_name_panics_when_the_layer_is_built() {
    let _ = RateLimitLayer::new(memory([])).header("api_key", "x api key");
}

#[tokio::test]
async fn a_custom_denial_has_the_headers_of_the_dialect() {
    let layer = layer(memory([Rule::new("r", log(1))]), ClientAddress::default())
        .dialect(Dialect::XRateLimit)
        .on_denial(|request, decision| {
            let text = format!("{} denied by {}", request.uri.path(), decision.rule().unwrap());
            Response::builder().status(StatusCode::FORBIDDEN).body(Bytes::from(text)).unwrap()
        });
    let server = serve(layer).await;
    assert_eq!(field(&fetch(server, "/", &[]).await, "x-ratelimit-remaining"), "0");
    let response = fetch(server, "/", &[]).await;
    assert_eq!((response.status(), response.body().as_str()), (StatusCode::FORBIDDEN, "/ denied by r"));
    assert_eq!(field(&response, "x-ratelimit-limit"), "1");
    assert_eq!(field(&response, "retry-after"), field(&response, "x-ratelimit-reset"));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_store_the_failure_policies_decide_within_the_deadline() {
    let redis = Server::start(Flavor::Redis7);
    let policy = |name: &str, policy| Rule::new(name, log(3)).when("policy", name).on_store_failure(policy);
    let rules = [
        policy("open", OnStoreFailure::Open),
        policy("closed", OnStoreFailure::Closed),
        policy("local", OnStoreFailure::Local),
    ];
    let deadline = Duration::from_millis(200);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let limiter = Limiter::builder()
        .store(store)
        .rules(rules)
        .options(Options::default().deadline(deadline))
        .build()
        .unwrap();
    let header = HeaderName::from_static("x-policy");
    let server = serve(layer(limiter.clone(), ClientAddress::default()).header("policy", header)).await;
    for policy in ["open", "closed", "local"] {
        let response = fetch(server, "/", &[("x-policy", policy)]).await;
        assert_eq!((response.status(), response.body().as_str()), (StatusCode::OK, "Some(2) store"));
    }

    redis.suspend();
    let away = Labels::new([("policy", "local")]).unwrap();
    wait::until_async("the circuit breaker is open", wait::PATIENCE, || async {
        limiter.peek(&away, 1).await.unwrap().source == Source::Fallback
    })
    .await;
    for _ in 0..5 {
        let open = fetch(server, "/", &[("x-policy", "open")]).await;
        assert_eq!((open.status(), open.body().as_str()), (StatusCode::OK, "None open"));
        assert_eq!((field(&open, "ratelimit"), field(&open, "ratelimit-policy")), ("", ""));

        let closed = fetch(server, "/", &[("x-policy", "closed")]).await;
        assert_eq!(closed.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(field(&closed, "retry-after"), "1");
        let body = body(&closed);
        assert_eq!(
            body["type"],
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
        );
        assert_eq!((body["status"].as_u64(), &body["violated-policies"][0]), (Some(503), &"closed".into()));
    }
    let mut passed = 0;
    for _ in 0..6 {
        let local = fetch(server, "/", &[("x-policy", "local")]).await;
        passed += usize::from(local.status() == StatusCode::OK);
        assert_eq!(field(&local, "ratelimit-policy"), r#""local";q=3;w=60"#);
    }
    assert_eq!(passed, 2, "this process's share of the limit, less the unit that the store reported as used");
    redis.resume();
}

/// A service that must be polled ready before each call; its clones are not ready.
struct Reserved(AtomicBool);

impl Clone for Reserved {
    fn clone(&self) -> Self {
        Self(AtomicBool::new(false))
    }
}

impl Service<Request<Body>> for Reserved {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        *self.0.get_mut() = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(self.0.swap(false, Ordering::Relaxed), "called without being ready");
        future::ready(Ok(Response::new(Body::empty())))
    }
}

#[tokio::test]
async fn the_instance_that_was_ready_is_called() {
    let layer = RateLimitLayer::new(memory([Rule::new("r", log(2))]));
    let mut service = layer.layer(Reserved(AtomicBool::new(false)));
    let mut statuses = Vec::new();
    for _ in 0..3 {
        let response = service.ready().await.unwrap().call(Request::new(Body::empty())).await.unwrap();
        assert!(response.extensions().get::<Arc<Decision>>().is_some());
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 429]);
}
