//! The settings of a limiter.

use std::sync::Arc;

use arc_swap::ArcSwap;

use super::{Inner, Limiter, hold_counters::HoldCounters, pending_hold::UnfinishedCount};
use crate::{
    backend::Backend,
    memory::MemoryStore,
    remote::Options,
    rules::{Rule, RuleSet, RulesError},
    store::Store,
};

/// Builds a [`Limiter`].
///
/// ```
/// use std::time::Duration;
/// use sluicegate::{Limit, Limiter, MemoryStore, Options, Rule};
///
/// let limiter = Limiter::builder()
///     .store(MemoryStore::new())
///     .rules([Rule::new("per-user", Limit::per_minute(100)).per(["user"])])
///     .options(Options::new().deadline(Duration::from_millis(20)))
///     .build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
#[must_use]
pub struct LimiterBuilder {
    store: Option<Store>,
    rules: Vec<Rule>,
    options: Options,
}

impl LimiterBuilder {
    /// Sets the store of the counters.
    pub fn store(mut self, store: impl Into<Store>) -> Self {
        self.store = Some(store.into());
        self
    }

    /// Sets the rules.
    pub fn rules(mut self, rules: impl IntoIterator<Item = Rule>) -> Self {
        self.rules = rules.into_iter().collect();
        self
    }

    /// Sets the options. They apply to remote stores only.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Builds the limiter.
    ///
    /// # Errors
    /// When a rule is invalid; see [`RuleSet::new`].
    pub fn build(self) -> Result<Limiter, RulesError> {
        let rules = ArcSwap::from_pointee(RuleSet::new(self.rules)?);
        let store = self.store.unwrap_or_else(|| MemoryStore::new().into());
        let backend = Backend::new(store, self.options);
        Ok(Limiter {
            inner: Arc::new(Inner {
                backend,
                rules,
                skipped_concurrency: 0.into(),
                holds: HoldCounters::default(),
                unfinished: UnfinishedCount::default(),
            }),
            deadline: None,
        })
    }
}
