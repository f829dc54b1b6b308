//! `scripts/bench holds`: holds, compared with a hand-written limiter that reserves an estimate and corrects it, and checks of rules
//! without holds, compared with an earlier revision.
//!
//! An operation is one hold and its settlement or release. Each contestant of a comparison has its own Redis: the records of settled
//! holds stay for a while, and their expiry would otherwise be part of another contestant's turn. For what is not measured, see
//! [`report`](crate::report).

mod before;
mod contestants;
mod live;
mod round_trips;
mod settle;
mod turn;

use std::time::Duration;

use anyhow::Result;

use crate::{
    args::Args,
    leases::Effort,
    machine::{self, Machine},
    progress::Progress,
    report::Report,
    server::{self, Server},
};

/// Long enough that keys do not expire.
const WINDOW: Duration = Duration::from_secs(86_400);
/// Tokens of a user in a window: never reached.
const TOKENS: u64 = 1_000_000_000;
/// Requests of a user in flight: never reached.
const IN_FLIGHT: u64 = 1_000;
/// The estimate of a request and its actual cost, in tokens.
const ESTIMATE: u64 = 800;
const ACTUAL: u64 = 320;
/// The time until a hold expires.
const TTL: Duration = Duration::from_secs(60);

/// Contestants' names.
const HAND: &str = "hand-written";
const OURS: &str = "sluicegate";

/// All tables, in order.
const TABLES: [&str; 5] = [settle::NAME, live::NAME, round_trips::NAME, before::NAME, before::MEMORY];

/// Measures the selected tables. `before` is an earlier revision that `scripts/bench` has built.
pub async fn run(args: &Args, before: Option<&str>) -> Result<Report> {
    let effort = Effort::new(args);
    let redis = server::version(&mut Server::start().await?.connect().await?).await?;
    let mut machine = Machine::here(redis)?;
    machine.peers = machine::redis_client_version();
    let needs_earlier = |name: &str| name == before::NAME || name == before::MEMORY;
    let is_wanted = |name: &&str| args.wants(name) && (before.is_some() || !needs_earlier(name));
    let wanted: Vec<_> = TABLES.into_iter().filter(is_wanted).collect();
    let progress = Progress::new(wanted.len());
    let (mut remote, mut local) = (Vec::new(), Vec::new());
    for name in wanted {
        let earlier = before.unwrap_or_default();
        match name {
            settle::NAME => remote.push(settle::table(args, effort, &progress).await?),
            live::NAME => remote.push(live::table(effort, &progress).await?),
            round_trips::NAME => remote.push(round_trips::table(effort, &progress).await?),
            before::NAME => remote.push(before::table(effort, earlier, &progress)?),
            _ => local.push(before::memory_table(effort, earlier, &progress)?),
        }
    }
    progress.end();
    Ok(Report { machine, command: crate::command(), load_after: machine::load()?, remote, local })
}
