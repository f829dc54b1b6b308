//! Rules as JSON, and the fingerprint of a set of rules.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sluicegate::{
    Limit, Override, Rule,
    calendar::{Anchor, Calendar, Weekday, Zone},
    config::values::Keywords,
    duration,
    rules::{Condition, Pattern},
    window,
};

/// Length of a fingerprint, in bytes.
const FINGERPRINT_BYTES: usize = 16;

/// Labels, each with its alternative patterns, written as in the file.
pub type ConditionView = BTreeMap<String, Vec<String>>;

/// The first day of calendar periods, written as in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AnchorView {
    /// A day of the month.
    DayOfMonth(u8),
    /// The name of a weekday.
    Weekday(String),
}

impl From<Anchor> for AnchorView {
    fn from(anchor: Anchor) -> Self {
        match anchor {
            Anchor::DayOfMonth(day) => Self::DayOfMonth(day),
            Anchor::Weekday(weekday) => Self::Weekday(weekday.name().to_owned()),
        }
    }
}

/// Formats a window with its zone and anchor, as in `1 month in Europe/Berlin from day 15`.
pub fn window_text(window: &str, zone: Option<&str>, anchor: Option<&AnchorView>) -> String {
    let zone = zone.map(|zone| format!(" in {zone}")).unwrap_or_default();
    let anchor = match anchor {
        Some(AnchorView::DayOfMonth(day)) if *day != 1 => format!(" from day {day}"),
        Some(AnchorView::Weekday(weekday)) if weekday != Weekday::Monday.name() => format!(" from {weekday}"),
        _ => String::new(),
    };
    format!("{window}{zone}{anchor}")
}

/// An active rule, as `GET /v1/rules` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleView {
    /// Its name.
    pub name: String,
    /// All these labels must match.
    pub when: ConditionView,
    /// None of these labels may match.
    pub unless: ConditionView,
    /// The labels to count by.
    pub per: Vec<String>,
    /// The algorithm.
    pub algorithm: &'static str,
    /// Units admitted per window.
    pub amount: u64,
    /// The window; `None` if the algorithm has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    /// The time zone of a calendar window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zone: Option<&'static str>,
    /// The first day of a calendar window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anchor: Option<AnchorView>,
    /// Capacity of a token bucket.
    pub burst: Option<u64>,
    /// The unit that is counted.
    pub unit: String,
    /// Factor for the caller's cost.
    pub cost: u64,
    /// Failure policy.
    pub on_store_failure: &'static str,
    /// How much of the limit processes may charge in advance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// How long a process may spend what it has charged in advance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_for: Option<String>,
    /// The time until its holds expire.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl: Option<String>,
    /// `release` if the units of expired holds are refunded. Absent for `concurrency`, which always does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_expiry: Option<&'static str>,
    /// The most units that a settlement charges beyond the estimate, if it was set. Otherwise it is the capacity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_excess: Option<u64>,
    /// The label that contains the id of a hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hold: Option<String>,
    /// Whether it is evaluated without ever denying.
    pub shadow: bool,
    /// Whether it allows debt.
    pub overdraft: bool,
    /// What it does with a request that lacks a label of `per`.
    pub absent: &'static str,
    /// Whether it applies only to requests without other labels.
    pub exact: bool,
    /// The labels that select the node in a Redis Cluster.
    pub tag: Option<Vec<String>>,
    /// Whether each key's windows start at a different time.
    pub stagger: bool,
    /// Number of overrides.
    pub overrides: usize,
}

/// A complete override, for the fingerprint.
#[derive(Serialize)]
struct OverrideView {
    when: ConditionView,
    amount: Option<u64>,
    window: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    zone: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    anchor: Option<AnchorView>,
    burst: Option<u64>,
    cost: Option<u64>,
    unlimited: Option<bool>,
    blocked: Option<bool>,
    on_store_failure: Option<&'static str>,
    shadow: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_for: Option<String>,
}

impl From<&Rule> for RuleView {
    fn from(rule: &Rule) -> Self {
        let limit = &rule.limit;
        let texts = |list: &[Box<str>]| list.iter().map(|label| label.to_string()).collect();
        let has_window = limit.algorithm().properties().has_window;
        let is_release = has_window && limit.releases_expired();
        let is_bucket = limit.algorithm() == sluicegate::Algorithm::TokenBucket;
        Self {
            name: rule.name.to_string(),
            when: condition(&rule.when),
            unless: condition(&rule.unless),
            per: texts(&rule.per),
            algorithm: limit.algorithm().keyword(),
            amount: limit.amount(),
            window: has_window.then(|| window::text(limit)),
            zone: limit.calendar().map(Calendar::zone),
            anchor: limit.calendar().and_then(Calendar::anchor).map(AnchorView::from),
            burst: is_bucket.then(|| rule.burst.unwrap_or(limit.capacity())),
            unit: rule.unit.to_string(),
            cost: rule.cost.units(),
            on_store_failure: rule.on_store_failure.keyword(),
            lease: rule.lease.filter(|lease| !lease.is_none()).map(|lease| lease.to_string()),
            lease_for: rule.lease_for.map(duration::text),
            ttl: rule.ttl.map(duration::text),
            on_expiry: is_release.then(|| limit.on_expiry().keyword()),
            max_excess: Some(limit.max_excess()).filter(|_| has_window && has_own_max_excess(limit)),
            hold: rule.hold.as_deref().map(str::to_owned),
            shadow: rule.shadow,
            overdraft: rule.overdraft,
            absent: rule.absent.keyword(),
            exact: rule.exact,
            tag: rule.tag.as_deref().map(texts),
            stagger: rule.stagger,
            overrides: rule.overrides.len(),
        }
    }
}

/// Whether the bound of the excess was set: then it does not follow an override of the amount.
fn has_own_max_excess(limit: &Limit) -> bool {
    *limit == limit.with_max_excess(limit.max_excess())
}

impl From<&Override> for OverrideView {
    fn from(other: &Override) -> Self {
        Self {
            when: condition(&other.when),
            amount: other.amount,
            window: other
                .window
                .map(duration::text)
                .or_else(|| other.calendar.unit.map(|unit| unit.to_string())),
            zone: other.calendar.zone.map(Zone::name),
            anchor: other.calendar.anchor.map(AnchorView::from),
            burst: other.burst,
            cost: other.cost.map(|cost| cost.units()),
            unlimited: other.unlimited,
            blocked: other.blocked,
            on_store_failure: other.on_store_failure.map(Keywords::keyword),
            shadow: other.shadow,
            lease: other.lease.map(|lease| lease.to_string()),
            lease_for: other.lease_for.map(duration::text),
        }
    }
}

/// Returns a hash of the rules in hexadecimal digits: equal rules have equal fingerprints on every instance.
pub fn fingerprint(rules: &[Rule]) -> String {
    let mut hash = Sha256::new();
    for rule in rules {
        write(&mut hash, &RuleView::from(rule));
        for other in &rule.overrides {
            write(&mut hash, &OverrideView::from(other));
        }
    }
    hash.finalize()[..FINGERPRINT_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
}

fn write(hash: &mut Sha256, value: &impl Serialize) {
    serde_json::to_writer(hash, value).expect("writing strings and numbers to a hash cannot fail");
}

fn condition(condition: &Condition) -> ConditionView {
    let mut view = ConditionView::new();
    for (label, pattern) in condition.pairs() {
        let patterns = match pattern {
            Pattern::AnyOf(alternatives) => alternatives.members().iter().map(Pattern::to_string).collect(),
            one => vec![one.to_string()],
        };
        view.entry(label.to_owned()).or_default().extend(patterns);
    }
    view
}
