//! `scripts/bench outage`: latency and decisions while Redis is stopped.
//!
//! Checks are an open loop on one `Limiter` over a private Redis. Not measured: a network that loses packets, several
//! processes, Sentinel and Cluster.

mod calls;
mod stopped;

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use sluicegate::{Labels, Limit, Limiter, OnStoreFailure, RedisStore, Rule};

use crate::{
    machine::{self, Machine},
    progress::Progress,
    report::Report,
    server::{self, Server},
    stats::{Ratio, Stat, Target},
};

/// What every part uses.
struct Bench {
    server: Server,
}

/// Measures all parts.
pub async fn run() -> Result<Report> {
    let bench = Bench { server: Server::start().await? };
    let mut machine = Machine::here(server::version(&mut bench.server.connect().await?).await?)?;
    machine.peers.clear();
    let progress = Progress::new(1);
    let tables = vec![stopped::table(&bench, &progress).await?];
    progress.end();
    Ok(Report {
        machine,
        command: crate::command(),
        load_after: machine::load()?,
        remote: tables,
        local: Vec::new(),
    })
}

/// Connects a limiter whose limit is never reached.
async fn unlimited(url: &str) -> Result<Limiter> {
    let limit = Limit::token_bucket(1_000_000_000, Duration::from_secs(1))?;
    let rule = Rule::new("all", limit).per(["user"]).on_store_failure(OnStoreFailure::Local);
    Ok(Limiter::new(RedisStore::connect(url).await?, [rule])?)
}

fn user(name: &str) -> Result<Arc<Labels>> {
    Ok(Arc::new(Labels::new([("user", name)])?))
}

/// A figure with a target.
fn ratio(what: impl Into<String>, stat: Stat, target: Target) -> Ratio {
    Ratio { what: what.into(), stat, target: Some(target) }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
