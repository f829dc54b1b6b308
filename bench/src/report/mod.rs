//! Output of a run: tables for a terminal, pages and charts for the documentation.

mod fronts;
mod holds;
mod leases;
mod markdown;
mod network;
mod outage;
pub mod svg;
mod text;

use std::{fs, path::Path};

use anyhow::Result;
use serde::{Deserialize, Serialize};

pub use self::text::text;
use crate::{machine::Machine, network::NetworkReport, stats::Table};

/// The results of one run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub machine: Machine,
    pub command: String,
    /// The load averages after the last run.
    pub load_after: String,
    pub remote: Vec<Table>,
    pub local: Vec<Table>,
}

impl Report {
    /// Returns all tables, in order.
    pub fn tables(&self) -> impl Iterator<Item = &Table> {
        self.remote.iter().chain(&self.local)
    }

    /// Returns when and where the figures were measured, as sentences.
    fn environment(&self) -> String {
        let Machine { date, revision, cores, model, kernel, redis, rustc, load, peers } = &self.machine;
        let after = &self.load_after;
        let peers = if peers.is_empty() { String::new() } else { format!(" {}.", peers.join(", ")) };
        format!(
            "{date}, revision {revision}: {cores} cores ({model}), Linux {kernel}, Redis {redis}, {rustc}; load averages {load} before, \
             {after} after.{peers}"
        )
    }

    /// Writes the page, its chart and its figures into `directory`.
    pub fn write(&self, directory: &Path) -> Result<()> {
        let charts = directory.join("benchmarks");
        fs::create_dir_all(&charts)?;
        fs::write(charts.join("redis.svg"), svg::chart(&self.remote))?;
        fs::write(charts.join("figures.json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(directory.join("benchmarks.md"), markdown::page(self))?;
        Ok(())
    }

    /// Writes the page of `fronts` into `directory`.
    pub fn write_fronts(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory)?;
        fs::write(directory.join("benchmarks-fronts.md"), fronts::page(self))?;
        Ok(())
    }

    /// Writes the page of `leases` and its figures into `directory`.
    pub fn write_leases(&self, directory: &Path) -> Result<()> {
        let figures = directory.join("benchmarks");
        fs::create_dir_all(&figures)?;
        fs::write(figures.join("leases.json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(directory.join("benchmarks-leases.md"), leases::page(self))?;
        Ok(())
    }

    /// Writes the page of `holds` and its figures into `directory`.
    pub fn write_holds(&self, directory: &Path) -> Result<()> {
        let figures = directory.join("benchmarks");
        fs::create_dir_all(&figures)?;
        fs::write(figures.join("holds.json"), serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(directory.join("benchmarks-holds.md"), holds::page(self))?;
        Ok(())
    }

    /// Writes the page of `outage` into `directory`.
    pub fn write_outage(&self, directory: &Path) -> Result<()> {
        fs::create_dir_all(directory)?;
        fs::write(directory.join("benchmarks-outage.md"), outage::page(self)?)?;
        Ok(())
    }
}

/// Writes the page of `network`, its chart and its figures into `directory`.
pub fn write_network(report: &NetworkReport, directory: &Path) -> Result<()> {
    let charts = directory.join("benchmarks");
    fs::create_dir_all(&charts)?;
    fs::write(charts.join("network.svg"), network::chart::chart(&report.points))?;
    fs::write(charts.join("network.json"), serde_json::to_string(report)? + "\n")?;
    fs::write(directory.join("benchmarks-network.md"), network::page(report))?;
    Ok(())
}
