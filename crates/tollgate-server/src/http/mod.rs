//! The JSON API over a [`Limiter`].
//!
//! | file | has |
//! |---|---|
//! | `mod` | the routes, and one function for each |
//! | `body` | a body as read: types, nothing unknown |
//! | `question` | a body as used: one of two forms, checked |
//! | `answer` | a decision as JSON |
//! | `problem` | what goes wrong, as problem+json |
//!
//! A mistake of the caller is a 4xx that says what would be right, and nothing is charged. A refusal is no
//! mistake: it is a decision, and a 200. Who may call, metrics and other protocols are not known here.

mod answer;
mod body;
mod problem;
mod question;

use std::time::Duration;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, FromRequest, Request, State},
    http::StatusCode,
    routing::{get, post},
};
use tollgate::{Limiter, Store};

use self::{
    answer::{Answer, Reset},
    problem::Problem,
    question::{Call, Question},
};

/// The largest body of a request, in bytes.
pub const MAX_BODY: usize = 64 << 10;

/// How long a body may take to arrive.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// The routes of the API.
pub fn router<S: Store + 'static>(limiter: Limiter<S>) -> Router {
    Router::new()
        .route("/v1/check", post(check::<S>))
        .route("/v1/peek", post(peek::<S>))
        .route("/v1/charge", post(charge::<S>))
        .route("/v1/refund", post(refund::<S>))
        .route("/v1/reset", post(reset::<S>))
        .route("/healthz", get(|| async { "ok" }))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(limiter)
}

type Answered = Result<Json<Answer>, Problem>;

async fn check<S: Store>(State(limiter): State<Limiter<S>>, request: Request) -> Answered {
    let decision = match ask(Call::Check, request).await? {
        Question::Rules { labels, costs, .. } => limiter.check(&labels, costs).await?,
        Question::Key { key, limit, cost, .. } => limiter.check_key(key, &limit, cost).await?,
    };
    Ok(Json(decision.into()))
}

async fn peek<S: Store>(State(limiter): State<Limiter<S>>, request: Request) -> Answered {
    let decision = match ask(Call::Peek, request).await? {
        Question::Rules { labels, costs, .. } => limiter.peek(&labels, costs).await?,
        Question::Key { key, limit, cost, .. } => limiter.peek_key(key, &limit, cost).await?,
    };
    Ok(Json(decision.into()))
}

async fn charge<S: Store>(State(limiter): State<Limiter<S>>, request: Request) -> Answered {
    let decision = match ask(Call::Charge, request).await? {
        Question::Rules { labels, costs, only, .. } => {
            limiter.charge(&labels, costs, names(&only).as_deref()).await?
        }
        Question::Key { key, limit, cost, .. } => limiter.charge_key(key, &limit, cost).await?,
    };
    Ok(Json(decision.into()))
}

async fn refund<S: Store>(State(limiter): State<Limiter<S>>, request: Request) -> Answered {
    let decision = match ask(Call::Refund, request).await? {
        Question::Rules { labels, costs, only, at } => {
            limiter.refund(&labels, costs, at, names(&only).as_deref()).await?
        }
        Question::Key { key, limit, cost, at } => limiter.refund_key(key, &limit, cost, at).await?,
    };
    Ok(Json(decision.into()))
}

async fn reset<S: Store>(
    State(limiter): State<Limiter<S>>,
    request: Request,
) -> Result<Json<Reset>, Problem> {
    let reset = match ask(Call::Reset, request).await? {
        Question::Rules { labels, only, .. } => limiter.reset(&labels, names(&only).as_deref()).await?,
        Question::Key { key, limit, .. } => limiter.reset_key(key, &limit).await?.into(),
    };
    Ok(Json(Reset { reset }))
}

async fn not_found(request: Request) -> Problem {
    let path = request.uri().path();
    let detail =
        format!("there is no {path}: use /v1/check, /v1/peek, /v1/charge, /v1/refund, /v1/reset or /healthz");
    Problem::new(StatusCode::NOT_FOUND, detail)
}

async fn method_not_allowed(request: Request) -> Problem {
    let (path, method) = (request.uri().path(), request.method());
    let detail = format!("{path} does not take {method}: use the method that the Allow header names");
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}

/// The question in a request's body.
async fn ask(call: Call, request: Request) -> Result<Question, Problem> {
    let bytes = match tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, &())).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(error)) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let detail = format!("the body is too large: send at most {MAX_BODY} bytes");
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        Ok(Err(error)) => return Err(Problem::bad_request(error.body_text())),
        Err(_) => {
            let detail = format!("the body did not arrive within {BODY_TIMEOUT:?}: send it at once");
            return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, detail));
        }
    };
    Question::read(call, &bytes)
}

fn names(rules: &Option<Vec<String>>) -> Option<Vec<&str>> {
    rules.as_ref().map(|names| names.iter().map(String::as_str).collect())
}
