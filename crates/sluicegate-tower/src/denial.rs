//! Responses to denied requests: problem+json (RFC 9457), or a gRPC status without a message.
//!
//! | reason | HTTP | gRPC |
//! |---|---|---|
//! | a limit is exhausted, or a rule blocks the request | 429 `quota-exceeded` | RESOURCE_EXHAUSTED |
//! | the store is unavailable and a rule fails closed | 503 `temporary-reduced-capacity` | UNAVAILABLE |
//! | too many requests are held | 503 | UNAVAILABLE |
//! | the request is invalid | 400 | INVALID_ARGUMENT |
//! | the middleware is misconfigured | 500 | INTERNAL |
//!
//! None of these responses may be cached.

use std::fmt;

use bytes::Bytes;
use http::{
    HeaderName, HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};
use serde::Serialize;
use sluicegate::{Decision, Error, Source, decision::Mode};
use sluicegate_core::decision::{whole_millis_up, whole_seconds_up};

use crate::headers::{self, Dialect};

/// The media type of the body.
pub const PROBLEM_JSON: &str = "application/problem+json";

const TYPES: &str = "https://iana.org/assignments/http-problem-types";

/// The format of a denial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialFormat<'a> {
    /// Problem+json.
    Http,
    /// A gRPC status in the response headers, with this content type.
    Grpc(&'a HeaderValue),
}

impl<'a> DenialFormat<'a> {
    /// Selects the format for a request.
    pub fn of(request: &'a http::request::Parts) -> Self {
        let grpc = |kind: &&HeaderValue| kind.as_bytes().starts_with(b"application/grpc");
        request.headers.get(CONTENT_TYPE).filter(grpc).map_or(Self::Http, Self::Grpc)
    }
}

/// Creates the response to a denied request, with the headers of a dialect.
pub fn response(decision: &Decision, dialect: Dialect, form: DenialFormat<'_>) -> Response<Bytes> {
    let kind = ProblemType::of(decision);
    let violated: Vec<_> = decision
        .tiers
        .iter()
        .filter(|tier| tier.mode == Mode::Enforced && !tier.outcome.is_allowed())
        .map(headers::name)
        .collect();
    let detail = detail(decision, kind, &violated);
    let mut response = match form {
        DenialFormat::Http => {
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
        DenialFormat::Grpc(content_type) => grpc_status(kind.code(), &detail, content_type),
    };
    headers::add(response.headers_mut(), decision, dialect);
    response
}

/// The HTTP status of the response to a denied request.
pub fn status(decision: &Decision) -> StatusCode {
    ProblemType::of(decision).status()
}

/// Creates the response to a request that could not be checked. The response does not reveal how the middleware is
/// misconfigured.
pub fn error_response(error: &CheckError, form: DenialFormat<'_>) -> Response<Bytes> {
    let (status, code, detail) = match error {
        CheckError::BadRequest(detail) => (StatusCode::BAD_REQUEST, Code::InvalidArgument, &**detail),
        CheckError::Misconfigured(_) => {
            (StatusCode::INTERNAL_SERVER_ERROR, Code::Internal, "the request could not be checked")
        }
        CheckError::Unavailable(_) => {
            let kind = ProblemType::ReducedCapacity;
            (kind.status(), kind.code(), "too many requests are in flight")
        }
    };
    match form {
        DenialFormat::Http => {
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
        DenialFormat::Grpc(content_type) => grpc_status(code, detail, content_type),
    }
}

/// A request could not be checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckError {
    /// The request is invalid.
    BadRequest(String),
    /// The middleware or its rules are misconfigured.
    Misconfigured(String),
    /// The request cannot be held, because a counter has too many holds.
    Unavailable(String),
}

impl From<Error> for CheckError {
    fn from(error: Error) -> Self {
        match error {
            Error::Match(_) | Error::Key(_) => Self::BadRequest(error.to_string()),
            Error::TooManyHolds { .. } => Self::Unavailable(error.to_string()),
            _ => Self::Misconfigured(error.to_string()),
        }
    }
}

/// The problem type of a denial.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ProblemType {
    QuotaExceeded,
    ReducedCapacity,
}

impl ProblemType {
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

/// gRPC status codes.
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

/// The text for users.
fn detail(decision: &Decision, kind: ProblemType, violated: &[&str]) -> String {
    let names = violated.join(", ");
    let wait = decision.retry_after().map(whole_seconds_up);
    match (kind, wait) {
        (ProblemType::ReducedCapacity, _) => format!("limits cannot be checked at the moment: {names}"),
        (ProblemType::QuotaExceeded, Some(1)) => format!("limit exceeded: {names}; retry in 1 second"),
        (ProblemType::QuotaExceeded, Some(seconds)) => {
            format!("limit exceeded: {names}; retry in {seconds} seconds")
        }
        (ProblemType::QuotaExceeded, None) => format!("denied: {names}; a retry cannot succeed"),
    }
}

fn problem(status: StatusCode, body: &Body<'_>) -> Response<Bytes> {
    let body = serde_json::to_vec(body).expect("strings and numbers serialize to JSON");
    let mut response = Response::new(Bytes::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Creates a response without a body, which gRPC calls trailers-only.
fn grpc_status(code: Code, message: &str, content_type: &HeaderValue) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let message =
        HeaderValue::try_from(Percent(message).to_string()).expect("percent-encoded text is printable");
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type.clone());
    headers.insert(HeaderName::from_static("grpc-status"), HeaderValue::from(code as u16));
    headers.insert(HeaderName::from_static("grpc-message"), message);
    response
}

/// Percent-encodes text for `grpc-message`.
struct Percent<'a>(&'a str);

impl fmt::Display for Percent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.bytes().try_for_each(|byte| match byte {
            b' '..=b'~' if byte != b'%' => write!(f, "{}", char::from(byte)),
            _ => write!(f, "%{byte:02X}"),
        })
    }
}
