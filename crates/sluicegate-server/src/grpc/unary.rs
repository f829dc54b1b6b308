//! Envoy's call past the router and tonic's streams, which would take a quarter of its time: nearly every call is this one. A call
//! that is unusual, such as a compressed or broken one, is answered by tonic, which has the same route.

use std::{
    convert::Infallible,
    mem,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, header::CONTENT_TYPE};
use http_body_util::Either;
use hyper::body::{Body as HttpBody, Frame};
use prost::Message;
use tonic::{Status, body::Body, codegen::Service, metadata::GRPC_CONTENT_TYPE};

use super::{
    Peer, Services,
    body::{BoundedBody, NOT_COMPRESSED, PREFIX, Received},
    messages::{RateLimitRequest, RateLimitResponse},
};

/// Where Envoy asks.
const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Where a call says that its message may be compressed.
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

/// The encoding of a message that is not compressed.
const IDENTITY: &str = "identity";

/// What an answer usually takes, in bytes: enough that it need not grow.
const ROOM_FOR_ANSWER: usize = 256;

/// An answer of ours or of tonic's.
pub(super) type Answer = Either<Answered, Body>;

/// One message, and that the call went well.
pub(super) enum Answered {
    Message(Bytes),
    WentWell,
    End,
}

impl Services {
    /// Answers a call of any service.
    pub(super) async fn answer(
        &self,
        peer: SocketAddr,
        mut request: Request<BoundedBody>,
    ) -> Response<Answer> {
        let is_compressed = request.headers().get(ENCODING).is_some_and(|encoding| encoding != IDENTITY);
        let is_usual = request.uri().path() == PATH && request.method() == Method::POST && !is_compressed;
        if is_usual {
            let decided = match request.body_mut().receive().await {
                Received::Whole(framed) => match RateLimitRequest::decode(&framed[PREFIX..]) {
                    Ok(question) => Some(self.limits.decide(Some(peer), request.headers(), &question).await),
                    Err(_) => {
                        request.body_mut().put_back(framed);
                        None
                    }
                },
                Received::TooLarge => Some(self.limits.deny_unread(request.headers())),
                Received::Unusual => None,
            };
            match decided {
                Some(Ok(answer)) => return answered(&answer),
                Some(Err(status)) => return status.into_http().map(Either::Right),
                None => {}
            }
        }
        request.extensions_mut().insert(Peer(peer));
        let Ok::<_, Infallible>(answer) = Box::pin(self.routes.clone().call(request)).await;
        answer.map(Either::Right)
    }
}

fn answered(answer: &RateLimitResponse) -> Response<Answer> {
    let mut framed = Vec::with_capacity(ROOM_FOR_ANSWER);
    framed.resize(PREFIX, NOT_COMPRESSED);
    answer.encode(&mut framed).expect("a vector has room");
    let length = u32::try_from(framed.len() - PREFIX).expect("an answer is small");
    framed[1..PREFIX].copy_from_slice(&length.to_be_bytes());
    let mut response = Response::new(Either::Left(Answered::Message(framed.into())));
    response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

impl HttpBody for Answered {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (frame, next) = match mem::replace(&mut *self, Self::End) {
            Self::Message(message) => (Frame::data(message), Self::WentWell),
            Self::WentWell => (Frame::trailers(went_well()), Self::End),
            Self::End => return Poll::Ready(None),
        };
        *self = next;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::End)
    }
}

fn went_well() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    trailers
}
