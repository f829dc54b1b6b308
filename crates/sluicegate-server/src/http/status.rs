//! Health, readiness, rules, heavy hitters and metrics.

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use sluicegate::rules::RuleSet;

use super::{Api, json::Json};
use crate::{
    config::{RuleView, fingerprint},
    engine::Engine,
    observe::{
        heavy_hitters::{HeavyHitterSnapshot, MAX_KEYS},
        metrics::CONTENT_TYPE,
    },
};

#[derive(Serialize)]
struct Readiness {
    ready: bool,
    store: &'static str,
    rules: &'static str,
}

/// The active rules.
#[derive(Serialize)]
pub(super) struct Rules {
    fingerprint: String,
    rules: Vec<RuleView>,
}

/// Reports readiness: after [start-up](crate::startup), also while the store is unavailable, until the server drains.
pub(super) async fn readyz(State(api): State<Api>) -> Response {
    let ready = api.settings.startup.is_ready() && !api.settings.shutdown.is_draining();
    let body = Readiness { ready, store: store_state(&api), rules: rules_state(&api.engine) };
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

/// Returns the state of the store.
pub(super) fn store_state(api: &Api) -> &'static str {
    let is_degraded = !api.settings.startup.has_store() || api.engine.limiter().stats().open_breakers > 0;
    if is_degraded { "degraded" } else { "ok" }
}

/// Returns whether the active rules are those of the file.
pub(super) fn rules_state(engine: &Engine) -> &'static str {
    if engine.observer().reloads().is_stale() { "stale" } else { "ok" }
}

impl Rules {
    pub(super) fn new(rules: &RuleSet) -> Self {
        let rules: Vec<_> = rules.rules().cloned().collect();
        Self { fingerprint: fingerprint(&rules), rules: rules.iter().map(RuleView::from).collect() }
    }
}

pub(super) async fn rules(State(api): State<Api>) -> Json<Rules> {
    Json(Rules::new(&api.engine.limiter().rules()))
}

pub(super) async fn top(State(api): State<Api>) -> Json<HeavyHitterSnapshot> {
    Json(api.engine.observer().top(MAX_KEYS))
}

pub(super) async fn metrics(State(api): State<Api>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], api.engine.metrics()).into_response()
}
