//! A rule and its overrides, as written. [`RuleSet::new`](super::RuleSet::new) validates them.

use std::{sync::Arc, time::Duration};

use sluicegate_core::{Cost, Limit};

#[cfg(feature = "calendar")]
use super::calendar_override::CalendarOverride;
use super::{
    condition::Condition,
    costs::{Costs, DEFAULT_UNIT, Unit},
    lease::LeaseSize,
    pattern::Pattern,
};
#[cfg(feature = "calendar")]
use crate::calendar::{Anchor, CalendarUnit, Zone};

/// A named limit with its conditions, counting labels and unit.
///
/// ```
/// use std::time::Duration;
/// use sluicegate::rules::{OnStoreFailure, Override, Rule, RuleSet};
/// use sluicegate_core::Limit;
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
    /// Unique name in keys, metrics and answers: printable ASCII.
    pub name: Arc<str>,
    /// The rule applies to requests that match all of these.
    pub when: Condition,
    /// The rule does not apply to requests that match any of these.
    pub unless: Condition,
    /// The labels by whose values the rule counts; without any, there is one counter for all requests.
    pub per: Vec<Box<str>>,
    /// The limit.
    pub limit: Limit,
    /// A burst that stays when an override changes the amount. Without it, the burst follows the amount, unless the limit has a burst that
    /// differs from its amount, which stays too.
    pub burst: Option<u64>,
    /// The counted unit.
    pub unit: Unit,
    /// Factor of the caller's cost.
    pub cost: Cost,
    /// The rule is evaluated and never denies.
    pub shadow: bool,
    /// The rule admits while any units are free, and charges in full, into debt.
    pub overdraft: bool,
    /// Handling of a request without one of the `per` labels.
    pub absent: Absent,
    /// The rule applies only to requests without labels other than those in `when` and `per`, and that of `hold`.
    pub exact: bool,
    /// The labels whose values determine the Cluster slot, instead of all of `per`; a subset of `per`.
    pub tag: Option<Vec<Box<str>>>,
    /// The windows of each key start at a different time, so that they do not all end at once. For fixed windows only.
    pub stagger: bool,
    /// The failure policy, for when the store does not answer.
    pub on_store_failure: OnStoreFailure,
    /// How much of the limit processes may charge in advance, so that they decide requests of hot keys without a call to the store.
    /// Without it, the lease of `limit` applies, if it has one. Only on a remote store.
    pub lease: Option<LeaseSize>,
    /// How long a process may spend what it has charged in advance; without it, a tenth of the window and at most one second.
    pub lease_for: Option<Duration>,
    /// The time until a hold expires, if the request does not set it. The shortest of all matching rules is used; 60 seconds by default.
    pub ttl: Option<Duration>,
    /// The label that contains the id of a hold, for front ends whose requests have no field for it.
    pub hold: Option<Box<str>>,
    /// Overrides, applied in order, field by field; a later match wins.
    pub overrides: Vec<Override>,
}

/// How a rule handles a request without one of its `per` labels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// The rule does not apply.
    #[default]
    Skip,
    /// Requests without the label share a counter.
    Shared,
    /// The rule denies; a retry does not help.
    Deny,
}

/// The failure policy of a rule, for when the store does not answer in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Allow the request.
    #[default]
    Open,
    /// Deny the request.
    Closed,
    /// Enforce this process's share: the limit divided by the number of processes that used the store recently.
    Local,
}

/// Other values for requests that match `when`, with the same key. Fields that are `None` stay unchanged.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Override, Rule};
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
    /// The condition; without pairs, all requests match.
    pub when: Condition,
    /// Another amount; the burst follows it if neither the rule nor its overrides set one.
    pub amount: Option<u64>,
    /// Another window. The later of `window` and `calendar.unit` wins.
    pub window: Option<Duration>,
    /// Another calendar window, or another zone or anchor of it.
    #[cfg(feature = "calendar")]
    pub calendar: CalendarOverride,
    /// Another burst of a token bucket.
    pub burst: Option<u64>,
    /// Another factor of the caller's cost.
    pub cost: Option<Cost>,
    /// The rule does not apply. The later of `unlimited` and `blocked` wins.
    pub unlimited: Option<bool>,
    /// The rule always denies; a retry does not help.
    pub blocked: Option<bool>,
    /// Another failure policy.
    pub on_store_failure: Option<OnStoreFailure>,
    /// Whether the rule is evaluated without denying.
    pub shadow: Option<bool>,
    /// Another lease.
    pub lease: Option<LeaseSize>,
    /// Another lifetime of leases.
    pub lease_for: Option<Duration>,
}

impl Rule {
    /// Creates a rule for every request, with one counter for all of them.
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
            lease: None,
            lease_for: None,
            ttl: None,
            hold: None,
            overrides: Vec::new(),
        }
    }

    /// Adds a pair of label and pattern. All pairs must match.
    #[must_use]
    pub fn when(mut self, label: &str, pattern: impl Into<Pattern>) -> Self {
        self.when = self.when.and(label, pattern);
        self
    }

    /// Adds a pair of label and pattern. None of them may match.
    #[must_use]
    pub fn unless(mut self, label: &str, pattern: impl Into<Pattern>) -> Self {
        self.unless = self.unless.and(label, pattern);
        self
    }

    /// Sets the labels by whose values the rule counts.
    #[must_use]
    pub fn per<'a>(mut self, labels: impl IntoIterator<Item = &'a str>) -> Self {
        self.per = labels.into_iter().map(Into::into).collect();
        self
    }

    /// Sets a burst that stays when an override changes the amount.
    #[must_use]
    pub fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Sets the counted unit.
    #[must_use]
    pub fn unit(mut self, unit: &str) -> Self {
        self.unit = unit.into();
        self
    }

    /// Sets the factor of the caller's cost.
    #[must_use]
    pub fn cost(mut self, factor: Cost) -> Self {
        self.cost = factor;
        self
    }

    /// Makes the rule evaluate without denying.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Makes the rule admit while any units are free, into debt.
    #[must_use]
    pub fn overdraft(mut self) -> Self {
        self.overdraft = true;
        self
    }

    /// Sets the handling of a request without a `per` label.
    #[must_use]
    pub fn absent(mut self, absent: Absent) -> Self {
        self.absent = absent;
        self
    }

    /// Makes the rule apply only to requests without further labels.
    #[must_use]
    pub fn exact(mut self) -> Self {
        self.exact = true;
        self
    }

    /// Sets the labels whose values determine the Cluster slot.
    #[must_use]
    pub fn tag<'a>(mut self, labels: impl IntoIterator<Item = &'a str>) -> Self {
        self.tag = Some(labels.into_iter().map(Into::into).collect());
        self
    }

    /// Makes the windows of each key start at a different time.
    #[must_use]
    pub fn stagger(mut self) -> Self {
        self.stagger = true;
        self
    }

    /// Sets the failure policy.
    #[must_use]
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.on_store_failure = policy;
        self
    }

    /// Sets how much of the limit processes may charge in advance.
    #[must_use]
    pub fn lease(mut self, lease: LeaseSize) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Sets how long a process may spend what it has charged in advance.
    #[must_use]
    pub fn lease_for(mut self, lifetime: Duration) -> Self {
        self.lease_for = Some(lifetime);
        self
    }

    /// Returns the cost of a request in the unit of this rule. A concurrency rule counts 1 for a request whose costs do not
    /// name `requests`: a hold of tokens is one request in flight.
    pub fn cost_of(&self, costs: &Costs) -> Cost {
        let is_in_flight = !self.limit.algorithm().properties().has_window && *self.unit == *DEFAULT_UNIT;
        if is_in_flight && costs.iter().all(|(unit, _)| unit != DEFAULT_UNIT) {
            return Cost::ONE;
        }
        costs.of(&self.unit)
    }

    /// Sets the time until a hold expires.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Sets the label that contains the id of a hold.
    #[must_use]
    pub fn hold(mut self, label: &str) -> Self {
        self.hold = Some(label.into());
        self
    }

    /// Sets the most units that a settlement charges beyond the estimate; see [`Limit::max_excess`].
    #[must_use]
    pub fn max_excess(mut self, units: u64) -> Self {
        self.limit = self.limit.with_max_excess(units);
        self
    }

    /// Whether an [exact](Self::exact) rule applies to requests with this label.
    pub(super) fn expects(&self, label: &str) -> bool {
        self.when.names(label)
            || self.per.iter().any(|per| **per == *label)
            || self.hold.as_deref() == Some(label)
    }

    /// Adds an override; later ones win.
    #[must_use]
    pub fn with_override(mut self, other: Override) -> Self {
        self.overrides.push(other);
        self
    }
}

impl Override {
    /// Creates an override for matching requests that changes nothing yet.
    pub fn when(label: &str, pattern: impl Into<Pattern>) -> Self {
        Self { when: Condition::new().and(label, pattern), ..Self::default() }
    }

    /// Adds a pair that must match.
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

    /// Sets a calendar window.
    #[cfg(feature = "calendar")]
    #[must_use]
    pub fn calendar(mut self, unit: CalendarUnit) -> Self {
        self.calendar.unit = Some(unit);
        self
    }

    /// Sets the time zone of a calendar window.
    #[cfg(feature = "calendar")]
    #[must_use]
    pub fn zone(mut self, zone: Zone) -> Self {
        self.calendar.zone = Some(zone);
        self
    }

    /// Sets the first day of the periods of a calendar window.
    #[cfg(feature = "calendar")]
    #[must_use]
    pub fn anchor(mut self, anchor: Anchor) -> Self {
        self.calendar.anchor = Some(anchor);
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

    /// Exempts the requests from the rule.
    #[must_use]
    pub fn unlimited(mut self) -> Self {
        self.unlimited = Some(true);
        self
    }

    /// Denies the requests always.
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

    /// Sets how much of the limit processes may charge in advance.
    #[must_use]
    pub fn lease(mut self, lease: LeaseSize) -> Self {
        self.lease = Some(lease);
        self
    }

    /// Sets how long a process may spend what it has charged in advance.
    #[must_use]
    pub fn lease_for(mut self, lifetime: Duration) -> Self {
        self.lease_for = Some(lifetime);
        self
    }

    /// Makes the rule evaluate without denying.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.shadow = Some(true);
        self
    }
}
