//! A discrete-event simulation of one Cluster primary and the processes that call it.
//!
//! Arrivals are random and do not wait for each other. Each process limits its calls in flight by the round trip, as the library does.
//! Requests that arrive while the limit is reached share the next call, and requests for the same key are merged. The primary serves
//! calls one after the other. Seeded: the same costs give the same figures.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, VecDeque},
};

use hdrhistogram::Histogram;

use super::{costs::Costs, traffic::Keys};

/// One-way network delay from a client to Redis.
pub const NETWORK_US: f64 = 100.0;
/// The deadline after which a failure policy decides.
pub const DEADLINE_US: f64 = 50_000.0;
/// The bounds of the limit of calls in flight per process, as in the library.
const MIN_CALLS: f64 = 2.0;
const MAX_CALLS: f64 = 256.0;
/// Keys per call, as in the library.
const MAX_CALL_KEYS: usize = 64;
/// The simulated warm-up and the measured period.
const WARM_UP_US: f64 = 300_000.0;
const COUNTED_US: f64 = 300_000.0;
const SEED: u64 = 7;

/// The results of one primary.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Utilization of its core.
    pub busy: f64,
    pub decisions_per_call: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Share of the answers after the deadline.
    pub late: f64,
}

struct Call {
    process: u32,
    sent: f64,
    /// CPU time of the primary for this call.
    service: f64,
    arrivals: Vec<f64>,
}

struct Process {
    in_flight: usize,
    limit: f64,
    waiting: VecDeque<(u32, f64)>,
}

impl Default for Process {
    fn default() -> Self {
        Self { in_flight: 0, limit: MIN_CALLS, waiting: VecDeque::new() }
    }
}

impl Process {
    /// Moves the limit towards its target, by one round trip's share for every call.
    fn adapt(&mut self, round_trip: f64, service: f64) {
        let base = 2.0 * NETWORK_US;
        let queued = (round_trip - base - service).max(0.0);
        let target = self.limit * base / (base + queued) + self.limit.sqrt().max(MIN_CALLS);
        self.limit = (self.limit + (target - self.limit) / self.limit).clamp(MIN_CALLS, MAX_CALLS);
    }
}

/// Simulates one primary with these keys, at `decisions_per_s` over all primaries.
pub fn simulate(keys: &Keys, decisions_per_s: f64, instances: u32, costs: &Costs) -> Outcome {
    let mut primary = Primary {
        costs,
        processes: HashMap::new(),
        calls: HashMap::new(),
        replies: BinaryHeap::new(),
        free_at: 0.0,
        sent: 0,
        tally: Tally::new(),
    };
    let mut random = fastrand::Rng::with_seed(SEED);
    let pause_us = 1e6 / (decisions_per_s * keys.part());
    let mut next = 0.0;
    loop {
        next += -pause_us * (1.0 - random.f64()).ln();
        primary.replies_until(next);
        if next > WARM_UP_US + COUNTED_US {
            break;
        }
        let key = keys.at(random.f64());
        primary.arrive(random.u32(..instances), key, next);
    }
    primary.tally.outcome()
}

struct Primary<'a> {
    costs: &'a Costs,
    processes: HashMap<u32, Process>,
    calls: HashMap<u64, Call>,
    /// Arrival times of replies at their callers, in picoseconds so that they are integers, with the number of the
    /// call.
    replies: BinaryHeap<Reverse<(u64, u64)>>,
    free_at: f64,
    sent: u64,
    tally: Tally,
}

const PS_PER_US: f64 = 1e6;

impl Primary<'_> {
    fn arrive(&mut self, process: u32, key: u32, now: f64) {
        self.processes.entry(process).or_default().waiting.push_back((key, now));
        self.send(process, now);
    }

    /// Sends the waiting requests if the limit permits a call. All calls have the same network delay, so the primary
    /// receives them in this order.
    fn send(&mut self, number: u32, now: f64) {
        let process = self.processes.entry(number).or_default();
        if process.waiting.is_empty() || process.in_flight >= process.limit as usize {
            return;
        }
        let (mut keys, mut arrivals) = (Vec::new(), Vec::new());
        while let Some((key, arrived)) = process.waiting.front().copied() {
            if !keys.contains(&key) {
                if keys.len() == MAX_CALL_KEYS {
                    break;
                }
                keys.push(key);
            }
            arrivals.push(arrived);
            process.waiting.pop_front();
        }
        process.in_flight += 1;
        let service = self.costs.call_us() + self.costs.decision_us() * keys.len() as f64;
        let begins = self.free_at.max(now + NETWORK_US);
        self.free_at = begins + service;
        self.tally.serves(begins, service);
        let back = ((self.free_at + NETWORK_US) * PS_PER_US) as u64;
        self.sent += 1;
        self.replies.push(Reverse((back, self.sent)));
        self.calls.insert(self.sent, Call { process: number, sent: now, service, arrivals });
    }

    fn replies_until(&mut self, end: f64) {
        while let Some(Reverse((at, number))) = self.replies.peek().copied() {
            let now = at as f64 / PS_PER_US;
            if now > end {
                return;
            }
            self.replies.pop();
            let call = self.calls.remove(&number).expect("a reply belongs to a call");
            self.tally.answers(&call.arrivals, now);
            let process = self.processes.entry(call.process).or_default();
            process.in_flight -= 1;
            process.adapt(now - call.sent, call.service);
            self.send(call.process, now);
        }
    }
}

struct Tally {
    latencies: Histogram<u64>,
    late: u64,
    calls: u64,
    busy_us: f64,
}

impl Tally {
    fn new() -> Self {
        let latencies = Histogram::new(2).expect("two significant digits are within 0 to 5");
        Self { latencies, late: 0, calls: 0, busy_us: 0.0 }
    }

    fn serves(&mut self, begins: f64, service: f64) {
        let (from, to) = (begins.max(WARM_UP_US), (begins + service).min(WARM_UP_US + COUNTED_US));
        self.busy_us += (to - from).max(0.0);
    }

    fn answers(&mut self, arrivals: &[f64], now: f64) {
        if now < WARM_UP_US {
            return;
        }
        self.calls += 1;
        for arrived in arrivals {
            self.latencies.record((now - arrived) as u64).expect("the histogram resizes itself");
            self.late += u64::from(now - arrived > DEADLINE_US);
        }
    }

    fn outcome(&self) -> Outcome {
        let decisions = self.latencies.len() as f64;
        Outcome {
            busy: self.busy_us / COUNTED_US,
            decisions_per_call: decisions / self.calls.max(1) as f64,
            p50_us: self.latencies.value_at_quantile(0.5) as f64,
            p99_us: self.latencies.value_at_quantile(0.99) as f64,
            late: self.late as f64 / decisions.max(1.0),
        }
    }
}
