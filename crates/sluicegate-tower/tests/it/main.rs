//! Integration tests of the middleware, with real servers and clients.

#[cfg(feature = "axum")]
mod axum;
mod headers;
#[cfg(feature = "axum")]
mod holds;
mod tonic;
