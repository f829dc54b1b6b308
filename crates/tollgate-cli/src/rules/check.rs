//! `tollgate rules check`: what is wrong with a file of rules, and what is probably not meant.

use std::{
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

/// Look for mistakes in a configuration, and for rules that do nothing
///
/// Reads it as the server would, with all the files that it names. Exits with 0 if there is nothing to say, 1 if there is.
#[derive(Args)]
pub(crate) struct Check {
    /// The configuration, for example tollgate.toml
    file: PathBuf,
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
        match load(&self.file)? {
            Ok(config) => self.sound(&config, form),
            Err(error) => self.broken(&error, form),
        }
    }

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
            output::line(format_args!("{} {finding}", paint(ODD.bold(), "warning:")));
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
        Report { file: &self.file, errors, warnings, rules, fingerprint }
    }
}
