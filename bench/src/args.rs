//! The command line.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};

use crate::{fronts::TowerAppVariant, network::Kind, stats::Target};

/// Compares sluicegate with hand-written scripts and other limiters on this machine.
#[derive(Debug, Parser)]
#[command(about)]
pub struct Args {
    /// Rounds per contestant; at least 7 for leases, holds and where a target is 1.3 or less
    #[arg(long, global = true, default_value_t = 5)]
    pub rounds: usize,
    /// At most three shorter rounds, without the contestants in other processes: about two minutes
    #[arg(long, global = true)]
    pub quick: bool,
    /// Include the contestants in other processes in a quick run
    #[arg(long, global = true)]
    pub peers: bool,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// Run only the tables whose name contains one of these words, separated by commas
    #[arg(long, global = true, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Run only the contestants whose name contains this word, on Redis and over the front ends: for profiling
    #[arg(long, global = true, conflicts_with = "write")]
    pub solo: Option<String>,
    /// Write benchmarks.md, benchmarks/redis.svg and benchmarks/figures.json into this directory, or
    /// the page of the task: benchmarks-fronts.md, benchmarks-holds.md, benchmarks-leases.md, benchmarks-network.md,
    /// benchmarks-outage.md
    #[arg(long, global = true)]
    pub write: Option<PathBuf>,
    /// Task to run instead of all tables
    #[command(subcommand)]
    pub task: Option<Task>,
}

/// A task other than the tables.
#[derive(Clone, Debug, Subcommand)]
pub enum Task {
    /// Compute and simulate the number of primaries for a rate of decisions, from the figures written by --write
    Scaling {
        /// Directory of benchmarks/figures.json, to which scaling.md and benchmarks/scaling.svg are written
        #[arg(default_value = "docs")]
        directory: PathBuf,
    },
    /// Measure decisions while Redis is stopped, connections are lost, or the CPU is busy
    Outage,
    /// Measure speed and memory of `sluicegate simulate` on a log of five million lines
    Simulate,
    /// Compare front ends and the tower layer with counterparts that always allow, and with throttlecrab
    Fronts,
    /// Compare limiters with Redis behind a network, with round trips from 0 to 5 ms
    Network,
    /// Compare limits with leases with a hand-written limiter and with limits without leases
    Leases {
        /// Earlier revision to compare limits without leases with; scripts/bench builds it
        #[arg(long, value_name = "REVISION")]
        before: Option<String>,
    },
    /// Compare holds with a hand-written limiter, and limits without holds with an earlier revision
    Holds {
        /// Earlier revision to compare limits without holds with; scripts/bench builds it
        #[arg(long, value_name = "REVISION")]
        before: Option<String>,
    },
    /// Run the proxy that delays traffic: started by the bench
    #[command(hide = true)]
    DelayProxy {
        /// Address of the server
        upstream: SocketAddr,
    },
    /// Run one of several client processes: started by the bench
    #[command(hide = true)]
    NetworkClient {
        /// Contestant
        kind: Kind,
        /// URL of the server
        url: String,
    },
    /// Run one of several client processes that share a lease: started by the bench
    #[command(hide = true)]
    LeasesClient {
        /// Work in JSON
        job: String,
    },
    /// Run the server that always allows: started by the bench
    #[command(hide = true)]
    AlwaysAllow,
    /// Run an axum app with or without the rate limit layer: started by the bench
    #[command(hide = true)]
    TowerApp {
        /// Whether it has the layer
        variant: TowerAppVariant,
    },
    /// Run one in-process contestant and print a line of JSON: started by the bench, so that the resident memory is
    /// that of one contestant
    #[command(hide = true)]
    InProcess {
        /// Name of the contestant
        contestant: String,
        /// Number of keys
        keys: usize,
        /// Number of threads
        threads: usize,
        /// Duration of the measurement in milliseconds
        millis: u64,
    },
}

/// Minimum number of rounds where noise would hide a small target.
const FINE_ROUNDS: usize = 7;
/// Maximum number of rounds in a quick run.
const QUICK_ROUNDS: usize = 3;

/// Number and length of the turns.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds per contestant.
    pub rounds: usize,
    /// Unmeasured time before each measurement.
    pub warm_up: Duration,
    /// Time of each measurement.
    pub measured: Duration,
    quick: bool,
}

impl Effort {
    /// Returns whether slow parts are skipped.
    pub fn is_quick(&self) -> bool {
        self.quick
    }

    /// Raises the number of rounds to the minimum that these targets need.
    pub fn for_targets(self, targets: impl IntoIterator<Item = Option<Target>>) -> Self {
        let fine = targets.into_iter().flatten().any(Target::is_fine);
        let least = if fine && !self.quick { FINE_ROUNDS } else { 1 };
        Self { rounds: self.rounds.max(least), ..self }
    }

    /// Raises the warm-up to at least `least`.
    pub fn with_warm_up(self, least: Duration) -> Self {
        Self { warm_up: self.warm_up.max(least), ..self }
    }

    /// Splits the same time into more and shorter turns, for latencies that depend on the momentary load of the machine.
    pub fn in_short_turns(self) -> Self {
        const TURNS: u32 = 4;
        let (warm_up, measured) = (self.warm_up / TURNS, self.measured / TURNS);
        Self { rounds: self.rounds * TURNS as usize, warm_up, measured, ..self }
    }
}

impl Args {
    /// Returns the effort that `--rounds` and `--quick` select.
    pub fn effort(&self) -> Effort {
        let quick = self.quick;
        if quick {
            let (warm_up, measured) = (Duration::from_millis(100), Duration::from_millis(300));
            return Effort { rounds: self.rounds.clamp(1, QUICK_ROUNDS), warm_up, measured, quick };
        }
        let (warm_up, measured) = (Duration::from_millis(300), Duration::from_millis(1500));
        Effort { rounds: self.rounds.max(1), warm_up, measured, quick }
    }

    /// Returns whether contestants in other processes take part.
    pub fn wants_peers(&self) -> bool {
        self.peers || !self.quick
    }

    /// Returns whether a table is selected.
    pub fn wants(&self, table: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| table.contains(part))
    }
}
