//! Connections over real sockets, on tokio's clock: it moves on by itself whenever everybody waits.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

use std::{
    fs,
    future::pending,
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use axum::{Router, routing::get};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, oneshot},
    task::{JoinHandle, yield_now},
    time::{Instant, timeout},
};
use tollgate::{Limiter, MemoryStore};
use tollgate_server::{
    config::Tls,
    demo,
    desk::Desk,
    http,
    http::server::{HEAD_TIMEOUT, Server},
    net::acceptor::{Reception, SHUTDOWN_GRACE},
    net::{
        stream::WRITE_TIMEOUT,
        tls::{HANDSHAKE_TIMEOUT, TlsAcceptor},
    },
};
use tollgate_testkit::tls::Certificates;

/// Timers fire on whole milliseconds.
const TICK: Duration = Duration::from_millis(1);

struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

async fn start() -> Running {
    run(http::router(Desk::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap()))).await
}

async fn run(routes: Router) -> Running {
    let server = Server::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = server.address();
    let (stop, stopped) = oneshot::channel();
    let server = tokio::spawn(server.run(routes, async { stopped.await.unwrap() }));
    Running { address, stop, server }
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

/// How long the server takes to end the connection, having sent nothing.
async fn time_to_end(stream: &mut TcpStream) -> Duration {
    let begin = Instant::now();
    assert_eq!(tokio::time::timeout(2 * HEAD_TIMEOUT, rest(stream)).await.unwrap(), "");
    begin.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_head_that_is_never_finished_ends_the_connection() {
    let running = start().await;
    for unfinished in ["", "POST /v1/check HTTP/1.1\r\nhost: a\r\n"] {
        let mut stream = send(running.address, unfinished).await;
        let took = time_to_end(&mut stream).await;
        assert!(took <= HEAD_TIMEOUT + TICK && took + TICK >= HEAD_TIMEOUT, "{unfinished:?}: {took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_does_not_read_the_answers_is_left() {
    let running = start().await;
    let mut deaf = TcpStream::connect(running.address).await.unwrap();
    let questions = "GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(1_000);
    let begin = Instant::now();
    // until the buffers of both sides are full, and then for as long as the server has patience
    let error = loop {
        let sent = timeout(2 * WRITE_TIMEOUT, deaf.write_all(questions.as_bytes())).await;
        if let Err(error) = sent.expect("the connection is ended") {
            break error;
        }
    };
    assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    assert!(begin.elapsed() <= WRITE_TIMEOUT + TICK, "{:?}", begin.elapsed());
}

// on the real clock: a paused one would run ahead of the bytes on their way
#[tokio::test]
async fn stopping_lets_a_request_in_flight_finish_and_takes_no_more() {
    let running = start().await;
    let (begin, end) = demo::LOGIN.split_at(10);
    let head = format!("POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n", demo::LOGIN.len());
    let mut stream = send(running.address, &format!("{head}expect: 100-continue\r\n\r\n")).await;
    let mut asked_for = [0; 25];
    stream.read_exact(&mut asked_for).await.unwrap();
    assert_eq!(&asked_for, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(begin.as_bytes()).await.unwrap();

    running.stop.send(()).unwrap();
    let turned_away = async {
        while TcpStream::connect(running.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SHUTDOWN_GRACE / 2, turned_away).await.unwrap();
    assert!(!running.server.is_finished());
    stream.write_all(end.as_bytes()).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains(r#"{"allowed":true"#), "{answer}");
    running.server.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn stopping_does_not_wait_for_ever() {
    let (asked, mut arrived) = mpsc::channel(1);
    let never = async move || {
        asked.send(()).await.unwrap();
        pending::<()>().await;
    };
    let running = run(Router::new().route("/", get(never))).await;
    let _stream = send(running.address, "GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    arrived.recv().await.unwrap();
    let begin = Instant::now();
    running.stop.send(()).unwrap();
    running.server.await.unwrap();
    let took = begin.elapsed();
    assert!(took <= SHUTDOWN_GRACE + TICK && took + TICK >= SHUTDOWN_GRACE, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_is_never_finished_does_not_delay_stopping() {
    let directory = tempfile::tempdir().unwrap();
    let files = Certificates::issue(directory.path(), IpAddr::from([127, 0, 0, 1]));
    let (cert, key) = (fs::read(files.server_certificate).unwrap(), fs::read(files.server_key).unwrap());
    let tls = TlsAcceptor::new(Some(&Tls { cert, key, client_ca: None })).unwrap();
    let server = Server::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let server = server.receiving(Reception { tls, ..Reception::default() });
    // a record of 512 bytes begins
    let mut stream = send(server.address(), "\x16\x03\x01\x02\x00\x01").await;
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(server.run(Router::new(), async { stopped.await.unwrap() }));
    let begin = Instant::now();
    tokio::time::sleep(HANDSHAKE_TIMEOUT / 10).await;
    stop.send(()).unwrap();
    server.await.unwrap();
    assert!(begin.elapsed() <= HANDSHAKE_TIMEOUT / 4, "{:?}", begin.elapsed());
    assert_eq!(rest(&mut stream).await, "");
}

#[tokio::test]
async fn an_idle_connection_does_not_delay_stopping() {
    let running = start().await;
    let mut stream = send(running.address, "GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut status = [0; 15];
    stream.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200 OK");
    running.stop.send(()).unwrap();
    tokio::time::timeout(SHUTDOWN_GRACE / 2, running.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn others_have_their_turn_while_many_checks_are_decided() {
    let desk = Desk::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let checks = vec![r#"{"key":"k","limit":{"amount":1,"window":"1s"}}"#; http::MAX_CHECKS].join(",");
    let body = format!(r#"{{"checks":[{checks}]}}"#).into_bytes();
    let batch = tokio::spawn(async move { http::call(desk, "/v1/check", body).await });
    // theirs is the first turn, and this the next
    yield_now().await;
    assert!(!batch.is_finished());
    assert_eq!(batch.await.unwrap().0.as_u16(), 200);
}
