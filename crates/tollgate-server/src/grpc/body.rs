//! The message of a call on its way in.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

use super::{MAX_MESSAGE, MAX_SMALL_MESSAGE};

/// What a message begins with: whether it is compressed, and its length.
pub(super) const PREFIX: usize = 5;
pub(super) const NOT_COMPRESSED: u8 = 0;

/// The message of a call, which is read once there is a place for it.
pub(super) struct Arriving {
    message: Incoming,
    places: PollSemaphore,
    place: Option<OwnedSemaphorePermit>,
    /// What is left of the memory for messages of more than [`MAX_SMALL_MESSAGE`], in bytes.
    large: Arc<Semaphore>,
    /// What this message has of it.
    room: Option<OwnedSemaphorePermit>,
    /// What was read and put back: two pieces at most.
    put_back: VecDeque<Result<Frame<Bytes>, hyper::Error>>,
}

/// What came of reading a message.
pub(super) enum Received {
    /// All of it, with its prefix.
    Whole(Bytes),
    /// It is too large, or there is no room for it now. The rest is not read.
    TooLarge,
    /// Not one uncompressed message. It can still be read from its beginning.
    Unusual,
}

/// What has been read of a message: most arrive in one piece, which is not copied.
enum Gathered {
    One(Bytes),
    Several(BytesMut),
}

impl Gathered {
    fn add(&mut self, piece: Bytes) {
        match self {
            Self::One(first) if first.is_empty() => *first = piece,
            Self::One(_) if piece.is_empty() => {}
            Self::One(first) => {
                let mut all = BytesMut::from(&first[..]);
                all.extend_from_slice(&piece);
                *self = Self::Several(all);
            }
            Self::Several(all) => all.extend_from_slice(&piece),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::One(piece) => piece,
            Self::Several(all) => all,
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::One(piece) => piece,
            Self::Several(all) => all.freeze(),
        }
    }
}

impl Arriving {
    pub(super) fn new(message: Incoming, places: PollSemaphore, large: Arc<Semaphore>) -> Self {
        Self { message, places, place: None, large, room: None, put_back: VecDeque::new() }
    }

    /// Reads one message that is not compressed, if that is what comes.
    pub(super) async fn receive(&mut self) -> Received {
        let mut all = Gathered::One(Bytes::new());
        while let Some(frame) = self.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(piece)) => all.add(piece),
                odd => {
                    let odd = odd.map(|piece| piece.map_or_else(|trailers| trailers, Frame::data));
                    self.put_back(all.into_bytes());
                    self.put_back.push_back(odd);
                    return Received::Unusual;
                }
            }
            let Some((prefix, message)) = all.bytes().split_first_chunk::<PREFIX>() else { continue };
            let &[NOT_COMPRESSED, a, b, c, d] = prefix else { break };
            let length = u32::from_be_bytes([a, b, c, d]);
            if message.len() > length as usize {
                break;
            }
            if length as usize > MAX_MESSAGE || !self.has_room(length) {
                return Received::TooLarge;
            }
        }
        let all = all.into_bytes();
        if is_whole(&all) {
            return Received::Whole(all);
        }
        self.put_back(all);
        Received::Unusual
    }

    /// Has this read once more.
    pub(super) fn put_back(&mut self, data: Bytes) {
        self.put_back.push_back(Ok(Frame::data(data)));
    }

    /// Whether there is memory for a message of this length; it is held until the call is answered.
    fn has_room(&mut self, length: u32) -> bool {
        if length as usize > MAX_SMALL_MESSAGE && self.room.is_none() {
            self.room = Arc::clone(&self.large).try_acquire_many_owned(length).ok();
            return self.room.is_some();
        }
        true
    }
}

fn is_whole(framed: &[u8]) -> bool {
    match framed.split_first_chunk::<PREFIX>() {
        Some((&[NOT_COMPRESSED, a, b, c, d], message)) => {
            usize::try_from(u32::from_be_bytes([a, b, c, d])) == Ok(message.len())
        }
        _ => false,
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
