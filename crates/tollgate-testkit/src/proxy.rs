//! A TCP proxy on loopback between a client under test and a real server, which injects network faults.
//!
//! It has its own thread and runtime, so a test may block or pause tokio's clock. A mode set with [`Proxy::set`]
//! applies to every byte that has not been forwarded when it returns, on existing and new connections.
//!
//! The proxy finds the boundaries of RESP frames, so that it drops exactly one reply and never shifts the others. It
//! cannot do so where replies do not follow requests one to one: TLS, subscriptions, `MONITOR`, `CLIENT REPLY OFF`.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::resp::Scanner;
use crate::wait;

/// Maximum number of open connections; further ones are reset.
pub const MAX_CONNECTIONS: usize = 512;

/// Maximum number of bytes per read.
const MAX_CHUNK_LEN: usize = 16 * 1024;

/// Maximum number of chunks held back in each direction of a connection. Beyond that, the socket of the sender fills
/// up.
const MAX_CHUNKS_HELD: usize = 64;

/// Maximum number of requests of a connection without a reply; further requests are held back.
const MAX_IN_FLIGHT: usize = 65_536;

/// Maximum number of connections waiting to be accepted.
const BACKLOG: u32 = 1_024;

/// How the proxy treats traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forwards everything.
    Pass,
    /// Forwards each byte after this delay. A delay of [`Duration::MAX`] stalls one direction.
    Delay {
        /// Delay of requests.
        requests: Duration,
        /// Delay of replies.
        replies: Duration,
    },
    /// Forwards one byte at a time in both directions.
    Trickle {
        /// The time between two bytes of a direction.
        pause: Duration,
    },
    /// Accepts and reads, but forwards nothing. The held bytes are delivered when the mode changes, as by a server
    /// that resumes, even if the client has disconnected.
    Stall,
    /// Resets open connections, and each new one as soon as it is accepted.
    Cut,
    /// Resets open connections and stops listening: connecting fails with "connection refused".
    Refuse,
    /// Delivers requests and drops some of their replies.
    DropReplies(DropReplies),
}

/// Which replies are dropped, and what happens to the connection. It cannot continue, as replies are matched by order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropReplies {
    /// The requests that count.
    pub requests: RequestFilter,
    /// Which of them lose their reply.
    pub occurrence: Occurrence,
    /// What happens to the connection.
    pub after: AfterDrop,
}

/// A set of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestFilter {
    /// All requests, including those that a client sends when it connects.
    Any,
    /// Requests with one of these command names, in upper case.
    Named(&'static [&'static str]),
}

impl RequestFilter {
    /// Scripts, which tollgate uses for decisions.
    pub const SCRIPTS: RequestFilter = RequestFilter::Named(&["EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO"]);

    fn matches(self, name: &str) -> bool {
        match self {
            RequestFilter::Any => true,
            RequestFilter::Named(names) => names.contains(&name),
        }
    }
}

/// Which of the counted requests lose their reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occurrence {
    /// The next one. After it, the mode is [`Mode::Pass`].
    Next,
    /// Every n-th, over all connections, counted since the mode was set.
    Every(u64),
}

/// What happens to a connection after a reply was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterDrop {
    /// It is closed.
    Close,
    /// It stays open and silent. Later requests are delivered and their replies dropped.
    Stall,
}

/// One of the two directions of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Requests,
    /// From the server to the client.
    Replies,
}

/// Counters since the start of the proxy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Accepted connections, including those reset at once.
    pub accepted: u64,
    /// Connections reset because [`MAX_CONNECTIONS`] were open.
    pub rejected: u64,
    /// Open connections. During [`Mode::Stall`] this includes connections whose client has disconnected.
    pub open: usize,
    /// Complete requests delivered.
    pub requests: u64,
    /// Replies forwarded, completely or in part.
    pub replies: u64,
    /// Replies dropped by [`Mode::DropReplies`].
    pub dropped_replies: u64,
    /// Bytes delivered to the server.
    pub bytes_up: u64,
    /// Bytes delivered to clients.
    pub bytes_down: u64,
}

/// A running proxy. It stops on drop and closes its connections.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    state: Arc<watch::Sender<ProxyState>>,
    /// Stops the thread when dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy that forwards everything to the given address. It listens when this returns.
    ///
    /// # Panics
    ///
    /// When there is no free port or the thread cannot be started.
    #[must_use]
    pub fn start(upstream: SocketAddr) -> Proxy {
        let state = Arc::new(watch::Sender::new(ProxyState::new()));
        let (stop, stopped) = oneshot::channel();
        let (listening, listens) = std::sync::mpsc::channel();
        let shared = Arc::clone(&state);
        let thread = thread::Builder::new().name(String::from("proxy")).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime for the proxy").block_on(async {
                let port = ReservedPort::hold();
                let _ = listening.send(port.addr);
                tokio::select! {
                    _ = stopped => {}
                    () = accept(port, upstream, shared) => {}
                }
            });
        });
        let thread = thread.expect("a thread for the proxy");
        let addr = listens.recv().expect("the proxy has found a port");
        Proxy { addr, state, stop: Some(stop), thread: Some(thread) }
    }

    /// Returns the address that clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the URL that clients connect to, `redis://127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Changes the mode. With [`Mode::Cut`] and [`Mode::Refuse`], no connection is open when this returns.
    ///
    /// # Panics
    ///
    /// When the mode drops every zeroth reply, or the thread of the proxy has panicked.
    pub fn set(&self, mode: Mode) {
        if let Mode::DropReplies(DropReplies { occurrence: Occurrence::Every(n), .. }) = mode {
            assert_ne!(n, 0, "every zeroth reply is not valid: use Mode::Pass");
        }
        self.state.send_modify(|state| {
            state.mode = mode;
            state.matched = 0;
            if state.mode.closes_connections() {
                state.reset_below = state.next_id;
            }
        });
        self.wait_for_resets();
        let listening = mode != Mode::Refuse;
        wait::until("the proxy has started or stopped listening", wait::PATIENCE, || {
            self.state.borrow().listening == listening
        });
    }

    /// Forwards everything.
    pub fn pass(&self) {
        self.set(Mode::Pass);
    }

    /// Delays requests and replies by this time each.
    pub fn delay(&self, each_way: Duration) {
        self.set(Mode::Delay { requests: each_way, replies: each_way });
    }

    /// Holds everything back, on open and new connections.
    pub fn stall(&self) {
        self.set(Mode::Stall);
    }

    /// Resets open connections and every new one.
    pub fn cut(&self) {
        self.set(Mode::Cut);
    }

    /// Delivers all requests, and closes the connection instead of forwarding every n-th reply.
    pub fn drop_every_nth_reply(&self, n: u64, requests: RequestFilter) {
        self.set(Mode::DropReplies(DropReplies {
            requests,
            occurrence: Occurrence::Every(n),
            after: AfterDrop::Close,
        }));
    }

    /// Delivers the next matching request and closes its connection instead of forwarding the reply. Forwards
    /// everything after that.
    pub fn drop_next_reply(&self, requests: RequestFilter) {
        self.set(Mode::DropReplies(DropReplies {
            requests,
            occurrence: Occurrence::Next,
            after: AfterDrop::Close,
        }));
    }

    /// Delivers the next matching request, and leaves its connection silent permanently. Forwards everything else.
    pub fn drop_next_reply_and_stall(&self, requests: RequestFilter) {
        self.set(Mode::DropReplies(DropReplies {
            requests,
            occurrence: Occurrence::Next,
            after: AfterDrop::Stall,
        }));
    }

    /// Resets the open connections once. New connections follow the mode.
    pub fn reset_connections(&self) {
        self.state.send_modify(|state| state.reset_below = state.next_id);
        self.wait_for_resets();
    }

    /// Closes one direction of each open connection, as if the peer had shut it down for writing. The other direction
    /// continues.
    pub fn half_close(&self, direction: Direction) {
        self.state.send_modify(|state| state.ended_below[direction as usize] = state.next_id);
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let state = self.state.borrow();
        Counters { open: state.open.len(), ..state.counters }
    }

    fn wait_for_resets(&self) {
        wait::until("the connections are reset", wait::PATIENCE, || {
            let state = self.state.borrow();
            state.open.first().is_none_or(|oldest| *oldest >= state.reset_below)
        });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !thread::panicking()
        {
            panic!("the proxy on {} panicked", self.addr);
        }
    }
}

/// State shared by the handle and the connections, behind one lock. Only a change of mode wakes the connections, not a
/// changed counter.
#[derive(Debug)]
struct ProxyState {
    mode: Mode,
    /// Matching requests since [`Mode::DropReplies`] was set.
    matched: u64,
    /// Connections with a lower id are to be reset.
    reset_below: u64,
    /// Connections with a lower id have this direction closed.
    ended_below: [u64; 2],
    next_id: u64,
    open: BTreeSet<u64>,
    listening: bool,
    counters: Counters,
}

impl ProxyState {
    fn new() -> ProxyState {
        ProxyState {
            mode: Mode::Pass,
            matched: 0,
            reset_below: 0,
            ended_below: [0; 2],
            next_id: 0,
            open: BTreeSet::new(),
            listening: true,
            counters: Counters::default(),
        }
    }

    /// Registers a connection and returns its id, or `None` if it must be reset.
    fn open(&mut self) -> Option<u64> {
        self.counters.accepted += 1;
        if self.mode.closes_connections() {
            return None;
        }
        if self.open.len() >= MAX_CONNECTIONS {
            self.counters.rejected += 1;
            return None;
        }
        let id = self.next_id;
        self.next_id += 1;
        self.open.insert(id);
        Some(id)
    }

    /// Counts a reply to the named request. Returns whether it is dropped, and whether that changed the mode.
    fn reply(&mut self, name: &str) -> (Option<AfterDrop>, bool) {
        if let Mode::DropReplies(DropReplies { requests, occurrence, after }) = self.mode
            && requests.matches(name)
        {
            self.matched += 1;
            let is_dropped = match occurrence {
                Occurrence::Next => true,
                Occurrence::Every(n) => self.matched.is_multiple_of(n),
            };
            if is_dropped {
                self.counters.dropped_replies += 1;
                if occurrence == Occurrence::Next {
                    self.mode = Mode::Pass;
                }
                return (Some(after), occurrence == Occurrence::Next);
            }
        }
        self.counters.replies += 1;
        (None, false)
    }
}

impl Mode {
    /// Returns whether the mode closes all connections.
    fn closes_connections(self) -> bool {
        matches!(self, Mode::Cut | Mode::Refuse)
    }

    /// Returns when bytes that arrived at the given time may be forwarded; `None` means not in this mode.
    fn release_time(self, direction: Direction, arrived: Instant) -> Option<Instant> {
        match (self, direction) {
            (Mode::Stall | Mode::Cut | Mode::Refuse, _) => None,
            (Mode::Delay { requests, .. }, Direction::Requests) => arrived.checked_add(requests),
            (Mode::Delay { replies, .. }, Direction::Replies) => arrived.checked_add(replies),
            (Mode::Pass | Mode::Trickle { .. } | Mode::DropReplies(_), _) => Some(arrived),
        }
    }
}

/// A port that stays reserved while the proxy does not listen on it.
struct ReservedPort {
    addr: SocketAddr,
    /// Bound but never listening: the kernel refuses connections and assigns the port to no other socket.
    _holder: TcpSocket,
    listener: Option<TcpListener>,
}

impl ReservedPort {
    fn hold() -> ReservedPort {
        let holder = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let addr = holder.local_addr().expect("a bound socket has an address");
        let mut port = ReservedPort { addr, _holder: holder, listener: None };
        port.listen();
        port
    }

    fn listen(&mut self) {
        if self.listener.is_none() {
            self.listener =
                Some(bind(self.addr).listen(BACKLOG).expect("the port is reserved for the proxy"));
        }
    }

    fn refuse(&mut self) {
        self.listener = None;
    }

    /// Returns the next connection; waits forever while refusing.
    async fn accept(&self) -> TcpStream {
        let Some(listener) = &self.listener else { return std::future::pending().await };
        loop {
            // An error means that the client disconnected before it was accepted.
            if let Ok((client, _)) = listener.accept().await {
                return client;
            }
        }
    }
}

/// Binds a socket so that another socket of this process may have the same address.
fn bind(addr: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket for the proxy");
    socket.set_reuseaddr(true).and_then(|()| socket.set_reuseport(true)).expect("a shared address");
    socket.bind(addr).unwrap_or_else(|error| panic!("no port for the proxy: {error}"));
    socket
}

async fn accept(mut port: ReservedPort, upstream: SocketAddr, shared: Arc<watch::Sender<ProxyState>>) {
    let mut state = shared.subscribe();
    loop {
        let refuses = state.borrow_and_update().mode == Mode::Refuse;
        if refuses {
            port.refuse();
        } else {
            port.listen();
        }
        shared.send_if_modified(|state| {
            state.listening = !refuses;
            false
        });
        let client = tokio::select! {
            biased;
            _ = state.changed() => continue,
            client = port.accept() => client,
        };
        let mut id = None;
        shared.send_if_modified(|state| {
            id = state.open();
            false
        });
        match id {
            Some(id) => drop(tokio::spawn(connection(id, client, upstream, Arc::clone(&shared)))),
            None => reset(&client),
        }
    }
}

/// Makes closing the socket send a reset and discard unsent bytes.
fn reset(stream: &TcpStream) {
    // Fails only on a closed socket.
    let _ = stream.set_zero_linger();
}

/// Serves one connection until both directions have ended or it is reset.
async fn connection(
    id: u64,
    mut client: TcpStream,
    upstream: SocketAddr,
    shared: Arc<watch::Sender<ProxyState>>,
) {
    let mut server = None;
    let mut state = shared.subscribe();
    let ordered = async { state.wait_for(|state| state.reset_below > id).await.map(drop) };
    tokio::select! {
        biased;
        _ = ordered => {
            reset(&client);
            server.iter().for_each(reset);
        }
        () = relay(id, &mut client, &mut server, upstream, &shared) => {}
    }
    drop((client, server));
    shared.send_if_modified(|state| {
        state.open.remove(&id);
        false
    });
}

async fn relay(
    id: u64,
    client: &mut TcpStream,
    server: &mut Option<TcpStream>,
    upstream: SocketAddr,
    shared: &watch::Sender<ProxyState>,
) {
    let server = match TcpStream::connect(upstream).await {
        Ok(stream) => server.insert(stream),
        Err(_) => return reset(client),
    };
    // Small chunks are sent at once, as trickling requires. Fails only on a closed socket.
    let _ = client.set_nodelay(true).and_then(|()| server.set_nodelay(true));

    let cut = Notify::new();
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let (name, names) = mpsc::channel(MAX_IN_FLIGHT);
    let (request, requests) = mpsc::channel(MAX_CHUNKS_HELD);
    let (reply, replies) = mpsc::channel(MAX_CHUNKS_HELD);
    let forwarder = |direction, to| Forwarder { id, direction, to, shared, state: shared.subscribe() };
    let both = async {
        tokio::join!(
            read_chunks(from_client, request),
            read_chunks(from_server, reply),
            forwarder(Direction::Requests, to_server).deliver_requests(requests, name),
            forwarder(Direction::Replies, to_client).deliver_replies(replies, names, &cut),
        )
    };
    tokio::select! {
        _ = both => {}
        () = cut.notified() => {}
    }
}

/// Bytes as they arrived; an empty chunk is the end of the stream.
struct Chunk {
    arrived: Instant,
    bytes: Vec<u8>,
}

/// Reads until the stream ends, and forwards the end too. A reset counts as an end: bytes sent before it are still
/// delivered, as the kernel of a real server does.
async fn read_chunks(mut from: ReadHalf<'_>, chunks: mpsc::Sender<Chunk>) {
    let mut buffer = vec![0; MAX_CHUNK_LEN];
    loop {
        let len = from.read(&mut buffer).await.unwrap_or(0);
        let chunk = Chunk { arrived: Instant::now(), bytes: buffer[..len].to_vec() };
        if chunks.send(chunk).await.is_err() || len == 0 {
            return;
        }
    }
}

/// Writes one direction of a connection.
struct Forwarder<'a> {
    id: u64,
    direction: Direction,
    to: WriteHalf<'a>,
    shared: &'a watch::Sender<ProxyState>,
    state: watch::Receiver<ProxyState>,
}

/// The direction has ended: by command, by the end of the stream, or because the peer is gone.
struct DirectionEnded;

impl Forwarder<'_> {
    async fn deliver_requests(mut self, mut chunks: mpsc::Receiver<Chunk>, names: mpsc::Sender<String>) {
        let mut scanner = Scanner::new();
        while let Ok(chunk) = self.next(&mut chunks).await {
            // Names are queued before the request is sent, as the reply could arrive first.
            let mut whole = 0;
            let mut rest = &chunk.bytes[..];
            while !rest.is_empty() {
                rest = &rest[scanner.advance(rest)..];
                if scanner.is_between_frames() {
                    whole += 1;
                    // Fails if the replies have ended, in which case the name is not needed.
                    let _ = names.send(scanner.name()).await;
                }
            }
            if self.write(&chunk, chunk.bytes.len()).await.is_err() {
                break;
            }
            self.count(|counters| counters.requests += whole);
        }
        self.end(chunks).await;
    }

    async fn deliver_replies(
        mut self,
        mut chunks: mpsc::Receiver<Chunk>,
        mut names: mpsc::Receiver<String>,
        cut: &Notify,
    ) {
        let mut scanner = Scanner::new();
        while let Ok(chunk) = self.next(&mut chunks).await {
            let mut dropped = None;
            let mut position = 0;
            while position < chunk.bytes.len() {
                // Push messages are not replies.
                if scanner.is_between_frames()
                    && chunk.bytes[position] != b'>'
                    && let Ok(name) = names.try_recv()
                {
                    dropped = self.decide(&name);
                    if dropped.is_some() {
                        break;
                    }
                }
                position += scanner.advance(&chunk.bytes[position..]);
            }
            if self.write(&chunk, position).await.is_err() {
                break;
            }
            match dropped {
                None => {}
                Some(AfterDrop::Close) => return cut.notify_one(),
                Some(AfterDrop::Stall) => return discard(chunks).await,
            }
        }
        self.end(chunks).await;
    }

    fn decide(&self, name: &str) -> Option<AfterDrop> {
        let mut dropped = None;
        self.shared.send_if_modified(|state| {
            let changed;
            (dropped, changed) = state.reply(name);
            changed
        });
        dropped
    }

    /// Returns the next chunk once it may be forwarded.
    async fn next(&mut self, chunks: &mut mpsc::Receiver<Chunk>) -> Result<Chunk, DirectionEnded> {
        let chunk = loop {
            if self.is_ended() {
                return Err(DirectionEnded);
            }
            tokio::select! {
                _ = self.state.changed() => {}
                chunk = chunks.recv() => break chunk.ok_or(DirectionEnded)?,
            }
        };
        self.wait_until_released(chunk.arrived).await?;
        if chunk.bytes.is_empty() { Err(DirectionEnded) } else { Ok(chunk) }
    }

    /// Closes the writing side, and discards the rest of the stream.
    async fn end(mut self, chunks: mpsc::Receiver<Chunk>) {
        // Fails only on a closed socket.
        let _ = self.to.shutdown().await;
        discard(chunks).await;
    }

    /// Waits until the mode releases bytes that arrived at the given time.
    async fn wait_until_released(&mut self, arrived: Instant) -> Result<(), DirectionEnded> {
        loop {
            if self.is_ended() {
                return Err(DirectionEnded);
            }
            let mode = self.state.borrow_and_update().mode;
            let release_time = mode.release_time(self.direction, arrived);
            if release_time.is_some_and(|at| at <= Instant::now()) {
                return Ok(());
            }
            tokio::select! {
                _ = self.state.changed() => {}
                () = sleep_until(release_time.unwrap_or_else(Instant::now)), if release_time.is_some() => {}
            }
        }
    }

    fn is_ended(&mut self) -> bool {
        self.state.borrow_and_update().ended_below[self.direction as usize] > self.id
    }

    /// Writes the first bytes of a chunk at the pace of the mode.
    async fn write(&mut self, chunk: &Chunk, len: usize) -> Result<(), DirectionEnded> {
        let mut rest = &chunk.bytes[..len];
        while !rest.is_empty() {
            self.wait_until_released(chunk.arrived).await?;
            let pause = match self.state.borrow_and_update().mode {
                Mode::Trickle { pause } => Some(pause),
                _ => None,
            };
            let (now, later) = rest.split_at(if pause.is_some() { 1 } else { rest.len() });
            self.to.write_all(now).await.map_err(|_| DirectionEnded)?;
            let written = now.len() as u64;
            let direction = self.direction;
            self.count(|counters| match direction {
                Direction::Requests => counters.bytes_up += written,
                Direction::Replies => counters.bytes_down += written,
            });
            if let Some(pause) = pause {
                tokio::select! {
                    _ = self.state.changed() => {}
                    () = sleep(pause) => {}
                }
            }
            rest = later;
        }
        Ok(())
    }

    fn count(&self, add: impl FnOnce(&mut Counters)) {
        self.shared.send_if_modified(|state| {
            add(&mut state.counters);
            false
        });
    }
}

/// Reads the rest of the stream without forwarding it, so that the sender is not blocked.
async fn discard(mut chunks: mpsc::Receiver<Chunk>) {
    while chunks.recv().await.is_some_and(|chunk| !chunk.bytes.is_empty()) {}
}
