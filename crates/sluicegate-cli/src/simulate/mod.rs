//! `sluicegate simulate`: replays logged traffic through rules.
//!
//! | file | contents |
//! |---|---|
//! | `log/` | access logs of any size as a stream of records |
//! | `labels` | extraction of labels from records |
//! | `replay` | decisions of one rule file |
//! | `counters` | counters in use |
//! | `curve` | the same rules with other amounts |
//! | `rule_stats`, `timeline` | statistics |
//! | `report` | results; printed by `text_report` and `html_report`, with charts of `chart` |
//! | `doc_charts` | charts in the documentation |
//!
//! One pass, one thread. The virtual clock is the time of the latest line so far and never runs backwards, as in a store. A late line is
//! decided at the current time of the clock.

mod chart;
mod counters;
mod curve;
#[cfg(test)]
mod doc_charts;
mod html_report;
mod labels;
mod log;
mod replay;
mod report;
mod rule_stats;
mod text_report;
mod timeline;

use std::{fs, path::PathBuf, str::FromStr};

use clap::Args;
use sluicegate::{
    Cost, Costs, Rule, Timestamp,
    rules::{MAX_UNITS, RuleSet},
};
use sluicegate_server::{
    config::{self, Flags, Origin, RuleConfig, Source},
    server::StartError,
};

use self::{
    curve::{Curves, MAX_AMOUNTS},
    labels::{FieldFlag, LabelExtractor, LabelFlag},
    log::{AccessLogFormat, Fields, Logs, Reading},
    replay::{Replay, UnitField},
    report::{Difference, FileReport, LineCounts, Series, SimulationReport},
    timeline::Timeline,
};
use crate::{
    CommandResult, ExitStatus, format,
    output::{self, OutputFormat, Progress, WARNING, paint},
};

/// The number of requests between updates of the progress bar.
const PROGRESS_INTERVAL: u64 = 1 << 14;

/// Replay a log through rules and report which requests they would have denied
///
/// Reads access logs (combined, common), JSON lines and CSV, optionally gzip-compressed, in one pass. Requests are
/// decided as by the server, on a virtual clock. Labels are read from the log: ip, method, path, host, status, user,
/// user_agent, and every field that a rule uses.
#[derive(Args)]
pub(crate) struct Simulate {
    /// Rules to simulate; else ./sluicegate.toml, else the demo rules [env: SLUICEGATE_CONFIG=]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Rules to compare with, such as the current ones
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,

    /// Log files; several are merged by time, "-" is the standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    log: Vec<PathBuf>,

    /// Log format
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: AccessLogFormat,

    /// Field of the time, if it has an unusual name
    #[arg(long, value_name = "FIELD")]
    time: Option<String>,

    /// Format of the time as for strftime, for example "%Y%m%d %H%M%S"
    #[arg(long, value_name = "FORMAT")]
    time_format: Option<String>,

    /// Read a label from this field: ip=client_address
    #[arg(long, value_name = "LABEL=FIELD")]
    field: Vec<FieldFlag>,

    /// Derive a label: 'route=login when path=/login* method=POST'; the first match applies
    #[arg(long, value_name = "LABEL=VALUE [when …]")]
    label: Vec<LabelFlag>,

    /// Read the cost in a unit from this field: tokens=total_tokens
    #[arg(long, value_name = "UNIT=FIELD")]
    cost: Vec<CostFlag>,

    /// Also simulate other amounts for each rule: around its own, or --curve=10,20,50
    #[arg(long, value_name = "AMOUNTS", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    curve: Option<Amounts>,

    /// Also write an HTML report with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Catches a positional argument, for a better error message
    #[arg(hide = true)]
    positional: Option<PathBuf>,
}

/// `--cost unit=field`
#[derive(Clone, Debug)]
struct CostFlag {
    unit: String,
    field: String,
}

impl FromStr for CostFlag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (unit, field) = text.split_once('=').ok_or("use unit=field, for example tokens=total_tokens")?;
        Costs::new([(unit, Cost::ONE)]).map_err(|error| error.to_string())?;
        Ok(Self { unit: unit.to_owned(), field: field.to_owned() })
    }
}

/// `--curve=10,20,50`; empty for amounts around each rule's own.
#[derive(Clone, Debug)]
struct Amounts(Vec<u64>);

impl FromStr for Amounts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split(',').filter(|number| !number.is_empty());
        let amounts: Result<Vec<u64>, _> = numbers.map(|number| number.trim().parse()).collect();
        let mut amounts = amounts.map_err(|_| "use whole numbers, for example --curve=10,20,50")?;
        amounts.sort_unstable();
        amounts.dedup();
        if amounts.len() > MAX_AMOUNTS {
            return Err(format!("{} amounts are too many: use at most {MAX_AMOUNTS}", amounts.len()));
        }
        Ok(Self(amounts))
    }
}

impl Simulate {
    pub(crate) async fn run(self, format: OutputFormat) -> CommandResult {
        if let Some(argument) = &self.positional {
            let argument = argument.display();
            return Err(format!(
                "unexpected argument {argument}: pass logs as --log {argument}, amounts as --curve=10,20"
            )
            .into());
        }
        let report = self.simulate(format)?;
        if let Some(path) = &self.html {
            let directory = "use a path in an existing, writable directory";
            fs::write(path, html_report::page(&report))
                .map_err(|error| format!("cannot write report {:?}: {error}: {directory}", path.display()))?;
        }
        output::report(format, &report, || {
            text_report::print(&report);
            if let Some(path) = &self.html {
                output::line(format_args!("\nwritten: {}", path.display()));
            }
        })?;
        Ok(ExitStatus::Success)
    }

    fn simulate(&self, format: OutputFormat) -> Result<SimulationReport, Box<dyn std::error::Error>> {
        let mut fields = Fields::new(self.time.as_deref());
        let units = self.units(&mut fields)?;
        let mut timeline_rows = 1;
        let (mut replay, name) = self.replay(self.config.clone(), &units, &mut fields, &mut timeline_rows)?;
        let against_row = timeline_rows;
        let mut against = match &self.against {
            Some(file) => {
                let replay = self.replay(Some(file.clone()), &units, &mut fields, &mut timeline_rows);
                Some(replay.map_err(|error| match error.to_string().strip_prefix("--config: ") {
                    Some(about_the_file) => format!("--against: {about_the_file}").into(),
                    None => error,
                })?)
            }
            None => None,
        };
        let files = [Some(&replay), against.as_ref().map(|(against, _)| against)];
        let counts = |unit: &str| {
            files.iter().flatten().flat_map(|file| file.rules.rules()).any(|rule| *rule.unit == *unit)
        };
        for UnitField { unit, field, .. } in units.iter().filter(|field| !counts(&field.unit)) {
            let unused = format!("no rule counts {unit}: --cost {unit}={field} has no effect");
            output::note(paint(WARNING, unused));
        }
        let reading = Reading { format: self.format, fields, time_format: self.time_format.clone() };
        let mut logs = Logs::open(&self.log, reading)?;
        let progress = Progress::new(format, "simulating", self.bytes());
        let mut timeline = Timeline::new(timeline_rows);
        let mut clock = Clock::default();
        let mut difference = Difference::default();

        while let Some(record) = logs.next()? {
            let now = clock.at(record.time_us);
            timeline.advance(now);
            let decided = match &mut against {
                None => replay.prepare(record).map(|plan| {
                    replay.decide(&plan, now, &mut timeline);
                }),
                Some((against, _)) => {
                    decide_both(&mut replay, against, record, now, &mut timeline, &mut difference)
                }
            };
            match decided {
                Ok(()) => timeline.count(0),
                Err(problem) => logs.reject(problem),
            }
            if logs.read.is_multiple_of(PROGRESS_INTERVAL) {
                progress.update(logs.bytes(), format!("{} requests", format::count(logs.read)));
            }
        }
        drop(progress);
        if logs.read == 0 {
            return Err(logs.no_requests_error().into());
        }
        let requests = logs.read;
        let names = (name, against.as_ref().map(|(_, name)| name.clone()));
        let (name, against_name) = distinct_names(names);
        Ok(SimulationReport {
            logs: self.log.iter().map(|path| path.display().to_string()).collect(),
            lines: LineCounts::new(logs.read, &logs.unreadable, clock.out_of_order, clock.furthest_us),
            requests,
            from: clock.first_us.and_then(report::jiff_timestamp),
            to: report::jiff_timestamp(clock.now_us),
            timeline: Series::new(&timeline, 1, against.is_some().then_some(against_row)),
            rules: FileReport::new(name, &replay, requests, &timeline),
            difference: against.as_ref().map(|(against, _)| difference.by_rules(&replay, against)),
            against: against.map(|(against, _)| FileReport::new(against_name, &against, requests, &timeline)),
        })
    }

    /// Loads a rule file for replay; returns it with its name.
    fn replay(
        &self,
        file: Option<PathBuf>,
        units: &[UnitField],
        fields: &mut Fields,
        rows: &mut usize,
    ) -> Result<(Replay, String), Box<dyn std::error::Error>> {
        let source = Source::new(Flags { config: file, ..Flags::default() });
        let RuleConfig { origin, labels, rules, warnings } =
            config::load_rule_config(&source).map_err(StartError::Config)?;
        let name = match origin {
            Origin::File(path) => path.display().to_string(),
            Origin::Demo => "demo rules".to_owned(),
        };
        for warning in warnings {
            output::note(format_args!("{name}: {warning}"));
        }
        let (rules, in_flight): (Vec<Rule>, Vec<Rule>) =
            rules.into_iter().partition(|rule| rule.limit.algorithm().properties().has_window);
        if rules.is_empty() && !in_flight.is_empty() {
            return Err(format!(
                "{name} has only concurrency rules: a log does not contain when requests end; add a rule with a window"
            )
            .into());
        }
        let rules = RuleSet::new(rules)?;
        let extractor = LabelExtractor::new(rules.rules(), labels, &self.field, &self.label, fields);
        let curves = self.curve.as_ref().map(|Amounts(amounts)| Curves::new(&rules, amounts));
        let first_row = *rows;
        *rows += Replay::rows(&rules);
        let mut replay = Replay::new(rules, extractor, units.to_vec(), curves, first_row);
        replay.not_simulated = in_flight.iter().map(|rule| rule.name.to_string()).collect();
        Ok((replay, name))
    }

    fn units(&self, fields: &mut Fields) -> Result<Vec<UnitField>, String> {
        if self.cost.len() >= MAX_UNITS {
            return Err(format!("{} units are too many: use at most {}", self.cost.len(), MAX_UNITS - 1));
        }
        let mut units: Vec<UnitField> = Vec::new();
        for CostFlag { unit, field } in &self.cost {
            if units.iter().any(|other| other.unit == *unit) {
                return Err(format!("--cost {unit}= is given twice: use one field per unit"));
            }
            units.push(UnitField { unit: unit.clone(), field: field.clone(), slot: fields.named(field) });
        }
        Ok(units)
    }

    /// The size of the logs in bytes; `u64::MAX` if unknown.
    fn bytes(&self) -> u64 {
        let sizes: Option<u64> = self.log.iter().map(|path| Some(path.metadata().ok()?.len())).sum();
        sizes.unwrap_or(u64::MAX)
    }
}

/// Decides one request by both rule files and records the difference.
fn decide_both(
    new: &mut Replay,
    old: &mut Replay,
    record: &log::Record,
    now: Timestamp,
    timeline: &mut Timeline,
    difference: &mut Difference,
) -> Result<(), String> {
    let plans = (new.prepare(record)?, old.prepare(record)?);
    match (new.decide(&plans.0, now, timeline), old.decide(&plans.1, now, timeline)) {
        (true, true) => {}
        (false, false) => difference.denied_by_both += 1,
        (false, true) => {
            difference.newly_denied += 1;
            new.record_denied_only_here();
        }
        (true, false) => {
            difference.no_longer_denied += 1;
            old.record_denied_only_here();
        }
    }
    Ok(())
}

/// The virtual clock: the time of the latest line so far.
#[derive(Default)]
struct Clock {
    first_us: Option<u64>,
    now_us: u64,
    out_of_order: u64,
    furthest_us: u64,
}

impl Clock {
    #[inline]
    fn at(&mut self, time_us: u64) -> Timestamp {
        self.first_us.get_or_insert(time_us);
        if time_us < self.now_us {
            self.out_of_order += 1;
            self.furthest_us = self.furthest_us.max(self.now_us - time_us);
        } else {
            self.now_us = time_us;
        }
        Timestamp::from_micros(self.now_us)
    }
}

/// Makes the names of the two rule files distinct.
fn distinct_names((new, old): (String, Option<String>)) -> (String, String) {
    match old {
        Some(old) if old == new => (format!("{new} (--config)"), format!("{old} (--against)")),
        Some(old) => (new, old),
        None => (new, String::new()),
    }
}
