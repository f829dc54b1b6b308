//! `tollgate rules explain`: which rules would apply to a request, and why not the others.

use std::{error::Error, path::PathBuf};

use clap::Args;
use serde::Serialize;
use tollgate::{
    Cost, Costs, RuleSet,
    rules::{DenialReason, Effect, Explained},
};
use tollgate_server::{
    http::explain::{Other, Terms},
    server::StartError,
};

use super::load;
use crate::{
    Done, Verdict,
    ask::{
        question::{self, Amount, label},
        show::{heading, reasons, terms},
    },
    output::{self, FAINT, Form, TITLE, paint},
};

/// See which rules would apply to a request, and why not the others
///
/// Asks neither a server nor a store: "tollgate explain" also tells what is counted now.
#[derive(Args)]
pub(crate) struct Explain {
    /// The configuration, for example tollgate.toml; "-" is the standard input
    file: PathBuf,

    /// What the request says about itself, for example route=login ip=203.0.113.9
    #[arg(value_name = "LABEL=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    #[command(flatten)]
    amount: Amount,
}

/// What the rules have to do with a request, for programs.
#[derive(Serialize)]
struct Report {
    applies: Vec<Applying>,
    others: Vec<Other>,
}

#[derive(Serialize)]
struct Applying {
    rule: String,
    /// The counter, as it is stored; none where the rule refuses without counting.
    key: Option<String>,
    limit: Option<Terms>,
    unit: String,
    cost: Option<u64>,
    /// Why it refuses whatever is counted, where it does.
    refuses: Option<&'static str>,
}

impl Explain {
    pub(crate) fn run(self, form: Form) -> Done {
        let report = self.report()?;
        output::report(form, &report, || show(&report))?;
        Ok(Verdict::Fine)
    }

    fn report(self) -> Result<Report, Box<dyn Error>> {
        let config = match load(&self.file) {
            Err(_) if label(&self.file.to_string_lossy()).is_ok() => {
                let word = self.file.display();
                return Err(format!("name the configuration before {word}, for example tollgate.toml").into());
            }
            loaded => loaded?.map_err(StartError::from)?,
        };
        let labels = config.labels.clean(self.labels)?;
        let costs = match self.amount.cost {
            None => Cost::ONE.into(),
            Some(question::Cost::Requests(number)) => Cost::new(number)?.into(),
            Some(question::Cost::Units(units)) => {
                let units: Result<Vec<_>, _> = units
                    .into_iter()
                    .map(|(unit, number)| Cost::new(number).map(|cost| (unit, cost)))
                    .collect();
                Costs::new(units?)?
            }
        };
        let rules = RuleSet::new(config.rules)?;
        let (mut applies, mut others) = (Vec::new(), Vec::new());
        for Explained { rule, effect } in rules.explain(&labels, &costs)? {
            let (name, unit) = (rule.name.to_string(), rule.unit.to_string());
            match effect {
                Err(unmet) => others.push(Other { rule: name, because: unmet.to_string() }),
                Ok(Effect::Limit { key, limit, cost, shadow, .. }) => applies.push(Applying {
                    rule: name,
                    key: Some(key.to_string()),
                    limit: Some(Terms::new(&limit, shadow)),
                    unit,
                    cost: Some(cost.units()),
                    refuses: None,
                }),
                Ok(Effect::Deny { reason, .. }) => {
                    let refuses = match reason {
                        DenialReason::Blocked => "an override blocks this request",
                        DenialReason::Absent => "a label is missing by which it counts",
                    };
                    let refuses = Some(refuses);
                    applies.push(Applying { rule: name, key: None, limit: None, unit, cost: None, refuses });
                }
            }
        }
        Ok(Report { applies, others })
    }
}

fn show(Report { applies, others }: &Report) {
    let total = applies.len() + others.len();
    let verb = if applies.len() == 1 { "applies" } else { "apply" };
    let total = output::several(total as u64, "rule", "rules");
    output::line(format_args!("{} of {total} {verb}", applies.len()));
    if !applies.is_empty() {
        heading("Rules that apply");
    }
    for Applying { rule, key, limit, unit, cost, refuses } in applies {
        let name = paint(TITLE, rule);
        match (limit, refuses) {
            (Some(limit), _) => output::line(format_args!("  {name}: {}", terms(limit))),
            (None, Some(why)) => output::line(format_args!("  {name}: refuses, as {why}")),
            (None, None) => output::line(format_args!("  {name}")),
        }
        if let (Some(cost), Some(key)) = (cost, key) {
            output::line(format_args!(
                "    costs {cost} ({unit})  {}",
                paint(FAINT, format_args!("counter {key}"))
            ));
        }
    }
    reasons(others);
}
