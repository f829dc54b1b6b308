//! The OpenAPI 3.1 description of the API.
//!
//! `openapi.json` is maintained by hand. Tests compare it with the routes, and send generated requests to a server.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};

/// The document, as served.
pub const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}
