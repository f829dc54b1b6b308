//! The page `docs/benchmarks.md`.

use super::{Report, text};
use crate::stats::{ABOUT, Table};

/// Returns the page.
pub fn page(report: &Report) -> String {
    let mut page = format!(
        "# Benchmarks\n\n\
         <!-- written by scripts/bench --write docs; do not edit -->\n\n\
         The figures below are on loopback. For deployments with a network between client and Redis, see [benchmarks with a \
         network round trip](benchmarks-network.md).\n\n\
         {environment}\n\n\
         <!-- not run: it takes half an hour -->\n```sh\n{command}\n```\n\n\
         Client and Redis share the {cores} cores. Contestants take turns for the number of rounds given with each table; each figure is \
         the median, with (lowest..highest). A ratio is computed within each round, and its median is shown. Identical runs on a shared \
         machine differ by 30 %: compare ratios and CPU per decision, not rates, and treat a ratio below 1.3 as noise unless its whole \
         spread is on one side of 1. *about 1.0* is reached up to {ABOUT}.\n\n\
         ![decisions per second, Redis-backed](benchmarks/redis.svg)\n\n",
        environment = report.environment(),
        cores = report.machine.cores,
        command = report.command,
    );
    page.push_str(NOT_MEASURED);
    targets(&mut page, report);
    page.push_str(LIMITS);
    page.push_str("\n## On Redis\n");
    report.remote.iter().for_each(|table| section(&mut page, table));
    page.push_str("\n## In process\n");
    report.local.iter().for_each(|table| section(&mut page, table));
    page
}

/// Appends a table of all targets and whether they are reached.
pub fn targets(page: &mut String, report: &Report) {
    page.push_str("## Targets\n\n| table | ratio | median (min..max) | target | |\n|---|---|---|---|---|\n");
    for table in report.tables() {
        for ratio in &table.ratios {
            let Some(target) = ratio.target else { continue };
            let reached = if target.is_reached(&ratio.stat) { "reached" } else { "**not reached**" };
            let stat = ratio.text();
            page.push_str(&format!(
                "| {} | {} | {stat} | {} | {reached} |\n",
                table.name,
                ratio.what,
                target.text()
            ));
        }
    }
}

/// Reasons for missed targets. Written by hand, from profiles and experiments.
const LIMITS: &str = include_str!("limits.md");

const NOT_MEASURED: &str = "## What is not measured\n\n\
    * A network, an open loop, and several processes with one Redis: see [benchmarks with a network round trip](benchmarks-network.md).\n\
    * Redis on its own machine: here client and Redis compete for CPU time.\n\
    * Redis with persistence or replicas, Cluster, TLS.\n\
    * Denials that alternate with admissions: the hot key is either never or always exhausted.\n\
    * In process: the limiter above the store (rules, labels, deadline), and eviction under memory pressure.\n\
    * The server's front ends: see [their benchmarks](benchmarks-fronts.md).\n\
    * Limits with leases: see [their benchmarks](benchmarks-leases.md).\n\
    * Holds: see [their benchmarks](benchmarks-holds.md).\n\n\
    *hand-written* is redis-rs with a reconnecting multiplexed connection and a plain script called by its digest \
    (`bench/src/remote/lua`). *sluicegate* is `Limiter` over a `RedisStore` with default options, except for a deadline of 5 s. \
    CPU times and script calls are per decision; the CPU time of the client includes the bench's own loop.\n\n\
    *limitador* is its library with the Redis storage, built with a stub for RocksDB, which is not used here; its cached Redis \
    storage is faster but inexact, and is not measured. *limits* and *rate-limiter-flexible* are processes with one event loop each \
    (`bench/peers`), with the fastest client and settings found; a service in Python or Node would start several.\n\n";

/// Appends a table and its ratios.
pub fn section(page: &mut String, table: &Table) {
    let rounds = if table.rounds == 1 { "round" } else { "rounds" };
    page.push_str(&format!("\n### {}\n\n{}. {} {rounds}.\n\n", table.name, table.what, table.rounds));
    for (number, line) in text::cells(table).iter().enumerate() {
        page.push_str(&format!("| {} |\n", line.join(" | ")));
        if number == 0 {
            page.push_str(&format!("|---|{}\n", "---:|".repeat(line.len() - 1)));
        }
    }
    if !table.ratios.is_empty() {
        page.push('\n');
    }
    for ratio in &table.ratios {
        page.push_str(&format!("* {}: {}\n", ratio.what, text::verdict(ratio)));
    }
}
