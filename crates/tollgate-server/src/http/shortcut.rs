//! A check's way past the router: it is what nearly every request is, and finding its route and boxing its call would take a
//! tenth of its time. The route is there all the same, and has the same layers.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use axum::{
    Router,
    body::{Body, HttpBody},
    http::Method,
    response::Response,
    routing::future::RouteFuture,
};
use bytes::Bytes;
use futures_util::future::Either;
use http::Request;
use tower_service::Service;

/// Where a check is asked.
const CHECK: &str = "/v1/check";

/// All routes, and a check's own way.
#[derive(Clone)]
pub(super) struct Shortcut<C> {
    pub(super) check: C,
    pub(super) routes: Router,
}

impl<C, B> Service<Request<B>> for Shortcut<C>
where
    C: Service<Request<Body>, Response = Response, Error = Infallible>,
    B: HttpBody<Data = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Either<C::Future, RouteFuture<Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.check.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if request.method() == Method::POST && request.uri().path() == CHECK {
            Either::Left(self.check.call(request.map(Body::new)))
        } else {
            Either::Right(self.routes.call(request))
        }
    }
}
