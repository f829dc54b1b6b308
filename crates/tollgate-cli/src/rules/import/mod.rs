//! `tollgate rules import`: others' rules as ours.
//!
//! | file | has |
//! |---|---|
//! | `envoy` | the files of envoyproxy/ratelimit, as they are read |
//! | `tree` | what a tree of descriptors means, as rules; and what it means that no rule can say |
//! | `write` | rules as TOML |
//! | `against_envoy` | that both mean the same, tried with random trees |

#[cfg(test)]
mod against_envoy;
mod envoy;
mod tree;
mod write;

use std::{error::Error, path::PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;

use self::tree::Imported;
use crate::{
    Done, Verdict,
    output::{self, Form, ODD, paint},
};

/// Turn others' rules into tollgate's
#[derive(Args)]
pub(crate) struct Import {
    #[command(subcommand)]
    from: From,
}

#[derive(Subcommand)]
enum From {
    /// Turn files of envoyproxy/ratelimit into rules that behave the same through gRPC
    ///
    /// Prints TOML, for example: tollgate rules import envoy config/*.yaml > tollgate.toml
    ///
    /// What no rule can say goes to the standard error, and stands in comments where it belongs. Exits with 0 if there is nothing
    /// of that kind, 1 if there is, 2 if a file cannot be used.
    Envoy {
        /// The files, each with one domain
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

/// What came of it, for programs.
#[derive(Serialize)]
struct Report<'a> {
    toml: String,
    rules: usize,
    remarks: Vec<&'a str>,
}

impl Import {
    pub(crate) fn run(self, form: Form) -> Done {
        let From::Envoy { files } = self.from;
        let imported = import(&files)?;
        let toml = write::toml(&files, &imported);
        let remarks: Vec<&str> = imported.remarks().collect();
        let verdict = if remarks.is_empty() { Verdict::Fine } else { Verdict::Found };
        match form {
            Form::Json => output::json(&Report { toml, rules: imported.rules.len(), remarks })?,
            Form::Text => {
                output::verbatim(toml.as_bytes());
                for remark in remarks {
                    output::note(format_args!("{} {remark}", paint(ODD.bold(), "not the same:")));
                }
            }
        }
        Ok(verdict)
    }
}

fn import(files: &[PathBuf]) -> Result<Imported, Box<dyn Error>> {
    let mut domains = Vec::new();
    for path in files {
        let domain = envoy::read(path)?;
        if domains.iter().any(|other: &envoy::Domain| other.name == domain.name) {
            let (path, name) = (path.display(), domain.name);
            return Err(format!(
                "{path}: duplicate domain {name:?} in config file: put its descriptors into one file"
            )
            .into());
        }
        domains.push(domain);
    }
    Ok(tree::rules(&domains)?)
}
