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
//! that carries its own status as `Tollgate-Status`. No answer may be cached.

use std::{borrow::Cow, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{ConnectInfo, Request, State},
    http::{
        HeaderName, HeaderValue, Method, Response, StatusCode,
        header::{CACHE_CONTROL, CONTENT_TYPE, HOST},
        request::Parts,
    },
    routing::any,
};
use tollgate::{Cost, Costs, Decision, Operation, Store};
use tollgate_tower::{
    client::ClientAddress,
    denial::{self, CheckError, DenialFormat},
    headers::{self, Dialect},
    target,
};

use crate::{
    config::Live,
    desk::{Caller, Desk, Subject, Transport},
    observe::Call,
};

/// The status that a refusal has by itself, where another was asked for.
pub const TOLLGATE_STATUS: HeaderName = HeaderName::from_static("tollgate-status");

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

struct Gatehouse<S> {
    desk: Desk<S>,
    settings: Live<Settings>,
}

/// The route of this front end. It has to know who connected: requests carry a [`ConnectInfo`].
pub fn router<S: Store>(desk: Desk<S>, settings: Live<Settings>) -> Router {
    let gatehouse = Gatehouse { desk, settings };
    Router::new().route("/v1/auth", any(answer::<S>)).with_state(gatehouse)
}

impl<S> Clone for Gatehouse<S> {
    fn clone(&self) -> Self {
        Self { desk: self.desk.clone(), settings: Arc::clone(&self.settings) }
    }
}

/// A question as read from the query.
struct Question<'a> {
    labels: Vec<(Cow<'a, str>, Cow<'a, [u8]>)>,
    costs: Costs,
    deny_status: Option<StatusCode>,
}

async fn answer<S: Store>(State(gatehouse): State<Gatehouse<S>>, request: Request) -> Response<Body> {
    let (head, _body) = request.into_parts();
    let (read, deny_status) = match Question::read(head.uri.query().unwrap_or_default()) {
        Ok(question) => {
            let deny_status = question.deny_status;
            (gatehouse.subject(question, &head), deny_status)
        }
        Err(error) => (Err(error), None),
    };
    let decided = match read {
        Ok(subject) => gatehouse.decide(&subject).await,
        Err(error) => {
            gatehouse.desk.observer().invalid(Call::CHECK);
            Err(error)
        }
    };
    let dialect = gatehouse.settings.load().dialect;
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

impl<S: Store> Gatehouse<S> {
    async fn decide(&self, subject: &Subject) -> Result<Decision, CheckError> {
        Ok(self.desk.decide(Caller::at(Transport::ForwardAuth), Operation::Check, subject).await?)
    }

    /// What is asked about.
    fn subject(&self, question: Question<'_>, head: &Parts) -> Result<Subject, CheckError> {
        let Question { mut labels, costs, .. } = question;
        let policy = self.desk.label_policy();
        for label in policy.labels() {
            if let Some(header) = &label.header
                && let Some(value) = target::single(&head.headers, header)?
            {
                put(&mut labels, &label.name, value);
            }
        }
        let ConnectInfo(peer) = head
            .extensions
            .get::<ConnectInfo<SocketAddr>>()
            .ok_or_else(|| CheckError::Misconfigured("the address that connected is not known".into()))?;
        let client = &self.settings.load().client;
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

        let labels = self.desk.labels(labels).map_err(of_caller)?;
        Ok(Subject::Rules { labels, costs, only: None })
    }
}

impl<'a> Question<'a> {
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
        response.headers_mut().insert(TOLLGATE_STATUS, own);
        response.headers_mut().remove(CONTENT_TYPE);
        *response.status_mut() = status;
        *response.body_mut() = Bytes::new();
    }
    response
}
