//! Error replies. The first word is a code: `ERR` means that the command is invalid, and nothing was charged; `CONFLICT` means that another
//! hold has the id.

use std::fmt;

/// An error reply.
#[derive(Debug)]
pub(super) struct Error {
    code: &'static str,
    text: String,
}

impl Error {
    /// The codes of replies to unauthorized clients.
    pub(super) const NOT_AUTHENTICATED: &str = "NOAUTH";
    pub(super) const NO_PERMISSION: &str = "NOPERM";

    /// An invalid command. The text names the fix.
    pub(super) fn invalid(text: impl fmt::Display) -> Self {
        Self::new("ERR", text)
    }

    /// An error of redis-cell.
    pub(super) fn cell(text: impl fmt::Display) -> Self {
        Self::new("Cell", format_args!("error: {text}"))
    }

    pub(super) fn new(code: &'static str, text: impl fmt::Display) -> Self {
        Self { code, text: text.to_string() }
    }

    /// Whether the client is not authorized to use the command.
    pub(super) fn is_unauthorized(&self) -> bool {
        [Self::NOT_AUTHENTICATED, Self::NO_PERMISSION].contains(&self.code)
    }

    pub(super) fn arity(command: &str) -> Self {
        Self::invalid(format_args!("wrong number of arguments for '{command}' command"))
    }

    pub(super) fn subcommand(command: &str, subcommand: &[u8]) -> Self {
        let shown = shown(subcommand);
        Self::invalid(format_args!("unknown subcommand '{shown}'. Try {} HELP.", command.to_uppercase()))
    }
}

impl From<sluicegate::Error> for Error {
    fn from(error: sluicegate::Error) -> Self {
        match error {
            sluicegate::Error::Store(_)
            | sluicegate::Error::PartialReset { .. }
            | sluicegate::Error::TooManyHolds { .. } => Self::new("UNAVAILABLE", error),
            sluicegate::Error::HoldConflict(_) => Self::new("CONFLICT", error),
            _ => Self::invalid(error),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.code, self.text)
    }
}

/// The most bytes of an argument that an error quotes.
const MAX_SHOWN: usize = 128;

/// Formats an argument for an error.
pub(super) fn shown(argument: &[u8]) -> impl fmt::Display {
    String::from_utf8_lossy(&argument[..argument.len().min(MAX_SHOWN)]).into_owned()
}
