//! Callers in a closed loop: each sends its next request when the previous one is decided.
//!
//! The clock is read once per decision: the end of one is the start of the next, so every latency includes a few
//! nanoseconds of the loop.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use hdrhistogram::Histogram;
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};

use crate::{machine, server};

/// A limiter that is measured. The scenario defines which key a number selects.
pub trait Contestant: Clone + Send + Sync + 'static {
    /// Returns whether the request with this random number is allowed.
    fn decide(&self, random: u64) -> impl Future<Output = Result<bool>> + Send;
}

/// The length of a run.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// A time; decisions that complete during the warm-up are not counted.
    Timed { warm_up: Duration, measured: Duration },
    /// A number of decisions.
    Counted(u64),
}

/// The figures of one run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Decisions that completed within the measured period.
    pub decisions: u64,
    /// Number of allowed decisions.
    pub allowed: u64,
    /// Decisions per second.
    pub rate: f64,
    /// The median latency, in microseconds.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// CPU time of Redis per decision, in microseconds.
    pub redis_cpu_us: f64,
    /// Script calls per decision.
    pub calls: f64,
    /// CPU time of this process per decision, in microseconds.
    pub client_cpu_us: f64,
}

/// Runs `callers` callers and measures them.
pub async fn drive<C: Contestant>(
    contestant: &C,
    callers: usize,
    work: Work,
    redis: &mut MultiplexedConnection,
) -> Result<Sample> {
    let begun = Instant::now();
    let (start, stop) = match work {
        Work::Timed { warm_up, measured } => (begun + warm_up, Stop::At(begun + warm_up + measured)),
        Work::Counted(count) => (begun, Stop::After(Arc::new(AtomicI64::new(count.cast_signed())))),
    };
    let tasks: Vec<_> = (0..callers)
        .map(|caller| tokio::spawn(call(contestant.clone(), start, stop.clone(), caller as u64)))
        .collect();

    tokio::time::sleep_until(start.into()).await;
    let (redis_before, client_before) = (server::done(redis).await?, machine::own_cpu_us()?);
    let mut tally = Tally::new();
    for task in tasks {
        tally.add(&task.await??);
    }
    let elapsed = start.elapsed();
    let (redis_after, client_after) = (server::done(redis).await?, machine::own_cpu_us()?);

    let decisions = tally.latencies.len();
    let per_decision = |micros: f64| micros / decisions.max(1) as f64;
    let at = |quantile| tally.latencies.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Sample {
        decisions,
        allowed: tally.allowed,
        rate: decisions as f64 / elapsed.as_secs_f64(),
        p50_us: at(0.5),
        p99_us: at(0.99),
        redis_cpu_us: per_decision(redis_after.cpu_us - redis_before.cpu_us),
        calls: per_decision(redis_after.scripts - redis_before.scripts),
        client_cpu_us: per_decision(client_after - client_before),
    })
}

#[derive(Clone)]
enum Stop {
    At(Instant),
    After(Arc<AtomicI64>),
}

struct Tally {
    latencies: Histogram<u64>,
    allowed: u64,
}

impl Tally {
    fn new() -> Self {
        Self { latencies: Histogram::new(2).expect("two significant digits are within 0 to 5"), allowed: 0 }
    }

    fn add(&mut self, other: &Self) {
        self.latencies.add(&other.latencies).expect("both histograms resize themselves");
        self.allowed += other.allowed;
    }
}

/// One caller.
async fn call<C: Contestant>(contestant: C, start: Instant, stop: Stop, seed: u64) -> Result<Tally> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut tally = Tally::new();
    let mut before = Instant::now();
    loop {
        match &stop {
            Stop::At(end) if before >= *end => return Ok(tally),
            Stop::After(left) if left.fetch_sub(1, Ordering::Relaxed) <= 0 => return Ok(tally),
            _ => {}
        }
        let allowed = contestant.decide(random.u64(..)).await?;
        let now = Instant::now();
        if now >= start {
            tally.latencies.record((now - before).as_nanos() as u64).expect("the histogram resizes itself");
            tally.allowed += u64::from(allowed);
        }
        before = now;
        // decisions without I/O would otherwise block the worker thread for other tasks
        tokio::task::consume_budget().await;
    }
}
