//! `tollgate rules check`: what is wrong with a file of rules, and what is probably not meant.

use std::{
    error::Error,
    io::IsTerminal,
    path::{Path, PathBuf},
};

use clap::Args;
use serde::Serialize;
use tollgate_server::config::{Colour, Config, ConfigError, fingerprint};

use super::{
    lint::{Finding, findings},
    load,
};
use crate::{
    Done, Verdict,
    output::{self, FAINT, Form, GOOD, ODD, paint},
};

/// CounterSnapshot for mistakes in a configuration, and for rules that do nothing
///
/// Reads it as the server would, with all the files that it names. Exits with 0 if there is nothing to say, 1 if there is.
#[derive(Args)]
pub(crate) struct Check {
    /// The configuration, for example tollgate.toml; each of several by itself; "-" is the standard input
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

/// One configuration.
struct Checked<'a> {
    file: &'a Path,
}

/// What was found, for programs.
#[derive(Serialize)]
struct Report<'a> {
    file: &'a Path,
    errors: Vec<Mistake<'a>>,
    warnings: Vec<Finding>,
    rules: Option<usize>,
    fingerprint: Option<String>,
}

/// Why the file cannot be used.
#[derive(Serialize)]
struct Mistake<'a> {
    message: &'a str,
    line: Option<usize>,
    column: Option<usize>,
}

impl Check {
    pub(crate) fn run(self, form: Form) -> Done {
        // what cannot be read at all is said before anything else
        let loaded = self
            .files
            .iter()
            .map(|file| Ok((file, load(file)?)))
            .collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        let mut verdict = Verdict::Fine;
        for (file, loaded) in &loaded {
            let checked = Checked { file };
            let found = match loaded {
                Ok(config) => checked.sound(config, form)?,
                Err(error) => checked.broken(error, form)?,
            };
            if found == Verdict::Found {
                verdict = Verdict::Found;
            }
        }
        Ok(verdict)
    }
}

impl Checked<'_> {
    fn broken(&self, error: &ConfigError, form: Form) -> Done {
        if form == Form::Json {
            let mistakes = error.problems().iter().map(|problem| {
                let (line, column) = problem.line_and_column().unzip();
                Mistake { message: problem.message(), line, column }
            });
            let report = self.report(mistakes.collect(), Vec::new(), None);
            output::json(&report)?;
            return Ok(Verdict::Found);
        }
        let colour = if std::io::stdout().is_terminal() { Colour::Always } else { Colour::Never };
        output::line(error.render(colour));
        Ok(Verdict::Found)
    }

    fn sound(&self, config: &Config, form: Form) -> Done {
        let findings = findings(config);
        let verdict = if findings.is_empty() { Verdict::Fine } else { Verdict::Found };
        if form == Form::Json {
            output::json(&self.report(Vec::new(), findings, Some(config)))?;
            return Ok(verdict);
        }
        for finding in &findings {
            let place =
                finding.line.map(|line| format!("{}:{line}: ", self.file.display())).unwrap_or_default();
            output::line(format_args!("{} {place}{finding}", paint(ODD.bold(), "warning:")));
        }
        let rules = match config.rules.len() {
            1 => "1 rule".to_owned(),
            count => format!("{count} rules"),
        };
        let state = match findings.len() {
            0 => paint(GOOD.bold(), "OK"),
            1 => paint(ODD.bold(), "1 warning"),
            count => paint(ODD.bold(), format_args!("{count} warnings")),
        };
        let fingerprint = paint(FAINT, format_args!("fingerprint {}", fingerprint(&config.rules)));
        output::line(format_args!("{state}  {}: {rules}  {fingerprint}", self.file.display()));
        Ok(verdict)
    }

    fn report<'a>(
        &'a self,
        errors: Vec<Mistake<'a>>,
        warnings: Vec<Finding>,
        config: Option<&Config>,
    ) -> Report<'a> {
        let rules = config.map(|config| config.rules.len());
        let fingerprint = config.map(|config| fingerprint(&config.rules));
        Report { file: self.file, errors, warnings, rules, fingerprint }
    }
}
