//! `sluicegate rules import`: converts rules of other rate limiters.
//!
//! | file | contents |
//! |---|---|
//! | `envoy` | parser of envoyproxy/ratelimit files |
//! | `convert` | conversion of a descriptor tree to rules, with a list of what cannot be expressed |
//! | `toml` | output of rules as TOML |
//! | `envoy_equivalence` | test that rules and descriptors decide the same, on random trees |

mod convert;
mod envoy;
#[cfg(test)]
mod envoy_equivalence;
mod toml;

use std::{error::Error, path::PathBuf};

use clap::{Args, Subcommand};
use serde::Serialize;

use self::convert::Imported;
use crate::{
    CommandResult, ExitStatus,
    output::{self, OutputFormat, WARNING, paint},
};

/// Convert rules of other rate limiters
#[derive(Args)]
pub(crate) struct Import {
    #[command(subcommand)]
    from: From,
}

#[derive(Subcommand)]
enum From {
    /// Convert envoyproxy/ratelimit files to rules that behave the same over gRPC
    ///
    /// Prints TOML, for example: sluicegate rules import envoy config/*.yaml > sluicegate.toml
    ///
    /// Differences are printed to the standard error and as comments in the TOML. Exits with 0 if there are none, 1 if there are
    /// some, 2 if a file is invalid.
    Envoy {
        /// Files, each with one domain
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

/// The JSON report.
#[derive(Serialize)]
struct ImportReport<'a> {
    toml: String,
    rules: usize,
    remarks: Vec<&'a str>,
}

impl Import {
    pub(crate) fn run(self, format: OutputFormat) -> CommandResult {
        let From::Envoy { files } = self.from;
        let imported = import(&files)?;
        let toml = toml::toml(&files, &imported);
        let remarks: Vec<&str> = imported.remarks().collect();
        let status = if remarks.is_empty() { ExitStatus::Success } else { ExitStatus::Negative };
        match format {
            OutputFormat::Json => output::json(&ImportReport { toml, rules: imported.rules.len(), remarks })?,
            OutputFormat::Text => {
                output::raw(toml.as_bytes());
                for remark in remarks {
                    output::note(format_args!("{} {remark}", paint(WARNING.bold(), "difference:")));
                }
            }
        }
        Ok(status)
    }
}

fn import(files: &[PathBuf]) -> Result<Imported, Box<dyn Error>> {
    let mut domains = Vec::new();
    for path in files {
        let domain = envoy::read(path)?;
        if domains.iter().any(|other: &envoy::Domain| other.name == domain.name) {
            let (path, name) = (path.display(), domain.name);
            return Err(format!(
                "{path}: duplicate domain {name:?} in config file: merge its descriptors into one file"
            )
            .into());
        }
        domains.push(domain);
    }
    Ok(convert::rules(&domains)?)
}
