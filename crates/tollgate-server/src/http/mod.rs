//! The JSON API over a [`Desk`].
//!
//! | file | has |
//! |---|---|
//! | `mod` | the routes, and one function for each |
//! | `body` | a body as read: types, nothing unknown |
//! | `question` | a body as used: one of two forms, checked |
//! | `answer` | a decision as JSON |
//! | `guard` | who may call |
//! | `shortcut` | a check's way past the router |
//! | `about` | what the server says about itself |
//! | `live` | what happens, as it happens |
//! | `explain`, `picture` | why it is so, and how that looks |
//! | `openapi` | all of this, described for machines |
//! | `problem` | what goes wrong, as problem+json |
//!
//! A mistake of the caller is a 4xx that says what would be right, and nothing is charged. A refusal is no
//! mistake: it is a decision, and a 200. Other protocols are not known here.

mod about;
pub mod answer;
mod body;
pub mod explain;
mod guard;
mod json;
pub mod live;
pub mod openapi;
pub mod picture;
mod problem;
mod question;
mod shortcut;

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use axum::{
    Extension, Router,
    body::{Body, Bytes, to_bytes},
    extract::{FromRef, Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::BytesMut;
use futures_util::future::join_all;
use http_body_util::BodyExt;
use tokio::{task::coop::consume_budget, time::Instant};
use tollgate::{Operation, Store};
use tower_service::Service;

pub use self::question::{MAX_BODY, MAX_CHECKS};
use self::{
    answer::{Answer, Outcome, Reset, Results},
    explain::Explanation,
    guard::{Guard, RefuseOtherSites},
    json::Json,
    live::Listeners,
    problem::Problem,
    question::{Call, Question, Questions},
    shortcut::Shortcut,
};
use crate::{
    auth::Access,
    config::Scope,
    dashboard,
    desk::{Caller, Desk, Transport},
    observe::{Observer, trace::RequestSpans},
    serve::{Draining, Routes, Sent},
    startup::Startup,
};

/// The largest body of several checks, in bytes.
pub const MAX_BATCH_BODY: usize = 1 << 20;

/// For how many checks of one body the runtime is asked once whether others have waited long enough.
const CHECKS_PER_LOOK: usize = 4;

/// How long a body may take to arrive.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// Who may call, and whether the server is ready and about to stop.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Who may call.
    pub access: Access,
    /// Whether the server is ready.
    pub startup: Startup,
    /// Whether the server is about to stop.
    pub draining: Draining,
}

/// What every call needs.
struct Api<S> {
    desk: Desk<S>,
    settings: Settings,
}

impl<S> Clone for Api<S> {
    fn clone(&self) -> Self {
        Self { desk: self.desk.clone(), settings: self.settings.clone() }
    }
}

impl<S> FromRef<Api<S>> for Desk<S> {
    fn from_ref(api: &Api<S>) -> Self {
        api.desk.clone()
    }
}

/// The routes of the API, for everybody.
pub fn router<S: Store>(desk: Desk<S>) -> Router {
    guarded(desk, Settings::default(), Router::new())
}

/// What a server answers with: the routes of [`guarded`], a check by a shorter way.
pub fn service<S: Store>(desk: Desk<S>, settings: Settings, gatehouse: Router) -> impl Routes {
    let access = settings.access.clone();
    Shortcut { desk: desk.clone(), access, routes: guarded(desk, settings, gatehouse) }
}

/// What stands before a call that needs a scope: all layers at once, since each time layers are put around routes, every call
/// is boxed once more.
fn needing(
    access: &Access,
    scope: Scope,
    observer: &Arc<Observer>,
) -> (RequestSpans, RefuseOtherSites, Guard) {
    let own_site = RefuseOtherSites { guarded_by: Some(access.clone()) };
    (SEEN, own_site, Guard { access: access.clone(), scope, observer: Arc::clone(observer) })
}

/// Every request has a span.
const SEEN: RequestSpans = RequestSpans(Transport::Http);

/// The routes of the API for those who may call, and those of `gatehouse`, which asks as somebody who may check.
pub fn guarded<S: Store>(desk: Desk<S>, settings: Settings, gatehouse: Router) -> Router {
    let access = settings.access.clone();
    let needing = |scope| needing(&access, scope, desk.observer());
    let listeners = Listeners::default();
    let telling = Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(about::readyz::<S>))
        .route("/metrics", get(about::metrics::<S>))
        .route("/openapi.json", get(openapi::document))
        .route_layer((SEEN, RefuseOtherSites { guarded_by: None }));
    let page = Router::new().route("/", get(dashboard::page)).merge(dashboard::assets()).route_layer(SEEN);
    let asking = Router::new()
        .route("/v1/check", post(check::<S>))
        .route("/v1/peek", post(peek::<S>))
        .route("/v1/explain", post(explain::<S>))
        .route("/v1/live", get(move |api, request| live::live::<S>(listeners.clone(), api, request)))
        .route_layer(needing(Scope::Check));
    let adjusting = Router::new()
        .route("/v1/charge", post(charge::<S>))
        .route("/v1/refund", post(refund::<S>))
        .route_layer(needing(Scope::Adjust));
    let administering = Router::new()
        .route("/v1/reset", post(reset::<S>))
        .route("/v1/rules", get(about::rules::<S>))
        .route("/v1/top", get(about::top::<S>))
        .route_layer(needing(Scope::Admin));
    let observer = Arc::clone(desk.observer());
    Router::new()
        .merge(telling)
        .merge(asking)
        .merge(adjusting)
        .merge(administering)
        .merge(page)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Api { desk, settings })
        .merge(gatehouse.layer((SEEN, Guard { access, scope: Scope::Check, observer })))
}

/// Answers a call as a server with this desk would, without a network: how, and with what.
pub async fn call<S: Store>(desk: Desk<S>, path: &str, body: Vec<u8>) -> (StatusCode, Bytes) {
    let request = Request::post(path).body(Body::from(body)).expect("the caller's path is one of the API's");
    let Ok(response) = router(desk).call(request).await;
    let (head, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("an answer is in memory already");
    (head.status, body)
}

type Answered = Result<Answer, Problem>;

fn caller(question: &Question) -> Caller {
    Caller { transport: Transport::Http, budget: question.budget }
}

async fn check<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Result<Response, Problem> {
    checked(&desk, request.into_body()).await
}

/// The answer to what a body asks to be checked.
async fn checked<S: Store>(desk: &Desk<S>, body: impl Sent) -> Result<Response, Problem> {
    let read = received(body, MAX_BATCH_BODY).await.and_then(|body| Questions::read(desk, &body));
    let questions = read.inspect_err(|_| desk.observer().invalid(Call::Check.into()))?;
    if let Questions::One(question) = &questions
        && let Some(decided) = desk.check_here(Transport::Http, &question.subject)
    {
        return Ok(Answer::from(decided?).into_response());
    }
    // boxed, so that what is decided here does not make room for it
    Box::pin(check_all(desk, questions)).await
}

async fn check_all<S: Store>(desk: &Desk<S>, questions: Questions) -> Result<Response, Problem> {
    match questions {
        Questions::One(question) => {
            decide(desk, Operation::Check, &question).await.map(IntoResponse::into_response)
        }
        Questions::Several(questions) => {
            let results = check_each(desk, &questions).await.into_iter().map(Outcome::from).collect();
            Ok(Json(Results { results }).into_response())
        }
    }
}

async fn check_each<S: Store>(desk: &Desk<S>, questions: &[Question]) -> Vec<Answered> {
    let check = |question| decide(desk, Operation::Check, question);
    if desk.limiter().store().is_remote() {
        // in order: each joins those that wait for the store before the next one does
        return join_all(questions.iter().map(check)).await;
    }
    let mut answers = Vec::with_capacity(questions.len());
    for few in questions.chunks(CHECKS_PER_LOOK) {
        // nothing is waited for: without this, nobody else would have a turn
        consume_budget().await;
        for question in few {
            answers.push(check(question).await);
        }
    }
    answers
}

async fn peek<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Answered {
    let question = ask(&desk, Call::Peek, request).await?;
    decide(&desk, Operation::Peek, &question).await
}

async fn charge<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Audited<Answered> {
    let question = ask(&desk, Call::Charge, request).await?;
    Ok(audited(&question, decide(&desk, Operation::Charge, &question).await))
}

async fn refund<S: Store>(State(desk): State<Desk<S>>, request: Request) -> Audited<Answered> {
    let question = ask(&desk, Call::Refund, request).await?;
    Ok(audited(&question, decide(&desk, Operation::Refund { at: question.at }, &question).await))
}

async fn decide<S: Store>(desk: &Desk<S>, operation: Operation, question: &Question) -> Answered {
    Ok(desk.decide(caller(question), operation, &question.subject).await?.into())
}

async fn reset<S: Store>(
    State(desk): State<Desk<S>>,
    request: Request,
) -> Audited<Result<Json<Reset>, Problem>> {
    let question = ask(&desk, Call::Reset, request).await?;
    let reset = desk.reset(caller(&question), &question.subject).await;
    Ok(audited(&question, reset.map(|reset| Json(Reset { reset })).map_err(Problem::from)))
}

/// An answer, and what to write down that it was about; or why nothing was asked.
type Audited<T> = Result<(Extension<guard::Subject>, T), Problem>;

fn audited<T>(question: &Question, answer: T) -> (Extension<guard::Subject>, T) {
    (Extension(guard::Subject(question.subject.to_string())), answer)
}

async fn explain<S: Store>(
    State(Api { desk, settings }): State<Api<S>>,
    request: Request,
) -> Result<Json<Explanation>, Problem> {
    let authorization = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let may_see_rules = settings.access.check(authorization, Scope::Admin).is_ok();
    let question = ask(&desk, Call::Explain, request).await?;
    let begun = Instant::now();
    let rules = desk.limiter().rules();
    let decision = desk.decide(caller(&question), Operation::Peek, &question.subject).await?;
    let is_store_away = decision.is_degraded();
    let (mut explanation, counters) = Explanation::new(&rules, &question.subject, decision)?;
    if !may_see_rules {
        explanation.keep_others_back();
    }
    // a drawing more or less: without the store, or without time, the words have to do
    let budget = question.budget.map(|budget| budget.saturating_sub(begun.elapsed()));
    if !is_store_away && let Ok(looks) = desk.look(Caller { budget, ..caller(&question) }, &counters).await {
        explanation.draw(looks);
    }
    Ok(Json(explanation))
}

async fn not_found(request: Request) -> Problem {
    let path = request.uri().path();
    let detail = format!(
        "there is no {path}: use /v1/check, /v1/peek, /v1/charge, /v1/refund, /v1/reset, /v1/explain, /v1/auth, /v1/rules, /v1/top, /v1/live, \
         /healthz, /readyz, /metrics, /openapi.json or, in a browser, /"
    );
    Problem::new(StatusCode::NOT_FOUND, detail)
}

async fn method_not_allowed(request: Request) -> Problem {
    let (path, method) = (request.uri().path(), request.method());
    let detail = format!("{path} does not take {method}: use the method that the Allow header names");
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
}

/// The question in a request's body.
async fn ask<S: Store>(desk: &Desk<S>, call: Call, request: Request) -> Result<Question, Problem> {
    let read =
        received(request.into_body(), MAX_BODY).await.and_then(|body| Question::read(desk, call, &body));
    read.inspect_err(|_| desk.observer().invalid(call.into()))
}

/// A whole body, if it arrives in time and is not too large.
async fn received(body: impl Sent, max: usize) -> Result<Bytes, Problem> {
    let mut read = pin!(read(body, max));
    // what has arrived already, as nearly always, needs no timer
    let at_once = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
    if let Poll::Ready(read) = at_once {
        return read;
    }
    let in_time = Box::pin(tokio::time::timeout(BODY_TIMEOUT, read)).await;
    in_time.unwrap_or_else(|_| {
        let detail = format!("the body did not arrive within {BODY_TIMEOUT:?}: send it at once");
        Err(Problem::new(StatusCode::REQUEST_TIMEOUT, detail))
    })
}

async fn read(mut body: impl Sent, max: usize) -> Result<Bytes, Problem> {
    let mut read = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| Problem::bad_request(format_args!("the body broke off: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if read.len() + data.len() > max {
            let detail = format!("the body is too large: send at most {max} bytes");
            return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        if read.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        read.extend_from_slice(&data);
    }
    Ok(read.freeze())
}
