//! Redis-protocol connections over real sockets: slow and hostile clients, and shutdown.
//!
//! Most tests pause tokio's clock, which then advances whenever all tasks wait.
//!
//! A separate binary, because other tests in the same process would change its peak memory.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{fs, io, net::SocketAddr, time::Duration};

use sluicegate::{Limiter, MemoryStore};
use sluicegate_server::{
    auth::Access,
    engine::Engine,
    net::{
        acceptor::AcceptConfig,
        connection_limit::REAP_INTERVAL,
        listener::raise_open_files_limit,
        shutdown::{SHUTDOWN_GRACE, Shutdown},
        stream::WRITE_TIMEOUT,
    },
    resp::{
        self, COMMAND_TIMEOUT, DRAIN_QUIET, Endpoint, FIRST_COMMAND_TIMEOUT, IDLE_TIMEOUT, MAX_CONNECTIONS,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    task::{JoinHandle, JoinSet},
    time::{Instant, timeout},
};

/// Timers fire on whole milliseconds, and bytes in transit take some real ones.
const SLACK: Duration = Duration::from_millis(250);

/// A generous bound on the real clock.
const PATIENCE: Duration = Duration::from_secs(20);

struct Running {
    address: SocketAddr,
    shutdown: Shutdown,
    server: JoinHandle<()>,
}

async fn start() -> Running {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(2 * CLIENTS as u32).unwrap();
    let address = listener.local_addr().unwrap();
    let config = AcceptConfig::default();
    let shutdown = config.shutdown.clone();
    let endpoint = Endpoint::new(engine, Access::default());
    let server = tokio::spawn(resp::server::run(listener, endpoint, config));
    Running { address, shutdown, server }
}

impl Running {
    async fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }
}

async fn expect_reply(stream: &mut TcpStream, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(bytes.escape_ascii().to_string(), expected.escape_ascii().to_string());
}

/// Returns how long the server takes to close the connection, and asserts that it sends nothing.
async fn time_to_close(stream: &mut TcpStream) -> Duration {
    let begin = Instant::now();
    let mut rest = Vec::new();
    timeout(2 * IDLE_TIMEOUT, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(rest, b"");
    begin.elapsed()
}

fn assert_timed_out(took: Duration, timeout: Duration) {
    assert!(
        took + SLACK >= timeout && took <= timeout + REAP_INTERVAL + SLACK,
        "{took:?} instead of {timeout:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_connection_times_out_before_the_first_command_between_commands_and_within_one() {
    let running = start().await;
    let mut unused = running.send(b"").await;
    assert_timed_out(time_to_close(&mut unused).await, FIRST_COMMAND_TIMEOUT);
    let mut idle = running.send(b"PING\r\n").await;
    expect_reply(&mut idle, b"+PONG\r\n").await;
    assert_timed_out(time_to_close(&mut idle).await, IDLE_TIMEOUT);
    for half in ["*2\r\n$4\r\nECHO\r\n", "PIN"] {
        let mut stream = running.send(half.as_bytes()).await;
        assert_timed_out(time_to_close(&mut stream).await, COMMAND_TIMEOUT);
        let mut stream = running.send(b"PING\r\n").await;
        expect_reply(&mut stream, b"+PONG\r\n").await;
        stream.write_all(half.as_bytes()).await.unwrap();
        assert_timed_out(time_to_close(&mut stream).await, COMMAND_TIMEOUT);
    }
}

#[tokio::test(start_paused = true)]
async fn one_byte_a_second_does_not_extend_the_time_for_a_command() {
    let running = start().await;
    let begin = Instant::now();
    let mut stream = running.send(b"*2\r\n$4\r\nECHO\r\n$1000\r\n").await;
    while stream.write_all(b"a").await.is_ok() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(begin.elapsed() < IDLE_TIMEOUT);
    }
    // The client notices when it sends again.
    assert!(begin.elapsed() < COMMAND_TIMEOUT + Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_connection_in_use_is_kept() {
    let running = start().await;
    let mut stream = running.send(b"").await;
    for _ in 0..5 {
        stream.write_all(b"PING\r\n").await.unwrap();
        expect_reply(&mut stream, b"+PONG\r\n").await;
        tokio::time::sleep(IDLE_TIMEOUT * 9 / 10).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_its_replies_is_disconnected() {
    let running = start().await;
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    let commands = b"COMMAND DOCS\r\n".repeat(5_000);
    let begin = Instant::now();
    // Until the buffers of both sides are full, and then until the write timeout.
    let error = loop {
        if let Err(error) = timeout(2 * WRITE_TIMEOUT, stream.write_all(&commands)).await.unwrap() {
            break error;
        }
    };
    assert!(matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe), "{error}");
    assert!(begin.elapsed() <= WRITE_TIMEOUT + SLACK, "{:?}", begin.elapsed());
}

/// Less than any of the hostile inputs would take, with room for other tests.
const MAX_GROWTH: usize = 48 << 20;

/// Returns the peak memory of this process, in bytes.
fn peak_memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

// On the real clock: bytes are always in transit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_input_takes_little_memory_and_other_clients_are_served() {
    let running = start().await;
    let mut normal = running.send(b"PING\r\n").await;
    expect_reply(&mut normal, b"+PONG\r\n").await;
    let before = peak_memory();
    let hostile: [(&[u8], &[u8]); 6] = [
        (b"*2147483647\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
        (b"*1\r\n$2147483647\r\n", b"-ERR Protocol error: invalid bulk length\r\n"),
        (b"*64\r\n*64\r\n*64\r\n", b"-ERR Protocol error: expected '$', got '*'\r\n"),
        (&[b'a'; 64 << 10], b"-ERR Protocol error: too big request: a command has at most 65536 bytes\r\n"),
        (&[0; 64 << 10], b"-ERR Protocol error: too big request: a command has at most 65536 bytes\r\n"),
        (b"*-9223372036854775809\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
    ];
    let zeros = vec![0; 1 << 20];
    for (input, error) in hostile {
        let mut stream = running.send(input).await;
        expect_reply(&mut stream, error).await;
        // 64 MB of zeros, or as many as the server accepts.
        let _until_closed = async {
            for _ in 0..64 {
                stream.write_all(&zeros).await?;
            }
            io::Result::Ok(())
        }
        .await;
        normal.write_all(b"PING\r\n").await.unwrap();
        timeout(PATIENCE, expect_reply(&mut normal, b"+PONG\r\n")).await.unwrap();
    }
    // Empty lines need no reply and are not kept.
    let mut lines = running.send(b"").await;
    for _ in 0..16 {
        lines.write_all(&b"\r\n".repeat(1 << 19)).await.unwrap();
    }
    lines.write_all(b"PING\r\n").await.unwrap();
    timeout(PATIENCE, expect_reply(&mut lines, b"+PONG\r\n")).await.unwrap();
    let grown = peak_memory() - before;
    assert!(grown < MAX_GROWTH, "{grown} bytes");
}

/// More clients than connections, but not twice as many.
const CLIENTS: usize = 1_900;

#[tokio::test(start_paused = true)]
async fn idle_clients_are_evicted_for_new_ones() {
    allow_open_files();
    let running = start().await;
    // An answered client has sent a request, even if it has sent part of another one since.
    let mut busy = running.send(b"PING\r\nPI").await;
    expect_reply(&mut busy, b"+PONG\r\n").await;
    let mut idle = Vec::new();
    for _ in 1..MAX_CONNECTIONS {
        let mut stream = running.send(b"PING\r\n").await;
        expect_reply(&mut stream, b"+PONG\r\n").await;
        idle.push(stream);
    }
    tokio::time::sleep(SLACK).await;
    busy.write_all(b"NG\r\nPI").await.unwrap();
    expect_reply(&mut busy, b"+PONG\r\n").await;
    let begin = Instant::now();
    let mut new_clients = Vec::new();
    for first in &mut idle[..100] {
        let mut new_client = running.send(b"PING\r\n").await;
        expect_reply(&mut new_client, b"+PONG\r\n").await;
        new_clients.push(new_client);
        assert!(time_to_close(first).await <= SLACK);
    }
    assert!(begin.elapsed() <= Duration::from_secs(1) + SLACK, "{:?}", begin.elapsed());
    busy.write_all(b"NG\r\n").await.unwrap();
    expect_reply(&mut busy, b"+PONG\r\n").await;
}

// The clock is paused only while all tasks wait: it would otherwise advance while bytes are in transit.
#[tokio::test]
async fn half_sent_commands_time_out_while_other_clients_are_served() {
    allow_open_files();
    let running = start().await;
    let mut normal = running.send(b"PING\r\n").await;
    expect_reply(&mut normal, b"+PONG\r\n").await;
    let before = peak_memory();
    let begin = Instant::now();
    let mut stalled = JoinSet::new();
    for number in 0..CLIENTS {
        if number % 50 == 0 {
            // A client that sends a command now and then keeps its slot.
            normal.write_all(b"PING\r\n").await.unwrap();
            expect_reply(&mut normal, b"+PONG\r\n").await;
        }
        let mut stream = running.send(b"*2\r\n$4\r\nECHO\r\n$4000\r\nabc").await;
        stalled.spawn(async move {
            let mut rest = Vec::new();
            let _or_reset = stream.read_to_end(&mut rest).await;
            assert_eq!(rest, b"");
        });
    }
    normal.write_all(b"PING\r\n").await.unwrap();
    expect_reply(&mut normal, b"+PONG\r\n").await;
    // A new client waits for a slot, but not long.
    let mut new_client = running.send(b"CL.THROTTLE k 0 1 60\r\n").await;
    tokio::time::pause();
    expect_reply(&mut new_client, b"*5\r\n:0\r\n:1\r\n:0\r\n:-1\r\n:60\r\n").await;
    while let Some(closed) = stalled.join_next().await {
        closed.unwrap();
    }
    tokio::time::resume();
    let rounds = u32::try_from(CLIENTS.div_ceil(MAX_CONNECTIONS - 2)).unwrap();
    assert!(begin.elapsed() <= (COMMAND_TIMEOUT + Duration::from_secs(2)) * rounds, "{:?}", begin.elapsed());
    normal.write_all(b"PING\r\n").await.unwrap();
    expect_reply(&mut normal, b"+PONG\r\n").await;
    let grown = peak_memory() - before;
    assert!(grown < MAX_GROWTH, "{grown} bytes");
}

// On the real clock: a paused one would advance while bytes are in transit.
#[tokio::test]
async fn a_shutdown_answers_commands_in_transit_and_rejects_connections() {
    let running = start().await;
    let mut busy = running.send(b"PING\r\n").await;
    expect_reply(&mut busy, b"+PONG\r\n").await;
    let mut half = running.send(b"*2\r\n$4\r\nECHO\r\n$3\r\na").await;
    let mut idle = running.send(b"PING\r\n").await;
    expect_reply(&mut idle, b"+PONG\r\n").await;

    running.shutdown.stop();
    busy.write_all(b"PING\r\nECHO a\r\n").await.unwrap();
    expect_reply(&mut busy, b"+PONG\r\n$1\r\na\r\n").await;
    half.write_all(b"bc\r\n").await.unwrap();
    expect_reply(&mut half, b"$3\r\nabc\r\n").await;
    let rejected = async {
        while TcpStream::connect(running.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SHUTDOWN_GRACE / 2, rejected).await.unwrap();
    for stream in [&mut busy, &mut half, &mut idle] {
        assert!(time_to_close(stream).await <= DRAIN_QUIET + SLACK);
    }
    drop((busy, half, idle));
    timeout(SHUTDOWN_GRACE / 2, running.server).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_after_its_grace() {
    let running = start().await;
    let mut half = running.send(b"PING\r\n*2\r\n$4\r\n").await;
    expect_reply(&mut half, b"+PONG\r\n").await;
    let begin = Instant::now();
    running.shutdown.stop();
    running.server.await.unwrap();
    assert!(begin.elapsed() <= SHUTDOWN_GRACE + SLACK, "{:?}", begin.elapsed());
}

/// Raises the limit on open files to what the tests need.
fn allow_open_files() {
    let (allowed, needed) = (raise_open_files_limit(), 2 * CLIENTS as u64 + 500);
    assert!(allowed >= needed, "this test opens {needed} files: raise the limit (ulimit -Hn)");
}
