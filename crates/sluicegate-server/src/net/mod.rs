//! The network layer that all front ends share: listeners, TLS, connection limits and timeouts.
//!
//! | file | contents |
//! |---|---|
//! | `listener` | binding addresses, the limit on open files |
//! | `acceptor` | the accept loop of one listener |
//! | `pending` | accepted connections that wait for a slot |
//! | `connection_limit` | connection slots, eviction, and the reaper of connections over their timeout |
//! | `activity` | the requests and timeouts of one connection |
//! | `runtime` | worker threads that each keep their connections |
//! | `tls` | certificates and the TLS handshake |
//! | `shutdown` | draining, then stopping |
//! | `stream` | the stream of a connection, with its write timeout |

pub mod acceptor;
pub(crate) mod activity;
pub mod connection_limit;
pub mod listener;
pub(crate) mod pending;
pub mod runtime;
pub mod shutdown;
pub mod stream;
pub mod tls;
