//! The delay proxy delivers every byte, in order, and not earlier than configured. No test asserts a tight upper bound.
#![expect(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use sluicegate_testkit::delay_proxy::{DelayProxy, MAX_HELD_LEN};
use sluicegate_testkit::wait;

/// Connections of the load test: four sockets each, within the usual limit of 1024 open files.
const CONNECTIONS: u64 = 200;
/// Bytes sent over each of them.
const LEN: usize = 128 * 1024;

/// Starts a server that handles each connection on a separate thread.
fn serve(handle: fn(TcpStream)) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            thread::spawn(move || handle(stream));
        }
    });
    addr
}

/// Sends everything back, and ends when the client does.
fn echo(stream: TcpStream) {
    let _ = std::io::copy(&mut &stream, &mut &stream);
    let _ = stream.shutdown(Shutdown::Write);
}

fn connect(proxy: &DelayProxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.addr()).unwrap();
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(wait::PATIENCE)).unwrap();
    stream.set_write_timeout(Some(wait::PATIENCE)).unwrap();
    stream
}

#[expect(clippy::disallowed_methods, reason = "the delay of real traffic is measured in real time")]
fn timed(action: impl FnOnce()) -> Duration {
    let start = Instant::now();
    action();
    start.elapsed()
}

/// Sends one byte and waits for its echo.
fn exchange(mut stream: &TcpStream) {
    stream.write_all(b"x").unwrap();
    let mut reply = [0];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"x");
}

fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// Sends the bytes in pieces of random length, half-closes, and returns everything that it receives.
fn exchange_in_pieces(stream: &TcpStream, bytes: &[u8], seed: u64) -> Vec<u8> {
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut random, mut rest, mut stream) = (StdRng::seed_from_u64(seed), bytes, stream);
            while !rest.is_empty() {
                let (piece, remaining) = rest.split_at(random.random_range(1..=rest.len().min(8_192)));
                stream.write_all(piece).unwrap();
                rest = remaining;
            }
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        (&*stream).read_to_end(&mut received).unwrap();
        received
    })
}

#[test]
fn bytes_arrive_unchanged_and_in_order_over_many_connections() {
    let proxy = DelayProxy::start(serve(echo), Duration::from_millis(1));
    let streams: Vec<_> = (0..CONNECTIONS).map(|_| connect(&proxy)).collect();
    thread::scope(|scope| {
        for (seed, stream) in (0..).zip(&streams) {
            scope.spawn(move || {
                let bytes = random_bytes(seed, LEN);
                let received = exchange_in_pieces(stream, &bytes, seed);
                assert!(received == bytes, "connection {seed} received other bytes than it sent");
            });
        }
        // Changes while traffic flows must not reorder it.
        for round_trip in [Duration::from_millis(20), Duration::ZERO, Duration::from_millis(3)] {
            proxy.set_round_trip(round_trip);
            exchange(&connect(&proxy));
        }
    });
}

#[test]
fn an_exchange_takes_at_least_the_round_trip() {
    let proxy = DelayProxy::start(serve(echo), Duration::ZERO);
    let stream = connect(&proxy);
    exchange(&stream);
    for round_trip in [1, 5, 50].map(Duration::from_millis) {
        proxy.set_round_trip(round_trip);
        for _ in 0..5 {
            let elapsed = timed(|| exchange(&stream));
            assert!(elapsed >= round_trip, "{elapsed:?} instead of {round_trip:?}");
            assert!(elapsed < wait::PATIENCE, "{elapsed:?} instead of {round_trip:?}");
        }
    }
}

#[test]
fn pipelined_bytes_share_the_delay() {
    const PIECES: usize = 100;
    let round_trip = Duration::from_millis(100);
    let proxy = DelayProxy::start(serve(echo), round_trip);
    let mut stream = connect(&proxy);
    let elapsed = timed(|| {
        for _ in 0..PIECES {
            stream.write_all(b"x").unwrap();
        }
        stream.read_exact(&mut [0; PIECES]).unwrap();
    });
    assert!(elapsed >= round_trip, "{elapsed:?}");
    assert!(elapsed < round_trip * PIECES as u32 / 2, "{elapsed:?}: the delays add up");
}

#[test]
fn bytes_already_held_keep_their_delay_when_the_round_trip_changes() {
    let slow = Duration::from_millis(300);
    let proxy = DelayProxy::start(serve(echo), slow);
    let mut stream = connect(&proxy);
    let elapsed = timed(|| {
        stream.write_all(b"first").unwrap();
        // Only a byte that has passed through the proxy shows that it has read the first ones.
        let other = connect(&proxy);
        exchange(&other);
        proxy.set_round_trip(Duration::ZERO);
        stream.write_all(b"second").unwrap();
        let mut reply = [0; 11];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"firstsecond");
    });
    assert!(elapsed >= slow, "{elapsed:?}");

    let elapsed = timed(|| exchange(&stream));
    assert!(elapsed < wait::PATIENCE, "{elapsed:?}");
    proxy.set_round_trip(Duration::from_millis(40));
    let elapsed = timed(|| exchange(&stream));
    assert!(elapsed >= Duration::from_millis(40), "{elapsed:?}");
}

#[test]
fn a_half_close_is_passed_on_after_the_bytes_before_it() {
    fn reply_at_end(mut stream: TcpStream) {
        let mut request = Vec::new();
        stream.read_to_end(&mut request).unwrap();
        stream.write_all(&request).unwrap();
        stream.write_all(b" received").unwrap();
    }
    let round_trip = Duration::from_millis(20);
    let proxy = DelayProxy::start(serve(reply_at_end), round_trip);
    let mut stream = connect(&proxy);
    let elapsed = timed(|| {
        stream.write_all(b"request").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        assert_eq!(reply, "request received");
    });
    assert!(elapsed >= round_trip, "{elapsed:?}");
}

#[test]
fn a_reset_by_the_server_is_passed_on() {
    fn reset(mut stream: TcpStream) {
        stream.read_exact(&mut [0; 1]).unwrap();
        // Closing a socket with unread bytes sends a reset.
        stream.peek(&mut [0; 1]).unwrap();
    }
    let proxy = DelayProxy::start(serve(reset), Duration::from_millis(2));
    let mut stream = connect(&proxy);
    stream.write_all(b"two bytes and more").unwrap();
    let error = stream.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_server_that_does_not_listen_resets_the_client() {
    let unused = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let proxy = DelayProxy::start(unused, Duration::from_millis(2));
    let mut stream = connect(&proxy);
    let error = stream.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn a_server_that_does_not_read_blocks_the_client_and_loses_nothing() {
    /// More than the proxy and all socket buffers hold.
    const TOO_MUCH: usize = 64 * MAX_HELD_LEN;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let proxy = DelayProxy::start(listener.local_addr().unwrap(), Duration::from_millis(1));
    let mut client = connect(&proxy);
    let (mut server, _) = listener.accept().unwrap();

    client.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let piece = random_bytes(1, 4_096);
    let mut sent = 0;
    while sent < TOO_MUCH {
        match client.write(&piece[sent % piece.len()..]) {
            Ok(len) => sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!((MAX_HELD_LEN..TOO_MUCH).contains(&sent), "{sent} bytes were accepted");

    client.shutdown(Shutdown::Write).unwrap();
    let mut received = Vec::new();
    server.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), sent);
    assert!(received.iter().zip(piece.iter().cycle()).all(|(received, sent)| received == sent));
}

#[test]
fn dropping_the_proxy_closes_its_connections() {
    let proxy = DelayProxy::start(serve(echo), Duration::from_secs(3_600));
    let mut stream = connect(&proxy);
    stream.write_all(b"never delivered").unwrap();
    drop(proxy);
    let closed = stream.read(&mut [0; 1]);
    assert!(
        closed.as_ref().map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |len| *len == 0),
        "{closed:?}"
    );
}
