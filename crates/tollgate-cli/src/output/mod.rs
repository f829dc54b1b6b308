//! The only module that prints.
//!
//! What was asked for goes to the standard output, what went wrong to the standard error. Colours are for terminals only, and
//! not where `NO_COLOR` is set. A reader that goes away, as `head` does, ends the output and nothing else.

mod bars;
mod measure;
mod progress;
mod table;
pub(crate) mod wait;

use std::{
    error::Error,
    fmt::Display,
    io::{self, BufRead, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use tollgate_server::{config::Colour, server::StartError};

pub(crate) use self::{
    bars::bars,
    measure::{bytes, count, duration, several},
    progress::Progress,
    table::{Align, Cell, Table},
};

/// For whom a command writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// For people.
    Text,
    /// For programs: one JSON document to the line.
    Json,
}

/// Something is as it should be.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
/// Something is not.
pub(crate) const BAD: Style = AnsiColor::Red.on_default();
/// Something deserves a look.
pub(crate) const ODD: Style = AnsiColor::Yellow.on_default();
/// What a paragraph is about.
pub(crate) const TITLE: Style = Style::new().bold();
/// What matters least.
pub(crate) const FAINT: Style = Style::new().dimmed();

/// Whether some of what was asked for could not be written.
static LOST: AtomicBool = AtomicBool::new(false);

/// Some of the output could not be written, for want of room for example.
#[derive(Debug, thiserror::Error)]
#[error("the output could not be written: make room where it goes")]
pub(crate) struct Lost;

/// One line of what was asked for.
pub(crate) fn line(line: impl Display) {
    noted(writeln!(anstream::stdout().lock(), "{line}"));
}

/// What was asked for, as it is: a script, a page, a document.
pub(crate) fn verbatim(bytes: &[u8]) {
    let mut stdout = anstream::stdout().lock();
    noted(stdout.write_all(bytes).and_then(|()| stdout.flush()));
}

fn noted(written: io::Result<()>) {
    if written.is_err_and(|error| error.kind() != io::ErrorKind::BrokenPipe) {
        LOST.store(true, Ordering::Relaxed);
    }
}

/// Whether all of the output was written, as far as anybody wanted to read it.
pub(crate) fn all_written() -> Result<(), Lost> {
    if LOST.load(Ordering::Relaxed) { Err(Lost) } else { Ok(()) }
}

/// What was asked for, as one JSON document on one line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), serde_json::Error> {
    line(serde_json::to_string(value)?);
    Ok(())
}

/// What was found, for whom it is written: as one JSON document, or as `text` prints it.
pub(crate) fn report(
    form: Form,
    report: &impl Serialize,
    text: impl FnOnce(),
) -> Result<(), serde_json::Error> {
    match form {
        Form::Json => json(report),
        Form::Text => {
            text();
            Ok(())
        }
    }
}

/// Text in a style.
pub(crate) fn paint(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Something to know that is not what was asked for: one line.
pub(crate) fn note(note: impl Display) {
    let _reader_gone = writeln!(anstream::stderr().lock(), "{note}");
}

/// Asks a person; where there is none, that is a no.
pub(crate) fn confirm(question: impl Display) -> bool {
    let stdin = io::stdin().lock();
    if !stdin.is_terminal() {
        note("nobody can be asked here: add --yes");
        return false;
    }
    let mut stderr = anstream::stderr().lock();
    let _reader_gone = write!(stderr, "{question} [y/N] ").and_then(|()| stderr.flush());
    let mut answer = String::new();
    let read = { stdin }.read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

/// What went wrong: one line; on a terminal, what is wrong with a configuration is shown where it stands.
pub(crate) fn error(error: &(dyn Error + 'static)) {
    let mut stderr = anstream::stderr().lock();
    let _reader_gone = match error.downcast_ref() {
        Some(StartError::Config(error)) if stderr.is_terminal() => {
            writeln!(stderr, "{}", error.render(Colour::Always))
        }
        _ => writeln!(stderr, "tollgate: {error}"),
    };
}
