//! gRPC connections: their bounds, timeouts and shutdown. Most tests pause tokio's clock, which then advances whenever all tasks wait.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    convert::Infallible,
    io::ErrorKind,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Bytes, HttpBody};
use hyper::body::Frame;
use sluicegate::{Limit, Limiter, Options, Rule};
use sluicegate_server::{
    grpc::{
        MAX_SMALL_MESSAGE, Settings,
        messages::Code,
        server::{
            CALL_TIMEOUT, FIRST_CALL_TIMEOUT, IDLE_TIMEOUT, MAX_CONCURRENT_READS, MAX_CONNECTIONS, MAX_HEAD,
            MAX_STREAMS, MIN_STREAMS,
        },
    },
    net::{
        connection_limit::REAP_INTERVAL, listener::raise_open_files_limit, shutdown::SHUTDOWN_GRACE,
        stream::WRITE_TIMEOUT,
    },
};
use sluicegate_testkit::gated_store::GatedStore;
use sluicegate_testkit::wait::{PATIENCE, until_async};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};
use tonic::codegen::Service;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::grpc_front::{Front, OnMemory, descriptor, request};

/// Timers fire on whole milliseconds, and HTTP/2 pings may fire first.
const SLACK: Duration = Duration::from_millis(10);

/// The reaper is late by up to its interval, and a connection without calls then has its grace.
const CLOSE_SLACK: Duration = Duration::from_secs(2).saturating_add(REAP_INTERVAL);

/// The start of an HTTP/2 connection: the preface and empty settings.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The types of HTTP/2 frames, and a flag.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const END_STREAM: u8 = 1;

/// Returns how long the server takes to close a connection.
async fn time_to_close(stream: &mut TcpStream) -> Duration {
    let begun = Instant::now();
    let mut sent = Vec::new();
    // It may be reset.
    let _read = tokio::time::timeout(2 * IDLE_TIMEOUT, stream.read_to_end(&mut sent)).await.unwrap();
    begun.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_sends_nothing_is_closed() {
    let front = OnMemory::start([]).await.front;
    let mut silent = TcpStream::connect(front.address).await.unwrap();
    let took = time_to_close(&mut silent).await;
    assert!(took >= FIRST_CALL_TIMEOUT && took <= FIRST_CALL_TIMEOUT + CLOSE_SLACK, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_sends_only_the_preface_is_closed() {
    let front = OnMemory::start([]).await.front;
    let mut preface_only = TcpStream::connect(front.address).await.unwrap();
    preface_only.write_all(PREFACE).await.unwrap();
    let took = time_to_close(&mut preface_only).await;
    assert!(took <= FIRST_CALL_TIMEOUT + CLOSE_SLACK, "{took:?}");
}

#[tokio::test]
async fn a_client_of_another_protocol_is_disconnected() {
    let front = OnMemory::start([]).await.front;
    let mut http1 = TcpStream::connect(front.address).await.unwrap();
    http1.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert!(time_to_close(&mut http1).await < Duration::from_secs(5));
}

#[tokio::test(start_paused = true)]
async fn idle_connections_are_evicted_for_new_ones() {
    raise_open_files_limit();
    let mut front = OnMemory::start([]).await.front;
    let mut silent = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        // The server has accepted it.
        stream.read_exact(&mut [0]).await.unwrap();
        silent.push(stream);
    }
    let begun = Instant::now();
    front.call(request("d", vec![descriptor([("a", "x")])])).await.unwrap();
    assert!(begun.elapsed() <= Duration::from_secs(1) + 20 * SLACK, "{:?}", begun.elapsed());
    assert!(time_to_close(&mut silent[0]).await <= SLACK);
}

/// Returns the number of concurrent streams in the server's settings.
async fn streams(stream: &mut TcpStream) -> u32 {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    let mut settings = vec![0; usize::from(head[2])];
    stream.read_exact(&mut settings).await.unwrap();
    let mut settings = settings.chunks_exact(6).map(|setting| setting.split_at(2));
    let (_, most) = settings.find(|(name, _)| *name == [0, 3]).unwrap();
    u32::from_be_bytes(most.try_into().unwrap())
}

#[tokio::test]
async fn the_more_connections_the_fewer_streams_each_may_have() {
    raise_open_files_limit();
    let front = OnMemory::start([]).await.front;
    let mut open = Vec::new();
    let mut total = 0;
    for number in 0..MAX_CONNECTIONS {
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        let streams = streams(&mut stream).await;
        assert!((MIN_STREAMS..=MAX_STREAMS).contains(&streams), "{streams}");
        assert!(number > 0 || streams == MAX_STREAMS, "the first connection gets the maximum");
        total += streams;
        open.push(stream);
    }
    assert!(total < 70_000, "{total}");
    open.clear();
    // Closed connections return their share.
    until_async("a new connection gets the maximum", PATIENCE, async || {
        let mut stream = TcpStream::connect(front.address).await.unwrap();
        stream.write_all(PREFACE).await.unwrap();
        streams(&mut stream).await == MAX_STREAMS
    })
    .await;
}

/// Returns the HEADERS frame of a call on this stream.
fn head(stream: u32) -> Vec<u8> {
    // POST, http, a path, an authority and a content type, by their indexes in the static table of RFC 7541.
    let path = b"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let length = u8::try_from(path.len()).unwrap();
    let fields = [&[0x83, 0x86, 0x04, length], &path[..], b"\x01\x01a\x0f\x10\x10application/grpc"].concat();
    frame(1, 4, stream, &fields)
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// Reads the next frame, and returns by how many bytes it extends the connection's window.
async fn window_update(stream: &mut TcpStream) -> usize {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    let mut payload = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
    stream.read_exact(&mut payload).await.unwrap();
    let is_for_connection = head[3] == 8 && head[5..] == [0; 4];
    if is_for_connection { u32::from_be_bytes(payload.try_into().unwrap()) as usize } else { 0 }
}

#[tokio::test(start_paused = true)]
async fn incomplete_calls_take_bounded_memory() {
    const CHUNK: usize = 16_000;
    let mut front = OnMemory::start([]).await.front;
    let mut stalled = TcpStream::connect(front.address).await.unwrap();
    stalled.write_all(PREFACE).await.unwrap();
    let begun = Instant::now();
    let (mut window, mut sent) = (65_535, 0);
    'all: for stream in (1..200).step_by(2) {
        stalled.write_all(&head(stream)).await.unwrap();
        for chunk in 0..4 {
            while window < CHUNK {
                match timeout(CALL_TIMEOUT / 2, window_update(&mut stalled)).await {
                    Ok(more) => window += more,
                    Err(_) => break 'all,
                }
            }
            let mut bytes = vec![b'a'; CHUNK];
            if chunk == 0 {
                // The prefix of a message that is nearly as large as a small one may be.
                bytes[..5].copy_from_slice(&[0, 0, 0, 0xff, 0]);
            }
            stalled.write_all(&frame(0, 0, stream, &bytes)).await.unwrap();
            (window, sent) = (window - CHUNK, sent + CHUNK);
        }
    }
    assert!(sent <= 2 * MAX_CONCURRENT_READS * MAX_SMALL_MESSAGE, "{sent}");
    // Another connection has its own read permits.
    front.call(request("d", vec![descriptor([("a", "x")])])).await.unwrap();
    assert!(begun.elapsed() < CALL_TIMEOUT, "{:?}", begun.elapsed());
}

/// A PING frame, which the server must acknowledge.
const PING: &[u8] = b"\0\0\x08\x06\0\0\0\0\0anybody?";

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_is_disconnected() {
    let front = OnMemory::start([]).await.front;
    let mut stream = TcpStream::connect(front.address).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    let pings = PING.repeat(10_000);
    let begun = Instant::now();
    // Until the buffers of both sides are full, and then until the write timeout.
    let error = loop {
        let sent = timeout(2 * WRITE_TIMEOUT, stream.write_all(&pings)).await;
        if let Err(error) = sent.expect("the connection is closed") {
            break error;
        }
    };
    assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
    assert!(begun.elapsed() <= WRITE_TIMEOUT + SLACK, "{:?}", begun.elapsed());
}

/// Envoy resets the calls of end clients that disconnect, which may be many at a time.
#[tokio::test]
async fn calls_that_are_reset_at_the_same_time_leave_the_connection_open() {
    const CANCEL: [u8; 4] = 8_u32.to_be_bytes();
    let front = OnMemory::start([]).await.front;
    let mut stream = TcpStream::connect(front.address).await.unwrap();
    let mut sent = PREFACE.to_vec();
    let mut ids = (0..).map(|call| 2 * call + 1);
    for id in ids.by_ref().take(MAX_STREAMS as usize) {
        sent.extend(head(id));
        sent.extend(frame(RST_STREAM, 0, id, &CANCEL));
    }
    let last = ids.next().unwrap();
    sent.extend(head(last));
    sent.extend(frame(DATA, END_STREAM, last, &[]));
    stream.write_all(&sent).await.unwrap();
    loop {
        let mut header = [0; 9];
        timeout(PATIENCE, stream.read_exact(&mut header)).await.unwrap().unwrap();
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let id = u32::from_be_bytes([header[5], header[6], header[7], header[8]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).await.unwrap();
        assert_ne!(header[3], GOAWAY, "{}", String::from_utf8_lossy(&payload));
        if (header[3], id) == (HEADERS, last) {
            break;
        }
    }
}

/// A body that never arrives.
struct Never;

impl HttpBody for Never {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_never_arrives_times_out() {
    let mut front = OnMemory::start([]).await.front;
    // Opens the connection.
    front.call(request("d", vec![descriptor([("a", "x")])])).await.unwrap();
    let call = http::Request::post("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        .header("content-type", "application/grpc")
        .body(tonic::body::Body::new(Never))
        .unwrap();
    let begun = Instant::now();
    std::future::poll_fn(|context| front.channel.poll_ready(context)).await.unwrap();
    let answer = front.channel.call(call).await.unwrap();
    let took = begun.elapsed();
    assert_eq!(answer.headers()["grpc-status"], "4", "DEADLINE_EXCEEDED");
    assert!(took >= CALL_TIMEOUT && took <= CALL_TIMEOUT + SLACK, "{took:?}");
}

#[tokio::test]
async fn a_head_over_its_limit_is_rejected_and_the_next_call_is_answered() {
    let mut front = OnMemory::start([]).await.front;
    let mut large = tonic::Request::new(request("d", vec![descriptor([("a", "x")])]));
    large.metadata_mut().insert("x-large", "x".repeat(MAX_HEAD as usize).parse().unwrap());
    assert!(front.client.should_rate_limit(large).await.is_err());
    assert!(front.call(request("d", vec![descriptor([("a", "x")])])).await.is_ok());
}

/// The grace of connections that have not sent a call.
const QUIET_GRACE: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_shutdown_finishes_calls_in_flight_and_rejects_connections() {
    let store = GatedStore::closed();
    let rules = [Rule::new("r", Limit::sliding_log(5, Duration::from_secs(60)).unwrap())];
    let options = Options::default().deadline(SHUTDOWN_GRACE);
    let mut front = Front::start(
        Limiter::builder().store(Arc::clone(&store)).rules(rules).options(options).build().unwrap(),
        Settings::default(),
    )
    .await;
    let mut client = front.client.clone();
    let call =
        tokio::spawn(
            async move { client.should_rate_limit(request("d", vec![descriptor([("a", "x")])])).await },
        );
    store.received().await;

    front.shutdown.stop();
    let rejected = async {
        while TcpStream::connect(front.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(SHUTDOWN_GRACE / 2, rejected).await.unwrap();
    // A connection whose first call is in flight has more than the grace of a connection without calls.
    tokio::time::pause();
    tokio::time::advance(2 * QUIET_GRACE).await;
    tokio::time::resume();
    assert!(!front.server.is_finished());
    store.permit(1);
    let answer = call.await.unwrap().unwrap().into_inner();
    assert_eq!((answer.overall_code(), answer.statuses[0].limit_remaining), (Code::Ok, 4));
    tokio::time::timeout(SHUTDOWN_GRACE / 2, &mut front.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn idle_connections_do_not_delay_a_shutdown() {
    let mut front = OnMemory::start([]).await.front;
    front.call(request("d", vec![descriptor([("a", "x")])])).await.unwrap();
    let _silent = TcpStream::connect(front.address).await.unwrap();
    let mut preface_only = TcpStream::connect(front.address).await.unwrap();
    preface_only.write_all(PREFACE).await.unwrap();
    let mut first = [0];
    preface_only.read_exact(&mut first).await.unwrap();
    front.shutdown.stop();
    tokio::time::timeout(SHUTDOWN_GRACE / 2, front.server).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_health_watcher_is_notified_of_a_shutdown() {
    let front = OnMemory::start([]).await.front;
    let mut health = HealthClient::new(front.channel.clone());
    let health_check = HealthCheckRequest { service: "ratelimit".to_owned() };
    let mut watched = health.watch(health_check).await.unwrap().into_inner();
    assert_eq!(watched.message().await.unwrap().unwrap().status().as_str_name(), "SERVING");
    front.shutdown.stop();
    assert_eq!(watched.message().await.unwrap().unwrap().status().as_str_name(), "NOT_SERVING");
}
