//! The page `docs/benchmarks-network.md`.

pub mod chart;

use std::time::Duration;

use super::markdown::{section, targets};
use crate::{
    network::{NetworkReport, matrix, matrix::Point, milliseconds},
    stats::ABOUT,
};

/// Returns the page.
pub fn page(network: &NetworkReport) -> String {
    let report = &network.report;
    let mut page = format!(
        "# Benchmarks with a network round trip\n\n\
         <!-- written by scripts/bench network --write docs; do not edit -->\n\n\
         {environment} Command: `{command}`.\n\n\
         ![decisions per second by round trip](benchmarks/network.svg)\n\n\
         A proxy between the clients and Redis delays every byte by half a round trip in each direction. *loopback* is a direct \
         connection. Contestants take turns; each figure is the median of the rounds, with (lowest..highest). A ratio is computed \
         within each round. Identical runs on a shared machine differ by 30 %: compare ratios and CPU times, not rates. *about* \
         is reached within a factor of {ABOUT}.\n\n\
         * *hand-written* is redis-rs with one multiplexed connection, and a plain script called by its digest.\n\
         * *fred* is a pool of four connections with the same script.\n\
         * *sluicegate* is `Limiter` over a `RedisStore` with default options, except for a deadline of 5 s.\n\n\
         All set `TCP_NODELAY`. The scripts are in `bench/src/remote/lua`; limits are never reached, unless the table states otherwise.\n\n",
        environment = report.environment(),
        command = report.command,
    );
    page.push_str(NOT_MEASURED);
    targets(&mut page, report);
    page.push_str(LIMITS);
    matrices(&mut page, &network.points);
    page.push_str("\n## Figures\n");
    let is_compact = |name: &str| name.starts_with(matrix::NAME) && name != matrix::SUMMARY;
    report.tables().filter(|table| !is_compact(&table.name)).for_each(|table| section(&mut page, table));
    page
}

const LIMITS: &str = include_str!("limits.md");

const NOT_MEASURED: &str = "## What is not measured\n\n\
    * Packet loss, limited bandwidth and jitter: the proxy delays and does nothing else. Connections are established without a delay.\n\
    * Separate machines: clients, proxy and Redis share the cores. The proxy takes CPU time that neither client nor Redis can use, \
    so that rates at high load are lower than with a real network.\n\
    * Accuracy below about 50 us: the proxy adds the time in which the kernel wakes its thread.\n\
    * Denials, failure policies, several rules per check, TLS, Cluster, Redis with persistence or replicas.\n\
    * CPU times of the client include the bench's own loop; those of Redis are its main thread's.\n\n";

/// The ratios of the matrix, one table for each workload. All other figures of the points are in `network.json`.
fn matrices(page: &mut String, points: &[Point]) {
    if points.is_empty() {
        return;
    }
    page.push_str(
        "\n## Closed loop\n\nDecisions per second of sluicegate in thousands, and its ratio to the better peer of each point. Latencies and CPU \
         times of all points are in [`network.json`](benchmarks/network.json).\n",
    );
    for group in points.chunk_by(|a, b| (a.algorithm, a.keys) == (b.algorithm, b.keys)) {
        let mut callers: Vec<usize> = group.iter().map(|point| point.callers).collect();
        callers.sort_unstable();
        callers.dedup();
        page.push_str(&format!("\n### {}, {}\n\n| round trip |", group[0].algorithm, group[0].keys));
        callers.iter().for_each(|callers| page.push_str(&format!(" {} |", matrix::callers(*callers))));
        page.push_str(&format!("\n|---|{}\n", "---:|".repeat(callers.len())));
        for row in group.chunk_by(|a, b| a.round_trip_us == b.round_trip_us) {
            page.push_str(&format!("| {} |", milliseconds(Duration::from_micros(row[0].round_trip_us))));
            for point in row {
                let rate = point.ours().map_or(0.0, |ours| ours.rate.median / 1e3);
                page.push_str(&format!(" {rate:.1} ({:.2}) |", point.ratio.median));
            }
            page.push('\n');
        }
    }
}
