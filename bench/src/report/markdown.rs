//! The page `docs/benchmarks.md`.

use super::{Report, text};
use crate::stats::{ABOUT, Table};

/// The page.
pub fn page(report: &Report) -> String {
    let machine = &report.machine;
    let mut page = format!(
        "# Benchmarks\n\n\
         <!-- written by scripts/bench --write docs; do not edit -->\n\n\
         **With a network between client and Redis**, which is how it is deployed: [benchmarks with a network round \
         trip](benchmarks-network.md). The figures below are on loopback.\n\n\
         {date}, revision {revision}: {cores} cores ({model}), Linux {kernel}, Redis {redis}, {rustc}; \
         load averages {load} before, {after} after. {peers}.\n\n\
         <!-- not run: it takes half an hour -->\n```sh\n{command}\n```\n\n\
         Client and Redis share the {cores} cores. Contestants take turns, in as many rounds as each table says; each figure is \
         the median, with (lowest..highest). A ratio is taken within each round, and its median shown: identical runs on a shared machine \
         differ by 30 %, so trust ratios and CPU per decision, not rates; take a ratio below 1.3 as noise unless its whole \
         spread is on one side. *about 1.0* is reached up to {ABOUT}.\n\n\
         ![decisions per second, Redis-backed](benchmarks/redis.svg)\n\n",
        date = machine.date,
        revision = machine.revision,
        cores = machine.cores,
        model = machine.model,
        kernel = machine.kernel,
        redis = machine.redis,
        rustc = machine.rustc,
        load = machine.load,
        after = report.load_after,
        peers = machine.peers.join(", "),
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

/// Every target, and whether it is reached.
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

/// Why some targets are not reached. Written by hand, from profiles and experiments.
const LIMITS: &str = include_str!("limits.md");

const NOT_MEASURED: &str = "## What is not measured\n\n\
    * A network, an open loop, and several processes at one Redis: they have [a page of their own](benchmarks-network.md).\n\
    * A machine of Redis's own: here the client takes CPU time that Redis could use, and the other way round.\n\
    * Redis with persistence or replicas, Cluster, TLS.\n\
    * Refusals that alternate with admissions; the hot key is either never or always used up.\n\
    * In process: the limiter above the store (rules, labels, deadline), and eviction under memory pressure.\n\
    * The server's front ends: they have [a page of their own](benchmarks-fronts.md).\n\n\
    *hand-written* is redis-rs with a reconnecting multiplexed connection and a plain script called by its digest \
    (`bench/src/remote/lua`); *sluicegate* is `Limiter` over a `RedisStore` with its default options but for a deadline of 5 s. \
    CPU times and script calls are per decision; CPU of the client includes the bench's own loop.\n\n\
    *limitador* is its library over its Redis storage (its cached one is faster and inexact, and does not take part), built \
    with a stand-in for RocksDB, which it does not use here. *limits* and *rate-limiter-flexible* are processes of their \
    own with one event loop each (`bench/peers`), with the fastest client and settings found; a service in Python or Node \
    would start several.\n\n";

/// A table and its ratios.
pub fn section(page: &mut String, table: &Table) {
    page.push_str(&format!("\n### {}\n\n{}. {} rounds.\n\n", table.name, table.what, table.rounds));
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
