//! The service: reads the labels of a request, checks them, and calls the inner service or responds with a denial.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use sluicegate::{
    Decision, Error,
    limiter::{OnConcurrency, Request as LimiterRequest},
};
use tower_service::Service;

use crate::{
    body::ResponseBody,
    denial::{self, CheckError, DenialFormat},
    headers,
    hold::{SettleOnDrop, UnstartedHold},
    labels,
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

impl<I, B, R> Service<Request<B>> for RateLimit<I>
where
    I: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = I::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, I::Error>> + Send>>;

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
                return Ok(ready.call(Request::from_parts(head, body)).await?.map(ResponseBody::inner));
            }
            let (decision, hold) = match check(&settings, &head).await {
                Ok(checked) => checked,
                Err(error) => {
                    settings.log_once(&error);
                    return Ok(
                        denial::error_response(&error, DenialFormat::of(&head)).map(ResponseBody::denial)
                    );
                }
            };
            let decision = Arc::new(decision);
            let mut response = if decision.is_allowed() {
                head.extensions.insert(Arc::clone(&decision));
                let hold = hold.and_then(|hold| hold.start(&settings.limiter, &mut head.extensions));
                let mut response = ready.call(Request::from_parts(head, body)).await?;
                headers::add(response.headers_mut(), &decision, settings.dialect);
                with_hold(response, hold)
            } else {
                denial_response(&settings, &head, &decision).map(ResponseBody::denial)
            };
            response.extensions_mut().insert(decision);
            Ok(response)
        })
    }
}

/// Checks a request, and holds it if its cost is an estimate or an in-flight limit matches it.
async fn check(
    settings: &LayerSettings,
    head: &Parts,
) -> Result<(Decision, Option<UnstartedHold>), CheckError> {
    let labels = labels::read(settings, head)?;
    let request = LimiterRequest::new(&labels, settings.cost(head));
    let request = request.on_concurrency(OnConcurrency::RejectShadow);
    // The client's `grpc-timeout` does not shorten the limiter's deadline: with a short timeout a client could force a
    // decision without the store, which allows the request if a rule fails open.
    if !settings.has_estimate {
        match settings.limiter.start(&request) {
            Err(Error::NeedsHold { .. }) => {}
            progress => return Ok((progress?.decision().await?, None)),
        }
    }
    // boxed to keep the future of requests without holds small
    let hold = Box::pin(settings.limiter.hold_request(request).decide()).await?;
    let (decision, hold) = UnstartedHold::of(hold);
    Ok((decision, Some(hold)))
}

fn with_hold<B>(response: Response<B>, hold: Option<SettleOnDrop>) -> Response<ResponseBody<B>> {
    match hold {
        Some(mut hold) => {
            hold.use_costs_of(response.extensions());
            response.map(|body| ResponseBody::held(body, hold))
        }
        None => response.map(ResponseBody::inner),
    }
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
