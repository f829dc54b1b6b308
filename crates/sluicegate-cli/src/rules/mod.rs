//! `sluicegate rules`: commands on rule files, without a server or a store.
//!
//! | file | contents |
//! |---|---|
//! | `check` | reports errors and warnings of a file |
//! | `lint` | the warnings: rules that are valid but ineffective or expensive |
//! | `explain` | which rules would apply to a request |
//! | `import` | converts rules of other rate limiters |

mod check;
mod explain;
mod import;
mod lint;

use std::{error::Error, path::Path};

use clap::{Args, Subcommand};
use sluicegate_server::config::{self, Config, ConfigError, Flags, STANDARD_INPUT, Source};

use crate::{
    CommandResult, ExitStatus,
    output::{self, OutputFormat},
};

/// Check rules, explain which apply, import rules of other rate limiters
#[derive(Args)]
pub(crate) struct Rules {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(aliases = ["lint", "validate"])]
    Check(check::Check),

    Explain(explain::Explain),

    /// Print the JSON Schema of sluicegate.toml, for editors
    Schema,

    Import(import::Import),
}

impl Rules {
    pub(crate) fn run(self, format: OutputFormat) -> CommandResult {
        match self.command {
            Command::Check(check) => check.run(format),
            Command::Explain(explain) => explain.run(format),
            Command::Schema => schema(format),
            Command::Import(import) => import.run(format),
        }
    }
}

fn schema(format: OutputFormat) -> CommandResult {
    match format {
        OutputFormat::Text => output::line(serde_json::to_string_pretty(&config::schema())?),
        OutputFormat::Json => output::json(&config::schema())?,
    }
    Ok(ExitStatus::Success)
}

/// Loads a file given as an argument. The outer error means that the file could not be read at all.
fn load(file: &Path) -> Result<Result<Config, ConfigError>, Box<dyn Error>> {
    let file = if file == Path::new("-") { Path::new(STANDARD_INPUT) } else { file };
    let flags = Flags { config: Some(file.to_owned()), ..Flags::default() };
    match config::load(&Source::new(flags)) {
        Err(error) if error.problems().iter().all(|problem| problem.line_and_column().is_none()) => {
            let messages: Vec<_> = error.problems().iter().map(|problem| problem.message()).collect();
            Err(messages.join("; ").into())
        }
        loaded => Ok(loaded),
    }
}
