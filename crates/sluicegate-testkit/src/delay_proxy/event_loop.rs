//! The proxy's thread: waits for sockets and timers, and advances the pipes concerned.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;

use super::pipe::{ConnectionReset, MAX_READ_LEN, Pipe, now};
use super::{Control, MAX_CONNECTIONS, connect};

/// Maximum number of events per wait.
const MAX_EVENTS: usize = 256;

/// Event data of the listener and of the wake-up descriptor; connections use smaller numbers.
const LISTENER: u64 = u64::MAX;
const WAKE_UP: u64 = u64::MAX - 1;

#[derive(Debug)]
struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// From the client to the server.
    requests: Pipe,
    /// From the server to the client.
    replies: Pipe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    Requests,
    Replies,
}

/// A timer that fires when bytes of one direction are due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Timer {
    due: Instant,
    connection: u64,
    direction: Direction,
}

#[derive(Debug)]
pub(super) struct EventLoop {
    epoll: OwnedFd,
    listener: TcpListener,
    upstream: SocketAddr,
    control: Arc<Control>,
    /// Never reused, so that a late event or timer does not reach another connection.
    next_id: u64,
    connections: HashMap<u64, Connection>,
    /// At most one for each direction of each connection.
    timers: BinaryHeap<Reverse<Timer>>,
    buffer: Vec<u8>,
}

impl EventLoop {
    pub(super) fn new(
        listener: TcpListener,
        upstream: SocketAddr,
        control: Arc<Control>,
    ) -> rustix::io::Result<EventLoop> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        epoll::add(&epoll, &control.wake_up, EventData::new_u64(WAKE_UP), EventFlags::IN)?;
        Ok(EventLoop {
            epoll,
            listener,
            upstream,
            control,
            next_id: 0,
            connections: HashMap::new(),
            timers: BinaryHeap::new(),
            buffer: vec![0; MAX_READ_LEN],
        })
    }

    /// Runs until the proxy is stopped.
    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(MAX_EVENTS);
        while !self.control.is_stopped() {
            self.wait(&mut events);
            for event in events.drain(..) {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    WAKE_UP => {}
                    socket => self.handle(socket, event.flags),
                }
            }
            self.fire_timers();
        }
    }

    /// Waits for events until the first timer fires.
    fn wait(&self, events: &mut Vec<Event>) {
        let timeout =
            self.timers.peek().map(|Reverse(timer)| timespec(timer.due.saturating_duration_since(now())));
        match epoll::wait(&self.epoll, spare_capacity(events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("epoll_pwait2 failed: {error}"),
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((client, _)) => self.open(client),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => panic!("the delay proxy cannot accept a connection: {error}"),
            }
        }
    }

    fn open(&mut self, client: TcpStream) {
        if self.connections.len() >= MAX_CONNECTIONS {
            return reset(&client);
        }
        let Ok(server) = connect(self.upstream) else { return reset(&client) };
        let id = self.next_id;
        self.next_id += 1;
        client.set_nonblocking(true).expect("an open socket");
        for (socket, data) in [(&client, 2 * id), (&server, 2 * id + 1)] {
            socket.set_nodelay(true).expect("an open TCP socket");
            let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            epoll::add(&self.epoll, socket, EventData::new_u64(data), flags)
                .expect("a socket of this connection");
        }
        let connection = Connection { client, server, requests: Pipe::default(), replies: Pipe::default() };
        self.connections.insert(id, connection);
    }

    /// Handles an event of the socket whose event data is this: twice the connection's id, plus one for its server side.
    fn handle(&mut self, socket: u64, flags: EventFlags) {
        let (id, is_server) = (socket / 2, socket % 2 == 1);
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (outgoing, incoming) = if is_server {
            (&mut connection.replies, &mut connection.requests)
        } else {
            (&mut connection.requests, &mut connection.replies)
        };
        let (from_here, to_here) = if is_server {
            (Direction::Replies, Direction::Requests)
        } else {
            (Direction::Requests, Direction::Replies)
        };
        let mut is_readable = false;
        if flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            outgoing.mark_ending();
            is_readable = true;
        } else if flags.contains(EventFlags::IN) {
            outgoing.mark_readable();
            is_readable = true;
        }
        let is_unblocked =
            flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) && incoming.unblock();
        if is_readable {
            self.advance(id, from_here);
        }
        if is_unblocked {
            self.advance(id, to_here);
        }
    }

    fn fire_timers(&mut self) {
        if self.timers.is_empty() {
            return;
        }
        let now = now();
        while let Some(&Reverse(Timer { due, connection, direction })) = self.timers.peek() {
            if due > now {
                return;
            }
            self.timers.pop();
            if let Some(connection) = self.connections.get_mut(&connection) {
                connection.pipe(direction).has_timer = false;
            }
            self.advance(connection, direction);
        }
    }

    /// Advances one direction, sets its timer, and removes the connection if it has ended.
    fn advance(&mut self, id: u64, direction: Direction) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let one_way = self.control.one_way();
        let Connection { client, server, requests, replies } = connection;
        let (pipe, source, destination) = match direction {
            Direction::Requests => (requests, &*client, &*server),
            Direction::Replies => (replies, &*server, &*client),
        };
        match pipe.advance(source, destination, one_way, &mut self.buffer) {
            Ok(()) => {
                if !pipe.has_timer
                    && let Some(due) = pipe.next_due()
                {
                    pipe.has_timer = true;
                    self.timers.push(Reverse(Timer { due, connection: id, direction }));
                }
                if connection.requests.is_finished && connection.replies.is_finished {
                    self.connections.remove(&id);
                }
            }
            Err(ConnectionReset) => {
                reset(client);
                reset(server);
                self.connections.remove(&id);
            }
        }
    }
}

impl Connection {
    fn pipe(&mut self, direction: Direction) -> &mut Pipe {
        match direction {
            Direction::Requests => &mut self.requests,
            Direction::Replies => &mut self.replies,
        }
    }
}

/// Makes closing the socket send a reset instead of an end.
fn reset(socket: &TcpStream) {
    // Fails only if the connection is already closed.
    let _ = set_socket_linger(socket, Some(Duration::ZERO));
}

fn timespec(duration: Duration) -> Timespec {
    Timespec::try_from(duration).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 })
}
