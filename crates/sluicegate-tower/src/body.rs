//! A response body that settles the hold of its request when the body ends.

use std::{
    convert::Infallible,
    error::Error,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use pin_project_lite::pin_project;

use crate::hold::SettleOnDrop;

pin_project! {
    /// The body of a response: that of the inner service, or a denial.
    ///
    /// If the request is held, the hold is settled when the body ends, fails or is dropped, for example because the client disconnected.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjection]
    #[derive(Debug)]
    enum Kind<B> {
        Inner { #[pin] body: B },
        // Declared before `hold`, so that it is dropped first: its destructor may set the actual cost.
        Held { #[pin] body: Option<B>, hold: Option<Box<SettleOnDrop>> },
        Denial { #[pin] body: Full<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    /// The body of the inner service.
    pub(crate) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    /// The body of the inner service, whose request is held until it ends.
    pub(crate) fn held(body: B, hold: SettleOnDrop) -> Self {
        Self { kind: Kind::Held { body: Some(body), hold: Some(Box::new(hold)) } }
    }

    /// The body of a response that the layer made.
    pub(crate) fn denial(body: Bytes) -> Self {
        Self { kind: Kind::Denial { body: Full::new(body) } }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.project().kind.project() {
            KindProjection::Inner { body } => body.poll_frame(context).map_err(Into::into),
            KindProjection::Held { mut body, hold } => {
                let Some(inner) = body.as_mut().as_pin_mut() else { return Poll::Ready(None) };
                let frame = ready!(inner.poll_frame(context));
                if !matches!(frame, Some(Ok(_))) {
                    body.set(None);
                    *hold = None;
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            KindProjection::Denial { body } => {
                body.poll_frame(context).map_err(|error: Infallible| match error {})
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Held { body, .. } => body.as_ref().is_none_or(Body::is_end_stream),
            Kind::Denial { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Held { body, .. } => body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint),
            Kind::Denial { body } => body.size_hint(),
        }
    }
}
