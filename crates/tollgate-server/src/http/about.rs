//! What the server says about itself: alive, ready, its rules, its heaviest keys, its metrics.

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tollgate::Store;

use super::{Api, json::Json};
use crate::{
    config::{RuleView, fingerprint},
    observe::{
        metrics::CONTENT_TYPE,
        top::{MAX_KEYS, Snapshot},
    },
};

#[derive(Serialize)]
struct Readiness {
    ready: bool,
    store: &'static str,
    rules: &'static str,
}

/// The rules in force.
#[derive(Serialize)]
pub(super) struct Rules {
    fingerprint: String,
    rules: Vec<RuleView>,
}

/// Ready as soon as there are rules, also while the store is away: rules decide without it. Not any more once it stops.
pub(super) async fn readyz<S: Store>(State(api): State<Api<S>>) -> Response {
    let ready = !api.settings.draining.has_begun();
    let is_degraded = api.desk.limiter().stats().left_alone > 0;
    let is_stale = api.desk.observer().reloads().is_stale();
    let body = Readiness {
        ready,
        store: if is_degraded { "degraded" } else { "ok" },
        rules: if is_stale { "stale" } else { "ok" },
    };
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

pub(super) async fn rules<S: Store>(State(api): State<Api<S>>) -> Json<Rules> {
    let rules: Vec<_> = api.desk.limiter().rules().rules().cloned().collect();
    Json(Rules { fingerprint: fingerprint(&rules), rules: rules.iter().map(RuleView::from).collect() })
}

pub(super) async fn top<S: Store>(State(api): State<Api<S>>) -> Json<Snapshot> {
    Json(api.desk.observer().top(MAX_KEYS))
}

pub(super) async fn metrics<S: Store>(State(api): State<Api<S>>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], api.desk.metrics()).into_response()
}
