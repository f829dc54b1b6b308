//! Why a request would pass or not: which rules apply, which counter each uses, what is in it, and the sum.

use serde::Serialize;
use tollgate::{
    Costs, Decision, Limit, Outcome, Retry, TierDecision,
    rules::{Effect, Explained, Refusal, RuleSet},
};
use tollgate_core::decision::whole_millis_up;

use super::answer::Answer;
use crate::{desk::Subject, duration};

/// The most rules that are listed although they do not apply.
const MAX_OTHERS: usize = 100;

/// The answer to a call for an explanation.
#[derive(Serialize)]
pub(super) struct Explanation {
    /// What a check would answer now.
    decision: Answer,
    /// The rules that apply, in their order.
    applies: Vec<Applying>,
    /// The others, and why they do not.
    others: Vec<Other>,
    /// How many more there are that do not.
    more_others: usize,
}

#[derive(Serialize)]
struct Applying {
    rule: Option<String>,
    /// The counter, as it is stored.
    key: Option<String>,
    limit: Option<Terms>,
    cost: Option<u64>,
    state: Option<State>,
    arithmetic: String,
}

#[derive(Serialize)]
struct Terms {
    algorithm: &'static str,
    amount: u64,
    window: String,
    capacity: u64,
    shadow: bool,
}

#[derive(Serialize)]
struct State {
    used: u64,
    remaining: u64,
    reset_after_ms: u64,
}

#[derive(Serialize)]
struct Other {
    rule: String,
    because: String,
}

impl Explanation {
    /// Puts together what the rules say of a request, and what a peek at its counters told.
    pub(super) fn new(
        rules: &RuleSet,
        subject: &Subject,
        decision: Decision,
    ) -> Result<Self, tollgate::Error> {
        let (applies, mut others) = match subject {
            Subject::Key { key, limit, cost } => {
                let key = tollgate::Key::without_rule(key)?.to_string();
                (vec![counted(None, key, limit, false, cost.units(), decision.tiers.first())], Vec::new())
            }
            Subject::Rules { labels, costs, .. } => by_rules(rules.explain(labels, costs)?, costs, &decision),
        };
        let more_others = others.len().saturating_sub(MAX_OTHERS);
        others.truncate(MAX_OTHERS);
        Ok(Self { decision: decision.into(), applies, others, more_others })
    }
}

fn by_rules(
    explained: Vec<Explained<'_>>,
    costs: &Costs,
    decision: &Decision,
) -> (Vec<Applying>, Vec<Other>) {
    let (mut applies, mut others) = (Vec::new(), Vec::new());
    for Explained { rule, effect } in explained {
        let name = rule.name.to_string();
        match effect {
            Err(unmet) => others.push(Other { rule: name, because: unmet.to_string() }),
            Ok(Effect::Refuse { reason, .. }) => {
                let arithmetic = match reason {
                    Refusal::Blocked => "an override blocks this request, whatever is left",
                    Refusal::Absent => "a label is missing by which it counts, and then it refuses",
                };
                let arithmetic = arithmetic.to_owned();
                let rule = Some(name);
                applies.push(Applying { rule, key: None, limit: None, cost: None, state: None, arithmetic });
            }
            Ok(Effect::Limit { key, limit, cost, shadow, .. }) => {
                let is_free = costs.of(&rule.unit).units() == 0;
                let tier = decision.tiers.iter().find(|tier| tier.rule.as_deref() == Some(&*rule.name));
                let mut applying = counted(Some(name), key.to_string(), &limit, shadow, cost.units(), tier);
                if is_free {
                    applying.arithmetic += &format!(" (the request names no cost in {:?})", rule.unit);
                }
                applies.push(applying);
            }
        }
    }
    (applies, others)
}

fn counted(
    rule: Option<String>,
    key: String,
    limit: &Limit,
    shadow: bool,
    cost: u64,
    tier: Option<&TierDecision>,
) -> Applying {
    let capacity = limit.capacity();
    let terms = Terms {
        algorithm: limit.algorithm().name(),
        amount: limit.amount(),
        window: duration::text(limit.window()),
        capacity,
        shadow,
    };
    let state = tier.map(|tier| State {
        used: capacity.saturating_sub(tier.remaining),
        remaining: tier.remaining,
        reset_after_ms: whole_millis_up(tier.reset_after),
    });
    let arithmetic = match (tier, &state) {
        (Some(tier), Some(state)) => sum(tier, state, cost, capacity),
        _ => "the counter could not be looked at: another rule refuses already, or the store is away"
            .to_owned(),
    };
    Applying { rule, key: Some(key), limit: Some(terms), cost: Some(cost), state, arithmetic }
}

/// What a counter holds, what is asked, and whether both fit.
fn sum(tier: &TierDecision, state: &State, cost: u64, capacity: u64) -> String {
    let used = state.used;
    match tier.outcome {
        Outcome::Allowed => format!("{used} used + {cost} asked = {} of {capacity}: fits", used + cost),
        Outcome::Denied { retry: Retry::Never } => {
            format!("{cost} asked is more than the {capacity} that ever fit: waiting does not help")
        }
        Outcome::Denied { retry: Retry::After(wait) } => format!(
            "{used} used + {cost} asked = {} of {capacity}: fits in {}",
            used + cost,
            duration::text(std::time::Duration::from_millis(whole_millis_up(wait)))
        ),
    }
}
