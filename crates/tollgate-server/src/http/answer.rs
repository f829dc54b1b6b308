//! A decision as JSON.

use serde::Serialize;
use tollgate::{Decision, Retry, TierDecision};
use tollgate_core::{decision::whole_millis_up, step::Mode};

use super::{json::Json, problem::Problem};

/// The answer to a check, a peek, a charge and a refund.
#[derive(Serialize)]
pub(super) struct Answer {
    allowed: bool,
    rule: Option<String>,
    limit: Option<u64>,
    remaining: Option<u64>,
    retry_after_ms: Option<u64>,
    reset_after_ms: Option<u64>,
    never: bool,
    degraded: bool,
    source: &'static str,
    at_us: Option<u64>,
    tiers: Vec<Tier>,
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

impl From<Result<Json<Answer>, Problem>> for Outcome {
    fn from(outcome: Result<Json<Answer>, Problem>) -> Self {
        match outcome {
            Ok(Json(answer)) => Self::Decided(Box::new(answer)),
            Err(problem) => Self::Mistaken(problem),
        }
    }
}

/// What one rule says. When and where the decision was made is said once, above.
#[derive(Serialize)]
struct Tier {
    allowed: bool,
    rule: Option<String>,
    limit: u64,
    remaining: u64,
    retry_after_ms: Option<u64>,
    reset_after_ms: u64,
    never: bool,
    unit: String,
    shadow: bool,
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
            source: decision.source.name(),
            at_us: decision.at.map(|at| at.as_micros()),
            tiers: decision.tiers.iter().map(Tier::from).collect(),
        }
    }
}

impl From<&TierDecision> for Tier {
    fn from(tier: &TierDecision) -> Self {
        let retry_after_ms = match tier.outcome {
            tollgate::Outcome::Denied { retry: Retry::After(wait) } => Some(whole_millis_up(wait)),
            tollgate::Outcome::Denied { retry: Retry::Never } | tollgate::Outcome::Allowed => None,
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

fn is_never(outcome: tollgate::Outcome) -> bool {
    matches!(outcome, tollgate::Outcome::Denied { retry: Retry::Never })
}

/// The answer to a reset.
#[derive(Serialize)]
pub(super) struct Reset {
    /// How many counters there were to forget.
    pub(super) reset: u64,
}
