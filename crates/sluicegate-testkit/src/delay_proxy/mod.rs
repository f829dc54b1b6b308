//! A TCP proxy on loopback that adds a network round trip between a client and a server.
//!
//! Every byte is delivered half a round trip after it was read, in each direction and in order. The proxy runs on one
//! thread that sleeps in `epoll_pwait2` with nanosecond timeouts, so that delays are accurate to some tens of
//! microseconds without spinning; tokio's timers round to a millisecond. It does not interpret the bytes.
//!
//! Differences from a real network: a connection is established without a delay, bandwidth is unlimited, and no packet
//! is lost. For faults, use [`crate::proxy`], in front of or behind this proxy.

mod event_loop;
mod pipe;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use self::event_loop::EventLoop;

/// Maximum number of open connections; further ones are reset.
pub const MAX_CONNECTIONS: usize = 8_192;

/// Maximum number of bytes held in each direction of a connection. Beyond it the proxy stops reading, and the sender's
/// socket buffer fills.
pub const MAX_HELD_LEN: usize = 1024 * 1024;

/// Maximum number of connections waiting to be accepted.
const BACKLOG: i32 = 4_096;

/// Smallest timer slack the kernel accepts; the default of 50 us would be added to every delay.
const TIMER_SLACK_NANOS: NonZeroU64 = NonZeroU64::MIN;

/// A running proxy. Dropping it closes all connections and ends its thread.
#[derive(Debug)]
pub struct DelayProxy {
    addr: SocketAddr,
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

impl DelayProxy {
    /// Starts a proxy to the given address. It accepts connections when this returns.
    ///
    /// # Panics
    ///
    /// Panics if no socket, port or thread is available.
    #[must_use]
    pub fn start(upstream: SocketAddr, round_trip: Duration) -> DelayProxy {
        let listener = listen().expect("a free port on loopback");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let control = Arc::new(Control::new(round_trip).expect("an event file descriptor"));
        let event_loop = EventLoop::new(listener, upstream, Arc::clone(&control)).expect("an epoll instance");
        let run = move || {
            // Without this the delays are less accurate, but still at least as long as configured.
            let _ = rustix::thread::set_current_timer_slack(Some(TIMER_SLACK_NANOS));
            event_loop.run();
        };
        let thread = thread::Builder::new().name(String::from("delay-proxy")).spawn(run);
        DelayProxy { addr, control, thread: Some(thread.expect("a thread for the delay proxy")) }
    }

    /// Returns the address clients connect to.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the address clients connect to as `redis://127.0.0.1:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr)
    }

    /// Changes the round trip for bytes read from now on. Bytes already held keep their delivery time, and later bytes
    /// never overtake them. Zero delivers immediately.
    pub fn set_round_trip(&self, round_trip: Duration) {
        self.control.set_round_trip(round_trip);
    }
}

impl Drop for DelayProxy {
    fn drop(&mut self) {
        self.control.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !thread::panicking()
        {
            panic!("the delay proxy on {} panicked", self.addr);
        }
    }
}

/// State shared by the handle and the proxy's thread.
#[derive(Debug)]
struct Control {
    one_way_nanos: AtomicU64,
    is_stopped: AtomicBool,
    /// Interrupts the thread's wait.
    wake_up: OwnedFd,
}

impl Control {
    fn new(round_trip: Duration) -> rustix::io::Result<Control> {
        let control = Control {
            one_way_nanos: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            wake_up: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        };
        control.set_round_trip(round_trip);
        Ok(control)
    }

    fn set_round_trip(&self, round_trip: Duration) {
        let one_way = u64::try_from((round_trip / 2).as_nanos()).unwrap_or(u64::MAX);
        self.one_way_nanos.store(one_way, Ordering::Relaxed);
    }

    fn one_way(&self) -> Duration {
        Duration::from_nanos(self.one_way_nanos.load(Ordering::Relaxed))
    }

    fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        rustix::io::write(&self.wake_up, &1_u64.to_ne_bytes())
            .expect("an event counter of 1 does not overflow");
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire)
    }
}

/// Opens a non-blocking listener on a free port; the standard library's backlog of 128 is too short for a benchmark.
fn listen() -> rustix::io::Result<TcpListener> {
    let socket = tcp_socket()?;
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// Starts to connect; the socket becomes writable when the connection is established.
fn connect(upstream: SocketAddr) -> rustix::io::Result<std::net::TcpStream> {
    let socket = tcp_socket()?;
    match rustix::net::connect(&socket, &upstream) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(std::net::TcpStream::from(socket)),
        Err(error) => Err(error),
    }
}

fn tcp_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)
}
