//! The JSON API over a [`Desk`].
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
use tollgate::{Operation, Store};

use self::{
    answer::{Answer, Reset},
    problem::Problem,
    question::{Call, Question},
};
use crate::desk::{Caller, Desk, Transport};

/// The largest body of a request, in bytes.
pub const MAX_BODY: usize = 64 << 10;

/// How long a body may take to arrive.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// The routes of the API.
pub fn router<S: Store>(desk: Desk<S>) -> Router {
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
        .with_state(desk)
}

type Answered = Result<Json<Answer>, Problem>;

/// Who asks here.
const CALLER: Caller = Caller::at(Transport::Http);

async fn check<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Answered {
    let question = ask(&desk, Call::Check, request).await?;
    decide(&desk, Operation::Check, &question).await
}

async fn peek<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Answered {
    let question = ask(&desk, Call::Peek, request).await?;
    decide(&desk, Operation::Peek, &question).await
}

async fn charge<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Answered {
    let question = ask(&desk, Call::Charge, request).await?;
    decide(&desk, Operation::Charge, &question).await
}

async fn refund<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Answered {
    let question = ask(&desk, Call::Refund, request).await?;
    decide(&desk, Operation::Refund { at: question.at }, &question).await
}

async fn decide<S: Store>(desk: &Desk<S>, operation: Operation, question: &Question) -> Answered {
    Ok(Json(desk.decide(CALLER, operation, &question.subject).await?.into()))
}

async fn reset<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Result<Json<Reset>, Problem> {
    let question = ask(&desk, Call::Reset, request).await?;
    Ok(Json(Reset { reset: desk.reset(CALLER, &question.subject).await? }))
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
async fn ask<S: Store>(desk: &Desk<S>, call: Call, request: Request) -> Result<Question, Problem> {
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
    Question::read(desk, call, &bytes)
}
