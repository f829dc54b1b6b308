//! The Redis protocol: RESP2 and RESP3.
//!
//! | file | contents |
//! |---|---|
//! | `server` | connections and graceful shutdown |
//! | `connection` | one connection: commands in, replies out, in order |
//! | `codec` | from bytes to commands, within bounds |
//! | `commands` | names, arities and scopes of the commands |
//! | `session` | the state of a connection, and the commands about it |
//! | `request` | from a command to a [`Request`](sluicegate::limiter::Request), and from its decision to a reply |
//! | `hold` | the commands for holds |
//! | `batch` | checks of one pipeline that share calls to a remote store |
//! | `auth` | which command needs which scope |
//! | `info` | the `INFO` command |
//! | `response`, `error` | from replies to bytes |
//!
//! `CL.THROTTLE` is redis-cell's command, with its replies and errors. Its counters are those of a check without rules by a token bucket,
//! so that the other front ends can inspect, refund and reset them. `SG.CHECK` and the other `SG` commands use the rules. An invalid
//! command is an error that names the fix, and nothing is charged. A protocol error closes the connection. The memory of a connection is
//! bounded.

mod auth;
mod batch;
pub mod codec;
mod commands;
mod connection;
mod error;
mod hold;
mod info;
mod request;
mod response;
pub mod server;
mod session;

use std::sync::Arc;

use self::info::ServerInfo;
pub use self::{
    batch::MAX_BATCH,
    connection::{COMMAND_TIMEOUT, DRAIN_QUIET, FIRST_COMMAND_TIMEOUT, IDLE_TIMEOUT, MAX_REPLIES},
    server::MAX_CONNECTIONS,
};
use crate::{auth::Access, engine::Engine};

/// The state that all connections share. Cheap to clone.
#[derive(Clone)]
pub struct Endpoint {
    engine: Engine,
    access: Access,
    info: Arc<ServerInfo>,
}

impl Endpoint {
    /// Creates the front end over an engine.
    pub fn new(engine: Engine, access: Access) -> Self {
        Self { engine, access, info: Arc::new(ServerInfo::new()) }
    }
}
