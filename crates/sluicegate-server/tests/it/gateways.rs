//! Real nginx, Caddy and Traefik with the configurations of `deploy/`, between a client and a service.
#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    collections::HashMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    http::{Method, Request, Response, StatusCode},
};
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use sluicegate::{
    Limit, Limiter, MemoryStore, OnStoreFailure, Options, RedisStore, Rule,
    label_policy::{HashSecret, LabelPolicy, LabelSettings},
};
use sluicegate_server::http::HttpService;
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token, live},
    engine::Engine,
    forward_auth, http,
    net::acceptor::AcceptConfig,
};
use sluicegate_testkit::{
    gateway::{Gateway, READY, RunningGateway},
    server::{Flavor, Server},
};
use sluicegate_tower::client::ClientAddress;
use tokio::{net::TcpListener, task::JoinHandle};

const LIMIT: u32 = 5;

/// The address of clients, unlike that of the proxies, which is trusted.
const CLIENT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// A rule for all requests except readiness checks of the proxy.
fn counted(name: &str, amount: u32) -> Rule {
    let limit = Limit::sliding_log(amount.into(), Duration::from_secs(60)).unwrap();
    Rule::new(name, limit).unless("path", READY)
}

/// A proxy, its rate limiter, and the service behind it.
struct Chain {
    gateway: RunningGateway,
    sluicegate: JoinHandle<()>,
    served: Arc<AtomicU32>,
}

impl Chain {
    async fn start(gateway: Gateway, limiter: Limiter) -> Self {
        Self::with_tokens(gateway, limiter, Access::default(), None).await
    }

    /// Starts a chain whose server may require tokens and whose proxy may send one.
    async fn with_tokens(
        gateway: Gateway,
        limiter: Limiter,
        access: Access,
        token: Option<&'static str>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let auth_address = listener.local_addr().unwrap();
        let client = ClientAddress::trusting(["127.0.0.1"]).unwrap();
        let settings = forward_auth::Settings { client, ..forward_auth::Settings::default() };
        let engine = Engine::new(limiter);
        let api_key = LabelSettings { header: Some("x-api-key".to_owned()), ..LabelSettings::new("api_key") };
        engine.set_label_policy(LabelPolicy::new(vec![api_key], HashSecret::of_process()));
        let settings = http::Settings { access, forward_auth: live(settings), ..Default::default() };
        let api = HttpService::new(engine, settings);
        let sluicegate = tokio::spawn(http::server::run(listener, api, AcceptConfig::default()));

        let served = Arc::new(AtomicU32::new(0));
        let service = service(Arc::clone(&served)).await;
        let gateway =
            tokio::task::spawn_blocking(move || gateway.start(auth_address, service, token)).await.unwrap();
        served.store(0, Ordering::Relaxed);
        Self { gateway, sluicegate, served }
    }

    async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)]) -> Response<Bytes> {
        let mut connector = HttpConnector::new();
        connector.set_local_address(Some(CLIENT.into()));
        let client = Client::builder(TokioExecutor::new()).build::<_, Full<Bytes>>(connector);
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.gateway.addr()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::from("a body")).unwrap();
        let (head, body) = client.request(request).await.unwrap().into_parts();
        Response::from_parts(head, body.collect().await.unwrap().to_bytes())
    }
}

/// The most rules that may match together, with the longest names.
#[tokio::test(flavor = "multi_thread")]
async fn headers_of_many_rules_fit_through_nginx() {
    let rules = (0..64).map(|number| counted(&format!("{number:0>128}"), LIMIT));
    let chain = Chain::start(Gateway::Nginx, Limiter::new(MemoryStore::new(), rules).unwrap()).await;
    for auth_address in 0..=LIMIT {
        let answer = chain.send(Method::GET, "/", &[]).await;
        let expected = if auth_address < LIMIT { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
        assert_eq!(answer.status(), expected);
    }
}

/// Counts its requests. Responds with 403 to `/forbidden` and with 401 to `/unauthorized`.
async fn service(served: Arc<AtomicU32>) -> SocketAddr {
    let handler = move |request: axum::extract::Request| async move {
        served.fetch_add(1, Ordering::Relaxed);
        let status = match request.uri().path() {
            "/forbidden" => StatusCode::FORBIDDEN,
            "/unauthorized" => StatusCode::UNAUTHORIZED,
            _ => StatusCode::OK,
        };
        (status, "served")
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(handler)).await });
    address
}

fn field<'a>(response: &'a Response<Bytes>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

fn is_problem(response: &Response<Bytes>, kind: &str) -> bool {
    let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    let kind = format!("https://iana.org/assignments/http-problem-types#{kind}");
    field(response, "content-type") == "application/problem+json"
        && body["type"] == kind
        && body["status"] == response.status().as_u16()
}

/// Exactly the limit reaches the service, regardless of the headers that the client sends.
async fn exactly_the_limit(kind: Gateway) {
    let rules = [
        counted("per-ip", LIMIT).when("route", "api").unless("method", "POST").per(["ip"]),
        counted("admin", 1).when("method", "POST").when("path", "/admin").when("host", "127.0.0.1"),
    ];
    let chain = Chain::start(kind, Limiter::new(MemoryStore::new(), rules).unwrap()).await;
    let mut statuses: HashMap<u16, u32> = HashMap::new();
    for n in 0..3 * LIMIT {
        let forged = format!("203.0.113.{n}");
        let forged_too = format!("for={forged}");
        let headers = [
            ("x-forwarded-for", &*forged),
            ("forwarded", &*forged_too),
            ("x-real-ip", &*forged),
            ("x-forwarded-uri", "/admin"),
            ("x-forwarded-method", "PUT"),
            ("x-forwarded-host", "elsewhere"),
        ];
        // A proxy forwards the headers of a browser, including those of a request from another site.
        let of_browser = [("origin", "http://other.example"), ("sec-fetch-site", "cross-site")];
        let forging = if n % 2 == 0 { &headers[..] } else { &of_browser };
        let response = chain.send(Method::GET, "/path?a=b", forging).await;
        *statuses.entry(response.status().as_u16()).or_default() += 1;
        if response.status() == StatusCode::OK {
            assert_eq!(response.body(), "served");
            // Traefik cannot forward them in this case.
            if kind != Gateway::Traefik {
                assert_eq!(field(&response, "ratelimit-policy"), r#""per-ip";q=5;w=60"#);
                let left = LIMIT - 1 - n;
                assert_eq!(field(&response, "ratelimit"), format!(r#""per-ip";r={left};t=60"#));
            }
        } else {
            let wait: u64 = field(&response, "retry-after").parse().unwrap();
            assert!((1..=60).contains(&wait), "{wait}");
            assert_eq!(field(&response, "ratelimit"), format!(r#""per-ip";r=0;t={wait}"#));
            assert!(is_problem(&response, "quota-exceeded"), "{response:?}");
        }
    }
    assert_eq!(statuses, HashMap::from([(200, LIMIT), (429, 2 * LIMIT)]));
    assert_eq!(chain.served.load(Ordering::Relaxed), LIMIT, "a denied request never reaches the service");

    for expected in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
        let response = chain.send(Method::POST, "/admin?x", &[("x-forwarded-uri", "/forged")]).await;
        assert_eq!(response.status(), expected, "method, path and host are those of the client's request");
    }
}

/// Denied while the store is unavailable.
async fn closed_is_503(kind: Gateway) {
    let redis = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let rules = [counted("closed", 9).on_store_failure(OnStoreFailure::Closed)];
    let options = Options::default().deadline(Duration::from_millis(100));
    let chain =
        Chain::start(kind, Limiter::builder().store(store).rules(rules).options(options).build().unwrap())
            .await;
    assert_eq!(chain.send(Method::GET, "/", &[]).await.status(), StatusCode::OK);
    redis.suspend();
    let response = chain.send(Method::GET, "/", &[]).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{response:?}");
    assert_eq!(field(&response, "retry-after"), "1");
    assert!(is_problem(&response, "temporary-reduced-capacity"), "{response:?}");
    redis.resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_nginx_exactly_the_limit_is_admitted() {
    exactly_the_limit(Gateway::Nginx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nginx_sends_the_label_of_a_route_however_its_path_is_written() {
    let login =
        Rule::new("login", Limit::sliding_log(4, Duration::from_secs(60)).unwrap()).when("route", "login");
    let api = counted("api", 100).when("route", "api");
    let chain = Chain::start(Gateway::Nginx, Limiter::new(MemoryStore::new(), [login, api]).unwrap()).await;
    for path in ["/login", "/login?x=1", "//login", "/%6cogin"] {
        let response = chain.send(Method::GET, path, &[]).await;
        assert!(field(&response, "ratelimit-policy").starts_with("\"login\""), "{path}: {response:?}");
    }
    assert_eq!(chain.send(Method::GET, "/login", &[]).await.status(), StatusCode::TOO_MANY_REQUESTS);
    let other = chain.send(Method::GET, "/logins", &[]).await;
    assert_eq!(field(&other, "ratelimit-policy"), "\"api\";q=100;w=60");
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_caddy_exactly_the_limit_is_admitted() {
    exactly_the_limit(Gateway::Caddy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_traefik_exactly_the_limit_is_admitted() {
    exactly_the_limit(Gateway::Traefik).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_every_gateway_a_closed_rule_is_a_503_while_the_store_is_unavailable() {
    for kind in Gateway::ALL {
        closed_is_503(kind).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_every_gateway_unlimited_requests_get_the_services_own_responses() {
    for kind in Gateway::ALL {
        let chain = Chain::start(kind, Limiter::new(MemoryStore::new(), []).unwrap()).await;
        for (path, status) in [("/", 200), ("/forbidden", 403), ("/unauthorized", 401)] {
            let response = chain.send(Method::GET, path, &[]).await;
            let received = (response.status().as_u16(), &response.body()[..]);
            assert_eq!(received, (status, &b"served"[..]), "{kind:?} {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_token_of_the_gateway_is_a_server_error_and_admits_no_request() {
    let may_check = Scopes { check: true, adjust: false, admin: false };
    for kind in [Gateway::Nginx, Gateway::Caddy] {
        for token in [None, Some("revoked"), Some("s3cret")] {
            let access = Access::new(vec![Token::new("proxy", b"s3cret", may_check)]);
            let limiter = Limiter::new(MemoryStore::new(), [counted("r", 1)]).unwrap();
            let chain = Chain::with_tokens(kind, limiter, access, token).await;
            let case = format!("{kind:?} {token:?}");
            // the client's own token, which is for the service
            let own = [("authorization", "Bearer of-the-service")];
            let response = chain.send(Method::GET, "/", &own).await;
            if token == Some("s3cret") {
                assert_eq!(response.status(), StatusCode::OK, "{case}");
                let denied = chain.send(Method::GET, "/", &own).await;
                assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS, "{case}");
                continue;
            }
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR, "{case}");
            assert_eq!(field(&response, "content-type"), "application/problem+json", "{case}");
            let body: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(body["status"], 500, "{case}");
            assert_eq!(field(&response, "cache-control"), "no-store", "{case}");
            assert_eq!(field(&response, "www-authenticate"), "", "{case}");
            assert_eq!(chain.served.load(Ordering::Relaxed), 0, "{case}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_request_is_a_400_behind_nginx_too() {
    let chain = Chain::start(Gateway::Nginx, Limiter::new(MemoryStore::new(), []).unwrap()).await;
    let twice = [("x-api-key", "a"), ("x-api-key", "b")];
    assert_eq!(chain.send(Method::GET, "/", &twice).await.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_every_gateway_a_long_path_matches_its_rules() {
    for kind in Gateway::ALL {
        let rules = [counted("login", 1).when("path", "/login*").per(["path"])];
        let chain = Chain::start(kind, Limiter::new(MemoryStore::new(), rules).unwrap()).await;
        for (length, expected) in [(2000, StatusCode::OK), (3000, StatusCode::TOO_MANY_REQUESTS)] {
            let long = format!("/login/{}", "x".repeat(length));
            assert_eq!(chain.send(Method::GET, &long, &[]).await.status(), expected, "{kind:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_server_nginx_allows_requests() {
    let chain =
        Chain::start(Gateway::Nginx, Limiter::new(MemoryStore::new(), [counted("r", 1)]).unwrap()).await;
    assert_eq!(chain.send(Method::GET, "/", &[]).await.status(), StatusCode::OK);
    assert_eq!(chain.send(Method::GET, "/", &[]).await.status(), StatusCode::TOO_MANY_REQUESTS);
    chain.sluicegate.abort();
    // its connections close with the last of its tasks
    sluicegate_testkit::wait::until_async(
        "nginx finds no server",
        sluicegate_testkit::wait::PATIENCE,
        || async { chain.send(Method::GET, "/", &[]).await.status() == StatusCode::OK },
    )
    .await;
}
