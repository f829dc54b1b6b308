//! Integration tests of the library, on memory and on real Redis servers.
//!
//! `faults` and `memory_bound` are separate binaries, as they measure their process or must run alone.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod cluster;
mod conformance;
mod connection;
mod group;
mod histories;
mod hold_attempts;
mod hold_faults;
mod hold_rules;
mod label_holds;
mod lease_simulation;
mod leases;
mod limiter;
mod security;
mod sentinel;
mod simulation;
mod stats;
mod store_outage;
mod token_budget;
