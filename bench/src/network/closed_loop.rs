//! Callers in a closed loop: each sends its next request when the previous one is answered.
//!
//! Only decisions that complete within the measured period count. A caller keeps its latencies as plain numbers,
//! because a thousand histograms would displace the contestants' data from the CPU caches.

use std::time::{Duration, Instant};

use anyhow::Result;
use redis::aio::MultiplexedConnection;

use crate::{drive::Contestant, machine, server};

/// The load of one turn.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub callers: usize,
    pub warm_up: Duration,
    pub measured: Duration,
}

/// The figures of one turn.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Decisions per second.
    pub rate: f64,
    /// Median latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: f64,
    /// CPU time of Redis per decision in microseconds.
    pub redis_cpu_us: f64,
    /// Utilisation of Redis's core, from 0 to 1.
    pub redis_core: f64,
    /// CPU time of this process per decision in microseconds.
    pub client_cpu_us: f64,
    /// Script calls per decision, over warm-up and measured period.
    pub calls: f64,
}

/// Reads statistics of the contestants' Redis over a separate connection.
pub struct Observer {
    pid: u32,
    connection: MultiplexedConnection,
}

impl Observer {
    pub async fn new(server: &server::Server) -> Result<Self> {
        Ok(Self { pid: server.pid(), connection: server.connect().await? })
    }

    /// Removes all keys.
    pub async fn flush(&mut self) -> Result<()> {
        server::empty(&mut self.connection).await
    }

    /// Returns how many scripts were called so far.
    pub async fn script_calls(&mut self) -> Result<f64> {
        Ok(server::done(&mut self.connection).await?.scripts)
    }

    /// Reads the CPU times without a request to Redis, which would queue behind the contestants'.
    pub fn cpu_times(&self) -> Result<CpuTimes> {
        Ok(CpuTimes {
            at: Instant::now(),
            redis_us: machine::main_thread_cpu_us(self.pid)?,
            client_us: machine::own_cpu_us()?,
        })
    }
}

/// CPU times at one moment.
#[derive(Clone, Copy, Debug)]
pub struct CpuTimes {
    at: Instant,
    redis_us: f64,
    client_us: f64,
}

/// Utilisation between two moments, in cores.
#[derive(Clone, Copy, Debug)]
pub struct Utilisation {
    pub redis: f64,
    pub client: f64,
}

impl CpuTimes {
    pub fn until(&self, later: &Self) -> Utilisation {
        let elapsed_us = (later.at - self.at).as_secs_f64() * 1e6;
        Utilisation {
            redis: (later.redis_us - self.redis_us) / elapsed_us,
            client: (later.client_us - self.client_us) / elapsed_us,
        }
    }
}

/// Runs one turn of a contestant.
pub async fn run<C: Contestant>(contestant: &C, load: Load, observer: &mut Observer) -> Result<Sample> {
    let calls_before = observer.script_calls().await?;
    let start = Instant::now() + load.warm_up;
    let period = Period { start, end: start + load.measured };
    let callers: Vec<_> = (0..load.callers)
        .map(|caller| tokio::spawn(call(contestant.clone(), period, caller as u64)))
        .collect();
    tokio::time::sleep_until(period.start.into()).await;
    let before = observer.cpu_times()?;
    tokio::time::sleep_until(period.end.into()).await;
    let after = observer.cpu_times()?;

    let (mut latencies, mut decisions) = (Vec::new(), 0);
    for caller in callers {
        let calls = caller.await??;
        latencies.extend(calls.latencies_ns);
        decisions += calls.total;
    }
    let calls = observer.script_calls().await? - calls_before;
    // If the machine was paused for a whole turn, the ratios must not become infinite.
    let rate = latencies.len().max(1) as f64 / load.measured.as_secs_f64();
    let utilisation = before.until(&after);
    let quantiles = Quantiles::of(&mut latencies);
    Ok(Sample {
        rate,
        p50_us: quantiles.p50_us,
        p99_us: quantiles.p99_us,
        redis_cpu_us: utilisation.redis * 1e6 / rate,
        redis_core: utilisation.redis,
        client_cpu_us: utilisation.client * 1e6 / rate,
        calls: calls / (decisions as f64).max(1.0),
    })
}

/// Decides once for each of the first `count` keys, so that they exist.
pub async fn prefill<C: Contestant>(contestant: &C, count: u64) -> Result<()> {
    const CALLERS: u64 = 128;
    let callers: Vec<_> = (0..CALLERS)
        .map(|first| {
            let contestant = contestant.clone();
            tokio::spawn(async move {
                for key in (first..count).step_by(CALLERS as usize) {
                    contestant.decide(key).await?;
                }
                Ok::<_, anyhow::Error>(())
            })
        })
        .collect();
    for caller in callers {
        caller.await??;
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Period {
    start: Instant,
    end: Instant,
}

/// The calls of one caller.
struct Calls {
    /// Latencies of the calls that completed within the measured period.
    latencies_ns: Vec<u32>,
    total: u64,
}

async fn call<C: Contestant>(contestant: C, period: Period, seed: u64) -> Result<Calls> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut calls = Calls { latencies_ns: Vec::new(), total: 0 };
    let mut before = Instant::now();
    while before < period.end {
        let allowed = contestant.decide(random.u64(..)).await?;
        anyhow::ensure!(allowed, "a limit that should never be reached was reached");
        let now = Instant::now();
        calls.total += 1;
        if (period.start..period.end).contains(&now) {
            calls.latencies_ns.push(nanos(now - before));
        }
        before = now;
        // Decisions without I/O would otherwise block the worker thread for other tasks.
        tokio::task::consume_budget().await;
    }
    Ok(calls)
}

/// A latency in nanoseconds; four seconds at most.
pub fn nanos(latency: Duration) -> u32 {
    u32::try_from(latency.as_nanos()).unwrap_or(u32::MAX)
}

/// Quantiles of latencies, in microseconds; zero if there are none.
#[derive(Clone, Copy, Debug)]
pub struct Quantiles {
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Quantiles {
    pub fn of(latencies_ns: &mut [u32]) -> Self {
        latencies_ns.sort_unstable();
        let at = |percent: usize| {
            let place = latencies_ns.len() * percent / 100;
            latencies_ns.get(place).map_or(0.0, |nanos| f64::from(*nanos) / 1e3)
        };
        Self { p50_us: at(50), p99_us: at(99) }
    }
}
