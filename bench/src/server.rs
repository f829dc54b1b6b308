//! A private Redis on a free loopback port, without persistence. It is stopped when the bench ends.

use std::{
    net::{SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use redis::aio::MultiplexedConnection;

/// Maximum time until a server answers.
const START_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect to a server that starts.
const START_PAUSE: Duration = Duration::from_millis(20);

/// A running server. Dropping it ends the process.
pub struct Server {
    process: Child,
    addr: SocketAddr,
    url: String,
}

impl Server {
    /// Starts a server and waits until it answers.
    pub async fn start() -> Result<Self> {
        let addr = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let process = Command::new("redis-server")
            .args(["--port", &addr.port().to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .arg("--dir")
            .arg(std::env::temp_dir())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start redis-server: scripts/servers installs it")?;
        let server = Self { process, addr, url: format!("redis://{addr}") };
        let started = Instant::now();
        while server.connect().await.is_err() {
            if started.elapsed() > START_TIMEOUT {
                bail!("redis-server does not answer on {addr}");
            }
            tokio::time::sleep(START_PAUSE).await;
        }
        Ok(server)
    }

    /// Returns the address of the server.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns the process id of the server.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Opens a connection that no contestant uses, for bookkeeping.
    pub async fn connect(&self) -> Result<MultiplexedConnection> {
        Ok(redis::Client::open(self.url())?.get_multiplexed_async_connection().await?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // no data is lost without a shutdown
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The work of the server so far.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// CPU time in microseconds.
    pub cpu_us: f64,
    /// Number of script calls.
    pub scripts: f64,
}

/// Returns the work of the server so far.
pub async fn done(connection: &mut MultiplexedConnection) -> Result<Done> {
    let info: String = redis::cmd("INFO").arg("cpu").arg("commandstats").query_async(connection).await?;
    let cpu_us = 1e6 * (field(&info, "used_cpu_user")? + field(&info, "used_cpu_sys")?);
    let scripts =
        info.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")?.split(',').next());
    Ok(Done { cpu_us, scripts: scripts.map_or(Ok(0.0), str::parse)? })
}

/// Returns the version of the server.
pub async fn version(connection: &mut MultiplexedConnection) -> Result<String> {
    let info: String = redis::cmd("INFO").arg("server").query_async(connection).await?;
    let line = info.lines().find_map(|line| line.strip_prefix("redis_version:"));
    Ok(line.context("INFO server has no redis_version")?.to_owned())
}

/// Removes all keys.
pub async fn empty(connection: &mut MultiplexedConnection) -> Result<()> {
    Ok(redis::cmd("FLUSHALL").exec_async(connection).await?)
}

fn field(info: &str, name: &str) -> Result<f64> {
    let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(value.with_context(|| format!("INFO has no {name}"))?.trim().parse()?)
}
