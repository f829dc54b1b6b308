//! From a request to a decision. The matching rules become one check, which the backend decides. If a remote store does not answer,
//! the rules' failure policies decide.

use std::{
    future::Future,
    mem,
    ops::Deref,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::join_all;
use sluicegate_core::{
    Algorithm, Cost, HoldAnswer, HoldOutcome, Operation, Outcome, Retry, Terms, Timestamp,
    step::{Admission, Mode, Share},
};
use smallvec::SmallVec;

use super::{
    Error, Limiter,
    request::{LimitOverride, OnConcurrency, Request, Subject},
};
use crate::{
    backend::{CheckShares, Step},
    check::{Check, Tier, Tiers},
    decision::{Decision, Source, TierDecision},
    key::Key,
    remote::Remote,
    rules::{Applied, DEFAULT_UNIT, Effect, OnStoreFailure, Rule, RuleSet, Unit},
    store::{BoxFuture, StoreError},
};

/// The wait reported to a request that is denied because the store is down.
const CLOSED_RETRY: Duration = Duration::from_secs(1);

/// The progress of a request without waiting.
#[derive(Debug)]
#[must_use = "a pending decision is sent only when it is polled"]
pub enum Progress {
    /// It is decided.
    Decided(Decision),
    /// A remote store must decide it. Nothing is sent before the future is polled.
    Pending(PendingDecision),
}

/// A decision that a remote store must make. Ready by the deadline.
#[must_use = "a pending decision is sent only when it is polled"]
pub struct PendingDecision(BoxFuture<'static, Result<Decision, Error>>);

impl PendingDecision {
    /// Wraps a future.
    pub fn new(decision: impl Future<Output = Result<Decision, Error>> + Send + 'static) -> Self {
        Self(Box::pin(decision))
    }
}

impl Future for PendingDecision {
    type Output = Result<Decision, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

impl std::fmt::Debug for PendingDecision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PendingDecision")
    }
}

impl Progress {
    /// Waits for the decision, if it is pending.
    ///
    /// # Errors
    /// When a charge or a refund did not reach the store.
    pub async fn decision(self) -> Result<Decision, Error> {
        match self {
            Self::Decided(decision) => Ok(decision),
            Self::Pending(pending) => pending.await,
        }
    }

    /// Waits for the decisions of several requests. Those that are pending are sent together.
    pub async fn all(started: Vec<Result<Self, Error>>) -> Vec<Result<Decision, Error>> {
        let mut pending = Vec::new();
        let mut decisions: Vec<Option<_>> = Vec::with_capacity(started.len());
        for progress in started {
            decisions.push(match progress {
                Ok(Self::Decided(decision)) => Some(Ok(decision)),
                Ok(Self::Pending(decision)) => {
                    pending.push(decision);
                    None
                }
                Err(error) => Some(Err(error)),
            });
        }
        let mut decided = join_all(pending).await.into_iter();
        let decisions = decisions.into_iter().map(|decision| decision.or_else(|| decided.next()));
        decisions.map(|decision| decision.expect("every pending request has a decision")).collect()
    }
}

/// The rule of a tier: the fields of its decision, and its failure policy.
pub(super) struct TierInfo {
    pub(super) rule: Option<Arc<str>>,
    pub(super) unit: Unit,
    pub(super) on_store_failure: OnStoreFailure,
    /// The time until a hold expires.
    pub(super) ttl: Option<Duration>,
    /// The factor of the caller's cost.
    pub(super) factor: Cost,
    /// Whether the rule names the label that contains the id of a hold.
    pub(super) names_hold: bool,
}

impl Default for TierInfo {
    fn default() -> Self {
        let (rule, unit, on_store_failure) = Default::default();
        Self { rule, unit, on_store_failure, ttl: None, factor: Cost::ONE, names_hold: false }
    }
}

/// How a request treats the concurrency rules that it matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConcurrencyRules {
    /// They apply: the request is a hold or a peek.
    Apply,
    /// They are skipped.
    Skip,
    /// Enforced ones are an error, shadow ones are skipped.
    Reject,
    /// Enforced and shadow ones are an error.
    RejectShadow,
}

impl ConcurrencyRules {
    /// Returns how a request of a group that is held uses them.
    pub(super) fn of_held(request: &Request<'_>) -> Self {
        if request.on_concurrency == OnConcurrency::Skip { Self::Skip } else { Self::Apply }
    }

    /// Returns how a request that is not a hold uses them.
    pub(super) fn of(request: &Request<'_>) -> Self {
        match request.operation {
            Operation::Peek => Self::Apply,
            Operation::Check => match request.on_concurrency {
                OnConcurrency::Reject => Self::Reject,
                OnConcurrency::RejectShadow => Self::RejectShadow,
                OnConcurrency::Skip => Self::Skip,
            },
            Operation::Charge | Operation::Refund { .. } => Self::Skip,
        }
    }

    fn rejects(self, effect: &Effect) -> bool {
        match self {
            Self::Apply | Self::Skip => false,
            Self::Reject => !effect.is_shadow(),
            Self::RejectShadow => true,
        }
    }
}

/// The rules that a request matches, in order.
#[derive(Default)]
pub(super) struct MatchedRules {
    /// The tiers whose counters decide.
    pub(super) tiers: Tiers,
    /// What is reported about each of them.
    pub(super) infos: TierInfos,
    /// Rules that deny without counting.
    pub(super) denials: Vec<TierDecision>,
    /// Whether a check skipped a concurrency rule.
    pub(super) has_skipped: bool,
}

pub(super) type TierInfos = SmallVec<[TierInfo; 1]>;

/// A check with the rules of its tiers.
pub(super) struct PreparedCheck {
    pub(super) check: Check,
    pub(super) tiers: TierInfos,
}

/// The decisions of a check's tiers, before they become one.
pub(super) struct TierDecisions {
    pub(super) tiers: Vec<TierDecision>,
    /// The position of each in the check. `None` if every tier has a decision, in order: a denial from the cache has only the tiers that
    /// deny, and while the store is down, tiers whose failure policy is `open` have none.
    pub(super) positions: Option<SmallVec<[usize; 1]>>,
    pub(super) at: Option<Timestamp>,
    pub(super) source: Source,
    pub(super) failure: Option<StoreError>,
    /// The results of a hold, by position; otherwise empty.
    pub(super) holds: Vec<HoldAnswer>,
}

impl Limiter {
    /// Starts a request. On the memory store it is decided when this returns.
    ///
    /// # Errors
    /// When the request is invalid; nothing is charged.
    pub fn start(&self, request: &Request<'_>) -> Result<Progress, Error> {
        let deadline = match (self.deadline, request.deadline) {
            (Some(own), Some(other)) => Some(own.min(other)),
            (own, other) => own.or(other),
        };
        let mut matched = MatchedRules::default();
        matched.add(|| self.inner.rules.load(), request, ConcurrencyRules::of(request))?;
        self.inner.record_skipped(matched.has_skipped);
        let MatchedRules { tiers, infos, mut denials, .. } = matched;
        if matches!(request.operation, Operation::Charge | Operation::Refund { .. }) {
            denials.clear();
        }
        let is_denied = denials.iter().any(|tier| tier.mode == Mode::Enforced);
        if is_denied || tiers.is_empty() {
            let source = without_counters(!denials.is_empty());
            return Ok(Progress::Decided(Decision::from_tiers(denials, None, source)));
        }
        let mut prepared =
            PreparedCheck { check: Check::from_tiers(request.operation, tiers)?, tiers: infos };
        Ok(match self.inner.backend.start(&prepared.check) {
            Step::Decided(shares) => {
                let decisions = prepared.decisions(shares);
                self.inner.holds.record_expired(&decisions.holds);
                Progress::Decided(decisions.combine(denials))
            }
            Step::Remote(remote) => {
                let remote = Arc::clone(remote);
                let inner = prepared.check.uses_holds().then(|| Arc::clone(&self.inner));
                Progress::Pending(PendingDecision::new(async move {
                    let decisions = prepared.decide_remotely(&remote, deadline).await?;
                    inner.iter().for_each(|inner| inner.holds.record_expired(&decisions.holds));
                    Ok(decisions.combine(denials))
                }))
            }
        })
    }
}

/// The source of a decision that no counter took part in. Also a shadow rule that would deny counts as a match.
pub(super) fn without_counters(has_denials: bool) -> Source {
    if has_denials { Source::Rule } else { Source::Unmatched }
}

impl MatchedRules {
    /// Adds every rule that a request matches; for a request with a key, the limit of the request.
    pub(super) fn add<R: Deref<Target = Arc<RuleSet>>>(
        &mut self,
        rules: impl FnOnce() -> R,
        request: &Request<'_>,
        concurrency: ConcurrencyRules,
    ) -> Result<(), Error> {
        let (labels, costs, selection, limit) = match &request.subject {
            Subject::Key { key, limit, cost } => {
                if !limit.algorithm().properties().has_window && concurrency != ConcurrencyRules::Apply {
                    return Err(Error::NeedsHold { rule: None });
                }
                self.infos.push(TierInfo::default());
                self.tiers.push(Tier { key: Key::without_rule(key)?, terms: Terms::new(*limit, *cost) });
                return Ok(());
            }
            Subject::Labels { labels, costs, rules, limit } => (labels, costs, rules, *limit),
        };
        let rules = rules();
        selection.ensure_known(&rules)?;
        let applied = rules.matching(labels, costs)?;
        if let (Some(limit), []) = (limit, &*applied) {
            return self.add_without_rule(limit, request, Key::of_labels(labels));
        }
        for mut applied in applied.into_iter().filter(|applied| selection.contains(applied.rule, labels)) {
            if is_concurrency(&applied) && concurrency != ConcurrencyRules::Apply {
                if concurrency.rejects(&applied.effect) {
                    return Err(Error::NeedsHold { rule: Some(Arc::clone(&applied.rule.name)) });
                }
                self.has_skipped |= request.operation == Operation::Check;
                continue;
            }
            match limit {
                Some(limit) if denies_all(&applied, limit) => self.add_denial(applied.rule, &applied.effect),
                Some(limit) => {
                    replace_limit(&mut applied, limit)?;
                    self.add_applied(applied);
                }
                None => self.add_applied(applied),
            }
        }
        Ok(())
    }

    fn add_applied(&mut self, applied: Applied<'_>) {
        let rule = applied.rule;
        match applied.effect {
            Effect::Limit { key, limit, cost, shadow, overdraft, on_store_failure, factor } => {
                let admission = if overdraft { Admission::Overdraft } else { Admission::InFull };
                let terms = Terms { limit, cost, mode: mode(shadow), admission };
                let (name, unit, ttl) = (Some(Arc::clone(&rule.name)), rule.unit.clone(), rule.ttl);
                let names_hold = rule.hold.is_some();
                self.infos.push(TierInfo { rule: name, unit, on_store_failure, ttl, factor, names_hold });
                self.tiers.push(Tier { key, terms });
            }
            Effect::Deny { .. } => self.add_denial(rule, &applied.effect),
        }
    }

    fn add_denial(&mut self, rule: &Rule, effect: &Effect) {
        self.denials.push(denial(Some(&rule.name), &rule.unit, mode(effect.is_shadow())));
    }

    /// Adds the counter of a request that brings a limit and matches no rule.
    fn add_without_rule(
        &mut self,
        limit: LimitOverride,
        request: &Request<'_>,
        key: Key,
    ) -> Result<(), Error> {
        if limit.amount == 0 {
            self.denials.push(denial(None, &Unit::default(), Mode::Enforced));
            return Ok(());
        }
        let limit = limit.with_algorithm(Algorithm::FixedWindow)?;
        self.infos.push(TierInfo::default());
        self.tiers.push(Tier { key, terms: Terms::new(limit, request.cost(DEFAULT_UNIT)) });
        Ok(())
    }
}

/// Whether this is a concurrency rule.
fn is_concurrency(applied: &Applied<'_>) -> bool {
    matches!(applied.effect, Effect::Limit { limit, .. } if !limit.algorithm().properties().has_window)
}

/// Whether a limit of zero replaces that of a rule.
fn denies_all(applied: &Applied<'_>, other: LimitOverride) -> bool {
    other.amount == 0 && matches!(applied.effect, Effect::Limit { .. })
}

/// Replaces the limit of a rule by another amount and window.
fn replace_limit(applied: &mut Applied<'_>, other: LimitOverride) -> Result<(), Error> {
    let Effect::Limit { limit, .. } = &mut applied.effect else { return Ok(()) };
    let phase = Duration::from_micros(limit.phase_us());
    *limit = other.replace(limit)?;
    if !phase.is_zero() {
        *limit = limit.with_phase(phase)?;
    }
    Ok(())
}

/// A denial without a counter: waiting does not help.
pub(super) fn denial(rule: Option<&Arc<str>>, unit: &Unit, mode: Mode) -> TierDecision {
    TierDecision {
        rule: rule.cloned(),
        unit: unit.clone(),
        mode,
        outcome: Outcome::Denied { retry: Retry::Never },
        policy: None,
        limit: 0,
        remaining: 0,
        debt: 0,
        reset_after: Duration::ZERO,
    }
}

pub(super) fn mode(shadow: bool) -> Mode {
    if shadow { Mode::Shadow } else { Mode::Enforced }
}

impl PreparedCheck {
    pub(super) fn decisions(&mut self, shares: CheckShares) -> TierDecisions {
        let CheckShares { at, source, shares, holds } = shares;
        let positions =
            (shares.len() < self.tiers.len()).then(|| shares.iter().map(|(position, _)| *position).collect());
        let mut tiers = Vec::with_capacity(shares.len());
        for (position, share) in shares {
            tiers.push(self.tiers[position].decision(&self.check.tiers()[position].terms, share));
        }
        TierDecisions { tiers, positions, at, source, failure: None, holds }
    }

    /// Sends the check to the store. If there is no answer by the deadline, the failure policies decide.
    pub(super) async fn decide_remotely(
        mut self,
        remote: &Arc<Remote>,
        deadline: Option<Duration>,
    ) -> Result<TierDecisions, Error> {
        if self.tiers.iter().any(|tier| tier.on_store_failure == OnStoreFailure::Local)
            || self.check.is_leasable()
        {
            remote.count_instances();
        }
        match remote.decide(&self.check, deadline).await {
            Ok(shares) => {
                use HoldOutcome::{Conflict, Full, Repeated};
                let holds = &shares.holds;
                // the answers to an id that is known, and to a hold on a counter that is full, have no usage
                let has_usage = !holds.iter().any(|hold| matches!(hold.outcome, Conflict | Full));
                for (position, share) in &shares.shares {
                    // the answer to a repeated hold has the usage of its first attempt
                    let is_repeated = holds.get(*position).is_some_and(|hold| hold.outcome == Repeated);
                    if let (Some(at), Source::Store) = (shares.at, shares.source)
                        && has_usage
                        && !is_repeated
                        && self.tiers[*position].on_store_failure == OnStoreFailure::Local
                    {
                        remote.record_for_fallback(&self.check.tiers()[*position], share, at);
                    }
                }
                Ok(self.decisions(shares))
            }
            Err(failure) => match self.check.operation() {
                Operation::Check | Operation::Peek => Ok(self.decide_by_policies(remote, failure)),
                // a failure policy can decide a check but not make a charge or refund
                Operation::Charge | Operation::Refund { .. } => Err(Error::Store(failure)),
            },
        }
    }

    /// Applies the failure policies: an enforced tier with `closed` denies; otherwise the tiers with `local` decide by this process's
    /// share of their limits, all or none; otherwise the request is allowed.
    fn decide_by_policies(mut self, remote: &Remote, failure: StoreError) -> TierDecisions {
        let tiers = self.check.tiers();
        let with_policy = |infos: &[TierInfo], policy| -> Vec<usize> {
            (0..tiers.len()).filter(|&position| infos[position].on_store_failure == policy).collect()
        };
        let (mut source, mut decisions, mut positions) = (Source::Open, Vec::new(), SmallVec::new());
        let mut holds = Vec::new();
        for position in with_policy(&self.tiers, OnStoreFailure::Closed) {
            let terms = &tiers[position].terms;
            if terms.mode == Mode::Enforced {
                let share = Share::denied_for(CLOSED_RETRY);
                positions.push(position);
                decisions.push(self.tiers[position].decision(terms, share));
                source = Source::Closed;
            }
        }
        let local = with_policy(&self.tiers, OnStoreFailure::Local);
        if source == Source::Open && !local.is_empty() {
            let own = local.iter().map(|&position| tiers[position].clone()).collect();
            let mut own =
                Check::from_tiers(self.check.operation(), own).expect("a part of a valid check is valid");
            if let Some(hold) = self.check.hold() {
                own = own.with_hold(hold.id.clone(), hold.operation);
            }
            let (shares, own) = remote.decide_by_fallback(&own);
            if !shares.holds.is_empty() {
                holds = vec![HoldAnswer::NONE; tiers.len()];
                local.iter().zip(shares.holds).for_each(|(position, hold)| holds[*position] = hold);
            }
            for (index, share) in shares.shares {
                let position = local[index];
                positions.push(position);
                decisions.push(self.tiers[position].decision(&own[index].terms, share));
            }
            source = Source::Fallback;
        }
        remote.counters().record_degraded(source);
        let positions = Some(positions);
        TierDecisions { tiers: decisions, positions, at: None, source, failure: Some(failure), holds }
    }
}

impl TierDecisions {
    /// Combines the tiers with denials that no counter made.
    pub(super) fn combine(mut self, mut denials: Vec<TierDecision>) -> Decision {
        self.tiers.append(&mut denials);
        let mut decision = Decision::from_tiers(self.tiers, self.at, self.source);
        decision.failure = self.failure;
        decision
    }

    /// No tier has a decision.
    pub(super) fn none(source: Source, failure: Option<StoreError>) -> Self {
        let (tiers, positions) = (Vec::new(), Some(SmallVec::new()));
        Self { tiers, positions, at: None, source, failure, holds: Vec::new() }
    }

    /// Returns the decision of the tier at a position in the check.
    pub(super) fn tier(&self, position: usize) -> Option<&TierDecision> {
        match &self.positions {
            None => self.tiers.get(position),
            Some(positions) => self.tiers.get(positions.iter().position(|&other| other == position)?),
        }
    }
}

impl TierInfo {
    fn decision(&mut self, terms: &Terms, share: Share) -> TierDecision {
        let outcome = match share.retry {
            _ if share.passes => Outcome::Allowed,
            Some(retry) => Outcome::Denied { retry },
            None => Outcome::Denied { retry: Retry::Never },
        };
        TierDecision {
            rule: self.rule.take(),
            unit: mem::take(&mut self.unit),
            mode: terms.mode,
            outcome,
            policy: Some(terms.limit),
            limit: terms.limit.capacity(),
            remaining: share.remaining,
            debt: share.debt,
            reset_after: share.reset_after,
        }
    }
}
