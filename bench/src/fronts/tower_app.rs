//! A hello-world axum app with and without the rate limit layer.

use std::time::Duration;

use anyhow::Result;
use axum::{Router, http::HeaderName, routing::get};
use sluicegate::{Limit, Limiter, MemoryStore, Rule};
use sluicegate_tower::RateLimitLayer;
use tokio::net::TcpListener;

use super::{
    always_allow::{ANY_PORT, serve_http},
    process::Addresses,
};

/// Whether the app has the layer.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Variant {
    Limited,
    Plain,
}

/// Listens, and returns the future that serves.
pub async fn serve(variant: Variant) -> Result<(Addresses, impl Future<Output = Result<()>>)> {
    let listener = TcpListener::bind(ANY_PORT).await?;
    let addresses = Addresses { http: listener.local_addr()?, grpc: None, resp: None };
    let app = Router::new().route("/", get(|| async { "hello" }));
    let app = match variant {
        Variant::Limited => app.layer(layer()?),
        Variant::Plain => app,
    };
    Ok((addresses, serve_http(listener, app)))
}

/// One limit per value of the header `x-user`, as in `sluicegate.toml`.
fn layer() -> Result<RateLimitLayer> {
    let limit = Limit::token_bucket(1_000_000, Duration::from_secs(60))?;
    let limiter = Limiter::new(MemoryStore::new(), [Rule::new("per-user", limit).per(["user"])])?;
    Ok(RateLimitLayer::new(limiter).header("user", HeaderName::from_static("x-user")))
}
