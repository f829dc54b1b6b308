//! `sluicegate rules explain`: which rules would apply to a request, and why the others would not.

use std::{error::Error, path::PathBuf};

use clap::Args;
use serde::Serialize;
use sluicegate::{
    Cost, Costs,
    rules::{DenialReason, Effect, Explained, RuleSet},
};
use sluicegate_server::{
    http::explain::{LimitView, OtherRule},
    server::StartError,
};

use super::load;
use crate::{
    CommandResult, ExitStatus,
    client::{
        print::{heading, limit_terms, print_other_rules},
        request::{self, CostArg, label},
    },
    format,
    output::{self, DIM, HEADING, OutputFormat, paint},
};

/// Explain which rules would apply to a request, and why the others would not
///
/// Needs neither a server nor a store. "sluicegate explain" also shows the counters.
#[derive(Args)]
pub(crate) struct Explain {
    /// Configuration file, for example sluicegate.toml; "-" is the standard input
    file: PathBuf,

    /// Labels of the request, for example route=login ip=203.0.113.9
    #[arg(value_name = "LABEL=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    #[command(flatten)]
    cost: CostArg,
}

/// The JSON report.
#[derive(Serialize)]
struct ExplainReport {
    applies: Vec<AppliedRule>,
    others: Vec<OtherRule>,
}

#[derive(Serialize)]
struct AppliedRule {
    rule: String,
    /// The counter's key; none if the rule denies without counting.
    key: Option<String>,
    limit: Option<LimitView>,
    unit: String,
    cost: Option<u64>,
    /// The reason why it denies without counting.
    denies: Option<&'static str>,
}

impl Explain {
    pub(crate) fn run(self, format: OutputFormat) -> CommandResult {
        let report = self.report()?;
        output::report(format, &report, || print_text(&report))?;
        Ok(ExitStatus::Success)
    }

    fn report(self) -> Result<ExplainReport, Box<dyn Error>> {
        let config = match load(&self.file) {
            Err(_) if label(&self.file.to_string_lossy()).is_ok() => {
                let label = self.file.display();
                return Err(
                    format!("the first argument must be a configuration file, found label {label}").into()
                );
            }
            loaded => loaded?.map_err(StartError::from)?,
        };
        let labels = config.labels.clean(self.labels)?;
        let costs = match self.cost.cost {
            None => Cost::ONE.into(),
            Some(request::CostValue::Requests(number)) => Cost::new(number)?.into(),
            Some(request::CostValue::Units(units)) => {
                let units: Result<Vec<_>, _> = units
                    .into_iter()
                    .map(|(unit, number)| Cost::new(number).map(|cost| (unit, cost)))
                    .collect();
                Costs::new(units?)?
            }
        };
        let rules = RuleSet::new(config.rules)?;
        let (mut applies, mut others) = (Vec::new(), Vec::new());
        for Explained { rule, effect, .. } in rules.explain(&labels, &costs)? {
            let (name, unit) = (rule.name.to_string(), rule.unit.to_string());
            match effect {
                Err(unmet) => others.push(OtherRule { rule: name, because: unmet.to_string() }),
                Ok(Effect::Limit { key, limit, cost, shadow, .. }) => applies.push(AppliedRule {
                    rule: name,
                    key: Some(key.to_string()),
                    limit: Some(LimitView::new(&limit, shadow)),
                    unit,
                    cost: Some(cost.units()),
                    denies: None,
                }),
                Ok(Effect::Deny { reason, .. }) => {
                    let denies = match reason {
                        DenialReason::Blocked => "an override blocks this request",
                        DenialReason::Absent => "the request lacks a label of per",
                    };
                    let denies = Some(denies);
                    applies.push(AppliedRule {
                        rule: name,
                        key: None,
                        limit: None,
                        unit,
                        cost: None,
                        denies,
                    });
                }
            }
        }
        Ok(ExplainReport { applies, others })
    }
}

fn print_text(ExplainReport { applies, others }: &ExplainReport) {
    let total = applies.len() + others.len();
    let verb = if applies.len() == 1 { "applies" } else { "apply" };
    let total = format::plural(total as u64, "rule", "rules");
    output::line(format_args!("{} of {total} {verb}", applies.len()));
    if !applies.is_empty() {
        heading("Rules that apply");
    }
    for AppliedRule { rule, key, limit, unit, cost, denies } in applies {
        let name = paint(HEADING, rule);
        match (limit, denies) {
            (Some(limit), _) => output::line(format_args!("  {name}: {}", limit_terms(limit))),
            (None, Some(reason)) => output::line(format_args!("  {name}: denies: {reason}")),
            (None, None) => output::line(format_args!("  {name}")),
        }
        if let (Some(cost), Some(key)) = (cost, key) {
            output::line(format_args!(
                "    cost {cost} ({unit})  {}",
                paint(DIM, format_args!("counter {key}"))
            ));
        }
    }
    print_other_rules(others);
}
