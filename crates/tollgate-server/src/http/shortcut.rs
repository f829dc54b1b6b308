//! A check's way past the router: it is what nearly every request is, and finding its route and boxing its call would take a
//! tenth of its time. The route is there all the same, and has the same guards.

use std::net::SocketAddr;

use axum::{
    Router,
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
};
use http::Request;
use tollgate::Store;
use tracing::Instrument;

use super::{checked, guard, problem::Problem, question::Call};
use crate::{
    auth::Access,
    config::Scope,
    desk::{Desk, Transport},
    observe::trace::request_span,
    serve::{Routes, Sent},
};

/// Where a check is asked.
const CHECK: &str = "/v1/check";

/// All routes, and a check's own way.
pub(super) struct Shortcut<S> {
    pub(super) desk: Desk<S>,
    pub(super) access: Access,
    pub(super) routes: Router,
}

impl<S> Clone for Shortcut<S> {
    fn clone(&self) -> Self {
        Self { desk: self.desk.clone(), access: self.access.clone(), routes: self.routes.clone() }
    }
}

impl<S: Store> Routes for Shortcut<S> {
    async fn answer<B: Sent>(&self, peer: SocketAddr, request: Request<B>) -> Response {
        if request.method() != Method::POST || request.uri().path() != CHECK {
            // boxed, as all that is rare here, so that a check does not make room for it
            return Box::pin(self.routes.answer(peer, request)).await;
        }
        let span = request_span(Transport::Http, &request);
        if let Some(refusal) = self.refusal(&request) {
            return refusal;
        }
        let body = request.into_body();
        if span.is_disabled() {
            checked(&self.desk, body).await.into_response()
        } else {
            Box::pin(checked(&self.desk, body).instrument(span)).await.into_response()
        }
    }
}

impl<S: Store> Shortcut<S> {
    /// The answer to a request that may not ask.
    fn refusal<B>(&self, request: &Request<B>) -> Option<Response> {
        if let Some(why) = guard::foreign(request, Some(&self.access)) {
            return Some(Problem::new(StatusCode::FORBIDDEN, why).into_response());
        }
        let denied = guard::check(&self.access, request, Scope::Check).err()?;
        self.desk.observer().unauthorized(Call::Check.into());
        Some(guard::refused(&denied))
    }
}
