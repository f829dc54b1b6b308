//! Printing: the only module that writes to stdout and stderr.
//!
//! Results go to stdout, errors and notes to stderr. Colours are used on terminals only, and not if `NO_COLOR` is set. A closed
//! pipe, as with `head`, ends the output without an error.

mod bars;
mod progress;
mod table;

use std::{
    error::Error,
    fmt::Display,
    io::{self, BufRead, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use sluicegate_server::{config::Colour, server::StartError};

pub(crate) use self::{
    bars::bars,
    progress::Progress,
    table::{Align, Cell, Table},
};

/// The output format of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputFormat {
    Text,
    /// One JSON document per line.
    Json,
}

/// A positive result.
pub(crate) const SUCCESS: Style = AnsiColor::Green.on_default();
/// A negative result.
pub(crate) const ERROR: Style = AnsiColor::Red.on_default();
/// A warning.
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default();
/// A title.
pub(crate) const HEADING: Style = Style::new().bold();
/// Secondary information.
pub(crate) const DIM: Style = Style::new().dimmed();

/// Whether a write to stdout failed.
static WRITE_FAILED: AtomicBool = AtomicBool::new(false);

/// A write to stdout failed, for example because the disk is full.
#[derive(Debug, thiserror::Error)]
#[error("the output could not be written: free space on the target device")]
pub(crate) struct OutputError;

/// Prints a line to stdout.
pub(crate) fn line(line: impl Display) {
    record_failure(writeln!(anstream::stdout().lock(), "{line}"));
}

/// Prints bytes to stdout unchanged: a script, a manual page, a document.
pub(crate) fn raw(bytes: &[u8]) {
    let mut stdout = anstream::stdout().lock();
    record_failure(stdout.write_all(bytes).and_then(|()| stdout.flush()));
}

fn record_failure(result: io::Result<()>) {
    if result.is_err_and(|error| error.kind() != io::ErrorKind::BrokenPipe) {
        WRITE_FAILED.store(true, Ordering::Relaxed);
    }
}

/// Returns an error if a write to stdout failed. A closed pipe is not an error.
pub(crate) fn check_written() -> Result<(), OutputError> {
    if WRITE_FAILED.load(Ordering::Relaxed) { Err(OutputError) } else { Ok(()) }
}

/// Prints a JSON document on one line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), serde_json::Error> {
    line(serde_json::to_string(value)?);
    Ok(())
}

/// Prints a report: as a JSON document, or by calling `text`.
pub(crate) fn report(
    format: OutputFormat,
    report: &impl Serialize,
    text: impl FnOnce(),
) -> Result<(), serde_json::Error> {
    match format {
        OutputFormat::Json => json(report),
        OutputFormat::Text => {
            text();
            Ok(())
        }
    }
}

/// Applies a style to a text.
pub(crate) fn paint(style: Style, text: impl Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Prints a line to stderr.
pub(crate) fn note(note: impl Display) {
    let _ignored = writeln!(anstream::stderr().lock(), "{note}");
}

/// Asks for confirmation. Without a terminal the answer is no.
pub(crate) fn confirm(question: impl Display) -> bool {
    let stdin = io::stdin().lock();
    if !stdin.is_terminal() {
        note("stdin is not a terminal: pass --yes to confirm");
        return false;
    }
    let mut stderr = anstream::stderr().lock();
    let _ignored = write!(stderr, "{question} [y/N] ").and_then(|()| stderr.flush());
    let mut answer = String::new();
    let read = { stdin }.read_line(&mut answer);
    read.is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}

/// Prints an error on one line; on a terminal, configuration errors are shown with the source line.
pub(crate) fn error(error: &(dyn Error + 'static)) {
    let mut stderr = anstream::stderr().lock();
    let _ignored = match error.downcast_ref() {
        Some(StartError::Config(error)) if stderr.is_terminal() => {
            writeln!(stderr, "{}", error.render(Colour::Always))
        }
        _ => writeln!(stderr, "sluicegate: {error}"),
    };
}
