//! Shared test support: real servers, fault injection, and oracles that verify which calls were admitted.
//!
//! | module | content |
//! |---|---|
//! | [`server`], [`cluster`], [`sentinel`] | real Redis and Valkey processes |
//! | [`gateway`] | real nginx, Caddy and Traefik processes |
//! | [`faults`] | faults of a running server |
//! | [`proxy`], [`namespace`], [`delay_proxy`] | faults of one connection, network partitions, added round-trip time |
//! | [`mod@conformance`], [`mod@hold_conformance`], [`history`], [`lease_history`], [`hold_history`], [`model`], [`reference_calendar`], [`oracle`] | required behaviour of every store |
//! | [`hammer`] | several processes that load one Redis |
//!
//! Other crates use this crate only as a dev-dependency. Servers are never shared between tests, a missing server fails the
//! test, and the only operation that is retried is the search for a free port.

pub mod cluster;
pub mod conformance;
pub mod delay_proxy;
pub mod failing_store;
pub mod faults;
pub mod gated_store;
pub mod gateway;
pub mod hammer;
pub mod history;
pub mod hold_conformance;
pub mod hold_history;
pub mod lease_history;
pub mod model;
pub mod namespace;
pub mod proxy;
pub mod reference_calendar;
mod resp;
pub mod sentinel;
pub mod server;
pub mod store_fixture;
pub mod tls;
pub mod wait;

pub use sluicegate_core::oracle;
