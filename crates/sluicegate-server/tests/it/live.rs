//! The event stream of the dashboard, and the page itself: bytes in, bytes out.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use axum::{
    body::{Body, BodyDataStream, to_bytes},
    http::{Request, Response, StatusCode, header},
};
use serde_json::Value;
use sluicegate::{Cost, Labels, Limiter, MemoryStore, Rule};
use sluicegate_server::http::HttpService;
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    demo,
    engine::{Engine, Transport},
    http::{
        self,
        live::{MAX_LISTENERS, MAX_SECONDS},
        server,
    },
    net::{acceptor::AcceptConfig, stream::WRITE_TIMEOUT},
    observe::history::SECONDS,
};
use sluicegate_testkit::wait::PATIENCE;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tokio_stream::StreamExt;

const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4711);
const CHECK: Scopes = Scopes { check: true, adjust: false, admin: false };

/// A server with manually recorded seconds.
struct Subjected {
    engine: Engine,
    settings: http::Settings,
    service: HttpService,
}

/// One event.
#[derive(Debug)]
struct Event {
    name: String,
    id: Option<String>,
    data: Value,
}

/// A reader of the event stream.
struct Events {
    body: BodyDataStream,
    text: String,
}

impl Subjected {
    fn new(tokens: Vec<Token>) -> Self {
        let engine = Engine::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap());
        let settings = http::Settings { access: Access::new(tokens), ..http::Settings::default() };
        let service = HttpService::new(engine.clone(), settings.clone());
        Self { engine, settings, service }
    }

    fn record_seconds(&self, count: usize) {
        for _ in 0..count {
            self.engine.observer().record_second(&self.engine.limiter().stats());
        }
    }

    async fn check(&self) {
        let labels = Labels::new([("route", "login"), ("ip", "203.0.113.9")]).unwrap();
        self.engine
            .decide(Transport::Http, &sluicegate::limiter::Request::new(labels, Cost::ONE))
            .await
            .unwrap();
    }

    async fn get(&self, path: &str, headers: &[(&str, &str)]) -> Response<Body> {
        let mut request = Request::get(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.service.respond(PEER, request.body(Body::empty()).unwrap()).await
    }

    async fn listen(&self, headers: &[(&str, &str)]) -> Events {
        let response = self.get("/v1/live", headers).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Events { body: response.into_body().into_data_stream(), text: String::new() }
    }
}

impl Events {
    /// Returns the next event, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let event = read(event);
                self.text = rest.to_owned();
                return Some(event);
            }
            let chunk = timeout(PATIENCE, self.body.next()).await.expect("the stream sends data")?;
            self.text.push_str(std::str::from_utf8(&chunk.unwrap()).unwrap());
        }
    }

    /// Returns the next event with this name.
    async fn next_of(&mut self, name: &str) -> Event {
        loop {
            let event = self.next().await.expect("the stream continues");
            if event.name == name {
                return event;
            }
        }
    }
}

fn read(text: &str) -> Event {
    let field = |name: &str| {
        let mut values = text.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        values.next_back().map(str::to_owned)
    };
    let data = serde_json::from_str(&field("data").unwrap()).unwrap();
    Event { name: field("event").unwrap(), id: field("id"), data }
}

fn numbers(event: &Event) -> Vec<u64> {
    event.data["seconds"]
        .as_array()
        .unwrap()
        .iter()
        .map(|second| second["number"].as_u64().unwrap())
        .collect()
}

#[tokio::test]
async fn the_stream_sends_the_history_in_parts_and_then_each_second() {
    let server = Subjected::new(Vec::new());
    server.check().await;
    server.record_seconds(MAX_SECONDS + 5);
    let mut events = server.listen(&[]).await;
    let hello = events.next().await.unwrap();
    assert_eq!(
        (&*hello.name, &hello.data["open"], &hello.data["seconds"]),
        ("hello", &true.into(), &SECONDS.into())
    );
    let rules = events.next_of("rules").await;
    assert_eq!(rules.data["rules"][0]["name"], "login-per-ip");
    let top = events.next_of("top").await;
    assert_eq!(top.data["heaviest"][0]["key"], "ip=203.0.113.9");
    let past = events.next_of("seconds").await;
    assert_eq!((numbers(&past).len(), numbers(&past)[0]), (MAX_SECONDS, 1));
    let first = &past.data["seconds"][0];
    assert_eq!((&first["allowed"], &first["rules"][0]["rule"]), (&1.into(), &"login-per-ip".into()));
    assert_eq!((&past.data["store"], &past.data["rules"]), (&"ok".into(), &"ok".into()));
    assert_eq!(numbers(&events.next_of("seconds").await).len(), 5);
    server.check().await;
    server.record_seconds(1);
    let now = events.next_of("seconds").await;
    assert_eq!(
        (numbers(&now), &now.data["seconds"][0]["allowed"]),
        (vec![MAX_SECONDS as u64 + 6], &1.into())
    );
}

#[tokio::test]
async fn a_resumed_stream_continues_after_the_last_event() {
    let server = Subjected::new(Vec::new());
    server.record_seconds(3);
    let mut events = server.listen(&[]).await;
    let id = events.next_of("seconds").await.id.unwrap();
    drop(events);
    server.record_seconds(2);
    let mut events = server.listen(&[("last-event-id", &id)]).await;
    assert_eq!(numbers(&events.next_of("seconds").await), [4, 5]);
    // from another run with the same sequence numbers
    for other in ["0123456789abcdef-3", "nonsense", ""] {
        let mut events = server.listen(&[("last-event-id", other)]).await;
        assert_eq!(numbers(&events.next_of("seconds").await), [1, 2, 3, 4, 5], "{other}");
    }
}

#[tokio::test]
async fn a_stream_shows_what_its_token_currently_allows() {
    let app = || Token::new("app", b"s3cret", CHECK);
    let ops = |may| Token::new("ops", b"other", may);
    let server = Subjected::new(vec![app(), ops(Scopes { admin: true, ..CHECK })]);
    for (authorization, status) in [(None, 401), (Some("Bearer wrong"), 403)] {
        let headers: Vec<_> = authorization.iter().map(|value| ("authorization", *value)).collect();
        assert_eq!(server.get("/v1/live", &headers).await.status(), status);
    }
    server.record_seconds(1);
    let mut events = server.listen(&[("authorization", "Bearer s3cret")]).await;
    let hello = events.next().await.unwrap();
    assert_eq!(
        (&hello.data["name"], hello.data["may"].to_string()),
        (&"app".into(), r#"["check"]"#.to_owned())
    );
    // neither rules nor keys
    assert_eq!(events.next().await.unwrap().name, "seconds");

    let mut admin = server.listen(&[("authorization", "Bearer other")]).await;
    admin.next_of("rules").await;
    admin.next_of("seconds").await;
    server.settings.access.replace(vec![app(), ops(CHECK)]);
    server.record_seconds(1);
    assert_eq!(admin.next_of("hello").await.data["may"].to_string(), r#"["check"]"#);
    assert_eq!(admin.next().await.unwrap().name, "seconds");
    server.settings.access.replace(vec![app()]);
    server.record_seconds(1);
    assert!(admin.next().await.is_none(), "the token was removed");
    assert_eq!(events.next_of("seconds").await.name, "seconds", "another token stays valid");
}

#[tokio::test]
async fn changed_rules_are_sent_when_they_become_active() {
    let server = Subjected::new(Vec::new());
    server.record_seconds(1);
    let mut events = server.listen(&[]).await;
    let before = events.next_of("rules").await.data["fingerprint"].clone();
    events.next_of("seconds").await;
    server.engine.limiter().reconfigure(demo::rules().into_iter().take(1)).unwrap();
    server.engine.observer().reloads().failed();
    server.record_seconds(1);
    let rules = events.next_of("rules").await;
    assert_eq!(rules.data["rules"].as_array().unwrap().len(), 1);
    assert_ne!(rules.data["fingerprint"], before);
    assert_eq!(events.next_of("seconds").await.data["rules"], "stale");
}

#[tokio::test]
async fn the_number_of_streams_is_limited_and_a_closed_one_frees_its_slot() {
    let server = Subjected::new(Vec::new());
    let mut all = Vec::new();
    for _ in 0..MAX_LISTENERS {
        all.push(server.listen(&[]).await);
    }
    let rejected = server.get("/v1/live", &[]).await;
    assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
    let problem: Value =
        serde_json::from_slice(&to_bytes(rejected.into_body(), 1 << 10).await.unwrap()).unwrap();
    assert!(
        problem["detail"].as_str().unwrap().starts_with("the limit of 64 listeners is reached"),
        "{problem}"
    );
    all.pop();
    sluicegate_testkit::wait::until_async("a slot is free again", PATIENCE, async || {
        server.get("/v1/live", &[]).await.status() == StatusCode::OK
    })
    .await;
}

/// More data than the system buffers for a client that does not read.
const EVENTS: usize = 100;
const RULES: usize = 1_000;

// on tokio's paused clock, which advances while all tasks are idle
#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_loses_its_connection_and_slot() {
    let subjected = Subjected::new(Vec::new());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(server::run(listener, subjected.service.clone(), AcceptConfig::default()));
    let mut deaf = TcpStream::connect(address).await.unwrap();
    deaf.write_all(b"GET /v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    deaf.read_exact(&mut [0; 12]).await.unwrap();
    let mut others = Vec::new();
    for _ in 1..MAX_LISTENERS {
        others.push(subjected.listen(&[]).await);
    }
    let limit = demo::rules().remove(0).limit;
    for _ in 0..EVENTS {
        let rules = (0..RULES).map(|number| Rule::new(&format!("rule-{number}"), limit));
        subjected.engine.limiter().reconfigure(rules).unwrap();
        subjected.record_seconds(1);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(subjected.get("/v1/live", &[]).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    tokio::time::sleep(WRITE_TIMEOUT).await;
    assert_eq!(subjected.get("/v1/live", &[]).await.status(), StatusCode::OK);
    let mut rest = Vec::new();
    // a reset also ends the connection
    let _read = timeout(PATIENCE, deaf.read_to_end(&mut rest)).await.expect("the connection is closed");
}

#[tokio::test]
async fn a_draining_server_ends_all_streams_at_once() {
    let server = Subjected::new(Vec::new());
    let mut events = server.listen(&[]).await;
    events.next_of("hello").await;
    server.settings.shutdown.drain();
    while events.next().await.is_some() {}
    let rejected = server.get("/v1/live", &[]).await;
    assert_eq!(rejected.status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_streams_do_not_delay_the_shutdown() {
    let subjected = Subjected::new(Vec::new());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = subjected.settings.shutdown.clone();
    let config = AcceptConfig { shutdown: shutdown.clone(), ..AcceptConfig::default() };
    let running = tokio::spawn(server::run(listener, subjected.service.clone(), config));
    let mut streams = Vec::new();
    for _ in 0..5 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
        streams.push(stream);
    }
    shutdown.stop();
    // far less than what requests in flight are given
    timeout(Duration::from_secs(5), running).await.expect("it ends soon").unwrap();
    for stream in &mut streams {
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert!(rest.ends_with(b"0\r\n\r\n"), "the response is complete");
    }
}

#[tokio::test]
async fn the_page_needs_no_token_and_loads_only_from_this_server() {
    let server = Subjected::new(vec![Token::new("app", b"s3cret", CHECK)]);
    // under any host name and without a token, since it contains no data
    let page = server.get("/", &[("host", "limits.example"), ("sec-fetch-site", "none")]).await;
    assert_eq!(page.status(), StatusCode::OK);
    let policy = page.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    let html = String::from_utf8(to_bytes(page.into_body(), 1 << 20).await.unwrap().into()).unwrap();
    assert!(!html.contains("://") && !html.contains(" style=") && !html.contains(" onclick="));
    let mut assets: Vec<_> =
        html.split('"').filter(|part| part.starts_with("/assets/")).map(str::to_owned).collect();
    assets.extend(
        ["live", "series", "charts", "tables", "try", "timeline", "format"]
            .map(|name| format!("/assets/{name}.js")),
    );
    for path in assets {
        let asset = server.get(&path, &[]).await;
        assert_eq!(asset.status(), StatusCode::OK, "{path}");
        let kind = match path.rsplit('.').next().unwrap() {
            "css" => "text/css; charset=utf-8",
            "js" => "text/javascript; charset=utf-8",
            _ => "image/svg+xml",
        };
        assert_eq!(asset.headers()[header::CONTENT_TYPE], kind, "{path}");
        assert_eq!(asset.headers()[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
        let tag = asset.headers()[header::ETAG].to_str().unwrap();
        let known = server.get(&path, &[("if-none-match", &format!("\"other\", W/{tag}"))]).await;
        assert_eq!(known.status(), StatusCode::NOT_MODIFIED, "{path}");
        assert!(to_bytes(known.into_body(), 1 << 20).await.unwrap().is_empty());
        assert_eq!(server.get(&path, &[("if-none-match", "\"other\"")]).await.status(), StatusCode::OK);
    }
    assert_eq!(server.get("/assets/nothing.js", &[]).await.status(), StatusCode::NOT_FOUND);
}
