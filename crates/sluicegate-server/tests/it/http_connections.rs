//! HTTP connections over real sockets. Most tests pause tokio's clock, which then advances whenever all tasks wait.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    fs,
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    num::NonZeroUsize,
    sync::Arc,
    time::Duration,
};

use sluicegate::{Limiter, MemoryStore, Options};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Tls, Token},
    demo,
    engine::Engine,
    http::{self, HttpService, server::IDLE_TIMEOUT},
    net::{
        acceptor::AcceptConfig,
        connection_limit::{INCOMPLETE_REQUEST_TIMEOUT, REAP_INTERVAL},
        shutdown::{SHUTDOWN_GRACE, Shutdown},
        stream::WRITE_TIMEOUT,
        tls::{HANDSHAKE_TIMEOUT, TlsAcceptor},
    },
};
use sluicegate_testkit::gated_store::GatedStore;
use sluicegate_testkit::tls::Certificates;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    task::{JoinHandle, JoinSet, yield_now},
    time::{Instant, timeout},
};

/// Timers fire on whole milliseconds.
const TICK: Duration = Duration::from_millis(1);

struct Running {
    address: SocketAddr,
    shutdown: Shutdown,
    server: JoinHandle<()>,
}

async fn start() -> Running {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap());
    run(HttpService::new(engine, http::Settings::default()), AcceptConfig::default()).await
}

/// A server whose checks a remote store decides when the test permits it.
async fn start_gated(store: &Arc<GatedStore>) -> Running {
    let options = Options::default().deadline(10 * IDLE_TIMEOUT);
    let engine = Engine::new(
        Limiter::builder().store(Arc::clone(store)).rules(demo::rules()).options(options).build().unwrap(),
    );
    run(HttpService::new(engine, http::Settings::default()), AcceptConfig::default()).await
}

fn login() -> String {
    let body = demo::LOGIN;
    format!("POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

async fn run(service: HttpService, config: AcceptConfig) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, shutdown) = (listener.local_addr().unwrap(), config.shutdown.clone());
    let server = tokio::spawn(http::server::run(listener, service, config));
    Running { address, shutdown, server }
}

async fn send(address: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

async fn rest(stream: &mut TcpStream) -> String {
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

/// Returns how long the server takes to close the connection, and asserts that it sends nothing.
async fn time_to_close(stream: &mut TcpStream) -> Duration {
    let begin = Instant::now();
    assert_eq!(timeout(2 * IDLE_TIMEOUT, rest(stream)).await.unwrap(), "");
    begin.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_connection_is_closed_if_its_head_is_not_complete_in_time() {
    const HALF: &str = "POST /v1/check HTTP/1.1\r\nhost: a\r\n";
    let running = start().await;
    let mut stream = send(running.address, "").await;
    assert_timed_out(time_to_close(&mut stream).await);
    let mut stream = send(running.address, HALF).await;
    assert_incomplete(time_to_close(&mut stream).await);
    // further bytes do not extend the time, even after a request
    let mut stream = send(running.address, "").await;
    check(&mut stream).await;
    stream.write_all(HALF.as_bytes()).await.unwrap();
    let half_the_time = INCOMPLETE_REQUEST_TIMEOUT / 2;
    tokio::time::sleep(half_the_time).await;
    stream.write_all(b"x: y\r\n").await.unwrap();
    assert_incomplete(half_the_time + time_to_close(&mut stream).await);
}

fn assert_incomplete(took: Duration) {
    let range = INCOMPLETE_REQUEST_TIMEOUT..=INCOMPLETE_REQUEST_TIMEOUT + 2 * REAP_INTERVAL;
    assert!(range.contains(&(took + TICK)), "{took:?}");
}

fn assert_timed_out(took: Duration) {
    assert!(took <= IDLE_TIMEOUT + REAP_INTERVAL + TICK && took + TICK >= IDLE_TIMEOUT, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_and_a_used_one_is_not() {
    let running = start().await;
    let mut stream = send(running.address, "").await;
    for _ in 0..5 {
        tokio::time::sleep(IDLE_TIMEOUT * 9 / 10).await;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let mut response = Vec::new();
        while !response.ends_with(b"\r\n\r\nok") {
            assert_ne!(stream.read_buf(&mut response).await.unwrap(), 0, "the connection is open");
        }
    }
    assert_timed_out(time_to_close(&mut stream).await);
}

/// Sends a check on a connection and waits for its response.
async fn check(stream: &mut TcpStream) {
    stream.write_all(login().as_bytes()).await.unwrap();
    let mut response = Vec::new();
    while !response.ends_with(b"}]}") {
        assert_ne!(stream.read_buf(&mut response).await.unwrap(), 0, "the connection is open");
    }
}

// On the real clock: a paused one would advance while bytes are in transit.
#[tokio::test]
async fn an_address_that_keeps_all_connections_busy_loses_one_to_another() {
    const CONNECTIONS: usize = 8;
    let engine = Engine::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap());
    let max_connections = NonZeroUsize::new(CONNECTIONS);
    let config = AcceptConfig { max_connections, ..AcceptConfig::default() };
    let running = run(HttpService::new(engine, http::Settings::default()), config).await;
    let mut busy = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(running.address).await.unwrap();
        check(&mut stream).await;
        busy.spawn(async move {
            while stream.write_all(login().as_bytes()).await.is_ok()
                && stream.read(&mut [0; 4 << 10]).await.is_ok_and(|count| count > 0)
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    let mut others = Vec::new();
    for _ in 0..CONNECTIONS / 2 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut other = socket.connect(running.address).await.unwrap();
        timeout(Duration::from_secs(10), check(&mut other)).await.expect("a busy connection is evicted");
        others.push(other);
    }
    let half_are_closed = async {
        for _ in 0..CONNECTIONS / 2 {
            busy.join_next().await;
        }
    };
    timeout(Duration::from_secs(10), half_are_closed).await.unwrap();
    check(&mut others[0]).await;
    assert!(busy.try_join_next().is_none(), "the others are open");
}

/// Far more connections than slots and pending connections. If they were served in order, the other address would wait for each of them
/// to be idle for a second.
#[tokio::test]
async fn an_address_that_opens_too_many_connections_delays_no_other_address() {
    const CONNECTIONS: usize = 8;
    let engine = Engine::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap());
    let config = AcceptConfig { max_connections: NonZeroUsize::new(CONNECTIONS), ..AcceptConfig::default() };
    let running = run(HttpService::new(engine, http::Settings::default()), config).await;
    let mut idle = Vec::new();
    for _ in 0..40 * CONNECTIONS {
        idle.push(TcpStream::connect(running.address).await.unwrap());
    }
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = socket.connect(running.address).await.unwrap();
    timeout(Duration::from_secs(10), check(&mut other)).await.expect("an idle connection is evicted");
}

#[tokio::test(start_paused = true)]
async fn a_response_may_take_longer_than_the_next_head() {
    let store = GatedStore::closed();
    let running = start_gated(&store).await;
    let mut stream = send(running.address, &login()).await;
    store.received().await;
    tokio::time::sleep(3 * IDLE_TIMEOUT).await;
    store.permit(1);
    let mut response = Vec::new();
    while !response.ends_with(b"}]}") {
        assert_ne!(stream.read_buf(&mut response).await.unwrap(), 0, "the connection is open");
    }
    assert!(response.starts_with(b"HTTP/1.1 200 OK"));
    assert_timed_out(time_to_close(&mut stream).await);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_responses_is_disconnected() {
    let running = start().await;
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    let requests = "GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(1_000);
    let begin = Instant::now();
    // Until the buffers of both sides are full, and then until the write timeout.
    let error = loop {
        let sent = timeout(2 * WRITE_TIMEOUT, stream.write_all(requests.as_bytes())).await;
        if let Err(error) = sent.expect("the connection is closed") {
            break error;
        }
    };
    assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    assert!(begin.elapsed() <= WRITE_TIMEOUT + TICK, "{:?}", begin.elapsed());
}

/// A server that accepts this token.
async fn start_with_token() -> Running {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap());
    let access = Access::new(vec![Token::new("app", b"s3cret", Scopes::ALL)]);
    run(
        HttpService::new(engine, http::Settings { access, ..http::Settings::default() }),
        AcceptConfig::default(),
    )
    .await
}

/// Reads the head of a response, and its body of the given length.
async fn response(stream: &mut TcpStream) -> String {
    let mut received = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&received).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n")
            && let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length: "))
            && body.len() >= length.parse().unwrap()
        {
            return text;
        }
        assert_ne!(stream.read_buf(&mut received).await.unwrap(), 0, "the connection is open: {text}");
    }
}

// On the real clock: a paused one would advance while bytes are in transit.
#[tokio::test]
async fn a_rejected_request_whose_body_arrives_later_keeps_the_connection_open() {
    let running = start_with_token().await;
    let body = demo::LOGIN;
    let head = |call: &str, token: &str| {
        let length = body.len();
        format!("{call} HTTP/1.1\r\nhost: a\r\n{token}content-length: {length}\r\n\r\n")
    };
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    for (call, token, status) in [
        ("POST /v1/check", "", "401 Unauthorized"),
        ("POST /v1/reset", "authorization: Bearer other\r\n", "403 Forbidden"),
        ("PUT /v1/check", "", "405 Method Not Allowed"),
        ("POST /v1/auth", "", "401 Unauthorized"),
        ("POST /v1/unknown", "", "404 Not Found"),
        ("POST /v1/check", "authorization: Bearer s3cret\r\n", "200 OK"),
    ] {
        stream.write_all(head(call, token).as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.write_all(body.as_bytes()).await.unwrap();
        let response = timeout(Duration::from_secs(10), response(&mut stream)).await.unwrap();
        assert!(response.starts_with(&format!("HTTP/1.1 {status}")), "{call}: {response}");
        assert!(!response.contains("connection: close"), "{call}: {response}");
    }
}

#[tokio::test]
async fn a_rejection_whose_body_does_not_arrive_announces_that_the_connection_is_closed() {
    let running = start_with_token().await;
    let too_large = http::MAX_BODY + 1;
    for (head, sent) in [
        ("content-length: 10\r\n\r\n".to_owned(), 0),
        ("content-length: 10\r\nexpect: 100-continue\r\n\r\n".to_owned(), 0),
        (format!("content-length: {}\r\n\r\n", 2 * too_large), too_large),
    ] {
        let mut stream =
            send(running.address, &format!("POST /v1/check HTTP/1.1\r\nhost: a\r\n{head}")).await;
        stream.write_all(&vec![b' '; sent]).await.unwrap();
        let response = timeout(Duration::from_secs(10), response(&mut stream)).await.unwrap();
        assert!(response.starts_with("HTTP/1.1 401 Unauthorized"), "{head}: {response}");
        assert!(response.contains("connection: close\r\n"), "{head}: {response}");
    }
}

// On the real clock: a paused one would advance while bytes are in transit.
#[tokio::test]
async fn a_shutdown_finishes_requests_in_flight_and_rejects_connections() {
    let running = start().await;
    let (begin, end) = demo::LOGIN.split_at(10);
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n", demo::LOGIN.len());
    let mut stream = send(running.address, &format!("{head}expect: 100-continue\r\n\r\n")).await;
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(begin.as_bytes()).await.unwrap();

    running.shutdown.stop();
    let rejected = async {
        while TcpStream::connect(running.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SHUTDOWN_GRACE / 2, rejected).await.unwrap();
    assert!(!running.server.is_finished());
    stream.write_all(end.as_bytes()).await.unwrap();
    let response = rest(&mut stream).await;
    assert!(
        response.starts_with("HTTP/1.1 200 OK\r\n") && response.contains(r#"{"allowed":true"#),
        "{response}"
    );
    running.server.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_after_its_grace() {
    let store = GatedStore::closed();
    let running = start_gated(&store).await;
    let _stream = send(running.address, &login()).await;
    store.received().await;
    let begin = Instant::now();
    running.shutdown.stop();
    running.server.await.unwrap();
    let took = begin.elapsed();
    assert!(took <= SHUTDOWN_GRACE + TICK && took + TICK >= SHUTDOWN_GRACE, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_incomplete_handshake_does_not_delay_a_shutdown() {
    let directory = tempfile::tempdir().unwrap();
    let files = Certificates::issue(directory.path(), IpAddr::from([127, 0, 0, 1]));
    let (cert, key) = (fs::read(files.server_certificate).unwrap(), fs::read(files.server_key).unwrap());
    let tls = TlsAcceptor::new(Some(&Tls { cert, key, client_ca: None })).unwrap();
    let engine = Engine::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let service = HttpService::new(engine, http::Settings::default());
    let running = run(service, AcceptConfig { tls, ..AcceptConfig::default() }).await;
    // The beginning of a record of 512 bytes.
    let mut stream = send(running.address, "\x16\x03\x01\x02\x00\x01").await;
    let begin = Instant::now();
    tokio::time::sleep(HANDSHAKE_TIMEOUT / 10).await;
    running.shutdown.stop();
    running.server.await.unwrap();
    assert!(begin.elapsed() <= HANDSHAKE_TIMEOUT / 4, "{:?}", begin.elapsed());
    assert_eq!(rest(&mut stream).await, "");
}

#[tokio::test]
async fn an_idle_connection_does_not_delay_a_shutdown() {
    let running = start().await;
    let mut stream = send(running.address, "GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut status = [0; 15];
    stream.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200 OK");
    running.shutdown.stop();
    tokio::time::timeout(SHUTDOWN_GRACE / 2, running.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_large_batch_yields_to_other_tasks() {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let checks = vec![r#"{"key":"k","limit":{"amount":1,"window":"1s"}}"#; http::MAX_CHECKS].join(",");
    let body = format!(r#"{{"checks":[{checks}]}}"#).into_bytes();
    let service = HttpService::new(engine, http::Settings::default());
    let batch = tokio::spawn(async move { service.post("/v1/check", body).await });
    // The batch runs first, then this task.
    yield_now().await;
    assert!(!batch.is_finished());
    assert_eq!(batch.await.unwrap().0.as_u16(), 200);
}
