//! A validated set of rules: from the labels and costs of a request to the limits that apply.

use std::{collections::HashMap, sync::Arc, time::Duration};

use sluicegate_core::{Cost, Limit, Window};
use smallvec::SmallVec;

#[cfg(feature = "calendar")]
use super::calendar_override::CalendarOverride;
use super::{
    costs::{Costs, Unit},
    index::MatchIndex,
    lease::LeaseSize,
    pattern::Pattern,
    rule::{Absent, OnStoreFailure, Override, Rule},
    validate::{RulesError, check_all},
};
use crate::{
    key::{Key, encoded_rule},
    labels::Labels,
};

/// A validated set of rules, indexed for matching.
#[derive(Debug)]
pub struct RuleSet {
    entries: Vec<Entry>,
    index: MatchIndex,
    positions: HashMap<Arc<str>, usize>,
    /// The labels that carry the ids of holds, each once.
    hold_labels: Vec<Box<str>>,
}

/// A rule with its derived data.
#[derive(Debug)]
struct Entry {
    rule: Rule,
    /// Its name in stored keys.
    stored_name: Arc<str>,
    overrides: MatchIndex,
}

/// A rule that applies to a request, with its overrides resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Applied<'a> {
    /// The rule.
    pub rule: &'a Rule,
    /// Its effect on the request.
    pub effect: Effect,
}

/// The effect of a rule on a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The request uses `cost` units of `key` under `limit`.
    Limit {
        /// The counter.
        key: Key,
        /// Its limit.
        limit: Limit,
        /// The cost; 0 if the request has none in the rule's unit.
        cost: Cost,
        /// It never denies.
        shadow: bool,
        /// It admits while any units are free.
        overdraft: bool,
        /// The failure policy.
        on_store_failure: OnStoreFailure,
        /// The factor of the caller's cost.
        factor: Cost,
    },
    /// The request is denied without counting; a retry does not help.
    Deny {
        /// The reason.
        reason: DenialReason,
        /// It would deny, but never does.
        shadow: bool,
    },
}

impl Effect {
    /// Whether the rule only observes.
    pub(crate) fn is_shadow(&self) -> bool {
        let (Self::Limit { shadow, .. } | Self::Deny { shadow, .. }) = self;
        *shadow
    }
}

/// Why a rule denies without counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialReason {
    /// An override blocks the request.
    Blocked,
    /// The request lacks a `per` label, and the rule denies such requests.
    Absent,
}

/// Why a request cannot be matched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MatchError {
    /// The caller's cost times the rule's factor exceeds the largest cost.
    #[error(
        "cost {} of {unit:?} is too large for rule {rule:?}, which multiplies it by {}: the product may be at most {}",
        cost.units(), factor.units(), Cost::MAX.units()
    )]
    CostTooLarge {
        /// The rule.
        rule: Arc<str>,
        /// Its unit.
        unit: Unit,
        /// The caller's cost.
        cost: Cost,
        /// The factor of the rule.
        factor: Cost,
    },
}

impl RuleSet {
    /// Validates and indexes rules.
    ///
    /// # Errors
    /// If a rule or override is invalid, two rules have the same name, or there are too many.
    pub fn new(mut rules: Vec<Rule>) -> Result<Self, RulesError> {
        check_all(&mut rules)?;
        let index = MatchIndex::new(rules.iter().map(required_pairs));
        let positions = rules.iter().enumerate().map(|(at, rule)| (Arc::clone(&rule.name), at)).collect();
        let mut hold_labels: Vec<Box<str>> = rules.iter().filter_map(|rule| rule.hold.clone()).collect();
        hold_labels.sort_unstable();
        hold_labels.dedup();
        let entries = rules
            .into_iter()
            .map(|rule| Entry {
                stored_name: encoded_rule(&rule.name),
                overrides: MatchIndex::new(rule.overrides.iter().map(|other| other.when.pairs())),
                rule,
            })
            .collect();
        Ok(Self { entries, index, positions, hold_labels })
    }

    /// Returns all rules that apply to a request, in order.
    ///
    /// # Errors
    /// If a cost times the factor of a rule is too large.
    pub fn matching(&self, labels: &Labels, costs: &Costs) -> Result<Vec<Applied<'_>>, MatchError> {
        let mut candidates = Vec::new();
        self.index.candidates(labels, &mut candidates);
        let mut applied = Vec::with_capacity(candidates.len());
        let mut buffer = Vec::new();
        for id in candidates {
            let entry = &self.entries[id as usize];
            if !applies(&entry.rule, labels) {
                continue;
            }
            if let Some(effect) = entry.effect(labels, costs, &mut buffer)? {
                applied.push(Applied { rule: &entry.rule, effect });
            }
        }
        Ok(applied)
    }

    /// Whether these labels include one that carries the id of a hold for some rule, which need not match.
    pub(crate) fn has_hold_label(&self, labels: &Labels) -> bool {
        self.hold_labels.iter().any(|label| labels.get(label).is_some())
    }

    /// Returns the rules, in order.
    pub fn rules(&self) -> impl ExactSizeIterator<Item = &Rule> {
        self.entries.iter().map(|entry| &entry.rule)
    }

    /// Returns the rule of this name.
    pub fn get(&self, name: &str) -> Option<&Rule> {
        self.positions.get(name).map(|&position| &self.entries[position].rule)
    }

    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Returns the pairs that must match: `when`, and usually the presence of the `per` labels.
fn required_pairs(rule: &Rule) -> impl Iterator<Item = (&str, &Pattern)> {
    let per = if rule.absent == Absent::Skip { &*rule.per } else { &[] };
    rule.when.pairs().chain(per.iter().map(|label| (&**label, &Pattern::Present)))
}

/// Returns whether the rule applies, regardless of its overrides.
fn applies(rule: &Rule, labels: &Labels) -> bool {
    rule.when.all_match(labels)
        && (rule.absent != Absent::Skip || !lacks_a_per_label(rule, labels))
        && !rule.unless.any_matches(labels)
        && (!rule.exact || labels.iter().all(|(label, _)| rule.expects(label)))
}

fn lacks_a_per_label(rule: &Rule, labels: &Labels) -> bool {
    rule.per.iter().any(|label| labels.get(label).is_none())
}

/// The values of a rule after its matching overrides.
struct Resolved {
    amount: Option<u64>,
    window: Option<Duration>,
    #[cfg(feature = "calendar")]
    calendar: CalendarOverride,
    burst: Option<u64>,
    lease: Option<LeaseSize>,
    lease_for: Option<Duration>,
    factor: Cost,
    shadow: bool,
    on_store_failure: OnStoreFailure,
    /// The last override that set it, unless a later one unset it.
    unlimited: Option<u32>,
    blocked: Option<u32>,
}

impl Resolved {
    /// Applies the window of an override.
    fn change_window(&mut self, other: &Override) {
        self.window = other.window.or(self.window);
        #[cfg(feature = "calendar")]
        {
            self.calendar = self.calendar.then(&other.calendar);
            // the later one wins
            if other.calendar.unit.is_some() {
                self.window = None;
            } else if other.window.is_some() {
                self.calendar.unit = None;
            }
        }
    }

    /// Returns the window of a rule with this limit.
    fn window(&self, limit: &Limit) -> Window {
        match self.window {
            Some(length) => length.into(),
            #[cfg(feature = "calendar")]
            None if self.calendar.is_set() => self.calendar.window(limit),
            None => limit.window_setting(),
        }
    }
}

impl Entry {
    /// Returns the effect of a rule that applies; `None` if an override exempts the request.
    fn effect(
        &self,
        labels: &Labels,
        costs: &Costs,
        buffer: &mut Vec<u32>,
    ) -> Result<Option<Effect>, MatchError> {
        let rule = &self.rule;
        let resolved = self.resolved(labels, buffer);
        let shadow = resolved.shadow;
        if resolved.unlimited > resolved.blocked {
            return Ok(None);
        }
        if resolved.blocked.is_some() {
            return Ok(Some(Effect::Deny { reason: DenialReason::Blocked, shadow }));
        }
        if rule.absent == Absent::Deny && lacks_a_per_label(rule, labels) {
            return Ok(Some(Effect::Deny { reason: DenialReason::Absent, shadow }));
        }
        let cost = self.cost(&resolved, costs)?;
        let values =
            |names: &[Box<str>]| names.iter().map(|name| labels.get(name)).collect::<SmallVec<[_; 4]>>();
        let co_locate = rule.tag.as_deref().map(values);
        let key = Key::of_rule(&self.stored_name, &values(&rule.per), co_locate.as_deref());
        let limit = self.limit(&resolved, &key);
        let Resolved { on_store_failure, factor, .. } = resolved;
        let overdraft = rule.overdraft;
        Ok(Some(Effect::Limit { key, limit, cost, shadow, overdraft, on_store_failure, factor }))
    }

    /// Applies the matching overrides in order, field by field; a later match wins.
    fn resolved(&self, labels: &Labels, buffer: &mut Vec<u32>) -> Resolved {
        let rule = &self.rule;
        let mut resolved = Resolved {
            amount: None,
            window: None,
            #[cfg(feature = "calendar")]
            calendar: CalendarOverride::default(),
            burst: rule.burst,
            lease: rule.lease,
            lease_for: rule.lease_for,
            factor: rule.cost,
            shadow: rule.shadow,
            on_store_failure: rule.on_store_failure,
            unlimited: None,
            blocked: None,
        };
        self.overrides.candidates(labels, buffer);
        for &id in buffer.iter() {
            let other = &rule.overrides[id as usize];
            if !other.when.all_match(labels) {
                continue;
            }
            resolved.amount = other.amount.or(resolved.amount);
            resolved.change_window(other);
            resolved.burst = other.burst.or(resolved.burst);
            resolved.lease = other.lease.or(resolved.lease);
            resolved.lease_for = other.lease_for.or(resolved.lease_for);
            resolved.factor = other.cost.unwrap_or(resolved.factor);
            resolved.shadow = other.shadow.unwrap_or(resolved.shadow);
            resolved.on_store_failure = other.on_store_failure.unwrap_or(resolved.on_store_failure);
            resolved.unlimited = other.unlimited.map_or(resolved.unlimited, |yes| yes.then_some(id));
            resolved.blocked = other.blocked.map_or(resolved.blocked, |yes| yes.then_some(id));
        }
        resolved
    }

    fn cost(&self, resolved: &Resolved, costs: &Costs) -> Result<Cost, MatchError> {
        let rule = &self.rule;
        let (cost, factor) = (rule.cost_of(costs), resolved.factor);
        match cost.units().checked_mul(factor.units()).map(Cost::new) {
            Some(Ok(product)) => Ok(product),
            // a shadow rule never causes an error; this cost exceeds every capacity, so the rule reports that it would deny
            _ if resolved.shadow => Ok(Cost::MAX),
            _ => {
                let (rule, unit) = (Arc::clone(&rule.name), rule.unit.clone());
                Err(MatchError::CostTooLarge { rule, unit, cost, factor })
            }
        }
    }

    fn limit(&self, resolved: &Resolved, key: &Key) -> Limit {
        const CHECKED: &str = "all numbers were validated with the rules";
        let rule = &self.rule;
        let mut limit = rule.limit;
        let window = resolved.window(&limit);
        if resolved.amount.is_some() || window != limit.window_setting() || resolved.burst != rule.burst {
            let amount = resolved.amount.unwrap_or(limit.amount());
            let phase_us = limit.phase_us();
            limit = limit.with_amount_and_window(amount, window).expect(CHECKED);
            if let Some(burst) = resolved.burst {
                limit = limit.with_burst(burst).expect(CHECKED);
            }
            if phase_us > 0 && limit.calendar().is_none() {
                limit = limit.with_phase(Duration::from_micros(phase_us)).expect(CHECKED);
            }
        }
        if let Some(lease) = resolved.lease {
            limit = with_lease(limit, lease, resolved.lease_for);
        }
        if rule.stagger && limit.calendar().is_none() {
            limit = limit.with_phase(staggered_phase(key, limit.window_us())).expect(CHECKED);
        }
        limit
    }
}

/// Returns the limit with a lease. A combination of overrides for which the lease has no unit, or its lifetime is too long, is not an
/// error: the lease is left out, or reduced.
fn with_lease(limit: Limit, lease: LeaseSize, lifetime: Option<Duration>) -> Limit {
    let units = lease.units_of(limit.amount()).min(limit.max_lease());
    let lifetime = lifetime.unwrap_or_else(|| limit.default_lease_lifetime()).min(limit.longest_lease());
    limit.with_lease(units, lifetime).unwrap_or_else(|_| limit.without_lease())
}

/// Returns a phase within the window that depends only on the key's identity, so that all processes agree.
pub fn staggered_phase(key: &Key, window_us: u64) -> Duration {
    let hash = crc32fast::hash(key.identity().as_bytes());
    let phase_us = (u128::from(hash) * u128::from(window_us)) >> 32;
    Duration::from_micros(u64::try_from(phase_us).expect("the phase is below the window"))
}
