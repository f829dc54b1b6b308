//! A rule and its overrides, as written. [`RuleSet::new`](super::RuleSet::new) says whether they are possible.

use std::{sync::Arc, time::Duration};

use tollgate_core::{Cost, Limit};

use super::{condition::Condition, costs::Unit, pattern::Pattern};

/// A named limit: which requests it applies to, who is counted apart, and in which unit.
///
/// ```
/// use std::time::Duration;
/// use tollgate::rules::{OnStoreFailure, Override, Rule, RuleSet};
/// use tollgate_core::Limit;
///
/// let limit = Limit::sliding_log(10, Duration::from_secs(60))?;
/// let rule = Rule::new("login-per-ip", limit)
///     .when("route", "login")
///     .unless("plan", "internal")
///     .per(["ip"])
///     .on_store_failure(OnStoreFailure::Closed)
///     .with_override(Override::when("tenant", "acme").amount(1000));
/// let rules = RuleSet::new(vec![rule])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// What it is called in keys, metrics and answers: printable ASCII, unique.
    pub name: Arc<str>,
    /// It applies to requests that match all of these.
    pub when: Condition,
    /// And to none that match any of these.
    pub unless: Condition,
    /// The labels whose values are counted apart; none: one counter for everybody.
    pub per: Vec<Box<str>>,
    /// How much and how fast.
    pub limit: Limit,
    /// A burst that stays when an override changes the amount. Without it a burst follows the amount, unless
    /// the limit already has a burst that differs from its amount: that one stays too.
    pub burst: Option<u64>,
    /// What is counted.
    pub unit: Unit,
    /// Multiplies the caller's cost.
    pub cost: Cost,
    /// It is evaluated and never refuses.
    pub shadow: bool,
    /// It admits while anything remains and charges in full, into debt.
    pub overdraft: bool,
    /// What becomes of a request without one of the `per` labels.
    pub absent: Absent,
    /// It applies only to requests without labels other than those in `when` and `per`.
    pub exact: bool,
    /// The labels whose values decide the Cluster slot, instead of all of `per`; each is one of `per`.
    pub tag: Option<Vec<Box<str>>>,
    /// Each key's windows begin at a moment of its own, so that they do not all end in the same instant.
    /// For a fixed window only.
    pub stagger: bool,
    /// What it does when the store does not answer.
    pub on_store_failure: OnStoreFailure,
    /// Other numbers for some: in order, field by field, a later match wins.
    pub overrides: Vec<Override>,
}

/// What a rule does with a request that lacks one of its `per` labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Absent {
    /// It does not apply.
    #[default]
    Skip,
    /// Those without the label share a counter.
    Shared,
    /// It refuses, and waiting does not help.
    Deny,
}

/// What a rule does when the store does not answer in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// It admits.
    #[default]
    Open,
    /// It refuses.
    Closed,
    /// This process enforces its share of the limit: the limit divided by how many processes asked the store lately.
    Local,
}

/// Same key, other numbers, for requests that match `when`. What is `None` stays as it was.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, Override, Rule};
///
/// let rule = Rule::new("per-tenant", Limit::token_bucket(10, Duration::from_secs(60))?)
///     .per(["tenant"])
///     .with_override(Override::when("tenant", "acme").amount(1_000))
///     .with_override(Override::when("tenant", "test-*").unlimited());
/// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
/// let acme = limiter.check(&Labels::new([("tenant", "acme")])?, Cost::ONE).await?;
/// assert_eq!(acme.limit(), Some(1_000));
/// let test = limiter.check(&Labels::new([("tenant", "test-7")])?, Cost::ONE).await?;
/// assert_eq!(test.limit(), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Override {
    /// Which requests; without pairs, all.
    pub when: Condition,
    /// Another amount; the burst follows it when the rule and its overrides name none.
    pub amount: Option<u64>,
    /// Another window.
    pub window: Option<Duration>,
    /// Another burst, of a token bucket.
    pub burst: Option<u64>,
    /// Another factor of the caller's cost.
    pub cost: Option<Cost>,
    /// The rule does not apply. Of `unlimited` and `blocked`, the one that was set later wins.
    pub unlimited: Option<bool>,
    /// The rule always refuses, and waiting does not help.
    pub blocked: Option<bool>,
    /// Another failure policy.
    pub on_store_failure: Option<OnStoreFailure>,
    /// Whether it is evaluated without refusing.
    pub shadow: Option<bool>,
}

impl Rule {
    /// A rule for every request, with one counter for all of them.
    pub fn new(name: &str, limit: Limit) -> Self {
        Self {
            name: name.into(),
            when: Condition::new(),
            unless: Condition::new(),
            per: Vec::new(),
            limit,
            burst: None,
            unit: Unit::default(),
            cost: Cost::ONE,
            shadow: false,
            overdraft: false,
            absent: Absent::default(),
            exact: false,
            tag: None,
            stagger: false,
            on_store_failure: OnStoreFailure::default(),
            overrides: Vec::new(),
        }
    }

    /// Applies only when this matches too.
    #[must_use]
    pub fn when(mut self, label: &str, pattern: impl Into<Pattern>) -> Self {
        self.when = self.when.and(label, pattern);
        self
    }

    /// Does not apply when this matches.
    #[must_use]
    pub fn unless(mut self, label: &str, pattern: impl Into<Pattern>) -> Self {
        self.unless = self.unless.and(label, pattern);
        self
    }

    /// Counts each combination of these labels' values apart.
    #[must_use]
    pub fn per<'a>(mut self, labels: impl IntoIterator<Item = &'a str>) -> Self {
        self.per = labels.into_iter().map(Into::into).collect();
        self
    }

    /// Has this burst, also where an override changes the amount.
    #[must_use]
    pub fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Counts this instead of requests.
    #[must_use]
    pub fn unit(mut self, unit: &str) -> Self {
        self.unit = unit.into();
        self
    }

    /// Multiplies the caller's cost.
    #[must_use]
    pub fn cost(mut self, factor: Cost) -> Self {
        self.cost = factor;
        self
    }

    /// Never refuses, only shows what it would do.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Admits while anything remains, into debt.
    #[must_use]
    pub fn overdraft(mut self) -> Self {
        self.overdraft = true;
        self
    }

    /// Treats a request that lacks a `per` label so.
    #[must_use]
    pub fn absent(mut self, absent: Absent) -> Self {
        self.absent = absent;
        self
    }

    /// Applies only to requests without further labels.
    #[must_use]
    pub fn exact(mut self) -> Self {
        self.exact = true;
        self
    }

    /// Is stored in the Cluster slot of these labels' values.
    #[must_use]
    pub fn tag<'a>(mut self, labels: impl IntoIterator<Item = &'a str>) -> Self {
        self.tag = Some(labels.into_iter().map(Into::into).collect());
        self
    }

    /// Begins each key's windows at a moment of its own.
    #[must_use]
    pub fn stagger(mut self) -> Self {
        self.stagger = true;
        self
    }

    /// Does this when the store does not answer.
    #[must_use]
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.on_store_failure = policy;
        self
    }

    /// Has other numbers for some; later ones win.
    #[must_use]
    pub fn with_override(mut self, other: Override) -> Self {
        self.overrides.push(other);
        self
    }
}

impl Override {
    /// An override for requests that match this; it changes nothing yet.
    pub fn when(label: &str, pattern: impl Into<Pattern>) -> Self {
        Self { when: Condition::new().and(label, pattern), ..Self::default() }
    }

    /// Applies only when this matches too.
    #[must_use]
    pub fn and(mut self, label: &str, pattern: impl Into<Pattern>) -> Self {
        self.when = self.when.and(label, pattern);
        self
    }

    /// Sets the amount.
    #[must_use]
    pub fn amount(mut self, amount: u64) -> Self {
        self.amount = Some(amount);
        self
    }

    /// Sets the window.
    #[must_use]
    pub fn window(mut self, window: Duration) -> Self {
        self.window = Some(window);
        self
    }

    /// Sets the burst.
    #[must_use]
    pub fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Sets the factor of the caller's cost.
    #[must_use]
    pub fn cost(mut self, factor: Cost) -> Self {
        self.cost = Some(factor);
        self
    }

    /// Exempts from the rule.
    #[must_use]
    pub fn unlimited(mut self) -> Self {
        self.unlimited = Some(true);
        self
    }

    /// Refuses always.
    #[must_use]
    pub fn blocked(mut self) -> Self {
        self.blocked = Some(true);
        self
    }

    /// Sets the failure policy.
    #[must_use]
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.on_store_failure = Some(policy);
        self
    }

    /// Makes it shadow.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.shadow = Some(true);
        self
    }
}
