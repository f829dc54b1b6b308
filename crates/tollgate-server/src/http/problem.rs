//! What goes wrong, as `application/problem+json`.

use axum::{
    Json,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;

/// The longest detail, in characters: a detail may quote what was sent.
const MAX_DETAIL: usize = 512;

/// An answer that is no decision.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    detail: String,
}

#[derive(Serialize)]
struct Body<'a> {
    r#type: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl ToString) -> Self {
        Self { status, detail: shortened(detail.to_string()) }
    }

    /// The caller's mistake: the detail says what would be right.
    pub(super) fn bad_request(detail: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<tollgate::Error> for Problem {
    fn from(error: tollgate::Error) -> Self {
        let status = match error {
            tollgate::Error::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
            // more rules match than one check may have tiers: not the caller's mistake
            tollgate::Error::Check(_) => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::BAD_REQUEST,
        };
        Self::new(status, error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let title = self.status.canonical_reason().unwrap_or("Error");
        let body = Body { r#type: "about:blank", title, status: self.status.as_u16(), detail: &self.detail };
        let content_type = [(header::CONTENT_TYPE, "application/problem+json")];
        (self.status, content_type, Json(body)).into_response()
    }
}

fn shortened(mut detail: String) -> String {
    if let Some((end, _)) = detail.char_indices().nth(MAX_DETAIL) {
        detail.truncate(end);
        detail.push('…');
    }
    detail
}
