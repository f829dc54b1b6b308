//! The scaling page: measured costs, calculations based on them, and a small simulation of queueing and uneven keys.
//!
//! It measures nothing and needs no server: the same figures give the same page.

mod chart;
mod costs;
mod fleet;
mod leases;
mod page;
mod simulate;
mod traffic;

use std::{fs, path::Path};

use anyhow::{Context, Result};

use self::{costs::Costs, fleet::SIZES, leases::LeaseCosts};
use crate::report::Report;

/// Reads the figures below `directory`, and writes the page and its chart there.
pub fn write(directory: &Path) -> Result<()> {
    let figures = directory.join("benchmarks/figures.json");
    let text = fs::read_to_string(&figures)
        .with_context(|| format!("no {}: scripts/bench --write writes it", figures.display()))?;
    let report: Report = serde_json::from_str(&text)?;
    let costs = Costs::of(&report)?;
    let figures = directory.join("benchmarks/leases.json");
    let text = fs::read_to_string(&figures)
        .with_context(|| format!("no {}: scripts/bench leases --write writes it", figures.display()))?;
    let leases = LeaseCosts::of(&serde_json::from_str(&text)?, &costs)?;
    let plans: Vec<_> = SIZES.into_iter().map(|size| fleet::Plan::of(size, &costs)).collect();
    fs::write(directory.join("benchmarks/scaling.svg"), chart::chart(&costs))?;
    fs::write(directory.join("scaling.md"), page::page(&report, &costs, &leases, &plans))?;
    Ok(())
}
