//! `sluicegate serve` with its default settings and a Redis that is 5 ms away: once warm, no decision is degraded and the
//! limit is exact.

use std::{
    net::SocketAddr,
    process::Stdio,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
};

use super::{
    Bench,
    closed_loop::{Quantiles, nanos},
    pacing::Arrivals,
};
use crate::{
    fronts::Addresses,
    machine,
    progress::Progress,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "default-server";

const ROUND_TRIP: Duration = Duration::from_millis(5);
const CHECKS_PER_SECOND: f64 = 5_000.0;
/// Before the measured period, on a separate key.
const WARM_UP: Duration = Duration::from_secs(1);
const MEASURED: Duration = Duration::from_secs(4);
/// Reached after three quarters of the measured period.
const LIMIT: u64 = 15_000;
const ROUNDS: usize = 3;

/// A child process and its address.
struct ServerProcess {
    http: SocketAddr,
    /// The process is killed when this is dropped.
    _child: Child,
    _config: tempfile::NamedTempFile,
}

impl ServerProcess {
    async fn start(store: &str) -> Result<Self> {
        let config = tempfile::Builder::new().suffix(".toml").tempfile()?;
        let text = format!(
            "[store]\nurl = \"{store}\"\n\n[[rule]]\nname = \"per-user\"\nper = [\"user\"]\namount = {LIMIT}\nwindow = \"3650d\"\n"
        );
        std::fs::write(config.path(), text)?;
        let mut child = Command::new(machine::sluicegate())
            .args(["serve", "--json", "--log", "warn", "--config"])
            .arg(config.path())
            .args(["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--resp", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the server: scripts/bench builds it")?;
        let output = child.stdout.take().context("the server's output is piped")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).await?;
        ensure!(!line.is_empty(), "the server does not start");
        let addresses: Addresses = serde_json::from_str(&line)?;
        Ok(Self { http: addresses.http, _child: child, _config: config })
    }
}

/// The part of an answer that is counted.
#[derive(Debug, Deserialize)]
struct Answer {
    allowed: bool,
    degraded: bool,
}

/// Counts of one round; only the measured period, except for `degraded_at_first`.
#[derive(Default)]
struct Counts {
    answered: AtomicU64,
    admitted: AtomicU64,
    degraded: AtomicU64,
    degraded_at_first: AtomicU64,
    failed: AtomicU64,
    latencies_ns: Mutex<Vec<u32>>,
}

impl Counts {
    fn add(&self, answer: Result<Answer>, latency: Duration, is_measured: bool) {
        let add = |counter: &AtomicU64, condition: bool| {
            counter.fetch_add(u64::from(condition), Ordering::Relaxed);
        };
        let Ok(answer) = answer else { return add(&self.failed, true) };
        if !is_measured {
            return add(&self.degraded_at_first, answer.degraded);
        }
        add(&self.answered, true);
        add(&self.degraded, answer.degraded);
        add(&self.admitted, answer.allowed);
        self.latencies_ns.lock().expect("no task panics").push(nanos(latency));
    }
}

/// Fills the table.
pub async fn table(bench: &mut Bench, progress: &Progress) -> Result<Table> {
    let rounds = bench.effort.rounds.min(ROUNDS);
    let part = progress.begin(NAME, rounds);
    let url = bench.url(ROUND_TRIP)?.to_owned();
    let mut all = Vec::new();
    for round in 0..rounds {
        part.at(round, "sluicegate serve");
        bench.observer.flush().await?;
        let server = ServerProcess::start(&url).await?;
        all.push(run(server.http).await?);
    }
    let stat = |read: fn(&Counts) -> f64| Stat::of(all.iter().map(read));
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
    let quantiles: Vec<_> = all
        .iter()
        .map(|counts| Quantiles::of(&mut counts.latencies_ns.lock().expect("no task panics")))
        .collect();
    let row = Row {
        contestant: "sluicegate serve".to_owned(),
        cells: vec![
            Some(Stat::of(all.iter().map(|counts| count(&counts.answered)))),
            Some(Stat::of(all.iter().map(|counts| count(&counts.admitted)))),
            Some(Stat::of(all.iter().map(|counts| count(&counts.degraded)))),
            Some(Stat::of(all.iter().map(|counts| count(&counts.degraded_at_first)))),
            Some(Stat::of(all.iter().map(|counts| count(&counts.failed)))),
            Some(Stat::of(quantiles.iter().map(|quantiles| quantiles.p50_us / 1e3))),
            Some(Stat::of(quantiles.iter().map(|quantiles| quantiles.p99_us / 1e3))),
        ],
    };
    let ratios = vec![
        Ratio {
            what: "degraded and failed checks / checks after the first second".to_owned(),
            stat: stat(|counts| {
                let bad = counts.degraded.load(Ordering::Relaxed) + counts.failed.load(Ordering::Relaxed);
                bad as f64 / counts.answered.load(Ordering::Relaxed).max(1) as f64
            }),
            target: Some(Target::Exactly(0.0)),
        },
        Ratio {
            what: "admitted checks / the limit".to_owned(),
            stat: stat(|counts| counts.admitted.load(Ordering::Relaxed) as f64 / LIMIT as f64),
            target: Some(Target::Exactly(1.0)),
        },
    ];
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "`sluicegate serve` with default settings, 5 ms from Redis: {CHECKS_PER_SECOND} checks/s over HTTP as an open loop, \
             one key with a limit of {LIMIT} after a second of warm-up on another key"
        ),
        rounds,
        columns: vec![
            Column::new("answers", 0),
            Column::new("admitted", 0),
            Column::new("degraded", 0),
            Column::new("degraded in the first second", 0),
            Column::new("failed", 0),
            Column::new("p50 ms", 2),
            Column::new("p99 ms", 2),
        ],
        rows: vec![row],
        ratios,
    })
}

async fn run(http: SocketAddr) -> Result<Counts> {
    let counts = Arc::new(Counts::default());
    let idle = Arc::new(Mutex::new(Vec::new()));
    let shared = Arc::clone(&counts);
    let arrivals = Arrivals { per_second: CHECKS_PER_SECOND, duration: WARM_UP + MEASURED, seed: 0 };
    let request = move |arrival: super::pacing::Arrival| {
        let (counts, idle) = (Arc::clone(&shared), Arc::clone(&idle));
        async move {
            let is_measured = arrival.offset >= WARM_UP;
            let user = if is_measured { "measured" } else { "warm-up" };
            let answer = check(http, &idle, user).await;
            counts.add(answer, arrival.intended.elapsed(), is_measured);
        }
    };
    arrivals.run(request).await?;
    Arc::into_inner(counts).context("all requests have ended")
}

/// Sends a check over an idle keep-alive connection, or over a new one if all are busy.
async fn check(http: SocketAddr, idle: &Mutex<Vec<TcpStream>>, user: &str) -> Result<Answer> {
    let kept = idle.lock().expect("no task panics").pop();
    let mut stream = match kept {
        Some(stream) => stream,
        None => {
            let stream = TcpStream::connect(http).await?;
            stream.set_nodelay(true)?;
            stream
        }
    };
    let body = format!(r#"{{"labels":{{"user":"{user}"}}}}"#);
    let request = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut reply = Vec::with_capacity(1024);
    loop {
        let len = stream.read_buf(&mut reply).await?;
        ensure!(len > 0, "the server closed the connection");
        if let Some(body) = crate::fronts::complete_body(&reply)? {
            let answer = serde_json::from_slice(body)?;
            idle.lock().expect("no task panics").push(stream);
            return Ok(answer);
        }
    }
}
