//! The gRPC front end: Envoy's rate limit service, version 3.
//!
//! | file | contents |
//! |---|---|
//! | `mod` | the service, with health checks and reflection |
//! | `server` | connections, their bounds, and graceful shutdown |
//! | `executor` | runs the calls of a connection in its own task |
//! | `unary` | `ShouldRateLimit` without tonic's router |
//! | `body` | the message of a call, within memory bounds |
//! | `request` | from Envoy's request to a group of [`Request`](sluicegate::limiter::Request)s, and the holds to settle |
//! | `hold` | holds, and settling them at the end of a stream |
//! | `response` | from the decisions to Envoy's response |
//! | `timeout` | the caller's deadline |
//! | `messages` | Envoy's messages |
//!
//! The labels of a descriptor are its entries and the request's `domain`. Each descriptor is matched against the rules separately; the
//! call is allowed only if all of them are. A denial is a response and not a gRPC error, even if the failure policy `closed` denies:
//! Envoy allows requests whose call fails. For the same reason *no input that an end client controls may produce a gRPC error*: long
//! values are shortened, numbers are clamped, and undecidable requests are denied. `INVALID_ARGUMENT` is for errors in Envoy's
//! configuration.

mod body;
mod executor;
mod hold;
pub mod messages;
mod request;
mod response;
pub mod server;
mod timeout;
mod unary;

use std::{
    fmt,
    fmt::Display,
    net::SocketAddr,
    slice,
    sync::{Arc, Weak},
    time::Duration,
};

use http::{HeaderMap, header::AUTHORIZATION};
use parking_lot::Mutex;
use sluicegate::{
    Decision, Error, Source,
    limiter::{GroupDecision, Operation},
    store::HoldId,
};
use sluicegate_tower::headers::Dialect;
use tokio::time::Instant;
use tonic::{Request, Response, Status, service::Routes};
use tonic_health::{
    ServingStatus,
    server::{HealthReporter, health_reporter},
};

use self::messages::{
    DESCRIPTORS, RateLimitRequest, RateLimitResponse,
    rate_limit_service_server::{RateLimitService, RateLimitServiceServer, SERVICE_NAME},
};
use self::request::{Problem, RateLimitCall};
use crate::{
    auth::{Access, AuthError, Identity, is_authenticated},
    completion::run_to_completion,
    config::{Live, Scope},
    engine::{Engine, Excess, Transport},
    net::activity::Activity,
    observe::{
        Call,
        logs::{Audit, AuditResult, audit},
    },
};

/// The largest request that is read, in bytes; a larger one is denied. Envoy accepts 60 KiB of headers unless its
/// `max_request_headers_kb` is set, and several descriptors may repeat a header: this is enough for 16 repetitions of
/// all of them.
pub const MAX_MESSAGE: usize = 1 << 20;

/// Requests up to this size, in bytes, need no share of [`LARGE_MESSAGES`].
pub const MAX_SMALL_MESSAGE: usize = 64 << 10;

/// The memory for larger requests, shared by all connections, in bytes. If it is exhausted, a request is denied.
pub const LARGE_MESSAGES: usize = 64 << 20;

/// The minimum interval between log lines about requests without a decision.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// The service name of envoyproxy/ratelimit in health checks.
const REFERENCE_NAME: &str = "ratelimit";

/// The settings of the gRPC front end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The dialect of rate limit headers, which Envoy adds to the response.
    pub headers: Dialect,
    /// The response when the failure policy `closed` denies.
    pub closed: Closed,
}

/// The response when the failure policy `closed` denies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Closed {
    /// `OVER_LIMIT`: Envoy denies the request, regardless of its configuration.
    #[default]
    OverLimit,
    /// The error `UNAVAILABLE`: Envoy's `failure_mode_deny` decides.
    Unavailable,
}

/// The services of the gRPC front end.
pub struct Services {
    handler: Arc<RateLimitHandler>,
    routes: Routes,
    health: HealthReporter,
}

/// The client of a call, in the extensions of a call that tonic serves.
#[derive(Clone)]
struct Caller {
    peer: SocketAddr,
    activity: Activity,
}

/// The call of descriptors with negative hits.
const REFUND: Call = Call::Decide(Operation::Refund { at: None });

/// Decides Envoy's requests.
struct RateLimitHandler {
    engine: Engine,
    settings: Live<Settings>,
    access: Access,
    /// When a request without a decision was last logged.
    last_warning: Mutex<Option<Instant>>,
}

impl Clone for Services {
    fn clone(&self) -> Self {
        let Self { handler, routes, health } = self;
        Self { handler: Arc::clone(handler), routes: routes.clone(), health: health.clone() }
    }
}

impl Services {
    /// Creates the services. Their health is `SERVING` until [`Services::set_not_ready`].
    pub async fn new(engine: Engine, settings: Live<Settings>, access: Access) -> Self {
        let handler = Arc::new(RateLimitHandler { engine, settings, access, last_warning: Mutex::default() });
        let service = RateLimitServiceServer::from_arc(Arc::clone(&handler));
        let (health, health_service) = health_reporter();
        let routes =
            Routes::new(service.max_decoding_message_size(MAX_SMALL_MESSAGE)).add_service(health_service);
        let services = Self { handler, routes: with_reflection(routes).prepare(), health };
        services.report(ServingStatus::Serving).await;
        services
    }

    /// Sets the health to `SERVING`.
    pub async fn set_ready(&self) {
        self.report(ServingStatus::Serving).await;
    }

    /// Sets the health to `NOT_SERVING`, during start-up and when the server drains. Calls are still answered.
    pub async fn set_not_ready(&self) {
        self.report(ServingStatus::NotServing).await;
    }

    async fn report(&self, status: ServingStatus) {
        for name in ["", SERVICE_NAME, REFERENCE_NAME] {
            self.health.set_service_status(name, status).await;
        }
    }
}

/// Adds both versions of reflection: older tools support only the first.
fn with_reflection(routes: Routes) -> Routes {
    const VALID: &str = "the generated descriptors are valid";
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    routes
        .add_service(reflection().build_v1alpha().expect(VALID))
        .add_service(reflection().build_v1().expect(VALID))
}

#[tonic::async_trait]
impl RateLimitService for RateLimitHandler {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let caller = request.extensions().get::<Caller>().expect("every connection adds its caller");
        self.decide(caller, request.metadata().as_ref(), request.get_ref()).await.map(Response::new)
    }
}

impl RateLimitHandler {
    async fn decide(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        let observer = self.engine.observer();
        self.authenticate(caller, headers)?;
        let call = match request::read(&self.engine, request) {
            Ok(call) => call,
            Err(problem) => {
                observer.invalid(Call::CHECK);
                return match problem {
                    Problem::Configuration(text) => Err(Status::invalid_argument(text)),
                    Problem::Undecidable(reason) => Ok(self.deny(&reason, request)),
                };
            }
        };
        let deadline = timeout::budget(headers);
        if !call.end_positions.is_empty() {
            // boxed to keep the future of a single check small
            return Box::pin(self.end_stream(caller, headers, request, call, deadline)).await;
        }
        let RateLimitCall { mut requests, hold, .. } = call;
        if hold.is_none()
            && let [one @ sluicegate::limiter::Request { operation: Operation::Check, .. }] = &mut *requests
        {
            one.deadline = deadline;
            return match self.engine.decide(Transport::Grpc, one).await {
                Ok(decision) => self.respond(&decision, slice::from_ref(&decision)),
                Err(error) => self.without_decision(&error, request),
            };
        }
        let group = Group { requests, hold, deadline };
        // boxed to keep the future of a single check small
        Box::pin(self.decide_group(caller, headers, request, group)).await
    }

    async fn decide_group(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        request: &RateLimitRequest,
        group: Group,
    ) -> Result<RateLimitResponse, Status> {
        let decided = if group.requests.iter().all(|request| request.operation == Operation::Check) {
            group.decide(&self.engine).await
        } else {
            let identity = self.access.check(authorization(headers), Scope::Adjust).map_err(|error| {
                self.engine.observer().unauthorized(Call::CHECK);
                self.access.audit_rejected(Some(caller.peer), REFUND.name(), &error);
                unauthorized(&error)
            })?;
            let waiting = Arc::new(());
            let (peer, domain, caller) = (caller.peer, request.domain.clone(), Arc::downgrade(&waiting));
            let refunds = Refunds { identity, peer, domain, group, caller };
            let decided = run_to_completion(refunds.decide(self.engine.clone())).await;
            drop(waiting);
            decided
        };
        match decided {
            Ok((group, is_held)) => {
                let mut response = self.respond(&group.overall, &group.each)?;
                response.dynamic_metadata = is_held.then(response::settle_metadata);
                Ok(response)
            }
            Err(error) => self.without_decision(&error, request),
        }
    }

    /// Settles the holds of a call at the end of a stream. Other descriptors of the call are decided, without a hold.
    async fn end_stream(
        &self,
        caller: &Caller,
        headers: &HeaderMap,
        request: &RateLimitRequest,
        call: RateLimitCall,
        deadline: Option<Duration>,
    ) -> Result<RateLimitResponse, Status> {
        let RateLimitCall { requests, ends, end_positions, problem, .. } = call;
        if let Some(problem) = problem {
            self.engine.observer().invalid(Call::CHECK);
            self.warn(format_args!("settle descriptor ignored: {problem}"));
        }
        let excess = match self.access.check(authorization(headers), Scope::Adjust) {
            Ok(_) => Excess::Unbounded,
            Err(_) => Excess::Bounded,
        };
        // completes even if the caller disconnects: otherwise the estimate would stay charged
        let settled = run_to_completion(hold::settle(self.engine.clone(), ends, excess, deadline)).await;
        if let Err(error) = settled {
            self.warn(format_args!("hold not settled at the end of its stream; it will expire: {error}"));
        }
        if requests.is_empty() {
            return Ok(response::settled(end_positions.len()));
        }
        let group = Group { requests, hold: None, deadline };
        let mut response = self.decide_group(caller, headers, request, group).await?;
        // the response to an undecidable request has a status for every descriptor
        if response.statuses.len() < request.descriptors.len() {
            response::insert_settled(&mut response, &end_positions);
        }
        Ok(response)
    }

    /// Denies a call whose request is too large to be read.
    fn deny_unread(&self, caller: &Caller, headers: &HeaderMap) -> Result<RateLimitResponse, Status> {
        self.authenticate(caller, headers)?;
        self.engine.observer().invalid(Call::CHECK);
        self.warn(format_args!(
            "undecidable gRPC request denied: the request is larger than {MAX_MESSAGE} bytes, or too many requests of more than {MAX_SMALL_MESSAGE} bytes are in \
             flight: remove long headers from the descriptors"
        ));
        Ok(response::denied(0))
    }

    fn authenticate(&self, caller: &Caller, headers: &HeaderMap) -> Result<Identity, Status> {
        let identity = self.access.check(authorization(headers), Scope::Check);
        caller.activity.set_authenticated(is_authenticated(&identity));
        identity.map_err(|error| {
            self.engine.observer().unauthorized(Call::CHECK);
            self.access.log_rejected_check(Some(caller.peer), "gRPC check", &error);
            unauthorized(&error)
        })
    }

    /// Responds to a request that was not decided. If too many rules match or the cost is too large, it is denied.
    fn without_decision(
        &self,
        error: &Error,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        match error {
            Error::Store(_) | Error::PartialReset { .. } => Err(Status::unavailable(error.to_string())),
            _ => Ok(self.deny(error, request)),
        }
    }

    fn deny(&self, reason: &dyn Display, request: &RateLimitRequest) -> RateLimitResponse {
        self.warn(format_args!("undecidable gRPC request denied: {reason}"));
        response::denied(request.descriptors.len())
    }

    /// Logs a warning about a request, unless one was logged within [`WARNING_INTERVAL`].
    fn warn(&self, warning: fmt::Arguments<'_>) {
        let now = Instant::now();
        let mut last = self.last_warning.lock();
        if last.is_none_or(|last| now.duration_since(last) >= WARNING_INTERVAL) {
            *last = Some(now);
            drop(last);
            tracing::warn!("{warning}");
        }
    }

    fn respond(&self, overall: &Decision, each: &[Decision]) -> Result<RateLimitResponse, Status> {
        let settings = **self.settings.load();
        if overall.source == Source::Closed && settings.closed == Closed::Unavailable {
            return Err(Status::unavailable(
                "the store is unavailable, and the failure policy of a matching rule is closed",
            ));
        }
        Ok(response::new(overall, each, settings.headers))
    }
}

/// The requests of a call, which are allowed together or not at all.
struct Group {
    requests: Vec<sluicegate::limiter::Request<'static>>,
    hold: Option<HoldId>,
    deadline: Option<Duration>,
}

impl Group {
    /// Returns the decision, and whether the requests are held.
    async fn decide(&self, engine: &Engine) -> Result<(GroupDecision, bool), Error> {
        let Self { requests, hold, deadline } = self;
        match hold {
            Some(id) => {
                let decided = hold::hold(engine, requests, id.clone(), *deadline).await?;
                Ok((decided.group, decided.is_held))
            }
            None => Ok((engine.decide_group(Transport::Grpc, requests, *deadline).await?, false)),
        }
    }
}

/// A call with refunds, which writes an audit line.
struct Refunds {
    identity: Identity,
    peer: SocketAddr,
    domain: String,
    group: Group,
    /// Alive while the caller waits.
    caller: Weak<()>,
}

impl Refunds {
    async fn decide(self, engine: Engine) -> Result<(GroupDecision, bool), Error> {
        let decided = self.group.decide(&engine).await;
        audit(&Audit {
            who: self.identity.name(),
            from: Some(self.peer),
            action: REFUND.name(),
            subject: &format_args!("domain {:?}", self.domain),
            result: AuditResult::of_group(&decided),
        });
        if let (Ok((_, true)), Some(id), 0) = (&decided, &self.group.hold, self.caller.strong_count()) {
            hold::release(&engine, &self.group.requests, id);
        }
        decided
    }
}

fn authorization(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(AUTHORIZATION).map(|value| value.as_bytes())
}

/// The status of a call without a sufficient token.
fn unauthorized(error: &AuthError) -> Status {
    match error {
        AuthError::MissingToken => Status::unauthenticated(error.to_string()),
        AuthError::UnknownToken | AuthError::MissingScope { .. } => {
            Status::permission_denied(error.to_string())
        }
    }
}
