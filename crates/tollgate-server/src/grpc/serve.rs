//! Connections of the gRPC front end: HTTP/2 only, how many, how much each may hold, and how they end.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    server::conn::http2,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::sync::PollSemaphore;
use tonic::{Status, body::Body, codegen::Service, service::Routes};
use tower_layer::Layer;

use super::{
    MAX_MESSAGE, Services,
    turns::{Arrived, Turns},
};
use crate::{
    connections::{Entrance, QUIET_GRACE, SHUTDOWN_GRACE, Visitor},
    crowd::Voice,
    desk::Transport,
    listen::{Protocol, Security},
    observe::trace::{RequestSpans, WithSpans},
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
const MAX_UNREAD: u32 = 512 << 10;

/// How many calls of a connection are read at a time: those that do not arrive in full take no more memory than this many messages.
pub const MAX_ARRIVING: usize = 8;

/// Answers until `stop` is ready. Then takes no more connections, tells those there are to go, and gives calls in
/// flight [`SHUTDOWN_GRACE`] to finish.
pub async fn run(
    listener: TcpListener,
    services: Services,
    security: Security,
    stop: impl Future<Output = ()>,
) {
    let entrance = Entrance { listener, places: MAX_CONNECTIONS, security, protocol: Protocol::Http2 };
    let routes = RequestSpans(Transport::Grpc).layer(services.routes.clone());
    let spare = Arc::new(Mutex::new(SPARE_STREAMS));
    let stop = async {
        stop.await;
        services.is_leaving().await;
    };
    entrance.run(move |visitor| serve(visitor, routes.clone(), Share::of(&spare)), stop).await;
}

/// Serves a connection until it ends, or is told to go: when the server stops, or when no calls come.
async fn serve(visitor: Visitor, routes: WithSpans<Routes>, share: Share) {
    let Visitor { stream, voice, mut stop, .. } = visitor;
    let arriving = PollSemaphore::new(Arc::new(Semaphore::new(MAX_ARRIVING)));
    let calls = Calls { routes, voice: voice.clone(), arriving };
    let mut turns = Turns::default();
    let builder = builder(&share, turns.arrived());
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), calls));
    loop {
        let patience = if voice.has_asked() { IDLE_TIMEOUT } else { FIRST_CALL_TIMEOUT };
        let left = patience.saturating_sub(voice.silence());
        if left.is_zero() {
            break;
        }
        tokio::select! {
            biased;
            // A connection that breaks off is its client's affair.
            _ended = poll_fn(|context| turns.poll(connection.as_mut(), context)) => return,
            () = stop.stopped() => break,
            () = tokio::time::sleep(left) => {}
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
        .max_concurrent_streams(MIN_STREAMS + share.taken)
        .max_header_list_size(MAX_HEAD)
        .initial_stream_window_size(u32::try_from(MAX_MESSAGE).expect("a message is small"))
        .initial_connection_window_size(MAX_UNREAD)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// The calls of one connection.
struct Calls {
    routes: WithSpans<Routes>,
    voice: Voice,
    arriving: PollSemaphore,
}

impl hyper::service::Service<Request<Incoming>> for Calls {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let asking = self.voice.asks();
        let places = self.arriving.clone();
        let request = request.map(|message| Arriving { message, places, place: None });
        let mut call = self.routes.clone().call(request);
        Box::pin(async move {
            let _until_answered = asking;
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

/// The message of a call, which is read once there is a place for it.
struct Arriving {
    message: Incoming,
    places: PollSemaphore,
    place: Option<OwnedSemaphorePermit>,
}

impl hyper::body::Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.place.is_none() {
            self.place = ready!(self.places.poll_acquire(context));
        }
        let frame = ready!(Pin::new(&mut self.message).poll_frame(context));
        if frame.is_none() || self.message.is_end_stream() {
            self.place = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.message.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.message.size_hint()
    }
}
