//! Servers as processes of their own: the one that always allows is this program, started once more.

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

use super::allow;
use crate::machine;

/// The version that `scripts/bench` installs.
pub const THROTTLECRAB: &str = "throttlecrab-server 0.4.40";

/// How long a server may take to listen.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two attempts to reach it.
const START_PAUSE: Duration = Duration::from_millis(20);

/// Who serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contestant {
    Tollgate,
    AlwaysAllow,
    Throttlecrab,
}

/// Where a server listens.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Addresses {
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub resp: SocketAddr,
}

/// A server that runs until this is dropped.
pub struct Process {
    pub contestant: Contestant,
    pub addresses: Addresses,
    child: Child,
}

impl Contestant {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tollgate => "tollgate",
            Self::AlwaysAllow => "always-allow",
            Self::Throttlecrab => "throttlecrab",
        }
    }
}

impl Process {
    /// Starts a server, and waits until it listens.
    pub async fn start(contestant: Contestant) -> Result<Self> {
        let mut command = match contestant {
            Contestant::Tollgate => tollgate(),
            Contestant::AlwaysAllow => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("always-allow");
                command
            }
            Contestant::Throttlecrab => return Self::throttlecrab().await,
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
        ensure!(!line.is_empty(), "the server {} does not start", contestant.name());
        Ok(Self { contestant, addresses: serde_json::from_str(&line)?, child })
    }

    async fn throttlecrab() -> Result<Self> {
        let program =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("peers/.throttlecrab/bin/throttlecrab-server");
        let addresses = Addresses { http: free()?, grpc: free()?, resp: free()? };
        let child = Command::new(&program)
            .args(["--log-level", "error"])
            .args(["--http", "--http-host", "127.0.0.1", "--http-port", &addresses.http.port().to_string()])
            .args(["--grpc", "--grpc-host", "127.0.0.1", "--grpc-port", &addresses.grpc.port().to_string()])
            .args(["--redis", "--redis-host", "127.0.0.1", "--redis-port"])
            .arg(addresses.resp.port().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}: scripts/bench installs it", program.display()))?;
        let Addresses { http, grpc, resp } = addresses;
        for address in [http, grpc, resp] {
            let begun = Instant::now();
            while TcpStream::connect(address).await.is_err() {
                if begun.elapsed() > START_TIMEOUT {
                    bail!("throttlecrab does not listen on {address}");
                }
                tokio::time::sleep(START_PAUSE).await;
            }
        }
        Ok(Self { contestant: Contestant::Throttlecrab, addresses, child })
    }

    /// Its CPU time so far, in microseconds.
    pub fn cpu_us(&self) -> Result<f64> {
        let id = self.child.id().context("the server has ended")?;
        machine::cpu_us(&id.to_string())
    }
}

/// An address that was free a moment ago.
fn free() -> Result<SocketAddr> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

/// The whole server, as people run it; it says where it listens.
fn tollgate() -> Command {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(machine::tollgate());
    command.args(["serve", "--json", "--log", "warn", "--config"]).arg(here.join("src/fronts/tollgate.toml"));
    for front in ["--http", "--grpc", "--resp"] {
        command.args([front, "127.0.0.1:0"]);
    }
    command
}

/// Serves as the one that always allows, says where, and goes on until it is ended.
pub async fn always_allow() -> Result<()> {
    let (addresses, serving) = allow::serve().await?;
    println!("{}", serde_json::to_string(&addresses)?);
    serving.await
}
