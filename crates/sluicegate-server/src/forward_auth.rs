//! Forward-auth: a proxy asks before it passes a request on. nginx `auth_request`, Caddy `forward_auth`, Traefik `ForwardAuth`.
//!
//! The question is a request without a body, its labels are
//!
//! | label | from |
//! |---|---|
//! | any | the query, `/v1/auth?route=login`, which the proxy's configuration writes |
//! | configured with a header | that header of the client |
//! | `method`, `path`, `host` | `X-Forwarded-Method`, `-Uri`, `-Host` of a trusted proxy; else method and host are those of the question |
//! | `ip` | the client, as [`ClientAddress`] finds it |
//!
//! where a later line wins over an earlier one. Paths and hosts are as the client wrote them, also such as no URI should have, and
//! [cut](target::truncate) to what a label holds: neither is a reason to refuse a request that nobody limits. What is refused is what
//! could be read in two ways: a header that is given twice, several hosts.
//!
//! Reserved in the query: `cost`, a whole number of requests, and `deny_status`.
//!
//! The answer is 200, or a refusal as the middleware writes it: 429, 503 when the store is away and a rule says `closed`; 400 when
//! the request cannot be asked about. nginx passes no refusal on but 401 and 403: with `deny_status=403` each of these is a 403 without a body
//! that carries its own status as `Sluicegate-Status`. No answer may be cached.

use std::{borrow::Cow, net::SocketAddr};

use axum::{
    body::{Body, Bytes},
    http::{
        HeaderName, HeaderValue, Method, Response, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, HOST},
        request::Parts,
    },
};
use sluicegate::{Cost, Costs, Request};
use sluicegate_tower::{
    client::ClientAddress,
    denial::{self, CheckError, DenialFormat},
    headers::{self, Dialect},
    target,
};
use tracing::Instrument;

use crate::{
    config::Scope,
    engine::{Engine, Transport},
    http::{Api, guard},
    observe::{Call, trace::request_span},
};

/// The status that a refusal has by itself, where another was asked for.
pub const SLUICEGATE_STATUS: HeaderName = HeaderName::from_static("sluicegate-status");

const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// How questions are read and answered.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Which proxies are trusted.
    pub client: ClientAddress,
    /// How limits are told to clients.
    pub dialect: Dialect,
}

/// The path of this front end.
pub const PATH: &str = "/v1/auth";

/// The query of the sub-request.
struct Query<'a> {
    labels: Vec<(Cow<'a, str>, Cow<'a, [u8]>)>,
    costs: Costs,
    deny_status: Option<StatusCode>,
}

/// Answers the sub-request of a proxy.
pub(crate) async fn respond<B>(
    api: &Api,
    peer: SocketAddr,
    request: axum::http::Request<B>,
) -> Response<Body> {
    let span = request_span(Transport::ForwardAuth, &request);
    let (head, _body) = request.into_parts();
    if let Err(denied) = guard::check(&api.settings.access, &head.headers, Scope::Check) {
        api.engine.observer().unauthorized(Call::CHECK);
        return guard::unauthorized(&denied);
    }
    if span.is_disabled() {
        decide(api, peer, &head).await
    } else {
        // boxed to keep the future of an untraced request small
        Box::pin(decide(api, peer, &head).instrument(span)).await
    }
}

async fn decide(api: &Api, peer: SocketAddr, head: &Parts) -> Response<Body> {
    let Api { engine, settings } = api;
    let settings = settings.forward_auth.load();
    let (read, deny_status) = match Query::read(head.uri.query().unwrap_or_default()) {
        Ok(query) => {
            let deny_status = query.deny_status;
            (request(engine, &settings.client, query, peer, head), deny_status)
        }
        Err(error) => (Err(error), None),
    };
    let decided = match read {
        Ok(request) => engine.decide(Transport::ForwardAuth, &request).await.map_err(CheckError::from),
        Err(error) => {
            engine.observer().invalid(Call::CHECK);
            Err(error)
        }
    };
    let dialect = settings.dialect;
    let mut response = match decided {
        Ok(decision) if decision.is_allowed() => {
            let mut response = Response::new(Bytes::new());
            headers::add(response.headers_mut(), &decision, dialect);
            response
        }
        Ok(decision) => instead(denial::response(&decision, dialect, DenialFormat::Http), deny_status),
        Err(error) => instead(denial::error_response(&error, DenialFormat::Http), deny_status),
    };
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.map(Body::from)
}

/// The request whose labels come from the query, the client's headers and its address.
fn request(
    engine: &Engine,
    client: &ClientAddress,
    query: Query<'_>,
    peer: SocketAddr,
    head: &Parts,
) -> Result<Request<'static>, CheckError> {
    let Query { mut labels, costs, .. } = query;
    let policy = engine.label_policy();
    for label in policy.labels() {
        if let Some(header) = &label.header
            && let Some(value) = target::single(&head.headers, header)?
        {
            put(&mut labels, &label.name, value);
        }
    }
    let asked = Asked::by(head, client.trusts(peer.ip()))?;
    put(&mut labels, "method", target::truncate(asked.method.as_str().as_bytes()));
    if let Some(path) = asked.path {
        put(&mut labels, "path", path);
    }
    if let Some(host) = &asked.host {
        put(&mut labels, "host", host);
    }
    let ip = client.of(peer.ip(), &head.headers).to_string();
    put(&mut labels, "ip", ip.as_bytes());
    let labels = engine.labels(labels).map_err(of_caller)?;
    Ok(Request::new(labels, costs))
}

impl<'a> Query<'a> {
    fn read(query: &'a str) -> Result<Self, CheckError> {
        let (mut labels, mut costs, mut deny_status) = (Vec::new(), None, None);
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let repeated = match &*name {
                "cost" => costs.replace(cost(&value)?).is_some(),
                "deny_status" => deny_status.replace(refusing_status(&value)?).is_some(),
                _ => {
                    let value = match value {
                        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
                    };
                    labels.push((name, value));
                    continue;
                }
            };
            if repeated {
                return Err(CheckError::BadRequest(format!("{name} is given more than once: give it once")));
            }
        }
        Ok(Self { labels, costs: costs.unwrap_or(Cost::ONE.into()), deny_status })
    }
}

fn cost(text: &str) -> Result<Costs, CheckError> {
    let number = text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten();
    let cost = number.and_then(|number| Cost::new(number).ok());
    cost.map(Costs::from).ok_or_else(|| {
        let most = Cost::MAX.units();
        CheckError::BadRequest(format!("cost {text:?} is not a cost: use a whole number from 0 to {most}"))
    })
}

fn refusing_status(text: &str) -> Result<StatusCode, CheckError> {
    let status = text.parse::<StatusCode>().ok();
    status.filter(|status| status.is_client_error() || status.is_server_error()).ok_or_else(|| {
        CheckError::BadRequest(format!(
            "deny_status {text:?} is not one that refuses: use 400 to 599, for example 403"
        ))
    })
}

/// What the client asked the proxy for.
struct Asked<'a> {
    method: Cow<'a, Method>,
    path: Option<&'a [u8]>,
    host: Option<Vec<u8>>,
}

impl<'a> Asked<'a> {
    fn by(head: &'a Parts, trusted: bool) -> Result<Self, CheckError> {
        let forwarded =
            |name: HeaderName| if trusted { target::single(&head.headers, name.as_str()) } else { Ok(None) };
        let method = match forwarded(FORWARDED_METHOD)? {
            Some(value) => Cow::Owned(method(value)?),
            None => Cow::Borrowed(&head.method),
        };
        let path = forwarded(FORWARDED_URI)?.map(target::path);
        let host = match forwarded(FORWARDED_HOST)? {
            Some(value) => Some(only_host(value)?),
            None => target::single(&head.headers, HOST.as_str())?,
        };
        Ok(Self { method, path, host: host.map(target::host) })
    }
}

/// The method, which a proxy passes on only if it is one: what is none here was not written by the client.
fn method(value: &[u8]) -> Result<Method, CheckError> {
    Method::from_bytes(value)
        .map_err(|_| CheckError::BadRequest(format!("the header {FORWARDED_METHOD} is not a method")))
}

/// The value, unless a proxy added its host to one that was there, which the client may have made up.
fn only_host(value: &[u8]) -> Result<&[u8], CheckError> {
    if value.contains(&b',') {
        return Err(CheckError::BadRequest(format!(
            "the header {FORWARDED_HOST} has more than one host: give one"
        )));
    }
    Ok(value)
}

fn of_caller(error: impl ToString) -> CheckError {
    CheckError::BadRequest(error.to_string())
}

/// Sets a label, in place of what an earlier source said.
fn put<'a>(labels: &mut Vec<(Cow<'a, str>, Cow<'a, [u8]>)>, name: &'a str, value: &'a [u8]) {
    labels.retain(|(label, _)| *label != *name);
    labels.push((Cow::Borrowed(name), Cow::Borrowed(value)));
}

/// A refusal under another status, for proxies that know few.
fn instead(mut response: Response<Bytes>, deny_status: Option<StatusCode>) -> Response<Bytes> {
    if let Some(status) = deny_status {
        let own = HeaderValue::from(response.status().as_u16());
        response.headers_mut().insert(SLUICEGATE_STATUS, own);
        response.headers_mut().remove(CONTENT_TYPE);
        *response.status_mut() = status;
        *response.body_mut() = Bytes::new();
    }
    response
}
