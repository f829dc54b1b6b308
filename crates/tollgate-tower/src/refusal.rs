//! A refusal as a response: problem+json (RFC 9457), or for gRPC a status without a message.
//!
//! | why | HTTP | gRPC |
//! |---|---|---|
//! | a limit is used up, or a rule refuses outright | 429 `quota-exceeded` | RESOURCE_EXHAUSTED |
//! | the store is away and a rule says `closed` | 503 `temporary-reduced-capacity` | UNAVAILABLE |
//! | the request cannot be asked about | 400 | INVALID_ARGUMENT |
//! | the middleware is set up wrongly | 500 | INTERNAL |
//!
//! None of them may be cached.

use std::fmt;

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use serde::Serialize;
use tollgate::{Decision, Error, Mode, Source};
use tollgate_core::decision::{whole_millis_up, whole_seconds_up};

use crate::headers::{self, Dialect};

/// The media type of the body.
pub const PROBLEM_JSON: &str = "application/problem+json";

const TYPES: &str = "https://iana.org/assignments/http-problem-types";

/// How a refusal is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form<'a> {
    /// Problem+json.
    Http,
    /// A gRPC status in the head of the response, of this content type.
    Grpc(&'a HeaderValue),
}

impl<'a> Form<'a> {
    /// The form that whoever sent this head understands.
    pub fn of(request: &'a http::request::Parts) -> Self {
        let grpc = |kind: &&HeaderValue| kind.as_bytes().starts_with(b"application/grpc");
        request.headers.get(CONTENT_TYPE).filter(grpc).map_or(Self::Http, Self::Grpc)
    }
}

/// The response to a request that a decision refuses, with the fields of a dialect.
pub fn response(decision: &Decision, dialect: Dialect, form: Form<'_>) -> Response<Bytes> {
    let kind = Kind::of(decision);
    let violated: Vec<_> = decision
        .tiers
        .iter()
        .filter(|tier| tier.mode == Mode::Enforced && !tier.outcome.is_allowed())
        .map(headers::name)
        .collect();
    let detail = detail(decision, kind, &violated);
    let mut response = match form {
        Form::Http => {
            let body = Body {
                r#type: format!("{TYPES}#{}", kind.name()),
                title: kind.title(),
                status: kind.status().as_u16(),
                detail: &detail,
                violated_policies: Some(&violated),
                retry_after_ms: decision.retry_after().map(whole_millis_up),
            };
            problem(kind.status(), &body)
        }
        Form::Grpc(content_type) => grpc_status(kind.code(), &detail, content_type),
    };
    headers::add(response.headers_mut(), decision, dialect);
    response
}

/// The status of the response to a request that a decision refuses.
pub fn status(decision: &Decision) -> StatusCode {
    Kind::of(decision).status()
}

/// The response to a request that could not be asked about.
pub fn mistake(mistake: &Mistake, form: Form<'_>) -> Response<Bytes> {
    let (status, code, detail) = match mistake {
        Mistake::OfCaller(detail) => (StatusCode::BAD_REQUEST, Code::InvalidArgument, detail),
        Mistake::Ours(detail) => (StatusCode::INTERNAL_SERVER_ERROR, Code::Internal, detail),
    };
    match form {
        Form::Http => {
            let body = Body {
                r#type: "about:blank".to_owned(),
                title: status.canonical_reason().unwrap_or("Error"),
                status: status.as_u16(),
                detail,
                violated_policies: None,
                retry_after_ms: None,
            };
            problem(status, &body)
        }
        Form::Grpc(content_type) => grpc_status(code, detail, content_type),
    }
}

/// Why a request cannot be asked about, and whose mistake that is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Something in the request.
    OfCaller(String),
    /// How the middleware or its rules were set up.
    Ours(String),
}

impl From<Error> for Mistake {
    fn from(error: Error) -> Self {
        match error {
            Error::Match(_) | Error::Key(_) => Self::OfCaller(error.to_string()),
            _ => Self::Ours(error.to_string()),
        }
    }
}

/// What a refused client is told it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    QuotaExceeded,
    ReducedCapacity,
}

impl Kind {
    fn of(decision: &Decision) -> Self {
        if decision.source == Source::Closed { Self::ReducedCapacity } else { Self::QuotaExceeded }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::QuotaExceeded => "quota-exceeded",
            Self::ReducedCapacity => "temporary-reduced-capacity",
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::QuotaExceeded => "Quota Exceeded",
            Self::ReducedCapacity => "Temporary Reduced Capacity",
        }
    }

    const fn status(self) -> StatusCode {
        match self {
            Self::QuotaExceeded => StatusCode::TOO_MANY_REQUESTS,
            Self::ReducedCapacity => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    const fn code(self) -> Code {
        match self {
            Self::QuotaExceeded => Code::ResourceExhausted,
            Self::ReducedCapacity => Code::Unavailable,
        }
    }
}

/// The gRPC status codes that are used here.
#[derive(Clone, Copy)]
enum Code {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Internal = 13,
    Unavailable = 14,
}

#[derive(Serialize)]
struct Body<'a> {
    r#type: String,
    title: &'static str,
    status: u16,
    detail: &'a str,
    #[serde(rename = "violated-policies", skip_serializing_if = "Option::is_none")]
    violated_policies: Option<&'a [&'a str]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
}

/// A sentence for people.
fn detail(decision: &Decision, kind: Kind, violated: &[&str]) -> String {
    let names = violated.join(", ");
    let wait = decision.retry_after().map(whole_seconds_up);
    match (kind, wait) {
        (Kind::ReducedCapacity, _) => format!("limits cannot be checked at the moment: {names}"),
        (Kind::QuotaExceeded, Some(1)) => format!("used up: {names}; try again in 1 second"),
        (Kind::QuotaExceeded, Some(seconds)) => format!("used up: {names}; try again in {seconds} seconds"),
        (Kind::QuotaExceeded, None) => format!("more than is ever allowed: {names}; waiting does not help"),
    }
}

fn problem(status: StatusCode, body: &Body<'_>) -> Response<Bytes> {
    let body = serde_json::to_vec(body).expect("text and numbers are JSON");
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A response that consists of its head: gRPC calls it trailers-only.
fn grpc_status(code: Code, message: &str, content_type: &HeaderValue) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let message =
        HeaderValue::try_from(Percent(message).to_string()).expect("what is not printable is encoded");
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type.clone());
    headers.insert(HeaderName::from_static("grpc-status"), HeaderValue::from(code as u16));
    headers.insert(HeaderName::from_static("grpc-message"), message);
    response
}

/// Text as `grpc-message` has it.
struct Percent<'a>(&'a str);

impl fmt::Display for Percent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.bytes().try_for_each(|byte| match byte {
            b' '..=b'~' if byte != b'%' => write!(f, "{}", char::from(byte)),
            _ => write!(f, "%{byte:02X}"),
        })
    }
}
