//! Forward-auth: sub-requests of a proxy, bytes in and bytes out.
#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{net::SocketAddr, time::Duration};

use axum::{
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode},
};
use sluicegate::{
    Cost, Limit, Limiter, ManualClock, MemoryStore, OnStoreFailure, Options, Override, RedisStore, Rule,
    Timestamp,
    label_policy::{HashSecret, LabelPolicy, LabelSettings},
};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token, live},
    engine::Engine,
    forward_auth::Settings,
    http::{self, HttpService},
    observe::logs,
};
use sluicegate_testkit::server::{Flavor, Server};
use sluicegate_tower::{client::ClientAddress, headers::Dialect};
use tracing::subscriber::set_default;

use crate::log_lines::{Lines, subscriber};

const MINUTE: Duration = Duration::from_secs(60);
const PROXY: &str = "10.0.0.1";
const UNTRUSTED: &str = "198.51.100.4";

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, MINUTE).unwrap()
}

/// Behind proxies in 10.0.0.0/8, with the label `api_key` from a header.
fn settings() -> Settings {
    Settings { client: ClientAddress::trusting(["10.0.0.0/8"]).unwrap(), dialect: Dialect::Draft11 }
}

fn service(rules: impl IntoIterator<Item = Rule>) -> HttpService {
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let limiter = Limiter::new(MemoryStore::new().with_clock(clock), rules).unwrap();
    over(limiter)
}

fn over(limiter: Limiter) -> HttpService {
    let engine = Engine::new(limiter);
    let api_key = LabelSettings { header: Some("x-api-key".to_owned()), ..LabelSettings::new("api_key") };
    engine.set_label_policy(LabelPolicy::new(vec![api_key], HashSecret::of_process()));
    HttpService::new(engine, http::Settings { forward_auth: live(settings()), ..http::Settings::default() })
}

struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Reply {
    fn field(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

async fn send(service: &HttpService, peer: &str, query: &str, headers: &[(&str, &str)]) -> Reply {
    let mut request = Request::get(format!("/v1/auth{query}"));
    for (name, value) in headers {
        request = request.header(*name, value.as_bytes());
    }
    let peer = SocketAddr::new(peer.parse().unwrap(), 4711);
    let request = request.body(Body::empty()).unwrap();
    let (head, body) = service.respond(peer, request).await.into_parts();
    let body = to_bytes(body, 1 << 20).await.unwrap();
    assert_eq!(head.headers["cache-control"], "no-store");
    Reply { status: head.status, headers: head.headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

#[tokio::test]
async fn requests_over_the_limit_are_denied_with_rate_limit_headers() {
    let service = service([Rule::new("login-per-ip", log(1)).when("route", "login").per(["ip"])]);
    let forwarded = [("x-forwarded-for", "203.0.113.9")];
    let passed = send(&service, PROXY, "?route=login", &forwarded).await;
    assert_eq!((passed.status, passed.body.as_str()), (StatusCode::OK, ""));
    assert_eq!(passed.field("ratelimit-policy"), r#""login-per-ip";q=1;w=60"#);
    assert_eq!(passed.field("ratelimit"), r#""login-per-ip";r=0;t=60"#);

    let denied = send(&service, PROXY, "?route=login", &forwarded).await;
    assert_eq!(denied.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!((denied.field("retry-after"), denied.field("sluicegate-status")), ("60", ""));
    assert_eq!(denied.field("content-type"), "application/problem+json");
    assert!(
        denied.body.contains(r##"#quota-exceeded","title":"Quota Exceeded","status":429"##),
        "{}",
        denied.body
    );
    assert!(denied.body.contains(r#""violated-policies":["login-per-ip"],"retry_after_ms":60000"#));

    for other in ["?route=home", ""] {
        let unlimited = send(&service, PROXY, other, &forwarded).await;
        assert_eq!((unlimited.status, unlimited.field("ratelimit")), (StatusCode::OK, ""), "{other}");
    }
}

#[tokio::test]
async fn deny_status_replaces_the_status_and_a_header_has_the_original() {
    let service = service([Rule::new("r", log(1)).per(["ip"])]);
    assert_eq!(send(&service, PROXY, "?deny_status=403", &[]).await.status, StatusCode::OK);
    let denied = send(&service, PROXY, "?deny_status=403", &[]).await;
    assert_eq!((denied.status, denied.body.as_str()), (StatusCode::FORBIDDEN, ""));
    assert_eq!((denied.field("sluicegate-status"), denied.field("retry-after")), ("429", "60"));
    assert_eq!((denied.field("content-type"), denied.field("ratelimit")), ("", r#""r";r=0;t=60"#));
    let long = format!("?deny_status=403&a={}", "x".repeat(1025));
    let mistaken = send(&service, PROXY, &long, &[]).await;
    assert_eq!((mistaken.status, mistaken.field("sluicegate-status")), (StatusCode::FORBIDDEN, "400"));
}

#[tokio::test]
async fn a_page_of_another_site_cannot_use_up_a_limit_without_a_proxy() {
    let image = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")];
    let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
    let script = [("origin", "http://evil.example"), ("host", "127.0.0.1:8080")];
    let rebound = [("sec-fetch-site", "same-origin"), ("host", "evil.example")];
    let service = service([Rule::new("all", log(6))]);
    for page in [image, link, script, rebound] {
        let rejected = send(&service, UNTRUSTED, "", &page).await;
        assert_eq!((rejected.status, rejected.field("ratelimit")), (StatusCode::FORBIDDEN, ""), "{page:?}");
        assert!(rejected.body.contains("let the proxy set X-Forwarded-For"), "{}", rejected.body);
    }
    // A proxy forwards the headers of its client and adds its own.
    for (name, value) in [
        ("x-forwarded-for", "203.0.113.9"),
        ("x-forwarded-method", "GET"),
        ("x-forwarded-uri", "/"),
        ("forwarded", "for=203.0.113.9"),
    ] {
        let forwarded = [image[0], image[1], ("origin", "http://evil.example"), (name, value)];
        assert_eq!(send(&service, PROXY, "", &forwarded).await.status, StatusCode::OK, "{name}");
    }
    // A URL typed into the address bar, and a client that is not a browser.
    for direct in [&[("sec-fetch-site", "none"), ("host", "127.0.0.1:8080")][..], &[]] {
        assert_eq!(send(&service, UNTRUSTED, "", direct).await.status, StatusCode::OK);
    }
    let used_up = send(&service, UNTRUSTED, "", &[]).await;
    assert_eq!(used_up.status, StatusCode::TOO_MANY_REQUESTS, "each accepted request is charged");
}

#[tokio::test]
async fn the_client_address_is_that_of_trusted_proxies_or_the_peer() {
    let service = service([Rule::new("per-ip", log(1)).per(["ip"])]);
    let passes = async |peer: &str, query: &str, forwarded: &str| {
        send(&service, peer, query, &[("x-forwarded-for", forwarded)]).await.status == StatusCode::OK
    };
    assert!(passes(PROXY, "", "1.1.1.1, 203.0.113.9").await);
    assert!(!passes(PROXY, "", "2.2.2.2, 203.0.113.9").await, "the part sent by the client is ignored");
    assert!(
        !passes(PROXY, "?ip=3.3.3.3", "203.0.113.9").await,
        "derived labels take precedence over the query"
    );
    assert!(passes(PROXY, "", "203.0.113.10").await);
    assert!(passes(UNTRUSTED, "", "203.0.113.11").await);
    assert!(!passes(UNTRUSTED, "", "203.0.113.12").await, "headers of other peers are not trusted");
    assert!(passes(PROXY, "", "2001:db8::1").await);
    assert!(!passes(PROXY, "", "2001:db8::2").await, "one IPv6 network is one client");
}

#[tokio::test]
async fn an_untrusted_peer_that_forwards_addresses_is_logged_once() {
    let service = service([]);
    let lines = Lines::default();
    let writer = lines.clone();
    let (subscriber, _logs) = subscriber(&logs::Settings::default(), move || writer.clone());
    let _guard = set_default(subscriber);
    let sent = [("x-forwarded-for", "203.0.113.9")];
    send(&service, "10.0.0.1", "", &sent).await;
    send(&service, "192.0.2.1", "", &[]).await;
    assert_eq!(lines.text(), "", "a trusted proxy, and a peer without the header");
    for _ in 0..3 {
        send(&service, "192.0.2.1", "", &sent).await;
        send(&service, "192.0.2.2", "", &[("forwarded", "for=203.0.113.9")]).await;
    }
    let text = lines.text();
    let warning = "is not in server.trusted_proxies: its clients share one counter";
    assert_eq!(text.matches(warning).count(), 2, "{text}");
    assert!(text.contains("192.0.2.1 sends X-Forwarded-For but is not") && text.contains("WARN"), "{text}");
    assert!(text.contains("192.0.2.2 sends Forwarded but is not"), "{text}");
    for host in 1..=100 {
        send(&service, &format!("198.51.100.{host}"), "", &sent).await;
    }
    assert_eq!(lines.text().matches(warning).count(), 16, "the number of lines is bounded");
}

#[tokio::test(start_paused = true)]
async fn a_check_without_a_valid_token_is_logged_at_most_once_a_second() {
    let access = Access::new(vec![Token::new("app", b"the-right-secret", Scopes::ALL)]);
    let engine = Engine::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let service = HttpService::new(engine, http::Settings { access, ..http::Settings::default() });
    let lines = Lines::default();
    let writer = lines.clone();
    let (subscriber, _logs) = subscriber(&logs::Settings::default(), move || writer.clone());
    let _guard = set_default(subscriber);
    let request = |path: &str, authorization: Option<&str>| {
        let request = Request::post(path);
        let request = match authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        };
        service.respond("192.0.2.1:4711".parse().unwrap(), request.body(Body::empty()).unwrap())
    };
    for _ in 0..50 {
        request("/v1/auth", None).await;
    }
    tokio::time::advance(Duration::from_secs(1)).await;
    request("/v1/check", Some("Bearer a-wrong-secret")).await;
    tokio::time::advance(Duration::from_secs(1)).await;
    request("/v1/peek", Some("Bearer a-wrong-secret")).await;
    let text = lines.text();
    let logged: Vec<&str> =
        text.lines().filter_map(|line| line.split_once(": ").map(|(_, line)| line)).collect();
    assert_eq!(
        logged,
        [
            "forward-auth from 192.0.2.1:4711 rejected: missing token: send \"Authorization: Bearer …\"",
            "check from 192.0.2.1:4711 rejected: unknown token: it may have been replaced (and 49 more rejected calls before this \
             one)",
            "peek from 192.0.2.1:4711 rejected: unknown token: it may have been replaced",
        ]
    );
}

#[tokio::test]
async fn method_path_host_and_headers_are_labels() {
    let rules = [
        Rule::new("post", log(1)).when("method", "POST").when("path", "/a b").when("host", "example.com"),
        Rule::new("key", log(1)).per(["api_key"]),
        Rule::new("own", log(1)).when("method", "GET").when("host", "sluicegate").when("path", "/given"),
    ];
    let service = service(rules);
    let status = async |peer: &str, query: &str, headers: &[(&str, &str)]| {
        send(&service, peer, query, headers).await.status.as_u16()
    };
    let forwarded = [
        ("x-forwarded-method", "POST"),
        ("x-forwarded-uri", "/a%20b?c=/d"),
        ("x-forwarded-host", "EXAMPLE.com.:8080"),
        ("host", "sluicegate"),
    ];
    // as sent by the client, without decoding
    assert_eq!(status(PROXY, "", &forwarded).await, 200);
    assert_eq!(status(PROXY, "", &forwarded).await, 200);
    let plain = [forwarded[0], ("x-forwarded-uri", "http://example.com/a?b"), forwarded[2]];
    let rules =
        [Rule::new("post", log(1)).when("method", "POST").when("path", "/a").when("host", "example.com")];
    let other = self::service(rules);
    for (query, expected) in [("", 200), ("?method=GET&path=/b&host=x", 429)] {
        assert_eq!(
            send(&other, PROXY, query, &plain).await.status.as_u16(),
            expected,
            "derived labels take precedence"
        );
    }
    assert_eq!(
        send(&other, UNTRUSTED, "", &plain).await.status,
        StatusCode::OK,
        "headers of other peers are not trusted"
    );

    assert_eq!(status(PROXY, "?api_key=b", &[("x-api-key", "a")]).await, 200);
    assert_eq!(
        status(PROXY, "?api_key=c", &[("x-api-key", "a")]).await,
        429,
        "the header wins over the query"
    );
    assert_eq!(status(PROXY, "?api_key=b", &[]).await, 200);
    for expected in [200, 429] {
        assert_eq!(status(UNTRUSTED, "?path=%2Fgiven", &[("host", "sluicegate:80")]).await, expected);
    }
}

#[tokio::test]
async fn a_path_of_any_length_and_characters_is_decided_by_its_rules() {
    let rules = [
        Rule::new("login", log(1)).when("path", "/login*").per(["path"]),
        Rule::new("odd", log(1)).when("path", "/`<é"),
    ];
    let service = service(rules);
    let table = [
        ("/long".repeat(1000), 200),
        (format!("/login{}", "/".repeat(2000)), 200),
        (format!("/login{}?{}", "/".repeat(3000), "x".repeat(3000)), 429),
        ("/`<é".to_owned(), 200),
        ("/`<é?`".to_owned(), 429),
        ("/`<é#`".to_owned(), 429),
        (String::new(), 200),
    ];
    for (uri, expected) in table {
        let status = send(&service, PROXY, "", &[("x-forwarded-uri", &uri)]).await.status;
        assert_eq!(status.as_u16(), expected, "{uri:.20}");
    }
}

#[tokio::test]
async fn any_host_and_method_of_a_client_is_decided() {
    let rules = [
        Rule::new("odd", log(1)).when("host", "a<b"),
        Rule::new("long", log(1)).when("host", "xxx*").when("method", "XXX*"),
    ];
    let service = service(rules);
    let long = "X".repeat(2000);
    let long = [("x-forwarded-host", &*long), ("x-forwarded-method", &*long)];
    let table: [(&[(&str, &str)], u16); 5] = [
        (&[("host", "A<b:80")], 200),
        (&[("x-forwarded-host", "a<b.")], 429),
        (&long, 200),
        (&long, 429),
        (&[("x-forwarded-host", "")], 200),
    ];
    for (headers, expected) in table {
        let status = send(&service, PROXY, "", headers).await.status.as_u16();
        assert_eq!(status, expected, "{headers:?}");
    }
}

#[tokio::test]
async fn the_query_sets_the_cost() {
    let service = service([Rule::new("r", log(10))]);
    assert_eq!(send(&service, PROXY, "?cost=8", &[]).await.field("ratelimit"), r#""r";r=2;t=60"#);
    assert_eq!(send(&service, PROXY, "?cost=3", &[]).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(send(&service, PROXY, "?cost=0", &[]).await.status, StatusCode::OK);
    let never = send(&service, PROXY, "?cost=11", &[]).await;
    assert_eq!((never.status, never.field("retry-after")), (StatusCode::TOO_MANY_REQUESTS, ""));
}

#[tokio::test]
async fn invalid_input_is_a_400_that_names_the_fix_and_charges_nothing() {
    let rules = [Rule::new("r", log(1)).with_override(Override::when("big", "yes").cost(Cost::MAX))];
    let service = service(rules);
    let long = format!("?a={}", "x".repeat(1025));
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str);
    let table: [Case<'_>; 15] = [
        ("?cost=x", &[], "cost \\\"x\\\" is invalid: use a whole number from 0 to 9007199254740991"),
        ("?cost=", &[], "cost \\\"\\\" is invalid"),
        ("?cost=%2B1", &[], "cost \\\"+1\\\" is invalid"),
        ("?cost=9007199254740992", &[], "is invalid"),
        ("?cost=1&cost=1", &[], "cost is given more than once: send it once"),
        ("?deny_status=200", &[], "deny_status \\\"200\\\" is out of range: use 400 to 599"),
        ("?deny_status=x", &[], "is out of range"),
        ("?a=1&a=2", &[], "label \\\"a\\\" is given more than once"),
        ("?=1", &[], "a label has an empty name"),
        (&long, &[], "has a value of 1025 bytes"),
        ("?big=yes&cost=2", &[], "is too large for rule \\\"r\\\""),
        ("", &[("x-api-key", "a"), ("x-api-key", "b")], "header x-api-key is repeated"),
        ("", &[("x-forwarded-uri", "/a"), ("x-forwarded-uri", "/b")], "x-forwarded-uri is repeated"),
        ("", &[("x-forwarded-host", "a, b")], "the header x-forwarded-host has more than one host: send one"),
        ("", &[("x-forwarded-method", "GET, POST")], "the header x-forwarded-method is not a method"),
    ];
    for (query, headers, detail) in table {
        let reply = send(&service, PROXY, query, headers).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{query} {headers:?}");
        assert!(reply.body.contains(detail), "{query}: {}", reply.body);
        assert_eq!(reply.field("content-type"), "application/problem+json");
    }
    assert_eq!(send(&service, PROXY, "", &[]).await.status, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_store_is_unavailable_closed_is_a_503_and_open_allows() {
    let redis = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let rules = [
        Rule::new("closed", log(9)).when("r", "closed").on_store_failure(OnStoreFailure::Closed),
        Rule::new("open", log(9)).when("r", "open").on_store_failure(OnStoreFailure::Open),
    ];
    let options = Options::default().deadline(Duration::from_millis(200));
    let service = over(Limiter::builder().store(store).rules(rules).options(options).build().unwrap());
    assert_eq!(send(&service, PROXY, "?r=closed", &[]).await.status, StatusCode::OK);
    redis.suspend();
    let closed = send(&service, PROXY, "?r=closed", &[]).await;
    assert_eq!((closed.status, closed.field("retry-after")), (StatusCode::SERVICE_UNAVAILABLE, "1"));
    assert!(closed.body.contains("#temporary-reduced-capacity"), "{}", closed.body);
    let closed = send(&service, PROXY, "?r=closed&deny_status=403", &[]).await;
    assert_eq!((closed.status, closed.field("sluicegate-status")), (StatusCode::FORBIDDEN, "503"));
    let open = send(&service, PROXY, "?r=open", &[]).await;
    assert_eq!((open.status, open.field("ratelimit")), (StatusCode::OK, ""));
    redis.resume();
}
