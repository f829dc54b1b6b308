//! What is shown and written of a run.

mod markdown;
mod svg;
mod text;

use std::{fs, path::Path};

use anyhow::Result;
use serde::Serialize;

pub use self::text::text;
use crate::{machine::Machine, stats::Table};

/// Everything that one run of the bench found out.
#[derive(Debug, Serialize)]
pub struct Report {
    pub machine: Machine,
    pub command: String,
    pub rounds: usize,
    /// The load averages after the last run.
    pub load_after: String,
    pub remote: Vec<Table>,
    pub local: Vec<Table>,
}

impl Report {
    /// All tables, in order.
    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.remote.iter().chain(&self.local)
    }

    /// Writes the page and its chart into `directory`.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let charts = directory.join("benchmarks");
        fs::create_dir_all(&charts)?;
        fs::write(charts.join("redis.svg"), svg::chart(&self.remote))?;
        fs::write(directory.join("benchmarks.md"), markdown::page(self))?;
        Ok(())
    }
}
