//! How much slower is a decision over gRPC than a server that reads the same request and always says yes?
//!
//!     cargo run --release -p tollgate-server --example grpc_speed
//!
//! Both run in this process, one on the memory store, one as tonic serves it; each is asked over one connection, many calls at
//! a time, in turns. The client takes more of the processor than either, so that what differs looks smaller than it is. What is not measured: Envoy, TLS, Redis, and a client on another machine.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measurement")]

use std::{net::SocketAddr, time::Duration};

use tokio::{net::TcpListener, task::JoinSet, time::Instant};
use tollgate::{Limit, Limiter, MemoryStore, Rule};
use tollgate_server::{
    access::Access,
    config::live,
    desk::Desk,
    grpc::{
        Services, Settings,
        messages::{
            Code, DescriptorStatus, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
            rate_limit_descriptor::Entry,
            rate_limit_service_client::RateLimitServiceClient,
            rate_limit_service_server::{RateLimitService, RateLimitServiceServer},
        },
        serve,
    },
    listen::Security,
};
use tonic::{
    Request, Response, Status,
    transport::{Channel, Server, server::TcpIncoming},
};

const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_secs(2);
const AT_A_TIME: usize = 64;
const CLIENTS: usize = 10_000;

/// Reads a request and says yes.
struct Always;

#[tonic::async_trait]
impl RateLimitService for Always {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let ok = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
        Ok(Response::new(RateLimitResponse {
            overall_code: Code::Ok.into(),
            statuses: vec![ok; request.get_ref().descriptors.len()],
            ..RateLimitResponse::default()
        }))
    }
}

#[tokio::main]
async fn main() {
    let limit = Limit::token_bucket(1_000_000, Duration::from_secs(1)).unwrap();
    let rules = [Rule::new("per-address", limit).when("domain", "edge").per(["remote_address"])];
    let limiter = Limiter::new(MemoryStore::new(), rules).unwrap();
    let ours =
        started(Services::new(Desk::new(limiter), live(Settings::default()), Access::default()).await).await;
    let theirs = always().await;
    println!("{:>5}  {:>12}  {:>12}  {:>6}", "round", "tollgate/s", "always yes/s", "ratio");
    for round in 1..=ROUNDS {
        let (ours, theirs) = (calls_per_second(ours).await, calls_per_second(theirs).await);
        println!("{round:>5}  {ours:>12.0}  {theirs:>12.0}  {:>6.2}", ours / theirs);
    }
}

async fn always() -> SocketAddr {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_nodelay(Some(true));
    let address = incoming.local_addr().unwrap();
    let server = Server::builder().add_service(RateLimitServiceServer::new(Always));
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

async fn started(services: Services) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve::run(listener, services, Security::default(), std::future::pending()));
    address
}

async fn calls_per_second(server: SocketAddr) -> f64 {
    let channel = Channel::from_shared(format!("http://{server}")).unwrap().connect().await.unwrap();
    let end = Instant::now() + ROUND;
    let mut callers = JoinSet::new();
    for caller in 0..AT_A_TIME {
        let mut client = RateLimitServiceClient::new(channel.clone());
        callers.spawn(async move {
            let mut calls = 0_u32;
            for number in (caller..).step_by(AT_A_TIME) {
                if Instant::now() >= end {
                    break;
                }
                client.should_rate_limit(request(number % CLIENTS)).await.unwrap();
                calls += 1;
            }
            calls
        });
    }
    let calls: u32 = callers.join_all().await.iter().sum();
    f64::from(calls) / ROUND.as_secs_f64()
}

fn request(client: usize) -> RateLimitRequest {
    let address = format!("198.51.{}.{}", client / 256, client % 256).into_bytes();
    let entries = vec![Entry { key: "remote_address".to_owned(), value: address }];
    let descriptor = RateLimitDescriptor { entries, ..RateLimitDescriptor::default() };
    RateLimitRequest { domain: "edge".to_owned(), descriptors: vec![descriptor], hits_addend: 0 }
}
