//! The service: reads the labels of a request, checks them, and calls the inner service or responds with a denial.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body_util::{Either, Full};
use sluicegate::Decision;
use tower_service::Service;

use crate::{
    denial::{self, CheckError, DenialFormat},
    headers, labels,
    layer::LayerSettings,
};

/// A service behind a [`Limiter`](sluicegate::Limiter), made by a [`RateLimitLayer`](crate::RateLimitLayer).
///
/// The [`Arc<Decision>`](Decision) is available to the inner service as an extension of the request and to outer services as
/// an extension of the response: remaining quota, and whether the store failed and the rules' failure policies decided
/// ([`Decision::is_degraded`]). Clients do not see the latter.
///
/// ```
/// use std::sync::Arc;
/// use axum::{Extension, Router, routing::get};
/// use sluicegate::{Decision, Limiter, MemoryStore};
/// use sluicegate_tower::RateLimitLayer;
///
/// async fn hello(Extension(decision): Extension<Arc<Decision>>) -> String {
///     format!("{} left", decision.remaining().map_or("any number".to_owned(), |left| left.to_string()))
/// }
/// let layer = RateLimitLayer::new(Limiter::new(MemoryStore::new(), [])?);
/// let app: Router = Router::new().route("/", get(hello)).layer(layer);
/// # Ok::<(), sluicegate::rules::RulesError>(())
/// ```
pub struct RateLimit<I> {
    pub(crate) inner: I,
    pub(crate) settings: Arc<LayerSettings>,
}

/// The response of the inner service, or a denial.
type LimitedResponse<B> = Response<Either<B, Full<Bytes>>>;

impl<I, B, R> Service<Request<B>> for RateLimit<I>
where
    I: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = LimitedResponse<R>;
    type Error = I::Error;
    type Future = Pin<Box<dyn Future<Output = Result<LimitedResponse<R>, I::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // `poll_ready` made this instance ready; the clone is not ready and replaces it.
        let fresh = self.inner.clone();
        let mut ready = mem::replace(&mut self.inner, fresh);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move {
            let (mut head, body) = request.into_parts();
            if settings.skips(&head) {
                return Ok(ready.call(Request::from_parts(head, body)).await?.map(Either::Left));
            }
            let decision = match decide(&settings, &head).await {
                Ok(decision) => Arc::new(decision),
                Err(error) => {
                    if let CheckError::Misconfigured(problem) = &error {
                        settings.log_once(problem);
                    }
                    return Ok(denial::error_response(&error, DenialFormat::of(&head)).map(own_body));
                }
            };
            let mut response = if decision.is_allowed() {
                head.extensions.insert(Arc::clone(&decision));
                let mut response = ready.call(Request::from_parts(head, body)).await?;
                headers::add(response.headers_mut(), &decision, settings.dialect);
                response.map(Either::Left)
            } else {
                denial_response(&settings, &head, &decision).map(own_body)
            };
            response.extensions_mut().insert(decision);
            Ok(response)
        })
    }
}

async fn decide(settings: &LayerSettings, head: &Parts) -> Result<Decision, CheckError> {
    let labels = labels::read(settings, head)?;
    // The client's `grpc-timeout` does not shorten the limiter's deadline: with a short timeout a client could force a
    // decision without the store, which allows the request if a rule fails open.
    Ok(settings.limiter.check(&labels, settings.cost(head)).await?)
}

fn denial_response(settings: &LayerSettings, head: &Parts, decision: &Decision) -> Response<Bytes> {
    match &settings.denial_response {
        Some(own) => {
            let mut response = own(head, decision);
            headers::add(response.headers_mut(), decision, settings.dialect);
            response
        }
        None => denial::response(decision, settings.dialect, DenialFormat::of(head)),
    }
}

fn own_body<B>(body: Bytes) -> Either<B, Full<Bytes>> {
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
