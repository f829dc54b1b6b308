//! The message of a call on its way in.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::PollSemaphore;

/// The message of a call, which is read once there is a place for it.
pub(super) struct Arriving {
    message: Incoming,
    places: PollSemaphore,
    place: Option<OwnedSemaphorePermit>,
    /// What was read and put back: two pieces at most.
    put_back: VecDeque<Result<Frame<Bytes>, hyper::Error>>,
}

impl Arriving {
    pub(super) fn new(message: Incoming, places: PollSemaphore) -> Self {
        Self { message, places, place: None, put_back: VecDeque::new() }
    }

    /// All of it, if it comes in one piece, which may be followed by empty ones; else it can still be read from its beginning.
    pub(super) async fn in_one_piece(&mut self) -> Option<Bytes> {
        let mut all = Bytes::new();
        while let Some(frame) = self.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) if all.is_empty() => all = data,
                Ok(Ok(data)) if data.is_empty() => {}
                more => {
                    self.put_back(all);
                    let more = more.map(|piece| piece.map_or_else(|trailers| trailers, Frame::data));
                    self.put_back.push_back(more);
                    return None;
                }
            }
        }
        Some(all)
    }

    /// Has this read once more.
    pub(super) fn put_back(&mut self, data: Bytes) {
        self.put_back.push_back(Ok(Frame::data(data)));
    }
}

impl Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(frame) = self.put_back.pop_front() {
            return Poll::Ready(Some(frame));
        }
        if self.message.is_end_stream() {
            return Poll::Ready(None);
        }
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
        self.put_back.is_empty() && self.message.is_end_stream()
    }
}
