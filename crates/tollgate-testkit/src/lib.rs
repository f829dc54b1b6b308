//! What tollgate's tests share: the servers they start, the faults they inject and the oracles that judge what was
//! admitted.
//!
//! Real servers are a [`server::Server`], a [`cluster::Cluster`] or [`sentinel::Sentinels`]; real proxies, a [`gateway::Gateway`]. What goes wrong with them is in
//! [`faults`]; with the way to them, in [`proxy`] (for one client) and [`namespace`] (for whole machines). A network's round
//! trip is added by a [`delay_proxy::DelayProxy`].
//!
//! Nothing here decides a limit, and nothing here is published: other crates name this one only among their
//! dev-dependencies. It shares no server between tests, skips no test for want of a server, and retries nothing
//! but the search for a free port.

pub mod cluster;
pub mod conformance;
pub mod delay_proxy;
pub mod failing_store;
pub mod faults;
pub mod gateway;
pub mod hammer;
pub mod history;
pub mod model;
pub mod namespace;
pub mod proxy;
mod resp;
pub mod sentinel;
pub mod server;
pub mod store_fixture;
pub mod tls;
pub mod wait;

pub use tollgate_core::oracle;
