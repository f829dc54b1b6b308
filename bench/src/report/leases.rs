//! The page `docs/benchmarks-leases.md`.

use super::{
    Report,
    markdown::{section, targets},
};
use crate::stats::ABOUT;

/// Returns the page.
pub fn page(report: &Report) -> String {
    let mut page = format!(
        "# Benchmarks of leases\n\n\
         <!-- written by scripts/bench leases --write docs; do not edit -->\n\n\
         {environment} Command: `{command}`.\n\n\
         A limit with a lease lets each process charge requests of a hot key in advance and decide them without a call to Redis. The \
         leases of this page are 1 % of the limit with the default lifetime. Clients and Redis share the {cores} cores. Contestants take \
         turns; each figure is the median of the rounds, with (lowest..highest). A ratio is computed within each round, and its median is \
         shown. Identical runs on a shared machine differ by 30 %: compare ratios and CPU times, not rates. *about* is reached within a \
         factor of {ABOUT}.\n\n\
         * *hand-written* is redis-rs with a reconnecting multiplexed connection and a plain script called by its digest \
         (`bench/src/remote/lua`).\n\
         * *sluicegate* is `Limiter` over a `RedisStore` with default options, except for a deadline of 5 s.\n\n\
         A process keeps at most 65,536 sets of counters with leases or recent demand, of at most 512 bytes each without the text of long \
         keys: 32 MiB. A test asserts both bounds. The counts that find hot keys take 512 KiB, once a limit with a lease is used.\n\n",
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
const LIMITS: &str = include_str!("leases-limits.md");

const NOT_MEASURED: &str = "## What is not measured\n\n\
    * Separate machines, packet loss and jitter: see [benchmarks with a network round trip](benchmarks-network.md).\n\
    * Checks of several limits, costs above 1, and processes that crash with leases.\n\
    * Redis with persistence or replicas, Cluster, TLS.\n\
    * Demand that stops and starts again: an idle lease is returned, and the next requests go to Redis.\n\n";
