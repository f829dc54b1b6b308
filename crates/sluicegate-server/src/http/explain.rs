//! Why a request would pass or not: which rules apply, which counter each uses, what is in it, and the sum.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use sluicegate::{
    Costs, CounterSnapshot, Decision, Key, Limit, Outcome, Request, Retry, Source, Subject, TierDecision,
    rules::{DenialReason, Effect, Explained, RuleSet},
};
use sluicegate_core::decision::whole_millis_up;

use super::{response::Answer, snapshot::SnapshotView};
use crate::duration;

/// The most rules that are listed although they do not apply.
const MAX_OTHERS: usize = 100;

/// The answer to a call for an explanation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// What a check would answer now.
    pub decision: Answer,
    /// The rules that apply, in their order.
    pub applies: Vec<Applying>,
    /// The others, and why they do not; none for who may not see the rules.
    pub others: Vec<Other>,
    /// How many more there are that do not.
    pub more_others: usize,
}

/// A rule that applies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Applying {
    /// Its name; none where a key is asked about.
    pub rule: Option<String>,
    /// The counter, as it is stored.
    pub key: Option<String>,
    /// By which it counts, overrides included.
    pub limit: Option<Terms>,
    /// What the request costs, by the rule's factor.
    pub cost: Option<u64>,
    /// What the counter holds.
    pub state: Option<State>,
    /// Why it comes out as it does.
    pub arithmetic: String,
    /// What is in the counter, to be drawn.
    #[serde(default)]
    pub snapshot: Option<SnapshotView>,
}

/// A limit as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// How it counts.
    pub algorithm: Cow<'static, str>,
    /// How many pass in a window.
    pub amount: u64,
    /// In which time.
    pub window: String,
    /// How many pass at once.
    pub capacity: u64,
    /// It never refuses a request.
    pub shadow: bool,
}

/// What a counter holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// What counts now.
    pub used: u64,
    /// What is left.
    pub remaining: u64,
    /// After how long nothing counts any more.
    pub reset_after_ms: u64,
}

/// A rule that does not apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Other {
    /// Its name.
    pub rule: String,
    /// Why it does not.
    pub because: String,
}

impl Explanation {
    /// Puts together what the rules say of a request, and what a peek at its counters told. Also which counters these are, in the
    /// order of the rules that apply and have one.
    pub(super) fn new(
        rules: &RuleSet,
        request: &Request<'_>,
        decision: Decision,
    ) -> Result<(Self, Vec<(Key, Limit)>), sluicegate::Error> {
        let mut counters = Vec::new();
        let (applies, mut others) = match &request.subject {
            Subject::Key { key, limit, cost } => {
                let key = Key::without_rule(key)?;
                let told = (decision.tiers.first(), decision.source);
                let applying = counted(None, key.to_string(), limit, false, cost.units(), told);
                counters.push((key, *limit));
                (vec![applying], Vec::new())
            }
            Subject::Labels { labels, costs, .. } => {
                by_rules(rules.explain(labels, costs)?, costs, &decision, &mut counters)
            }
        };
        let more_others = others.len().saturating_sub(MAX_OTHERS);
        others.truncate(MAX_OTHERS);
        Ok((Self { decision: decision.into(), applies, others, more_others }, counters))
    }

    /// Removes the rules that do not apply: only administrators may see all rules.
    pub(super) fn hide_other_rules(&mut self) {
        self.more_others += self.others.len();
        self.others.clear();
    }

    /// Adds the snapshots of the counters.
    pub(super) fn add_snapshots(&mut self, snapshots: Vec<Option<CounterSnapshot>>) {
        let counted = self.applies.iter_mut().filter(|applying| applying.key.is_some());
        for (applying, snapshot) in counted.zip(snapshots) {
            let used = applying.state.as_ref().map_or(0, |state| state.used);
            applying.snapshot = snapshot.map(|snapshot| SnapshotView::new(snapshot, used));
        }
    }
}

impl Terms {
    /// A limit, and whether it is only tried out.
    pub fn new(limit: &Limit, shadow: bool) -> Self {
        Self {
            algorithm: limit.algorithm().name().into(),
            amount: limit.amount(),
            window: duration::text(limit.window()),
            capacity: limit.capacity(),
            shadow,
        }
    }
}

fn by_rules(
    explained: Vec<Explained<'_>>,
    costs: &Costs,
    decision: &Decision,
    counters: &mut Vec<(Key, Limit)>,
) -> (Vec<Applying>, Vec<Other>) {
    let (mut applies, mut others) = (Vec::new(), Vec::new());
    for Explained { rule, effect } in explained {
        let name = rule.name.to_string();
        match effect {
            Err(unmet) => others.push(Other { rule: name, because: unmet.to_string() }),
            Ok(Effect::Deny { reason, .. }) => {
                let arithmetic = match reason {
                    DenialReason::Blocked => "an override blocks this request, whatever is left",
                    DenialReason::Absent => "a label is missing by which it counts, and then it refuses",
                };
                let arithmetic = arithmetic.to_owned();
                applies.push(Applying {
                    rule: Some(name),
                    key: None,
                    limit: None,
                    cost: None,
                    state: None,
                    arithmetic,
                    snapshot: None,
                });
            }
            Ok(Effect::Limit { key, limit, cost, shadow, .. }) => {
                let is_free = costs.of(&rule.unit).units() == 0;
                let tier = decision.tiers.iter().find(|tier| tier.rule.as_deref() == Some(&*rule.name));
                let told = (tier, decision.source);
                let mut applying = counted(Some(name), key.to_string(), &limit, shadow, cost.units(), told);
                if is_free {
                    applying.arithmetic += &format!(" (the request names no cost in {:?})", rule.unit);
                }
                applies.push(applying);
                counters.push((key, limit));
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
    (tier, source): (Option<&TierDecision>, Source),
) -> Applying {
    // without the store, it is this process's share that decides
    let capacity = tier.map_or(limit.capacity(), |tier| tier.limit);
    let terms = Terms::new(limit, shadow);
    let state = tier.filter(|_| source != Source::Closed).map(|tier| State {
        used: capacity.saturating_sub(tier.remaining),
        remaining: tier.remaining,
        reset_after_ms: whole_millis_up(tier.reset_after),
    });
    let arithmetic = match (tier, &state) {
        (Some(tier), Some(state)) if source == Source::Fallback => {
            format!("the store is away; by this server's share: {}", sum(tier, state, cost, capacity))
        }
        (Some(tier), Some(state)) => sum(tier, state, cost, capacity),
        (Some(_), None) => "the store is away, and then it refuses".to_owned(),
        (None, _) if matches!(source, Source::Fallback | Source::Open | Source::Closed) => {
            "the store is away, so that the counter could not be looked at".to_owned()
        }
        _ => "not looked at: another rule refuses already".to_owned(),
    };
    Applying { rule, key: Some(key), limit: Some(terms), cost: Some(cost), state, arithmetic, snapshot: None }
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
