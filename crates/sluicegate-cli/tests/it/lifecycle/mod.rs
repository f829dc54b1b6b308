//! The lifecycle of a server process: changes of its configuration, failures of its clients and its store, restarts.
//!
//! * `reload`: configuration reloads under load
//! * `security`: tokens, TLS, secrets, cross-site requests
//! * `store_outage`: a Redis that starts late or is slow
//! * `rolling_restart`: instances are restarted one after the other
//! * `audit`: clients that disconnect during a call that writes an audit line
//! * `connection_slots`: clients without a token that occupy all connections
//! * `hostile_clients`: slow, huge and malformed requests
//! * `leases`: units charged in advance, and their return at shutdown
//! * `key_scan`: the scan for keys without a TTL
//! * `stalled_log`: a reader of the log that does not read

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod audit;
mod connection_slots;
mod hostile_clients;
mod key_scan;
mod leases;
mod reload;
mod rolling_restart;
mod security;
mod stalled_log;
mod store_outage;
