//! The API as OpenAPI 3.1 describes it, for generators of clients and for people.
//!
//! It is written by hand, in `openapi.json` beside this file. Tests compare it with the routes, and ask a server everything that
//! it says can be asked.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};

/// The description, as it is served.
pub const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}
