//! Forward-auth: a proxy sends a sub-request before it forwards the client's request. Supports nginx `auth_request`, Caddy
//! `forward_auth` and Traefik `ForwardAuth`.
//!
//! The sub-request has no body. Its labels are
//!
//! | label | from |
//! |---|---|
//! | any | the query, `/v1/auth?route=login`, set in the proxy's configuration |
//! | configured with a header | that header of the client's request |
//! | `method`, `path`, `host` | `X-Forwarded-Method`, `-Uri`, `-Host` of a trusted proxy; otherwise method and host of the sub-request |
//! | `ip` | the client's address, as determined by [`ClientAddress`] |
//!
//! Later rows override earlier ones. Paths and hosts are used as the client sent them, even if they are not valid in a URI, and
//! [truncated](target::truncate) to the length of a label: a request that no rule limits must not fail because of them. Ambiguous
//! input is rejected: a header that is given twice, or several hosts.
//!
//! Reserved query parameters: `cost`, a whole number of requests, and `deny_status`.
//!
//! The response is 200, or a denial in the format of the middleware: 429, or 503 if the store is unavailable and a rule's failure
//! policy is `closed`. An invalid request gets 400, and a cross-site request of a browser gets 403. nginx forwards only 401 and 403:
//! with `deny_status=403`, each of these becomes a 403 without a body, with the original status in `Sluicegate-Status`. Responses must
//! not be cached.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{
    body::{Body, Bytes},
    http::{
        HeaderName, HeaderValue, Method, Response, StatusCode,
        header::{self, CACHE_CONTROL, CONTENT_TYPE, HOST},
        request::Parts,
    },
};
use parking_lot::RwLock;
use sluicegate::{
    Cost, Costs,
    limiter::{OnConcurrency, Request},
};
use sluicegate_tower::{
    client::ClientAddress,
    denial::{self, CheckError, DenialFormat},
    headers::{self, Dialect},
    target,
};
use tracing::Instrument;

use crate::{
    auth::Access,
    config::Scope,
    engine::{Engine, Transport},
    http::{Api, Caller, guard},
    observe::{Call, trace::request_span},
};

/// The header with the original status of a response whose status `deny_status` replaced.
pub const SLUICEGATE_STATUS: HeaderName = HeaderName::from_static("sluicegate-status");

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_METHOD: HeaderName = HeaderName::from_static("x-forwarded-method");
const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The headers with the address of the client, as log lines write them.
const CLIENT_HEADERS: [(HeaderName, &str); 2] =
    [(FORWARDED_FOR, "X-Forwarded-For"), (header::FORWARDED, "Forwarded")];

/// The number of addresses that are logged because they are not trusted.
const MAX_LOGGED_PEERS: usize = 16;

/// Headers that proxies add to a sub-request.
const FORWARDED: [HeaderName; 6] = [
    FORWARDED_FOR,
    FORWARDED_METHOD,
    FORWARDED_URI,
    FORWARDED_HOST,
    HeaderName::from_static("x-forwarded-proto"),
    header::FORWARDED,
];

/// The settings of forward-auth.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The trusted proxies.
    pub client: ClientAddress,
    /// The dialect of rate limit headers.
    pub dialect: Dialect,
}

/// The peers that were logged because they send the address of a client but are not trusted. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct UntrustedPeers(Arc<RwLock<Vec<IpAddr>>>);

impl UntrustedPeers {
    /// Logs a warning if an untrusted peer sends a header with the address of its client, once per peer and for a limited number of
    /// them.
    fn warn(&self, client: &ClientAddress, peer: IpAddr, head: &Parts) {
        let sent = CLIENT_HEADERS.into_iter().find(|(header, _)| head.headers.contains_key(header));
        if let Some((_, header)) = sent
            && !client.trusts(peer)
            && self.is_new(peer.to_canonical())
        {
            let peer = peer.to_canonical();
            tracing::warn!(
                "{peer} sends {header} but is not in server.trusted_proxies: its clients share one counter"
            );
        }
    }

    fn is_new(&self, peer: IpAddr) -> bool {
        let is_logged = |logged: &Vec<IpAddr>| logged.len() >= MAX_LOGGED_PEERS || logged.contains(&peer);
        if is_logged(&self.0.read()) {
            return false;
        }
        let mut logged = self.0.write();
        let is_new = !is_logged(&logged);
        if is_new {
            logged.push(peer);
        }
        is_new
    }
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
    Caller { peer, activity }: Caller<'_>,
    request: axum::http::Request<B>,
) -> Response<Body> {
    let span = request_span(Transport::ForwardAuth, &request);
    if let Some(reason) = cross_site(&request, &api.settings.access) {
        let mut rejection = guard::forbidden(reason);
        rejection.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        return rejection;
    }
    let (head, _body) = request.into_parts();
    if let Err(error) = guard::check(&api.settings.access, activity, &head.headers, Scope::Check) {
        api.engine.observer().unauthorized(Call::CHECK);
        api.settings.access.log_rejected_check(Some(peer), "forward-auth", &error);
        return guard::unauthorized(&error);
    }
    if span.is_disabled() {
        decide(api, peer, &head).await
    } else {
        // boxed to keep the future of an untraced request small
        Box::pin(decide(api, peer, &head).instrument(span)).await
    }
}

/// Returns the reason if a request was sent by a browser for a page of another site. Browser headers alone are not
/// sufficient, because a proxy forwards the headers of its clients. But a proxy adds at least one of [`FORWARDED`],
/// which a page cannot add to a cross-site request: the browser would first send a preflight request, which this server
/// does not permit. If tokens are configured, such a request fails because it has none.
fn cross_site<B>(request: &axum::http::Request<B>, access: &Access) -> Option<&'static str> {
    let has = |names: &[HeaderName]| names.iter().any(|name| request.headers().contains_key(name));
    let is_direct = access.is_open() && has(&guard::BROWSER) && !has(&FORWARDED);
    let reason = is_direct.then(|| guard::cross_site(request, Some(access))).flatten();
    reason.map(|_| {
        "without tokens, requests from a page of another site are rejected unless a proxy forwards them: let the proxy set \
         X-Forwarded-For, or configure a token"
    })
}

async fn decide(api: &Api, peer: SocketAddr, head: &Parts) -> Response<Body> {
    let Api { engine, settings } = api;
    let untrusted = &settings.untrusted_peers;
    let settings = settings.forward_auth.load_full();
    untrusted.warn(&settings.client, peer.ip(), head);
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
        Ok(decision) => with_status(denial::response(&decision, dialect, DenialFormat::Http), deny_status),
        Err(error) => with_status(denial::error_response(&error, DenialFormat::Http), deny_status),
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
    let forwarded = ForwardedTarget::read(head, client.trusts(peer.ip()))?;
    put(&mut labels, "method", target::truncate(forwarded.method.as_str().as_bytes()));
    if let Some(path) = forwarded.path {
        put(&mut labels, "path", path);
    }
    if let Some(host) = &forwarded.host {
        put(&mut labels, "host", host);
    }
    let ip = client.of(peer.ip(), &head.headers).to_string();
    put(&mut labels, "ip", ip.as_bytes());
    let labels = engine.labels(labels).map_err(bad_request)?;
    // a proxy sends neither an id nor a call at the end of the request, and may allow a request after an error
    Ok(Request::new(labels, costs).on_concurrency(OnConcurrency::Skip))
}

impl<'a> Query<'a> {
    fn read(query: &'a str) -> Result<Self, CheckError> {
        let (mut labels, mut costs, mut deny_status) = (Vec::new(), None, None);
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let repeated = match &*name {
                "cost" => costs.replace(cost(&value)?).is_some(),
                "deny_status" => deny_status.replace(error_status(&value)?).is_some(),
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
                return Err(CheckError::BadRequest(format!("{name} is given more than once: send it once")));
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
        CheckError::BadRequest(format!("cost {text:?} is invalid: use a whole number from 0 to {most}"))
    })
}

fn error_status(text: &str) -> Result<StatusCode, CheckError> {
    let status = text.parse::<StatusCode>().ok();
    status.filter(|status| status.is_client_error() || status.is_server_error()).ok_or_else(|| {
        CheckError::BadRequest(format!(
            "deny_status {text:?} is out of range: use 400 to 599, for example 403"
        ))
    })
}

/// Method, path and host of the client's request.
struct ForwardedTarget<'a> {
    method: Cow<'a, Method>,
    path: Option<&'a [u8]>,
    host: Option<Vec<u8>>,
}

impl<'a> ForwardedTarget<'a> {
    fn read(head: &'a Parts, trusted: bool) -> Result<Self, CheckError> {
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

/// Parses the method. Proxies forward only valid methods, so an invalid one is an error of the proxy's configuration.
fn method(value: &[u8]) -> Result<Method, CheckError> {
    Method::from_bytes(value).map_err(|_| {
        CheckError::BadRequest(format!(
            "the header {FORWARDED_METHOD} is not a method: forward the method of the client"
        ))
    })
}

/// Returns the value unless it has several hosts: then a proxy has appended its host to one that the client may have
/// forged.
fn only_host(value: &[u8]) -> Result<&[u8], CheckError> {
    if value.contains(&b',') {
        return Err(CheckError::BadRequest(format!(
            "the header {FORWARDED_HOST} has more than one host: send one"
        )));
    }
    Ok(value)
}

fn bad_request(error: impl ToString) -> CheckError {
    CheckError::BadRequest(error.to_string())
}

/// Sets a label, replacing the value of an earlier source.
fn put<'a>(labels: &mut Vec<(Cow<'a, str>, Cow<'a, [u8]>)>, name: &'a str, value: &'a [u8]) {
    labels.retain(|(label, _)| *label != *name);
    labels.push((Cow::Borrowed(name), Cow::Borrowed(value)));
}

/// Replaces the status of a response if `deny_status` is set.
fn with_status(mut response: Response<Bytes>, deny_status: Option<StatusCode>) -> Response<Bytes> {
    if let Some(status) = deny_status {
        let own = HeaderValue::from(response.status().as_u16());
        response.headers_mut().insert(SLUICEGATE_STATUS, own);
        response.headers_mut().remove(CONTENT_TYPE);
        *response.status_mut() = status;
        *response.body_mut() = Bytes::new();
    }
    response
}
