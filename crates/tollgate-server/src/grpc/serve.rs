//! Connections of the gRPC front end: HTTP/2 only, how many, how much each may hold, and how they end.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use hyper::{body::Incoming, server::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};
use tonic::{Status, body::Body, codegen::Service, service::Routes};

use super::{MAX_MESSAGE, Services};
use crate::{
    listen::{Protocol, Security},
    serve::SHUTDOWN_GRACE,
};

/// The most connections at a time. A proxy needs few; more wait to be accepted.
pub const MAX_CONNECTIONS: u32 = 500;

/// The most calls at a time on one connection.
pub const MAX_STREAMS: u32 = 1_024;

/// The largest head of a call, in bytes.
pub const MAX_HEAD: u32 = 16 << 10;

/// How long a call may take to arrive and be answered.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may take to make its first call.
pub const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may make no call; the next one needs a new connection.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// How often a client is asked whether it is still there, and how long it has to answer.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How many bytes of unread calls a connection may hold.
const MAX_UNREAD: u32 = 1 << 20;

/// How long a connection that has made no call yet may take to go.
const QUIET_GRACE: Duration = Duration::from_secs(1);

/// The pause after a connection could not be accepted, for want of open files for example.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers until `stop` is ready. Then takes no more connections, tells those there are to go, and gives calls in
/// flight [`SHUTDOWN_GRACE`] to finish.
pub async fn run(
    listener: TcpListener,
    services: Services,
    security: Security,
    stop: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS as usize));
    let (stopping, stopped) = watch::channel(());
    let accepting = async {
        loop {
            let (stream, place) = accept(&listener, &places).await;
            let (security, routes, stopped) = (security.clone(), services.routes.clone(), stopped.clone());
            tokio::spawn(async move {
                // A connection that breaks off is its client's affair.
                if let Ok(io) = security.secure(stream, Protocol::Http2).await {
                    serve(io, routes, stopped).await;
                }
                drop(place);
            });
        }
    };
    tokio::select! {
        () = accepting => {}
        () = stop => {}
    }
    // Who comes now is turned away, rather than kept waiting for somebody who does not accept.
    drop(listener);
    services.is_leaving().await;
    drop((stopping, stopped));
    let all_gone = places.acquire_many(MAX_CONNECTIONS);
    let _gone_or_cut_off = tokio::time::timeout(SHUTDOWN_GRACE, all_gone).await;
}

async fn accept(listener: &TcpListener, places: &Arc<Semaphore>) -> (TcpStream, OwnedSemaphorePermit) {
    let place = Arc::clone(places).acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, place),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Serves a connection until it ends, or is told to go: when the server stops, or when no calls come.
async fn serve<I>(io: I, routes: Routes, mut stopped: watch::Receiver<()>)
where
    I: AsyncRead + AsyncWrite + Unpin,
{
    let count = Arc::new(AtomicU64::new(0));
    let calls = Calls { routes, count: Arc::clone(&count) };
    let mut connection = pin!(builder().serve_connection(TokioIo::new(io), calls));
    let mut seen = 0;
    let mut patience = FIRST_CALL_TIMEOUT;
    loop {
        tokio::select! {
            _ended = poll_fn(|context| connection.as_mut().poll(context)) => return,
            _stopped = stopped.changed() => break,
            () = tokio::time::sleep(patience) => {
                let now = count.load(Ordering::Relaxed);
                if now == seen {
                    break;
                }
                (seen, patience) = (now, IDLE_TIMEOUT);
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let grace = if count.load(Ordering::Relaxed) == 0 { QUIET_GRACE } else { SHUTDOWN_GRACE };
    let _ended_or_cut_off = tokio::time::timeout(grace, connection).await;
}

fn builder() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD)
        .initial_stream_window_size(u32::try_from(MAX_MESSAGE).expect("a message is small"))
        .initial_connection_window_size(MAX_UNREAD)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// The calls of one connection, counted.
struct Calls {
    routes: Routes,
    count: Arc<AtomicU64>,
}

impl hyper::service::Service<Request<Incoming>> for Calls {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut call = self.routes.clone().call(request);
        Box::pin(async move {
            // most calls have arrived by now, and are answered at once: these need no timer
            let at_once = poll_fn(|context| Poll::Ready(Pin::new(&mut call).poll(context)));
            if let Poll::Ready(answered) = at_once.await {
                return answered;
            }
            match tokio::time::timeout(CALL_TIMEOUT, call).await {
                Ok(answered) => answered,
                Err(_) => {
                    let text = format!("the call did not arrive within {CALL_TIMEOUT:?}: send it at once");
                    Ok(Status::deadline_exceeded(text).into_http())
                }
            }
        })
    }
}
