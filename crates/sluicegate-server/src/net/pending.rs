//! Accepted connections that wait for a slot.
//!
//! They wait here and not in the listener's backlog, so that an address with many connections does not delay one with few.

use std::{net::SocketAddr, time::Duration};

use tokio::{net::TcpStream, time::Instant};

use super::connection_limit::{ClientNetwork, ConnectionLimiter, MIN_IDLE};

/// The most connections of one listener that wait, if it has that many slots. Further ones stay in the listener's backlog.
pub(crate) const MAX_PENDING: usize = 256;

/// How long a connection waits before it is closed. Idle connections are evicted within [`MIN_IDLE`], so this happens only if none is idle.
const MAX_WAIT: Duration = MIN_IDLE.saturating_mul(3);

/// The connections of one listener that wait for a slot, in order of arrival.
pub(super) struct PendingConnections {
    max: usize,
    connections: Vec<PendingConnection>,
}

pub(super) struct PendingConnection {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    accepted: Instant,
}

impl PendingConnection {
    fn network(&self) -> ClientNetwork {
        self.peer.ip().into()
    }
}

impl PendingConnections {
    /// For a listener with this many slots. Each slot can be freed within [`MIN_IDLE`], so no more connections wait than there are slots.
    pub(super) fn new(slots: usize) -> Self {
        Self { max: slots.min(MAX_PENDING), connections: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.connections.len() >= self.max
    }

    pub(super) fn push(&mut self, stream: TcpStream, peer: SocketAddr) {
        self.connections.push(PendingConnection { stream, peer, accepted: Instant::now() });
    }

    /// Closes the connections that have waited too long.
    pub(super) fn close_expired(&mut self) {
        let now = Instant::now();
        self.connections.retain(|connection| now.duration_since(connection.accepted) < MAX_WAIT);
    }

    /// The index and the address of the connection that gets the next slot: the first of the address with the fewest.
    pub(super) fn next(&self, limiter: &ConnectionLimiter) -> Option<(usize, ClientNetwork)> {
        let networks = self.connections.iter().map(PendingConnection::network).enumerate();
        networks.min_by_key(|(_, network)| limiter.count(*network))
    }

    pub(super) fn remove(&mut self, index: usize) -> PendingConnection {
        self.connections.remove(index)
    }
}
