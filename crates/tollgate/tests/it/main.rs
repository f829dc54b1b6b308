//! Integration tests of the library, on memory and on real Redis servers.
//!
//! `faults` and `memory_bound` are binaries of their own: they measure their process, or need the machine to themselves.

mod cluster;
mod conformance;
mod connection;
mod group;
mod histories;
mod limiter;
mod security;
mod sentinel;
mod simulation;
mod stats;
mod store_outage;
