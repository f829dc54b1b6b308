//! Validation of rules, done once, so that matching cannot fail because of a rule.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use sluicegate_core::{
    Algorithm, Limit, LimitError, Window,
    hold::{MAX_HOLD_TTL, MIN_HOLD_TTL},
};

#[cfg(feature = "calendar")]
use super::calendar_override::CalendarOverrideError;
use super::{
    condition::ConditionError,
    costs::{UnitError, check_unit},
    lease::LeaseSize,
    rule::{Override, Rule},
};
use crate::labels::{self, LabelError};

/// The largest number of rules of one set.
pub const MAX_RULES: usize = 10_000;
/// The largest number of overrides of all rules of one set.
pub const MAX_OVERRIDES: usize = 1_000_000;
/// The largest number of labels in `per` or `tag`.
pub const MAX_PER: usize = 16;
/// The longest name of a rule, in bytes.
pub const MAX_RULE_NAME: usize = 128;

/// Why a set of rules is invalid. Positions count from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RulesError {
    /// There are too many rules.
    #[error(
        "{0} rules are too many: use at most {MAX_RULES}, and overrides for rules that differ only in numbers"
    )]
    TooManyRules(usize),
    /// There are too many overrides.
    #[error("{0} overrides are too many: use at most {MAX_OVERRIDES} over all rules")]
    TooManyOverrides(usize),
    /// Two rules have the same name.
    #[error("rule {name:?} is defined twice: use a unique name for each rule")]
    DuplicateName {
        /// The name.
        name: String,
        /// The position of the first.
        first: usize,
        /// The position of the second.
        second: usize,
    },
    /// A rule is invalid.
    #[error("rule {name:?}: {problem}")]
    Rule {
        /// Its name.
        name: String,
        /// Its position.
        position: usize,
        /// The error.
        problem: RuleError,
    },
}

/// Why a rule is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RuleError {
    /// Its name is invalid.
    #[error(
        "name is invalid: use 1 to {MAX_RULE_NAME} printable ASCII characters, for example \"login-per-ip\""
    )]
    Name,
    /// Its `when` is invalid.
    #[error("when: {0}")]
    When(ConditionError),
    /// Its `unless` is invalid.
    #[error("unless: {0}")]
    Unless(ConditionError),
    /// Its `per` is invalid.
    #[error("per: {0}")]
    Per(LabelListError),
    /// Its `tag` is invalid.
    #[error("tag: {0}")]
    Tag(LabelListError),
    /// Its `tag` contains a label that its `per` does not: one identity would have several counters.
    #[error("tag: label {0:?} is not in per: add it there, so that one identity has one counter")]
    TagNotInPer(String),
    /// Its limit is invalid.
    #[error(transparent)]
    Limit(LimitError),
    /// Its unit is invalid.
    #[error(transparent)]
    Unit(UnitError),
    /// Only a fixed window can be staggered.
    #[error("{0} has no stagger: remove it, or use fixed-window")]
    Stagger(Algorithm),
    /// Live holds never exceed their limit.
    #[error("{0} has no overdraft: remove it, or use an algorithm with a window")]
    Overdraft(Algorithm),
    /// The periods of a calendar start at given times.
    #[error("a calendar window has no stagger: remove it, or use a window such as \"1d\"")]
    StaggeredCalendar,
    /// Its lease has no unit.
    #[error("lease {lease} of {amount} is less than one unit: use a larger part, or remove it")]
    LeaseTooSmall {
        /// The lease.
        lease: LeaseSize,
        /// The amount of the limit.
        amount: u64,
    },
    /// Its lease or the lifetime of its leases is out of range.
    #[error(transparent)]
    Lease(LimitError),
    /// It sets the lifetime of leases without a lease.
    #[error("lease_for has no effect without lease: set for example lease = \"1%\", or remove lease_for")]
    LeaseForWithoutLease,
    /// The time until its holds expire is out of range.
    #[error("ttl {0:?} is out of range: use {MIN_HOLD_TTL:?} to {MAX_HOLD_TTL:?} (1 day)")]
    Ttl(Duration),
    /// The label that contains the id of a hold is invalid.
    #[error("hold: {0}")]
    Hold(LabelError),
    /// One of its overrides is invalid.
    #[error("override {}: {problem}", position + 1)]
    Override {
        /// Its position among the rule's overrides.
        position: usize,
        /// The error.
        problem: OverrideError,
    },
}

/// Why a list of labels is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LabelListError {
    /// There are too many.
    #[error("{0} labels are too many: name at most {MAX_PER}")]
    TooMany(usize),
    /// A label occurs twice.
    #[error("label {0:?} is named twice: name it once")]
    Repeated(String),
    /// The name of a label is invalid.
    #[error(transparent)]
    Label(#[from] LabelError),
}

/// Why an override is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OverrideError {
    /// Its `when` is invalid.
    #[error("when: {0}")]
    When(ConditionError),
    /// Its limit is invalid.
    #[error(transparent)]
    Limit(LimitError),
    /// Its lease has no unit.
    #[error("lease {lease} of {amount} is less than one unit: use a larger part, or 0 for no lease")]
    LeaseTooSmall {
        /// The lease.
        lease: LeaseSize,
        /// The amount of the limit.
        amount: u64,
    },
    /// Its lease is not possible with the rule's limit.
    #[error(transparent)]
    Lease(LimitError),
    /// Its calendar window is invalid.
    #[cfg(feature = "calendar")]
    #[error(transparent)]
    Calendar(CalendarOverrideError),
    /// It sets both a length and a calendar window.
    #[cfg(feature = "calendar")]
    #[error("window and calendar.unit contradict each other: set one of them")]
    TwoWindows,
    /// It both exempts and blocks.
    #[error("unlimited and blocked contradict each other: set one of them")]
    UnlimitedAndBlocked,
}

impl Rule {
    /// Validates the rule by itself. [`RuleSet::new`](super::RuleSet::new) also requires unique names.
    ///
    /// # Errors
    /// The first of its [problems](Self::problems).
    pub fn check(&self) -> Result<(), RuleError> {
        self.problems().into_iter().next().map_or(Ok(()), Err)
    }

    /// Returns all errors of the rule by itself, the first one of each field.
    pub fn problems(&self) -> Vec<RuleError> {
        let burst = self.burst.and_then(|burst| self.limit.with_burst(burst).err()).map(RuleError::Limit);
        burst.into_iter().chain(problems_but_burst(self)).collect()
    }
}

impl Override {
    /// Validates the override for a rule with this limit.
    ///
    /// # Errors
    /// The first error, in the order of its fields.
    pub fn check(&self, limit: &Limit) -> Result<(), OverrideError> {
        check_override(self, limit)
    }
}

/// Validates a set of rules, and normalizes the burst of each.
pub(super) fn check_all(rules: &mut [Rule]) -> Result<(), RulesError> {
    if rules.len() > MAX_RULES {
        return Err(RulesError::TooManyRules(rules.len()));
    }
    let overrides = rules.iter().map(|rule| rule.overrides.len()).sum();
    if overrides > MAX_OVERRIDES {
        return Err(RulesError::TooManyOverrides(overrides));
    }
    for (position, rule) in rules.iter_mut().enumerate() {
        normalize_lease(rule);
        let problem = normalize_burst(rule).err().or_else(|| problems_but_burst(rule).into_iter().next());
        if let Some(problem) = problem {
            // an invalid name may have any length
            let name = rule.name.chars().take(MAX_RULE_NAME).collect();
            return Err(RulesError::Rule { name, position, problem });
        }
    }
    let mut positions = HashMap::with_capacity(rules.len());
    for (second, rule) in rules.iter().enumerate() {
        if let Some(first) = positions.insert(&rule.name, second) {
            return Err(RulesError::DuplicateName { name: rule.name.to_string(), first, second });
        }
    }
    Ok(())
}

/// Makes `rule.burst` and `rule.limit` consistent: a burst that does not follow the amount is then in both.
fn normalize_burst(rule: &mut Rule) -> Result<(), RuleError> {
    if let Some(burst) = rule.burst {
        rule.limit = rule.limit.with_burst(burst).map_err(RuleError::Limit)?;
    } else if rule.limit.capacity() != rule.limit.amount() {
        rule.burst = Some(rule.limit.capacity());
    }
    Ok(())
}

/// Moves a lease of the limit to the rule, so that it stays when an override changes the amount.
fn normalize_lease(rule: &mut Rule) {
    if let (Some(lease), None) = (rule.limit.lease(), rule.lease) {
        rule.lease = Some(LeaseSize::units(lease.units()));
        rule.lease_for = rule.lease_for.or(Some(lease.lifetime()));
    }
    rule.limit = rule.limit.without_lease();
}

fn problems_but_burst(rule: &Rule) -> Vec<RuleError> {
    let fields = [
        check_rule_name(&rule.name),
        rule.when.check().map_err(RuleError::When),
        rule.unless.check().map_err(RuleError::Unless),
        check_label_list(&rule.per).map_err(RuleError::Per),
        check_tag(rule),
        check_unit(&rule.unit).map_err(RuleError::Unit),
        check_overdraft(rule),
        check_stagger(rule),
        check_lease(rule),
        check_holds(rule),
    ];
    let overrides = rule.overrides.iter().enumerate().map(|(position, other)| {
        check_override(other, &rule.limit).map_err(|problem| RuleError::Override { position, problem })
    });
    fields.into_iter().chain(overrides).filter_map(Result::err).collect()
}

fn check_rule_name(name: &str) -> Result<(), RuleError> {
    let printable = name.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if name.is_empty() || name.len() > MAX_RULE_NAME || !printable { Err(RuleError::Name) } else { Ok(()) }
}

fn check_tag(rule: &Rule) -> Result<(), RuleError> {
    let tag = rule.tag.as_deref().unwrap_or_default();
    check_label_list(tag).map_err(RuleError::Tag)?;
    match tag.iter().find(|label| !rule.per.contains(label)) {
        Some(label) => Err(RuleError::TagNotInPer(label.to_string())),
        None => Ok(()),
    }
}

fn check_overdraft(rule: &Rule) -> Result<(), RuleError> {
    let algorithm = rule.limit.algorithm();
    if rule.overdraft && !algorithm.properties().has_window {
        return Err(RuleError::Overdraft(algorithm));
    }
    Ok(())
}

fn check_stagger(rule: &Rule) -> Result<(), RuleError> {
    let algorithm = rule.limit.algorithm();
    if rule.stagger && !algorithm.properties().has_phase {
        Err(RuleError::Stagger(algorithm))
    } else if rule.stagger && rule.limit.calendar().is_some() {
        Err(RuleError::StaggeredCalendar)
    } else {
        Ok(())
    }
}

fn check_lease(rule: &Rule) -> Result<(), RuleError> {
    let limit = rule.limit;
    let has_override = rule.overrides.iter().any(|other| other.lease.is_some());
    if rule.lease_for.is_some() && !limit.algorithm().properties().has_window {
        return Err(RuleError::Lease(LimitError::LeaseNotSupported(limit.algorithm())));
    }
    match rule.lease {
        None if rule.lease_for.is_some() && limit.lease().is_none() && !has_override => {
            Err(RuleError::LeaseForWithoutLease)
        }
        None => Ok(()),
        Some(lease) if lease.is_none() => Ok(()),
        Some(lease) => {
            let (amount, units) = (limit.amount(), lease.units_of(limit.amount()));
            if units == 0 {
                return Err(RuleError::LeaseTooSmall { lease, amount });
            }
            let lifetime = rule.lease_for.unwrap_or_else(|| limit.default_lease_lifetime());
            limit.with_lease(units, lifetime).map_err(RuleError::Lease)?;
            Ok(())
        }
    }
}

fn check_holds(rule: &Rule) -> Result<(), RuleError> {
    match rule.ttl {
        Some(ttl) if !(MIN_HOLD_TTL..=MAX_HOLD_TTL).contains(&ttl) => return Err(RuleError::Ttl(ttl)),
        _ => {}
    }
    rule.hold.as_deref().map_or(Ok(()), labels::check_name).map_err(RuleError::Hold)
}

fn check_label_list(list: &[Box<str>]) -> Result<(), LabelListError> {
    if list.len() > MAX_PER {
        return Err(LabelListError::TooMany(list.len()));
    }
    let mut seen = HashSet::new();
    for label in list {
        labels::check_name(label)?;
        if !seen.insert(label) {
            return Err(LabelListError::Repeated(label.to_string()));
        }
    }
    Ok(())
}

/// Validates each number by itself against the algorithm of the rule. This covers every combination of overrides: the ranges of amount, window
/// and burst depend only on the algorithm, which no override changes.
fn check_override(other: &Override, limit: &Limit) -> Result<(), OverrideError> {
    other.when.check().map_err(OverrideError::When)?;
    let amount = other.amount.unwrap_or(limit.amount());
    let window = check_window(other, limit)?;
    let changed = limit.with_amount_and_window(amount, window).map_err(OverrideError::Limit)?;
    if let Some(burst) = other.burst {
        changed.with_burst(burst).map_err(OverrideError::Limit)?;
    }
    if let Some(lease) = other.lease.filter(|lease| !lease.is_none()) {
        if lease.units_of(amount) == 0 {
            return Err(OverrideError::LeaseTooSmall { lease, amount });
        }
        check_lease_support(limit)?;
    }
    if other.lease_for.is_some() {
        check_lease_support(limit)?;
    }
    if other.unlimited == Some(true) && other.blocked == Some(true) {
        return Err(OverrideError::UnlimitedAndBlocked);
    }
    Ok(())
}

/// Returns whether a limit of this kind can have a lease.
fn check_lease_support(limit: &Limit) -> Result<(), OverrideError> {
    if !limit.algorithm().properties().has_window {
        Err(OverrideError::Lease(LimitError::LeaseNotSupported(limit.algorithm())))
    } else if limit.releases_expired() {
        Err(OverrideError::Lease(LimitError::LeaseWithRelease))
    } else {
        Ok(())
    }
}

/// Returns the window of a rule with this limit under an override.
fn check_window(other: &Override, limit: &Limit) -> Result<Window, OverrideError> {
    #[cfg(feature = "calendar")]
    {
        other.calendar.check(limit).map_err(OverrideError::Calendar)?;
        if other.window.is_some() && other.calendar.unit.is_some() {
            return Err(OverrideError::TwoWindows);
        }
        if other.window.is_none() {
            return Ok(other.calendar.window(limit));
        }
    }
    Ok(other.window.map_or(limit.window_setting(), Window::from))
}
