//! The page `docs/scaling.md`.

use super::{
    costs::Costs,
    fleet::{BUSY, CALL_BYTES, MAX_CLIENTS, MAX_NODES, PER_INSTANCE, PER_LARGE_INSTANCE, Plan},
    leases::{LeaseCosts, lease_section},
    simulate::{DEADLINE_US, NETWORK_US, Outcome, simulate},
    traffic::{KEYS, SLOTS, Shape},
};
use crate::report::Report;

/// The share of all decisions that the hot key has.
const HOT_PART: f64 = 0.1;

/// The page.
pub fn page(report: &Report, costs: &Costs, leases: &LeaseCosts, plans: &[Plan]) -> String {
    let machine = &report.machine;
    let mut page = String::from(
        "# Scaling\n\n\
         <!-- written by scripts/bench scaling; do not edit -->\n\n\
         This page estimates how many Redis primaries 1, 10 and 100 million decisions per second need, what the next \
         bottleneck is, and how a hot key behaves without and with leases. No deployment of that size was run. The figures are **measured** on one \
         Redis, **computed** from the measurements, or **simulated** with the measured costs. The page is generated from the \
         figures:\n\n\
         <!-- not run: it takes half an hour -->\n```sh\nscripts/bench --write docs   # measures, writes \
         docs/benchmarks/figures.json\n\
         scripts/bench leases --write docs   # docs/benchmarks/leases.json\n\
         scripts/bench scaling        # this page, from those figures\n```\n\n\
         ![primaries by decisions per second](benchmarks/scaling.svg)\n\n",
    );
    measured(&mut page, report, costs);
    assumed(&mut page, machine.cores);
    computed(&mut page, plans);
    simulated(&mut page, costs, plans);
    hot(&mut page, costs, plans);
    lease_section(&mut page, leases);
    bottlenecks(&mut page, plans);
    page.push_str(NOT_MODELLED);
    page
}

fn measured(page: &mut String, report: &Report, costs: &Costs) {
    let machine = &report.machine;
    page.push_str(&format!(
        "## Measured\n\n\
         {date}, revision {revision}, {cores} cores ({model}), Redis {redis}; medians, from the tables *batch*, *random-keys* \
         and *many-callers* of [the benchmarks](benchmarks.md). Token buckets, one tier, existing keys.\n\n\
         | CPU time per decision | us |\n|---|---:|\n\
         | Redis, one key per call, 64 connections | {alone:.2} |\n\
         | Redis, one key per call, one pipelined connection | {pipelined:.2} |\n\
         | Redis, 64 keys per call | {batched:.2} |\n\
         | Redis, random keys of 64 callers in batches ({random_batch:.0} decisions per call) | {random:.2} |\n\
         | Redis, one hot key of 1000 callers in one process ({hot_batch:.0} decisions per call) | {hot:.2} |\n\
         | client, random keys | {client:.2} |\n\n\
         By linear interpolation between one and 64 keys per call, a decision adds {decision:.2} us to a call, and over many \
         connections the call itself costs {call:.2} us.\n\n",
        date = machine.date,
        revision = machine.revision,
        cores = machine.cores,
        model = machine.model,
        redis = machine.redis,
        alone = costs.alone_us,
        pipelined = costs.alone_pipelined_us,
        batched = costs.batched_us,
        random_batch = 1.0 / costs.random_calls,
        random = costs.random_us,
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
         * Its cores are as fast as those measured, where client and Redis shared {cores}. A dedicated machine has no such \
         contention.\n\
         * On a Cluster a call decides checks on any slots of one primary. The {SLOTS} slots are distributed equally, and \
         keys are distributed over them at random. Each process limits its calls in flight to each primary by the round trip, \
         and further requests wait for the next call.\n\
         * A client process makes {instance:.0} k decisions per second and keeps one connection to each primary.\n\
         * A round trip takes {trip:.1} ms without queueing; the deadline is {deadline:.0} ms.\n\
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
         Rate times cost per decision, divided by the planned load. The first column is without batches, which is the case if \
         many processes send few requests to each primary; the others need processes that are busy enough to fill batches.\n\n\
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
         {keys} M keys, equally frequent or with a Zipf distribution (the n-th key has 1/n of the share of the first, which \
         is 7 % of all decisions), on the primaries of the first column. The table shows the busiest primary. Arrivals are an \
         open loop: they do not wait for replies.\n\n\
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
        "\nEvenly used keys need slightly more primaries than computed, because slots and keys are not distributed perfectly. \
         With a Zipf distribution, more primaries do not relieve the one with the first key: see below.\n\n",
    );
}

fn hot(page: &mut String, costs: &Costs, plans: &[Plan]) {
    page.push_str(&format!(
        "## Simulated: a hot key\n\n\
         One key, allowed, has {part:.0} % of all decisions. When its primary is busy, each process has about two calls in \
         flight to it, and requests that arrive until one of them returns share the next call. The cost of the key therefore depends on the \
         number of processes, not on the number of decisions: {call:.0} us of one primary for every call, and twice as many \
         calls in flight as processes. Once these calls use all the CPU time that the other keys of the primary leave, the \
         wait is that product divided by the remaining share, and the other keys wait too.\n\n\
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
        "\n*late* replies arrive after the deadline, when the rule's failure policy has already decided. About {most:.0} \
         processes can \
         share one saturated key before that, on a primary that is otherwise {busy:.0} % busy. With more processes, let them share \
         fewer decision servers (`sluicegate serve`), lease units (see below), or split the limit into several keys. An *exhausted* hot key is cheaper: \
         every process caches its denials, which costs \
         Redis one call per second and process.\n\n",
        busy = BUSY * 100.0,
    ));
}

fn bottlenecks(page: &mut String, plans: &[Plan]) {
    page.push_str(&format!(
        "## Computed: the next bottleneck\n\n\
         Redis accepts at most {MAX_CLIENTS:.0} clients unless `maxclients` is raised, and Redis Cluster is specified for up \
         to about \
         {MAX_NODES:.0} nodes, replicas included.\n\n\
         | decisions/s | connections per primary | connections per process | nodes with one replica each | Mbit/s per primary \
         | next bottleneck |\n|---:|---:|---:|---:|---:|---|\n",
    ));
    for plan in plans {
        let nodes = 2.0 * plan.primaries;
        let next = if nodes > MAX_NODES {
            "the Cluster: too many nodes; use several Clusters, or keys that share slots"
        } else if plan.instances > MAX_CLIENTS {
            "connections: processes must share servers"
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
    * Rules with several tiers: tiers with the same identity share a slot and a call; a global limit is a hot key, and on a \
    Cluster needs a separate call.\n\
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
pub fn rate(per_s: f64) -> String {
    if per_s >= 1e6 { format!("{:.0} M", per_s / 1e6) } else { format!("{:.0} k", per_s / 1e3) }
}
