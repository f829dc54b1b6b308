//! Rate limits for the routes of an axum service.
//!
//! ```sh
//! cargo run -p sluicegate-tower --example axum
//! for i in 1 2 3 4; do curl -si localhost:3000/login; done
//! ```
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::{net::SocketAddr, time::Duration};

use axum::{Router, routing::get};
use sluicegate::{Limit, Limiter, Rule};
use sluicegate_tower::RateLimitLayer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt::init();
    let logins = Limit::sliding_log(3, Duration::from_secs(60))?;
    let rules = [
        Rule::new("per-ip", Limit::per_minute(100)).per(["ip"]),
        Rule::new("login", logins).when("route", "/login").per(["ip"]),
    ];
    let limiter = Limiter::in_memory(rules)?;

    // behind proxies: .client_ip_behind(ClientAddress::trusting(["10.0.0.0/8"])?)
    let layer = RateLimitLayer::new(limiter).client_ip().matched_path("route");
    let routes = Router::new()
        .route("/", get(|| async { "hello\n" }))
        .route("/login", get(|| async { "welcome\n" }))
        .layer(layer);

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    // with the peer address, which `client_ip` needs
    axum::serve(listener, routes.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
