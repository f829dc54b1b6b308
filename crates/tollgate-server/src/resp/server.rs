//! Connections: how many, and how they end when the server does.

use std::future::Future;

use tokio::net::TcpListener;

use super::Endpoint;
use crate::{
    net::acceptor::{Entrance, Reception, Visitor},
    net::tls::Protocol,
};

/// The most connections at a time, within the 1024 open files that a process usually may have. For one more, the one that
/// has been silent the longest is ended.
pub const MAX_CONNECTIONS: usize = 1_000;

/// Serves clients until `stop` is ready. Then takes no more of them, answers what they have sent, and ends each connection
/// once it is quiet, or after [`SHUTDOWN_GRACE`](crate::net::acceptor::SHUTDOWN_GRACE).
pub async fn run(
    listener: TcpListener,
    endpoint: Endpoint,
    reception: Reception,
    stop: impl Future<Output = ()>,
) {
    let entrance = Entrance { listener, places: MAX_CONNECTIONS, reception, protocol: Protocol::Redis };
    let serve = move |Visitor { stream, peer, voice, stop }: Visitor| {
        let endpoint = endpoint.clone();
        async move { endpoint.serve_guest(stream, Some(peer), &voice, stop).await }
    };
    entrance.run(serve, stop).await;
}
