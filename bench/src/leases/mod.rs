//! `scripts/bench leases`: limits with leases, compared with a hand-written limiter and with the same limits without leases.
//!
//! A caller in a closed loop would exhaust any realistic limit within a second. Where demand has to stay below the limit, a turn is
//! therefore a number of decisions on a new key. For what is not measured, see [`report`](crate::report).

mod above;
pub mod before;
mod contestants;
mod hot;
mod processes;
mod round_trips;
mod turn;
mod zipf;

use std::time::Duration;

use anyhow::Result;
use sluicegate::Limit;

use crate::{
    args::Args,
    machine::{self, Machine},
    progress::Progress,
    remote::bounds::Bound,
    report::Report,
    server::{self, Server},
};

pub use self::{hot::NAME as HOT, processes::client};

/// The limit of a key: demand stays below it within one turn.
const BOUND: Bound = Bound { amount: 1_000_000, window: Duration::from_secs(10) };
/// The part of the limit that may be leased.
const LEASE_PART: f64 = 0.01;

/// Contestants' names.
const HAND: &str = "hand-written";
pub const WITHOUT: &str = "sluicegate";
pub const WITH: &str = "sluicegate, lease 1 %";

/// All tables, in order.
const TABLES: [&str; 6] =
    [hot::NAME, processes::NAME, above::NAME, zipf::NAME, round_trips::NAME, before::NAME];

/// Number and length of the turns.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    pub rounds: usize,
    pub is_quick: bool,
}

impl Effort {
    pub fn new(args: &Args) -> Self {
        const ROUNDS: usize = 7;
        const QUICK_ROUNDS: usize = 3;
        let rounds = if args.quick { args.rounds.clamp(1, QUICK_ROUNDS) } else { args.rounds.max(ROUNDS) };
        Self { rounds, is_quick: args.quick }
    }

    /// The places of the contestants in a round: each round begins with another one.
    pub fn rotated(self, count: usize, round: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |turn| (turn + round) % count)
    }
}

/// Measures the selected tables. `before` is an earlier revision that `scripts/bench` has built.
pub async fn run(args: &Args, before: Option<&str>) -> Result<Report> {
    let effort = Effort::new(args);
    let redis = server::version(&mut Server::start().await?.connect().await?).await?;
    let mut machine = Machine::here(redis)?;
    machine.peers = machine::redis_client_version();
    let is_wanted = |name: &&str| args.wants(name) && (*name != before::NAME || before.is_some());
    let wanted: Vec<_> = TABLES.into_iter().filter(is_wanted).collect();
    let progress = Progress::new(wanted.len());
    let mut tables = Vec::new();
    for name in wanted {
        // a new server for each table: limiters of another table would be counted as instances that share a lease
        let server = Server::start().await?;
        tables.push(match name {
            hot::NAME => hot::table(effort, &server, &progress).await?,
            processes::NAME => processes::table(effort, &server, &progress).await?,
            above::NAME => above::table(effort, &server, &progress).await?,
            zipf::NAME => zipf::table(effort, &server, &progress).await?,
            round_trips::NAME => round_trips::table(effort, &server, &progress).await?,
            _ => before::table(effort, before.unwrap_or_default(), &progress)?,
        });
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

/// Returns the same limit with a lease of the default lifetime.
fn leased(limit: Limit, bound: Bound) -> Result<Limit> {
    let units = (bound.amount as f64 * LEASE_PART) as u64;
    Ok(limit.with_lease(units, limit.default_lease_lifetime())?)
}
