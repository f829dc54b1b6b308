//! Measures tollgate against what people use today. `scripts/bench` builds and runs it.
//!
//! It says what it does not measure: see [`report`]. It takes turns between contestants, repeats, and shows medians
//! and spreads.

mod args;
mod drive;
mod local;
mod machine;
mod outage;
mod progress;
mod remote;
mod report;
mod resp;
mod scaling;
mod server;
mod stats;

use std::time::Duration;

use anyhow::Result;
use clap::Parser;

use crate::{
    args::{Args, Task},
    machine::Machine,
    progress::Progress,
    report::Report,
    server::Server,
};

fn main() -> Result<()> {
    let args = Args::parse();
    match &args.task {
        None => measure(&args),
        Some(Task::Scaling { directory }) => scaling::write(directory),
        Some(Task::Resp) => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            runtime.block_on(resp::run(args.rounds))
        }
        Some(Task::Outage) => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            runtime.block_on(outage::run())
        }
        Some(Task::InProcess { contestant, keys, threads, millis }) => {
            let measured = local::run(contestant, *keys, *threads, Duration::from_millis(*millis))?;
            println!("{}", serde_json::to_string(&measured)?);
            Ok(())
        }
    }
}

fn measure(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(run(args))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report::text(&report));
    }
    if let Some(directory) = &args.write {
        report.write(directory)?;
    }
    Ok(())
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

/// How to do this again.
fn command() -> String {
    ["scripts/bench".to_owned()].into_iter().chain(std::env::args().skip(1)).collect::<Vec<_>>().join(" ")
}
