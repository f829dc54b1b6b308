//! Serves the gRPC connections of one listener: HTTP/2 only, with bounds on calls and memory.

use std::{
    convert::Infallible,
    future::{Future, poll_fn},
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
    Caller, LARGE_MESSAGES, MAX_SMALL_MESSAGE, Services,
    body::BoundedBody,
    executor::{CallQueue, ConnectionExecutor},
    unary::ResponseBody,
};
use crate::{
    engine::Transport,
    net::{
        acceptor::{AcceptConfig, Acceptor, Connection},
        activity::Timeouts,
        shutdown::{QUIET_GRACE, SHUTDOWN_GRACE},
        tls::Protocol,
    },
    observe::trace::request_span,
};

/// The default connection limit. A proxy needs few connections. When the limit is reached, a new connection evicts the
/// one that has been idle the longest.
pub const MAX_CONNECTIONS: usize = 500;

/// The maximum number of concurrent calls on one connection.
pub const MAX_STREAMS: u32 = 1_024;

/// The number of concurrent calls that every connection may have: clients assume this many before they receive the
/// server's settings.
pub const MIN_STREAMS: u32 = 100;

/// Calls beyond [`MIN_STREAMS`] that all connections share. A new connection gets the remainder divided by
/// [`SPARE_PARTS`].
const SPARE_STREAMS: u32 = 16_384;
const SPARE_PARTS: u32 = 16;

/// The maximum size of a call's headers, in bytes. They contain the client's trace state, which may be as long as all
/// headers that Envoy accepts: 60 KiB unless `max_request_headers_kb` is set.
pub const MAX_HEAD: u32 = 64 << 10;

/// How long a call may take, from its head to its response.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection may take to send its first call.
pub const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may be idle after a call.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// How often the server pings a client, and how long the client has to reply.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// The flow-control window of a connection: how many bytes of unread messages it may hold.
const MAX_UNREAD: u32 = 512 << 10;

/// How many messages of a connection are read concurrently: incomplete messages use at most this many times
/// [`MAX_SMALL_MESSAGE`], plus a share of [`LARGE_MESSAGES`].
pub const MAX_CONCURRENT_READS: usize = 8;

/// Serves connections until the shutdown stops the server. Then sends GOAWAY on every connection, and gives calls in flight
/// [`SHUTDOWN_GRACE`] to finish. Reports that it is not ready as soon as the server drains.
pub async fn run(listener: TcpListener, services: Services, config: AcceptConfig) {
    let (health, shutdown) = (services.clone(), config.shutdown.clone());
    let acceptor = Acceptor {
        listener,
        default_max_connections: MAX_CONNECTIONS,
        timeouts: Timeouts { first_request: FIRST_CALL_TIMEOUT, idle: IDLE_TIMEOUT },
        protocol: Protocol::Http2,
        config,
    };
    let spare_streams = Arc::new(Mutex::new(SPARE_STREAMS));
    let large_messages = Arc::new(Semaphore::new(LARGE_MESSAGES));
    let serve = move |connection| {
        let streams = StreamShare::take(&spare_streams);
        serve(connection, services.clone(), streams, Arc::clone(&large_messages))
    };
    let report_draining = async {
        shutdown.draining().await;
        health.set_not_ready().await;
    };
    tokio::join!(acceptor.run(serve), report_draining);
}

/// Serves a connection until the client closes it, it times out, or the server stops.
async fn serve(
    connection: Connection,
    services: Services,
    streams: StreamShare,
    large_messages: Arc<Semaphore>,
) {
    let Connection { stream, peer, activity } = connection;
    let calls = Calls {
        services: Arc::new(services),
        caller: Caller { peer, activity: activity.clone() },
        reads: PollSemaphore::new(Arc::new(Semaphore::new(MAX_CONCURRENT_READS))),
        large_messages,
    };
    let mut executor = ConnectionExecutor::default();
    let builder = builder(&streams, executor.queue());
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), calls));
    tokio::select! {
        biased;
        _closed = poll_fn(|context| executor.poll(connection.as_mut(), context)) => return,
        _reason = activity.close_requested() => {}
    }
    connection.as_mut().graceful_shutdown();
    let grace = if activity.has_requested() { SHUTDOWN_GRACE } else { QUIET_GRACE };
    let closed = poll_fn(|context| executor.poll(connection.as_mut(), context));
    let _closed_or_dropped = tokio::time::timeout(grace, closed).await;
}

/// A connection's share of [`SPARE_STREAMS`], returned on drop. Streams are limited because a response that the client does not read
/// stays in memory.
struct StreamShare {
    spare: Arc<Mutex<u32>>,
    taken: u32,
}

impl StreamShare {
    fn take(spare: &Arc<Mutex<u32>>) -> Self {
        let mut left = spare.lock();
        let taken = (*left / SPARE_PARTS).min(MAX_STREAMS - MIN_STREAMS);
        *left -= taken;
        Self { spare: Arc::clone(spare), taken }
    }
}

impl Drop for StreamShare {
    fn drop(&mut self) {
        *self.spare.lock() += self.taken;
    }
}

fn builder(streams: &StreamShare, queue: CallQueue) -> http2::Builder<CallQueue> {
    let mut builder = http2::Builder::new(queue);
    let max_streams = MIN_STREAMS + streams.taken;
    let max_reset = usize::try_from(max_streams).expect("the number of streams fits in a usize");
    builder
        .timer(TokioTimer::new())
        // gRPC clients ignore the date, and few gRPC servers send it.
        .auto_date_header(false)
        .max_concurrent_streams(max_streams)
        // Envoy resets the calls of end clients that disconnect. By default, 20 of them that arrive together close the connection, and all
        // other calls on it fail.
        .max_pending_accept_reset_streams(max_reset)
        .max_header_list_size(MAX_HEAD)
        .initial_stream_window_size(u32::try_from(MAX_SMALL_MESSAGE).expect("64 KiB fit in 32 bits"))
        .initial_connection_window_size(MAX_UNREAD)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

/// The calls of one connection.
struct Calls {
    /// One per connection, so that threads do not share a reference count.
    services: Arc<Services>,
    caller: Caller,
    reads: PollSemaphore,
    /// The free part of [`LARGE_MESSAGES`].
    large_messages: Arc<Semaphore>,
}

impl hyper::service::Service<Request<Incoming>> for Calls {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let in_flight = self.caller.activity.start_request();
        let (services, caller) = (Arc::clone(&self.services), self.caller.clone());
        let request =
            request.map(|body| BoundedBody::new(body, self.reads.clone(), Arc::clone(&self.large_messages)));
        Box::pin(async move {
            let _in_flight = in_flight;
            let span = request_span(Transport::Grpc, &request);
            let mut call = pin!(services.respond(&caller, request).instrument(span));
            // Most calls have arrived completely by now and are decided without waiting: they need no timer.
            let first_poll = poll_fn(|context| Poll::Ready(call.as_mut().poll(context)));
            if let Poll::Ready(response) = first_poll.await {
                return Ok(response);
            }
            // Boxed to keep the future of those calls small.
            let in_time = Box::pin(tokio::time::timeout(CALL_TIMEOUT, call)).await;
            Ok(in_time.unwrap_or_else(|_| {
                let text =
                    format!("call not complete after {CALL_TIMEOUT:?}: send the whole message without delay");
                Status::deadline_exceeded(text).into_http().map(Either::Right)
            }))
        })
    }
}
