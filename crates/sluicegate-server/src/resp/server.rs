//! Serves the Redis-protocol connections of one listener.

use tokio::net::TcpListener;

use super::{
    Endpoint,
    connection::{FIRST_COMMAND_TIMEOUT, IDLE_TIMEOUT},
};
use crate::net::{
    acceptor::{AcceptConfig, Acceptor, Connection},
    activity::Timeouts,
    tls::Protocol,
};

/// The default connection limit: below the usual limit of 1024 open files per process. When it is reached, a new
/// connection evicts the one that has been idle the longest.
pub const MAX_CONNECTIONS: usize = 1_000;

pub(super) const TIMEOUTS: Timeouts = Timeouts { first_request: FIRST_COMMAND_TIMEOUT, idle: IDLE_TIMEOUT };

/// Serves connections until the shutdown stops the server. Then answers the commands that clients have sent, and closes each connection
/// once it is quiet, or after [`SHUTDOWN_GRACE`](crate::net::shutdown::SHUTDOWN_GRACE).
pub async fn run(listener: TcpListener, endpoint: Endpoint, config: AcceptConfig) {
    endpoint.info.set_max_clients(config.max_connections(MAX_CONNECTIONS));
    let acceptor = Acceptor {
        listener,
        default_max_connections: MAX_CONNECTIONS,
        timeouts: TIMEOUTS,
        protocol: Protocol::Redis,
        config,
    };
    let serve = move |Connection { stream, peer, activity }: Connection| {
        let endpoint = endpoint.clone();
        async move { endpoint.serve_connection(stream, Some(peer), &activity).await }
    };
    acceptor.run(serve).await;
}
