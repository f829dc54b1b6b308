//! The life of a real server: what may happen to the process, its configuration, its clients and its store while others are
//! served.
//!
//! * `reload`: another configuration under load
//! * `secured`: tokens, certificates, secrets and other sites' pages
//! * `away`: a Redis that comes late, or is far away
//! * `rolling`: one instance after the other is started again
//! * `streams`: clients that mean no good
//! * `program`, `client`: the process, and what connect it

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod hostile_clients;
mod http_client;
mod reload;
mod rolling_restart;
mod security;
mod server_process;
mod store_outage;
