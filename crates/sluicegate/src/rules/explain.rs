//! Explains why a rule applies to a request or does not.

use std::fmt;

use super::{
    costs::Costs,
    pattern::Pattern,
    rule::{Absent, Rule},
    set::{Effect, MatchError, RuleSet},
};
use crate::labels::Labels;

/// A rule and its effect on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explained<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// The effect, or why the rule does not apply.
    pub effect: Result<Effect, NotApplicable<'a>>,
}

/// Why a rule does not apply.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotApplicable<'a> {
    /// A pair of its `when` does not match.
    When {
        /// The label.
        label: &'a str,
        /// The required pattern.
        wanted: &'a Pattern,
        /// Whether the request has the label.
        is_present: bool,
    },
    /// A pair of its `unless` matches.
    Unless {
        /// The label.
        label: &'a str,
    },
    /// The request lacks a label of its `per`.
    Lacks {
        /// The label.
        label: &'a str,
    },
    /// The rule is `exact`, and the request has another label.
    Further {
        /// The label.
        label: String,
    },
    /// An override makes it `unlimited`.
    Unlimited,
}

impl fmt::Display for NotApplicable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::When { label, wanted, is_present: true } => {
                write!(f, "label {label} does not match {wanted}")
            }
            Self::When { label, wanted, is_present: false } => {
                write!(f, "label {label} is missing, required {wanted}")
            }
            Self::Unless { label } => write!(f, "excluded by unless {label}"),
            Self::Lacks { label } => write!(f, "per label {label} is missing"),
            Self::Further { label } => write!(f, "exact rule, and label {label} is present"),
            Self::Unlimited => f.write_str("an override makes it unlimited"),
        }
    }
}

impl RuleSet {
    /// Explains the effect of each rule on a request, in order.
    ///
    /// # Errors
    /// As [`RuleSet::matching`].
    pub fn explain(&self, labels: &Labels, costs: &Costs) -> Result<Vec<Explained<'_>>, MatchError> {
        let mut matching = self.matching(labels, costs)?.into_iter().peekable();
        let explained = self.rules().map(|rule| {
            let effect = match matching.next_if(|applied| applied.rule.name == rule.name) {
                Some(applied) => Ok(applied.effect),
                None => Err(not_applicable(rule, labels)),
            };
            Explained { rule, effect }
        });
        Ok(explained.collect())
    }
}

/// Returns why a rule does not apply to a request.
fn not_applicable<'a>(rule: &'a Rule, labels: &Labels) -> NotApplicable<'a> {
    let when = rule
        .when
        .pairs()
        .find(|(label, pattern)| !labels.get(label).is_some_and(|value| pattern.matches(value)));
    if let Some((label, wanted)) = when {
        return NotApplicable::When { label, wanted, is_present: labels.get(label).is_some() };
    }
    let unless = rule
        .unless
        .pairs()
        .find(|(label, pattern)| labels.get(label).is_some_and(|value| pattern.matches(value)));
    if let Some((label, _)) = unless {
        return NotApplicable::Unless { label };
    }
    let lacking = rule.per.iter().find(|label| labels.get(label).is_none());
    if rule.absent == Absent::Skip
        && let Some(label) = lacking
    {
        return NotApplicable::Lacks { label };
    }
    match labels.iter().find(|(label, _)| rule.exact && !rule.expects(label)) {
        Some((label, _)) => NotApplicable::Further { label: label.to_owned() },
        None => NotApplicable::Unlimited,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use sluicegate_core::{Cost, Limit};

    use super::*;
    use crate::rules::Override;

    #[test]
    fn every_rule_is_explained() {
        let rule = |name: &str| Rule::new(name, Limit::fixed_window(5, Duration::from_secs(1)).unwrap());
        let rules = RuleSet::new(vec![
            rule("all"),
            rule("wrong").when("route", "logout"),
            rule("missing").when("tenant", "*"),
            rule("excepted").unless("ip", "10.0.0.1"),
            rule("per").per(["user"]),
            rule("exact").when("route", "login").exact(),
            rule("free").with_override(Override::when("route", "login").unlimited()),
            rule("both").when("route", "login").per(["ip"]),
        ])
        .unwrap();
        let labels = Labels::new([("route", "login"), ("ip", "10.0.0.1")]).unwrap();
        let explained = rules.explain(&labels, &Costs::from(Cost::ONE)).unwrap();
        let explanations: Vec<String> = explained
            .iter()
            .map(|explained| match &explained.effect {
                Ok(Effect::Limit { key, .. }) => key.to_string(),
                Ok(effect) => panic!("{effect:?}"),
                Err(reason) => reason.to_string(),
            })
            .collect();
        assert_eq!(
            explanations,
            [
                "all:*",
                "label route does not match logout",
                "label tenant is missing, required *",
                "excluded by unless ip",
                "per label user is missing",
                "exact rule, and label ip is present",
                "an override makes it unlimited",
                "both:10.0.0.1",
            ]
        );
    }
}
