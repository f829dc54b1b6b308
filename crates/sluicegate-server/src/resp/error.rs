//! What goes wrong, as the text of an error reply. Its first word is for programs: `ERR` is the client's own mistake,
//! and nothing was charged.

use std::fmt;

/// Why a command is not answered with what it asked for.
#[derive(Debug)]
pub(super) struct Error {
    word: &'static str,
    text: String,
}

impl Error {
    /// The first words of what is said to clients that may not use a command.
    pub(super) const NO_TOKEN: &str = "NOAUTH";
    pub(super) const TOO_WEAK: &str = "NOPERM";

    /// The client's mistake: the text says what would be right.
    pub(super) fn mistake(text: impl fmt::Display) -> Self {
        Self::new("ERR", text)
    }

    /// What redis-cell says.
    pub(super) fn cell(text: impl fmt::Display) -> Self {
        Self::new("Cell", format_args!("error: {text}"))
    }

    pub(super) fn new(word: &'static str, text: impl fmt::Display) -> Self {
        Self { word, text: text.to_string() }
    }

    /// Whether the client may not use the command.
    pub(super) fn is_denial(&self) -> bool {
        [Self::NO_TOKEN, Self::TOO_WEAK].contains(&self.word)
    }

    pub(super) fn arity(command: &str) -> Self {
        Self::mistake(format_args!("wrong number of arguments for '{command}' command"))
    }

    pub(super) fn subcommand(command: &str, subcommand: &[u8]) -> Self {
        let shown = shown(subcommand);
        Self::mistake(format_args!("unknown subcommand '{shown}'. Try {} HELP.", command.to_uppercase()))
    }
}

impl From<sluicegate::Error> for Error {
    fn from(error: sluicegate::Error) -> Self {
        match error {
            sluicegate::Error::Store(_) => Self::new("UNAVAILABLE", error),
            _ => Self::mistake(error),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.word, self.text)
    }
}

/// The most bytes of an argument that an error quotes.
const MAX_SHOWN: usize = 128;

/// An argument as it is quoted in an error.
pub(super) fn shown(argument: &[u8]) -> impl fmt::Display {
    String::from_utf8_lossy(&argument[..argument.len().min(MAX_SHOWN)]).into_owned()
}
