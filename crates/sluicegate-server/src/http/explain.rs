//! Explains a decision: which rules apply, which counter each uses, its usage, and the arithmetic.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use sluicegate::{
    Costs, Decision, Limit, Outcome, Retry, Source, TierDecision,
    calendar::Calendar,
    duration,
    limiter::{Request, Subject},
    rules::{DenialReason, Effect, Explained, RuleSet},
    store::{CounterSnapshot, Key, LiveHolds},
    window,
};
use sluicegate_core::decision::whole_millis_up;

use super::{response::DecisionBody, snapshot::SnapshotView};
use crate::config::AnchorView;

/// The most rules that do not apply but are listed.
const MAX_OTHERS: usize = 100;

/// The response to a call for an explanation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The decision that a check would get now.
    pub decision: DecisionBody,
    /// The rules that apply, in their order.
    pub applies: Vec<AppliedRule>,
    /// The other rules, each with the reason; empty for tokens without the scope `admin`.
    pub others: Vec<OtherRule>,
    /// The number of rules that do not apply and are not listed.
    pub more_others: usize,
}

/// A rule that applies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AppliedRule {
    /// The name of the rule; `None` for a key.
    pub rule: Option<String>,
    /// The key of the counter, as stored.
    pub key: Option<String>,
    /// The limit, including overrides.
    pub limit: Option<LimitView>,
    /// The cost of the request, including the rule's factor.
    pub cost: Option<u64>,
    /// The usage of the counter.
    pub state: Option<CounterView>,
    /// The arithmetic of the decision.
    pub arithmetic: String,
    /// The state of the counter, for display.
    #[serde(default)]
    pub snapshot: Option<SnapshotView>,
}

/// A limit, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitView {
    /// The algorithm.
    pub algorithm: Cow<'static, str>,
    /// Units per window.
    pub amount: u64,
    /// The window; `None` if the algorithm has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    /// The time zone of a calendar window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// The first day of a calendar window.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchor: Option<AnchorView>,
    /// The maximum number of units admitted at one time.
    pub capacity: u64,
    /// Whether the rule is a shadow rule, which never denies.
    pub shadow: bool,
}

/// The usage of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterView {
    /// Units in use now, including leased ones.
    pub used: u64,
    /// Units that processes have charged in advance and not spent.
    #[serde(default)]
    pub leased: u64,
    /// Units available now.
    pub remaining: u64,
    /// The time until the counter is empty.
    pub reset_after_ms: u64,
    /// The live holds, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holds: Option<LiveHoldsView>,
}

/// The live holds of a counter, which were not settled or released and have not expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveHoldsView {
    /// Their number.
    pub count: u64,
    /// The sum of their units.
    pub units: u64,
    /// When the oldest of them was made, on the store's clock.
    pub oldest_us: u64,
    /// Whether there are too many to read each of them: there may be more units and an older hold.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub partial: bool,
}

impl LiveHoldsView {
    fn new(LiveHolds { count, units, oldest_us, is_partial: partial }: LiveHolds) -> Option<Self> {
        (count > 0).then_some(Self { count, units, oldest_us, partial })
    }
}

/// A rule that does not apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherRule {
    /// The name of the rule.
    pub rule: String,
    /// The reason.
    pub because: String,
}

impl Explanation {
    /// Combines the rules that match a request with the decision of a peek. Also returns the counters, in the order of the rules that
    /// apply and have one.
    pub(super) fn new(
        rules: &RuleSet,
        request: &Request<'_>,
        decision: Decision,
    ) -> Result<(Self, Vec<(Key, Limit)>), sluicegate::Error> {
        let mut counters = Vec::new();
        let (applies, mut others) = match &request.subject {
            Subject::Key { key, limit, cost } => {
                let key = Key::without_rule(key)?;
                let observed = (decision.tiers.first(), decision.source);
                let applied = explain_counter(None, key.to_string(), limit, false, cost.units(), observed);
                counters.push((key, *limit));
                (vec![applied], Vec::new())
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
        let with_counter = self.applies.iter_mut().filter(|applied| applied.key.is_some());
        for (applied, snapshot) in with_counter.zip(snapshots) {
            let used = applied.state.as_ref().map_or(0, |state| state.used);
            if let (Some(state), Some(snapshot)) = (&mut applied.state, &snapshot) {
                state.leased = snapshot.leased;
                state.holds = LiveHoldsView::new(snapshot.holds);
            }
            applied.snapshot = snapshot.map(|snapshot| SnapshotView::new(snapshot, used));
        }
    }
}

impl LimitView {
    /// The view of a limit, and whether its rule is a shadow rule.
    pub fn new(limit: &Limit, shadow: bool) -> Self {
        Self {
            algorithm: limit.algorithm().name().into(),
            amount: limit.amount(),
            window: limit.algorithm().properties().has_window.then(|| window::text(limit)),
            zone: limit.calendar().map(|calendar| calendar.zone().to_owned()),
            anchor: limit.calendar().and_then(Calendar::anchor).map(AnchorView::from),
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
) -> (Vec<AppliedRule>, Vec<OtherRule>) {
    let (mut applies, mut others) = (Vec::new(), Vec::new());
    for Explained { rule, effect, .. } in explained {
        let name = rule.name.to_string();
        match effect {
            Err(unmet) => others.push(OtherRule { rule: name, because: unmet.to_string() }),
            Ok(Effect::Deny { reason, .. }) => {
                let arithmetic = match reason {
                    DenialReason::Blocked => "an override blocks this request",
                    DenialReason::Absent => {
                        "a label that the rule counts by is absent, and the rule denies in that case"
                    }
                };
                let arithmetic = arithmetic.to_owned();
                applies.push(AppliedRule {
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
                let is_free = rule.cost_of(costs).units() == 0;
                let tier = decision.tiers.iter().find(|tier| tier.rule.as_deref() == Some(&*rule.name));
                let observed = (tier, decision.source);
                let mut applied =
                    explain_counter(Some(name), key.to_string(), &limit, shadow, cost.units(), observed);
                if is_free {
                    applied.arithmetic += &format!(" (the request has no cost in {:?})", rule.unit);
                }
                applies.push(applied);
                counters.push((key, limit));
            }
        }
    }
    (applies, others)
}

fn explain_counter(
    rule: Option<String>,
    key: String,
    limit: &Limit,
    shadow: bool,
    cost: u64,
    (tier, source): (Option<&TierDecision>, Source),
) -> AppliedRule {
    // in a fallback, this process's share of the limit applies
    let capacity = tier.map_or(limit.capacity(), |tier| tier.limit);
    // a request in flight usually ends before its hold expires
    let bound = if limit.algorithm().properties().has_window { "" } else { " at the latest" };
    let limit = LimitView::new(limit, shadow);
    let state = tier.filter(|_| source != Source::Closed).map(|tier| CounterView {
        used: capacity.saturating_sub(tier.remaining).saturating_add(tier.debt),
        leased: 0,
        remaining: tier.remaining,
        reset_after_ms: whole_millis_up(tier.reset_after),
        holds: None,
    });
    let arithmetic = match (tier, &state) {
        (Some(tier), Some(state)) if source == Source::Fallback => {
            format!(
                "store unavailable, enforcing this server's share of the limit: {}",
                sum(tier, state, cost, capacity, bound)
            )
        }
        (Some(tier), Some(state)) => sum(tier, state, cost, capacity, bound),
        (Some(_), None) => "store unavailable, failing closed".to_owned(),
        (None, _) if matches!(source, Source::Fallback | Source::Open | Source::Closed) => {
            "store unavailable: the counter was not read".to_owned()
        }
        _ => "not read: another rule denies".to_owned(),
    };
    AppliedRule {
        rule,
        key: Some(key),
        limit: Some(limit),
        cost: Some(cost),
        state,
        arithmetic,
        snapshot: None,
    }
}

/// Returns the usage plus the cost, compared with the capacity.
fn sum(tier: &TierDecision, state: &CounterView, cost: u64, capacity: u64, bound: &str) -> String {
    let used = state.used;
    let total = used.saturating_add(cost);
    match tier.outcome {
        Outcome::Allowed => format!("{used} used + {cost} requested = {total} of {capacity}: fits"),
        Outcome::Denied { retry: Retry::Never } => {
            format!("{cost} requested exceeds the capacity of {capacity}: waiting does not help")
        }
        Outcome::Denied { retry: Retry::After(wait) } => format!(
            "{used} used + {cost} requested = {total} of {capacity}: fits in {}{bound}",
            duration::text(std::time::Duration::from_millis(whole_millis_up(wait)))
        ),
    }
}
