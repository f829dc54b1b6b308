//! `sluicegate rules check`: reports errors and warnings of a configuration.

use std::{
    error::Error,
    io::IsTerminal,
    path::{Path, PathBuf},
};

use clap::Args;
use serde::Serialize;
use sluicegate_server::config::{Colour, Config, ConfigError, DEFAULT_FILE, fingerprint};

use super::{
    lint::{LintWarning, findings},
    load,
};
use crate::{
    CommandResult, ExitStatus,
    output::{self, DIM, OutputFormat, SUCCESS, WARNING, paint},
};

/// Check a configuration for errors, and for rules without effect
///
/// Reads it as the server does, with all files that it refers to. Exits with 0 if nothing is found, 1 otherwise.
#[derive(Args)]
pub(crate) struct Check {
    /// Configuration files, each checked separately; "-" is the standard input
    #[arg(value_name = "FILE", default_value = DEFAULT_FILE)]
    files: Vec<PathBuf>,
}

/// A configuration under check.
struct CheckedFile<'a> {
    file: &'a Path,
}

/// The JSON report.
#[derive(Serialize)]
struct CheckReport<'a> {
    file: &'a Path,
    errors: Vec<CheckError<'a>>,
    warnings: Vec<LintWarning>,
    rules: Option<usize>,
    fingerprint: Option<String>,
}

/// An error that makes the file unusable.
#[derive(Serialize)]
struct CheckError<'a> {
    message: &'a str,
    line: Option<usize>,
    column: Option<usize>,
}

impl Check {
    pub(crate) fn run(self, format: OutputFormat) -> CommandResult {
        if self.files == [Path::new(DEFAULT_FILE)] && !Path::new(DEFAULT_FILE).exists() {
            return Err(format!(
                "there is no ./{DEFAULT_FILE}: pass the file, as in sluicegate rules check FILE"
            )
            .into());
        }
        // unreadable files are reported before anything is printed
        let loaded = self
            .files
            .iter()
            .map(|file| Ok((file, load(file)?)))
            .collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let mut status = ExitStatus::Success;
        for (file, loaded) in &loaded {
            let checked = CheckedFile { file };
            let result = match loaded {
                Ok(config) => checked.report_warnings(config, format)?,
                Err(error) => checked.report_errors(error, format)?,
            };
            if result == ExitStatus::Negative {
                status = ExitStatus::Negative;
            }
        }
        Ok(status)
    }
}

impl CheckedFile<'_> {
    fn report_errors(&self, error: &ConfigError, format: OutputFormat) -> CommandResult {
        if format == OutputFormat::Json {
            let errors = error.problems().iter().map(|problem| {
                let (line, column) = problem.line_and_column().unzip();
                CheckError { message: problem.message(), line, column }
            });
            let report = self.report(errors.collect(), Vec::new(), None);
            output::json(&report)?;
            return Ok(ExitStatus::Negative);
        }
        let colour = if std::io::stdout().is_terminal() { Colour::Always } else { Colour::Never };
        output::line(error.render(colour));
        Ok(ExitStatus::Negative)
    }

    fn report_warnings(&self, config: &Config, format: OutputFormat) -> CommandResult {
        let findings = findings(config);
        let status = if findings.is_empty() { ExitStatus::Success } else { ExitStatus::Negative };
        if format == OutputFormat::Json {
            output::json(&self.report(Vec::new(), findings, Some(config)))?;
            return Ok(status);
        }
        for finding in &findings {
            let place =
                finding.line.map(|line| format!("{}:{line}: ", self.file.display())).unwrap_or_default();
            output::line(format_args!("{} {place}{finding}", paint(WARNING.bold(), "warning:")));
        }
        let rules = match config.rules.len() {
            1 => "1 rule".to_owned(),
            count => format!("{count} rules"),
        };
        let state = match findings.len() {
            0 => paint(SUCCESS.bold(), "OK"),
            1 => paint(WARNING.bold(), "1 warning"),
            count => paint(WARNING.bold(), format_args!("{count} warnings")),
        };
        let fingerprint = paint(DIM, format_args!("fingerprint {}", fingerprint(&config.rules)));
        output::line(format_args!("{state}  {}: {rules}  {fingerprint}", self.file.display()));
        Ok(status)
    }

    fn report<'a>(
        &'a self,
        errors: Vec<CheckError<'a>>,
        warnings: Vec<LintWarning>,
        config: Option<&Config>,
    ) -> CheckReport<'a> {
        let rules = config.map(|config| config.rules.len());
        let fingerprint = config.map(|config| fingerprint(&config.rules));
        CheckReport { file: self.file, errors, warnings, rules, fingerprint }
    }
}
