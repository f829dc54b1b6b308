//! A progress bar on stderr. Each table has an equal part of it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};

/// Interval between two updates.
const TICK: Duration = Duration::from_millis(250);
/// Length of one table's part.
const TABLE: u64 = 1000;

/// The bar.
pub struct Progress {
    bar: ProgressBar,
    tables_begun: AtomicU64,
}

/// One table's part of the bar.
pub struct Part<'a> {
    bar: &'a ProgressBar,
    table: String,
    from: u64,
    turns: u64,
    turn: AtomicU64,
}

impl Progress {
    /// Creates a bar for a number of tables.
    pub fn new(tables: usize) -> Self {
        let bar = ProgressBar::new(tables as u64 * TABLE);
        if let Ok(style) = ProgressStyle::with_template("[{elapsed_precise}] {bar:30} {percent:>3} %  {msg}")
        {
            bar.set_style(style);
        }
        bar.enable_steady_tick(TICK);
        Self { bar, tables_begun: AtomicU64::new(0) }
    }

    /// Starts the next table, which has `turns` turns.
    pub fn begin(&self, table: &str, turns: usize) -> Part<'_> {
        let from = self.tables_begun.fetch_add(1, Ordering::Relaxed) * TABLE;
        self.bar.set_position(from);
        let turns = turns.max(1) as u64;
        Part { bar: &self.bar, table: table.to_owned(), from, turns, turn: AtomicU64::new(0) }
    }

    /// Removes the bar.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Part<'_> {
    /// Shows the next turn.
    pub fn at(&self, round: usize, contestant: &str) {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed).min(self.turns);
        self.bar.set_position(self.from + TABLE * turn / self.turns);
        self.bar.set_message(format!("{}, round {}: {contestant}", self.table, round + 1));
    }

    /// Shows a step before the first turn.
    pub fn before(&self, what: &str) {
        self.bar.set_message(format!("{}: {what}", self.table));
    }
}
