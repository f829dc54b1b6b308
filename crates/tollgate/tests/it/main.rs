//! Integration tests of the library, on memory and on real Redis servers.
//!
//! `faults` and `memory_bound` are binaries of their own: they measure their process, or need the machine to themselves.

mod away;
mod cluster;
mod conformance;
mod histories;
mod limiter;
mod link;
mod secured;
mod sentinel;
mod simulation;
mod stats;
mod together;
