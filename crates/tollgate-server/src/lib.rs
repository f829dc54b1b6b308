//! The tollgate server: decisions over the network.
//!
//! A request, from socket to answer: [`connections`] takes it in, [`serve`] hears it, [`http`] reads the question, the [`desk`] asks
//! a [`Limiter`](tollgate::Limiter) over a [`store`], [`http`] writes the answer.
//!
//! * [`run`]: the whole server, from its configuration to its end
//! * [`startup`]: when it is ready
//! * [`listen`], [`auth`]: addresses, certificates and tokens
//! * [`connections`], [`workers`]: those of any front end, within bounds, from first to last, and who serves them
//! * [`serve`]: HTTP connections
//! * [`http`]: the JSON API
//! * `dashboard`: the page for people, at `/`
//! * [`resp`]: the Redis protocol
//! * [`grpc`]: Envoy's rate limit service
//! * [`forward_auth`]: what proxies ask before they pass a request on
//! * [`desk`]: the one way from every front end to a decision
//! * [`observe`]: what the server tells about itself: metrics, heaviest keys, logs, traces
//! * [`store`]: from a URL to a store
//! * [`config`]: the configuration, and the only place that reads files and the environment
//! * [`labels`]: how labels are read and cleaned
//! * [`demo`]: the rules when nothing is configured
//!
//! No limit is decided here. The time is asked only to tell how long something took, and when.

mod aside;
pub mod auth;
pub mod config;
pub mod connections;
mod crowd;
mod dashboard;
pub mod demo;
pub mod desk;
pub mod duration;
pub mod forward_auth;
pub mod grpc;
pub mod http;
pub mod labels;
pub mod listen;
pub mod observe;
mod pieces;
pub mod resp;
pub mod run;
pub mod serve;
pub mod startup;
pub mod store;
mod unhurried;
pub mod workers;

/// The examples of the guide, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/resp.md")]
struct Guide;
