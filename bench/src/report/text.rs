//! The report as aligned tables for a terminal.

use std::fmt::Write;

use super::Report;
use crate::stats::{Ratio, Table};

/// Returns the whole report.
pub fn text(report: &Report) -> String {
    let machine = &report.machine;
    let mut out = format!(
        "{} cores, {}, Redis {}; load {} before, {} after; medians (min..max)\n",
        machine.cores, machine.model, machine.redis, machine.load, report.load_after
    );
    for table in report.tables() {
        push(&mut out, &format!("\n{} ({} rounds): {}", table.name, table.rounds, table.what));
        push(&mut out, &aligned(&cells(table)));
        for ratio in &table.ratios {
            push(&mut out, &format!("  {:<78} {}", ratio.what, verdict(ratio)));
        }
    }
    out
}

/// Returns a ratio with its spread, its target and whether it is reached.
pub fn verdict(ratio: &Ratio) -> String {
    let stat = ratio.text();
    match ratio.target {
        None => format!("{stat} x"),
        Some(target) if target.is_reached(&ratio.stat) => {
            format!("{stat} x; target {}: reached", target.text())
        }
        Some(target) => format!("{stat} x; target {}: NOT reached", target.text()),
    }
}

/// Returns the heading and the rows of a table as text.
pub fn cells(table: &Table) -> Vec<Vec<String>> {
    let mut heading = vec![String::new()];
    heading.extend(table.columns.iter().map(|column| column.title.to_string()));
    let mut lines = vec![heading];
    for row in &table.rows {
        let figures = table.columns.iter().zip(&row.cells);
        let mut line = vec![row.contestant.clone()];
        line.extend(figures.map(|(column, stat)| stat.map_or(String::new(), |stat| column.write(&stat))));
        lines.push(line);
    }
    lines
}

fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines[0].len();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or_default();
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut out = String::new();
    for line in lines {
        out.push_str(&format!("  {:<width$}", line[0], width = widths[0]));
        for (cell, width) in line.iter().zip(&widths).skip(1) {
            out.push_str(&format!("  {cell:>width$}"));
        }
        out.push('\n');
    }
    out.pop();
    out
}

fn push(out: &mut String, line: &str) {
    writeln!(out, "{line}").expect("writing to a String does not fail");
}
