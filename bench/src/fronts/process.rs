//! The servers as child processes. The always-allow server and the axum apps are this program, started again.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
};

use super::{always_allow, tower_app};
use crate::machine;

/// The version that `scripts/bench` installs.
pub const THROTTLECRAB: &str = "throttlecrab-server 0.4.40";

/// Maximum time until a server listens.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect to a server that starts.
const START_PAUSE: Duration = Duration::from_millis(20);

/// A program that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contestant {
    Sluicegate,
    AlwaysAllow,
    Throttlecrab,
    /// An axum app with the rate limit layer.
    LimitedApp,
    /// The same app without the layer.
    PlainApp,
}

/// The addresses that a server listens on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Addresses {
    pub http: SocketAddr,
    pub grpc: Option<SocketAddr>,
    pub resp: Option<SocketAddr>,
}

/// A running server. Dropping it ends the process.
pub struct Process {
    pub contestant: Contestant,
    pub addresses: Addresses,
    child: Child,
}

impl Contestant {
    pub const ALL: [Self; 5] =
        [Self::Sluicegate, Self::AlwaysAllow, Self::Throttlecrab, Self::LimitedApp, Self::PlainApp];

    pub fn name(self) -> &'static str {
        match self {
            Self::Sluicegate => "sluicegate",
            Self::AlwaysAllow => "always-allow",
            Self::Throttlecrab => "throttlecrab",
            Self::LimitedApp => "sluicegate-tower",
            Self::PlainApp => "axum",
        }
    }
}

impl Process {
    /// Starts a server and waits until it listens.
    pub async fn start(contestant: Contestant) -> Result<Self> {
        let mut command = match contestant {
            Contestant::Throttlecrab => return Self::start_throttlecrab().await,
            Contestant::Sluicegate => sluicegate(),
            Contestant::AlwaysAllow => this_program(&["always-allow"])?,
            Contestant::LimitedApp => this_program(&["tower-app", "limited"])?,
            Contestant::PlainApp => this_program(&["tower-app", "plain"])?,
        };
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}: scripts/bench builds it", contestant.name()))?;
        let stdout = child.stdout.take().context("the server's output is piped")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).await?;
        ensure!(!line.is_empty(), "{} does not start", contestant.name());
        Ok(Self { contestant, addresses: serde_json::from_str(&line)?, child })
    }

    async fn start_throttlecrab() -> Result<Self> {
        let program =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers/.throttlecrab/bin/throttlecrab-server");
        let (http, grpc, resp) = (free_address()?, free_address()?, free_address()?);
        let child = Command::new(&program)
            .args(["--log-level", "error"])
            .args(["--http", "--http-host", "127.0.0.1", "--http-port", &http.port().to_string()])
            .args(["--grpc", "--grpc-host", "127.0.0.1", "--grpc-port", &grpc.port().to_string()])
            .args(["--redis", "--redis-host", "127.0.0.1", "--redis-port"])
            .arg(resp.port().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}: scripts/bench installs it", program.display()))?;
        for address in [http, grpc, resp] {
            let started = Instant::now();
            while TcpStream::connect(address).await.is_err() {
                if started.elapsed() > START_TIMEOUT {
                    bail!("throttlecrab does not listen on {address}");
                }
                tokio::time::sleep(START_PAUSE).await;
            }
        }
        let addresses = Addresses { http, grpc: Some(grpc), resp: Some(resp) };
        Ok(Self { contestant: Contestant::Throttlecrab, addresses, child })
    }

    /// Returns the CPU time of the server so far, in microseconds.
    pub fn cpu_us(&self) -> Result<f64> {
        let id = self.child.id().context("the server has ended")?;
        machine::cpu_us(&id.to_string())
    }
}

/// Returns an address that was free a moment ago.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

/// `sluicegate serve` with all listeners; it prints their addresses as JSON.
fn sluicegate() -> Command {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(machine::sluicegate());
    command
        .args(["serve", "--json", "--log", "warn", "--config"])
        .arg(here.join("src/fronts/sluicegate.toml"));
    for front in ["--http", "--grpc", "--resp"] {
        command.args([front, "127.0.0.1:0"]);
    }
    command
}

fn this_program(arguments: &[&str]) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments);
    Ok(command)
}

/// Runs the always-allow server: the child process.
pub async fn serve_always_allow() -> Result<()> {
    serve(always_allow::serve().await?).await
}

/// Runs an axum app: the child process.
pub async fn serve_tower_app(variant: tower_app::Variant) -> Result<()> {
    serve(tower_app::serve(variant).await?).await
}

/// Prints the addresses for the parent process, and serves until the process is killed.
async fn serve((addresses, serving): (Addresses, impl Future<Output = Result<()>>)) -> Result<()> {
    println!("{}", serde_json::to_string(&addresses)?);
    serving.await
}
