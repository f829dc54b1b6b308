//! The page `docs/benchmarks-fronts.md`.

use super::{
    Report,
    markdown::{section, targets},
};
use crate::stats::ABOUT;

/// The page.
pub fn page(report: &Report) -> String {
    let machine = &report.machine;
    let mut page = format!(
        "# Benchmarks: the server's front ends\n\n\
         <!-- written by scripts/bench fronts --write docs; do not edit -->\n\n\
         {date}, revision {revision}: {cores} cores ({model}), Linux {kernel}, {rustc}; load averages {load} before, {after} \
         after: a load above that of the bench's own {cores} cores says that others worked on the machine too. {peers}.\n\n\
         <!-- not run: it takes minutes -->\n```sh\n{command}\n```\n\n\
         Every server is a process of its own with a thread for each core, and shares the {cores} cores with the clients, which have a \
         thread for each core too, each with connections of its own. Servers take \
         turns, in as many rounds as each table says; each figure is the median, with (lowest..highest). A ratio is taken \
         within each round, and its median shown: trust ratios, not rates. *about* is reached within a factor of {ABOUT}.\n\n\
         *sluicegate* is the whole server as `sluicegate serve` runs it: memory store, one rule, no tokens, metrics and \
         top keys as always, nobody who listens to spans. *always-allow* reads the same requests with the same libraries and \
         says yes: over RESP with the server's own decoder, down to the numbers of the command and of its answer, over HTTP as axum does it, over \
         gRPC as tonic does. *throttlecrab* is its \
         server with its defaults. 100,000 users, who all may pass. CPU times have the kernel's part in them, and are per answer.\n\n\
         Tables named after a program are asked by it instead of the bench's own clients, to see whether these flatter anybody.\n\n\
         ## What is not measured\n\n\
         * A network, and clients on another machine: here they take up to half of the processor, so that \
         servers differ more than their rates say, as their CPU times show.\n\
         * TLS, tokens, Redis behind the server, many rules, connections that come and go.\n\
         * Latencies, and overload: clients wait for their answers.\n\n",
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

/// Why some targets are not reached. Written by hand, from profiles and experiments.
const LIMITS: &str = include_str!("fronts-limits.md");
