//! Large answers, handed to hyper bit by bit.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

/// The largest piece, in bytes.
const MAX_PIECE: usize = 16 << 10;

/// An answer whose parts are all small, and come one by one. hyper copies what it gets behind the head until the answer pauses, and keeps
/// the room that this took for as long as the connection lasts: so a thousand connections that have asked for much once would keep a
/// thousand large answers.
pub(crate) fn small(body: Body) -> Body {
    let is_small = body.size_hint().upper().is_some_and(|len| len <= MAX_PIECE as u64);
    if is_small { body } else { Body::new(Pieces { body, rest: Bytes::new(), pauses: false }) }
}

/// An answer in pieces.
struct Pieces {
    body: Body,
    /// What is left of the part of it that was too large.
    rest: Bytes,
    /// A piece has just been given: it is to be sent before the next one.
    pauses: bool,
}

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if std::mem::take(&mut self.pauses) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.rest.is_empty() {
            let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
            match frame {
                Some(Ok(frame)) if frame.data_ref().is_some_and(|data| data.len() > MAX_PIECE) => {
                    self.rest = frame.into_data().unwrap_or_default();
                }
                fits => return Poll::Ready(fits),
            }
        }
        let len = self.rest.len().min(MAX_PIECE);
        self.pauses = len < self.rest.len();
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
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_large_answer_comes_whole_and_in_pieces() {
        let bytes: Vec<u8> = (0..=255).cycle().take(2 * MAX_PIECE + 1).collect();
        for (len, expected) in [
            (0, vec![]),
            (MAX_PIECE, vec![MAX_PIECE]),
            (MAX_PIECE + 1, vec![MAX_PIECE, 1]),
            (2 * MAX_PIECE, vec![MAX_PIECE, MAX_PIECE]),
            (2 * MAX_PIECE + 1, vec![MAX_PIECE, MAX_PIECE, 1]),
        ] {
            let mut pieces = small(Body::from(bytes[..len].to_vec()));
            let (mut lens, mut whole) = (Vec::new(), Vec::new());
            loop {
                assert_eq!(pieces.size_hint().exact(), Some((len - whole.len()) as u64));
                assert_eq!(pieces.is_end_stream(), whole.len() == len);
                let Some(piece) = pieces.frame().await else { break };
                let piece = piece.unwrap().into_data().unwrap();
                lens.push(piece.len());
                whole.extend_from_slice(&piece);
            }
            assert_eq!((lens, &*whole), (expected, &bytes[..len]));
        }
    }
}
