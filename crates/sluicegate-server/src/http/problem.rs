//! Errors as `application/problem+json`.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Serialize, Serializer};

use super::json::Json;
use crate::observe::logs;

/// The longest detail, in characters. A detail may quote parts of the request.
const MAX_DETAIL: usize = 512;

/// An error response.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    detail: String,
    /// Whether the store did not run the call, so that nothing has changed.
    is_without_effect: bool,
}

/// Why a call with a server error had no effect, in the extensions of its response.
#[derive(Clone)]
pub(super) struct WithoutEffect(pub(super) String);

#[derive(Serialize)]
struct ProblemBody<'a> {
    r#type: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl ToString) -> Self {
        Self { status, detail: truncated(detail.to_string()), is_without_effect: false }
    }

    /// Prefixes the detail with the part of the request that it concerns.
    pub(super) fn within(mut self, part: impl std::fmt::Display) -> Self {
        self.detail = truncated(format!("{part}: {}", self.detail));
        self
    }

    /// An error of the caller. The detail names the fix.
    pub(super) fn bad_request(detail: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<sluicegate::Error> for Problem {
    fn from(error: sluicegate::Error) -> Self {
        let status = match error {
            sluicegate::Error::Store(_)
            | sluicegate::Error::PartialReset { .. }
            | sluicegate::Error::TooManyHolds { .. } => StatusCode::SERVICE_UNAVAILABLE,
            sluicegate::Error::HoldConflict(_) => StatusCode::CONFLICT,
            // more rules match than one check may have tiers: an error of the configuration, not of the caller
            sluicegate::Error::Check(_) => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        };
        let is_without_effect = logs::is_without_effect(&error);
        Self { is_without_effect, ..Self::new(status, error) }
    }
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let title = self.status.canonical_reason().unwrap_or("Error");
        let body =
            ProblemBody { r#type: "about:blank", title, status: self.status.as_u16(), detail: &self.detail };
        body.serialize(serializer)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let content_type = [(header::CONTENT_TYPE, "application/problem+json")];
        let without_effect = self.is_without_effect.then(|| WithoutEffect(self.detail.clone()));
        let mut response = (self.status, content_type, Json(self)).into_response();
        if let Some(without_effect) = without_effect {
            response.extensions_mut().insert(without_effect);
        }
        response
    }
}

fn truncated(mut detail: String) -> String {
    if let Some((end, _)) = detail.char_indices().nth(MAX_DETAIL) {
        detail.truncate(end);
        detail.push('…');
    }
    detail
}
