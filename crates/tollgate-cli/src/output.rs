//! The only module that prints.
//!
//! A reader that goes away, as `head` does, ends the output and nothing else.

use std::{
    env,
    error::Error,
    fmt::Display,
    io::{IsTerminal, Write, stderr, stdout},
};

use tollgate_server::{config::Colour, run::StartError};

/// One line of what was asked for.
pub(crate) fn line(line: impl Display) {
    let _reader_gone = writeln!(stdout().lock(), "{line}");
}

/// What went wrong: one line; on a terminal, what is wrong with a configuration is shown where it stands.
pub(crate) fn error(error: &(dyn Error + 'static)) {
    let mut stderr = stderr().lock();
    let _reader_gone = match error.downcast_ref() {
        Some(StartError::Config(error)) if stderr.is_terminal() => {
            let colour = if env::var_os("NO_COLOR").is_some() { Colour::Never } else { Colour::Always };
            writeln!(stderr, "{}", error.render(colour))
        }
        _ => writeln!(stderr, "tollgate: {error}"),
    };
}
