//! A TCP proxy on loopback between a client under test and a real server, which injects network faults.
//!
//! It has its own thread and runtime, so a test may block or pause tokio's clock. A mode set with [`Proxy::set`]
//! applies to every byte that has not been forwarded when it returns, on existing and new connections.
//!
//! The proxy finds the boundaries of RESP frames, so that it drops exactly one reply and never shifts the others. It
//! cannot do so where replies do not follow requests one to one: TLS, subscriptions, `MONITOR`, `CLIENT REPLY OFF`.

mod relay;
mod state;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use self::relay::{ReservedPort, accept};
use self::state::ProxyState;
use crate::wait;

/// Maximum number of open connections; further ones are reset.
pub const MAX_CONNECTIONS: usize = 512;

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
    /// Scripts, which sluicegate uses for decisions.
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
