//! The page `docs/benchmarks-fronts.md`.

use super::{
    Report,
    markdown::{section, targets},
};
use crate::stats::ABOUT;

/// Returns the page.
pub fn page(report: &Report) -> String {
    let machine = &report.machine;
    let mut page = format!(
        "# Benchmarks: front ends and the tower layer\n\n\
         <!-- written by scripts/bench fronts --write docs; do not edit -->\n\n\
         {date}, revision {revision}: {cores} cores ({model}), Linux {kernel}, {rustc}; load averages {load} before, {after} \
         after. A load average above {cores} means that other programs used the machine at the same time. {peers}.\n\n\
         <!-- not run: it takes minutes -->\n```sh\n{command}\n```\n\n\
         Every server is a process with one thread per core. The clients have one thread per core too, each with its own connections, and \
         share the {cores} cores with the server. Contestants take turns for the number of rounds given with each table; each figure is the \
         median, with (lowest..highest). A ratio is computed within each round, and its median is shown: compare ratios, not rates. *about* is \
         reached within a factor of {ABOUT}. The limits of the 100,000 users are never reached. CPU times are per response and include the \
         kernel's.\n\n\
         * *sluicegate* is the server as `sluicegate serve` runs it: memory store, one rule, no tokens, metrics and heavy hitters enabled, no \
         trace exporter.\n\
         * *always-allow* decodes the same requests with the same libraries and allows all of them: RESP with the server's own decoder, \
         including the numbers of the command and the reply; HTTP with axum; gRPC with tonic.\n\
         * *throttlecrab* is its server with default settings, where it has the same front end.\n\
         * *sluicegate-tower* is an axum app with `RateLimitLayer`, *axum* the same app without the layer.\n\n\
         In the tables *redis-benchmark*, *wrk* and *h2load* these programs send the requests, to check that the bench's own clients do not \
         favor a server.\n\n\
         ## What is not measured\n\n\
         * A network, and clients on other machines: here the clients use up to half of the CPU time, so the rates of the servers differ \
         less than their CPU times.\n\
         * TLS, tokens, Redis behind the server, many rules, short-lived connections.\n\
         * Latency and overload: the clients are a closed loop.\n\n",
        date = machine.date,
        revision = machine.revision,
        cores = machine.cores,
        model = machine.model,
        kernel = machine.kernel,
        rustc = machine.rustc,
        load = machine.load,
        after = report.load_after,
        peers = machine.peers.join(", "),
        command = report.command,
    );
    targets(&mut page, report);
    page.push_str(LIMITS);
    page.push_str("\n## Figures\n");
    report.tables().for_each(|table| section(&mut page, table));
    page
}

/// Written by hand, from profiles and experiments.
const LIMITS: &str = include_str!("fronts-limits.md");
