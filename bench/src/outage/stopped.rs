//! Redis is stopped for ten seconds. The test suite asserts the same with wider bounds.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use sluicegate::{Options, Source};

use super::{
    Bench,
    calls::{Call, Load},
    millis, ratio, unlimited, user,
};
use crate::{
    machine,
    network::pacing::Arrivals,
    progress::Progress,
    server::Server,
    stats::{Column, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "stopped";

const CHECKS_PER_SECOND: f64 = 500.0;
/// Time before and after the outage.
const CALM: Duration = Duration::from_secs(4);
/// Length of the outage.
const STOPPED: Duration = Duration::from_secs(10);

/// Maximum excess of the p99.9 latency over the deadline.
const P999_SLACK: Duration = Duration::from_millis(5);
/// Maximum excess of the longest latency over the deadline.
const LONGEST_SLACK: Duration = Duration::from_millis(50);
/// Maximum time until the store decides again.
const RECOVERY: Duration = Duration::from_secs(2);
const MAX_GROWTH_MB: f64 = 50.0;

/// When Redis was stopped and resumed.
struct Outage {
    stopped: Duration,
    resumed: Duration,
    memory_growth_mb: f64,
}

/// Fills the table.
pub async fn table(bench: &Bench, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, 1);
    let limiter = unlimited(bench.server.url()).await?;
    let before = machine::resident_bytes()?;
    let start = Instant::now();
    let arrivals = Arrivals { per_second: CHECKS_PER_SECOND, duration: 2 * CALM + STOPPED, seed: 0 };
    let load = Load { arrivals, labels: user(NAME)?, start };
    let outage = async {
        part.before("Redis runs");
        tokio::time::sleep(CALM).await;
        signal(&bench.server, "-STOP")?;
        let stopped = start.elapsed();
        part.before("Redis is stopped");
        tokio::time::sleep(STOPPED).await;
        signal(&bench.server, "-CONT")?;
        let resumed = start.elapsed();
        let memory_growth_mb = machine::resident_bytes()?.saturating_sub(before) as f64 / 1e6;
        part.before("Redis runs again");
        Ok(Outage { stopped, resumed, memory_growth_mb })
    };
    let (calls, outage) = tokio::try_join!(load.run(&limiter), outage)?;
    summarize(&calls, &outage)
}

fn summarize(calls: &[Call], outage: &Outage) -> Result<Table> {
    let deadline = Options::default().deadline;
    let during = calls.iter().filter(|call| (outage.stopped..outage.resumed).contains(&call.sent));
    let by_store = during.filter(|call| call.source == Source::Store).count();
    let back = calls.iter().filter(|call| call.sent >= outage.resumed && call.source == Source::Store);
    let back = back.map(|call| call.answered - outage.resumed).min();
    let mut latencies: Vec<Duration> = calls.iter().map(|call| call.answered - call.sent).collect();
    latencies.sort_unstable();
    ensure!(!latencies.is_empty(), "no check was sent");
    let (p999, longest) = (latencies[latencies.len() * 999 / 1000], latencies[latencies.len() - 1]);
    let once = |value: f64| Stat::of([value]);
    let part_of = |value: Duration, whole: Duration| once(value.as_secs_f64() / whole.as_secs_f64());
    let cells = [
        once(millis(p999)),
        once(millis(longest)),
        once(by_store as f64),
        once(back.map_or(f64::INFINITY, millis)),
        once(outage.memory_growth_mb),
    ];
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "Redis is stopped (`SIGSTOP`) for {} s; {CHECKS_PER_SECOND} checks/s, deadline {} ms",
            STOPPED.as_secs(),
            millis(deadline)
        ),
        rounds: 1,
        columns: vec![
            Column::new("p99.9 ms", 1),
            Column::new("longest check ms", 1),
            Column::new("decided by the store during the outage", 0),
            Column::new("first decision by the store after ms", 1),
            Column::new("memory growth MB", 1),
        ],
        rows: vec![Row { contestant: "sluicegate".to_owned(), cells: cells.map(Some).to_vec() }],
        ratios: vec![
            ratio(
                "p99.9 latency / deadline + 5 ms",
                part_of(p999, deadline + P999_SLACK),
                Target::AtMost(1.0),
            ),
            ratio(
                "longest latency / deadline + 50 ms",
                part_of(longest, deadline + LONGEST_SLACK),
                Target::AtMost(1.0),
            ),
            ratio(
                "time until the store decides again / 2 s",
                part_of(back.unwrap_or(Duration::MAX), RECOVERY),
                Target::AtMost(1.0),
            ),
            ratio(
                "memory growth / 50 MB",
                once(outage.memory_growth_mb / MAX_GROWTH_MB),
                Target::AtMost(1.0),
            ),
        ],
    })
}

fn signal(server: &Server, signal: &str) -> Result<()> {
    let done = Command::new("kill").args([signal, &server.pid().to_string()]).status()?;
    ensure!(done.success(), "kill {signal} failed");
    Ok(())
}
