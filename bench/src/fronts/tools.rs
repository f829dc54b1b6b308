//! Clients that others wrote, to see whether the bench's own flatter anybody: wrk over HTTP, h2load over gRPC, redis-benchmark over the
//! Redis protocol. `scripts/bench` installs them.

use std::{process::Stdio, thread};

use anyhow::{Context, Result, ensure};
use tokio::{process::Command, task::JoinSet};

use super::{CALLERS, Turn, USERS, grpc, http, process::Process, resp};
use crate::{args::Effort, machine};

/// A program that asks for a while and says how fast it was answered.
#[derive(Clone, Copy, Debug)]
pub enum Tool {
    Wrk,
    /// It asks about one user only.
    H2load,
    /// So many commands at once. With several threads it looks only every quarter of a second whether it is done, so it has one.
    RedisBenchmark(usize),
}

/// What a tool saw.
struct Seen {
    rate: f64,
    answers: f64,
}

/// How many pipelines each connection of redis-benchmark sends to find out how many there are time for.
const TRIAL_PIPELINES: usize = 20;

impl Tool {
    /// Has it ask one server.
    pub async fn turn(self, process: &Process, effort: Effort) -> Result<Turn> {
        // wrk and h2load know whole seconds only
        let seconds = effort.measured.as_secs_f64().ceil();
        let commands = match self {
            Self::RedisBenchmark(pipeline) => {
                let trial = redis_benchmark(process, pipeline, CALLERS * pipeline * TRIAL_PIPELINES).await?;
                (trial.rate * seconds) as usize
            }
            Self::Wrk | Self::H2load => 0,
        };
        let (server_before, clients_before) = (process.cpu_us()?, machine::children_cpu_us()?);
        let Seen { rate, answers } = match self {
            Self::Wrk => wrk(process, seconds).await?,
            Self::H2load => h2load(process, seconds).await?,
            Self::RedisBenchmark(pipeline) => redis_benchmark(process, pipeline, commands).await?,
        };
        Ok(Turn {
            rate,
            server_cpu_us: (process.cpu_us()? - server_before) / answers,
            clients_cpu_us: (machine::children_cpu_us()? - clients_before) / answers,
        })
    }
}

async fn wrk(process: &Process, seconds: f64) -> Result<Seen> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/fronts/wrk.lua");
    let question = http::Question::to(process.contestant);
    let url = format!("http://{}{}", process.addresses.http, question.path);
    let mut command = Command::new("wrk");
    command.args(["--threads", &threads()?, "--connections", &CALLERS.to_string()]);
    command.args(["--duration", &format!("{seconds}s"), "--script", script, &url, "--"]);
    command.args([(question.body)("%s"), USERS.to_string()]);
    let said = said(command).await?;
    ensure!(!said.contains("Non-2xx"), "wrk says: {said}");
    let rate = said.lines().find_map(|line| line.strip_prefix("Requests/sec:"));
    let rate: f64 = rate.with_context(|| format!("wrk says: {said}"))?.trim().parse()?;
    Ok(Seen { rate, answers: rate * seconds })
}

async fn h2load(process: &Process, seconds: f64) -> Result<Seen> {
    let (path, message) = grpc::call(process.contestant);
    let body = tempfile::NamedTempFile::new()?;
    std::fs::write(body.path(), message)?;
    let mut command = Command::new("h2load");
    command.args(["--threads", &threads()?, "--clients", &grpc::CHANNELS.to_string()]);
    command.args(["--max-concurrent-streams", &(CALLERS / grpc::CHANNELS).to_string()]);
    command.args(["--duration", &seconds.to_string(), "--data"]).arg(body.path());
    command.args(["--header", "content-type: application/grpc", "--header", "te: trailers"]);
    command.arg(format!("http://{}{path}", process.addresses.grpc));
    let said = said(command).await?;
    ensure!(said.contains(" 0 failed, 0 errored"), "h2load says: {said}");
    let rate = said.split_once(" req/s").and_then(|(before, _)| before.rsplit(", ").next());
    let rate: f64 = rate.with_context(|| format!("h2load says: {said}"))?.parse()?;
    Ok(Seen { rate, answers: rate * seconds })
}

/// One of them for each core, since it is slower than servers are.
async fn redis_benchmark(process: &Process, pipeline: usize, commands: usize) -> Result<Seen> {
    let (count, port) = (cores()?, process.addresses.resp.port());
    let mut asking = JoinSet::new();
    for _ in 0..count {
        let mut command = Command::new("redis-benchmark");
        command.args(["-p", &port.to_string(), "-c", &(CALLERS / count).to_string()]);
        command.args(["-P", &pipeline.to_string(), "-n", &(commands / count).to_string()]);
        command.args([
            "-r",
            &USERS.to_string(),
            "--csv",
            resp::name(process.contestant),
            "user:__rand_int__",
        ]);
        command.args(resp::NUMBERS);
        asking.spawn(said(command));
    }
    let mut rate = 0.0;
    while let Some(said) = asking.join_next().await {
        let said = said??;
        let field = said.lines().last().and_then(|line| line.split("\",\"").nth(1));
        rate += field.with_context(|| format!("redis-benchmark says: {said}"))?.parse::<f64>()?;
    }
    Ok(Seen { rate, answers: commands as f64 })
}

fn cores() -> Result<usize> {
    Ok(thread::available_parallelism()?.get())
}

/// A thread for each core, as the bench's own clients have.
fn threads() -> Result<String> {
    Ok(cores()?.to_string())
}

/// What a program prints.
async fn said(mut command: Command) -> Result<String> {
    let program = command.as_std().get_program().display().to_string();
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = command
        .output()
        .await
        .with_context(|| format!("{program} is not there: scripts/bench installs it"))?;
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program} fails: {said}{complained}");
    Ok(said.into_owned())
}
