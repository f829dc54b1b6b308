//! `scripts/bench network`: compares sluicegate with hand-written clients over a network round trip to Redis.
//!
//! A proxy between the clients and a private Redis delays every byte by half a round trip in each direction; a round trip
//! of 0 goes to Redis directly. For what is not measured, see [`report`](crate::report).

mod closed_loop;
mod contestants;
mod default_server;
pub mod matrix;
mod one_caller;
mod open_loop;
pub mod pacing;
mod processes;
mod proxy;
mod saturation;
pub mod workload;

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use self::{
    closed_loop::{Load, Observer},
    contestants::Connected,
    matrix::Point,
    workload::Workload,
};
use crate::{
    args::Args,
    machine::{self, Machine},
    progress::Progress,
    report::Report,
    server::{self, Server},
};

pub use self::{
    contestants::Kind,
    processes::client,
    proxy::{ProxyProcess, serve as serve_proxy},
};

/// Directly to Redis, without the proxy.
const LOOPBACK: Duration = Duration::ZERO;
const MILLISECOND: Duration = Duration::from_millis(1);

/// All parts, in order.
const PARTS: [&str; 6] = [
    matrix::NAME,
    open_loop::NAME,
    one_caller::NAME,
    saturation::NAME,
    processes::NAME,
    default_server::NAME,
];

/// A report with the points of the matrix, whose tables repeat them for a terminal.
#[derive(Debug, Serialize, Deserialize)]
pub struct NetworkReport {
    #[serde(flatten)]
    pub report: Report,
    pub points: Vec<Point>,
}

/// Number and length of the turns.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    rounds: usize,
    is_quick: bool,
}

impl Effort {
    fn new(args: &Args) -> Self {
        const QUICK_ROUNDS: usize = 3;
        let rounds = if args.quick { args.rounds.clamp(1, QUICK_ROUNDS) } else { args.rounds.max(1) };
        Self { rounds, is_quick: args.quick }
    }

    /// A short turn. The warm-up lasts several round trips, so that clients can adapt to them. The measured period is
    /// long enough that the rate of a single caller varies by little more than one percent between turns.
    fn load(&self, callers: usize, round_trip: Duration) -> Load {
        const WARM_UP: Duration = Duration::from_millis(60);
        const WARM_UP_ROUND_TRIPS: u32 = 10;
        const MEASURED: Duration = Duration::from_millis(200);
        const MEASURED_ROUND_TRIPS: u32 = 80;
        Load {
            callers,
            warm_up: WARM_UP + round_trip * WARM_UP_ROUND_TRIPS,
            measured: MEASURED.max(round_trip * MEASURED_ROUND_TRIPS),
        }
    }
}

/// The resources shared by all parts: Redis, the proxy in front of it, and an observer of Redis.
pub struct Bench {
    effort: Effort,
    server: Server,
    proxy: ProxyProcess,
    observer: Observer,
}

impl Bench {
    async fn start(effort: Effort) -> Result<Self> {
        let server = Server::start().await?;
        let proxy = ProxyProcess::start(server.url().trim_start_matches("redis://"))?;
        let observer = Observer::new(&server).await?;
        Ok(Self { effort, server, proxy, observer })
    }

    /// Sets the round trip, and returns the URL for clients.
    fn url(&mut self, round_trip: Duration) -> Result<&str> {
        if round_trip == LOOPBACK {
            return Ok(self.server.url());
        }
        self.proxy.set_round_trip(round_trip)?;
        Ok(self.proxy.url())
    }

    /// Connects one contestant of each kind.
    async fn connect_all(&mut self, round_trip: Duration, workload: Workload) -> Result<Vec<Connected>> {
        let url = self.url(round_trip)?;
        let mut contestants = Vec::new();
        for kind in Kind::ALL {
            contestants.push(kind.connect(url, workload).await?);
        }
        Ok(contestants)
    }
}

/// Measures the selected parts.
pub async fn run(args: &Args) -> Result<NetworkReport> {
    let mut bench = Bench::start(Effort::new(args)).await?;
    let mut machine = Machine::here(server::version(&mut bench.server.connect().await?).await?)?;
    machine.peers = machine::client_versions();
    let parts: Vec<_> = PARTS.into_iter().filter(|part| args.wants(part)).collect();
    let progress = Progress::new(parts.len());
    let (mut tables, mut points) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            matrix::NAME => {
                points = matrix::points(&mut bench, &progress).await?;
                tables.extend(matrix::tables(&points, &bench.effort));
            }
            open_loop::NAME => tables.push(open_loop::table(&mut bench, &progress).await?),
            one_caller::NAME => tables.push(one_caller::table(&mut bench, &progress).await?),
            saturation::NAME => tables.push(saturation::table(&mut bench, &progress).await?),
            processes::NAME => tables.push(processes::table(&mut bench, &progress).await?),
            _ => tables.push(default_server::table(&mut bench, &progress).await?),
        }
    }
    progress.end();
    let report = Report {
        machine,
        command: crate::command(),
        load_after: machine::load()?,
        remote: tables,
        local: Vec::new(),
    };
    Ok(NetworkReport { report, points })
}

/// The order of turns in a round: each round begins with another contestant.
fn rotated(count: usize, round: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |turn| (turn + round) % count)
}

/// A round trip as text: `0.5 ms`, or `loopback`.
pub fn milliseconds(round_trip: Duration) -> String {
    if round_trip == LOOPBACK {
        "loopback".to_owned()
    } else {
        format!("{} ms", round_trip.as_secs_f64() * 1e3)
    }
}
