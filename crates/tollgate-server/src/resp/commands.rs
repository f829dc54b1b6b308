//! The commands: their names, how many arguments they take, and what a client must be allowed to use them.

use super::access::Scope;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Throttle,
    Check,
    Peek,
    Charge,
    Refund,
    Forget,
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

/// One command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) verb: Verb,
    /// In small letters, as Redis lists its own.
    pub(super) name: &'static str,
    /// How many arguments it takes, with its name; negative: at least so many.
    pub(super) arity: i8,
    pub(super) scope: Scope,
    pub(super) group: &'static str,
    pub(super) summary: &'static str,
}

const fn entry(
    verb: Verb,
    name: &'static str,
    arity: i8,
    scope: Scope,
    group: &'static str,
    summary: &'static str,
) -> Entry {
    Entry { verb, name, arity, scope, group, summary }
}

/// Every command; those that are asked most come first.
pub(super) static COMMANDS: [Entry; 16] = [
    // its own usage comes with a wrong number of arguments
    entry(
        Verb::Throttle,
        "cl.throttle",
        -1,
        Scope::Check,
        "limits",
        "Decides by a limit given with the key, as redis-cell",
    ),
    entry(
        Verb::Check,
        "tg.check",
        -4,
        Scope::Check,
        "limits",
        "Decides by the rules, and charges what may pass",
    ),
    entry(Verb::Peek, "tg.peek", -3, Scope::Check, "limits", "Would it pass? Changes nothing"),
    entry(
        Verb::Charge,
        "tg.charge",
        -4,
        Scope::Adjust,
        "limits",
        "Charges what is known only afterwards, into debt if need be",
    ),
    entry(Verb::Refund, "tg.refund", -4, Scope::Adjust, "limits", "Takes back at most what counts now"),
    entry(Verb::Forget, "tg.reset", -3, Scope::Admin, "limits", "Forgets counters"),
    entry(Verb::Ping, "ping", -1, Scope::Any, "connection", "Is it alive?"),
    entry(Verb::Echo, "echo", 2, Scope::Any, "connection", "Says the same"),
    entry(Verb::Hello, "hello", -1, Scope::Open, "connection", "Chooses the version of the protocol"),
    entry(Verb::Auth, "auth", -2, Scope::Open, "connection", "Says who the client is"),
    entry(Verb::Info, "info", -1, Scope::Any, "server", "What the server says about itself"),
    entry(Verb::Command, "command", -1, Scope::Any, "server", "What the commands are"),
    entry(Verb::Client, "client", -2, Scope::Any, "connection", "What the connection is called"),
    entry(Verb::Select, "select", 2, Scope::Any, "connection", "There is one database, 0"),
    entry(Verb::Quit, "quit", -1, Scope::Open, "connection", "Ends the connection"),
    entry(Verb::Reset, "reset", 1, Scope::Open, "connection", "Makes the connection like a new one"),
];

/// The command of a name, in small letters or capitals.
pub(super) fn find(name: &[u8]) -> Option<&'static Entry> {
    COMMANDS.iter().find(|entry| entry.name.as_bytes().eq_ignore_ascii_case(name))
}

impl Entry {
    /// Whether it takes so many arguments, with its name.
    pub(super) fn takes(&self, arguments: usize) -> bool {
        let wanted = usize::from(self.arity.unsigned_abs());
        if self.arity < 0 { arguments >= wanted } else { arguments == wanted }
    }

    /// Whether a client may use it that is not let in yet.
    pub(super) fn is_open(&self) -> bool {
        self.scope == Scope::Open
    }

    /// Whether its first argument is a key.
    pub(super) fn has_key(&self) -> bool {
        self.verb == Verb::Throttle
    }

    /// Whether it leaves every counter as it is.
    pub(super) fn only_reads(&self) -> bool {
        !matches!(self.verb, Verb::Throttle | Verb::Check | Verb::Charge | Verb::Refund | Verb::Forget)
    }
}
