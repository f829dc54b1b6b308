//! The command line.

use std::{path::PathBuf, time::Duration};

use clap::{Parser, Subcommand};

/// Measures tollgate against hand-written scripts and other limiters, on this machine.
#[derive(Debug, Parser)]
#[command(about)]
pub struct Args {
    /// How often each contestant runs; 7 for differences below 1.3 x
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// About a minute: fewer rounds, shorter
    #[arg(long)]
    pub quick: bool,
    /// Prints JSON instead of tables
    #[arg(long)]
    pub json: bool,
    /// Runs only the tables whose name contains this
    #[arg(long)]
    pub only: Option<String>,
    /// Only the contestants whose name contains this take part, on Redis: for a profiler
    #[arg(long)]
    pub solo: Option<String>,
    /// Writes benchmarks.md and benchmarks/redis.svg into this directory
    #[arg(long)]
    pub write: Option<PathBuf>,
    /// What is measured in a process of its own
    #[command(subcommand)]
    pub child: Option<Child>,
}

/// The bench starts itself with this, so that resident memory belongs to one contestant alone.
#[derive(Clone, Debug, Subcommand)]
pub enum Child {
    /// One contestant in process, one line of JSON
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

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// How often each contestant runs.
    pub rounds: usize,
    /// Before each measurement, unmeasured.
    pub warm_up: Duration,
    /// Each measurement.
    pub measured: Duration,
}

impl Effort {
    /// As much time in more and shorter turns, for latencies that depend on what else the machine does just then.
    pub fn in_short_turns(self) -> Self {
        const TURNS: u32 = 4;
        let (warm_up, measured) = (self.warm_up / TURNS, self.measured / TURNS);
        Self { rounds: self.rounds * TURNS as usize, warm_up, measured }
    }
}

impl Args {
    /// What `--rounds` and `--quick` come to.
    pub fn effort(&self) -> Effort {
        if self.quick {
            let (warm_up, measured) = (Duration::from_millis(100), Duration::from_millis(300));
            return Effort { rounds: self.rounds.min(3), warm_up, measured };
        }
        let (warm_up, measured) = (Duration::from_millis(300), Duration::from_millis(1500));
        Effort { rounds: self.rounds.max(1), warm_up, measured }
    }

    /// Whether a table of this name is wanted.
    pub fn wants(&self, table: &str) -> bool {
        self.only.as_deref().is_none_or(|part| table.contains(part))
    }
}
