//! The tollgate server: decisions over the network.
//!
//! A request, from socket to answer: [`net`] accepts the connection, [`http::server`] reads it, [`http`] reads the question, the [`engine`] asks
//! a [`Limiter`](tollgate::Limiter) over a [`store`], [`http`] writes the answer.
//!
//! * [`server`]: the whole server: configuration, listeners, reloads, shutdown
//! * [`startup`]: when it is ready
//! * [`net`]: listeners, TLS, connection limits and timeouts, shared by all front ends
//! * [`auth`]: tokens and their scopes
//! * [`http`]: the JSON API
//! * `dashboard`: the page for people, at `/`
//! * [`resp`]: the Redis protocol
//! * [`grpc`]: Envoy's rate limit service
//! * [`forward_auth`]: what proxies ask before they pass a request on
//! * [`engine`]: the one way from every front end to a decision
//! * [`observe`]: what the server tells about itself: metrics, heaviest keys, logs, traces
//! * [`store`]: from a URL to a store
//! * [`config`]: the configuration, and the only place that reads files and the environment
//! * [`labels`]: how labels are read and cleaned
//! * [`demo`]: the rules when nothing is configured
//!
//! No limit is decided here. The time is asked only to tell how long something took, and when.

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
