//! The commands: their names, how many arguments they take, and what a client must be allowed to use them.

use sluicegate::Operation;

use super::auth::Needs;
use crate::{config::Scope, observe::Call};

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

impl Verb {
    /// What it asks about counters, if anything.
    pub(super) fn call(self) -> Option<Call> {
        Some(match self {
            Self::Throttle | Self::Check => Call::CHECK,
            Self::Peek => Call::Decide(Operation::Peek),
            Self::Charge => Call::Decide(Operation::Charge),
            Self::Refund => Call::Decide(Operation::Refund { at: None }),
            Self::Forget => Call::Reset,
            _ => return None,
        })
    }
}

/// One command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) verb: Verb,
    /// In small letters, as Redis lists its own.
    pub(super) name: &'static str,
    word: Word,
    /// How many arguments it takes, with its name; negative: at least so many.
    pub(super) arity: i8,
    pub(super) needs: Needs,
    pub(super) group: &'static str,
    pub(super) summary: &'static str,
}

/// A name in small letters and what is left of so many bytes, so that one comparison tells it from another.
type Word = [u8; MAX_NAME];

/// The longest name.
const MAX_NAME: usize = 16;

const fn entry(
    verb: Verb,
    name: &'static str,
    arity: i8,
    needs: Needs,
    group: &'static str,
    summary: &'static str,
) -> Entry {
    let mut word = [0; MAX_NAME];
    word.split_at_mut(name.len()).0.copy_from_slice(name.as_bytes());
    Entry { verb, name, word, arity, needs, group, summary }
}

/// Every command; those that are asked most come first.
pub(super) static COMMANDS: [Entry; 16] = [
    // its own usage comes with a wrong number of arguments
    entry(
        Verb::Throttle,
        "cl.throttle",
        -1,
        Needs::Scope(Scope::Check),
        "limits",
        "Decides by a limit given with the key, as redis-cell",
    ),
    entry(
        Verb::Check,
        "sg.check",
        -4,
        Needs::Scope(Scope::Check),
        "limits",
        "Decides by the rules, and charges what may pass",
    ),
    entry(Verb::Peek, "sg.peek", -3, Needs::Scope(Scope::Check), "limits", "Would it pass? Changes nothing"),
    entry(
        Verb::Charge,
        "sg.charge",
        -4,
        Needs::Scope(Scope::Adjust),
        "limits",
        "Charges what is known only afterwards, into debt if need be",
    ),
    entry(
        Verb::Refund,
        "sg.refund",
        -4,
        Needs::Scope(Scope::Adjust),
        "limits",
        "Takes back at most what counts now",
    ),
    entry(Verb::Forget, "sg.reset", -3, Needs::Scope(Scope::Admin), "limits", "Forgets counters"),
    entry(Verb::Ping, "ping", -1, Needs::Entry, "connection", "Is it alive?"),
    entry(Verb::Echo, "echo", 2, Needs::Entry, "connection", "Says the same"),
    entry(Verb::Hello, "hello", -1, Needs::Nothing, "connection", "Chooses the version of the protocol"),
    entry(Verb::Auth, "auth", -2, Needs::Nothing, "connection", "Says who the client is"),
    entry(Verb::Info, "info", -1, Needs::Entry, "server", "What the server says about itself"),
    entry(Verb::Command, "command", -1, Needs::Entry, "server", "What the commands are"),
    entry(Verb::Client, "client", -2, Needs::Entry, "connection", "What the connection is called"),
    entry(Verb::Select, "select", 2, Needs::Entry, "connection", "There is one database, 0"),
    entry(Verb::Quit, "quit", -1, Needs::Nothing, "connection", "Ends the connection"),
    entry(Verb::Reset, "reset", 1, Needs::Nothing, "connection", "Makes the connection like a new one"),
];

/// The command of a name, in small letters or capitals.
#[inline]
pub(super) fn find(name: &[u8]) -> Option<&'static Entry> {
    match name {
        // as nearly all are, and as clients write it
        b"CL.THROTTLE" | b"cl.throttle" => COMMANDS.first(),
        _ => find_any(name),
    }
}

fn find_any(name: &[u8]) -> Option<&'static Entry> {
    let mut word = [0; MAX_NAME];
    word.get_mut(..name.len())?.copy_from_slice(name);
    word.make_ascii_lowercase();
    COMMANDS.iter().find(|entry| entry.word == word && entry.name.len() == name.len())
}

impl Entry {
    /// Whether it takes so many arguments, with its name.
    pub(super) fn takes(&self, arguments: usize) -> bool {
        let wanted = usize::from(self.arity.unsigned_abs());
        if self.arity < 0 { arguments >= wanted } else { arguments == wanted }
    }

    /// Whether a client may use it that is not let in yet.
    pub(super) fn is_open(&self) -> bool {
        self.needs == Needs::Nothing
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
