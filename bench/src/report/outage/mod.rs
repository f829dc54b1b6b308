//! The page `docs/benchmarks-outage.md`.

use anyhow::Result;

use super::{
    Report,
    markdown::{section, targets},
};
use crate::stats::{Column, Row, Stat, Table};

/// The output of `scripts/bench outage --json` at an earlier revision. It is a fixed reference and not measured again.
const BEFORE: &str = include_str!("before.json");

/// Returns the page.
pub fn page(report: &Report) -> Result<String> {
    let before: Report = serde_json::from_str(BEFORE)?;
    let mut page = format!(
        "# Benchmarks with store failures\n\n\
         <!-- written by scripts/bench outage --write docs; do not edit -->\n\n\
         How many decisions does the [failure policy](configuration.md#failure-policies) make when connections to Redis are lost, when Redis \
         is unreachable for a short time, and when the CPU is busy? Use these figures to choose `store.deadline` and \
         `on_store_failure`.\n\n\
         {environment} Command: `{command}`.\n\n",
        environment = report.environment(),
        command = report.command,
    );
    page.push_str(CONCLUSIONS);
    page.push_str(METHOD);
    page.push_str(&format!(
        "* *before* is revision {revision}: the last one before lost connections were replaced immediately, and before `local` counted the \
         usage that the store last reported. Its figures are a fixed reference: they were measured once with this benchmark ({date}, \
         {cores} cores, {model}; load averages {load} before, {after} after, while other programs used the machine for half of the \
         time) and are not repeated in later runs.\n\n",
        revision = before.machine.revision,
        date = before.machine.date,
        cores = before.machine.cores,
        model = before.machine.model,
        load = before.machine.load,
        after = before.load_after,
    ));
    page.push_str(NOT_MEASURED);
    targets(&mut page, report);
    page.push_str(LIMITS);
    page.push_str("\n## Figures\n");
    for table in report.tables() {
        let earlier = before.tables().find(|earlier| earlier.name == table.name);
        section(&mut page, &with_before(table, earlier));
    }
    Ok(page)
}

/// What the figures mean for a deadline and a failure policy. Written by hand.
const CONCLUSIONS: &str = include_str!("conclusions.md");
/// Reasons for missed targets. Written by hand, from experiments.
const LIMITS: &str = include_str!("limits.md");

const METHOD: &str = "## Method\n\n\
    Checks arrive as an open loop (Poisson) at one `Limiter` over a private Redis, with default options except for the deadline where it is \
    given. Faults of connections are injected by a proxy. Each figure is the median of the rounds, with (lowest..highest).\n\n\
    * *degraded* is the share of decisions without the store. Denials from the denial cache are not counted, because they need no store.\n\
    * *longest degraded period* is the longest time in which every decision was degraded, from sending the first check to the answer of the \
    last.\n\
    * *over-admitted* is what was admitted beyond the limit in any window, in percent of the limit. Only admissions that were certainly \
    inside the window count.\n\
    * *background load* are threads that spin in cycles of 10 to 30 ms: one per core up to 100 %, four per core at 400 %. They \
    compete with the callers and with Redis.\n";

const NOT_MEASURED: &str = "## What is not measured\n\n\
    * Several processes, `sluicegate serve` and its front ends, Sentinel, Cluster.\n\
    * Packet loss and congestion of a real network. Redis and its callers share the cores of one machine.\n\
    * CPU quotas of containers, which stop a process for tens of milliseconds at a time, and other priorities or schedulers.\n\
    * The failure policy `closed`: it admits nothing without the store.\n\n";

/// Returns the table with the earlier figures next to those of this run.
fn with_before(table: &Table, earlier: Option<&Table>) -> Table {
    let columns = table.columns.iter().flat_map(|column| {
        ["before", "after"]
            .map(|time| Column { title: format!("{time}: {}", column.title).into(), digits: column.digits })
    });
    let rows = table.rows.iter().map(|row| {
        let earlier_row =
            earlier.and_then(|table| table.rows.iter().find(|old| old.contestant == row.contestant));
        let earlier_cell = |place: usize| -> Option<Stat> { *earlier_row?.cells.get(place)? };
        let cells = row.cells.iter().enumerate().flat_map(|(place, cell)| [earlier_cell(place), *cell]);
        Row { contestant: row.contestant.clone(), cells: cells.collect() }
    });
    Table { columns: columns.collect(), rows: rows.collect(), ..table.clone() }
}
