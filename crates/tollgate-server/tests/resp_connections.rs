//! Connections over real sockets: who is slow, sends bombs, or is there when the server stops.
//!
//! On tokio's paused clock, which moves on by itself whenever everybody waits, unless a test says otherwise.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

use std::{
    fs, io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpSocket, TcpStream},
    sync::oneshot,
    task::{JoinHandle, JoinSet},
    time::{Instant, timeout},
};
use tollgate::{Limiter, MemoryStore};
use tollgate_server::{
    auth::Access,
    connections::{Reception, SHUTDOWN_GRACE, Stop},
    desk::Desk,
    listen::{self, WRITE_TIMEOUT},
    resp::{
        self, COMMAND_TIMEOUT, DRAIN_QUIET, Endpoint, FIRST_COMMAND_TIMEOUT, IDLE_TIMEOUT, MAX_CONNECTIONS,
    },
};

/// Timers fire on whole milliseconds, and bytes on their way take some real ones.
const SLACK: Duration = Duration::from_millis(250);

/// A bound on the real clock that no healthy run comes near.
const PATIENCE: Duration = Duration::from_secs(20);

struct Running {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
}

async fn start() -> Running {
    let desk = Desk::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(2 * CROWD as u32).unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let endpoint = Endpoint::new(desk, Access::default());
    let server =
        tokio::spawn(resp::run(listener, endpoint, Reception::default(), async { stopped.await.unwrap() }));
    Running { address, stop, server }
}

impl Running {
    async fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }
}

async fn hears(stream: &mut TcpStream, expected: &[u8]) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(bytes.escape_ascii().to_string(), expected.escape_ascii().to_string());
}

/// How long the server takes to end the connection, having sent nothing more.
async fn time_to_end(stream: &mut TcpStream) -> Duration {
    let begin = Instant::now();
    let mut rest = Vec::new();
    timeout(2 * IDLE_TIMEOUT, stream.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(rest, b"");
    begin.elapsed()
}

fn assert_about(took: Duration, expected: Duration) {
    assert!(took + SLACK >= expected && took <= expected + SLACK, "{took:?} instead of {expected:?}");
}

#[tokio::test(start_paused = true)]
async fn silence_ends_a_connection_sooner_before_the_first_command_and_within_one() {
    let running = start().await;
    let mut silent = running.send(b"").await;
    assert_about(time_to_end(&mut silent).await, FIRST_COMMAND_TIMEOUT);
    let mut idle = running.send(b"PING\r\n").await;
    hears(&mut idle, b"+PONG\r\n").await;
    assert_about(time_to_end(&mut idle).await, IDLE_TIMEOUT);
    for half in ["*2\r\n$4\r\nECHO\r\n", "PIN"] {
        let mut stream = running.send(half.as_bytes()).await;
        assert_about(time_to_end(&mut stream).await, COMMAND_TIMEOUT);
        let mut stream = running.send(b"PING\r\n").await;
        hears(&mut stream, b"+PONG\r\n").await;
        stream.write_all(half.as_bytes()).await.unwrap();
        assert_about(time_to_end(&mut stream).await, COMMAND_TIMEOUT);
    }
}

#[tokio::test(start_paused = true)]
async fn one_byte_a_second_does_not_keep_a_command_open() {
    let running = start().await;
    let begin = Instant::now();
    let mut stream = running.send(b"*2\r\n$4\r\nECHO\r\n$1000\r\n").await;
    while stream.write_all(b"a").await.is_ok() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(begin.elapsed() < IDLE_TIMEOUT);
    }
    // the client hears of it when it sends again
    assert!(begin.elapsed() < COMMAND_TIMEOUT + Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_used_is_kept() {
    let running = start().await;
    let mut stream = running.send(b"").await;
    for _ in 0..5 {
        stream.write_all(b"PING\r\n").await.unwrap();
        hears(&mut stream, b"+PONG\r\n").await;
        tokio::time::sleep(IDLE_TIMEOUT * 9 / 10).await;
    }
}

#[tokio::test(start_paused = true)]
async fn who_does_not_read_the_answers_is_left() {
    let running = start().await;
    let mut stream = TcpStream::connect(running.address).await.unwrap();
    let pings = b"COMMAND DOCS\r\n".repeat(5_000);
    let begin = Instant::now();
    // until the buffers of both sides are full, and then for as long as the server has patience
    let error = loop {
        if let Err(error) = timeout(2 * WRITE_TIMEOUT, stream.write_all(&pings)).await.unwrap() {
            break error;
        }
    };
    assert!(matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe), "{error}");
    assert!(begin.elapsed() <= WRITE_TIMEOUT + SLACK, "{:?}", begin.elapsed());
}

/// Less than any of the bombs would have, but room for tests that run at the same time.
const MODEST: usize = 48 << 20;

/// The largest this process has been, in bytes.
fn peak_memory() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

// on the real clock: bytes are on their way all the time
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bombs_cost_little_and_others_are_served_meanwhile() {
    let running = start().await;
    let mut normal = running.send(b"PING\r\n").await;
    hears(&mut normal, b"+PONG\r\n").await;
    let before = peak_memory();
    let bombs: [(&[u8], &[u8]); 6] = [
        (b"*2147483647\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
        (b"*1\r\n$2147483647\r\n", b"-ERR Protocol error: invalid bulk length\r\n"),
        (b"*64\r\n*64\r\n*64\r\n", b"-ERR Protocol error: expected '$', got '*'\r\n"),
        (&[b'a'; 64 << 10], b"-ERR Protocol error: too big request: a command has at most 65536 bytes\r\n"),
        (&[0; 64 << 10], b"-ERR Protocol error: too big request: a command has at most 65536 bytes\r\n"),
        (b"*-9223372036854775809\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
    ];
    let nothing = vec![0; 1 << 20];
    for (bomb, error) in bombs {
        let mut stream = running.send(bomb).await;
        hears(&mut stream, error).await;
        // 64 MB of nothing, or as much of it as is taken
        let _until_it_ends = async {
            for _ in 0..64 {
                stream.write_all(&nothing).await?;
            }
            io::Result::Ok(())
        }
        .await;
        normal.write_all(b"PING\r\n").await.unwrap();
        timeout(PATIENCE, hears(&mut normal, b"+PONG\r\n")).await.unwrap();
    }
    // empty lines ask for nothing, and are not kept
    let mut lines = running.send(b"").await;
    for _ in 0..16 {
        lines.write_all(&b"\r\n".repeat(1 << 19)).await.unwrap();
    }
    lines.write_all(b"PING\r\n").await.unwrap();
    timeout(PATIENCE, hears(&mut lines, b"+PONG\r\n")).await.unwrap();
    let grown = peak_memory() - before;
    assert!(grown < MODEST, "{grown} bytes");
}

/// More than may be connected at once, but not twice as many.
const CROWD: usize = 1_900;

#[tokio::test(start_paused = true)]
async fn clients_that_idle_make_room_for_others() {
    allow_open_files();
    let running = start().await;
    // one that is answered has asked, whatever it has begun to send
    let mut busy = running.send(b"PING\r\nPI").await;
    hears(&mut busy, b"+PONG\r\n").await;
    let mut idle = Vec::new();
    for _ in 1..MAX_CONNECTIONS {
        let mut stream = running.send(b"PING\r\n").await;
        hears(&mut stream, b"+PONG\r\n").await;
        idle.push(stream);
    }
    tokio::time::sleep(SLACK).await;
    busy.write_all(b"NG\r\nPI").await.unwrap();
    hears(&mut busy, b"+PONG\r\n").await;
    let begin = Instant::now();
    let mut newcomers = Vec::new();
    for first in &mut idle[..100] {
        let mut newcomer = running.send(b"PING\r\n").await;
        hears(&mut newcomer, b"+PONG\r\n").await;
        newcomers.push(newcomer);
        assert_about(time_to_end(first).await, Duration::ZERO);
    }
    assert!(begin.elapsed() <= Duration::from_secs(1) + SLACK, "{:?}", begin.elapsed());
    busy.write_all(b"NG\r\n").await.unwrap();
    hears(&mut busy, b"+PONG\r\n").await;
}

// the clock is paused only while everybody waits: it would run ahead of the bytes on their way
#[tokio::test]
async fn a_crowd_of_half_sent_commands_goes_away_while_others_are_served() {
    allow_open_files();
    let running = start().await;
    let mut normal = running.send(b"PING\r\n").await;
    hears(&mut normal, b"+PONG\r\n").await;
    let before = peak_memory();
    let begin = Instant::now();
    let mut crowd = JoinSet::new();
    for number in 0..CROWD {
        if number % 50 == 0 {
            // who asks now and then keeps the place
            normal.write_all(b"PING\r\n").await.unwrap();
            hears(&mut normal, b"+PONG\r\n").await;
        }
        let mut stream = running.send(b"*2\r\n$4\r\nECHO\r\n$4000\r\nabc").await;
        crowd.spawn(async move {
            let mut rest = Vec::new();
            let _or_reset = stream.read_to_end(&mut rest).await;
            assert_eq!(rest, b"");
        });
    }
    normal.write_all(b"PING\r\n").await.unwrap();
    hears(&mut normal, b"+PONG\r\n").await;
    // a newcomer waits for a place, but not long
    let mut newcomer = running.send(b"CL.THROTTLE k 0 1 60\r\n").await;
    tokio::time::pause();
    hears(&mut newcomer, b"*5\r\n:0\r\n:1\r\n:0\r\n:-1\r\n:60\r\n").await;
    while let Some(ended) = crowd.join_next().await {
        ended.unwrap();
    }
    tokio::time::resume();
    let rounds = u32::try_from(CROWD.div_ceil(MAX_CONNECTIONS - 2)).unwrap();
    assert!(begin.elapsed() <= (COMMAND_TIMEOUT + Duration::from_secs(2)) * rounds, "{:?}", begin.elapsed());
    normal.write_all(b"PING\r\n").await.unwrap();
    hears(&mut normal, b"+PONG\r\n").await;
    let grown = peak_memory() - before;
    assert!(grown < MODEST, "{grown} bytes");
}

// on the real clock: a paused one would run ahead of the bytes on their way
#[tokio::test]
async fn stopping_answers_what_was_sent_and_takes_no_more() {
    let running = start().await;
    let mut busy = running.send(b"PING\r\n").await;
    hears(&mut busy, b"+PONG\r\n").await;
    let mut half = running.send(b"*2\r\n$4\r\nECHO\r\n$3\r\na").await;
    let mut idle = running.send(b"PING\r\n").await;
    hears(&mut idle, b"+PONG\r\n").await;

    running.stop.send(()).unwrap();
    busy.write_all(b"PING\r\nECHO a\r\n").await.unwrap();
    hears(&mut busy, b"+PONG\r\n$1\r\na\r\n").await;
    half.write_all(b"bc\r\n").await.unwrap();
    hears(&mut half, b"$3\r\nabc\r\n").await;
    let turned_away = async {
        while TcpStream::connect(running.address).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SHUTDOWN_GRACE / 2, turned_away).await.unwrap();
    for stream in [&mut busy, &mut half, &mut idle] {
        assert!(time_to_end(stream).await <= DRAIN_QUIET + SLACK);
    }
    drop((busy, half, idle));
    timeout(SHUTDOWN_GRACE / 2, running.server).await.unwrap().unwrap();
}

/// A client that has always sent more already, until its answers end.
#[derive(Default)]
struct Tireless {
    heard: usize,
    is_told: bool,
}

impl AsyncRead for Tireless {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !self.is_told {
            into.put_slice(b"PING\r\n");
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tireless {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, answers: &[u8]) -> Poll<io::Result<usize>> {
        self.heard += answers.len();
        Poll::Ready(Ok(answers.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_told = true;
        Poll::Ready(Ok(()))
    }
}

// on the real clock: a paused one stands still while somebody is busy
#[tokio::test]
async fn a_client_that_never_pauses_is_told_when_the_server_stops() {
    let desk = Desk::new(Limiter::new(MemoryStore::new(), []).unwrap());
    let endpoint = Endpoint::new(desk, Access::default());
    let (stopping, stop) = Stop::when_dropped();
    let mut client = Tireless::default();
    drop(stopping);
    timeout(PATIENCE, endpoint.serve(&mut client, stop)).await.unwrap();
    assert!(client.is_told && client.heard > 0 && client.heard.is_multiple_of(b"+PONG\r\n".len()));
}

#[tokio::test(start_paused = true)]
async fn stopping_does_not_wait_for_ever() {
    let running = start().await;
    let mut half = running.send(b"PING\r\n*2\r\n$4\r\n").await;
    hears(&mut half, b"+PONG\r\n").await;
    let begin = Instant::now();
    running.stop.send(()).unwrap();
    running.server.await.unwrap();
    assert!(begin.elapsed() <= SHUTDOWN_GRACE + SLACK, "{:?}", begin.elapsed());
}

/// Lets this process open the files that the crowd needs.
fn allow_open_files() {
    let (allowed, needed) = (listen::allow_open_files(), 2 * CROWD as u64 + 500);
    assert!(allowed >= needed, "this test opens {needed} files: raise the limit (ulimit -Hn)");
}
