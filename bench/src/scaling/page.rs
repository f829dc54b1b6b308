//! The page `docs/scaling.md`.

use super::{
    costs::Costs,
    fleet::{BUSY, CALL_BYTES, MAX_CLIENTS, MAX_NODES, PER_INSTANCE, PER_LARGE_INSTANCE, Plan},
    simulate::{DEADLINE_US, NETWORK_US, Outcome, simulate},
    traffic::{KEYS, SLOTS, Shape},
};
use crate::report::Report;

/// Which part of all decisions the hot key has, where there is one.
const HOT_PART: f64 = 0.1;

/// The page.
pub fn page(report: &Report, costs: &Costs, plans: &[Plan]) -> String {
    let machine = &report.machine;
    let mut page = String::from(
        "# How far it scales\n\n\
         <!-- written by scripts/bench scaling; do not edit -->\n\n\
         How many Redis primaries carry 1, 10 and 100 million decisions per second, what ends first, and what a hot key \
         does. Nothing of that size was run. Three kinds of figures, kept apart: **measured** on one Redis, **computed** from \
         that, and **simulated** with the measured costs. The same figures give the same page:\n\n\
         <!-- not run: it takes half an hour -->\n```sh\nscripts/bench --write docs   # measures, writes docs/benchmarks/figures.json\n\
         scripts/bench scaling        # this page, from those figures\n```\n\n\
         ![primaries by decisions per second](benchmarks/scaling.svg)\n\n",
    );
    measured(&mut page, report, costs);
    assumed(&mut page, machine.cores);
    computed(&mut page, plans);
    simulated(&mut page, costs, plans);
    hot(&mut page, costs, plans);
    bottlenecks(&mut page, plans);
    page.push_str(NOT_MODELLED);
    page
}

fn measured(page: &mut String, report: &Report, costs: &Costs) {
    let machine = &report.machine;
    page.push_str(&format!(
        "## Measured\n\n\
         {date}, revision {revision}, {cores} cores ({model}), Redis {redis}; medians, from the tables *batch*, *random-keys* \
         and *crowd* of [the benchmarks](benchmarks.md). Token buckets, one tier, existing keys.\n\n\
         | CPU time per decision | us |\n|---|---:|\n\
         | Redis, one key per call, 64 connections | {alone:.2} |\n\
         | Redis, one key per call, one pipelined connection | {pipelined:.2} |\n\
         | Redis, 64 keys per call | {batched:.2} |\n\
         | Redis, as the gate batches random keys of 64 callers ({gate_batch:.0} decisions per call) | {gate:.2} |\n\
         | Redis, one hot key of 1000 callers in one process ({hot_batch:.0} decisions per call) | {hot:.2} |\n\
         | client, random keys | {client:.2} |\n\n\
         A line through one and 64 keys per call: a decision adds {decision:.2} us to a call, and over many connections the call \
         itself costs {call:.2} us.\n\n",
        date = machine.date,
        revision = machine.revision,
        cores = machine.cores,
        model = machine.model,
        redis = machine.redis,
        alone = costs.alone_us,
        pipelined = costs.alone_pipelined_us,
        batched = costs.batched_us,
        gate_batch = 1.0 / costs.gate_calls,
        gate = costs.gate_us,
        hot_batch = 1.0 / costs.hot_calls,
        hot = costs.hot_us,
        client = costs.client_us,
        decision = costs.decision_us(),
        call = costs.call_us(),
    ));
}

fn assumed(page: &mut String, cores: usize) {
    page.push_str(&format!(
        "## Assumed\n\n\
         * A primary is one thread, and is planned to be busy {busy:.0} % of the time.\n\
         * Its cores are as fast as those measured, where client and Redis shared {cores}. A machine of its own is kinder.\n\
         * On a Cluster a call decides checks on any slots of one primary. The {SLOTS} slots are dealt out equally, and keys fall into \
         them at random. Each process has a limit of calls in flight to each primary that follows the round trip, and what arrives \
         beyond it waits for the next call.\n\
         * A client process makes {instance:.0} k decisions per second and keeps one connection to each primary.\n\
         * A round trip takes {trip:.1} ms when nothing waits; the deadline is {deadline:.0} ms.\n\
         * A call and its reply are {CALL_BYTES:.0} bytes on the wire.\n\n",
        busy = BUSY * 100.0,
        instance = PER_INSTANCE / 1e3,
        trip = 2.0 * NETWORK_US / 1e3,
        deadline = DEADLINE_US / 1e3,
    ));
}

fn computed(page: &mut String, plans: &[Plan]) {
    page.push_str(
        "## Computed: primaries\n\n\
         Rate times cost per decision, over the planned load. The first column is without batches, as when many processes \
         ask each primary a little; the others need processes that are busy enough to fill batches.\n\n\
         | decisions/s | 1 key per call | 16 keys per call | 64 keys per call | client processes | client cores |\n\
         |---:|---:|---:|---:|---:|---:|\n",
    );
    for plan in plans {
        page.push_str(&format!(
            "| {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} |\n",
            rate(plan.decisions_per_s),
            plan.primaries,
            plan.primaries_16,
            plan.primaries_64,
            plan.instances,
            plan.client_cores
        ));
    }
    page.push('\n');
}

fn simulated(page: &mut String, costs: &Costs, plans: &[Plan]) {
    page.push_str(&format!(
        "## Simulated: the busiest primary\n\n\
         {keys} M keys, equally frequent or by Zipf's law (the n-th key has 1/n of the first one's share, which is 7 % of \
         everything), on the primaries of the first column. Shown is the primary that gets most. Arrivals are an open loop: they do \
         not wait for answers.\n\n\
         | decisions/s | keys | primaries | its share, against the mean | busy | decisions per call | p50 | p99 | late |\n\
         |---:|---|---:|---:|---:|---:|---:|---:|---:|\n",
        keys = KEYS / 1_000_000,
    ));
    for plan in plans {
        for (name, shape) in [("even", Shape::Even), ("Zipf", Shape::Zipf)] {
            let parts = shape.parts(plan.primaries as u64);
            let busiest = (0..parts.len()).max_by(|a, b| parts[*a].total_cmp(&parts[*b])).unwrap_or_default();
            let keys = shape.keys(busiest, plan.primaries as u64);
            let outcome = simulate(&keys, plan.decisions_per_s, plan.instances as u32, costs);
            page.push_str(&format!(
                "| {} | {name} | {:.0} | {:.1} x | {} |\n",
                rate(plan.decisions_per_s),
                plan.primaries,
                parts[busiest] * parts.len() as f64,
                figures(&outcome)
            ));
        }
    }
    page.push_str(
        "\nEvenly used keys need some more primaries than on paper, since slots and keys are not dealt out perfectly. With Zipf's law, \
         more primaries do not help the one with the first key: see below.\n\n",
    );
}

fn hot(page: &mut String, costs: &Costs, plans: &[Plan]) {
    page.push_str(&format!(
        "## Simulated: a hot key\n\n\
         One key, allowed, has {part:.0} % of all decisions. When its primary is busy, each process has about two calls in flight to it, and \
         what arrives meanwhile shares the next one. So what the key costs depends on how many processes ask, not on how many decisions: \
         {call:.0} us of one primary for every call, and twice as many calls in flight as there are processes. Once they fill what \
         the primary's other keys leave of its core, the wait is that product over what is left, and the other keys wait too.\n\n\
         | decisions/s | of the key | processes | busy | decisions per call | p50 | p99 | late |\n\
         |---:|---:|---:|---:|---:|---:|---:|---:|\n",
        part = HOT_PART * 100.0,
        call = costs.alone_us,
    ));
    let shape = Shape::Hot(HOT_PART);
    for plan in plans {
        for per_instance in [PER_INSTANCE, PER_LARGE_INSTANCE] {
            let primaries = plan.primaries as u64;
            let keys = (0..primaries as usize).map(|primary| shape.keys(primary, primaries));
            let keys = keys.into_iter().find(|keys| keys.has_first).expect("some primary has the first key");
            let instances = (plan.decisions_per_s / per_instance).ceil();
            let outcome = simulate(&keys, plan.decisions_per_s, instances as u32, costs);
            page.push_str(&format!(
                "| {} | {} | {instances:.0} | {} |\n",
                rate(plan.decisions_per_s),
                rate(plan.decisions_per_s * HOT_PART),
                figures(&outcome)
            ));
        }
    }
    let most = DEADLINE_US * (1.0 - BUSY) / (2.0 * costs.alone_us);
    page.push_str(&format!(
        "\n*late* answers come after the deadline: the rule's failure policy has answered by then. About {most:.0} processes can \
         share one saturated key before that, on a primary that is otherwise {busy:.0} % busy; more must ask through fewer, larger ones (`sluicegate serve`), or the limit must be split \
         into several keys. An *exhausted* hot key is cheaper: every process caches its denials, which cost \
         Redis one call per process and second.\n\n",
        busy = BUSY * 100.0,
    ));
}

fn bottlenecks(page: &mut String, plans: &[Plan]) {
    page.push_str(&format!(
        "## Computed: what ends next\n\n\
         Redis answers at most {MAX_CLIENTS:.0} clients unless `maxclients` is raised, and Redis Cluster is specified for up to about \
         {MAX_NODES:.0} nodes, replicas included.\n\n\
         | decisions/s | connections per primary | connections per process | nodes with one replica each | Mbit/s per primary | what ends \
         next |\n|---:|---:|---:|---:|---:|---|\n",
    ));
    for plan in plans {
        let nodes = 2.0 * plan.primaries;
        let next = if nodes > MAX_NODES {
            "the Cluster itself: too many nodes for one; several, or keys that share slots"
        } else if plan.instances > MAX_CLIENTS {
            "connections: processes must ask through fewer"
        } else {
            "the CPU of the primary with the hottest key"
        };
        page.push_str(&format!(
            "| {} | {:.0} | {:.0} | {nodes:.0} | {:.0} | {next} |\n",
            rate(plan.decisions_per_s),
            plan.instances,
            plan.primaries,
            plan.primary_mbit
        ));
    }
    page.push('\n');
}

const NOT_MODELLED: &str = "## Not modelled\n\n\
    * Failures, failovers, resharding, and clients that retry.\n\
    * Rules with several tiers: tiers of one subject share a slot and a call; a ceiling for everybody is a hot key, and on a Cluster \
    a call of its own.\n\
    * Sliding logs and counters, which cost more; denials, which are often answered from the denial cache without Redis.\n\
    * Redis with IO threads, several primaries per machine, real networks and their interrupts, TLS, persistence, replicas.\n\
    * The memory of counters (about 100 bytes each) and the CPU time of Cluster gossip.\n";

fn figures(outcome: &Outcome) -> String {
    format!(
        "{:.0} % | {:.2} | {} | {} | {:.1} %",
        outcome.busy * 100.0,
        outcome.decisions_per_call,
        time(outcome.p50_us),
        time(outcome.p99_us),
        outcome.late * 100.0
    )
}

fn time(us: f64) -> String {
    format!("{:.1} ms", us / 1e3)
}

/// Decisions per second: `10 M`, `100 k`.
fn rate(per_s: f64) -> String {
    if per_s >= 1e6 { format!("{:.0} M", per_s / 1e6) } else { format!("{:.0} k", per_s / 1e3) }
}
