//! The `tollgate` command.

mod output;
mod serve;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The exit code of an error: neither "fine" nor "denied".
const ERROR: u8 = 2;

/// A rate limiter that many processes share: may this request pass, and if not, when?
#[derive(Parser)]
#[command(name = "tollgate", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Serve),
}

#[tokio::main]
async fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(serve) => serve.run().await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::error(&*error);
            ExitCode::from(ERROR)
        }
    }
}
