//! One request to a limiter.

use std::{borrow::Cow, time::Duration};

use sluicegate_core::{Algorithm, Cost, Limit, LimitError, Operation};

use super::Error;
use crate::{
    labels::Labels,
    rules::{Costs, Rule, RuleSet},
};

/// The most rule names that an error lists.
const NAMES_IN_ERROR: usize = 10;

/// One request: counters, cost, operation, and how long the caller waits.
///
/// ```
/// use std::time::Duration;
/// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, limiter::{Operation, Progress, Request}};
///
/// let rule = Rule::new("per-user", Limit::fixed_window(10, Duration::from_secs(60))?).per(["user"]);
/// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
/// let labels = Labels::new([("user", "42")])?;
///
/// let request = Request::new(&labels, Cost::ONE).operation(Operation::Peek);
/// let Progress::Decided(decision) = limiter.start(&request)? else { unreachable!("the memory store never waits") };
/// assert_eq!(decision.remaining(), Some(10));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request<'a> {
    /// The counters and the cost.
    pub subject: Subject<'a>,
    /// The operation on the counters.
    pub operation: Operation,
    /// How long the caller waits, if that is shorter than the limiter's deadline.
    pub deadline: Option<Duration>,
    /// What a check does with the concurrency rules that it matches.
    pub on_concurrency: OnConcurrency,
}

/// What a check does with the concurrency rules that it matches. Only a [hold](super::Limiter::hold) can be counted by them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnConcurrency {
    /// An enforced rule is an error. A shadow rule is skipped, because it never denies.
    #[default]
    Reject,
    /// An enforced or a shadow rule is an error: the caller then holds the request.
    RejectShadow,
    /// All of them are skipped.
    Skip,
}

/// The counters and the cost of a request.
#[derive(Clone, Debug)]
pub enum Subject<'a> {
    /// The counters of all rules that match these labels.
    Labels {
        /// The attributes of the request.
        labels: Cow<'a, Labels>,
        /// The cost in each unit. A cost of zero charges nothing and is denied only if the counter is in debt.
        costs: Costs,
        /// Which of the rules that match are used.
        rules: RuleSelection,
        /// Replaces the limit of every rule that matches. If no rule matches, it applies as a fixed window to a counter for exactly
        /// these labels.
        limit: Option<LimitOverride>,
    },
    /// One counter, with a limit given in the request.
    Key {
        /// The key.
        key: Cow<'a, [u8]>,
        /// Its limit.
        limit: Limit,
        /// The cost.
        cost: Cost,
    },
}

/// Which of the rules that match a request are used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RuleSelection {
    /// All of them.
    #[default]
    All,
    /// Those that count by labels, all of which the request has. Counters that unrelated requests share are left out: those of rules
    /// without `per` labels, and those of requests without such a label.
    Keyed,
    /// Those with these names.
    Named(Vec<String>),
}

/// An amount and a window that replace those of a rule. The rule's algorithm stays; the burst follows the amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitOverride {
    /// Units per window. 0 denies everything; an amount above the algorithm's maximum is reduced to it.
    pub amount: u64,
    /// The window.
    pub window: Duration,
}

impl<'a> Request<'a> {
    /// Creates a check of the rules that match these labels.
    pub fn new(labels: impl Into<Cow<'a, Labels>>, costs: impl Into<Costs>) -> Self {
        let (labels, costs) = (labels.into(), costs.into());
        Self::check(Subject::Labels { labels, costs, rules: RuleSelection::All, limit: None })
    }

    /// Creates a check of one key, with a limit given in the request.
    pub fn for_key(key: impl Into<Cow<'a, [u8]>>, limit: Limit, cost: Cost) -> Self {
        Self::check(Subject::Key { key: key.into(), limit, cost })
    }

    fn check(subject: Subject<'a>) -> Self {
        Self {
            subject,
            operation: Operation::Check,
            deadline: None,
            on_concurrency: OnConcurrency::default(),
        }
    }

    /// Sets the operation.
    #[must_use]
    pub fn operation(self, operation: Operation) -> Self {
        Self { operation, ..self }
    }

    /// Sets how long the caller waits.
    #[must_use]
    pub fn deadline(self, deadline: Option<Duration>) -> Self {
        Self { deadline, ..self }
    }

    /// Sets what a check does with concurrency rules.
    #[must_use]
    pub fn on_concurrency(self, on_concurrency: OnConcurrency) -> Self {
        Self { on_concurrency, ..self }
    }

    /// Restricts the request to some of the rules. No effect on a request for a key.
    #[must_use]
    pub fn rules(mut self, selection: RuleSelection) -> Self {
        if let Subject::Labels { rules, .. } = &mut self.subject {
            *rules = selection;
        }
        self
    }

    /// Replaces the limits of the rules. No effect on a request for a key.
    #[must_use]
    pub fn limit(mut self, other: Option<LimitOverride>) -> Self {
        if let Subject::Labels { limit, .. } = &mut self.subject {
            *limit = other;
        }
        self
    }

    /// Copies borrowed data.
    pub fn into_owned(self) -> Request<'static> {
        let Self { subject, operation, deadline, on_concurrency } = self;
        let subject = match subject {
            Subject::Labels { labels, costs, rules, limit } => {
                Subject::Labels { labels: Cow::Owned(labels.into_owned()), costs, rules, limit }
            }
            Subject::Key { key, limit, cost } => {
                Subject::Key { key: Cow::Owned(key.into_owned()), limit, cost }
            }
        };
        Request { subject, operation, deadline, on_concurrency }
    }

    /// Returns the cost in this unit.
    pub fn cost(&self, unit: &str) -> Cost {
        match &self.subject {
            Subject::Labels { costs, .. } => costs.of(unit),
            Subject::Key { cost, .. } => *cost,
        }
    }
}

impl RuleSelection {
    /// Selects the rules of these names.
    pub(super) fn named<N: Into<String>>(names: impl IntoIterator<Item = N>) -> Self {
        Self::Named(names.into_iter().map(Into::into).collect())
    }

    /// Whether a rule that matches `labels` is selected.
    pub(super) fn contains(&self, rule: &Rule, labels: &Labels) -> bool {
        match self {
            Self::All => true,
            Self::Keyed => !rule.per.is_empty() && rule.per.iter().all(|label| labels.get(label).is_some()),
            Self::Named(names) => names.iter().any(|name| **name == *rule.name),
        }
    }

    /// Checks that all named rules exist.
    pub(super) fn ensure_known(&self, rules: &RuleSet) -> Result<(), Error> {
        let Self::Named(names) = self else { return Ok(()) };
        match names.iter().find(|name| rules.get(name).is_none()) {
            Some(name) => Err(Error::UnknownRule {
                name: name.clone(),
                known: rules.rules().take(NAMES_IN_ERROR).map(|rule| rule.name.to_string()).collect(),
            }),
            None => Ok(()),
        }
    }
}

impl LimitOverride {
    pub(super) fn with_algorithm(self, algorithm: Algorithm) -> Result<Limit, LimitError> {
        Limit::new(algorithm, self.amount.min(algorithm.max_amount()), self.window)
    }

    /// Replaces the amount of a limit, and its window if it has one.
    pub(super) fn replace(self, limit: &Limit) -> Result<Limit, LimitError> {
        let algorithm = limit.algorithm();
        let amount = self.amount.min(algorithm.max_amount());
        let window =
            if algorithm.properties().has_window { self.window.into() } else { limit.window_setting() };
        limit.with_amount_and_window(amount, window)
    }
}

impl<'a> From<&'a Labels> for Cow<'a, Labels> {
    fn from(labels: &'a Labels) -> Self {
        Cow::Borrowed(labels)
    }
}

impl From<Labels> for Cow<'_, Labels> {
    fn from(labels: Labels) -> Self {
        Cow::Owned(labels)
    }
}
