//! Everything that can go wrong with a Redis, done to real ones: what callers are told meanwhile, how long they wait, and
//! that they notice nothing afterwards.
//!
//! * `table`: the faults, each with how it begins and ends; `policies` does every one of them to every policy
//! * `flood`: many callers of a server that is silent
//! * `replies`: requests that run, and whose replies are lost
//! * `lost_data`, `full`: a Redis that forgets, and one that has no room
//! * `failover`, `partition`: Sentinel, with processes that die and networks that part
//! * `shards`: a Cluster, of which a part dies or moves
//! * `short_deadlines`: callers that wait less than the deadline
//! * `encrypted`: Sentinel and Cluster by TLS
//!
//! Times are asserted with much slack, and one test runs at a time: these are promises about what happens, not about speed.
//!
//! A binary of its own: the tests measure the memory of their process and the duration of outages. `cargo test` runs the tests
//! of a binary side by side, but binaries one after the other.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod cluster_nodes;
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
