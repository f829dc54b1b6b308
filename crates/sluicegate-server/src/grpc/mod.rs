//! Envoy's rate limit service, version 3, over a [`Desk`].
//!
//! | file | has |
//! |---|---|
//! | `mod` | the service, with health and reflection beside it |
//! | `question` | a request of Envoy's as requests to decide together |
//! | `timeout` | how long Envoy waits |
//! | `answer` | what was decided as Envoy's response |
//! | `body` | the message of a call on its way in |
//! | `shortcut` | Envoy's call past the router |
//! | `server` | connections, their bounds, and how they end |
//! | `executor` | the calls of a connection, answered in its own task |
//! | `messages` | Envoy's messages |
//!
//! A descriptor's entries and the request's `domain` are its labels. Each descriptor meets rules by itself; the request
//! passes as a whole or not at all. A denial is an answer, also when it is due to a rule that is closed while the store is away:
//! Envoy lets pass what ends in an error. For the same reason *no input that an end client controls may produce a gRPC error*: long
//! values are shortened, numbers are clamped, and what cannot be decided is denied. `INVALID_ARGUMENT` is for mistakes in Envoy's
//! configuration.

mod body;
mod executor;
pub mod messages;
mod request;
mod response;
pub mod server;
mod timeout;
mod unary;

use std::{fmt::Display, net::SocketAddr, slice, sync::Arc, time::Duration};

use http::{HeaderMap, header::AUTHORIZATION};
use parking_lot::Mutex;
use sluicegate::{Decision, Error, Operation, Source};
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
use self::request::Problem;
use crate::{
    auth::{Access, AuthError, Identity},
    config::{Live, Scope},
    engine::{Engine, Transport},
    observe::{
        Call,
        logs::{Audit, audit},
    },
};

/// The largest request that is read, in bytes; a larger one is denied. Envoy's own bound is 60 KiB of headers unless its
/// `max_request_headers_kb` is set, and several descriptors may repeat a header: this has room for 16 times all of them.
pub const MAX_MESSAGE: usize = 1 << 20;

/// Requests up to this size, in bytes, need no share of [`LARGE_MESSAGES`].
pub const MAX_SMALL_MESSAGE: usize = 64 << 10;

/// The memory for larger requests on their way in, of all connections together, in bytes. One that finds no room is denied.
pub const LARGE_MESSAGES: usize = 64 << 20;

/// How often a denial without a decision is logged at most.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// What envoyproxy/ratelimit calls its service when it is asked for its health.
const REFERENCE_NAME: &str = "ratelimit";

/// How answers are given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// How limits are told to the client, in fields that Envoy adds to the response.
    pub headers: Dialect,
    /// What Envoy is told when a rule refuses because the store is away.
    pub closed: Closed,
}

/// What Envoy is told when a rule refuses because the store is away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Closed {
    /// That the request is over its limit: Envoy refuses it, however it is set.
    #[default]
    OverLimit,
    /// The error `UNAVAILABLE`: Envoy's `failure_mode_deny` decides.
    Unavailable,
}

/// The services of the gRPC front end.
pub struct Services {
    limits: Arc<Limits>,
    routes: Routes,
    health: HealthReporter,
}

/// Who connected, in the extensions of a call that takes the longer way.
#[derive(Clone, Copy)]
struct Peer(SocketAddr);

/// What negative hits are.
const REFUND: Call = Call::Decide(Operation::Refund { at: None });

/// Answers Envoy.
struct Limits {
    engine: Engine,
    settings: Live<Settings>,
    access: Access,
    /// When a denial without a decision was last logged.
    warned: Mutex<Option<Instant>>,
}

impl Clone for Services {
    fn clone(&self) -> Self {
        let Self { limits, routes, health } = self;
        Self { limits: Arc::clone(limits), routes: routes.clone(), health: health.clone() }
    }
}

impl Services {
    /// The rate limit service over a desk. It reports that it is ready until told otherwise.
    pub async fn new(engine: Engine, settings: Live<Settings>, access: Access) -> Self {
        let limits = Arc::new(Limits { engine, settings, access, warned: Mutex::default() });
        let service = RateLimitServiceServer::from_arc(Arc::clone(&limits));
        let (health, health_service) = health_reporter();
        let routes =
            Routes::new(service.max_decoding_message_size(MAX_SMALL_MESSAGE)).add_service(health_service);
        let services = Self { limits, routes: with_reflection(routes).prepare(), health };
        services.report(ServingStatus::Serving).await;
        services
    }

    /// Reports from now on that it is ready.
    pub async fn is_ready(&self) {
        self.report(ServingStatus::Serving).await;
    }

    /// Reports from now on that it is not ready, so that clients go elsewhere: before start-up is over, and when it is about to stop.
    /// It still answers.
    pub async fn is_not_ready(&self) {
        self.report(ServingStatus::NotServing).await;
    }

    async fn report(&self, status: ServingStatus) {
        for name in ["", SERVICE_NAME, REFERENCE_NAME] {
            self.health.set_service_status(name, status).await;
        }
    }
}

/// Adds both versions of reflection: older tools know only the first.
fn with_reflection(routes: Routes) -> Routes {
    const VALID: &str = "the descriptors are those of the generated code";
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
impl RateLimitService for Limits {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
        self.decide(peer, request.metadata().as_ref(), request.get_ref()).await.map(Response::new)
    }
}

impl Limits {
    async fn decide(
        &self,
        peer: Option<SocketAddr>,
        headers: &HeaderMap,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        let observer = self.engine.observer();
        let mut granted = self.granted(headers)?;
        let mut requests = match request::read(&self.engine, request) {
            Ok(requests) => requests,
            Err(problem) => {
                observer.invalid(Call::CHECK);
                return match problem {
                    Problem::Configuration(text) => Err(Status::invalid_argument(text)),
                    Problem::Undecidable(reason) => Ok(self.deny(&reason, request)),
                };
            }
        };
        let deadline = timeout::budget(headers);
        if let [one @ sluicegate::Request { operation: Operation::Check, .. }] = &mut *requests {
            one.deadline = deadline;
            return match self.engine.decide(Transport::Grpc, one).await {
                Ok(decision) => self.respond(&decision, slice::from_ref(&decision)),
                Err(error) => self.without_decision(&error, request),
            };
        }
        let refunds = requests.iter().any(|request| request.operation != Operation::Check);
        if refunds {
            granted = self.access.check(authorization(headers), Scope::Adjust).map_err(|denied| {
                observer.unauthorized(Call::CHECK);
                self.access.audit_rejected(peer, REFUND.name(), &denied);
                turned_away(&denied)
            })?;
        }
        // boxed to keep the future of a single check small
        let decided = Box::pin(self.engine.decide_group(Transport::Grpc, &requests, deadline)).await;
        if refunds {
            let subject = format_args!("domain {:?}", request.domain);
            let result = decided.as_ref().map(|_| ()).map_err(|error| error as &dyn Display);
            audit(&Audit {
                who: granted.name(),
                from: peer,
                action: REFUND.name(),
                subject: &subject,
                result,
            });
        }
        match decided {
            Ok(group) => self.respond(&group.overall, &group.each),
            Err(error) => self.without_decision(&error, request),
        }
    }

    /// Answers a call whose request is too large to be read.
    fn deny_unread(&self, headers: &HeaderMap) -> Result<RateLimitResponse, Status> {
        self.granted(headers)?;
        self.engine.observer().invalid(Call::CHECK);
        self.warn(&format_args!(
            "a request is larger than {MAX_MESSAGE} bytes, or there are too many of more than {MAX_SMALL_MESSAGE}: \
             leave long headers out of descriptors"
        ));
        Ok(response::denied(0))
    }

    fn granted(&self, headers: &HeaderMap) -> Result<Identity, Status> {
        self.access.check(authorization(headers), Scope::Check).map_err(|denied| {
            self.engine.observer().unauthorized(Call::CHECK);
            turned_away(&denied)
        })
    }

    /// Answers a request that the limiter cannot decide: too many rules match it, or a cost is too large.
    fn without_decision(
        &self,
        error: &Error,
        request: &RateLimitRequest,
    ) -> Result<RateLimitResponse, Status> {
        match error {
            Error::Store(_) => Err(Status::unavailable(error.to_string())),
            _ => Ok(self.deny(error, request)),
        }
    }

    fn deny(&self, reason: &dyn Display, request: &RateLimitRequest) -> RateLimitResponse {
        self.warn(reason);
        response::denied(request.descriptors.len())
    }

    /// Logs a denial without a decision, unless one was logged within [`WARNING_INTERVAL`].
    fn warn(&self, reason: &dyn Display) {
        let now = Instant::now();
        let mut warned = self.warned.lock();
        if warned.is_none_or(|before| now.duration_since(before) >= WARNING_INTERVAL) {
            *warned = Some(now);
            drop(warned);
            tracing::warn!("gRPC request denied, it cannot be decided: {reason}");
        }
    }

    fn respond(&self, overall: &Decision, each: &[Decision]) -> Result<RateLimitResponse, Status> {
        let settings = **self.settings.load();
        if overall.source == Source::Closed && settings.closed == Closed::Unavailable {
            return Err(Status::unavailable(
                "the store is away, and a rule that matches is closed until it is back",
            ));
        }
        Ok(response::of(overall, each, settings.headers))
    }
}

fn authorization(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(AUTHORIZATION).map(|value| value.as_bytes())
}

/// What is answered to somebody who may not ask.
fn turned_away(denied: &AuthError) -> Status {
    match denied {
        AuthError::MissingToken => Status::unauthenticated(denied.to_string()),
        AuthError::UnknownToken | AuthError::MissingScope { .. } => {
            Status::permission_denied(denied.to_string())
        }
    }
}
