//! The commands: names, arities, required scopes and documentation.

use sluicegate::limiter::Operation;

use super::auth::Requirement;
use crate::{config::Scope, observe::Call};

/// The action of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Throttle,
    Check,
    Peek,
    Charge,
    Refund,
    ResetCounters,
    Hold,
    Settle,
    Release,
    Renew,
    Ping,
    Echo,
    Hello,
    Auth,
    Info,
    Command,
    Client,
    Select,
    Quit,
    Reset,
}

impl Verb {
    /// The call to the engine; `None` for commands that do not concern counters.
    pub(super) fn call(self) -> Option<Call> {
        Some(match self {
            Self::Throttle | Self::Check => Call::CHECK,
            Self::Peek => Call::Decide(Operation::Peek),
            Self::Charge => Call::Decide(Operation::Charge),
            Self::Refund => Call::Decide(Operation::Refund { at: None }),
            Self::ResetCounters => Call::Reset,
            Self::Hold => Call::Hold,
            Self::Settle => Call::Settle,
            Self::Release => Call::Release,
            Self::Renew => Call::Renew,
            _ => return None,
        })
    }
}

/// One command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) verb: Verb,
    /// In lower case, as Redis lists its own.
    pub(super) name: &'static str,
    padded_name: PaddedName,
    /// The number of arguments, including the name; negative for a minimum.
    pub(super) arity: i8,
    pub(super) requires: Requirement,
    pub(super) group: &'static str,
    pub(super) summary: &'static str,
}

/// A name in lower case, padded with zeros, so that names are compared as one array.
type PaddedName = [u8; MAX_NAME];

/// The longest name.
const MAX_NAME: usize = 16;

const fn entry(
    verb: Verb,
    name: &'static str,
    arity: i8,
    requires: Requirement,
    group: &'static str,
    summary: &'static str,
) -> Entry {
    let mut padded_name = [0; MAX_NAME];
    padded_name.split_at_mut(name.len()).0.copy_from_slice(name.as_bytes());
    Entry { verb, name, padded_name, arity, requires, group, summary }
}

/// All commands; the most frequent ones first.
pub(super) static COMMANDS: [Entry; 20] = [
    // redis-cell's own usage message is sent for a wrong number of arguments
    entry(
        Verb::Throttle,
        "cl.throttle",
        -1,
        Requirement::Scope(Scope::Check),
        "limits",
        "Decides a key by a limit given in the command, like redis-cell",
    ),
    entry(
        Verb::Check,
        "sg.check",
        -4,
        Requirement::Scope(Scope::Check),
        "limits",
        "Decides by the rules, and charges the request if it is allowed",
    ),
    entry(
        Verb::Peek,
        "sg.peek",
        -3,
        Requirement::Scope(Scope::Check),
        "limits",
        "Decides by the rules without charging",
    ),
    entry(
        Verb::Hold,
        "sg.hold",
        -6,
        Requirement::Scope(Scope::Check),
        "limits",
        "Decides by the rules and an estimated cost, and holds it until the actual cost is known",
    ),
    entry(
        Verb::Settle,
        "sg.settle",
        -5,
        Requirement::Scope(Scope::Check),
        "limits",
        "Replaces the estimate of a hold with the actual cost, once",
    ),
    entry(
        Verb::Release,
        "sg.release",
        -4,
        Requirement::Scope(Scope::Check),
        "limits",
        "Refunds the estimate of a hold",
    ),
    entry(
        Verb::Renew,
        "sg.renew",
        -5,
        Requirement::Scope(Scope::Check),
        "limits",
        "Moves the expiry of a live hold",
    ),
    entry(
        Verb::Charge,
        "sg.charge",
        -4,
        Requirement::Scope(Scope::Adjust),
        "limits",
        "Charges usage that becomes known only after the request; may exceed the limit",
    ),
    entry(
        Verb::Refund,
        "sg.refund",
        -4,
        Requirement::Scope(Scope::Adjust),
        "limits",
        "Refunds at most the current usage",
    ),
    entry(Verb::ResetCounters, "sg.reset", -3, Requirement::Scope(Scope::Admin), "limits", "Resets counters"),
    entry(Verb::Ping, "ping", -1, Requirement::Authenticated, "connection", "Returns PONG, or its argument"),
    entry(Verb::Echo, "echo", 2, Requirement::Authenticated, "connection", "Returns its argument"),
    entry(Verb::Hello, "hello", -1, Requirement::Nothing, "connection", "Selects the protocol version"),
    entry(Verb::Auth, "auth", -2, Requirement::Nothing, "connection", "Authenticates the connection"),
    entry(
        Verb::Info,
        "info",
        -1,
        Requirement::Authenticated,
        "server",
        "Returns information about the server",
    ),
    entry(
        Verb::Command,
        "command",
        -1,
        Requirement::Authenticated,
        "server",
        "Returns information about the commands",
    ),
    entry(
        Verb::Client,
        "client",
        -2,
        Requirement::Authenticated,
        "connection",
        "Gets or sets properties of the connection",
    ),
    entry(
        Verb::Select,
        "select",
        2,
        Requirement::Authenticated,
        "connection",
        "Selects the database, which is always 0",
    ),
    entry(Verb::Quit, "quit", -1, Requirement::Nothing, "connection", "Closes the connection"),
    entry(
        Verb::Reset,
        "reset",
        1,
        Requirement::Nothing,
        "connection",
        "Resets the connection to its initial state",
    ),
];

/// Returns the command of a name, in any case.
#[inline]
pub(super) fn find(name: &[u8]) -> Option<&'static Entry> {
    match name {
        // nearly all commands are this one, in one of these spellings
        b"CL.THROTTLE" | b"cl.throttle" => COMMANDS.first(),
        _ => find_any(name),
    }
}

fn find_any(name: &[u8]) -> Option<&'static Entry> {
    let mut padded_name = [0; MAX_NAME];
    padded_name.get_mut(..name.len())?.copy_from_slice(name);
    padded_name.make_ascii_lowercase();
    COMMANDS.iter().find(|entry| entry.padded_name == padded_name && entry.name.len() == name.len())
}

impl Entry {
    /// Whether the command accepts this number of arguments, including its name.
    pub(super) fn accepts(&self, arguments: usize) -> bool {
        let arity = usize::from(self.arity.unsigned_abs());
        if self.arity < 0 { arguments >= arity } else { arguments == arity }
    }

    /// Whether a client may use it before authentication.
    pub(super) fn is_public(&self) -> bool {
        self.requires == Requirement::Nothing
    }

    /// Whether the first argument is a key.
    pub(super) fn has_key(&self) -> bool {
        self.verb == Verb::Throttle
    }

    /// Whether the command changes no counter.
    pub(super) fn is_read_only(&self) -> bool {
        !matches!(
            self.verb,
            Verb::Throttle
                | Verb::Check
                | Verb::Charge
                | Verb::Refund
                | Verb::ResetCounters
                | Verb::Hold
                | Verb::Settle
                | Verb::Release
                | Verb::Renew
        )
    }
}
