//! What the server says about itself: alive, ready, its rules, its heaviest keys, its metrics.

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tollgate::{RuleSet, Store};

use super::{Api, json::Json};
use crate::{
    config::{RuleView, fingerprint},
    desk::Desk,
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
pub(super) async fn readyz<S: Store>(State(api): State<Api<S>>) -> Response {
    let ready = api.settings.startup.is_ready() && !api.settings.draining.has_begun();
    let body = Readiness { ready, store: store_word(&api), rules: rules_word(&api.desk) };
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

/// Whether the store answers.
pub(super) fn store_word<S: Store>(api: &Api<S>) -> &'static str {
    let is_away = !api.settings.startup.has_store() || api.desk.limiter().stats().left_alone > 0;
    if is_away { "degraded" } else { "ok" }
}

/// Whether the rules in force are those of the file.
pub(super) fn rules_word<S: Store>(desk: &Desk<S>) -> &'static str {
    if desk.observer().reloads().is_stale() { "stale" } else { "ok" }
}

impl Rules {
    pub(super) fn of(rules: &RuleSet) -> Self {
        let rules: Vec<_> = rules.rules().cloned().collect();
        Self { fingerprint: fingerprint(&rules), rules: rules.iter().map(RuleView::from).collect() }
    }
}

pub(super) async fn rules<S: Store>(State(api): State<Api<S>>) -> Json<Rules> {
    Json(Rules::of(&api.desk.limiter().rules()))
}

pub(super) async fn top<S: Store>(State(api): State<Api<S>>) -> Json<HeavyHitterSnapshot> {
    Json(api.desk.observer().top(MAX_KEYS))
}

pub(super) async fn metrics<S: Store>(State(api): State<Api<S>>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], api.desk.metrics()).into_response()
}
