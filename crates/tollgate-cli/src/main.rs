//! The `tollgate` command.

mod ask;
mod bench;
mod completions;
mod doctor;
mod man;
mod numbers;
mod output;
mod rules;
mod serve;
mod simulate;

use std::{error::Error, process::ExitCode};

use clap::{Parser, Subcommand};
use mimalloc::MiMalloc;

use crate::output::Form;

/// A decision makes a few small allocations: this allocator takes a tenth off what a request over HTTP costs.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

const BEGIN: &str = "\
Begin with:
  tollgate serve                               a server, with rules for a first look
  tollgate check route=login ip=203.0.113.9    asks it, from another terminal
  tollgate rules check tollgate.toml           looks for mistakes in rules of your own";

/// A rate limiter that many processes share: may this request pass, and if not, when?
#[derive(Parser)]
#[command(name = "tollgate", version, arg_required_else_help = true, max_term_width = 100, after_help = BEGIN)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Answers in JSON, for programs
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Serve),

    #[command(flatten)]
    Ask(ask::Ask),

    Rules(rules::Rules),

    Doctor(doctor::Doctor),

    Simulate(simulate::Simulate),

    Bench(bench::Bench),

    Completions(completions::Completions),

    Man(man::Man),
}

/// What a command that ran has to say, as an exit code: it is what `if` asks for in a shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Allowed; nothing wrong was found.
    Fine,
    /// Denied; something was found.
    Found,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Fine => Self::SUCCESS,
            Verdict::Found => Self::from(1),
        }
    }
}

/// The exit code of a command that could not do what it was asked: neither "fine" nor "denied".
const ERROR: u8 = 2;

/// How a command ends.
type Done = Result<Verdict, Box<dyn Error>>;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let form = if cli.json { Form::Json } else { Form::Text };
    let done = match cli.command {
        Command::Bench(bench) => bench.run(form).await,
        Command::Doctor(doctor) => doctor.run(form).await,
        Command::Serve(serve) => serve.run(form).await,
        Command::Ask(ask) => ask.run(form).await,
        Command::Rules(rules) => rules.run(form),
        Command::Completions(completions) => completions.run(),
        Command::Man(man) => man.run(),
        Command::Simulate(simulate) => simulate.run(form).await,
    };
    match done.and_then(|verdict| Ok(output::all_written().map(|()| verdict)?)) {
        Ok(verdict) => verdict.into(),
        Err(error) => {
            output::error(&*error);
            ExitCode::from(ERROR)
        }
    }
}
