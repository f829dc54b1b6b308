//! `tollgate simulate`: what rules would have done to the traffic in a log.
//!
//! | file | has |
//! |---|---|
//! | `log/` | logs of any size as a stream of records |
//! | `labels` | from a record to the labels of a rule file |
//! | `replay` | one rule file, asked about one request after the other |
//! | `counters` | the counters that are in use |
//! | `curve` | the same with other amounts |
//! | `tally`, `timeline` | what is counted of it |
//! | `report` | what came of it; `text` and `html` show it, with charts by `chart` |
//!
//! One pass, one thread. The virtual clock shows the time of the latest line so far: it never runs backwards, as in a store. A line
//! that comes late is decided at the time that the clock has come to.

mod chart;
mod counters;
mod curve;
mod html;
mod labels;
mod log;
#[cfg(test)]
mod pictures;
mod replay;
mod report;
mod tally;
mod text;
mod timeline;
mod words;

use std::{fs, path::PathBuf, str::FromStr};

use clap::Args;
use tollgate::{Cost, Costs, RuleSet, Timestamp, rules::MAX_UNITS};
use tollgate_server::{
    config::{self, Flags, Origin, RuleConfig, Source},
    server::StartError,
};

use self::{
    curve::{Curves, MAX_AMOUNTS},
    labels::{FieldFlag, LabelFlag, Shape},
    log::{Fields, Format, Logs, Reading},
    replay::{Replay, UnitField},
    report::{Difference, File, Lines, Report, Series},
    timeline::Timeline,
};
use crate::{
    Done, Verdict,
    output::{self, Form, ODD, Progress, paint},
};

/// After how many requests it is shown how far it is.
const PROGRESS_LINES: u64 = 1 << 14;

/// Replay a log through rules: what would they have refused, and whom?
///
/// Reads access logs (combined, common), JSON lines and CSV, also packed with gzip, in one pass, on a virtual clock, and decides as the server
/// would. Labels are read from the log: ip, method, path, host, status, user, user_agent, and every field that a rule names.
#[derive(Args)]
pub(crate) struct Simulate {
    /// The rules to try; else ./tollgate.toml, else the demo's [env: TOLLGATE_CONFIG=]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Other rules to compare with, such as those in force now
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,

    /// The logs; several are merged by time, "-" is the standard input
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    log: Vec<PathBuf>,

    /// How their lines look
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: Format,

    /// The field with the time, where it has an unusual name
    #[arg(long, value_name = "FIELD")]
    time: Option<String>,

    /// How the time is written, as strftime does, for example "%Y%m%d %H%M%S"
    #[arg(long, value_name = "FORMAT")]
    time_format: Option<String>,

    /// Reads a label from this field: ip=client_address
    #[arg(long, value_name = "LABEL=FIELD")]
    field: Vec<FieldFlag>,

    /// Makes up a label, as rules match: 'route=login when path=/login* method=POST'; the first that matches counts
    #[arg(long, value_name = "LABEL=VALUE [when …]")]
    label: Vec<LabelFlag>,

    /// Reads what a request costs of a unit from this field: tokens=total_tokens
    #[arg(long, value_name = "UNIT=FIELD")]
    cost: Vec<CostFlag>,

    /// Also tries other amounts for each rule: those around its own, or --curve=10,20,50
    #[arg(long, value_name = "AMOUNTS", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    curve: Option<Amounts>,

    /// Also writes the report as one page, with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// A word that belongs to no flag, for a better message
    #[arg(hide = true)]
    stray: Option<PathBuf>,
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
        let (unit, field) =
            text.split_once('=').ok_or("write unit=field, for example tokens=total_tokens")?;
        Costs::new([(unit, Cost::ONE)]).map_err(|error| error.to_string())?;
        Ok(Self { unit: unit.to_owned(), field: field.to_owned() })
    }
}

/// `--curve=10,20,50`; none: those around each rule's own.
#[derive(Clone, Debug)]
struct Amounts(Vec<u64>);

impl FromStr for Amounts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split(',').filter(|number| !number.is_empty());
        let amounts: Result<Vec<u64>, _> = numbers.map(|number| number.trim().parse()).collect();
        let mut amounts = amounts.map_err(|_| "write whole numbers, for example --curve=10,20,50")?;
        amounts.sort_unstable();
        amounts.dedup();
        if amounts.len() > MAX_AMOUNTS {
            return Err(format!("{} amounts are too many: try at most {MAX_AMOUNTS} at once", amounts.len()));
        }
        Ok(Self(amounts))
    }
}

impl Simulate {
    pub(crate) async fn run(self, form: Form) -> Done {
        if let Some(stray) = &self.stray {
            let word = stray.display();
            return Err(format!(
                "{word} belongs to no flag: name logs with --log {word}, amounts as --curve=10,20"
            )
            .into());
        }
        let report = self.simulate(form)?;
        if let Some(path) = &self.html {
            let directory = "name one in a directory that is there, where this user may write";
            fs::write(path, html::page(&report)).map_err(|error| {
                format!("cannot write the report {:?}: {error}: {directory}", path.display())
            })?;
        }
        output::report(form, &report, || {
            text::print(&report);
            if let Some(path) = &self.html {
                output::line(format_args!("\nwritten: {}", path.display()));
            }
        })?;
        Ok(Verdict::Fine)
    }

    fn simulate(&self, form: Form) -> Result<Report, Box<dyn std::error::Error>> {
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
            let idle = format!("no rule counts {unit}: --cost {unit}={field} changes nothing");
            output::note(paint(ODD, idle));
        }
        let reading = Reading { format: self.format, fields, time_format: self.time_format.clone() };
        let mut logs = Logs::open(&self.log, reading)?;
        let progress = Progress::new(form, "simulating", self.bytes());
        let mut timeline = Timeline::new(timeline_rows);
        let mut clock = Clock::default();
        let mut difference = Difference::default();

        while let Some(record) = logs.next()? {
            let now = clock.at(record.time_us);
            timeline.reach(now);
            let asked = match &mut against {
                None => replay.prepare(record).map(|plan| {
                    replay.decide(&plan, now, &mut timeline);
                }),
                Some((against, _)) => both(&mut replay, against, record, now, &mut timeline, &mut difference),
            };
            match asked {
                Ok(()) => timeline.count(0),
                Err(problem) => logs.reject(problem),
            }
            if logs.read.is_multiple_of(PROGRESS_LINES) {
                progress.is_at(logs.bytes(), format!("{} requests", output::count(logs.read)));
            }
        }
        drop(progress);
        if logs.read == 0 {
            return Err(logs.nothing().into());
        }
        let requests = logs.read;
        let names = (name, against.as_ref().map(|(_, name)| name.clone()));
        let (name, against_name) = told_apart(names);
        Ok(Report {
            logs: self.log.iter().map(|path| path.display().to_string()).collect(),
            lines: Lines::of(logs.read, &logs.trouble, clock.out_of_order, clock.furthest_us),
            requests,
            from: clock.first_us.and_then(report::moment),
            to: report::moment(clock.now_us),
            timeline: Series::of(&timeline, 1, against.is_some().then_some(against_row)),
            rules: File::of(name, &replay, requests, &timeline),
            difference: against.as_ref().map(|(against, _)| difference.by_rules(&replay, against)),
            against: against.map(|(against, _)| File::of(against_name, &against, requests, &timeline)),
        })
    }

    /// One rule file, ready to be asked, and what it is called.
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
            Origin::Demo => "the demo".to_owned(),
        };
        for warning in warnings {
            output::note(format_args!("{name}: {warning}"));
        }
        let rules = RuleSet::new(rules)?;
        let shape = Shape::new(rules.rules(), labels, &self.field, &self.label, fields);
        let curves = self.curve.as_ref().map(|Amounts(amounts)| Curves::new(&rules, amounts));
        let first_row = *rows;
        *rows += Replay::rows(&rules);
        Ok((Replay::new(rules, shape, units.to_vec(), curves, first_row), name))
    }

    fn units(&self, fields: &mut Fields) -> Result<Vec<UnitField>, String> {
        if self.cost.len() >= MAX_UNITS {
            return Err(format!("{} units are too many: read at most {}", self.cost.len(), MAX_UNITS - 1));
        }
        let mut units: Vec<UnitField> = Vec::new();
        for CostFlag { unit, field } in &self.cost {
            if units.iter().any(|other| other.unit == *unit) {
                return Err(format!("--cost {unit}= is given twice: read each unit from one field"));
            }
            units.push(UnitField { unit: unit.clone(), field: field.clone(), slot: fields.named(field) });
        }
        Ok(units)
    }

    /// How many bytes the logs have; as if without end, where nobody knows.
    fn bytes(&self) -> u64 {
        let sizes: Option<u64> = self.log.iter().map(|path| Some(path.metadata().ok()?.len())).sum();
        sizes.unwrap_or(u64::MAX)
    }
}

/// Asks both files about one request, and notes where they differ.
fn both(
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
        (false, false) => difference.refused_by_both += 1,
        (false, true) => {
            difference.newly_refused += 1;
            new.only_here();
        }
        (true, false) => {
            difference.no_longer_refused += 1;
            old.only_here();
        }
    }
    Ok(())
}

/// The time of the latest line so far.
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

/// Two names that are not the same.
fn told_apart((new, old): (String, Option<String>)) -> (String, String) {
    match old {
        Some(old) if old == new => (format!("{new} (--config)"), format!("{old} (--against)")),
        Some(old) => (new, old),
        None => (new, String::new()),
    }
}
