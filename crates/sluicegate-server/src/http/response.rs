//! Decisions as JSON. The command line deserializes them into the same types.

use std::{borrow::Cow, collections::BTreeMap};

use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use sluicegate::{
    Decision, Retry, TierDecision,
    limiter::{DeletedCounter, Reset, UnmatchedRule},
};
use sluicegate_core::{decision::whole_millis_up, step::Mode};

use super::{
    json::{WriteJson, object},
    problem::Problem,
};

/// The response to a check, a peek, a charge or a refund.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionBody {
    /// Whether the request is allowed.
    pub allowed: bool,
    /// The deciding rule; `None` if no rule matched, or for a key.
    pub rule: Option<String>,
    /// The capacity of that rule's limit.
    pub limit: Option<u64>,
    /// The units available now.
    pub remaining: Option<u64>,
    /// The wait after which the same request would be allowed, if it is denied and waiting helps.
    pub retry_after_ms: Option<u64>,
    /// The time until the counter is empty.
    pub reset_after_ms: Option<u64>,
    /// Whether the request is denied and waiting does not help.
    pub never: bool,
    /// Whether failure policies decided because the store did not answer.
    pub degraded: bool,
    /// The source of the decision: `store`, `memory`, `cache`, `rule`, `unmatched`, `fallback`, `open` or `closed`.
    pub source: Cow<'static, str>,
    /// The time of the decision on the store's clock. A refund with this time reverts exactly this charge.
    pub at_us: Option<u64>,
    /// The decision of each matching rule.
    pub tiers: Vec<TierBody>,
    /// The rate limit headers for the caller's own response, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, String>>,
}

/// The response to a batch of checks, in their order.
#[derive(Serialize)]
pub(super) struct BatchBody {
    pub(super) results: Vec<BatchEntry>,
}

/// The outcome of one check of a batch. Checks are independent: an invalid one does not affect the others.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum BatchEntry {
    Decided(Box<DecisionBody>),
    Invalid(Problem),
}

impl From<Result<DecisionBody, Problem>> for BatchEntry {
    fn from(outcome: Result<DecisionBody, Problem>) -> Self {
        match outcome {
            Ok(decision) => Self::Decided(Box::new(decision)),
            Err(problem) => Self::Invalid(problem),
        }
    }
}

/// The decision of one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierBody {
    /// Whether this rule alone would allow the request.
    pub allowed: bool,
    /// The name of the rule; `None` for a key.
    pub rule: Option<String>,
    /// The capacity of the limit.
    pub limit: u64,
    /// The units available now.
    pub remaining: u64,
    /// The wait after which the same request would be allowed, if it is denied and waiting helps.
    pub retry_after_ms: Option<u64>,
    /// The time until the counter is empty.
    pub reset_after_ms: u64,
    /// Whether the rule denies and waiting does not help.
    pub never: bool,
    /// The unit that is counted.
    pub unit: String,
    /// Whether the rule is a shadow rule, which never denies.
    pub shadow: bool,
}

impl From<Decision> for DecisionBody {
    fn from(decision: Decision) -> Self {
        Self {
            allowed: decision.is_allowed(),
            rule: decision.rule().map(str::to_owned),
            limit: decision.limit(),
            remaining: decision.remaining(),
            retry_after_ms: decision.retry_after().map(whole_millis_up),
            reset_after_ms: decision.reset_after().map(whole_millis_up),
            never: is_never(decision.outcome),
            degraded: decision.is_degraded(),
            source: decision.source.name().into(),
            at_us: decision.at.map(|at| at.as_micros()),
            tiers: decision.tiers.iter().map(TierBody::from).collect(),
            headers: None,
        }
    }
}

impl From<&TierDecision> for TierBody {
    fn from(tier: &TierDecision) -> Self {
        let retry_after_ms = match tier.outcome {
            sluicegate::Outcome::Denied { retry: Retry::After(wait) } => Some(whole_millis_up(wait)),
            sluicegate::Outcome::Denied { retry: Retry::Never } | sluicegate::Outcome::Allowed => None,
        };
        Self {
            allowed: tier.outcome.is_allowed(),
            rule: tier.rule.as_deref().map(str::to_owned),
            limit: tier.limit,
            remaining: tier.remaining,
            retry_after_ms,
            reset_after_ms: whole_millis_up(tier.reset_after),
            never: is_never(tier.outcome),
            unit: tier.unit.to_string(),
            shadow: tier.mode == Mode::Shadow,
        }
    }
}

impl IntoResponse for DecisionBody {
    fn into_response(self) -> Response {
        self.response()
    }
}

impl WriteJson for DecisionBody {
    fn write(&self, json: &mut Vec<u8>) {
        object!(json, {
            "allowed": self.allowed,
            "rule": self.rule.as_deref(),
            "limit": self.limit,
            "remaining": self.remaining,
            "retry_after_ms": self.retry_after_ms,
            "reset_after_ms": self.reset_after_ms,
            "never": self.never,
            "degraded": self.degraded,
            "source": &*self.source,
            "at_us": self.at_us,
            "tiers": self.tiers[..],
        });
        if let Some(headers) = &self.headers {
            json.pop();
            json.extend_from_slice(b",\"headers\":");
            serde_json::to_writer(&mut *json, headers).expect("writing strings to memory cannot fail");
            json.push(b'}');
        }
    }
}

impl WriteJson for TierBody {
    fn write(&self, json: &mut Vec<u8>) {
        object!(json, {
            "allowed": self.allowed,
            "rule": self.rule.as_deref(),
            "limit": self.limit,
            "remaining": self.remaining,
            "retry_after_ms": self.retry_after_ms,
            "reset_after_ms": self.reset_after_ms,
            "never": self.never,
            "unit": self.unit.as_str(),
            "shadow": self.shadow,
        });
    }
}

fn is_never(outcome: sluicegate::Outcome) -> bool {
    matches!(outcome, sluicegate::Outcome::Denied { retry: Retry::Never })
}

/// The response to a reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetBody {
    /// How many counters existed and were deleted.
    pub reset: usize,
    /// These counters, in the order of their rules.
    pub counters: Vec<DeletedCounterBody>,
    /// The names of the rules that match the request but were not reset.
    pub kept: Vec<String>,
    /// How many rules or keys were selected, with or without a counter.
    pub selected: usize,
    /// If none was selected: rules that count by a label of the request but do not match it.
    pub unmatched: Vec<UnmatchedRuleBody>,
    /// How long other instances may repeat a cached denial of a deleted counter, in milliseconds.
    pub denial_cache_ms: u64,
}

/// A rule that a reset did not match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmatchedRuleBody {
    /// The name of the rule.
    pub rule: String,
    /// The labels that the request lacks, as `route=login`, or `user=…` for any value.
    pub needs: Vec<String>,
}

/// A counter that was deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedCounterBody {
    /// The name of the rule; `None` for a key.
    pub rule: Option<String>,
    /// The key of the counter, as stored.
    pub key: String,
}

impl From<Reset> for ResetBody {
    fn from(reset: Reset) -> Self {
        let body = |deleted: &DeletedCounter| DeletedCounterBody {
            rule: deleted.rule.as_deref().map(str::to_owned),
            key: deleted.key.to_string(),
        };
        let unmatched = |unmatched: UnmatchedRule| UnmatchedRuleBody {
            rule: unmatched.rule.to_string(),
            needs: unmatched.needs,
        };
        Self {
            reset: reset.deleted.len(),
            counters: reset.deleted.iter().map(body).collect(),
            kept: reset.kept.iter().map(ToString::to_string).collect(),
            selected: reset.selected,
            unmatched: reset.unmatched.into_iter().map(unmatched).collect(),
            denial_cache_ms: whole_millis_up(reset.denial_cache),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tier() -> impl Strategy<Value = TierBody> {
        let numbers = (any::<u64>(), any::<u64>(), any::<Option<u64>>(), any::<u64>());
        let flags = any::<(bool, bool, bool)>();
        (flags, any::<Option<String>>(), numbers, any::<String>()).prop_map(|(flags, rule, numbers, unit)| {
            TierBody {
                allowed: flags.0,
                rule,
                limit: numbers.0,
                remaining: numbers.1,
                retry_after_ms: numbers.2,
                reset_after_ms: numbers.3,
                never: flags.1,
                unit,
                shadow: flags.2,
            }
        })
    }

    proptest! {
        #[test]
        fn a_decision_is_written_as_serde_would(
            tiers in prop::collection::vec(tier(), 0..4),
            numbers in any::<[Option<u64>; 5]>(),
            flags in any::<[bool; 3]>(),
            rule in any::<Option<String>>(),
            source in any::<String>(),
            headers in any::<Option<BTreeMap<String, String>>>(),
        ) {
            let [limit, remaining, retry_after_ms, reset_after_ms, at_us] = numbers;
            let [allowed, never, degraded] = flags;
            let decision = DecisionBody {
                allowed, rule, limit, remaining, retry_after_ms, reset_after_ms, never, degraded,
                source: source.into(), at_us, tiers, headers,
            };
            let mut written = Vec::new();
            decision.write(&mut written);
            prop_assert_eq!(String::from_utf8(written).unwrap(), serde_json::to_string(&decision).unwrap());
        }
    }
}
