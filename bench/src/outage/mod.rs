//! `scripts/bench outage`: decisions while the store or its connections fail or the CPU is busy, to help
//! users choose a deadline and a failure policy.
//!
//! Checks are an open loop on one `Limiter` over a private Redis. For what is not measured, see [`report`](crate::report).

mod busy_cpu;
mod calls;
mod connection_faults;
mod cpu_load;
mod fault;
mod lost_connection;
mod over_admission;
mod policies;
mod stopped;

use std::{sync::Arc, time::Duration};

use anyhow::Result;
use sluicegate::{Labels, Limit, Limiter, OnStoreFailure, RedisStore, Rule};

use crate::{
    args::Args,
    machine::{self, Machine},
    progress::Progress,
    report::Report,
    server::{self, Server},
    stats::{Column, Ratio, Stat, Target},
};

/// All parts, in order.
const PARTS: [&str; 5] =
    [stopped::NAME, lost_connection::NAME, connection_faults::NAME, over_admission::NAME, busy_cpu::NAME];

const DEGRADED: Column = Column::new("degraded %", 1);
const LONGEST_DEGRADED: Column = Column::new("longest degraded period ms", 1);

/// The resources shared by all parts.
struct Bench {
    server: Server,
    rounds: usize,
}

impl Bench {
    /// Removes all keys, and with them the registrations of earlier limiters, which would count as instances.
    async fn flush(&self) -> Result<()> {
        server::empty(&mut self.server.connect().await?).await
    }
}

/// Measures the selected parts.
pub async fn run(args: &Args) -> Result<Report> {
    let rounds = if args.quick { 1 } else { args.rounds.max(1) };
    let bench = Bench { server: Server::start().await?, rounds };
    let mut machine = Machine::here(server::version(&mut bench.server.connect().await?).await?)?;
    machine.peers.clear();
    let parts: Vec<_> = PARTS.into_iter().filter(|part| args.wants(part)).collect();
    let progress = Progress::new(parts.len());
    let mut tables = Vec::new();
    for part in parts {
        match part {
            stopped::NAME => tables.push(stopped::table(&bench, &progress).await?),
            lost_connection::NAME => tables.push(lost_connection::table(&bench, &progress).await?),
            connection_faults::NAME => tables.push(connection_faults::table(&bench, &progress).await?),
            over_admission::NAME => tables.push(over_admission::table(&bench, &progress).await?),
            _ => tables.extend(busy_cpu::tables(&bench, &progress).await?),
        }
    }
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
