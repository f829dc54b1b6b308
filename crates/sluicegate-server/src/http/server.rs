//! Serves the HTTP connections of one listener.

use std::{
    convert::Infallible,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper::{
    Request, StatusCode,
    body::Incoming,
    header::{CONNECTION, EXPECT, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpListener,
};

use super::{
    Caller, HttpService,
    chunked_body::chunked,
    unread_body::{UnreadBody, discard},
};
use crate::net::{
    acceptor::{AcceptConfig, Acceptor, Connection},
    activity::{Activity, CloseReason, Timeouts},
    shutdown::Shutdown,
    stream::Stream,
    tls::Protocol,
};

/// The default connection limit. When it is reached, a new connection evicts the one that has been idle the longest.
pub const MAX_CONNECTIONS: usize = 1_000;

/// How long a connection may be idle. The head of a request must arrive within [`INCOMPLETE_REQUEST_TIMEOUT`] of its first bytes.
///
/// [`INCOMPLETE_REQUEST_TIMEOUT`]: crate::net::connection_limit::INCOMPLETE_REQUEST_TIMEOUT
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

pub(super) const TIMEOUTS: Timeouts = Timeouts { first_request: IDLE_TIMEOUT, idle: IDLE_TIMEOUT };

/// The largest head of a request, in bytes.
pub const MAX_HEAD: usize = 64 << 10;

/// Serves connections until the shutdown stops the server. Requests in flight have [`SHUTDOWN_GRACE`] to finish.
///
/// [`SHUTDOWN_GRACE`]: crate::net::shutdown::SHUTDOWN_GRACE
pub async fn run(listener: TcpListener, service: HttpService, config: AcceptConfig) {
    let shutdown = config.shutdown.clone();
    let acceptor = Acceptor {
        listener,
        default_max_connections: MAX_CONNECTIONS,
        timeouts: TIMEOUTS,
        protocol: Protocol::Http1,
        config,
    };
    let serve = move |connection| serve(connection, service.clone(), shutdown.clone());
    acceptor.run(serve).await;
}

/// Answers the requests of one connection.
struct Handler {
    service: HttpService,
    shutdown: Shutdown,
    activity: Activity,
    unread: UnreadBody,
}

/// Whether a response rejects the body itself, because it is too large or too slow.
fn is_about_body(status: StatusCode) -> bool {
    matches!(status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT)
}

/// A stream that reports when bytes arrive.
///
/// The end of the stream is read one poll late. Hyper drops a request in flight when it reads the end, even if its handler has not received
/// the body yet, and a settlement whose client disconnects at once would be lost.
struct ReportingStream {
    stream: Stream,
    activity: Activity,
    has_ended: bool,
}

impl AsyncRead for ReportingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_ready() {
            self.activity.received();
        }
        let is_end = matches!(read, Poll::Ready(Ok(()))) && buffer.filled().len() == filled;
        if is_end && !std::mem::replace(&mut self.has_ended, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        read
    }
}

impl AsyncWrite for ReportingStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

async fn serve(connection: Connection, service: HttpService, shutdown: Shutdown) {
    let Connection { stream, peer, activity } = connection;
    let stream = ReportingStream { stream, activity: activity.clone(), has_ended: false };
    // One per connection, so that threads do not share a reference count.
    let handler =
        Arc::new(Handler { service, shutdown, activity: activity.clone(), unread: UnreadBody::default() });
    let respond = service_fn(move |request: Request<Incoming>| {
        let handler = Arc::clone(&handler);
        let in_flight = handler.activity.start_request();
        async move {
            let _in_flight = in_flight;
            let Handler { service, shutdown, activity, unread } = &*handler;
            let expects_continue = request.headers().contains_key(EXPECT);
            let request = request.map(|body| unread.track(body));
            let mut response = service.respond_to(Caller { peer, activity }, request).await;
            let is_read = match unread.take() {
                None => true,
                // Reading would send `100 Continue`, and the client would send its body.
                Some(_) if expects_continue || is_about_body(response.status()) => false,
                // Boxed to keep the future of other requests small.
                Some(body) => Box::pin(discard(body)).await,
            };
            if shutdown.is_draining() || !is_read {
                response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            Ok::<_, Infallible>(response.map(|body| chunked(body, activity)))
        }
    });
    let connection = http1::Builder::new()
        // The reaper closes slow connections, at no cost per request.
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD)
        // Bodies are small or chunked: copying the body after the headers is faster than a vectored write.
        .writev(false)
        .serve_connection(TokioIo::new(stream), respond);
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        _closed = connection.as_mut() => return,
        reason = activity.close_requested() => {
            if reason == CloseReason::TimedOut {
                return;
            }
        }
    }
    connection.as_mut().graceful_shutdown();
    let _closed = connection.await;
}
