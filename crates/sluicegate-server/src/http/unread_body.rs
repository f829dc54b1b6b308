//! Request bodies that were not read completely when the response was ready, for example after a rejection.
//!
//! hyper closes a connection whose request was not read completely, without announcing it. Here the rest of a small body is read and
//! discarded, so that the connection can be used again. Otherwise the response has `Connection: close`.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Bytes, HttpBody};
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::MAX_BODY;

/// How long the rest of a body may take to arrive.
pub const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);

/// The body of the current request of a connection, if it was dropped before its end. Cheap to clone; all clones share it.
#[derive(Clone, Default)]
pub(super) struct UnreadBody(Arc<Mutex<Option<Incoming>>>);

/// A body that becomes the [`UnreadBody`] of its connection if it is dropped before its end.
pub(super) struct TrackedBody {
    /// Present until it is dropped.
    body: Option<Incoming>,
    unread: UnreadBody,
}

impl UnreadBody {
    /// Tracks the body of the connection's next request.
    pub(super) fn track(&self, body: Incoming) -> TrackedBody {
        TrackedBody { body: Some(body), unread: self.clone() }
    }

    /// Takes the body of the last request, if it was not read completely.
    pub(super) fn take(&self) -> Option<Incoming> {
        self.0.lock().take()
    }
}

/// Reads the rest of a body, if it is small and arrives in time. Returns whether it was read completely.
pub(super) async fn discard(mut body: Incoming) -> bool {
    let read_all = async {
        let mut received = 0;
        while let Some(Ok(frame)) = body.frame().await {
            received += frame.data_ref().map_or(0, Bytes::len);
            if received > MAX_BODY {
                break;
            }
        }
        body.is_end_stream()
    };
    timeout(DISCARD_TIMEOUT, read_all).await.unwrap_or(false)
}

impl TrackedBody {
    fn body(&mut self) -> &mut Incoming {
        self.body.as_mut().expect("the body is present until it is dropped")
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.unread.0.lock() = Some(body);
        }
    }
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(self.body()).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(HttpBody::size_hint).unwrap_or_default()
    }
}
