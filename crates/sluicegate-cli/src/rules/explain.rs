//! `sluicegate rules explain`: which rules would apply to a request, and why the others would not.

use std::{error::Error, fmt, path::PathBuf};

use clap::Args;
use serde::Serialize;
use sluicegate::{
    Cost, Costs, Limit, Rule, duration,
    rules::{DenialReason, Effect, Explained, RuleSet},
};
use sluicegate_core::{OnExpiry, hold::DEFAULT_HOLD_TTL};
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
    /// What happens to holds of the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    holds: Option<HoldTerms>,
}

/// The settings of a rule for holds.
#[derive(Serialize)]
struct HoldTerms {
    /// Whether this is a concurrency rule, which requires a hold.
    required: bool,
    /// The time until a hold expires, if the rule sets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    ttl: Option<String>,
    /// What happens to the units of a hold that expires.
    on_expiry: &'static str,
    /// The most units that a settlement charges beyond the estimate; none for a concurrency rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_excess: Option<u64>,
    /// The label that carries the id.
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<String>,
}

impl HoldTerms {
    fn new(rule: &Rule, limit: &Limit) -> Self {
        let has_window = limit.algorithm().properties().has_window;
        Self {
            required: !has_window,
            ttl: rule.ttl.map(duration::text),
            on_expiry: limit.on_expiry().name(),
            max_excess: has_window.then(|| limit.max_excess()),
            label: rule.hold.as_deref().map(str::to_owned),
        }
    }

    /// Whether the rule requires holds, or sets a field of them.
    fn is_notable(&self, limit: &LimitView) -> bool {
        let releases = self.on_expiry == OnExpiry::Release.name();
        let has_excess = self.max_excess.is_some_and(|units| units != limit.capacity);
        self.ttl.is_some() || self.label.is_some() || releases || has_excess
    }
}

impl fmt::Display for HoldTerms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let expiry = match &self.ttl {
            Some(ttl) => format!("after {ttl}"),
            None => format!("after {}, or the ttl of another rule,", duration::text(DEFAULT_HOLD_TTL)),
        };
        let requirement = if self.required { "requires a hold, which" } else { "a hold" };
        let effect = if self.on_expiry == OnExpiry::Release.name() {
            "is then released"
        } else {
            "then stays charged"
        };
        write!(f, "{requirement} expires {expiry} and {effect}")?;
        if let Some(units) = self.max_excess {
            write!(f, "; settling charges up to {units} more than the estimate")?;
        }
        match &self.label {
            Some(label) => write!(f, "; id in label {label}"),
            None => Ok(()),
        }
    }
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
                    holds: Some(HoldTerms::new(rule, &limit)),
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
                        holds: None,
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
    for AppliedRule { rule, key, limit, unit, cost, denies, holds } in applies {
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
        if let (Some(holds), Some(limit)) = (holds, limit)
            && holds.is_notable(limit)
        {
            output::line(format_args!("    {holds}"));
        }
    }
    print_other_rules(others);
}
