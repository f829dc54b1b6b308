//! Connections of the HTTP front end: how many, how long, and how they end.

use std::{
    convert::Infallible,
    fmt::Display,
    future::Future,
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    BoxError,
    body::{Bytes, HttpBody},
    response::Response,
};
use hyper::{Request, body::Incoming, header, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpListener, sync::Notify};

use super::chunked_body;
use crate::{
    aside::Aside,
    net::acceptor::{Entrance, Reception, Visitor},
    net::listener::{self, ListenError},
    net::tls::Protocol,
    unhurried::Unhurried,
};

/// The most connections at a time. For one more, the one that has been silent the longest is ended.
pub const MAX_CONNECTIONS: usize = 1_000;

/// How long a connection may take to send the head of its next request, and so also how long it may idle.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The largest head of a request, in bytes.
pub const MAX_HEAD: usize = 64 << 10;

/// Whether the server is about to stop: then it says so, and clients are asked to connect elsewhere. Cheap to clone; all
/// clones change together.
#[derive(Clone, Debug, Default)]
pub struct Draining(Arc<End>);

#[derive(Debug, Default)]
struct End {
    is_near: AtomicBool,
    told: Notify,
}

impl Draining {
    /// It is, from now on.
    pub fn begin(&self) {
        self.0.is_near.store(true, Ordering::Release);
        self.0.told.notify_waiters();
    }

    /// Whether it is.
    pub fn has_begun(&self) -> bool {
        self.0.is_near.load(Ordering::Acquire)
    }

    /// Ready once it is.
    pub async fn begun(&self) {
        // listens before it looks, so that it does not miss the moment in between
        let told = self.0.told.notified();
        if !self.has_begun() {
            told.await;
        }
    }
}

/// A server that has its address and takes connections, but does not answer yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    reception: Reception,
    draining: Draining,
}

impl Server {
    /// Takes the address; with port 0, any free port of it.
    ///
    /// # Errors
    /// When the address is taken or not this machine's.
    pub async fn bind(address: SocketAddr) -> Result<Self, ListenError> {
        let (listener, address) = listener::bind(address).await?;
        Ok(Self { listener, address, reception: Reception::default(), draining: Draining::default() })
    }

    /// The same, where clients are received so.
    #[must_use]
    pub fn receiving(mut self, reception: Reception) -> Self {
        self.reception = reception;
        self
    }

    /// The same, which asks clients to connect elsewhere once it is about to stop.
    #[must_use]
    pub fn draining(mut self, draining: Draining) -> Self {
        self.draining = draining;
        self
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` is ready. Then takes no more connections, and gives requests in flight [`SHUTDOWN_GRACE`] to
    /// finish.
    ///
    /// [`SHUTDOWN_GRACE`]: crate::net::acceptor::SHUTDOWN_GRACE
    pub async fn run(self, routes: impl Routes, stop: impl Future<Output = ()>) {
        let Self { listener, reception, draining, .. } = self;
        let entrance = Entrance { listener, places: MAX_CONNECTIONS, reception, protocol: Protocol::Http1 };
        let serve =
            move |visitor| serve(visitor, Served { routes: routes.clone(), draining: draining.clone() });
        entrance.run(serve, stop).await;
    }
}

/// Answers requests.
pub trait Routes: Clone + Send + Sync + 'static {
    /// Returns the response to a request of this client.
    fn respond<B: RequestBody>(
        &self,
        peer: SocketAddr,
        request: Request<B>,
    ) -> impl Future<Output = Response> + Send;
}

/// The body of a request.
pub trait RequestBody:
    HttpBody<Data = Bytes, Error: Display + Into<BoxError>> + Send + Unpin + 'static
{
}

impl<B: HttpBody<Data = Bytes, Error: Display + Into<BoxError>> + Send + Unpin + 'static> RequestBody for B {}

/// What a connection needs.
struct Served<R> {
    routes: R,
    draining: Draining,
}

async fn serve<R: Routes>(visitor: Visitor, served: Served<R>) {
    let Visitor { stream, peer, voice, mut stop } = visitor;
    // the connection's own, so that threads do not share how many refer to it
    let served = Arc::new(served);
    let answer = service_fn(move |request: Request<Incoming>| {
        let (served, asking) = (Arc::clone(&served), voice.asks());
        async move {
            let _until_answered = asking;
            let Served { routes, draining } = &*served;
            let mut response = routes.respond(peer, request).await;
            if draining.has_begun() {
                response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(chunked_body::small))
        }
    });
    let connection = http1::Builder::new()
        .timer(Unhurried::new(HEAD_TIMEOUT))
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        // an answer is small, or comes in pieces: to copy it behind its head takes less time than to have the system collect both
        .writev(false)
        .serve_connection(TokioIo::new(stream), answer);
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        _ended = connection.as_mut() => return,
        () = Aside::new(stop.stopped()) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ended = connection.await;
}
