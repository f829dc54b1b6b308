//! What tollgate's tests share: the servers they start and the oracles that judge what was admitted.
//!
//! Nothing here decides a limit, and nothing here is published: other crates name this one only among their
//! dev-dependencies. It shares no server between tests, skips no test for want of a server, and retries nothing
//! but the search for a free port.

pub mod conformance;
pub mod hammer;
pub mod history;
pub mod model;
pub mod oracle;
pub mod server;
pub mod subject;
