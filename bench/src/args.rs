//! The command line.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};

use crate::{fronts::TowerAppVariant, network::Kind, stats::Target};

/// Measures sluicegate against hand-written scripts and other limiters, on this machine.
#[derive(Debug, Parser)]
#[command(about)]
pub struct Args {
    /// How often each contestant runs; at least 7 times where a target is 1.3 x or less
    #[arg(long, global = true, default_value_t = 5)]
    pub rounds: usize,
    /// About two minutes: at most three rounds, shorter, without the contestants that are programs of their own
    #[arg(long, global = true)]
    pub quick: bool,
    /// The contestants that are programs of their own take part in a quick run too
    #[arg(long, global = true)]
    pub peers: bool,
    /// Prints JSON instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// Runs only the tables whose name contains this, or one of these, separated by commas
    #[arg(long, global = true, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Only the contestants whose name contains this take part, on Redis and over the front ends: for a profiler
    #[arg(long, global = true, conflicts_with = "write")]
    pub solo: Option<String>,
    /// Writes benchmarks.md, benchmarks/redis.svg and benchmarks/figures.json into this directory, or
    /// the task's own page: benchmarks-fronts.md, benchmarks-network.md
    #[arg(long, global = true)]
    pub write: Option<PathBuf>,
    /// What else it does, instead of measuring all tables
    #[command(subcommand)]
    pub task: Option<Task>,
}

/// Everything but the tables.
#[derive(Clone, Debug, Subcommand)]
pub enum Task {
    /// Computes and simulates how many primaries carry how many decisions, from what --write has measured
    Scaling {
        /// Where benchmarks/figures.json is, and where scaling.md and benchmarks/scaling.svg are written
        #[arg(default_value = "docs")]
        directory: PathBuf,
    },
    /// What callers see while Redis stands still for ten seconds
    Outage,
    /// How fast `sluicegate simulate` goes through a log of five million lines, and in how much memory
    Simulate,
    /// The server's front ends against servers that always allow, and against throttlecrab's
    Fronts,
    /// Limiters on a Redis that is a network away: round trips from 0 to 5 ms
    Network,
    /// The proxy that delays traffic, as a process of its own: started by the bench
    #[command(hide = true)]
    DelayProxy {
        /// Address of the server
        upstream: SocketAddr,
    },
    /// One of several client processes: started by the bench
    #[command(hide = true)]
    NetworkClient {
        /// Contestant
        kind: Kind,
        /// URL of the server
        url: String,
    },
    /// The server that always allows: started by the bench
    #[command(hide = true)]
    AlwaysAllow,
    /// An axum app with or without the rate limit layer: started by the bench
    #[command(hide = true)]
    TowerApp {
        /// Whether it has the layer
        variant: TowerAppVariant,
    },
    /// One contestant in process, one line of JSON: started by the bench, so that resident memory belongs to
    /// one contestant alone
    #[command(hide = true)]
    InProcess {
        /// Its name
        contestant: String,
        /// How many keys
        keys: usize,
        /// How many threads
        threads: usize,
        /// For how long
        millis: u64,
    },
}

/// How often each contestant runs where a target is so small that noise would hide it.
const FINE_ROUNDS: usize = 7;
/// How often at most in a quick run.
const QUICK_ROUNDS: usize = 3;

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// How often each contestant runs.
    pub rounds: usize,
    /// Before each measurement, unmeasured.
    pub warm_up: Duration,
    /// Each measurement.
    pub measured: Duration,
    quick: bool,
}

impl Effort {
    /// Whether what takes long is left out.
    pub fn is_quick(&self) -> bool {
        self.quick
    }

    /// With as many rounds as these targets take.
    pub fn for_targets(self, targets: impl IntoIterator<Item = Option<Target>>) -> Self {
        let fine = targets.into_iter().flatten().any(Target::is_fine);
        let least = if fine && !self.quick { FINE_ROUNDS } else { 1 };
        Self { rounds: self.rounds.max(least), ..self }
    }

    /// With a warm-up of at least this.
    pub fn with_warm_up(self, least: Duration) -> Self {
        Self { warm_up: self.warm_up.max(least), ..self }
    }

    /// As much time in more and shorter turns, for latencies that depend on what else the machine does just then.
    pub fn in_short_turns(self) -> Self {
        const TURNS: u32 = 4;
        let (warm_up, measured) = (self.warm_up / TURNS, self.measured / TURNS);
        Self { rounds: self.rounds * TURNS as usize, warm_up, measured, ..self }
    }
}

impl Args {
    /// What `--rounds` and `--quick` come to.
    pub fn effort(&self) -> Effort {
        let quick = self.quick;
        if quick {
            let (warm_up, measured) = (Duration::from_millis(100), Duration::from_millis(300));
            return Effort { rounds: self.rounds.clamp(1, QUICK_ROUNDS), warm_up, measured, quick };
        }
        let (warm_up, measured) = (Duration::from_millis(300), Duration::from_millis(1500));
        Effort { rounds: self.rounds.max(1), warm_up, measured, quick }
    }

    /// Whether contestants that are programs of their own take part.
    pub fn wants_peers(&self) -> bool {
        self.peers || !self.quick
    }

    /// Whether a table of this name is wanted.
    pub fn wants(&self, table: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| table.contains(part))
    }
}
