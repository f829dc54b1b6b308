//! Contestants in other languages, each in a separate process: `bench/peers`.
//!
//! A program receives its task as one JSON argument, and runs the scenario with the same number of closed-loop callers
//! as the other contestants. It prints `measuring` when its warm-up is over, so that the bench reads Redis's CPU time
//! at that moment, and one line of JSON at the end. `scripts/bench` installs its dependencies.

use std::{
    path::PathBuf,
    process::{Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::timeout,
};

use super::{bounds::Bound, keys::Keys};
use crate::{args::Effort, drive::Sample, server};

/// Maximum additional time, for starting up and sorting the latencies.
const GRACE: Duration = Duration::from_secs(20);
/// Minimum warm-up: interpreters with a JIT compiler are slow at first.
const WARM_UP: Duration = Duration::from_secs(1);
/// Time in which each program creates keys before its first turn.
const FILLS: Duration = Duration::from_secs(2);

/// A program that takes part.
#[derive(Clone, Copy, Debug)]
pub enum Program {
    /// `limits`, in Python.
    Limits,
    /// rate-limiter-flexible, in Node.
    Flexible,
    /// The same, with an in-memory cache of denials.
    FlexibleBlocking,
}

/// A program and its scenario.
#[derive(Clone, Debug)]
pub struct Peer {
    program: Program,
    task: Task,
}

/// The task of a program.
#[derive(Clone, Debug, Serialize)]
struct Task {
    url: String,
    /// Number of keys, equally likely; 0 means one key for all requests.
    keys: u64,
    amount: u64,
    window_s: u64,
    callers: usize,
    warm_up_ms: u128,
    measured_ms: u128,
    caches_denials: bool,
}

/// The result that a program prints.
#[derive(Debug, Deserialize)]
struct Played {
    decisions: u64,
    allowed: u64,
    elapsed_s: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
}

impl Program {
    fn command(self) -> Command {
        let at = |path: &str| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers").join(path);
        let (interpreter, driver) = match self {
            Self::Limits => (at(".venv/bin/python"), at("limits_peer.py")),
            Self::Flexible | Self::FlexibleBlocking => (PathBuf::from("node"), at("flexible_peer.mjs")),
        };
        let mut command = Command::new(interpreter);
        command.arg(driver).stdin(Stdio::null()).kill_on_drop(true);
        command
    }
}

/// Returns the versions of all programs and their runtimes.
pub async fn versions() -> Result<Vec<String>> {
    let mut versions = Vec::new();
    for program in [Program::Limits, Program::Flexible] {
        let Output { status, stdout, stderr } = program.command().arg("--version").output().await?;
        let stderr = String::from_utf8_lossy(&stderr);
        ensure!(status.success(), "{program:?} does not start; scripts/bench installs it: {stderr}");
        versions.push(String::from_utf8_lossy(&stdout).trim().to_owned());
    }
    Ok(versions)
}

impl Peer {
    pub fn new(program: Program, url: &str, keys: Keys, bound: Bound) -> Self {
        let keys = match keys {
            Keys::Hot => 0,
            Keys::Random(count) => count,
        };
        let task = Task {
            url: url.to_owned(),
            keys,
            amount: bound.amount,
            window_s: bound.window.as_secs(),
            callers: 0,
            warm_up_ms: 0,
            measured_ms: 0,
            caches_denials: matches!(program, Program::FlexibleBlocking),
        };
        Self { program, task }
    }

    /// Decides before the first turn, so that keys exist.
    pub async fn fill(&self, callers: usize, redis: &mut MultiplexedConnection) -> Result<()> {
        self.play(callers, Duration::ZERO, FILLS, redis).await.map(drop)
    }

    /// One measurement with a warm-up.
    pub async fn timed(
        &self,
        callers: usize,
        effort: Effort,
        redis: &mut MultiplexedConnection,
    ) -> Result<Sample> {
        self.play(callers, effort.warm_up.max(WARM_UP), effort.measured, redis).await
    }

    async fn play(
        &self,
        callers: usize,
        warm_up: Duration,
        measured: Duration,
        redis: &mut MultiplexedConnection,
    ) -> Result<Sample> {
        let task = Task {
            callers,
            warm_up_ms: warm_up.as_millis(),
            measured_ms: measured.as_millis(),
            ..self.task.clone()
        };
        let mut command = self.program.command();
        let mut child = command.arg(serde_json::to_string(&task)?).stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("its output is piped")?).lines();
        let read = async {
            let begun = lines.next_line().await?;
            ensure!(
                begun.as_deref() == Some("measuring"),
                "{:?} printed {begun:?} instead of measuring",
                self.program
            );
            let before = server::done(redis).await?;
            let last = lines.next_line().await?.context("it ended early")?;
            let after = server::done(redis).await?;
            Ok((serde_json::from_str::<Played>(&last)?, before, after))
        };
        let (played, before, after) = timeout(warm_up + measured + GRACE, read)
            .await
            .with_context(|| format!("{:?} does not end", self.program))??;
        child.wait().await?;

        let per_decision = |micros: f64| micros / played.decisions.max(1) as f64;
        Ok(Sample {
            decisions: played.decisions,
            allowed: played.allowed,
            rate: played.decisions as f64 / played.elapsed_s,
            p50_us: played.p50_us,
            p99_us: played.p99_us,
            redis_cpu_us: per_decision(after.cpu_us - before.cpu_us),
            calls: per_decision(after.scripts - before.scripts),
            client_cpu_us: per_decision(played.cpu_us),
        })
    }
}
