//! The router for all calls except `/v1/check` and `/v1/auth`.

use std::sync::Arc;

use axum::{
    Extension, Router,
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use tokio::time::Instant;

use super::{
    Api, MAX_BODY,
    explain::Explanation,
    guard::{self, AuditSubject, Guard, RejectCrossSite},
    hold,
    json::Json,
    live::{self, Listeners},
    openapi,
    problem::Problem,
    receive,
    request::{self, ApiCall, ApiRequest},
    response::{DecisionBody, ResetBody},
    status,
};
use crate::{
    config::Scope,
    dashboard,
    engine::{Summary, Transport},
    observe::trace::RequestSpans,
};

/// Every request has a span.
const SPANS: RequestSpans = RequestSpans(Transport::Http);

pub(super) fn router(api: Api) -> Router {
    let access = api.settings.access.clone();
    // one tuple of layers: each `layer` call would box every call once more
    let scoped = |scope| {
        let observer = Arc::clone(api.engine.observer());
        let own_site = RejectCrossSite { access: Some(access.clone()) };
        (SPANS, own_site, Guard { access: access.clone(), scope, observer })
    };
    let listeners = Listeners::default();
    let open = Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(status::readyz))
        .route("/metrics", get(status::metrics))
        .route("/openapi.json", get(openapi::document))
        .route_layer((SPANS, RejectCrossSite { access: None }));
    let page = Router::new().route("/", get(dashboard::page)).merge(dashboard::assets()).route_layer(SPANS);
    let check = Router::new()
        .route("/v1/peek", post(peek))
        .route("/v1/explain", post(explain))
        .route("/v1/hold", post(hold::hold))
        .route("/v1/settle", post(hold::settle))
        .route("/v1/release", post(hold::release))
        .route("/v1/renew", post(hold::renew))
        .route("/v1/live", get(move |api, request| live::live(listeners.clone(), api, request)))
        .route_layer(scoped(Scope::Check));
    let adjust = Router::new()
        .route("/v1/charge", post(charge))
        .route("/v1/refund", post(refund))
        .route_layer(scoped(Scope::Adjust));
    let admin = Router::new()
        .route("/v1/reset", post(reset))
        .route("/v1/rules", get(status::rules))
        .route("/v1/top", get(status::top))
        .route_layer(scoped(Scope::Admin));
    Router::new()
        .merge(open)
        .merge(check)
        .merge(adjust)
        .merge(admin)
        .merge(page)
        .fallback(not_found)
        .method_not_allowed_fallback(other_method)
        .with_state(api)
}

async fn peek(State(api): State<Api>, request: Request) -> Result<DecisionBody, Problem> {
    let ApiRequest { request, wants_headers } = read(&api, ApiCall::Peek, request).await?;
    let decision = api.engine.decide(Transport::Http, &request).await?;
    Ok(api.decision_body(decision, wants_headers))
}

async fn charge(State(api): State<Api>, request: Request) -> Audited<Result<DecisionBody, Problem>> {
    let request = read(&api, ApiCall::Charge, request).await?.request;
    Ok(audited(&request, decide(&api, &request).await))
}

async fn refund(State(api): State<Api>, request: Request) -> Audited<Result<DecisionBody, Problem>> {
    let request = read(&api, ApiCall::Refund, request).await?.request;
    Ok(audited(&request, decide(&api, &request).await))
}

async fn decide(api: &Api, request: &sluicegate::limiter::Request<'_>) -> Result<DecisionBody, Problem> {
    Ok(api.engine.decide(Transport::Http, request).await?.into())
}

async fn reset(State(api): State<Api>, request: Request) -> Audited<Result<Json<ResetBody>, Problem>> {
    let request = read(&api, ApiCall::Reset, request).await?.request;
    let reset = api.engine.reset(Transport::Http, &request).await;
    Ok(audited(&request, reset.map(|reset| Json(reset.into())).map_err(Problem::from)))
}

/// A response with the subject of its audit line; or why the request is invalid.
type Audited<T> = Result<(Extension<AuditSubject>, T), Problem>;

fn audited<T>(request: &sluicegate::limiter::Request<'_>, response: T) -> (Extension<AuditSubject>, T) {
    (Extension(AuditSubject(Summary(request).to_string())), response)
}

async fn explain(State(api): State<Api>, request: Request) -> Result<Json<Explanation>, Problem> {
    let Api { engine, settings } = &api;
    let sees_all_rules = guard::identify(&settings.access, request.headers(), Scope::Admin).is_ok();
    let request = read(&api, ApiCall::Explain, request).await?.request;
    let started = Instant::now();
    let rules = engine.limiter().rules();
    let decision = engine.decide(Transport::Http, &request).await?;
    let is_degraded = decision.is_degraded();
    let (mut explanation, counters) = Explanation::new(&rules, &request, decision)?;
    if !sees_all_rules {
        explanation.hide_other_rules();
    }
    // snapshots are optional: without the store, or without time, the explanation has none
    let deadline = request.deadline.map(|deadline| deadline.saturating_sub(started.elapsed()));
    if !is_degraded && let Ok(snapshots) = engine.inspect(&counters, deadline).await {
        explanation.add_snapshots(snapshots);
    }
    Ok(Json(explanation))
}

async fn not_found(request: Request) -> Problem {
    let path = request.uri().path();
    let detail = format!(
        "there is no {path}: use /v1/check, /v1/peek, /v1/hold, /v1/settle, /v1/release, /v1/renew, /v1/charge, /v1/refund, /v1/reset, /v1/explain, /v1/auth, /v1/rules, /v1/top, /v1/live, \
         /healthz, /readyz, /metrics, /openapi.json or, in a browser, /"
    );
    Problem::new(StatusCode::NOT_FOUND, detail)
}

/// The router adds the `Allow` header.
async fn other_method(request: Request) -> Problem {
    wrong_method(request.method(), request.uri().path())
}

/// The response to a method that a call does not accept.
pub(super) fn method_not_allowed(method: &Method, path: &str, allowed: &'static str) -> Response {
    let mut response = wrong_method(method, path).into_response();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

fn wrong_method(method: &Method, path: &str) -> Problem {
    let detail = format!("{path} does not accept {method}: use the method that the Allow header names");
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}

/// Reads the request of a call.
async fn read(api: &Api, call: ApiCall, request: Request) -> Result<ApiRequest, Problem> {
    let body = receive(request.into_body(), MAX_BODY).await;
    let read = body.and_then(|body| request::read(&api.engine, call, &body));
    read.inspect_err(|_| api.engine.observer().invalid(call.into()))
}
