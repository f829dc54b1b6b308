//! Authorization by token, and protection against cross-site requests of browsers.
//!
//! Both are hand-written layers: `axum::middleware::from_fn` boxes the inner call twice on every request.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    extract::{ConnectInfo, Request},
    http::{HeaderMap, HeaderName, StatusCode, header, uri::Authority},
    response::{IntoResponse, Response},
};
use futures_util::future::{BoxFuture, Either, Ready, ready};
use tower_layer::Layer;
use tower_service::Service;

use super::{
    problem::{Problem, WithoutEffect},
    request::ApiCall,
};
use crate::{
    auth::{Access, AuthError, Identity, is_authenticated},
    completion::run_to_completion,
    config::Scope,
    net::activity::Activity,
    observe::{
        Observer,
        logs::{Audit, AuditResult, audit},
    },
};

/// Requires a token of a scope. Calls that adjust or administer run to completion and write an audit line, whether they
/// succeed or not.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) access: Access,
    pub(super) scope: Scope,
    pub(super) observer: Arc<Observer>,
}

/// The subject of a call's audit line, in the extensions of its response.
#[derive(Clone)]
pub(super) struct AuditSubject(pub(super) String);

/// A call behind a guard.
#[derive(Clone)]
pub(super) struct Guarded<S> {
    guard: Guard,
    call: S,
}

impl<S> Layer<S> for Guard {
    type Service = Guarded<S>;

    fn layer(&self, call: S) -> Guarded<S> {
        Guarded { guard: self.clone(), call }
    }
}

impl<S> Service<Request> for Guarded<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Either<S::Future, BoxFuture<'static, Result<Response, Infallible>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.call.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let Guard { access, scope, observer } = &self.guard;
        let activity =
            request.extensions().get::<Activity>().expect("every request has its connection's activity");
        let identity = match check(access, activity, request.headers(), *scope) {
            Ok(identity) => identity,
            Err(error) => {
                if let Some(call) = ApiCall::at(request.uri().path()) {
                    observer.unauthorized(call.into());
                }
                if *scope == Scope::Check {
                    access.log_rejected_check(peer(&request), action(&request), &error);
                } else {
                    access.audit_rejected(peer(&request), action(&request), &error);
                }
                return Either::Right(Box::pin(ready(Ok(unauthorized(&error)))));
            }
        };
        if *scope == Scope::Check {
            return Either::Left(self.call.call(request));
        }
        let (from, action) = (peer(&request), action(&request).to_owned());
        let response = self.call.call(request);
        Either::Right(Box::pin(run_to_completion(async move {
            let Ok(mut response) = response.await;
            let status = response.status();
            let without_effect = response.extensions_mut().remove::<WithoutEffect>();
            let result = match (status, &without_effect) {
                (_, Some(WithoutEffect(reason))) => AuditResult::Rejected(reason),
                (status, _) if status.is_success() => AuditResult::Done,
                _ if status.is_server_error() => AuditResult::Failed(&status),
                _ => AuditResult::Rejected(&status),
            };
            let subject = response
                .extensions_mut()
                .remove::<AuditSubject>()
                .map_or_else(String::new, |subject| subject.0);
            audit(&Audit { who: identity.name(), from, action: &action, subject: &subject, result });
            Ok(response)
        })))
    }
}

/// The address of the client.
pub(super) fn peer(request: &Request) -> Option<SocketAddr> {
    request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer)
}

/// The action of an audit line: the last segment of the path.
fn action(request: &Request) -> &str {
    request.uri().path().rsplit('/').next().unwrap_or_default()
}

/// Checks that a request carries a token of this scope, and records for its connection whether the token is valid.
pub(crate) fn check(
    access: &Access,
    activity: &Activity,
    headers: &HeaderMap,
    scope: Scope,
) -> Result<Identity, AuthError> {
    let identity = identify(access, headers, scope);
    activity.set_authenticated(is_authenticated(&identity));
    identity
}

/// Returns the identity of a request that carries a token of this scope.
pub(super) fn identify(access: &Access, headers: &HeaderMap, scope: Scope) -> Result<Identity, AuthError> {
    access.check(headers.get(header::AUTHORIZATION).map(|value| value.as_bytes()), scope)
}

/// The response to a request without a sufficient token.
pub(crate) fn unauthorized(error: &AuthError) -> Response {
    let status = match error {
        AuthError::MissingToken => StatusCode::UNAUTHORIZED,
        AuthError::UnknownToken | AuthError::MissingScope { .. } => StatusCode::FORBIDDEN,
    };
    let mut response = Problem::new(status, error).into_response();
    if status == StatusCode::UNAUTHORIZED {
        let bearer = header::HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    }
    response
}

/// The response to a cross-site request.
pub(crate) fn forbidden(reason: &str) -> Response {
    Problem::new(StatusCode::FORBIDDEN, reason).into_response()
}

/// The fetch metadata of browsers: <https://www.w3.org/TR/fetch-metadata/>.
const SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Headers that browsers add to requests of pages.
pub(crate) const BROWSER: [HeaderName; 2] = [header::ORIGIN, SITE];

/// Rejects requests that a browser sends for a page of another site: the browser may reach addresses that the page's
/// author cannot.
#[derive(Clone)]
pub(super) struct RejectCrossSite {
    /// The tokens that protect these calls; `None` for public calls.
    pub(super) access: Option<Access>,
}

/// A service behind [`RejectCrossSite`].
#[derive(Clone)]
pub(super) struct SameSite<S> {
    access: Option<Access>,
    inner: S,
}

impl<S> Layer<S> for RejectCrossSite {
    type Service = SameSite<S>;

    fn layer(&self, inner: S) -> SameSite<S> {
        SameSite { access: self.access.clone(), inner }
    }
}

impl<S> Service<Request> for SameSite<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<Response, Infallible>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        match cross_site(&request, self.access.as_ref()) {
            None => Either::Left(self.inner.call(request)),
            Some(reason) => Either::Right(ready(Ok(forbidden(reason)))),
        }
    }
}

/// Returns the reason if a request is cross-site.
pub(crate) fn cross_site<B>(request: &Request<B>, access: Option<&Access>) -> Option<&'static str> {
    let field = |name| request.headers().get(name);
    let (origin, site) = (field(header::ORIGIN), field(SITE));
    let host = field(header::HOST).and_then(|host| host.to_str().ok());
    let is_foreign_origin = origin.is_some_and(|origin| {
        let from = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        from.is_none_or(|(_, from)| !from.eq_ignore_ascii_case(host.unwrap_or_default()))
    });
    // A page that only reads or embeds sends no origin, but the browser sends fetch metadata. A link to a public page is
    // cross-site too, and allowed.
    let is_foreign_site = site.is_some_and(|site| site == "cross-site" || site == "same-site");
    let is_link = || access.is_none() && field(MODE).is_some_and(|mode| mode == "navigate");
    if is_foreign_origin || is_foreign_site && !is_link() {
        return Some(
            "requests from a page of another site are rejected: open the dashboard at this server's own address",
        );
    }
    // DNS rebinding makes any page same-site, but such a page has no token. A browser sends the origin of requests that change
    // something, and nothing when a rebound page only reads.
    let may_be_a_browser = request.method().is_safe() || origin.is_some() || site.is_some();
    let is_open = || access.is_some_and(Access::is_open);
    if may_be_a_browser && host.is_some_and(|host| !is_own_name(host)) && is_open() {
        return Some(
            "without tokens, browsers may call this server only by IP address, as localhost or by a name without a dot, since \
             any site can point its own name here: configure a token",
        );
    }
    None
}

/// Whether this host name cannot be controlled by another site.
fn is_own_name(host: &str) -> bool {
    let Ok(host) = host.parse::<Authority>() else { return false };
    let host = host.host();
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    !bare.contains('.') && !bare.contains(':') || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use axum::http::Method;

    use super::*;

    fn is_cross_site_to(access: Option<&Access>, method: Method, pairs: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().method(method).body(()).unwrap();
        for (name, value) in pairs {
            request
                .headers_mut()
                .insert(header::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        cross_site(&request, access).is_some()
    }

    fn is_cross_site(method: Method, pairs: &[(&str, &str)], is_open: bool) -> bool {
        let token = crate::config::Token::new("app", b"s3cret", crate::config::Scopes::ALL);
        let access = if is_open { Access::default() } else { Access::new(vec![token]) };
        is_cross_site_to(Some(&access), method, pairs)
    }

    #[test]
    fn only_pages_of_this_server_may_call_from_a_browser() {
        let table: [(&[(&str, &str)], bool); 10] = [
            (&[("host", "sluicegate.example")], false),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:8080")], false),
            (&[("host", "localhost:8080"), ("origin", "http://localhost:8080")], false),
            (&[("host", "sluicegate:8080"), ("origin", "http://sluicegate:8080")], false),
            (&[("host", "[::1]:8080"), ("origin", "http://[::1]:8080")], false),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://evil.example")], true),
            (&[("host", "127.0.0.1:8080"), ("origin", "null")], true),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:9")], true),
            (&[("host", "evil.example"), ("origin", "http://evil.example")], true),
            (&[("host", "evil.example"), ("sec-fetch-site", "same-origin")], true),
        ];
        for (pairs, expected) in table {
            assert_eq!(is_cross_site(Method::POST, pairs, true), expected, "{pairs:?}");
        }
        let named: &[(&str, &str)] =
            &[("host", "sluicegate.example"), ("origin", "https://sluicegate.example")];
        assert!(!is_cross_site(Method::POST, named, false), "with tokens, a page may have any host name");
        let other: &[(&str, &str)] = &[("host", "sluicegate.example"), ("origin", "http://evil.example")];
        assert!(is_cross_site(Method::POST, other, false));
    }

    #[test]
    fn reads_and_embeds_by_other_sites_are_rejected() {
        let host = ("host", "127.0.0.1:8080");
        for (site, expected) in
            [("cross-site", true), ("same-site", true), ("same-origin", false), ("none", false)]
        {
            for is_open in [true, false] {
                for mode in ["no-cors", "cors", "navigate"] {
                    let pairs = [host, ("sec-fetch-site", site), ("sec-fetch-mode", mode)];
                    assert_eq!(is_cross_site(Method::GET, &pairs, is_open), expected, "{pairs:?}");
                    let is_rejected = expected && mode != "navigate";
                    assert_eq!(is_cross_site_to(None, Method::GET, &pairs), is_rejected, "{pairs:?}");
                }
            }
        }
    }

    #[test]
    fn without_tokens_reads_need_a_host_name_that_cannot_be_rebound() {
        for (host, expected) in [
            ("127.0.0.1:8080", false),
            ("[::1]:8080", false),
            ("localhost", false),
            ("sluicegate:8080", false),
            ("evil.example", true),
            ("127.0.0.1.evil.example:8080", true),
            ("", true),
        ] {
            assert_eq!(is_cross_site(Method::GET, &[("host", host)], true), expected, "{host:?}");
            assert!(!is_cross_site(Method::GET, &[("host", host)], false), "{host:?} with tokens");
        }
    }
}
