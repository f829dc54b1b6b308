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
//! A request can be held until its response ends. It counts as in flight until then, and is charged with its actual cost:
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::{convert::Infallible, time::Duration};
//! use axum::{Router, body::{self, Body}, http::Request, routing::get};
//! use futures_util::{StreamExt, stream};
//! use sluicegate::{Cost, Costs, Labels, Limit, Limiter, Rule};
//! use sluicegate_tower::{ActualCosts, RateLimitLayer};
//! use tower::ServiceExt;
//!
//! // streams an answer, and counts its tokens
//! async fn complete(actual: ActualCosts) -> Body {
//!     let answer = stream::iter(["to", "be", "or", "not"]).map(Ok::<_, Infallible>);
//!     Body::from_stream(answer.inspect(move |_| actual.add("tokens", 1)))
//! }
//!
//! let limiter = Limiter::in_memory([
//!     Rule::new("in-flight", Limit::concurrency(2)?),
//!     Rule::new("tokens", Limit::fixed_window(1_000, Duration::from_secs(3_600))?).unit("tokens"),
//! ])?;
//! let estimate = Costs::new([("requests", Cost::ONE), ("tokens", Cost::from(500))])?;
//! let layer = RateLimitLayer::new(limiter.clone()).estimate(move |_| estimate.clone());
//! let app: Router = Router::new().route("/", get(complete)).layer(layer);
//!
//! let response = app.oneshot(Request::new(Body::empty())).await?;
//! let labels = Labels::default();
//! assert_eq!(limiter.peek(&labels, 1).await?.tiers[0].remaining, 1); // in flight until the body has been sent
//! body::to_bytes(response.into_body(), usize::MAX).await?;
//! let after = limiter.peek(&labels, 1).await?;
//! assert_eq!((after.tiers[0].remaining, after.tiers[1].remaining), (2, 996));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
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

/// The examples of the page about LLM budgets, run as tests.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../../../docs/budgets.md")]
struct Budgets;

/// The examples of the page about in-flight limits, run as tests.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../../../docs/in-flight.md")]
struct InFlight;
