//! Deleting counters.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate_core::{Algorithm, Cost, Limit};

use super::{Error, Limiter, RuleSelection};
use crate::{
    key::Key,
    labels::Labels,
    rules::{Costs, Effect, Rule, RuleSet},
    store::StoreError,
};

/// The most counters that an error names.
const MAX_NAMED_COUNTERS: usize = 5;
/// The most rules in [`Reset::unmatched`].
const MAX_UNMATCHED: usize = 10;

/// The outcome of a reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reset {
    /// The counters that existed, in the order of their rules.
    pub deleted: Vec<DeletedCounter>,
    /// The rules that match the request but were not selected.
    pub kept: Vec<Arc<str>>,
    /// How many rules or keys were selected, with or without a counter.
    pub selected: usize,
    /// If none was selected: up to ten rules that count by a label of the request but do not match it.
    pub unmatched: Vec<UnmatchedRule>,
    /// How long other processes may repeat a cached denial of a deleted counter; zero for the memory store.
    pub denial_cache: Duration,
}

/// A rule that a reset did not match.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnmatchedRule {
    /// The name of the rule.
    pub rule: Arc<str>,
    /// The labels that the request lacks, as `route=login`, or `user=…` for any value.
    pub needs: Vec<String>,
}

/// A counter that a reset deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeletedCounter {
    /// The name of the rule; `None` for a key without rules.
    pub rule: Option<Arc<str>>,
    /// The key.
    pub key: Key,
}

impl Limiter {
    /// Deletes the counters of the rules that match a request and are selected.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, limiter::RuleSelection};
    ///
    /// let limit = Limit::fixed_window(10, Duration::from_secs(60))?;
    /// let rules = [Rule::new("per-user", limit).per(["user"]), Rule::new("total", limit)];
    /// let limiter = Limiter::new(MemoryStore::new(), rules)?;
    /// let labels = Labels::new([("user", "42")])?;
    /// limiter.check(&labels, Cost::ONE).await?;
    ///
    /// let reset = limiter.reset(&labels, &RuleSelection::Keyed).await?;
    /// assert_eq!(reset.deleted[0].rule.as_deref(), Some("per-user"));
    /// assert_eq!(*reset.kept[0], *"total");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// When an unknown rule is named, or the store does not answer.
    pub async fn reset(&self, labels: &Labels, selection: &RuleSelection) -> Result<Reset, Error> {
        let rules = self.rules();
        selection.ensure_known(&rules)?;
        let (mut counters, mut kept) = (Vec::new(), Vec::new());
        for applied in rules.matching(labels, &Costs::from(Cost::ZERO))? {
            let Effect::Limit { key, limit, .. } = applied.effect else { continue };
            let name = Arc::clone(&applied.rule.name);
            if selection.contains(applied.rule, labels) {
                counters.push((DeletedCounter { rule: Some(name), key }, limit.algorithm()));
            } else {
                kept.push(name);
            }
        }
        let selected = counters.len();
        let unmatched = if selected == 0 { unmatched(&rules, labels) } else { Vec::new() };
        let denial_cache = self.inner.backend.denial_cache();
        Ok(Reset { deleted: self.delete(counters).await?, kept, selected, unmatched, denial_cache })
    }

    /// Deletes the counter of a key under the limit's algorithm.
    ///
    /// # Errors
    /// When the key is empty or too long, or the store does not answer.
    pub async fn reset_key(&self, key: impl AsRef<[u8]>, limit: &Limit) -> Result<Reset, Error> {
        let counter = DeletedCounter { rule: None, key: Key::without_rule(key)? };
        let deleted = self.delete(vec![(counter, limit.algorithm())]).await?;
        let denial_cache = self.inner.backend.denial_cache();
        Ok(Reset { deleted, selected: 1, denial_cache, ..Reset::default() })
    }

    /// Deletes counters and returns those that existed. One call per counter, all at once: a store returns only how many it deleted.
    async fn delete(&self, counters: Vec<(DeletedCounter, Algorithm)>) -> Result<Vec<DeletedCounter>, Error> {
        let calls = counters.iter().map(async |(counter, algorithm)| {
            self.inner.backend.reset(&(counter.key.clone(), *algorithm), self.deadline).await
        });
        let outcomes = join_all(calls).await;
        let (mut deleted, mut failed) = (Vec::new(), Vec::new());
        for ((counter, _), outcome) in counters.into_iter().zip(outcomes) {
            match outcome {
                Ok(false) => {}
                Ok(true) => deleted.push(counter),
                Err(error) => failed.push((counter.key, error)),
            }
        }
        // an error that does not rule out a deletion takes precedence
        let ambiguous = failed.iter().find(|(_, error)| matches!(error, StoreError::Ambiguous(_)));
        match ambiguous.or(failed.first()) {
            None => Ok(deleted),
            Some((_, error)) if deleted.is_empty() => Err(error.clone().into()),
            Some((_, error)) => {
                let keys: Vec<_> =
                    failed.iter().take(MAX_NAMED_COUNTERS).map(|(key, _)| key.to_string()).collect();
                let more = if failed.len() > keys.len() { ", …" } else { "" };
                Err(Error::PartialReset {
                    deleted: deleted.len(),
                    failed: format!("{}{more}", keys.join(", ")),
                    error: error.clone(),
                })
            }
        }
    }
}

/// Returns rules that count by one of these labels, and the labels that they still need.
fn unmatched(rules: &RuleSet, labels: &Labels) -> Vec<UnmatchedRule> {
    let counts_by_one = |rule: &&Rule| rule.per.iter().any(|label| labels.get(label).is_some());
    rules
        .rules()
        .filter(counts_by_one)
        .map(|rule| UnmatchedRule { rule: Arc::clone(&rule.name), needs: needed_labels(rule, labels) })
        .filter(|unmatched| !unmatched.needs.is_empty())
        .take(MAX_UNMATCHED)
        .collect()
}

fn needed_labels(rule: &Rule, labels: &Labels) -> Vec<String> {
    let unmet = rule
        .when
        .pairs()
        .filter(|(label, wanted)| !labels.get(label).is_some_and(|value| wanted.matches(value)));
    let lacking = rule.per.iter().filter(|label| labels.get(label).is_none() && !rule.when.names(label));
    let unmet = unmet.map(|(label, wanted)| format!("{label}={wanted}"));
    unmet.chain(lacking.map(|label| format!("{label}=…"))).collect()
}
