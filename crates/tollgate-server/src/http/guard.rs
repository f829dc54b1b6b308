//! Who may make a call: tokens, and what a web page may not make its visitor's browser send.

use std::net::{IpAddr, SocketAddr};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, StatusCode, header, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::problem::Problem;
use crate::{
    access::{Access, Denied},
    config::Scope,
    observe::logs::{Audit, audit},
};

/// What a call needs.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) access: Access,
    pub(super) scope: Scope,
}

/// Lets a request through to its call if whoever sent it may make it. What changes something is written down.
pub(super) async fn admit(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    let authorization = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let granted = match guard.access.check(authorization, guard.scope) {
        Ok(granted) => granted,
        Err(denied) => return refused(&denied),
    };
    if guard.scope == Scope::Check {
        request.extensions_mut().insert(granted);
        return next.run(request).await;
    }
    let action = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let from =
        request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| peer.to_string());
    let subject = from.unwrap_or_else(|| "an unknown address".to_owned());
    let name = granted.name().to_owned();
    request.extensions_mut().insert(granted);
    let response = next.run(request).await;
    let status = response.status();
    let result = if status.is_success() { Ok(()) } else { Err(&status as &dyn std::fmt::Display) };
    audit(&Audit { who: &name, action: &action, subject: &subject, result });
    response
}

fn refused(denied: &Denied) -> Response {
    let status = match denied {
        Denied::NoToken => StatusCode::UNAUTHORIZED,
        Denied::WrongToken | Denied::TooWeak { .. } => StatusCode::FORBIDDEN,
    };
    let mut response = Problem::new(status, denied).into_response();
    if status == StatusCode::UNAUTHORIZED {
        let bearer = header::HeaderValue::from_static("Bearer");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
    }
    response
}

/// Turns away what a page of another site had a browser send: it may reach addresses that its author may not.
pub(super) async fn refuse_other_sites(request: Request, next: Next) -> Response {
    match foreign(request.headers()) {
        None => next.run(request).await,
        Some(why) => Problem::new(StatusCode::FORBIDDEN, why).into_response(),
    }
}

fn foreign(headers: &HeaderMap) -> Option<&'static str> {
    let text = |name: &header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let origin = text(&header::ORIGIN);
    let is_browser = origin.is_some() || headers.contains_key("sec-fetch-site");
    if !is_browser {
        return None;
    }
    let host = text(&header::HOST).unwrap_or_default();
    if origin.is_some_and(|origin| {
        origin.split_once("://").is_none_or(|(_, from)| !from.eq_ignore_ascii_case(host))
    }) {
        return Some("a page of another site may not call: open the dashboard at this server's own address");
    }
    // a name that leads here only for a moment makes any page one of this site
    if !is_own_name(host) {
        return Some(
            "a browser may call by address or as localhost only, since any site can make its name lead here",
        );
    }
    None
}

fn is_own_name(host: &str) -> bool {
    let Ok(host) = host.parse::<Authority>() else { return false };
    let host = host.host();
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_this_server_may_call_from_a_browser() {
        let table: [(&[(&str, &str)], bool); 10] = [
            (&[("host", "evil.example")], false),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:8080")], false),
            (&[("host", "localhost:8080"), ("origin", "http://localhost:8080")], false),
            (
                &[("host", "[::1]:8080"), ("origin", "http://[::1]:8080"), ("sec-fetch-site", "same-origin")],
                false,
            ),
            (&[("host", "127.0.0.1:8080"), ("sec-fetch-site", "none")], false),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://evil.example")], true),
            (&[("host", "127.0.0.1:8080"), ("origin", "null")], true),
            (&[("host", "127.0.0.1:8080"), ("origin", "http://127.0.0.1:9")], true),
            (&[("host", "evil.example"), ("origin", "http://evil.example")], true),
            (&[("host", "evil.example"), ("sec-fetch-site", "same-origin")], true),
        ];
        for (pairs, is_foreign) in table {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, value.parse().unwrap());
            }
            assert_eq!(foreign(&headers).is_some(), is_foreign, "{pairs:?}");
        }
    }
}
