//! Integration tests of the server.
//!
//! Two binaries are separate because they measure their process: `resp_connections` (peak memory) and `heavy_hitters` (threads).

mod config;
mod config_watch;
mod envoy;
mod envoy_hold_load;
mod envoy_holds;
mod forward_auth;
mod front_end_parity;
mod gateways;
mod grpc;
mod grpc_connections;
mod grpc_front;
mod grpc_holds;
mod hold_metrics;
mod hold_parity;
mod http;
mod http_connections;
mod http_hold_load;
mod http_holds;
mod key_scan;
mod live;
mod log_lines;
mod memory_full;
mod metrics;
mod metrics_history;
mod openapi;
mod prometheus;
mod resp;
mod resp_clients;
mod resp_holds;
mod resp_redis;
mod trace;
