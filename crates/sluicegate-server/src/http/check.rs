//! `POST /v1/check`: one check, or a batch of independent ones.

use axum::{
    http::{Method, Request},
    response::{IntoResponse, Response},
};
use sluicegate::limiter::Progress;
use tokio::task::coop::consume_budget;
use tracing::Instrument;

use super::{
    Api, Caller, RequestBody,
    guard::{self, cross_site},
    json::Json,
    problem::Problem,
    receive,
    request::CheckBody,
    response::{BatchBody, BatchEntry, DecisionBody},
    routes::method_not_allowed,
};
use crate::{
    config::Scope,
    engine::{Engine, Transport},
    observe::{Call, trace::request_span},
};

/// The path of the call.
pub(super) const PATH: &str = "/v1/check";

/// The largest body of a batch, in bytes.
pub const MAX_BATCH_BODY: usize = 1 << 20;

/// After this number of checks, a batch yields to other tasks if its cooperative budget is used up.
const CHECKS_PER_YIELD: usize = 4;

pub(super) async fn respond<B: RequestBody>(api: &Api, caller: Caller<'_>, request: Request<B>) -> Response {
    if request.method() != Method::POST {
        return method_not_allowed(request.method(), PATH, "POST");
    }
    let span = request_span(Transport::Http, &request);
    let access = &api.settings.access;
    if let Some(reason) = cross_site(&request, Some(access)) {
        return guard::forbidden(reason);
    }
    if let Err(error) = guard::check(access, caller.activity, request.headers(), Scope::Check) {
        api.engine.observer().unauthorized(Call::CHECK);
        return guard::unauthorized(&error);
    }
    let body = request.into_body();
    if span.is_disabled() {
        check(&api.engine, body).await.into_response()
    } else {
        // boxed to keep the future of an untraced check small
        Box::pin(check(&api.engine, body).instrument(span)).await.into_response()
    }
}

async fn check(engine: &Engine, body: impl RequestBody) -> Result<Response, Problem> {
    let read = receive(body, MAX_BATCH_BODY).await.and_then(|body| CheckBody::read(engine, &body));
    match read.inspect_err(|_| engine.observer().invalid(Call::CHECK))? {
        CheckBody::One(request) => {
            let decision = engine.start(Transport::Http, &request)?.decision().await?;
            Ok(DecisionBody::from(decision).into_response())
        }
        // boxed to keep the future of a single check small
        CheckBody::Batch(requests) => Ok(Box::pin(check_batch(engine, &requests)).await.into_response()),
    }
}

/// Starts all checks in order, so that those to a remote store share its calls, and waits for all.
async fn check_batch(engine: &Engine, requests: &[sluicegate::limiter::Request<'_>]) -> Json<BatchBody> {
    let mut started = Vec::with_capacity(requests.len());
    for few in requests.chunks(CHECKS_PER_YIELD) {
        consume_budget().await;
        started.extend(few.iter().map(|request| engine.start(Transport::Http, request)));
    }
    let decisions = Progress::all(started).await;
    let entry = |decided: Result<_, sluicegate::Error>| {
        BatchEntry::from(decided.map(DecisionBody::from).map_err(Problem::from))
    };
    Json(BatchBody { results: decisions.into_iter().map(entry).collect() })
}
