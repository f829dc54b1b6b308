//! Rate limits for services that speak HTTP or gRPC: a [tower](https://docs.rs/tower) layer for axum, hyper and tonic.
//!
//! ```
//! use std::{net::SocketAddr, time::Duration};
//! use axum::{Router, extract::ConnectInfo, routing::get};
//! use tollgate::{Limit, Limiter, MemoryStore, Rule};
//! use tollgate_tower::{RateLimitLayer, client::ClientAddress};
//!
//! let rule = Rule::new("per-ip", Limit::token_bucket(100, Duration::from_secs(60))?).per(["ip"]);
//! let limiter = Limiter::new(MemoryStore::new(), [rule])?;
//! let layer = RateLimitLayer::new(limiter).client_ip(ClientAddress::default(), |request| {
//!     request.extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip())
//! });
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! * [`RateLimitLayer`]: what a request says about itself, what it costs, how it is refused
//! * [`RateLimit`]: the service: request, labels, decision, then the service within or a refusal
//! * [`refusal`]: a refusal as problem+json, or as a gRPC status
//! * [`headers`]: a decision as response fields, in the dialect that clients know
//! * [`client`]: whose request it is, when proxies stand in between
//! * [`asked`]: what it asks for, its path and its host
//!
//! With the feature `axum`, a default, requests can be labelled by the template of their route.
//!
//! Nothing here decides or waits for anything but the [`Limiter`](tollgate::Limiter), which answers by its deadline.

pub mod asked;
pub mod client;
pub mod headers;
mod labels;
mod layer;
pub mod refusal;
mod service;

pub use self::{layer::RateLimitLayer, service::RateLimit};

/// The examples of the guide, run as tests.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../../../docs/middleware.md")]
struct Guide;
