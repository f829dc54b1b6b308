//! The page `docs/benchmarks-holds.md`.

use super::{
    Report,
    markdown::{section, targets},
};
use crate::stats::ABOUT;

/// Returns the page.
pub fn page(report: &Report) -> String {
    let mut page = format!(
        "# Benchmarks of holds\n\n\
         <!-- written by scripts/bench holds --write docs; do not edit -->\n\n\
         {environment} Command: `{command}`.\n\n\
         An operation is one hold and its settlement or release. Clients and Redis share the {cores} cores. Contestants take turns; \
         each figure is the median of the rounds, with (lowest..highest). A ratio is computed within each round, and its median is \
         shown. Identical runs on a shared machine differ by 30 %: compare ratios and CPU times, not rates. *about* is reached within a \
         factor of {ABOUT}.\n\n\
         * *hand-written* is redis-rs with a reconnecting multiplexed connection and two plain scripts called by their digests \
         (`bench/src/remote/lua`): one charges the estimate and stores it under the id of the request, the other reads it and corrects \
         the counter. The in-flight limit is a sorted set of ids, ordered by expiry. Unlike sluicegate, it charges again if a hold is \
         repeated, does not correct a hold that has expired, and keeps no record of a settled one.\n\
         * *sluicegate* is `Limiter` over a `RedisStore` with default options, except for a deadline of 5 s: `hold` and `Hold::settle` or \
         `Hold::release`.\n\n",
        environment = report.environment(),
        cores = report.machine.cores,
        command = report.command,
    );
    page.push_str(NOT_MEASURED);
    targets(&mut page, report);
    page.push_str(LIMITS);
    page.push_str("\n## Figures\n");
    report.tables().for_each(|table| section(&mut page, table));
    page
}

/// Written by hand, from profiles and experiments.
const LIMITS: &str = include_str!("holds-limits.md");

const NOT_MEASURED: &str = "## What is not measured\n\n\
    * The front ends, the tower layer and Envoy, which add their own cost to each hold and settlement.\n\
    * Separate machines, packet loss and jitter.\n\
    * Renewals, repeated and expired holds, and settlements that wait for a store that is down.\n\
    * The removal of ended holds: Redis keeps the record of a settled hold for a minute, so that a repeated settlement has no effect. \
    Most records expire after the turn that made them.\n\
    * Redis with persistence or replicas, Cluster, TLS.\n\n";
