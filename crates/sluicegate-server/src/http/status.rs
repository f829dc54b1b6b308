//! What the server says about itself: alive, ready, its rules, its heaviest keys, its metrics.

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use sluicegate::RuleSet;

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

/// The rules in force.
#[derive(Serialize)]
pub(super) struct Rules {
    fingerprint: String,
    rules: Vec<RuleView>,
}

/// Ready once [start-up](crate::startup) is over, also if the store is away: rules decide without it. Not any more once it stops.
pub(super) async fn readyz(State(api): State<Api>) -> Response {
    let ready = api.settings.startup.is_ready() && !api.settings.shutdown.is_draining();
    let body = Readiness { ready, store: store_word(&api), rules: rules_word(&api.engine) };
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

/// Whether the store answers.
pub(super) fn store_word(api: &Api) -> &'static str {
    let is_away = !api.settings.startup.has_store() || api.engine.limiter().stats().open_breakers > 0;
    if is_away { "degraded" } else { "ok" }
}

/// Whether the rules in force are those of the file.
pub(super) fn rules_word(engine: &Engine) -> &'static str {
    if engine.observer().reloads().is_stale() { "stale" } else { "ok" }
}

impl Rules {
    pub(super) fn of(rules: &RuleSet) -> Self {
        let rules: Vec<_> = rules.rules().cloned().collect();
        Self { fingerprint: fingerprint(&rules), rules: rules.iter().map(RuleView::from).collect() }
    }
}

pub(super) async fn rules(State(api): State<Api>) -> Json<Rules> {
    Json(Rules::of(&api.engine.limiter().rules()))
}

pub(super) async fn top(State(api): State<Api>) -> Json<HeavyHitterSnapshot> {
    Json(api.engine.observer().top(MAX_KEYS))
}

pub(super) async fn metrics(State(api): State<Api>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], api.engine.metrics()).into_response()
}
