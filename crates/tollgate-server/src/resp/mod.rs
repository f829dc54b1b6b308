//! The Redis protocol over a [`Desk`]: what a Redis client sends is answered, in RESP2 and RESP3.
//!
//! | file | has |
//! |---|---|
//! | `serve` | connections: how many, and how they end |
//! | `connection` | one connection: bytes in, bytes out, in order |
//! | `codec` | commands out of bytes, within bounds |
//! | `commands` | the commands' names, arities and scopes |
//! | `session` | what a connection knows of its client, and the commands about that |
//! | `question` | commands about counters: what they ask, how the answer is written |
//! | `at_once` | throttles of one pipeline that a store in this process decides at once |
//! | `together` | questions of one pipeline that share round trips to a store far away |
//! | `access` | who may use which command |
//! | `info` | what the server says about itself |
//! | `reply`, `error` | replies into bytes |
//!
//! `CL.THROTTLE` is redis-cell's command, with its replies and its errors; its counters are those of a check without rules
//! by a token bucket, so that the other front ends can look at them, refund and reset them. `TG.CHECK` and its kin ask the
//! rules. A mistake of the client is an error that says what would be right, and nothing is charged; bytes that are
//! no command end the connection. What a client may hold of this process is bounded, whether it sends or not.

mod access;
mod at_once;
pub mod codec;
mod commands;
mod connection;
mod error;
mod info;
mod question;
mod reply;
mod serve;
mod session;
mod together;

use std::sync::Arc;

use tollgate::Store;

use self::info::Numbers;
pub use self::{
    at_once::MAX_AT_ONCE,
    connection::{COMMAND_TIMEOUT, DRAIN_QUIET, FIRST_COMMAND_TIMEOUT, IDLE_TIMEOUT, MAX_REPLIES},
    serve::{MAX_CONNECTIONS, run},
    together::MAX_TOGETHER,
};
use crate::{
    auth::Access,
    desk::{Caller, Desk, Transport},
};

/// Who asks here.
const CALLER: Caller = Caller::at(Transport::Resp);

/// What all connections share. Cheap to clone.
pub struct Endpoint<S> {
    desk: Desk<S>,
    access: Access,
    numbers: Arc<Numbers>,
}

impl<S: Store> Endpoint<S> {
    /// Clients of this desk, let in by `access`.
    pub fn new(desk: Desk<S>, access: Access) -> Self {
        Self { desk, access, numbers: Arc::new(Numbers::new()) }
    }
}

impl<S> Clone for Endpoint<S> {
    fn clone(&self) -> Self {
        let numbers = Arc::clone(&self.numbers);
        Self { desk: self.desk.clone(), access: self.access.clone(), numbers }
    }
}
