//! Third-party load generators, to check that the bench's own clients do not favor a server: wrk for HTTP, h2load for gRPC,
//! redis-benchmark for the Redis protocol. `scripts/bench` installs them.

use std::{process::Stdio, thread};

use anyhow::{Context, Result, ensure};
use tokio::{process::Command, task::JoinSet};

use super::{
    CONCURRENCY, USERS, grpc,
    http::{Endpoint, HttpRequest},
    load::Sample,
    process::Process,
    resp,
    template::USER,
};
use crate::{args::Effort, machine};

/// A load generator.
#[derive(Clone, Copy, Debug)]
pub enum Tool {
    Wrk,
    /// Sends all calls for one user.
    H2load,
    /// Single-threaded: with several threads it checks only every 250 ms whether it is done.
    RedisBenchmark {
        pipeline: usize,
    },
}

/// The result that a tool prints.
struct ToolResult {
    rate: f64,
    responses: f64,
}

/// Pipelines per connection in the trial run that determines how many commands fit into the measured period.
const TRIAL_PIPELINES: usize = 20;

impl Tool {
    /// Runs one turn of a contestant.
    pub async fn sample(self, process: &Process, effort: Effort) -> Result<Sample> {
        // wrk and h2load accept whole seconds only
        let seconds = effort.measured.as_secs_f64().ceil();
        let commands = match self {
            Self::RedisBenchmark { pipeline } => {
                let trial =
                    redis_benchmark(process, pipeline, CONCURRENCY * pipeline * TRIAL_PIPELINES).await?;
                (trial.rate * seconds) as usize
            }
            Self::Wrk | Self::H2load => 0,
        };
        let (server_before, clients_before) = (process.cpu_us()?, machine::children_cpu_us()?);
        let ToolResult { rate, responses } = match self {
            Self::Wrk => wrk(process, seconds).await?,
            Self::H2load => h2load(process, seconds).await?,
            Self::RedisBenchmark { pipeline } => redis_benchmark(process, pipeline, commands).await?,
        };
        Ok(Sample {
            rate,
            server_cpu_us: (process.cpu_us()? - server_before) / responses,
            clients_cpu_us: (machine::children_cpu_us()? - clients_before) / responses,
        })
    }
}

async fn wrk(process: &Process, seconds: f64) -> Result<ToolResult> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/fronts/wrk.lua");
    let request = HttpRequest::new(Endpoint::Check, process.contestant);
    let url = format!("http://{}{}", process.addresses.http, request.target);
    let mut command = Command::new("wrk");
    command.args(["--threads", &threads()?, "--connections", &CONCURRENCY.to_string()]);
    command.args(["--duration", &format!("{seconds}s"), "--script", script, &url, "--"]);
    command.args([request.body, &USERS.to_string()]);
    let output = output(command).await?;
    ensure!(!output.contains("Non-2xx"), "unexpected output of wrk: {output}");
    let rate = output.lines().find_map(|line| line.strip_prefix("Requests/sec:"));
    let rate: f64 = rate.with_context(|| format!("unexpected output of wrk: {output}"))?.trim().parse()?;
    Ok(ToolResult { rate, responses: rate * seconds })
}

async fn h2load(process: &Process, seconds: f64) -> Result<ToolResult> {
    let address = process.addresses.grpc.context("the server has no gRPC listener")?;
    let (path, message) = grpc::raw_call(process.contestant);
    let body = tempfile::NamedTempFile::new()?;
    std::fs::write(body.path(), message)?;
    let mut command = Command::new("h2load");
    command.args(["--threads", &threads()?, "--clients", &grpc::CHANNELS.to_string()]);
    command.args(["--max-concurrent-streams", &(CONCURRENCY / grpc::CHANNELS).to_string()]);
    command.args(["--duration", &seconds.to_string(), "--data"]).arg(body.path());
    command.args(["--header", "content-type: application/grpc", "--header", "te: trailers"]);
    command.arg(format!("http://{address}{path}"));
    let output = output(command).await?;
    ensure!(output.contains(" 0 failed, 0 errored"), "unexpected output of h2load: {output}");
    let rate = output.split_once(" req/s").and_then(|(before, _)| before.rsplit(", ").next());
    let rate: f64 = rate.with_context(|| format!("unexpected output of h2load: {output}"))?.parse()?;
    Ok(ToolResult { rate, responses: rate * seconds })
}

/// Runs one redis-benchmark per core, because a single one is slower than the servers.
async fn redis_benchmark(process: &Process, pipeline: usize, commands: usize) -> Result<ToolResult> {
    let address = process.addresses.resp.context("the server has no RESP listener")?;
    let words = resp::Command::Throttle.words(process.contestant);
    let words = words.iter().map(|word| if *word == USER { "user:__rand_int__" } else { word });
    let count = cores()?;
    let mut runs = JoinSet::new();
    for _ in 0..count {
        let mut command = Command::new("redis-benchmark");
        command.args(["-p", &address.port().to_string(), "-c", &(CONCURRENCY / count).to_string()]);
        command.args(["-P", &pipeline.to_string(), "-n", &(commands / count).to_string()]);
        command.args(["-r", &USERS.to_string(), "--csv"]).args(words.clone());
        runs.spawn(output(command));
    }
    let mut rate = 0.0;
    while let Some(output) = runs.join_next().await {
        let output = output??;
        let field = output.lines().last().and_then(|line| line.split("\",\"").nth(1));
        rate += field
            .with_context(|| format!("unexpected output of redis-benchmark: {output}"))?
            .parse::<f64>()?;
    }
    Ok(ToolResult { rate, responses: commands as f64 })
}

fn cores() -> Result<usize> {
    Ok(thread::available_parallelism()?.get())
}

/// One thread per core, like the bench's own clients.
fn threads() -> Result<String> {
    Ok(cores()?.to_string())
}

/// Runs a program and returns its standard output.
async fn output(mut command: Command) -> Result<String> {
    let program = command.as_std().get_program().display().to_string();
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output =
        command.output().await.with_context(|| format!("cannot run {program}: scripts/bench installs it"))?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program} failed: {stdout}{stderr}");
    Ok(stdout.into_owned())
}
