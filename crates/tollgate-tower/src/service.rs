//! The service: a request becomes labels, these a decision, and that lets it pass or refuses it.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body_util::{Either, Full};
use tollgate::Decision;
use tower_service::Service;

use crate::{
    headers, labels,
    layer::Settings,
    refusal::{self, Form, Mistake},
};

/// A service behind a [`Limiter`](tollgate::Limiter), made by a [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The service within finds the [`Arc<Decision>`](Decision) in the extensions of the request, and whoever is further out in those
/// of the response: how much is left, or that the store was away and the rules' policies decided
/// ([`Decision::is_degraded`]). Clients are not told the latter.
///
/// ```
/// use std::sync::Arc;
/// use axum::{Extension, Router, routing::get};
/// use tollgate::{Decision, Limiter, MemoryStore};
/// use tollgate_tower::RateLimitLayer;
///
/// async fn hello(Extension(decision): Extension<Arc<Decision>>) -> String {
///     format!("{} left", decision.remaining().map_or("any number".to_owned(), |left| left.to_string()))
/// }
/// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), [])?);
/// let app: Router = Router::new().route("/", get(hello)).layer(layer);
/// # Ok::<(), tollgate::RulesError>(())
/// ```
pub struct RateLimit<I> {
    pub(crate) inner: I,
    pub(crate) settings: Arc<Settings>,
}

/// The response of the service within, or one of ours.
type Answer<B> = Response<Either<B, Full<Bytes>>>;

impl<I, B, R> Service<Request<B>> for RateLimit<I>
where
    I: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = Answer<R>;
    type Error = I::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Answer<R>, I::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The clone is not ready; the one that is must be the one that is called.
        let fresh = self.inner.clone();
        let mut ready = mem::replace(&mut self.inner, fresh);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            let decision = match decide(&settings, &head).await {
                Ok(decision) => Arc::new(decision),
                Err(mistake) => return Ok(refusal::mistake(&mistake, Form::of(&head)).map(ours)),
            };
            let mut response = if decision.is_allowed() {
                head.extensions.insert(Arc::clone(&decision));
                let mut response = ready.call(Request::from_parts(head, body)).await?;
                headers::add(response.headers_mut(), &decision, settings.dialect);
                response.map(Either::Left)
            } else {
                refuse(&settings, &head, &decision).map(ours)
            };
            response.extensions_mut().insert(decision);
            Ok(response)
        })
    }
}

async fn decide(settings: &Settings, head: &Parts) -> Result<Decision, Mistake> {
    let labels = labels::read(&settings.labels, head)?;
    // Within the limiter's deadline, whatever the client says of its own (`grpc-timeout`): one shorter than the store takes
    // would leave the decision to the rules' policies, and pass where they are open.
    Ok(settings.limiter.check(&labels, settings.cost(head)).await?)
}

fn refuse(settings: &Settings, head: &Parts, decision: &Decision) -> Response<Bytes> {
    match &settings.refuse {
        Some(own) => {
            let mut response = own(head, decision);
            headers::add(response.headers_mut(), decision, settings.dialect);
            response
        }
        None => refusal::response(decision, settings.dialect, Form::of(head)),
    }
}

fn ours<B>(body: Bytes) -> Either<B, Full<Bytes>> {
    Either::Right(Full::new(body))
}

impl<I: Clone> Clone for RateLimit<I> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(&self.settings) }
    }
}

impl<I: fmt::Debug> fmt::Debug for RateLimit<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit").field("inner", &self.inner).field("settings", &self.settings).finish()
    }
}
