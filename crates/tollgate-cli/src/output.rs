//! The only module that prints.
//!
//! A reader that goes away, as `head` does, ends the output and nothing else.

use std::{
    error::Error,
    fmt::Display,
    io::{Write, stderr, stdout},
};

/// One line of what was asked for.
pub(crate) fn line(line: impl Display) {
    let _reader_gone = writeln!(stdout().lock(), "{line}");
}

/// One line that says what went wrong.
pub(crate) fn error(error: &dyn Error) {
    let _reader_gone = writeln!(stderr().lock(), "tollgate: {error}");
}
