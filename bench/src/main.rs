//! Measures tollgate against what people use today. `scripts/bench` builds and runs it.
//!
//! It says what it does not measure: see [`report`]. It takes turns between contestants, repeats, and shows medians
//! and spreads.

mod args;
mod drive;
mod local;
mod machine;
mod progress;
mod remote;
mod report;
mod server;
mod stats;

use std::time::Duration;

use anyhow::Result;
use clap::Parser;

use crate::{
    args::{Args, Child},
    machine::Machine,
    progress::Progress,
    report::Report,
    server::Server,
};

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(Child::InProcess { contestant, keys, threads, millis }) = &args.child {
        let measured = local::run(contestant, *keys, *threads, Duration::from_millis(*millis))?;
        println!("{}", serde_json::to_string(&measured)?);
        return Ok(());
    }

    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(run(&args))?;
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
    let machine = Machine::here(server::version(&mut server.connect().await?).await?)?;
    let rounds = args.effort().rounds;
    let progress = Progress::new();
    let remote = remote::tables(args, &server, &progress).await?;
    drop(server);
    let local = local::tables(args, &progress)?;
    progress.end();
    Ok(Report { machine, command: command(), rounds, load_after: machine::load()?, remote, local })
}

/// How to do this again.
fn command() -> String {
    let arguments = std::env::args().skip(1);
    let features = if cfg!(feature = "throttlecrab") { "FEATURES=throttlecrab " } else { "" };
    [format!("{features}scripts/bench")].into_iter().chain(arguments).collect::<Vec<_>>().join(" ")
}
