//! Rate limits for HTTP and gRPC services: a [tower](https://docs.rs/tower) layer for axum, hyper and tonic.
//!
//! ```
//! use std::net::SocketAddr;
//! use axum::{Router, routing::get};
//! use sluicegate::{Limit, Limiter, MemoryStore, Rule};
//! use sluicegate_tower::RateLimitLayer;
//!
//! let rule = Rule::new("per-ip", Limit::per_minute(100)).per(["ip"]);
//! let limiter = Limiter::new(MemoryStore::new(), [rule])?;
//! let app: Router =
//!     Router::new().route("/", get(|| async { "hello" })).layer(RateLimitLayer::new(limiter).client_ip());
//! let service = app.into_make_service_with_connect_info::<SocketAddr>(); // for axum::serve
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! * [`RateLimitLayer`]: settings: labels, costs and responses to denied requests
//! * [`RateLimit`]: the service, which checks a request and then calls the inner service or responds with a denial
//! * [`ActualCosts`]: the actual cost of a request that is held until its response ends
//! * [`denial`]: a denial as problem+json or as a gRPC status
//! * [`headers`]: a decision as response headers, in several dialects
//! * [`client`]: the client's address behind proxies
//! * [`target`]: path and host of a request
//!
//! The default feature `axum` adds labels from route templates and peer addresses.
//!
//! All decisions come from the [`Limiter`](sluicegate::Limiter), which answers within its deadline.

mod body;
pub mod client;
pub mod denial;
pub mod headers;
mod hold;
mod labels;
mod layer;
mod service;
pub mod target;

pub use self::{body::ResponseBody, hold::ActualCosts, layer::RateLimitLayer, service::RateLimit};

/// The examples of the guide, run as tests.
#[cfg(all(doctest, feature = "axum", feature = "toml"))]
#[doc = include_str!("../../../docs/middleware.md")]
struct Guide;

/// The examples of the page about budgets, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/budgets.md")]
struct Budgets;
