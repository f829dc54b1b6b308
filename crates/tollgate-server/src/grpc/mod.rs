//! Envoy's rate limit service, version 3, over a [`Desk`].
//!
//! | file | has |
//! |---|---|
//! | `mod` | the service, with health and reflection beside it |
//! | `question` | a request of Envoy's as requests to decide together |
//! | `answer` | what was decided as Envoy's response |
//! | `serve` | connections, their bounds, and how they end |
//! | `turns` | the calls of a connection, answered in its own task |
//! | `messages` | Envoy's messages |
//!
//! A descriptor's entries and the request's `domain` are its labels. Each descriptor meets rules by itself; the request
//! passes as a whole or not at all. A mistake of the caller is `INVALID_ARGUMENT`, and nothing is charged. A refusal is an
//! answer, also when it is due to a rule that is closed while the store is away: Envoy lets pass what ends in an error.

mod answer;
pub mod messages;
mod question;
pub mod serve;
mod turns;

use std::fmt::Display;

use tollgate::{Error, Hits, Source, Store};
use tollgate_tower::{headers::Dialect, timeout};
use tonic::{Request, Response, Status, metadata::MetadataMap, service::Routes};
use tonic_health::{
    ServingStatus,
    server::{HealthReporter, health_reporter},
};

use self::messages::{
    DESCRIPTORS, RateLimitRequest, RateLimitResponse,
    rate_limit_service_server::{RateLimitService, RateLimitServiceServer, SERVICE_NAME},
};
use crate::{
    access::{Access, Denied, Granted},
    config::{Live, Scope},
    desk::{Caller, Desk, Transport},
    observe::logs::{Audit, audit},
};

/// The largest request, in bytes.
pub const MAX_MESSAGE: usize = 64 << 10;

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
#[derive(Clone)]
pub struct Services {
    routes: Routes,
    health: HealthReporter,
}

/// Answers Envoy.
struct Limits<S> {
    desk: Desk<S>,
    settings: Live<Settings>,
    access: Access,
}

impl Services {
    /// The rate limit service over a desk. It says that it is in good health until it stops.
    pub async fn new<S: Store>(desk: Desk<S>, settings: Live<Settings>, access: Access) -> Self {
        let limits = Limits { desk, settings, access };
        let limits = RateLimitServiceServer::new(limits).max_decoding_message_size(MAX_MESSAGE);
        let (health, health_service) = health_reporter();
        let routes = Routes::new(limits).add_service(health_service);
        let services = Self { routes: with_reflection(routes).prepare(), health };
        services.report(ServingStatus::Serving).await;
        services
    }

    /// Says from now on that it is about to stop, so that clients go elsewhere; it still answers.
    pub async fn is_leaving(&self) {
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
impl<S: Store> RateLimitService for Limits<S> {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let settings = **self.settings.load();
        let mut granted = self.admit(request.metadata(), Scope::Check)?;
        let budget = timeout::budget(request.metadata().as_ref());
        let caller = Caller { transport: Transport::Grpc, budget };
        let requests = question::read(&self.desk, request.get_ref())?;
        let gives_back = requests.iter().any(|request| request.hits == Hits::GivenBack);
        if gives_back {
            granted = self.admit(request.metadata(), Scope::Adjust)?;
        }
        let decided = self.desk.decide_together(caller, &requests).await;
        if gives_back {
            let subject = format_args!("domain {:?}", request.get_ref().domain);
            let result = decided.as_ref().map(|_| ()).map_err(|error| error as &dyn Display);
            audit(&Audit { who: granted.name(), action: "refund", subject: &subject, result });
        }
        let decided = decided.map_err(|error| status(&error))?;
        let is_closed = decided.overall.source == Source::Closed;
        if is_closed && settings.closed == Closed::Unavailable {
            return Err(Status::unavailable(
                "the store is away, and a rule that matches is closed until it is back",
            ));
        }
        Ok(Response::new(answer::of(&decided, settings.headers)))
    }
}

impl<S> Limits<S> {
    fn admit(&self, metadata: &MetadataMap, scope: Scope) -> Result<Granted, Status> {
        let authorization = metadata.get("authorization").map(|value| value.as_encoded_bytes());
        self.access.check(authorization, scope).map_err(|denied| match denied {
            Denied::NoToken => Status::unauthenticated(denied.to_string()),
            Denied::WrongToken | Denied::TooWeak { .. } => Status::permission_denied(denied.to_string()),
        })
    }
}

fn status(error: &Error) -> Status {
    match error {
        Error::Store(_) => Status::unavailable(error.to_string()),
        // more rules match than one check may have tiers: not the caller's mistake
        Error::Check(_) => Status::failed_precondition(error.to_string()),
        _ => Status::invalid_argument(error.to_string()),
    }
}
