//! Faults of real Redis servers: the decisions during a fault, their duration, and the recovery afterwards.
//!
//! * `table`: the faults, each with its start and end; `policies` applies each of them to every failure policy
//! * `flood`: many callers of a server that does not reply
//! * `connection_loss`: connections that are lost while the server is up
//! * `lost_replies`: requests that run and whose replies are lost
//! * `lost_data`, `out_of_memory`: data loss, and a server without memory
//! * `failover`, `partition`: Sentinel, with processes that die and network partitions
//! * `cluster_nodes`: a Cluster with a node that dies or loses all its slots
//! * `short_deadlines`: callers with a shorter deadline
//! * `tls`: Sentinel and Cluster over TLS
//!
//! Times are asserted with generous bounds, and one test runs at a time.
//!
//! A separate binary: the tests measure the memory of their process and the duration of outages. `cargo test` runs
//! the tests of a binary in parallel, but one binary after the other.

#![expect(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod cluster_nodes;
mod connection_loss;
mod failover;
mod flood;
mod lost_data;
mod lost_replies;
mod machine_pauses;
mod monitored_instance;
mod out_of_memory;
mod partition;
mod policies;
mod scenario;
mod short_deadlines;
mod table;
mod tls;
