//! The life of a real server: what may happen to the process, its configuration, its clients and its store while others are
//! served.
//!
//! * `reload`: another configuration under load
//! * `secured`: tokens, certificates, secrets and other sites' pages
//! * `away`: a Redis that comes late, or is far away
//! * `rolling`: one instance after the other is started again
//! * `bombs`: clients that mean no good

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

mod away;
mod bombs;
mod reload;
mod rolling;
mod secured;
