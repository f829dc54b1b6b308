//! The lifecycle of a server process: changes of its configuration, failures of its clients and its store, restarts.
//!
//! * `reload`: configuration reloads under load
//! * `security`: tokens, TLS, secrets, cross-site requests
//! * `store_outage`: a Redis that starts late or is slow
//! * `rolling_restart`: instances are restarted one after the other
//! * `hostile_clients`: slow, huge and malformed requests

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod hostile_clients;
mod reload;
mod rolling_restart;
mod security;
mod store_outage;
