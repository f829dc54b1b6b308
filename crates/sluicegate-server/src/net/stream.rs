//! The stream of a connection, with its write timeout.

use std::{pin::Pin, time::Duration};

use tokio::net::TcpStream;
use tokio_io_timeout::TimeoutWriter;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;

/// How long a write may make no progress before the connection is closed. Linux reports progress on its send buffer in steps of about a
/// third: with megabytes buffered, a client that reads less than that within the timeout counts as not reading.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection, encrypted or not. A write fails after [`WRITE_TIMEOUT`] without progress. The state of TLS is boxed to keep the tasks of
/// other connections small.
pub type Stream = Either<PlainStream, Box<TlsStream<PlainStream>>>;

/// A TCP connection. Its timer runs only while the socket accepts no more bytes.
pub(super) type PlainStream = Pin<Box<TimeoutWriter<TcpStream>>>;

/// Wraps an accepted connection.
pub(super) fn plain(stream: TcpStream) -> PlainStream {
    // Responses are small and awaited. If this fails, they are only slower.
    let _set = stream.set_nodelay(true);
    let mut stream = Box::pin(TimeoutWriter::new(stream));
    stream.as_mut().set_timeout_pinned(Some(WRITE_TIMEOUT));
    stream
}
