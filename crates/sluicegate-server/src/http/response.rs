//! A decision as JSON. Clients written in Rust, such as the command line, read it into the same types.

use std::borrow::Cow;

use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use sluicegate::{Decision, Retry, TierDecision};
use sluicegate_core::{decision::whole_millis_up, step::Mode};

use super::{
    json::{Written, object},
    problem::Problem,
};

/// The answer to a check, a peek, a charge and a refund.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Whether the request may pass.
    pub allowed: bool,
    /// The rule that decided; none where no rule matched, or a key was asked about.
    pub rule: Option<String>,
    /// How much fits at once, by that rule.
    pub limit: Option<u64>,
    /// How much of it is left.
    pub remaining: Option<u64>,
    /// After how long the same request would pass, if refused and waiting helps.
    pub retry_after_ms: Option<u64>,
    /// After how long nothing counts any more.
    pub reset_after_ms: Option<u64>,
    /// It was refused, and waiting does not help.
    pub never: bool,
    /// The store did not answer, and failure policies did.
    pub degraded: bool,
    /// The decision's source: `store`, `memory`, `cache`, `rule`, `unmatched`, `fallback`, `open` or `closed`.
    pub source: Cow<'static, str>,
    /// When it was decided, by the store's clock: what a refund names to take exactly this back.
    pub at_us: Option<u64>,
    /// What each rule that matched says.
    pub tiers: Vec<Tier>,
}

/// The answers to several checks, in their order.
#[derive(Serialize)]
pub(super) struct Results {
    pub(super) results: Vec<Outcome>,
}

/// What became of one of several checks. They do not depend on each other: a mistake in one leaves the others alone.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Outcome {
    Decided(Box<Answer>),
    Mistaken(Problem),
}

impl From<Result<Answer, Problem>> for Outcome {
    fn from(outcome: Result<Answer, Problem>) -> Self {
        match outcome {
            Ok(answer) => Self::Decided(Box::new(answer)),
            Err(problem) => Self::Mistaken(problem),
        }
    }
}

/// What one rule says. When and where the decision was made is said once, above.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tier {
    /// Whether it would let the request pass.
    pub allowed: bool,
    /// Its name; none where a key was asked about.
    pub rule: Option<String>,
    /// How much fits at once.
    pub limit: u64,
    /// How much of it is left.
    pub remaining: u64,
    /// After how long the same request would pass, if refused and waiting helps.
    pub retry_after_ms: Option<u64>,
    /// After how long nothing counts any more.
    pub reset_after_ms: u64,
    /// It refuses, and waiting does not help.
    pub never: bool,
    /// What it counts.
    pub unit: String,
    /// It never refuses a request.
    pub shadow: bool,
}

impl From<Decision> for Answer {
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
            tiers: decision.tiers.iter().map(Tier::from).collect(),
        }
    }
}

impl From<&TierDecision> for Tier {
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

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        self.response()
    }
}

impl Written for Answer {
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
    }
}

impl Written for Tier {
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

/// The answer to a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reset {
    /// How many counters there were to forget.
    pub reset: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tier() -> impl Strategy<Value = Tier> {
        let numbers = (any::<u64>(), any::<u64>(), any::<Option<u64>>(), any::<u64>());
        let flags = any::<(bool, bool, bool)>();
        (flags, any::<Option<String>>(), numbers, any::<String>()).prop_map(|(flags, rule, numbers, unit)| {
            Tier {
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
        fn an_answer_is_written_as_serde_would(
            tiers in prop::collection::vec(tier(), 0..4),
            numbers in any::<[Option<u64>; 5]>(),
            flags in any::<[bool; 3]>(),
            rule in any::<Option<String>>(),
            source in any::<String>(),
        ) {
            let [limit, remaining, retry_after_ms, reset_after_ms, at_us] = numbers;
            let [allowed, never, degraded] = flags;
            let answer = Answer {
                allowed, rule, limit, remaining, retry_after_ms, reset_after_ms, never, degraded,
                source: source.into(), at_us, tiers,
            };
            let mut written = Vec::new();
            answer.write(&mut written);
            prop_assert_eq!(String::from_utf8(written).unwrap(), serde_json::to_string(&answer).unwrap());
        }
    }
}
