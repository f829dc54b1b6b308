//! Connections of the gRPC front end: HTTP/2 only, how many, how much each may hold, and how they end.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use http::{Request, Response};
use http_body_util::Either;
use hyper::{body::Incoming, server::conn::http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::sync::PollSemaphore;
use tonic::Status;
use tracing::Instrument;

use super::{
    LARGE_MESSAGES, MAX_SMALL_MESSAGE, Services,
    body::Arriving,
    executor::{Arrived, Turns},
    unary::Answer,
};
use crate::{
    aside::Aside,
    engine::Transport,
    net::acceptor::{Entrance, QUIET_GRACE, Reception, SHUTDOWN_GRACE, Visitor},
    net::connection_limit::Voice,
    net::tls::Protocol,
    observe::trace::request_span,
};

/// The most connections at a time. A proxy needs few; for one more, the one that has been silent the longest is ended.
pub const MAX_CONNECTIONS: usize = 500;

/// The most calls at a time on one connection.
pub const MAX_STREAMS: u32 = 1_024;

/// So many calls at a time any connection may have: clients rely on it before they are told how many.
pub const MIN_STREAMS: u32 = 100;

/// So many more may all connections have together; each gets [one part](PARTS) of what is left when it comes.
const SPARE_STREAMS: u32 = 16_384;
const PARTS: u32 = 16;

/// The largest head of a call, in bytes. Envoy passes the trace state of its client on in it, which may be as long as all of the
/// client's headers: 60 KiB unless Envoy's `max_request_headers_kb` is set.
pub const MAX_HEAD: u32 = 64 << 10;

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
const MAX_UNREAD: u32 = 512 << 10;

/// How many calls of a connection are read at a time: those that do not arrive in full take no more memory than this many messages of
/// [`MAX_SMALL_MESSAGE`], and a share of [`LARGE_MESSAGES`].
pub const MAX_ARRIVING: usize = 8;

/// Answers until `stop` is ready. Then takes no more connections, tells those there are to go, and gives calls in
/// flight [`SHUTDOWN_GRACE`] to finish.
pub async fn run(
    listener: TcpListener,
    services: Services,
    reception: Reception,
    stop: impl Future<Output = ()>,
) {
    let entrance = Entrance { listener, places: MAX_CONNECTIONS, reception, protocol: Protocol::Http2 };
    let spare = Arc::new(Mutex::new(SPARE_STREAMS));
    let large = Arc::new(Semaphore::new(LARGE_MESSAGES));
    let leaving = services.clone();
    let stop = async {
        stop.await;
        leaving.is_not_ready().await;
    };
    let serve = move |visitor| serve(visitor, services.clone(), Share::of(&spare), Arc::clone(&large));
    entrance.run(serve, stop).await;
}

/// Serves a connection until it ends, or is told to go: when the server stops, or when no calls come.
async fn serve(visitor: Visitor, services: Services, share: Share, large: Arc<Semaphore>) {
    let Visitor { stream, peer, voice, mut stop } = visitor;
    let places = PollSemaphore::new(Arc::new(Semaphore::new(MAX_ARRIVING)));
    let calls = Calls { services: Arc::new(services), peer, voice: voice.clone(), places, large };
    let mut turns = Turns::default();
    let builder = builder(&share, turns.arrived());
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), calls));
    loop {
        let patience = if voice.has_asked() { IDLE_TIMEOUT } else { FIRST_CALL_TIMEOUT };
        let left = patience.saturating_sub(voice.silence());
        if left.is_zero() {
            break;
        }
        let told_to_go = Aside::new(tokio::time::timeout(left, stop.stopped()));
        tokio::select! {
            biased;
            // A connection that breaks off is its client's affair.
            _ended = poll_fn(|context| turns.poll(connection.as_mut(), context)) => return,
            told = told_to_go => {
                if told.is_ok() {
                    break;
                }
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let grace = if voice.has_asked() { SHUTDOWN_GRACE } else { QUIET_GRACE };
    let ended = poll_fn(|context| turns.poll(connection.as_mut(), context));
    let _ended_or_cut_off = tokio::time::timeout(grace, ended).await;
}

/// What a connection has of [`SPARE_STREAMS`], until it ends: an answer that its client does not take stays in memory, for as long
/// as the connection does.
struct Share {
    spare: Arc<Mutex<u32>>,
    taken: u32,
}

impl Share {
    fn of(spare: &Arc<Mutex<u32>>) -> Self {
        let mut left = spare.lock();
        let taken = (*left / PARTS).min(MAX_STREAMS - MIN_STREAMS);
        *left -= taken;
        Self { spare: Arc::clone(spare), taken }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        *self.spare.lock() += self.taken;
    }
}

fn builder(share: &Share, arrived: Arrived) -> http2::Builder<Arrived> {
    let mut builder = http2::Builder::new(arrived);
    builder
        .timer(TokioTimer::new())
        // no client of gRPC looks at it, and few of its servers send it
        .auto_date_header(false)
        .max_concurrent_streams(MIN_STREAMS + share.taken)
        .max_header_list_size(MAX_HEAD)
        .initial_stream_window_size(u32::try_from(MAX_SMALL_MESSAGE).expect("a message is small"))
        .initial_connection_window_size(MAX_UNREAD)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// The calls of one connection.
struct Calls {
    /// The connection's own, so that threads do not share how many refer to it.
    services: Arc<Services>,
    peer: SocketAddr,
    voice: Voice,
    places: PollSemaphore,
    /// What is left of [`LARGE_MESSAGES`].
    large: Arc<Semaphore>,
}

impl hyper::service::Service<Request<Incoming>> for Calls {
    type Response = Response<Answer>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let asking = self.voice.asks();
        let (services, peer) = (Arc::clone(&self.services), self.peer);
        let request =
            request.map(|message| Arriving::new(message, self.places.clone(), Arc::clone(&self.large)));
        Box::pin(async move {
            let _until_answered = asking;
            let span = request_span(Transport::Grpc, &request);
            let mut call = pin!(services.answer(peer, request).instrument(span));
            // most calls have arrived by now, and are answered at once: these need no timer
            let at_once = poll_fn(|context| Poll::Ready(call.as_mut().poll(context)));
            if let Poll::Ready(answer) = at_once.await {
                return Ok(answer);
            }
            // boxed, so that those do not make room for it
            let in_time = Box::pin(tokio::time::timeout(CALL_TIMEOUT, call)).await;
            Ok(in_time.unwrap_or_else(|_| {
                let text = format!("the call did not arrive within {CALL_TIMEOUT:?}: send it at once");
                Status::deadline_exceeded(text).into_http().map(Either::Right)
            }))
        })
    }
}
