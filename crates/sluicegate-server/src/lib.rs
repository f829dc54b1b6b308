//! The sluicegate server: rate limit decisions over the network.
//!
//! The path of an HTTP request: [`net`] accepts the connection, [`http::server`] serves it, [`http`] decodes the request, the [`engine`]
//! decides it with a [`Limiter`](sluicegate::Limiter) over a [`store`], and [`http`] encodes the response. The other front ends do the same.
//!
//! * [`server`]: the whole server: configuration, listeners, reloads, shutdown
//! * [`startup`]: when the server is ready
//! * [`key_scan`]: a periodic scan for keys without a TTL
//! * [`net`]: listeners, TLS, connection limits and timeouts, shared by all front ends
//! * [`auth`]: tokens and their scopes
//! * [`http`]: the JSON API
//! * `dashboard`: the web page at `/`
//! * [`resp`]: the Redis protocol
//! * [`grpc`]: Envoy's rate limit service
//! * [`forward_auth`]: authorization sub-requests of proxies
//! * [`engine`]: the entry point of every front end to a decision
//! * `completion`: operations that outlive their caller
//! * [`observe`]: metrics, heavy hitters, logs, traces
//! * [`store`]: from a URL to a store
//! * [`config`]: the configuration; the only module that reads files and the environment
//! * [`demo`]: the rules of a server without a configuration
//!
//! Limits are decided in the library. This crate reads the time only for timeouts, measurements and display.

pub mod auth;
mod completion;
pub mod config;
mod dashboard;
pub mod demo;
pub mod engine;
pub mod forward_auth;
pub mod grpc;
pub mod http;
pub mod key_scan;
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
