//! The sluicegate server: decisions over the network.
//!
//! The path of a request: [`net`] accepts the connection, [`http::server`] serves it, [`http`] decodes the request, the [`engine`] decides it with
//! a [`Limiter`](sluicegate::Limiter) over a [`store`], and [`http`] encodes the response. The other front ends have the same layout.
//!
//! * [`server`]: the whole server: configuration, listeners, reloads, shutdown
//! * [`startup`]: when the server is ready
//! * [`net`]: listeners, TLS, connection limits and timeouts, shared by all front ends
//! * [`auth`]: tokens and their scopes
//! * [`http`]: the JSON API
//! * `dashboard`: the web page at `/`
//! * [`resp`]: the Redis protocol
//! * [`grpc`]: Envoy's rate limit service
//! * [`forward_auth`]: the authorization endpoint for reverse proxies
//! * [`engine`]: the entry point of every front end to a decision
//! * [`observe`]: metrics, heavy hitters, logs, traces
//! * [`store`]: opens the store that a URL names
//! * [`config`]: the configuration, and the only place that reads files and the environment
//! * [`labels`]: how labels are read and normalized
//! * [`demo`]: the rules without a configuration
//!
//! This crate makes no decisions of its own. It reads the time only for measurements and timestamps.

pub mod auth;
pub mod config;
mod dashboard;
pub mod demo;
pub mod duration;
pub mod engine;
pub mod forward_auth;
pub mod grpc;
pub mod http;
pub mod labels;
pub mod net;
pub mod observe;
pub mod resp;
pub mod server;
pub mod startup;
pub mod store;

/// The examples of the guide, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/resp.md")]
struct Guide;
