//! Rate limits for a gRPC service.
//!
//! ```sh
//! cargo run -p sluicegate-tower --example tonic
//! ```
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::time::Duration;

use sluicegate::{Limit, Limiter, MemoryStore, Rule};
use sluicegate_tower::{RateLimitLayer, client::ClientAddress};
use tokio::net::TcpListener;
use tonic::transport::{
    Channel, Server,
    server::{TcpConnectInfo, TcpIncoming},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let per_method = Limit::sliding_log(3, Duration::from_secs(60))?;
    let limiter =
        Limiter::new(MemoryStore::new(), [Rule::new("per-method", per_method).per(["ip", "path"])])?;
    // the path of a gRPC request is its method: /grpc.health.v1.Health/Check
    let layer = RateLimitLayer::new(limiter).path().client_ip_from(ClientAddress::default(), |request| {
        request.extensions.get::<TcpConnectInfo>()?.remote_addr().map(|peer| peer.ip())
    });

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));

    let mut client = HealthClient::new(Channel::from_shared(address)?.connect().await?);
    for call in 1..=5 {
        match client.check(HealthCheckRequest::default()).await {
            Ok(response) => println!("{call}: allowed, {:?}", response.metadata().get("ratelimit")),
            Err(status) => println!("{call}: {:?}, {}", status.code(), status.message()),
        }
    }
    Ok(())
}
