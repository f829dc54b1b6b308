//! Accepts connections and forwards bytes in both directions, as the mode requires.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::state::ProxyState;
use super::{AfterDrop, Counters, Direction, Mode};
use crate::resp::Scanner;

/// Maximum number of bytes per read.
const MAX_CHUNK_LEN: usize = 16 * 1024;

/// Maximum number of chunks held back in each direction of a connection. Beyond that, the socket of the sender fills
/// up.
const MAX_CHUNKS_HELD: usize = 64;

/// Maximum number of requests of a connection without a reply; further requests are held back.
const MAX_IN_FLIGHT: usize = 65_536;

/// Maximum number of connections waiting to be accepted.
const BACKLOG: u32 = 1_024;

/// A port that stays reserved while the proxy does not listen on it.
pub(super) struct ReservedPort {
    pub(super) addr: SocketAddr,
    /// Bound but never listening: the kernel refuses connections and does not assign the port to another socket.
    _holder: TcpSocket,
    listener: Option<TcpListener>,
}

impl ReservedPort {
    pub(super) fn hold() -> ReservedPort {
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

    fn refuse_connections(&mut self) {
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

pub(super) async fn accept(
    mut port: ReservedPort,
    upstream: SocketAddr,
    shared: Arc<watch::Sender<ProxyState>>,
) {
    let mut state = shared.subscribe();
    loop {
        let is_refusing_connections = state.borrow_and_update().mode == Mode::Refuse;
        if is_refusing_connections {
            port.refuse_connections();
        } else {
            port.listen();
        }
        shared.send_if_modified(|state| {
            state.listening = !is_refusing_connections;
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
    // Small chunks are sent immediately, which byte-by-byte delivery requires. Fails only on a closed socket.
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

/// The direction has ended: by command, by the end of the stream, or because the peer has disconnected.
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
