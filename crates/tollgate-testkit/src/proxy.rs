//! A TCP proxy on loopback, between a client under test and a real server, which does to the traffic what a bad
//! network does.
//!
//! It has a thread and a runtime of its own: a test may block, and may pause tokio's clock, without stopping it. What
//! [`Proxy::set`] says holds for every byte that has not been passed on when it returns, on existing connections
//! and on new ones.
//!
//! It understands where RESP frames begin and end, so that it loses exactly one reply and never shifts the others.
//! It does not count on connections where replies do not follow requests one to one: TLS, subscriptions, `MONITOR`,
//! `CLIENT REPLY OFF`.

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

/// Bounds the connections that are open at once; what comes beyond is reset.
pub const MAX_CONNECTIONS: usize = 512;

/// Bounds what is read at once.
const MAX_CHUNK_LEN: usize = 16 * 1024;

/// Bounds the chunks held back in each direction of a connection; beyond, the sender's socket fills.
const MAX_CHUNKS_HELD: usize = 64;

/// Bounds the requests of a connection that wait for a reply; beyond, further ones are held back.
const MAX_IN_FLIGHT: usize = 65_536;

/// Bounds the connections that wait to be accepted.
const BACKLOG: u32 = 1_024;

/// What the proxy does to traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Passes everything on.
    Pass,
    /// Passes everything on, each byte this much later. A delay without end ([`Duration::MAX`]) stalls one direction.
    Delay {
        /// How much later requests arrive.
        requests: Duration,
        /// How much later replies arrive.
        replies: Duration,
    },
    /// Passes one byte at a time, in both directions.
    Trickle {
        /// The time between two bytes of a direction.
        pause: Duration,
    },
    /// Accepts, reads and says nothing. What it held back is delivered when the mode changes, as a stopped server
    /// would read it when it resumes, also if the client has gone away meanwhile.
    Stall,
    /// Resets open connections, and each new one as soon as it is accepted.
    Cut,
    /// Resets open connections and stops listening: connecting fails with "connection refused".
    Refuse,
    /// Delivers requests, and loses some of their replies.
    DropReplies(DropReplies),
}

/// Which replies are dropped, and what becomes of the connection. It cannot go on: replies are matched by their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropReplies {
    /// The requests that are counted.
    pub requests: RequestFilter,
    /// Which of them lose their reply.
    pub occurrence: Occurrence,
    /// What the client sees instead.
    pub after: AfterDrop,
}

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestFilter {
    /// All of them, including those a client sends by itself when it connects.
    Any,
    /// Those whose command is one of these names, in upper case.
    Named(&'static [&'static str]),
}

impl RequestFilter {
    /// Scripts, which is how tollgate decides.
    pub const SCRIPTS: RequestFilter = RequestFilter::Named(&["EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO"]);

    fn matches(self, name: &str) -> bool {
        match self {
            RequestFilter::Any => true,
            RequestFilter::Named(names) => names.contains(&name),
        }
    }
}

/// Which of the requests that count lose their reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occurrence {
    /// The next one; after it, the mode is [`Mode::Pass`].
    Next,
    /// The n-th, the 2n-th and so on, over all connections, counted since the mode was set.
    Every(u64),
}

/// What a client sees instead of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterDrop {
    /// The end of the stream.
    Close,
    /// Nothing, for as long as the connection lasts. Its later requests are delivered, their replies dropped too.
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

/// What the proxy has seen since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections accepted, also those that were reset at once.
    pub accepted: u64,
    /// Of these, the ones reset because [`MAX_CONNECTIONS`] were open.
    pub rejected: u64,
    /// Connections open now. During [`Mode::Stall`] also those whose client has left.
    pub open: usize,
    /// Whole requests delivered.
    pub requests: u64,
    /// Replies that were passed on, or begun.
    pub replies: u64,
    /// Replies dropped by [`Mode::DropReplies`].
    pub dropped_replies: u64,
    /// Bytes delivered to the server.
    pub bytes_up: u64,
    /// Bytes delivered to clients.
    pub bytes_down: u64,
}

/// A running proxy, which is also its remote control; it ends when dropped, and its connections with it.
#[derive(Debug)]
pub struct Proxy {
    addr: SocketAddr,
    state: Arc<watch::Sender<ProxyState>>,
    /// Ends the thread when dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy that passes everything on to the given address. It listens when this returns.
    ///
    /// # Panics
    ///
    /// When there is no free port, or no thread to be had.
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

    /// Returns where clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns where clients connect to, as `redis://127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Changes what is done to traffic from now on. With [`Mode::Cut`] and [`Mode::Refuse`], no connection is open when
    /// this returns.
    ///
    /// # Panics
    ///
    /// When the mode loses every zeroth reply, or the proxy's thread has died.
    pub fn set(&self, mode: Mode) {
        if let Mode::DropReplies(DropReplies { occurrence: Occurrence::Every(n), .. }) = mode {
            assert_ne!(n, 0, "every zeroth reply is none: use Mode::Pass");
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
        wait::until("the proxy listens, or no longer does", wait::PATIENCE, || {
            self.state.borrow().listening == listening
        });
    }

    /// Passes everything on.
    pub fn pass(&self) {
        self.set(Mode::Pass);
    }

    /// Delays requests, and replies, by so much each.
    pub fn delay(&self, each_way: Duration) {
        self.set(Mode::Delay { requests: each_way, replies: each_way });
    }

    /// Holds everything back, on open connections and on new ones.
    pub fn stall(&self) {
        self.set(Mode::Stall);
    }

    /// Resets open connections and every new one.
    pub fn cut(&self) {
        self.set(Mode::Cut);
    }

    /// Delivers all requests; the n-th that counts, the 2n-th and so on find the connection ended instead of a reply.
    pub fn drop_every_nth_reply(&self, n: u64, requests: RequestFilter) {
        self.set(Mode::DropReplies(DropReplies {
            requests,
            occurrence: Occurrence::Every(n),
            after: AfterDrop::Close,
        }));
    }

    /// Delivers the next request that counts and ends its connection instead of a reply; then passes everything on.
    pub fn drop_next_reply(&self, requests: RequestFilter) {
        self.set(Mode::DropReplies(DropReplies {
            requests,
            occurrence: Occurrence::Next,
            after: AfterDrop::Close,
        }));
    }

    /// Delivers the next request that counts, and leaves its connection silent for good; passes on everything else.
    pub fn drop_next_reply_and_stall(&self, requests: RequestFilter) {
        self.set(Mode::DropReplies(DropReplies {
            requests,
            occurrence: Occurrence::Next,
            after: AfterDrop::Stall,
        }));
    }

    /// Resets the connections that are open, once; new ones are treated as the mode says.
    pub fn reset_connections(&self) {
        self.state.send_modify(|state| state.reset_below = state.next_id);
        self.wait_for_resets();
    }

    /// Ends one direction of each open connection, as if the peer had shut it down for writing; the other goes on.
    pub fn half_close(&self, direction: Direction) {
        self.state.send_modify(|state| state.ended_below[direction as usize] = state.next_id);
    }

    /// Returns what was counted up to now.
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

/// All that the remote control and the connections share. One lock keeps it consistent; only a change of state wakes
/// the connections, not a count.
#[derive(Debug)]
struct ProxyState {
    mode: Mode,
    /// Requests that count for [`Mode::DropReplies`], since it was set.
    matched: u64,
    /// Connections below this are to be reset.
    reset_below: u64,
    /// Connections below this have the direction ended.
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

    /// Admits a connection under a number of its own, or says that it must be reset.
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

    /// Counts a reply to the named request, and says whether it is dropped, and whether the mode changed by that.
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
    /// Tells whether no connection survives it.
    fn closes_connections(self) -> bool {
        matches!(self, Mode::Cut | Mode::Refuse)
    }

    /// Returns when bytes that arrived at the given time may go on; `None` means not in this mode.
    fn release_time(self, direction: Direction, arrived: Instant) -> Option<Instant> {
        match (self, direction) {
            (Mode::Stall | Mode::Cut | Mode::Refuse, _) => None,
            (Mode::Delay { requests, .. }, Direction::Requests) => arrived.checked_add(requests),
            (Mode::Delay { replies, .. }, Direction::Replies) => arrived.checked_add(replies),
            (Mode::Pass | Mode::Trickle { .. } | Mode::DropReplies(_), _) => Some(arrived),
        }
    }
}

/// A port that stays ours while nothing listens on it.
struct ReservedPort {
    addr: SocketAddr,
    /// Bound and never listening: the kernel refuses connections, and gives the port to nobody else.
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
            self.listener = Some(bind(self.addr).listen(BACKLOG).expect("the proxy's port is its own"));
        }
    }

    fn refuse(&mut self) {
        self.listener = None;
    }

    /// Returns the next connection; waits for ever while refusing.
    async fn accept(&self) -> TcpStream {
        let Some(listener) = &self.listener else { return std::future::pending().await };
        loop {
            // An error is a client's that left before it was accepted.
            if let Ok((client, _)) = listener.accept().await {
                return client;
            }
        }
    }
}

/// Binds a socket so that another of ours may have the same address.
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

/// Makes the drop of a socket a reset: no farewell, nothing that is still to be sent.
fn reset(stream: &TcpStream) {
    // Fails only on a socket that is gone.
    let _ = stream.set_zero_linger();
}

/// Serves one connection until both directions have ended, or an order ends it.
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
    // Small chunks leave at once, or a trickle would be a flood; fails only on a socket that is gone.
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

/// Bytes as they arrived; none mean the end of the stream.
struct Chunk {
    arrived: Instant,
    bytes: Vec<u8>,
}

/// Reads until the stream ends, and passes its end on too. A reset counts as an end: what was sent before it is still
/// delivered, as the kernel of a real server would.
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

/// The writing side of one direction.
struct Forwarder<'a> {
    id: u64,
    direction: Direction,
    to: WriteHalf<'a>,
    shared: &'a watch::Sender<ProxyState>,
    state: watch::Receiver<ProxyState>,
}

/// The direction is over: by an order, by its end, or because nobody is there to write to.
struct DirectionEnded;

impl Forwarder<'_> {
    async fn deliver_requests(mut self, mut chunks: mpsc::Receiver<Chunk>, names: mpsc::Sender<String>) {
        let mut scanner = Scanner::new();
        while let Ok(chunk) = self.next(&mut chunks).await {
            // Named before they are sent, or the reply could be here first.
            let mut whole = 0;
            let mut rest = &chunk.bytes[..];
            while !rest.is_empty() {
                rest = &rest[scanner.advance(rest)..];
                if scanner.is_between_frames() {
                    whole += 1;
                    // Nobody asks for the name any more if the replies have ended.
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
                // Pushed messages answer nobody.
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

    /// Returns the next bytes once they may go on.
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

    /// Tells the receiver that nothing more will come, and the sender nothing.
    async fn end(mut self, chunks: mpsc::Receiver<Chunk>) {
        // Fails only on a socket that is gone.
        let _ = self.to.shutdown().await;
        discard(chunks).await;
    }

    /// Waits until the mode lets go of what arrived at the given time.
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

    /// Writes the first bytes of a chunk, at the mode's pace.
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

/// Reads on without passing anything on, so that the other side is not held up.
async fn discard(mut chunks: mpsc::Receiver<Chunk>) {
    while chunks.recv().await.is_some_and(|chunk| !chunk.bytes.is_empty()) {}
}
