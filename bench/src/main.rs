//! Compares sluicegate with other limiters. `scripts/bench` builds and runs it.
//!
//! Contestants take turns in several rounds, and medians with their spread are shown. For what is not measured, see
//! [`report`].

mod args;
mod drive;
mod fronts;
mod holds;
mod leases;
mod local;
mod machine;
mod network;
mod outage;
mod progress;
mod remote;
mod report;
mod scaling;
mod server;
mod simulate;
mod stats;

use std::{path::Path, time::Duration};

use anyhow::Result;
use clap::Parser;
use tokio::runtime::Runtime;

use crate::{
    args::{Args, Task},
    machine::Machine,
    network::NetworkReport,
    progress::Progress,
    report::Report,
    server::Server,
};

fn main() -> Result<()> {
    let args = Args::parse();
    match &args.task {
        None => show(&args, &runtime()?.block_on(run(&args))?, Report::write),
        Some(Task::Scaling { directory }) => scaling::write(directory),
        Some(Task::Fronts) => show(&args, &runtime()?.block_on(fronts::run(&args))?, Report::write_fronts),
        Some(Task::Network) => show_network(&args, &runtime()?.block_on(network::run(&args))?),
        Some(Task::Leases { before }) => {
            let report = runtime()?.block_on(leases::run(&args, before.as_deref()))?;
            show(&args, &report, Report::write_leases)
        }
        Some(Task::Holds { before }) => {
            let report = runtime()?.block_on(holds::run(&args, before.as_deref()))?;
            show(&args, &report, Report::write_holds)
        }
        Some(Task::LeasesClient { job }) => runtime()?.block_on(leases::client(job)),
        Some(Task::DelayProxy { upstream }) => network::serve_proxy(*upstream),
        Some(Task::NetworkClient { kind, url }) => runtime()?.block_on(network::client(*kind, url)),
        Some(Task::AlwaysAllow) => runtime()?.block_on(fronts::serve_always_allow()),
        Some(Task::TowerApp { variant }) => runtime()?.block_on(fronts::serve_tower_app(*variant)),
        Some(Task::Outage) => show(&args, &runtime()?.block_on(outage::run(&args))?, Report::write_outage),
        Some(Task::Simulate) => simulate::run(args.rounds, args.quick),
        Some(Task::InProcess { contestant, keys, threads, millis }) => {
            let measured = local::run(contestant, *keys, *threads, Duration::from_millis(*millis))?;
            println!("{}", serde_json::to_string(&measured)?);
            Ok(())
        }
    }
}

fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

fn show(args: &Args, report: &Report, write: fn(&Report, &Path) -> Result<()>) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(report)?);
    } else {
        print!("{}", report::text(report));
    }
    match &args.write {
        Some(directory) => write(report, directory),
        None => Ok(()),
    }
}

fn show_network(args: &Args, network: &NetworkReport) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(network)?);
    } else {
        print!("{}", report::text(&network.report));
    }
    match &args.write {
        Some(directory) => report::write_network(network, directory),
        None => Ok(()),
    }
}

async fn run(args: &Args) -> Result<Report> {
    let server = Server::start().await?;
    let redis = server::version(&mut server.connect().await?).await?;
    let mut machine = Machine::here(redis)?;
    if args.wants_peers() {
        machine.peers.extend(remote::peer_versions().await?);
    }
    let wanted = remote::TABLES.iter().chain(&local::TABLES).filter(|name| args.wants(name));
    let progress = Progress::new(wanted.count());
    let remote = remote::tables(args, &server, &progress).await?;
    drop(server);
    let local = local::tables(args, &progress)?;
    progress.end();
    Ok(Report { machine, command: command(), load_after: machine::load()?, remote, local })
}

/// Returns the command that repeats this run.
fn command() -> String {
    ["scripts/bench".to_owned()].into_iter().chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ")
}
