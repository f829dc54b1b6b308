//! Pairs of a label and a pattern: the `when` and `unless` of rules and overrides.

use super::pattern::{Pattern, PatternError};
use crate::labels::{self, LabelError, Labels, MAX_LABELS};

/// The largest number of pairs of one condition.
pub const MAX_PAIRS: usize = MAX_LABELS;

/// Label names, each with a pattern for its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    pairs: Vec<(Box<str>, Pattern)>,
}

/// Why a condition is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConditionError {
    /// There are too many pairs.
    #[error("{0} pairs are too many: use at most {MAX_PAIRS}")]
    TooMany(usize),
    /// The name of a label is invalid.
    #[error(transparent)]
    Label(#[from] LabelError),
    /// A pattern is invalid.
    #[error("label {label:?}: {problem}")]
    Pattern {
        /// The label.
        label: String,
        /// The error.
        problem: PatternError,
    },
}

impl Condition {
    /// Creates an empty condition.
    pub const fn new() -> Self {
        Self { pairs: Vec::new() }
    }

    /// Adds a pair.
    #[must_use]
    pub fn and(mut self, label: &str, pattern: impl Into<Pattern>) -> Self {
        // most of up to a million conditions have one pair: grow by one
        self.pairs.reserve_exact(1);
        self.pairs.push((label.into(), pattern.into()));
        self
    }

    /// Returns the pairs in order.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (&str, &Pattern)> {
        self.pairs.iter().map(|(label, pattern)| (&**label, pattern))
    }

    /// Returns whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// Returns whether every pair matches; true without pairs.
    pub fn all_match(&self, labels: &Labels) -> bool {
        self.pairs().all(|pair| matches(pair, labels))
    }

    /// Returns whether at least one pair matches; false without pairs.
    pub fn any_matches(&self, labels: &Labels) -> bool {
        self.pairs().any(|pair| matches(pair, labels))
    }

    /// Returns whether it contains this label.
    pub(crate) fn names(&self, label: &str) -> bool {
        self.pairs().any(|(name, _)| name == label)
    }

    pub(super) fn check(&self) -> Result<(), ConditionError> {
        if self.pairs.len() > MAX_PAIRS {
            return Err(ConditionError::TooMany(self.pairs.len()));
        }
        for (label, pattern) in self.pairs() {
            labels::check_name(label)?;
            pattern
                .check()
                .map_err(|problem| ConditionError::Pattern { label: label.to_owned(), problem })?;
        }
        Ok(())
    }
}

fn matches((label, pattern): (&str, &Pattern), labels: &Labels) -> bool {
    labels.get(label).is_some_and(|value| pattern.matches(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_or_any_pairs_match_and_an_absent_label_never_does() {
        let both = Condition::new().and("route", "login").and("plan", "*");
        for (labels, all, any) in [
            (vec![("route", "login"), ("plan", "")], true, true),
            (vec![("route", "login")], false, true),
            (vec![("route", "logout"), ("plan", "x")], false, true),
            (vec![("route", "logout")], false, false),
            (vec![], false, false),
        ] {
            let labels = Labels::new(labels).unwrap();
            assert_eq!((both.all_match(&labels), both.any_matches(&labels)), (all, any), "{labels:?}");
        }
        let nothing = Condition::new();
        assert!(nothing.all_match(&Labels::default()) && !nothing.any_matches(&Labels::default()));
    }
}
