//! The accept loop of one listener, from the first connection to the end of the shutdown.

use std::{convert::Infallible, future::Future, net::SocketAddr, num::NonZeroUsize, time::Duration};

use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    activity::{Activity, Timeouts},
    connection_limit::{ConnectionLimiter, ConnectionLimits, Slot},
    pending::{PendingConnection, PendingConnections},
    runtime::NoStealRuntime,
    shutdown::{QUIET_GRACE, SHUTDOWN_GRACE, Shutdown},
    stream::Stream,
    tls::{Protocol, TlsAcceptor},
};

/// The pause after an accept error, for example when the process has no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How often a pending connection checks for a connection to evict.
const EVICTION_INTERVAL: Duration = Duration::from_millis(100);

/// How every front end accepts connections. By default without TLS, on the current runtime.
#[derive(Clone, Default)]
pub struct AcceptConfig {
    /// The TLS handshake.
    pub tls: TlsAcceptor,
    /// The threads that serve connections; the runtime of the accept loop if there are none.
    pub runtime: Option<NoStealRuntime>,
    /// Stops the accept loop.
    pub shutdown: Shutdown,
    /// The most connections of each front end; its own default if unset.
    pub max_connections: Option<NonZeroUsize>,
    /// The most connections that one address keeps while all are in use and other addresses wait; half of all if unset.
    pub max_connections_per_address: Option<NonZeroUsize>,
}

/// Accepts the connections of one front end.
pub(crate) struct Acceptor {
    pub(crate) listener: TcpListener,
    /// The default connection limit. When it is reached, a new connection evicts another one.
    pub(crate) default_max_connections: usize,
    pub(crate) timeouts: Timeouts,
    pub(crate) protocol: Protocol,
    pub(crate) config: AcceptConfig,
}

/// An accepted connection, after its TLS handshake.
pub(crate) struct Connection {
    pub(crate) stream: Stream,
    pub(crate) peer: SocketAddr,
    pub(crate) activity: Activity,
}

impl AcceptConfig {
    /// The most connections of a front end with this default.
    pub(crate) fn max_connections(&self, default: usize) -> usize {
        self.max_connections.map_or(default, NonZeroUsize::get)
    }
}

impl Acceptor {
    /// Serves connections until the shutdown stops the server. Then closes the listener, requests connections to close, and gives them
    /// [`SHUTDOWN_GRACE`].
    pub(crate) async fn run<F>(self, serve: impl Fn(Connection) -> F + Clone + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let AcceptConfig { max_connections_per_address, .. } = self.config;
        let limits = ConnectionLimits::new(
            self.config.max_connections(self.default_max_connections),
            max_connections_per_address.map(NonZeroUsize::get),
        );
        let limiter = ConnectionLimiter::new(limits, self.timeouts);
        let mut connections = JoinSet::new();
        tokio::select! {
            never = self.accept(&limiter, &serve, &mut connections) => match never {},
            never = limiter.reap() => match never {},
            () = self.config.shutdown.stopping() => {}
        }
        // A closed listener rejects clients immediately; an open one would keep them waiting in its backlog.
        drop(self.listener);
        limiter.shut_down();
        let all_closed = async { while connections.join_next().await.is_some() {} };
        let _closed_or_aborted = timeout(SHUTDOWN_GRACE, all_closed).await;
    }

    async fn accept<F>(
        &self,
        limiter: &ConnectionLimiter,
        serve: &(impl Fn(Connection) -> F + Clone + Send + 'static),
        connections: &mut JoinSet<()>,
    ) -> Infallible
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut pending = PendingConnections::new(limiter.slots());
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, peer)) => pending.push(stream, peer, limiter),
                    Err(_) => sleep(ACCEPT_PAUSE).await,
                },
                () = limiter.freed(), if !pending.is_empty() => {}
                () = sleep(EVICTION_INTERVAL), if !pending.is_empty() => {}
            }
            while connections.try_join_next().is_some() {}
            pending.close_expired();
            while let Some((next, network)) = pending.next(limiter) {
                match limiter.occupy(network) {
                    Some(slot) => self.start(pending.remove(next), slot, limiter, serve, connections),
                    None => {
                        limiter.evict_for(network);
                        break;
                    }
                }
            }
        }
    }

    /// Serves a connection in a separate task.
    fn start<F>(
        &self,
        PendingConnection { stream, peer, .. }: PendingConnection,
        slot: Slot,
        limiter: &ConnectionLimiter,
        serve: &(impl Fn(Connection) -> F + Clone + Send + 'static),
        connections: &mut JoinSet<()>,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let activity = slot.activity();
        let (tls, serve) = (self.config.tls.clone(), serve.clone());
        let (protocol, timeouts) = (self.protocol, self.timeouts);
        let serve = move |stream| async move {
            let activity = slot.activity();
            let handshake = tokio::select! {
                handshake = tls.accept(stream, protocol) => handshake,
                () = quiet_grace(&activity) => return,
            };
            // A failed handshake affects only this client.
            if let Ok(stream) = handshake {
                activity.set_deadline(Instant::now() + timeouts.first_request);
                serve(Connection { stream, peer, activity }).await;
            }
        };
        let task = match &self.config.runtime {
            None => Ok(connections.spawn(serve(stream))),
            Some(runtime) => {
                let thread = runtime.choose(&limiter.active_per_thread(runtime.threads()));
                activity.set_thread(thread);
                runtime.spawn(thread, stream, serve, connections)
            }
        };
        // A connection that cannot be moved to its thread is broken.
        if let Ok(task) = task {
            activity.set_task(task);
        }
    }
}

/// Waits until the server has been stopping for [`QUIET_GRACE`].
async fn quiet_grace(activity: &Activity) {
    activity.close_requested().await;
    sleep(QUIET_GRACE).await;
}
