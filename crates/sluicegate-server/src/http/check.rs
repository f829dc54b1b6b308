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
    request::{ApiRequest, CheckBody},
    response::{BatchBody, BatchEntry},
    routes::method_not_allowed,
};
use crate::{
    config::Scope,
    engine::Transport,
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
        access.log_rejected_check(Some(caller.peer), "check", &error);
        return guard::unauthorized(&error);
    }
    let body = request.into_body();
    if span.is_disabled() {
        check(api, body).await.into_response()
    } else {
        // boxed to keep the future of an untraced check small
        Box::pin(check(api, body).instrument(span)).await.into_response()
    }
}

async fn check(api: &Api, body: impl RequestBody) -> Result<Response, Problem> {
    let engine = &api.engine;
    let read = receive(body, MAX_BATCH_BODY).await.and_then(|body| CheckBody::read(engine, &body));
    match read.inspect_err(|_| engine.observer().invalid(Call::CHECK))? {
        CheckBody::One(ApiRequest { request, wants_headers }) => {
            let decision = engine.start(Transport::Http, &request)?.decision().await?;
            Ok(api.decision_body(decision, wants_headers).into_response())
        }
        // boxed to keep the future of a single check small
        CheckBody::Batch(requests) => Ok(Box::pin(check_batch(api, &requests)).await.into_response()),
    }
}

/// Starts all checks in order, so that those to a remote store share its calls, and waits for all.
async fn check_batch(api: &Api, requests: &[ApiRequest]) -> Json<BatchBody> {
    let engine = &api.engine;
    let mut started = Vec::with_capacity(requests.len());
    for few in requests.chunks(CHECKS_PER_YIELD) {
        consume_budget().await;
        started.extend(few.iter().map(|check| engine.start(Transport::Http, &check.request)));
    }
    let decisions = Progress::all(started).await;
    let entry = |(decided, check): (Result<_, sluicegate::Error>, &ApiRequest)| {
        let body = decided.map(|decision| api.decision_body(decision, check.wants_headers));
        BatchEntry::from(body.map_err(Problem::from))
    };
    Json(BatchBody { results: decisions.into_iter().zip(requests).map(entry).collect() })
}
