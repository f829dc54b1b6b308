//! The body of a call, read within memory bounds.

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

/// The length of a gRPC message prefix: a compression flag, and the length of the message.
pub(super) const PREFIX: usize = 5;
pub(super) const NOT_COMPRESSED: u8 = 0;

/// The body of a call. Reading it requires a read permit of its connection.
pub(super) struct BoundedBody {
    body: Incoming,
    reads: PollSemaphore,
    read_permit: Option<OwnedSemaphorePermit>,
    /// The available memory for messages larger than [`MAX_SMALL_MESSAGE`], in bytes.
    large_messages: Arc<Semaphore>,
    /// The part of that memory that this message has reserved.
    memory_permit: Option<OwnedSemaphorePermit>,
    /// Frames that were read and put back: two at most.
    put_back: VecDeque<Result<Frame<Bytes>, hyper::Error>>,
}

/// The result of reading a message.
pub(super) enum Received {
    /// The whole message, with its prefix.
    Whole(Bytes),
    /// The message is too large, or there is no memory for it. The rest is not read.
    TooLarge,
    /// The body is not one uncompressed message. It can still be read from its beginning.
    Unusual,
}

/// The data read so far. Most messages arrive in one frame, which is not copied.
enum Buffer {
    One(Bytes),
    Several(BytesMut),
}

impl Buffer {
    fn push(&mut self, data: Bytes) {
        match self {
            Self::One(first) if first.is_empty() => *first = data,
            Self::One(_) if data.is_empty() => {}
            Self::One(first) => {
                let mut all = BytesMut::from(&first[..]);
                all.extend_from_slice(&data);
                *self = Self::Several(all);
            }
            Self::Several(all) => all.extend_from_slice(&data),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::One(data) => data,
            Self::Several(all) => all,
        }
    }

    fn into_bytes(self) -> Bytes {
        match self {
            Self::One(data) => data,
            Self::Several(all) => all.freeze(),
        }
    }
}

impl BoundedBody {
    pub(super) fn new(body: Incoming, reads: PollSemaphore, large_messages: Arc<Semaphore>) -> Self {
        let put_back = VecDeque::new();
        Self { body, reads, read_permit: None, large_messages, memory_permit: None, put_back }
    }

    /// Reads the body as one uncompressed message.
    pub(super) async fn receive(&mut self) -> Received {
        let mut buffer = Buffer::One(Bytes::new());
        while let Some(frame) = self.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => buffer.push(data),
                unusual => {
                    let unusual = unusual.map(|data| data.map_or_else(|trailers| trailers, Frame::data));
                    self.put_back(buffer.into_bytes());
                    self.put_back.push_back(unusual);
                    return Received::Unusual;
                }
            }
            let Some((prefix, message)) = buffer.bytes().split_first_chunk::<PREFIX>() else { continue };
            let &[NOT_COMPRESSED, a, b, c, d] = prefix else { break };
            let length = u32::from_be_bytes([a, b, c, d]);
            if message.len() > length as usize {
                break;
            }
            if length as usize > MAX_MESSAGE || !self.reserve_memory(length) {
                return Received::TooLarge;
            }
        }
        let data = buffer.into_bytes();
        if is_whole(&data) {
            return Received::Whole(data);
        }
        self.put_back(data);
        Received::Unusual
    }

    /// Puts data back, to be read again.
    pub(super) fn put_back(&mut self, data: Bytes) {
        self.put_back.push_back(Ok(Frame::data(data)));
    }

    /// Reserves memory for a message of this length until the call is answered. Returns whether there is enough.
    fn reserve_memory(&mut self, length: u32) -> bool {
        if length as usize > MAX_SMALL_MESSAGE && self.memory_permit.is_none() {
            self.memory_permit = Arc::clone(&self.large_messages).try_acquire_many_owned(length).ok();
            return self.memory_permit.is_some();
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

impl Body for BoundedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(frame) = self.put_back.pop_front() {
            return Poll::Ready(Some(frame));
        }
        if self.body.is_end_stream() {
            return Poll::Ready(None);
        }
        if self.read_permit.is_none() {
            self.read_permit = ready!(self.reads.poll_acquire(context));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.read_permit = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.put_back.is_empty() && self.body.is_end_stream()
    }
}
