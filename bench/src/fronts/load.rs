//! Closed-loop load: every client sends its next request when the previous one is answered.

use std::{net::SocketAddr, thread, time::Instant};

use anyhow::{Context, Result};
use tokio::{net::TcpStream, task::JoinSet};

use super::{
    CONCURRENCY, grpc,
    http::{self, Endpoint, HttpRequest},
    process::Process,
    resp::{self, RespClient},
};
use crate::{args::Effort, machine};

/// The requests of the bench's own clients.
#[derive(Clone, Copy, Debug)]
pub enum Workload {
    Http(Endpoint),
    Resp { command: resp::Command, pipeline: usize },
    Grpc,
}

/// A client that sends requests and waits for the responses.
pub trait Client: Send + 'static {
    /// Sends requests for random users, checks that they are allowed, and returns the number of responses.
    fn send(&mut self, random: &mut fastrand::Rng) -> impl Future<Output = Result<u64>> + Send;
}

/// The figures of one turn of a contestant.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Responses per second.
    pub rate: f64,
    /// CPU time of the server per response.
    pub server_cpu_us: f64,
    /// CPU time of the clients per response.
    pub clients_cpu_us: f64,
}

/// Runs one turn of a contestant.
///
/// There is a client thread per core, each with its own connections, as in wrk and h2load: clients that share connections
/// between threads wait for each other, and for some servers more than for others.
pub async fn sample(workload: Workload, process: &Process, effort: Effort) -> Result<Sample> {
    let (contestant, addresses) = (process.contestant, process.addresses);
    // the warm-up includes connecting
    let period = Period::after_warm_up(effort);
    let mut threads = JoinSet::new();
    for share in ThreadShare::all()? {
        threads.spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                match workload {
                    Workload::Http(endpoint) => {
                        let request = HttpRequest::new(endpoint, contestant);
                        let clients = http::clients(request, addresses.http, share.of(CONCURRENCY)).await?;
                        run_clients(clients, period).await
                    }
                    Workload::Resp { command, pipeline } => {
                        let address = addresses.resp.context("the server has no RESP listener")?;
                        let mut clients = Vec::new();
                        for _ in 0..share.of(CONCURRENCY) {
                            clients.push(RespClient::connect(command, pipeline, contestant, address).await?);
                        }
                        run_clients(clients, period).await
                    }
                    Workload::Grpc => {
                        let address = addresses.grpc.context("the server has no gRPC listener")?;
                        let clients = grpc::clients(contestant, address, share.of(grpc::CHANNELS)).await?;
                        run_clients(clients, period).await
                    }
                }
            })
        });
    }
    tokio::time::sleep_until(period.start.into()).await;
    let (server_before, clients_before) = (process.cpu_us()?, machine::own_cpu_us()?);
    let responses = sum(threads).await?;
    let per_response = |us: f64| us / responses.max(1) as f64;
    Ok(Sample {
        rate: responses as f64 / period.start.elapsed().as_secs_f64(),
        server_cpu_us: per_response(process.cpu_us()? - server_before),
        clients_cpu_us: per_response(machine::own_cpu_us()? - clients_before),
    })
}

/// One thread's share of the connections.
#[derive(Clone, Copy)]
struct ThreadShare {
    thread: usize,
    threads: usize,
}

impl ThreadShare {
    /// Returns one share per core.
    fn all() -> Result<impl Iterator<Item = Self>> {
        let threads = thread::available_parallelism()?.get();
        Ok((0..threads).map(move |thread| Self { thread, threads }))
    }

    /// Returns the number of connections of this thread.
    fn of(self, connections: usize) -> usize {
        (self.thread..connections).step_by(self.threads).count()
    }
}

/// The measured period.
#[derive(Clone, Copy)]
struct Period {
    start: Instant,
    end: Instant,
}

impl Period {
    fn after_warm_up(effort: Effort) -> Self {
        let start = Instant::now() + effort.warm_up;
        Self { start, end: start + effort.measured }
    }
}

/// Runs all clients at the same time, and returns the number of responses within the measured period.
async fn run_clients<C: Client>(clients: Vec<C>, period: Period) -> Result<u64> {
    sum(clients.into_iter().map(|client| run_client(client, period)).collect()).await
}

async fn sum(mut tasks: JoinSet<Result<u64>>) -> Result<u64> {
    let mut sum = 0;
    while let Some(responses) = tasks.join_next().await {
        sum += responses??;
    }
    Ok(sum)
}

/// Returns the number of responses within the measured period.
async fn run_client(mut client: impl Client, period: Period) -> Result<u64> {
    let mut random = fastrand::Rng::new();
    let mut total = 0;
    loop {
        let responses = client.send(&mut random).await?;
        let now = Instant::now();
        if now >= period.end {
            return Ok(total);
        }
        if now >= period.start {
            total += responses;
        }
    }
}

/// Connects with `TCP_NODELAY`.
pub async fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}
