//! The delay proxy in a separate process, so that its CPU time is not counted as the client's.
//!
//! The child reads one round trip in microseconds per line of its input and acknowledges each on its output. It ends with
//! its input.

use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use sluicegate_testkit::delay_proxy::DelayProxy;

/// A running proxy. Dropping it ends the process.
pub struct ProxyProcess {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    url: String,
}

impl ProxyProcess {
    /// Starts a proxy without a delay to a server on loopback.
    pub fn start(upstream: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["delay-proxy", upstream])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the delay proxy")?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("the proxy's output is piped")?);
        let mut process = Self { child, input, output, url: String::new() };
        process.url = format!("redis://{}", process.read_line()?);
        Ok(process)
    }

    /// Returns the URL that clients connect to.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Changes the round trip, and waits until the change has taken effect.
    pub fn set_round_trip(&mut self, round_trip: Duration) -> Result<()> {
        let input = self.input.as_mut().context("the proxy's input is piped")?;
        writeln!(input, "{}", round_trip.as_micros())?;
        self.read_line()?;
        Ok(())
    }

    fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the delay proxy has ended");
        Ok(line.trim().to_owned())
    }
}

impl Drop for ProxyProcess {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Runs the child process.
pub fn serve(upstream: SocketAddr) -> Result<()> {
    let proxy = DelayProxy::start(upstream, Duration::ZERO);
    println!("{}", proxy.addr());
    for line in std::io::stdin().lock().lines() {
        proxy.set_round_trip(Duration::from_micros(line?.parse()?));
        println!("set");
    }
    Ok(())
}
