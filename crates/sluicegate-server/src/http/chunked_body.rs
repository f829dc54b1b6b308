//! Large and streamed response bodies, passed to hyper in small chunks.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

use crate::net::activity::{Activity, Streaming};

/// The largest chunk, in bytes.
const MAX_CHUNK: usize = 16 << 10;

/// Returns a body that hyper sends in chunks of at most [`MAX_CHUNK`]. hyper copies body data into its write buffer until the body is
/// pending, and keeps that buffer's capacity for the life of the connection: without this, a thousand connections that had one large
/// response each would keep a thousand large buffers.
pub(crate) fn chunked(body: Body, activity: &Activity) -> Body {
    let is_small = body.size_hint().upper().is_some_and(|len| len <= MAX_CHUNK as u64);
    if is_small { body } else { Body::new(ChunkedBody::new(body, activity.start_streaming())) }
}

struct ChunkedBody {
    body: Body,
    /// The unsent part of a frame larger than a chunk.
    rest: Bytes,
    /// Set after each chunk but the last of a frame, so that hyper writes it before the next one.
    is_paused: bool,
    /// Keeps the connection open until the body is sent.
    _streaming: Streaming,
}

impl ChunkedBody {
    fn new(body: Body, streaming: Streaming) -> Self {
        Self { body, rest: Bytes::new(), is_paused: false, _streaming: streaming }
    }
}

impl HttpBody for ChunkedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if std::mem::take(&mut self.is_paused) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.rest.is_empty() {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
            match frame {
                Some(Ok(frame)) if frame.data_ref().is_some_and(|data| data.len() > MAX_CHUNK) => {
                    self.rest = frame.into_data().unwrap_or_default();
                }
                frame => return Poll::Ready(frame),
            }
        }
        let len = self.rest.len().min(MAX_CHUNK);
        self.is_paused = len < self.rest.len();
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(len)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, body) = (self.rest.len() as u64, self.body.size_hint());
        let mut both = SizeHint::new();
        both.set_lower(body.lower().saturating_add(rest));
        if let Some(upper) = body.upper() {
            both.set_upper(upper.saturating_add(rest));
        }
        both
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt;
    use tokio::time::Instant;

    use super::*;
    use crate::net::activity::Timeouts;

    const TIMEOUTS: Timeouts = Timeouts { first_request: Duration::ZERO, idle: Duration::ZERO };

    #[tokio::test]
    async fn a_large_body_is_complete_and_split_into_chunks() {
        let bytes: Vec<u8> = (0..=255).cycle().take(2 * MAX_CHUNK + 1).collect();
        for (len, expected) in [
            (0, vec![]),
            (MAX_CHUNK, vec![MAX_CHUNK]),
            (MAX_CHUNK + 1, vec![MAX_CHUNK, 1]),
            (2 * MAX_CHUNK, vec![MAX_CHUNK, MAX_CHUNK]),
            (2 * MAX_CHUNK + 1, vec![MAX_CHUNK, MAX_CHUNK, 1]),
        ] {
            let activity = Activity::detached(TIMEOUTS);
            let mut chunks = chunked(Body::from(bytes[..len].to_vec()), &activity);
            let (mut lens, mut whole) = (Vec::new(), Vec::new());
            loop {
                assert_eq!(chunks.size_hint().exact(), Some((len - whole.len()) as u64));
                assert_eq!(chunks.is_end_stream(), whole.len() == len);
                let Some(chunk) = chunks.frame().await else { break };
                let chunk = chunk.unwrap().into_data().unwrap();
                lens.push(chunk.len());
                whole.extend_from_slice(&chunk);
            }
            assert_eq!((lens, &*whole), (expected, &bytes[..len]));
        }
    }

    #[test]
    fn a_connection_is_not_overdue_while_a_large_body_is_sent() {
        for (len, is_overdue) in [(MAX_CHUNK, true), (MAX_CHUNK + 1, false)] {
            let activity = Activity::detached(TIMEOUTS);
            let body = chunked(Body::from(vec![0; len]), &activity);
            assert_eq!(activity.is_overdue(Instant::now()), is_overdue, "{len} bytes");
            drop(body);
            assert!(activity.is_overdue(Instant::now()), "{len} bytes");
        }
    }
}
