//! Integration tests of the server.
//!
//! `resp_connections` is a binary of its own: it measures the memory of its process.

mod config;
mod config_watch;
mod envoy;
mod forward_auth;
mod gateways;
mod grpc;
mod grpc_front;
mod grpc_serve;
mod http;
mod live;
mod metrics;
mod metrics_history;
mod openapi;
mod prometheus;
mod resp;
mod resp_clients;
mod resp_redis;
mod same_everywhere;
mod serve;
mod top;
mod trace;
