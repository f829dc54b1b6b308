//! Rules as they are shown, and what tells one set of rules from another.

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest, Sha256};
use tollgate::{Override, Pattern, Rule, rules::Condition};

use super::kinds::Words;
use crate::duration;

/// How many bytes of a hash make a fingerprint.
const FINGERPRINT_BYTES: usize = 16;

/// Labels, each with the patterns of which one must match, as they are written in the file.
pub type ConditionView = BTreeMap<String, Vec<String>>;

/// A rule in force, as `GET /v1/rules` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleView {
    /// What it is called.
    pub name: String,
    /// It applies to requests that match all of these.
    pub when: ConditionView,
    /// And to none that match any of these.
    pub unless: ConditionView,
    /// The labels whose values are counted apart.
    pub per: Vec<String>,
    /// How it counts.
    pub algorithm: &'static str,
    /// How many pass in a window.
    pub amount: u64,
    /// In which time.
    pub window: String,
    /// Of a token bucket: how many may pass at once.
    pub burst: Option<u64>,
    /// What is counted.
    pub unit: String,
    /// Multiplies the caller's cost.
    pub cost: u64,
    /// What it does when the store does not answer in time.
    pub on_store_failure: &'static str,
    /// It is evaluated and never refuses.
    pub shadow: bool,
    /// It admits while anything remains, into debt.
    pub overdraft: bool,
    /// What becomes of a request that lacks one of the labels in `per`.
    pub absent: &'static str,
    /// It applies only to requests without further labels.
    pub exact: bool,
    /// The labels that decide where in a Redis Cluster the counter is.
    pub tag: Option<Vec<String>>,
    /// Each key's windows begin at a moment of its own.
    pub stagger: bool,
    /// How many overrides it has.
    pub overrides: usize,
}

/// An override, whole: a fingerprint depends on all of it.
#[derive(Serialize)]
struct OverrideView {
    when: ConditionView,
    amount: Option<u64>,
    window: Option<String>,
    burst: Option<u64>,
    cost: Option<u64>,
    unlimited: Option<bool>,
    blocked: Option<bool>,
    on_store_failure: Option<&'static str>,
    shadow: Option<bool>,
}

impl From<&Rule> for RuleView {
    fn from(rule: &Rule) -> Self {
        let limit = &rule.limit;
        let texts = |list: &[Box<str>]| list.iter().map(|label| label.to_string()).collect();
        let is_bucket = limit.algorithm() == tollgate::Algorithm::TokenBucket;
        Self {
            name: rule.name.to_string(),
            when: condition(&rule.when),
            unless: condition(&rule.unless),
            per: texts(&rule.per),
            algorithm: limit.algorithm().word(),
            amount: limit.amount(),
            window: duration::text(limit.window()),
            burst: is_bucket.then(|| rule.burst.unwrap_or(limit.capacity())),
            unit: rule.unit.to_string(),
            cost: rule.cost.units(),
            on_store_failure: rule.on_store_failure.word(),
            shadow: rule.shadow,
            overdraft: rule.overdraft,
            absent: rule.absent.word(),
            exact: rule.exact,
            tag: rule.tag.as_deref().map(texts),
            stagger: rule.stagger,
            overrides: rule.overrides.len(),
        }
    }
}

impl From<&Override> for OverrideView {
    fn from(other: &Override) -> Self {
        Self {
            when: condition(&other.when),
            amount: other.amount,
            window: other.window.map(duration::text),
            burst: other.burst,
            cost: other.cost.map(|cost| cost.units()),
            unlimited: other.unlimited,
            blocked: other.blocked,
            on_store_failure: other.on_store_failure.map(Words::word),
            shadow: other.shadow,
        }
    }
}

/// What tells these rules from others, in hexadecimal digits: equal for equal rules, on every instance.
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
    serde_json::to_writer(hash, value).expect("a hash takes everything, and these are texts and numbers");
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
