//! Leases: how many calls a hot key and a Zipf distribution need with them, computed from the way in which a process draws.
//!
//! A process draws up to its share `S` of the units that may be leased. It draws again when a quarter of the last draw is left, and what it
//! still holds is deducted: in a steady state a draw is `0.8 S`, and is made when `0.2 S` are left. A process never draws more than its demand
//! within the lifetime of a lease.

use anyhow::Result;

use super::{
    costs::{Costs, median},
    fleet::{BUSY, PER_INSTANCE, PER_LARGE_INSTANCE, SIZES},
    page::rate,
    traffic::{KEYS, Shape, primary},
};
use crate::{
    leases::{HOT, WITH, WITHOUT},
    remote::run::{REDIS_CPU, SCRIPT_CALLS},
    report::Report,
};

/// The units of a draw in a steady state, as a part of the share of a process.
const DRAW: f64 = 0.8;
/// The window of the limits, and the default lifetime of a lease with that window.
const WINDOW_S: f64 = 10.0;
const LIFETIME_S: f64 = 1.0;
/// The requests of one process within a lifetime that make a key hot, as in the library.
const HOT_REQUESTS: f64 = 4.0;
const LEASE: f64 = 0.01;
/// The leases that are tried for a Zipf distribution, and the load of the busiest primary that is accepted.
const LEASES: [f64; 4] = [LEASE, 0.02, 0.05, 0.1];
const BUSIEST: f64 = 0.75;
/// The part of a primary that one hot key may take.
const BUDGET: f64 = 0.2;

/// CPU times in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct LeaseCosts {
    /// Redis, per decision without a lease: one key per call over many connections.
    decision_us: f64,
    /// The cost of a call with a draw, relative to one without.
    draw_factor: f64,
}

impl LeaseCosts {
    /// Reads the relative cost of a draw from the figures of leases, which may be of another machine than those of `costs`.
    pub fn of(report: &Report, costs: &Costs) -> Result<Self> {
        let call_us = |row: &str| -> Result<f64> {
            Ok(median(report, HOT, row, REDIS_CPU)? / median(report, HOT, row, SCRIPT_CALLS)?)
        };
        Ok(Self { decision_us: costs.alone_us, draw_factor: call_us(WITH)? / call_us(WITHOUT)? })
    }

    fn draw_us(&self) -> f64 {
        self.decision_us * self.draw_factor
    }

    /// The part of a primary that one key needs which is used at its limit.
    fn busy(&self, processes: f64, lease: f64) -> f64 {
        draws_per_s(processes, lease) * self.draw_us() / 1e6
    }

    /// The smallest lease with which a key stays within `BUDGET`, as a part of the limit.
    fn smallest_lease(&self, processes: f64) -> f64 {
        processes / DRAW * self.draw_us() / 1e6 / BUDGET / WINDOW_S
    }
}

/// Draws of all processes for one key that is used at its limit: the share lasts as long as the lease's part of the window, and is not
/// larger than the demand within a lifetime.
fn draws_per_s(processes: f64, lease: f64) -> f64 {
    processes / (DRAW * (lease * WINDOW_S).min(LIFETIME_S))
}

/// A Zipf distribution with leases.
struct ZipfPlan {
    /// The lease, as a part of the limit.
    lease: f64,
    /// The part of the decisions that is made without Redis.
    local: f64,
    primaries_without: f64,
    primaries: f64,
    /// Utilization of the busiest primary, on the number of primaries with leases.
    busiest: f64,
}

impl ZipfPlan {
    /// The plan with the smallest lease that keeps the load of the busiest primary low, or with the largest one.
    fn smallest(decisions_per_s: f64, processes: f64, costs: &LeaseCosts) -> Self {
        let [first, others @ ..] = LEASES;
        let mut plan = Self::of(decisions_per_s, processes, first, costs);
        for lease in others {
            if plan.busiest <= BUSIEST {
                break;
            }
            plan = Self::of(decisions_per_s, processes, lease, costs);
        }
        plan
    }

    /// The limit of every key is the demand for the first one.
    fn of(decisions_per_s: f64, processes: f64, lease: f64, costs: &LeaseCosts) -> Self {
        let shares = Shape::Zipf.shares();
        let most = shares[0] * decisions_per_s / processes * WINDOW_S * lease;
        let mut leased = 0.0;
        let loads_us: Vec<f64> = shares
            .iter()
            .map(|share| {
                let demand = share * decisions_per_s;
                let expected = demand / processes * LIFETIME_S;
                if expected < HOT_REQUESTS {
                    return demand * costs.decision_us;
                }
                let draws = demand / (DRAW * most.min(expected));
                leased += demand - draws;
                draws * costs.draw_us()
            })
            .collect();
        let primaries = (loads_us.iter().sum::<f64>() / 1e6 / BUSY).ceil();
        let mut busy = vec![0.0; primaries as usize];
        for (key, load_us) in loads_us.iter().enumerate() {
            busy[primary(key, primaries as u64)] += load_us / 1e6;
        }
        Self {
            lease,
            local: leased / decisions_per_s,
            primaries_without: (decisions_per_s * costs.decision_us / 1e6 / BUSY).ceil(),
            primaries,
            busiest: busy.into_iter().fold(0.0, f64::max),
        }
    }
}

/// Appends the sections about leases.
pub fn lease_section(page: &mut String, costs: &LeaseCosts) {
    hot_key(page, costs);
    zipf(page, costs);
    round_trips(page);
    page.push_str(RECIPES);
}

fn hot_key(page: &mut String, costs: &LeaseCosts) {
    page.push_str(&format!(
        "## Computed: a hot key with a lease\n\n\
         A process draws {draw:.0} % of its share of the lease at a time, and its share lasts for the lease's part of the window, or for the \
         lifetime of a lease if that is shorter. A key that is used at its limit therefore needs processes / ({DRAW} x lease x window) calls \
         per second, at any rate of decisions. A call with a draw takes {factor:.1} times the CPU time of one without, measured in the table \
         *hot-key* of [the benchmarks of leases](benchmarks-leases.md): {draw_us:.0} us here. Only this ratio is used, because those benchmarks may \
         have been run on another machine. All decisions are on one key, whose limit is as \
         high as the demand, with a window of {WINDOW_S:.0} s and leases of {LIFETIME_S:.0} s. The last column is the smallest lease with which \
         the key takes at most {budget:.0} % of its primary.\n\n\
         | decisions/s of the key | processes | calls/s, lease 1 % | primary busy, lease 1 % | primary busy, lease 10 % | smallest lease |\n\
         |---:|---:|---:|---:|---:|---:|\n",
        draw = DRAW * 100.0,
        factor = costs.draw_factor,
        draw_us = costs.draw_us(),
        budget = BUDGET * 100.0,
    ));
    for decisions in SIZES {
        for per_process in [PER_INSTANCE, PER_LARGE_INSTANCE] {
            let processes = (decisions / per_process).ceil();
            page.push_str(&format!(
                "| {} | {processes:.0} | {:.0} | {} | {} | {} |\n",
                rate(decisions),
                draws_per_s(processes, LEASE),
                busy(costs.busy(processes, LEASE)),
                busy(costs.busy(processes, 10.0 * LEASE)),
                percent(costs.smallest_lease(processes)),
            ));
        }
    }
    page.push_str(
        "\nA lease that lasts longer than its lifetime is not used up: with a larger lease, set a longer `lease_for` too. Units that a crashed \
         process has leased count until their window ends, so use the smallest lease that is sufficient.\n\n",
    );
}

fn zipf(page: &mut String, costs: &LeaseCosts) {
    page.push_str(&format!(
        "## Computed: Zipf with leases\n\n\
         The {keys} M keys of the simulation with a Zipf distribution, one key per call, every limit as high as the demand for the first key. \
         The lease is the smallest of 1, 2, 5 and 10 % with which the busiest primary is at most {busiest:.0} % busy, or else 10 %. A process leases a key with at least {HOT_REQUESTS:.0} requests within the lifetime of a lease; so more decisions \
         are made without Redis if fewer and larger processes make them.\n\n\
         | decisions/s | processes | lease | without Redis | primaries without leases | primaries with leases | busiest of them |\n\
         |---:|---:|---:|---:|---:|---:|---:|\n",
        keys = KEYS / 1_000_000,
        busiest = BUSIEST * 100.0,
    ));
    for decisions in SIZES {
        for per_process in [PER_INSTANCE, PER_LARGE_INSTANCE] {
            let processes = (decisions / per_process).ceil();
            let plan = ZipfPlan::smallest(decisions, processes, costs);
            page.push_str(&format!(
                "| {} | {processes:.0} | {:.0} % | {:.0} % | {:.0} | {:.0} | {} |\n",
                rate(decisions),
                plan.lease * 100.0,
                plan.local * 100.0,
                plan.primaries_without,
                plan.primaries,
                busy(plan.busiest),
            ));
        }
    }
    page.push_str(
        "\nWithout leases, the first key keeps its primary 100 % busy at every size: see the simulation above. The remaining decisions are on \
         keys that are rare in each process, and their number of primaries falls with more keys per call. A key that is just too rare in each process still has four requests per \
         second of every process: with 5000 processes, 20 k per second on one primary. No lease helps there; use fewer and larger processes.\n\n",
    );
}

fn round_trips(page: &mut String) {
    page.push_str(
        "## Computed: which lease is worth it\n\n\
         At the limit, the share of a process lasts for `t` = lease x window, independently of the number of processes. It draws again when \
         0.2 `t` is left, and the reply takes a round trip `r`. If `r` is at most 0.2 `t`, the next units arrive in time and every decision is \
         local. Otherwise, a draw of 0.8 `t` is used up while the next one is on its way, and a cycle takes 0.6 `t` + `r`. The local part of the \
         decisions is 0.8 `t` / (0.6 `t` + `r`); the others share calls, as those of a limit without a lease.\n\n\
         | lease x window, in round trips | local decisions |\n|---:|---:|\n",
    );
    for round_trips in [0.5, 1.0, 2.0, 3.0, 5.0] {
        page.push_str(&format!("| {round_trips} | {:.0} % |\n", local_part(round_trips) * 100.0));
    }
    page.push_str(
        "\nA lease is worth it where lease x window is more than about two round trips, and saves nearly all calls from five round trips. \
         Example: 1 % of a window of 1 s is 10 ms, enough for a round trip of 2 ms; with a window of 100 ms and the same round trip, use \
         4 % or more.\n\n",
    );
}

/// The part of the decisions that is local, for a lease that lasts for this number of round trips.
fn local_part(round_trips: f64) -> f64 {
    (DRAW * round_trips / (0.6 * round_trips + 1.0)).min(1.0)
}

/// A utilization; above 100 % the primary is not sufficient.
fn busy(part: f64) -> String {
    if part > 1.0 { "saturated".to_owned() } else { percent(part) }
}

fn percent(part: f64) -> String {
    format!("{:.*} %", if part < 0.1 { 2 } else { 0 }, part * 100.0)
}

const RECIPES: &str = "## What leases do not serve\n\n\
    * Rare keys: fewer than four requests of one process within the lifetime of a lease.\n\
    * Fewer leased units than processes: the share of a process is less than one unit, and nothing is drawn.\n\
    * A short window with a small lease: see the table above.\n\
    * One key with so many processes that the smallest lease of the table is too large for the limit's purpose.\n\n\
    **Split the key.** Add a label `shard` to the request, with a random number from 0 to *n* - 1 or a hash of the request's identity, and let \
    the rule count it: `per = [\"tenant\", \"shard\"]`, with an `amount` of 1/*n* of the limit. The counters are in different slots and \
    spread over the primaries, and together they never admit more than the limit. Near the limit, a shard denies while another one has free units: with random \
    numbers the demand for a shard deviates by about the square root of *n* / amount, 0.4 % for 16 shards of a limit of 1,000,000. \
    `remaining` and `retry-after` of a decision are those of its shard. Leases work on each shard as on any other key.\n\n\
    **Warm up before a known spike.** A process draws nothing before the store has counted the instances, which starts with the first check of a \
    limit with a lease and is repeated every two seconds. Start the processes some seconds before the spike, open their connections \
    (`Limiter::warm_up`), and check once with labels that match the rule, such as a tenant for this purpose. The hot key itself needs no requests in \
    advance: it is leased after four requests, the draws grow to the share of the process within a few round trips, and an idle lease would \
    be returned after half of its lifetime anyway.\n\n";
