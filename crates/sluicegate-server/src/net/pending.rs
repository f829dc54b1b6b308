//! Accepted connections that wait for a slot.
//!
//! They wait here and not in the listener's backlog, so that an address with many connections does not delay one with
//! few. If too many wait, a connection of the address with the most connections is closed.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use tokio::{net::TcpStream, time::Instant};

use super::connection_limit::{ClientNetwork, ConnectionLimiter, MIN_IDLE};

/// The maximum number of waiting connections of one listener, if it has that many slots.
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
    /// Creates the queue of a listener with this many slots. Each slot can be freed within [`MIN_IDLE`], so it holds no
    /// more connections than there are slots.
    pub(super) fn new(slots: usize) -> Self {
        Self { max: slots.min(MAX_PENDING), connections: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Adds a connection. If too many wait, closes the oldest one of the address with the most connections, here and in slots: its client
    /// is the most likely to have given up.
    pub(super) fn push(&mut self, stream: TcpStream, peer: SocketAddr, limiter: &ConnectionLimiter) {
        self.connections.push(PendingConnection { stream, peer, accepted: Instant::now() });
        if self.connections.len() <= self.max {
            return;
        }
        let mut pending: HashMap<ClientNetwork, usize> = HashMap::new();
        for connection in &self.connections {
            *pending.entry(connection.network()).or_default() += 1;
        }
        let most = pending.into_iter().max_by_key(|(network, pending)| pending + limiter.count(*network));
        let is_of_most =
            |connection: &PendingConnection| most.is_some_and(|(most, _)| connection.network() == most);
        if let Some(oldest) = self.connections.iter().position(is_of_most) {
            self.connections.remove(oldest);
        }
    }

    /// Closes the connections that have waited too long.
    pub(super) fn close_expired(&mut self) {
        let now = Instant::now();
        self.connections.retain(|connection| now.duration_since(connection.accepted) < MAX_WAIT);
    }

    /// The index and the address of the connection that gets the next slot: the oldest one of the address with the fewest slots.
    pub(super) fn next(&self, limiter: &ConnectionLimiter) -> Option<(usize, ClientNetwork)> {
        let networks = self.connections.iter().map(PendingConnection::network).enumerate();
        networks.min_by_key(|(_, network)| limiter.count(*network))
    }

    pub(super) fn remove(&mut self, index: usize) -> PendingConnection {
        self.connections.remove(index)
    }
}
