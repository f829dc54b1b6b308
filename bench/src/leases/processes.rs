//! Four client processes that share one hot key and its lease.
//!
//! Each child connects, checks once so that the store counts it as an instance, prints `ready` once it has counted the others, waits for a
//! line of input so that all start together, and prints its report.

use std::{
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sluicegate::Limit;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::sleep,
};

use super::{
    BOUND, Effort, WITH, WITHOUT, above,
    contestants::{Keys, Ours},
    leased,
};
use crate::{
    progress::Progress,
    server::{self, Server},
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "four-processes";

pub const PROCESSES: usize = 4;
/// Callers in each process.
pub const CALLERS: usize = 64;
/// Of each process; together below the limit.
const DECISIONS: i64 = 225_000;
/// Longer than the interval at which a process counts the instances.
const COUNTING: Duration = Duration::from_millis(2_500);

/// What a child prints when it is connected.
const READY: &str = "ready";

/// The work of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    pub url: String,
    pub is_leased: bool,
    pub demand: Demand,
}

/// How much the processes request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Demand {
    /// A number of decisions below the limit.
    Below,
    /// More than the limit, for a time.
    Above { algorithm: Algorithm, time: Duration },
}

/// The algorithm of a limit that is exceeded.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Algorithm {
    FixedWindow,
    TokenBucket,
}

/// What a child prints at its end. Times are since the epoch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ClientReport {
    pub begun: Duration,
    pub ended: Duration,
    pub decisions: u64,
    /// Decisions that were made by leases.
    pub leased: u64,
    pub admitted: Vec<Admissions>,
}

/// Admitted calls of one caller that were sent in the same millisecond and answered in the same millisecond.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Admissions {
    /// The start of the millisecond.
    pub sent_ms: u64,
    /// The end of the millisecond.
    pub received_ms: u64,
    pub count: u64,
}

/// The reports of one turn, and the work of Redis.
pub struct Turn {
    pub clients: Vec<ClientReport>,
    pub redis_cpu_us: f64,
    pub scripts: f64,
}

impl Turn {
    pub fn decisions(&self) -> f64 {
        self.clients.iter().map(|client| client.decisions).sum::<u64>() as f64
    }

    pub fn admitted(&self) -> f64 {
        let all = self.clients.iter().flat_map(|client| &client.admitted);
        all.map(|admissions| admissions.count).sum::<u64>() as f64
    }

    /// Decisions per second of all processes together, from the first start to the last end.
    pub fn rate(&self) -> f64 {
        let begun = self.clients.iter().map(|client| client.begun).min().unwrap_or_default();
        let ended = self.clients.iter().map(|client| client.ended).max().unwrap_or_default();
        self.decisions() / ended.saturating_sub(begun).as_secs_f64()
    }

    /// The part of the decisions that was made by leases, in percent.
    pub fn leased(&self) -> f64 {
        self.clients.iter().map(|client| client.leased).sum::<u64>() as f64 * 100.0 / self.decisions()
    }
}

/// Runs all processes once, on an empty Redis.
pub async fn turn(server: &Server, is_leased: bool, demand: Demand) -> Result<Turn> {
    let mut redis = server.connect().await?;
    // also removes the instances of the turn before
    server::empty(&mut redis).await?;
    let job = serde_json::to_string(&Job { url: server.url().to_owned(), is_leased, demand })?;
    let mut children = (0..PROCESSES).map(|_| Client::start(&job)).collect::<Result<Vec<_>>>()?;
    for child in &mut children {
        let line = child.read_line().await?;
        ensure!(line == READY, "a client process printed {line:?} instead of {READY:?}");
    }
    let before = server::done(&mut redis).await?;
    for child in &mut children {
        child.input.write_all(b"start\n").await?;
    }
    let mut clients = Vec::new();
    for child in &mut children {
        clients.push(serde_json::from_str(&child.read_line().await?)?);
        child.child.wait().await?;
    }
    let after = server::done(&mut redis).await?;
    Ok(Turn { clients, redis_cpu_us: after.cpu_us - before.cpu_us, scripts: after.scripts - before.scripts })
}

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let contestants = [(WITHOUT, false), (WITH, true)];
    let part = progress.begin(NAME, effort.rounds * contestants.len());
    let mut turns: [Vec<Turn>; 2] = Default::default();
    for round in 0..effort.rounds {
        for place in effort.rotated(contestants.len(), round) {
            let (name, is_leased) = contestants[place];
            part.at(round, name);
            let turn = turn(server, is_leased, Demand::Below).await?;
            ensure!(turn.admitted() == turn.decisions(), "a limit above the demand was reached");
            turns[place].push(turn);
        }
    }
    let cells: [fn(&Turn) -> f64; 4] = [
        |turn| turn.rate() / 1e3,
        |turn| turn.redis_cpu_us / turn.decisions(),
        |turn| turn.scripts / turn.decisions(),
        Turn::leased,
    ];
    let row = |((name, _), turns): (&(&str, bool), &Vec<Turn>)| Row {
        contestant: (*name).to_owned(),
        cells: cells.iter().map(|read| Some(Stat::of(turns.iter().map(read)))).collect(),
    };
    let ratio = |read: fn(&Turn) -> f64| {
        Stat::of(turns[1].iter().zip(&turns[0]).map(|(with, without)| read(with) / read(without)))
    };
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "{PROCESSES} processes with {CALLERS} callers each on one key, token bucket of 1,000,000 per 10 s, all allowed. A turn is \
             {DECISIONS} decisions of each process; all share two cores with Redis"
        ),
        rounds: effort.rounds,
        columns: vec![
            Column::new("k decisions/s in total", 1),
            Column::new("Redis CPU us", 3),
            Column::new("script calls", 4),
            Column::new("decided by leases, %", 1),
        ],
        rows: contestants.iter().zip(&turns).map(row).collect(),
        ratios: vec![
            Ratio {
                what: "decisions/s of all processes, lease 1 % / no lease".to_owned(),
                stat: ratio(cells[0]),
                target: Some(Target::AtLeast(5.0)),
            },
            Ratio {
                what: "Redis CPU per decision, lease 1 % / no lease".to_owned(),
                stat: ratio(cells[1]),
                target: None,
            },
        ],
    })
}

struct Client {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Client {
    fn start(job: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["leases-client", job])
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
pub async fn client(job: &str) -> Result<()> {
    let job: Job = serde_json::from_str(job)?;
    let ours = Ours::connect(&job.url, limit(&job)?, Keys::One("counting instances".into())).await?;
    ours.decide(0).await?;
    sleep(COUNTING).await;
    println!("{READY}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;

    let ours = ours.with_key("hot");
    let begun = since_epoch()?;
    let left = Arc::new(AtomicI64::new(DECISIONS));
    let stop = match job.demand {
        Demand::Below => Stop::After(left),
        Demand::Above { time, .. } => Stop::At(begun + time),
    };
    let callers: Vec<_> = (0..CALLERS).map(|_| tokio::spawn(call(ours.clone(), stop.clone()))).collect();
    let (mut decisions, mut admitted) = (0, Vec::new());
    for caller in callers {
        let calls = caller.await??;
        decisions += calls.decisions;
        admitted.extend(calls.admitted);
    }
    let ended = since_epoch()?;
    let leased = ours.leased().await;
    println!("{}", serde_json::to_string(&ClientReport { begun, ended, decisions, leased, admitted })?);
    Ok(())
}

fn limit(job: &Job) -> Result<Limit> {
    let (limit, bound) = match job.demand {
        Demand::Below => (BOUND.bucket()?, BOUND),
        Demand::Above { algorithm, .. } => (above::limit(algorithm)?, above::BOUND),
    };
    if job.is_leased { leased(limit, bound) } else { Ok(limit) }
}

#[derive(Clone)]
enum Stop {
    At(Duration),
    After(Arc<AtomicI64>),
}

#[derive(Default)]
struct Calls {
    decisions: u64,
    admitted: Vec<Admissions>,
}

/// One caller. It pauses after a denial, as a client would.
async fn call(ours: Ours, stop: Stop) -> Result<Calls> {
    const PAUSE: Duration = Duration::from_millis(1);
    let mut calls = Calls::default();
    let mut before = since_epoch()?;
    loop {
        match &stop {
            Stop::At(end) if before >= *end => return Ok(calls),
            Stop::After(left) if left.fetch_sub(1, Ordering::Relaxed) <= 0 => return Ok(calls),
            _ => {}
        }
        let is_allowed = ours.decide(0).await?;
        let now = since_epoch()?;
        calls.decisions += 1;
        if is_allowed {
            calls.admit(before, now);
            before = now;
            // decisions without I/O would otherwise block the worker thread for other tasks
            tokio::task::consume_budget().await;
        } else {
            sleep(PAUSE).await;
            before = since_epoch()?;
        }
    }
}

impl Calls {
    fn admit(&mut self, sent: Duration, received: Duration) {
        let (sent_ms, received_ms) = (sent.as_millis() as u64, received.as_millis() as u64 + 1);
        match self.admitted.last_mut() {
            Some(last) if (last.sent_ms, last.received_ms) == (sent_ms, received_ms) => last.count += 1,
            _ => self.admitted.push(Admissions { sent_ms, received_ms, count: 1 }),
        }
    }
}

/// The clock of Redis is the same one.
fn since_epoch() -> Result<Duration> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?)
}
