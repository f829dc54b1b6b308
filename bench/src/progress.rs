//! A line on stderr that says what runs, since it takes minutes.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How often the line moves.
const TICK: Duration = Duration::from_millis(250);

/// The line.
pub struct Progress {
    line: ProgressBar,
}

impl Progress {
    pub fn new() -> Self {
        let line = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("[{elapsed_precise}] {msg}") {
            line.set_style(style);
        }
        line.enable_steady_tick(TICK);
        Self { line }
    }

    /// Says what runs now.
    pub fn at(&self, table: &str, round: usize, contestant: &str) {
        self.line.set_message(format!("{table}, round {}: {contestant}", round + 1));
    }

    /// Takes the line away.
    pub fn end(&self) {
        self.line.finish_and_clear();
    }
}
