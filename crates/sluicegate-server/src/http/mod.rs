//! The HTTP front end: JSON API, forward-auth, dashboard, metrics.
//!
//! | file | contents |
//! |---|---|
//! | `server` | connections and graceful shutdown |
//! | `check` | `POST /v1/check`, the hot call |
//! | `hold` | the calls for holds |
//! | `routes` | all other calls |
//! | `request`, `limit`, `body` | from a JSON body to a [`Request`](sluicegate::limiter::Request) |
//! | `response`, `hold_response`, `json` | from a decision to JSON |
//! | `guard` | tokens, and protection against cross-site requests |
//! | `status` | health, readiness, rules, heavy hitters, metrics |
//! | `live` | server-sent events for the dashboard |
//! | `explain`, `snapshot` | why a request would be allowed or denied |
//! | `openapi` | the API's description |
//! | `problem` | errors as problem+json |
//! | `chunked_body` | large responses in small frames |
//! | `unread_body` | request bodies that were not read before the response |
//!
//! An invalid request is a 4xx whose text names the fix; nothing is charged. A denial is a decision, and therefore a 200.

mod body;
mod check;
mod chunked_body;
pub mod explain;
pub(crate) mod guard;
mod hold;
pub mod hold_response;
mod json;
mod limit;
pub mod live;
pub mod openapi;
mod problem;
mod request;
pub mod response;
mod routes;
pub mod server;
pub mod snapshot;
mod status;
mod unread_body;

use std::{
    fmt::Display,
    future::{Future, poll_fn},
    net::SocketAddr,
    pin::pin,
    task::Poll,
    time::Duration,
};

use axum::{
    BoxError, Router,
    body::{Body, Bytes, HttpBody, to_bytes},
    extract::ConnectInfo,
    http::{Request, StatusCode},
    response::Response,
};
use bytes::BytesMut;
use http_body_util::BodyExt;
use sluicegate::Decision;
use sluicegate_tower::headers;
use tower_service::Service;

pub use self::{
    check::MAX_BATCH_BODY,
    request::{MAX_BODY, MAX_CHECKS},
    unread_body::DISCARD_TIMEOUT,
};
use self::{problem::Problem, response::DecisionBody};
use crate::{
    auth::Access,
    config::Live,
    engine::Engine,
    forward_auth,
    net::{activity::Activity, shutdown::Shutdown},
    startup::Startup,
};

/// The time in which a body has to arrive.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// The peer address of a call that is not made over the network.
const LOCAL_PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// The settings of the API. By default every call is allowed, and the server is ready.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The tokens.
    pub access: Access,
    /// Whether the server is ready.
    pub startup: Startup,
    /// Whether the server is shutting down.
    pub shutdown: Shutdown,
    /// How forward-auth reads and answers requests.
    pub forward_auth: Live<forward_auth::Settings>,
    /// The peers of forward-auth that were logged as untrusted.
    pub untrusted_peers: forward_auth::UntrustedPeers,
}

/// The state of every call.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) engine: Engine,
    pub(crate) settings: Settings,
}

impl Api {
    /// The response to a check or a peek, with the rate limit headers of the configured dialect if the caller wants them.
    fn decision_body(&self, decision: Decision, wants_headers: bool) -> DecisionBody {
        let headers = wants_headers.then(|| {
            let pairs = headers::pairs(&decision, self.settings.forward_auth.load().dialect);
            pairs.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
        });
        DecisionBody { headers, ..decision.into() }
    }
}

/// The client of a request.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a> {
    pub(crate) peer: SocketAddr,
    pub(crate) activity: &'a Activity,
}

/// The HTTP front end without its connections. The server and the tests call it the same way.
#[derive(Clone)]
pub struct HttpService {
    api: Api,
    router: Router,
}

impl HttpService {
    /// The front end over an engine.
    pub fn new(engine: Engine, settings: Settings) -> Self {
        let api = Api { engine, settings };
        Self { router: routes::router(api.clone()), api }
    }

    /// Answers a POST as a server with this engine would, without a network.
    pub async fn post(&self, path: &str, body: Vec<u8>) -> (StatusCode, Bytes) {
        let request = Request::post(path).body(Body::from(body)).expect("the path is one of the API's");
        let (head, body) = self.respond(LOCAL_PEER, request).await.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("the body is in memory");
        (head.status, body)
    }

    /// Answers a request without a connection.
    pub async fn respond<B: RequestBody>(&self, peer: SocketAddr, request: Request<B>) -> Response {
        let activity = Activity::detached(server::TIMEOUTS);
        self.respond_to(Caller { peer, activity: &activity }, request).await
    }

    /// Answers a request. The two calls that make decisions bypass the router: finding the route and boxing the call takes a tenth of
    /// the time of a check.
    async fn respond_to<B: RequestBody>(&self, caller: Caller<'_>, mut request: Request<B>) -> Response {
        match request.uri().path() {
            check::PATH => check::respond(&self.api, caller, request).await,
            forward_auth::PATH => forward_auth::respond(&self.api, caller, request).await,
            _ => {
                request.extensions_mut().insert(ConnectInfo(caller.peer));
                request.extensions_mut().insert(caller.activity.clone());
                // boxed to keep the future of a check small
                let Ok(response) = Box::pin(self.router.clone().call(request)).await;
                response
            }
        }
    }
}

/// The body of a request.
pub trait RequestBody:
    HttpBody<Data = Bytes, Error: Display + Into<BoxError>> + Send + Unpin + 'static
{
}

impl<B: HttpBody<Data = Bytes, Error: Display + Into<BoxError>> + Send + Unpin + 'static> RequestBody for B {}

/// Reads a whole body, if it arrives in time and is not too large.
async fn receive(body: impl RequestBody, max: usize) -> Result<Bytes, Problem> {
    let mut read = pin!(read(body, max));
    // nearly all bodies have already arrived and need no timer
    let ready = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
    if let Poll::Ready(read) = ready {
        return read;
    }
    let in_time = Box::pin(tokio::time::timeout(BODY_TIMEOUT, read)).await;
    in_time.unwrap_or_else(|_| {
        let detail = format!("the body did not arrive within {BODY_TIMEOUT:?}: send it with the request");
        Err(Problem::new(StatusCode::REQUEST_TIMEOUT, detail))
    })
}

async fn read(mut body: impl RequestBody, max: usize) -> Result<Bytes, Problem> {
    let mut read = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|error| Problem::bad_request(format_args!("the body is incomplete: {error}")))?;
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
