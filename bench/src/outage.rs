//! `scripts/bench outage`: latency and decisions while Redis is stopped for ten seconds, at 500 requests per second with the
//! default deadline of 50 ms. The test suite asserts the same with wider bounds.
//!
//! Not measured: a network that loses packets, several processes, Sentinel and Cluster.

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use sluicegate::{Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, Source};
use tokio::sync::mpsc;

use crate::{progress::Progress, server::Server};

/// Interval between two requests.
const PACE: Duration = Duration::from_millis(2);
/// Time before and after the outage.
const CALM: Duration = Duration::from_secs(4);
/// Length of the outage.
const STOPPED: Duration = Duration::from_secs(10);

/// One request: when it was sent after the start, its latency, and the source of its decision.
struct Call {
    sent: Duration,
    took: Duration,
    source: Source,
}

pub async fn run() -> Result<()> {
    let server = Server::start().await?;
    let limit = Limit::token_bucket(1_000_000_000, Duration::from_secs(1))?;
    let rule = Rule::new("all", limit).per(["user"]).on_store_failure(OnStoreFailure::Local);
    let limiter = Limiter::new(RedisStore::connect(server.url()).await?, [rule])?;
    let labels = Arc::new(Labels::new([("user", "a")])?);
    let progress = Progress::new(1);
    let part = progress.begin("outage", 3);

    let before_kib = resident_kib()?;
    let start = Instant::now();
    let (sender, mut calls) = mpsc::unbounded_channel();
    let sending = tokio::spawn(send_requests(limiter, labels, start, sender));
    part.before("Redis runs");
    tokio::time::sleep(CALM).await;
    signal(&server, "-STOP")?;
    let stopped = start.elapsed();
    part.before("Redis is stopped");
    tokio::time::sleep(STOPPED).await;
    signal(&server, "-CONT")?;
    let resumed = start.elapsed();
    let grown_kib = resident_kib()?.saturating_sub(before_kib);
    part.before("Redis runs again");
    sending.await?;
    let mut all = Vec::new();
    while let Some(call) = calls.recv().await {
        all.push(call);
    }
    progress.end();
    report(&mut all, stopped, resumed, grown_kib)
}

/// Sends a request every [`PACE`], whether or not earlier ones are answered.
async fn send_requests(
    limiter: Limiter,
    labels: Arc<Labels>,
    start: Instant,
    sender: mpsc::UnboundedSender<Call>,
) {
    let mut pace = tokio::time::interval(PACE);
    while start.elapsed() < 2 * CALM + STOPPED {
        pace.tick().await;
        let (limiter, labels, sender) = (limiter.clone(), Arc::clone(&labels), sender.clone());
        tokio::spawn(async move {
            let (sent, begun) = (start.elapsed(), Instant::now());
            if let Ok(decision) = limiter.check(&labels, 1).await {
                let _ = sender.send(Call { sent, took: begun.elapsed(), source: decision.source });
            }
        });
    }
}

fn report(all: &mut [Call], stopped: Duration, resumed: Duration, grown_kib: u64) -> Result<()> {
    let deadline = Options::default().deadline;
    let during: Vec<&Call> = all.iter().filter(|call| call.sent >= stopped && call.sent < resumed).collect();
    ensure!(!during.is_empty(), "no request was sent while Redis was stopped");
    let by_store = during.iter().filter(|call| call.source == Source::Store).count();
    let back = all.iter().filter(|call| call.sent >= resumed && call.source == Source::Store);
    let back = back.map(|call| call.sent + call.took - resumed).min();
    let mut took: Vec<Duration> = all.iter().map(|call| call.took).collect();
    took.sort_unstable();
    let (p999, longest) = (took[took.len() * 999 / 1000], took[took.len() - 1]);
    let millis = |duration: Duration| duration.as_secs_f64() * 1e3;
    println!("{} requests at 500 a second, deadline {deadline:?}; Redis stopped for {STOPPED:?}", all.len());
    println!(
        "  p99.9 of all                       {:8.2} ms  target <= {:.0} ms",
        millis(p999),
        millis(deadline) + 5.0
    );
    println!(
        "  longest                            {:8.2} ms  target <= {:.0} ms",
        millis(longest),
        millis(deadline) + 50.0
    );
    println!(
        "  decided by the store meanwhile     {by_store:8}     of {} (0 except for those in flight)",
        during.len()
    );
    match back {
        Some(back) => {
            println!("  first decision by the store after  {:8.2} ms  target <= 2000 ms", millis(back))
        }
        None => println!("  first decision by the store after     never     target <= 2000 ms"),
    }
    println!("  memory grown                       {:8.2} MiB target < 50 MB", grown_kib as f64 / 1024.0);
    Ok(())
}

fn signal(server: &Server, signal: &str) -> Result<()> {
    let done = Command::new("kill").args([signal, &server.pid().to_string()]).status()?;
    ensure!(done.success(), "kill {signal} failed");
    Ok(())
}

fn resident_kib() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
