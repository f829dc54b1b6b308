//! Connections: how many, how long, and how they end.

use std::{convert::Infallible, future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Extension, Router, extract::ConnectInfo, middleware::AddExtension};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{SignalKind, signal},
    sync::Semaphore,
};
use tower_layer::Layer;

/// The most connections at a time, within the 1024 open files that a process usually may have. More wait
/// to be accepted.
pub const MAX_CONNECTIONS: usize = 1_000;

/// How long a connection may take to send the head of its next request, and so also how long it may idle.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest head of a request, in bytes.
pub const MAX_HEAD: usize = 64 << 10;

/// How long requests in flight may take to finish once the server is told to stop.
pub const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// The pause after a connection could not be accepted, for want of open files for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A server that has its address and takes connections, but does not answer yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address can be reached from other machines, and there is no way yet to say who may call.
    #[error(
        "{0} can be reached from other machines, and everybody there could call: \
         use 127.0.0.1:{port} or [::1]:{port}",
        port = .0.port()
    )]
    NotLoopback(SocketAddr),
    /// The address is taken or not this machine's.
    #[error("cannot listen on {address}: {reason}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        reason: io::Error,
    },
    /// The system does not let the process listen for signals.
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
}

impl Server {
    /// Takes the address; with port 0, any free port of it.
    ///
    /// # Errors
    /// When the address is no loopback address, or is taken.
    pub async fn bind(address: SocketAddr) -> Result<Self, ServeError> {
        if !address.ip().to_canonical().is_loopback() {
            return Err(ServeError::NotLoopback(address));
        }
        let bound = async {
            let listener = TcpListener::bind(address).await?;
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        };
        bound.await.map_err(|reason| ServeError::Bind { address, reason })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` is ready. Then takes no more connections, and gives requests in flight
    /// [`SHUTDOWN_GRACE`] to finish.
    pub async fn run(self, routes: Router, stop: impl Future<Output = ()>) {
        let connections = GracefulShutdown::new();
        tokio::select! {
            never = accept(&self.listener, routes, &connections) => match never {},
            () = stop => {}
        }
        // Who comes now is turned away, rather than kept waiting for somebody who does not accept.
        drop(self.listener);
        let _finished_or_cut_off = tokio::time::timeout(SHUTDOWN_GRACE, connections.shutdown()).await;
    }
}

/// Ready at the first SIGTERM or Ctrl-C after this call, also one that comes before it is awaited.
///
/// # Errors
/// When the system does not let the process listen for signals.
pub fn stop_signal() -> Result<impl Future<Output = ()>, ServeError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(ServeError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(ServeError::Signals)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

async fn accept(listener: &TcpListener, routes: Router, connections: &GracefulShutdown) -> Infallible {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore is never closed");
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(_) => {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let connection = connections.watch(connection(stream, peer, routes.clone()));
        tokio::spawn(async move {
            // A connection that breaks off is its client's affair.
            let _ended = connection.await;
            drop(place);
        });
    }
}

/// Routes that find out who connected.
type Routes = AddExtension<Router, ConnectInfo<SocketAddr>>;

fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    routes: Router,
) -> http1::Connection<TokioIo<TcpStream>, TowerToHyperService<Routes>> {
    // Answers are small and waited for. Where this cannot be set, they are only slower.
    let _set = stream.set_nodelay(true);
    let routes = Extension(ConnectInfo(peer)).layer(routes);
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes))
}
