//! Four client processes on one Redis.
//!
//! Each child connects, prints `ready`, waits for a line of input so that all start together, runs a closed loop and
//! prints its number of decisions.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
};

use super::{
    Bench, MILLISECOND,
    contestants::Kind,
    rotated,
    workload::{Algorithm, Spread, Workload},
};
use crate::{
    drive::Contestant,
    progress::Progress,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "four-processes";

const PROCESSES: usize = 4;
/// Callers in each process.
const CALLERS: usize = 256;
const ROUND_TRIP: Duration = MILLISECOND;
const WARM_UP: Duration = Duration::from_millis(300);
const MEASURED: Duration = Duration::from_millis(1200);
const WORKLOAD: Workload = Workload::new(Algorithm::TokenBucket, Spread::ManyKeys);

/// What a child prints when it is connected.
const READY: &str = "ready";

const TOTAL: Target = Target::AtLeast(1.5);
/// Of the slowest process, in fair shares.
const SLOWEST: Target = Target::AtLeast(0.5);

/// Decisions per second of all processes together, and the slowest process's part in fair shares.
#[derive(Clone, Copy, Debug)]
struct Sample {
    rate: f64,
    slowest_share: f64,
}

/// Fills the table.
pub async fn table(bench: &mut Bench, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, bench.effort.rounds * Kind::ALL.len());
    bench.observer.flush().await?;
    let url = bench.url(ROUND_TRIP)?.to_owned();
    let mut samples = vec![Vec::new(); Kind::ALL.len()];
    for round in 0..bench.effort.rounds {
        for place in rotated(Kind::ALL.len(), round) {
            part.at(round, Kind::ALL[place].name());
            samples[place].push(turn(Kind::ALL[place], &url).await?);
        }
    }
    let stat = |place: usize, read: fn(&Sample) -> f64| Stat::of(samples[place].iter().map(read));
    let rows = Kind::ALL.iter().enumerate().map(|(place, kind)| Row {
        contestant: kind.name().to_owned(),
        cells: vec![
            Some(stat(place, |sample| sample.rate / 1e3)),
            Some(stat(place, |sample| sample.slowest_share)),
        ],
    });
    let mut ratios: Vec<_> = (0..2)
        .map(|peer| Ratio {
            what: format!("decisions/s of all processes, sluicegate / {}", Kind::ALL[peer].name()),
            stat: Stat::of(samples[2].iter().zip(&samples[peer]).map(|(ours, peer)| ours.rate / peer.rate)),
            target: Some(TOTAL),
        })
        .collect();
    ratios.push(Ratio {
        what: "decisions/s of the slowest process of sluicegate / a fair share".to_owned(),
        stat: stat(2, |sample| sample.slowest_share),
        target: Some(SLOWEST),
    });
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "{PROCESSES} processes with {CALLERS} callers each, 1 ms, 100,000 keys, token bucket; all share two cores with \
             Redis and the proxy"
        ),
        rounds: bench.effort.rounds,
        columns: vec![
            Column::new("k decisions/s in total", 1),
            Column::new("slowest process, in fair shares", 2),
        ],
        rows: rows.collect(),
        ratios,
    })
}

async fn turn(kind: Kind, url: &str) -> Result<Sample> {
    let mut children = Vec::new();
    for _ in 0..PROCESSES {
        children.push(ClientProcess::start(kind, url)?);
    }
    for child in &mut children {
        let line = child.read_line().await?;
        ensure!(line == READY, "a client process printed {line:?} instead of {READY:?}");
    }
    for child in &mut children {
        child.input.write_all(b"start\n").await?;
    }
    let mut rates = Vec::new();
    for child in &mut children {
        let decisions: f64 = child.read_line().await?.parse()?;
        rates.push(decisions / MEASURED.as_secs_f64());
        child.child.wait().await?;
    }
    let rate: f64 = rates.iter().sum();
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    Ok(Sample { rate, slowest_share: slowest * PROCESSES as f64 / rate.max(1.0) })
}

struct ClientProcess {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl ClientProcess {
    fn start(kind: Kind, url: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["network-client", kind.name(), url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start a client process")?;
        let input = child.stdin.take().context("the client's input is piped")?;
        let output = BufReader::new(child.stdout.take().context("the client's output is piped")?).lines();
        Ok(Self { child, input, output })
    }

    async fn read_line(&mut self) -> Result<String> {
        self.output.next_line().await?.context("a client process has ended early")
    }
}

/// Runs the child process.
pub async fn client(kind: Kind, url: &str) -> Result<()> {
    let contestant = kind.connect(url, WORKLOAD).await?;
    println!("{READY}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let start = tokio::time::Instant::now() + WARM_UP;
    let end = start + MEASURED;
    let seed = u64::from(std::process::id()) << 32;
    let callers: Vec<_> = (0..CALLERS as u64)
        .map(|caller| {
            let contestant = contestant.clone();
            tokio::spawn(async move {
                let (mut random, mut decisions) = (fastrand::Rng::with_seed(seed + caller), 0_u64);
                loop {
                    contestant.decide(random.u64(..)).await?;
                    let now = tokio::time::Instant::now();
                    if now >= end {
                        return Ok::<_, anyhow::Error>(decisions);
                    }
                    decisions += u64::from(now >= start);
                }
            })
        })
        .collect();
    let mut decisions = 0;
    for caller in callers {
        decisions += caller.await??;
    }
    println!("{decisions}");
    Ok(())
}
