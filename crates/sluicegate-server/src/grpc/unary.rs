//! `ShouldRateLimit` without tonic's router and streams, which would take a quarter of the time of this call. Nearly
//! all calls use this path. Unusual calls, such as compressed or malformed ones, are served by tonic, which has the
//! same route.

use std::{
    convert::Infallible,
    mem,
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
    Caller, Services,
    body::{BoundedBody, NOT_COMPRESSED, PREFIX, Received},
    messages::{RateLimitRequest, RateLimitResponse},
};

/// The path of the call.
const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// The header with the compression of the message.
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

/// The encoding of a message that is not compressed.
const IDENTITY: &str = "identity";

/// The initial capacity of a response, in bytes: enough for most.
const INITIAL_CAPACITY: usize = 256;

/// The body of a response, written here or by tonic.
pub(super) type ResponseBody = Either<UnaryBody, Body>;

/// One message and the trailers of a successful call.
pub(super) enum UnaryBody {
    Message(Bytes),
    Trailers,
    End,
}

impl Services {
    /// Responds to a call of any service.
    pub(super) async fn respond(
        &self,
        caller: &Caller,
        mut request: Request<BoundedBody>,
    ) -> Response<ResponseBody> {
        let is_compressed = request.headers().get(ENCODING).is_some_and(|encoding| encoding != IDENTITY);
        let is_usual = request.uri().path() == PATH && request.method() == Method::POST && !is_compressed;
        if is_usual {
            let decided = match request.body_mut().receive().await {
                Received::Whole(framed) => match RateLimitRequest::decode(&framed[PREFIX..]) {
                    Ok(message) => Some(self.handler.decide(caller, request.headers(), &message).await),
                    Err(_) => {
                        request.body_mut().put_back(framed);
                        None
                    }
                },
                Received::TooLarge => Some(self.handler.deny_unread(caller, request.headers())),
                Received::Unusual => None,
            };
            match decided {
                Some(Ok(message)) => return response(&message),
                Some(Err(status)) => return status.into_http().map(Either::Right),
                None => {}
            }
        }
        request.extensions_mut().insert(caller.clone());
        let Ok::<_, Infallible>(response) = Box::pin(self.routes.clone().call(request)).await;
        response.map(Either::Right)
    }
}

fn response(message: &RateLimitResponse) -> Response<ResponseBody> {
    let mut framed = Vec::with_capacity(INITIAL_CAPACITY);
    framed.resize(PREFIX, NOT_COMPRESSED);
    message.encode(&mut framed).expect("a vector grows as needed");
    let length = u32::try_from(framed.len() - PREFIX).expect("a response is small");
    framed[1..PREFIX].copy_from_slice(&length.to_be_bytes());
    let mut response = Response::new(Either::Left(UnaryBody::Message(framed.into())));
    response.headers_mut().insert(CONTENT_TYPE, GRPC_CONTENT_TYPE);
    response
}

impl HttpBody for UnaryBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let (frame, next) = match mem::replace(&mut *self, Self::End) {
            Self::Message(message) => (Frame::data(message), Self::Trailers),
            Self::Trailers => (Frame::trailers(success_trailers()), Self::End),
            Self::End => return Poll::Ready(None),
        };
        *self = next;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::End)
    }
}

fn success_trailers() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    trailers
}
