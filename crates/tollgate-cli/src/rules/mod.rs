//! `tollgate rules`: what can be said of rules without a server or a store.
//!
//! | file | has |
//! |---|---|
//! | `check` | what is wrong with a file, and what is probably not meant |
//! | `lint` | the latter: rules that work and do nothing, or too much |
//! | `explain` | which rules would apply to a request |
//! | `import` | others' rules as ours |

mod check;
mod explain;
mod import;
mod lint;

use std::{error::Error, path::Path};

use clap::{Args, Subcommand};
use tollgate_server::config::{self, Config, ConfigError, Flags, STANDARD_INPUT, Source};

use crate::{
    Done, Verdict,
    output::{self, Form},
};

/// Check rules, see which apply, convert others' rules
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

    /// Print the JSON Schema of tollgate.toml, for editors
    Schema,

    Import(import::Import),
}

impl Rules {
    pub(crate) fn run(self, form: Form) -> Done {
        match self.command {
            Command::Check(check) => check.run(form),
            Command::Explain(explain) => explain.run(form),
            Command::Schema => schema(form),
            Command::Import(import) => import.run(form),
        }
    }
}

fn schema(form: Form) -> Done {
    match form {
        Form::Text => output::line(serde_json::to_string_pretty(&config::schema())?),
        Form::Json => output::json(&config::schema())?,
    }
    Ok(Verdict::Fine)
}

/// What a file that is named as an argument comes to. An error is not about the file itself, but keeps it from being read.
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
