//! The server's front ends, each against a server that reads the same requests and always allows, and against
//! throttlecrab's.
//!
//! Every server is a process of its own with a thread for each core, and shares the cores with the clients. What is not
//! measured: see the page, [`report`](crate::report).

mod allow;
mod grpc;
mod http;
mod process;
mod resp;
mod tools;

use std::{net::SocketAddr, thread, time::Instant};

use anyhow::{Result, ensure};
use tokio::task::JoinSet;

use self::process::Process;
use crate::{
    args::{Args, Effort},
    machine::{self, Machine},
    progress::Progress,
    report::Report,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

pub use self::{
    http::body_of,
    process::{Addresses, always_allow},
};
use self::{process::Contestant, tools::Tool};

/// How many connections ask at a time; over gRPC, how many calls on [`grpc::CHANNELS`] connections.
const CALLERS: usize = 64;
/// How many users they ask about.
const USERS: u32 = 100_000;

const COLUMNS: [Column; 3] = [
    Column::new("answers/s", 0),
    Column::new("CPU of the server, us", 2),
    Column::new("CPU of the clients, us", 2),
];

/// A way to ask.
#[derive(Clone, Copy, Debug)]
struct Front {
    name: &'static str,
    what: &'static str,
    asked: Asked,
    /// Which part of the always-allow server's pace is wanted.
    wanted: Target,
}

#[derive(Clone, Copy, Debug)]
enum Way {
    /// So many commands at once.
    Resp(usize),
    Http,
    Grpc,
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
enum Asked {
    /// The bench's own clients.
    ByUs(Way),
    /// A program that others wrote.
    By(Tool),
}

const FRONTS: [Front; 10] = [
    Front {
        name: "resp",
        what: "CL.THROTTLE (throttlecrab: THROTTLE), one command at a time on each of 64 connections",
        asked: Asked::ByUs(Way::Resp(1)),
        wanted: Target::Nearly(0.85),
    },
    Front {
        name: "resp-16",
        what: "The same, 16 commands at once",
        asked: Asked::ByUs(Way::Resp(16)),
        wanted: Target::AtLeast(0.6),
    },
    Front {
        name: "resp-64",
        what: "The same, 64 commands at once",
        asked: Asked::ByUs(Way::Resp(64)),
        wanted: Target::AtLeast(0.5),
    },
    Front {
        name: "http",
        what: "POST /v1/check (throttlecrab: POST /throttle) on 64 connections; the server that always allows is axum's",
        asked: Asked::ByUs(Way::Http),
        wanted: Target::Nearly(0.85),
    },
    Front {
        name: "grpc",
        what: "ShouldRateLimit (throttlecrab: Throttle), 64 calls at a time on 4 connections, by tonic's client; the server that always allows is tonic's",
        asked: Asked::ByUs(Way::Grpc),
        wanted: Target::Nearly(0.85),
    },
    Front {
        name: "redis-benchmark",
        what: "The same commands as in *resp*, asked by a redis-benchmark for each core",
        asked: Asked::By(Tool::RedisBenchmark(1)),
        wanted: Target::Nearly(0.85),
    },
    Front {
        name: "redis-benchmark-16",
        what: "The same, 16 commands at once",
        asked: Asked::By(Tool::RedisBenchmark(16)),
        wanted: Target::AtLeast(0.6),
    },
    Front {
        name: "redis-benchmark-64",
        what: "The same, 64 commands at once",
        asked: Asked::By(Tool::RedisBenchmark(64)),
        wanted: Target::AtLeast(0.5),
    },
    Front {
        name: "wrk",
        what: "The same requests as in *http*, asked by wrk",
        asked: Asked::By(Tool::Wrk),
        wanted: Target::Nearly(0.85),
    },
    Front {
        name: "h2load",
        what: "The same calls as in *grpc*, all about one user, asked by h2load",
        asked: Asked::By(Tool::H2load),
        wanted: Target::Nearly(0.85),
    },
];

/// Somebody who asks, waits for the answer, and checks that it says yes.
trait Caller: Send + 'static {
    /// Asks about random users. How many answers came.
    fn ask(&mut self, random: &mut fastrand::Rng) -> impl Future<Output = Result<u64>> + Send;
}

/// What one turn came to.
#[derive(Clone, Copy)]
struct Turn {
    rate: f64,
    server_cpu_us: f64,
    clients_cpu_us: f64,
}

/// Measures all front ends that are wanted.
pub async fn run(args: &Args) -> Result<Report> {
    let mut contestants = vec![Contestant::Tollgate, Contestant::AlwaysAllow];
    contestants.extend(args.wants_peers().then_some(Contestant::Throttlecrab));
    if let Some(part) = &args.solo {
        contestants.retain(|contestant| contestant.name().contains(part));
        ensure!(!contestants.is_empty(), "nobody is called {part:?}");
    }
    let mut processes = Vec::new();
    for contestant in contestants {
        processes.push(Process::start(contestant).await?);
    }
    let mut machine = Machine::here("not used".to_owned())?;
    machine.peers = machine::versions_of(&["axum", "hyper", "tonic", "tokio"]);
    machine.peers.extend(args.wants_peers().then(|| process::THROTTLECRAB.to_owned()));

    let fronts: Vec<_> = FRONTS.iter().filter(|front| args.wants(front.name)).collect();
    let progress = Progress::new(fronts.len());
    let mut tables = Vec::new();
    for front in fronts {
        tables.push(table(front, args.effort(), &processes, &progress).await?);
    }
    progress.end();
    Ok(Report {
        machine,
        command: crate::command(),
        load_after: machine::load()?,
        remote: Vec::new(),
        local: tables,
    })
}

async fn table(front: &Front, effort: Effort, processes: &[Process], progress: &Progress) -> Result<Table> {
    let effort = effort.for_targets([Some(front.wanted)]);
    let part = progress.begin(front.name, effort.rounds * processes.len());
    let mut turns = vec![Vec::new(); processes.len()];
    for round in 0..effort.rounds {
        for place in 0..processes.len() {
            // whoever comes first is another one each time
            let place = (place + round) % processes.len();
            part.at(round, processes[place].contestant.name());
            turns[place].push(match front.asked {
                Asked::ByUs(way) => turn(way, &processes[place], effort).await?,
                Asked::By(tool) => tool.turn(&processes[place], effort).await?,
            });
        }
    }
    let rows = processes.iter().zip(&turns).map(|(process, turns)| {
        let figure = |read: fn(&Turn) -> f64| Some(Stat::of(turns.iter().map(read)));
        Row {
            contestant: process.contestant.name().to_owned(),
            cells: vec![
                figure(|turn| turn.rate),
                figure(|turn| turn.server_cpu_us),
                figure(|turn| turn.clients_cpu_us),
            ],
        }
    });
    let ours = processes.iter().position(|process| process.contestant == Contestant::Tollgate);
    let others =
        processes.iter().zip(&turns).filter(|(process, _)| process.contestant != Contestant::Tollgate);
    let ratios = others.filter_map(|(process, others)| {
        let target = match process.contestant {
            Contestant::AlwaysAllow => front.wanted,
            Contestant::Throttlecrab | Contestant::Tollgate => Target::AtLeast(1.0),
        };
        let stat = Stat::of(turns[ours?].iter().zip(others).map(|(ours, other)| ours.rate / other.rate));
        let what = format!("answers/s, tollgate / {}", process.contestant.name());
        Some(Ratio { what, stat, target: Some(target) })
    });
    Ok(Table {
        name: front.name.to_owned(),
        what: front.what.to_owned(),
        rounds: effort.rounds,
        columns: COLUMNS.to_vec(),
        ratios: ratios.collect(),
        rows: rows.collect(),
    })
}

/// Clients ask from a thread for each core that keeps to its connections, as wrk's and h2load's do: what threads share, they would wait
/// for, some servers' clients more than others'.
async fn turn(way: Way, process: &Process, effort: Effort) -> Result<Turn> {
    let (contestant, addresses) = (process.contestant, process.addresses);
    // to connect is part of warming up
    let period = Period::after(effort);
    let mut asking = JoinSet::new();
    for part in Part::all()? {
        asking.spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                match way {
                    Way::Resp(pipeline) => {
                        let callers = resp::callers(contestant, addresses.resp, pipeline, part.of(CALLERS));
                        ask(callers.await?, period).await
                    }
                    Way::Http => {
                        let callers = http::callers(contestant, addresses.http, part.of(CALLERS));
                        ask(callers.await?, period).await
                    }
                    Way::Grpc => {
                        let callers = grpc::callers(contestant, addresses.grpc, part.of(grpc::CHANNELS));
                        ask(callers.await?, period).await
                    }
                }
            })
        });
    }
    tokio::time::sleep_until(period.start.into()).await;
    let (server_before, clients_before) = (process.cpu_us()?, machine::own_cpu_us()?);
    let answers = sum(asking).await?;
    let each = |us: f64| us / answers.max(1) as f64;
    Ok(Turn {
        rate: answers as f64 / period.start.elapsed().as_secs_f64(),
        server_cpu_us: each(process.cpu_us()? - server_before),
        clients_cpu_us: each(machine::own_cpu_us()? - clients_before),
    })
}

/// The part of one thread.
#[derive(Clone, Copy)]
struct Part {
    thread: usize,
    threads: usize,
}

impl Part {
    /// One for each core.
    fn all() -> Result<impl Iterator<Item = Self>> {
        let threads = thread::available_parallelism()?.get();
        Ok((0..threads).map(move |thread| Self { thread, threads }))
    }

    /// How many of so many connections are this thread's.
    fn of(self, connections: usize) -> usize {
        (self.thread..connections).step_by(self.threads).count()
    }
}

/// When is measured.
#[derive(Clone, Copy)]
struct Period {
    start: Instant,
    end: Instant,
}

impl Period {
    /// After the time to warm up.
    fn after(effort: Effort) -> Self {
        let start = Instant::now() + effort.warm_up;
        Self { start, end: start + effort.measured }
    }
}

/// Has all of them ask at a time. How many answers came while measured.
async fn ask<C: Caller>(callers: Vec<C>, period: Period) -> Result<u64> {
    let asking = callers.into_iter().map(|caller| call(caller, period, fastrand::Rng::new()));
    sum(asking.collect()).await
}

/// How many answers came to all of them.
async fn sum(mut asking: JoinSet<Result<u64>>) -> Result<u64> {
    let mut answers = 0;
    while let Some(answered) = asking.join_next().await {
        answers += answered??;
    }
    Ok(answers)
}

/// How many answers came while measured.
async fn call(mut caller: impl Caller, period: Period, mut random: fastrand::Rng) -> Result<u64> {
    let mut answers = 0;
    loop {
        let answered = caller.ask(&mut random).await?;
        let now = Instant::now();
        if now >= period.end {
            return Ok(answers);
        }
        if now >= period.start {
            answers += answered;
        }
    }
}

/// Somebody to ask about.
fn user(random: &mut fastrand::Rng) -> String {
    format!("user:{:05}", random.u32(..USERS))
}

/// A connection that does not wait for more to send.
async fn connect(address: SocketAddr) -> Result<tokio::net::TcpStream> {
    let stream = tokio::net::TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
