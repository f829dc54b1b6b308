//! Who may make a call: tokens, and what a web page may not make its visitor's browser send.
//!
//! Both are layers written out, rather than functions that axum makes layers of: those box the call behind them twice, on every request.

use std::{
    convert::Infallible,
    fmt::Display,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    extract::{ConnectInfo, Request},
    http::{HeaderName, StatusCode, header, uri::Authority},
    response::{IntoResponse, Response},
};
use futures_util::future::{BoxFuture, Either, Ready, ready};
use tower_layer::Layer;
use tower_service::Service;

use super::{problem::Problem, question::Call};
use crate::{
    auth::{Access, AuthError, Identity},
    config::Scope,
    observe::{
        Observer,
        logs::{Audit, audit},
    },
};

/// Lets a request through to its call if whoever sent it may make it. What adjusts or administers is written down, done or not.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) access: Access,
    pub(super) scope: Scope,
    pub(super) observer: Arc<Observer>,
}

/// What a call was about, in the extensions of its response, to be written down.
#[derive(Clone)]
pub(super) struct Subject(pub(super) String);

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
        let granted = match check(access, &request, *scope) {
            Ok(granted) => granted,
            Err(denied) => {
                if let Some(call) = Call::at(request.uri().path()) {
                    observer.unauthorized(call.into());
                }
                if *scope != Scope::Check {
                    access.audit_rejected(peer(&request), action(&request), &denied);
                }
                return Either::Right(Box::pin(ready(Ok(refused(&denied)))));
            }
        };
        if *scope == Scope::Check {
            return Either::Left(self.call.call(request));
        }
        let (from, action) = (peer(&request), action(&request).to_owned());
        let answered = self.call.call(request);
        Either::Right(Box::pin(async move {
            let Ok(mut response) = answered.await;
            let status = response.status();
            let result = if status.is_success() { Ok(()) } else { Err(&status as &dyn Display) };
            let subject =
                response.extensions_mut().remove::<Subject>().map_or_else(String::new, |subject| subject.0);
            audit(&Audit { who: granted.name(), from, action: &action, subject: &subject, result });
            Ok(response)
        }))
    }
}

/// Who sent a request.
pub(super) fn peer(request: &Request) -> Option<SocketAddr> {
    request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer)
}

/// What a request has done: the last word of its path.
fn action(request: &Request) -> &str {
    request.uri().path().rsplit('/').next().unwrap_or_default()
}

/// Who sent a request, if they may make calls that need this scope.
pub(super) fn check<B>(access: &Access, request: &Request<B>, scope: Scope) -> Result<Identity, AuthError> {
    access.check(request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes()), scope)
}

/// What is answered to somebody who may not.
pub(super) fn refused(denied: &AuthError) -> Response {
    let status = match denied {
        AuthError::MissingToken => StatusCode::UNAUTHORIZED,
        AuthError::UnknownToken | AuthError::MissingScope { .. } => StatusCode::FORBIDDEN,
    };
    let mut response = Problem::new(status, denied).into_response();
    if status == StatusCode::UNAUTHORIZED {
        let bearer = header::HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    }
    response
}

/// Where a browser says from which site a request comes, and what for: <https://www.w3.org/TR/fetch-metadata/>.
static SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
static MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Turns away what a page of another site had a browser send: it may reach addresses that its author may not.
#[derive(Clone)]
pub(super) struct RefuseOtherSites {
    /// What else these calls need; without it, they tell what anybody may know.
    pub(super) guarded_by: Option<Access>,
}

/// Calls that are for pages of this server, and for who is no page.
#[derive(Clone)]
pub(super) struct ForOwnSite<S> {
    guarded_by: Option<Access>,
    calls: S,
}

impl<S> Layer<S> for RefuseOtherSites {
    type Service = ForOwnSite<S>;

    fn layer(&self, calls: S) -> ForOwnSite<S> {
        ForOwnSite { guarded_by: self.guarded_by.clone(), calls }
    }
}

impl<S> Service<Request> for ForOwnSite<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<Response, Infallible>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.calls.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        match foreign(&request, self.guarded_by.as_ref()) {
            None => Either::Left(self.calls.call(request)),
            Some(why) => {
                let refusal = Problem::new(StatusCode::FORBIDDEN, why).into_response();
                Either::Right(ready(Ok(refusal)))
            }
        }
    }
}

/// Why a request is not of this site, if it is not.
pub(super) fn foreign<B>(request: &Request<B>, guarded_by: Option<&Access>) -> Option<&'static str> {
    let field = |name| request.headers().get(name);
    let (origin, site) = (field(&header::ORIGIN), field(&SITE));
    let host = field(&header::HOST).and_then(|host| host.to_str().ok());
    let is_foreign_origin = origin.is_some_and(|origin| {
        let from = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
        from.is_none_or(|(_, from)| !from.eq_ignore_ascii_case(host.unwrap_or_default()))
    });
    // A page that only reads or embeds need not name its origin, but its browser says this. Whoever follows a link to what
    // anybody may know comes from elsewhere too.
    let is_foreign_site = site.is_some_and(|site| site == "cross-site" || site == "same-site");
    let is_link = || guarded_by.is_none() && field(&MODE).is_some_and(|mode| mode == "navigate");
    if is_foreign_origin || is_foreign_site && !is_link() {
        return Some("a page of another site may not call: open the dashboard at this server's own address");
    }
    // A name that leads here only for a moment makes any page one of this site; but that page has no token. A browser says
    // where a request comes from that changes something, and nothing at all when it only reads from such a page.
    let may_be_a_browser = request.method().is_safe() || origin.is_some() || site.is_some();
    let is_open = || guarded_by.is_some_and(Access::is_open);
    if may_be_a_browser && host.is_some_and(|host| !is_own_name(host)) && is_open() {
        return Some(
            "without tokens, this may be asked by address, as localhost or by a name without a dot only, since any site can \
             make its name lead here: set up a token",
        );
    }
    None
}

/// Whether nobody elsewhere can make this name lead here.
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

    fn is_foreign_to(guarded_by: Option<&Access>, method: Method, pairs: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().method(method).body(()).unwrap();
        for (name, value) in pairs {
            request
                .headers_mut()
                .insert(header::HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        foreign(&request, guarded_by).is_some()
    }

    fn is_foreign(method: Method, pairs: &[(&str, &str)], is_open: bool) -> bool {
        let token = crate::config::Token::new("app", b"s3cret", crate::config::Scopes::ALL);
        let access = if is_open { Access::default() } else { Access::new(vec![token]) };
        is_foreign_to(Some(&access), method, pairs)
    }

    #[test]
    fn only_pages_of_this_server_may_call_from_a_browser() {
        let table: [(&[(&str, &str)], bool); 10] = [
            (&[("host", "tollgate.example")], false),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:8080")], false),
            (&[("host", "localhost:8080"), ("origin", "http://localhost:8080")], false),
            (&[("host", "tollgate:8080"), ("origin", "http://tollgate:8080")], false),
            (&[("host", "[::1]:8080"), ("origin", "http://[::1]:8080")], false),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://evil.example")], true),
            (&[("host", "127.0.0.1:8080"), ("origin", "null")], true),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:9")], true),
            (&[("host", "evil.example"), ("origin", "http://evil.example")], true),
            (&[("host", "evil.example"), ("sec-fetch-site", "same-origin")], true),
        ];
        for (pairs, expected) in table {
            assert_eq!(is_foreign(Method::POST, pairs, true), expected, "{pairs:?}");
        }
        let named: &[(&str, &str)] = &[("host", "tollgate.example"), ("origin", "https://tollgate.example")];
        assert!(!is_foreign(Method::POST, named, false), "a page of any name may show a token");
        let other: &[(&str, &str)] = &[("host", "tollgate.example"), ("origin", "http://evil.example")];
        assert!(is_foreign(Method::POST, other, false));
    }

    #[test]
    fn what_pages_of_other_sites_read_or_embed_is_refused_too() {
        let host = ("host", "127.0.0.1:8080");
        for (site, expected) in
            [("cross-site", true), ("same-site", true), ("same-origin", false), ("none", false)]
        {
            for is_open in [true, false] {
                for mode in ["no-cors", "cors", "navigate"] {
                    let pairs = [host, ("sec-fetch-site", site), ("sec-fetch-mode", mode)];
                    assert_eq!(is_foreign(Method::GET, &pairs, is_open), expected, "{pairs:?}");
                    let is_told = expected && mode != "navigate";
                    assert_eq!(is_foreign_to(None, Method::GET, &pairs), is_told, "{pairs:?}");
                }
            }
        }
    }

    #[test]
    fn what_only_reads_names_the_server_as_nobody_elsewhere_can() {
        for (host, expected) in [
            ("127.0.0.1:8080", false),
            ("[::1]:8080", false),
            ("localhost", false),
            ("tollgate:8080", false),
            ("evil.example", true),
            ("127.0.0.1.evil.example:8080", true),
            ("", true),
        ] {
            assert_eq!(is_foreign(Method::GET, &[("host", host)], true), expected, "{host:?}");
            assert!(!is_foreign(Method::GET, &[("host", host)], false), "{host:?} with tokens");
        }
    }
}
