//! Holds of callers that cannot store a token, and whose requests have no field for an id: the id is in a label ([`Rule::hold`]).
//!
//! Such ids may come from end clients. A repeated id therefore makes no second hold, and does not get the first answer: the request is
//! charged like a check, and denied by concurrency rules.

use std::{sync::Arc, time::Duration};

use sluicegate_core::{Cost, HoldOutcome, hold::DEFAULT_HOLD_TTL, step::Mode};

use super::{
    Error, GroupDecision, Limiter, Request, SettleOutcome, Settlement,
    decide::{ConcurrencyRules, MatchedRules, TierDecisions},
    group::JointCheck,
    hold_token::{HeldTier, HoldToken},
    pending_hold::ReleaseOnDrop,
    settlement::Adjustment,
};
use crate::{
    backend::Step,
    check::HoldOperation,
    decision::TierDecision,
    key::HoldId,
    labels::Labels,
    rules::{Costs, CostsError, DEFAULT_UNIT, Rule, Unit},
};

/// The hold of a request whose labels carry its id. See [`Limiter::label_hold`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelHold {
    id: HoldId,
    /// The units of the rules with a window that name the label, each once; `requests` only if there are no others.
    units: Vec<Unit>,
}

impl LabelHold {
    /// The id.
    pub fn id(&self) -> &HoldId {
        &self.id
    }

    /// Returns the costs of a request that has a single number as its cost. The number is used for each unit of the rules that name the label,
    /// and the request itself counts once. If these rules count only requests, the number is the number of requests.
    ///
    /// # Errors
    /// If there are too many units.
    pub fn costs(&self, number: Cost) -> Result<Costs, CostsError> {
        let requests = if self.units.is_empty() { number } else { Cost::ONE };
        let is_other = self.units.iter().all(|unit| **unit != *DEFAULT_UNIT);
        let requests = is_other.then_some((DEFAULT_UNIT, requests));
        Costs::new(requests.into_iter().chain(self.units.iter().map(|unit| (&**unit, number))))
    }
}

/// The decision over several requests that are held together. See [`Limiter::hold_group`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupHoldDecision {
    /// The decision.
    pub group: GroupDecision,
    /// Whether the requests are held, so that their end must be settled. `false` if they were denied, or if another hold has their id.
    pub is_held: bool,
}

/// The result of a hold that several requests make together.
pub(super) enum GroupHold {
    /// It is decided. If the store confirmed that it was made, it has this token. Without a confirmation there is none: in the store, the id may
    /// belong to another hold, which a settlement would end.
    Decided(TierDecisions, Option<HoldToken>),
    /// Another hold has this id. These rules count requests in flight and deny, by the request that reaches them.
    IdInUse(Vec<(usize, TierDecision)>),
}

impl Limiter {
    /// Returns the hold whose id is in the label that a matching rule names. If several rules name labels of the request, the first one
    /// decides.
    pub fn label_hold(&self, labels: &Labels) -> Option<LabelHold> {
        let rules = self.inner.rules.load();
        if !rules.has_hold_label(labels) {
            return None;
        }
        let matching = rules.matching(labels, &Cost::ZERO.into()).expect("a cost of zero is never too large");
        let holding = || matching.iter().map(|applied| applied.rule).filter(|rule| rule.hold.is_some());
        let value = |rule: &Rule| labels.get(rule.hold.as_deref()?);
        let id = HoldId::hashed(holding().find_map(value)?);
        let mut units: Vec<Unit> = Vec::new();
        for rule in holding().filter(|rule| rule.limit.algorithm().properties().has_window) {
            if !units.contains(&rule.unit) {
                units.push(rule.unit.clone());
            }
        }
        if units.len() > 1 {
            units.retain(|unit| **unit != *DEFAULT_UNIT);
        }
        Some(LabelHold { id, units })
    }

    /// Decides as [`Limiter::check_group`], and holds what the checks charge under one id, without a token. Settle it with
    /// [`Limiter::settle_labels`].
    ///
    /// A concurrency rule counts the request once, times its own cost. It is skipped if it matches only requests that
    /// [skip](super::OnConcurrency::Skip) concurrency rules; the charges of such requests are not corrected.
    ///
    /// The id is not trusted. If one of the counters already has a hold with this id, nothing is held: the request is charged like a check, or
    /// denied if an enforced concurrency rule matches.
    ///
    /// # Errors
    /// As [`Limiter::check_group`], and if a counter has too many live holds.
    pub async fn hold_group(&self, requests: &[Request<'_>], id: HoldId) -> Result<GroupHoldDecision, Error> {
        self.decide_group(requests, Some(id)).await
    }

    /// Replaces the estimate of the hold whose id is in the labels, exactly once: with the actual cost, in the units of
    /// [`LabelHold::costs`], for the rules that match the labels and [name a label](Rule::hold). For other rules and units, and without an
    /// actual cost, the estimate stays. Concurrency rules no longer count it.
    ///
    /// # Errors
    /// When the store does not answer and too many operations wait for it.
    pub async fn settle_labels(&self, labels: &Labels, actual: Option<Cost>) -> Result<Settlement, Error> {
        self.settle_label_hold(labels, actual, Some(u64::MAX)).await
    }

    /// [`Limiter::settle_labels`] for callers that are not trusted: the excess is at most the [`Limit::max_excess`](crate::Limit::max_excess) that
    /// was recorded with the hold.
    ///
    /// # Errors
    /// As [`Limiter::settle_labels`].
    pub async fn settle_labels_bounded(
        &self,
        labels: &Labels,
        actual: Option<Cost>,
    ) -> Result<Settlement, Error> {
        self.settle_label_hold(labels, actual, None).await
    }

    async fn settle_label_hold(
        &self,
        labels: &Labels,
        actual: Option<Cost>,
        max_excess: Option<u64>,
    ) -> Result<Settlement, Error> {
        let Some(LabelHold { id, units: settled }) = self.label_hold(labels) else {
            return Ok(Settlement::of(Vec::new(), SettleOutcome::Unknown));
        };
        let mut matched = MatchedRules::default();
        let request = Request::new(labels, Cost::ZERO);
        matched.add(|| self.inner.rules.load(), &request, ConcurrencyRules::Apply)?;
        let tiers = matched.tiers.iter().zip(&matched.infos).map(|(tier, info)| HeldTier::new(tier, info));
        let token = HoldToken { id, tiers: tiers.collect(), is_confirmed: false };
        let units = matched.infos.iter().map(|info| {
            let actual = actual.filter(|_| info.names_hold && settled.contains(&info.unit))?;
            let product = actual.units().checked_mul(info.factor.units());
            Some(product.and_then(|units| Cost::new(units).ok()).unwrap_or(Cost::MAX))
        });
        let units: Vec<Option<Cost>> = units.collect();
        self.adjust_hold(&token, Adjustment::SettleTiers { units: &units, max_excess }).await
    }

    /// Decides the checks of a group as a hold.
    pub(super) async fn hold_jointly(
        &self,
        checks: &mut JointCheck,
        id: HoldId,
        deadline: Option<Duration>,
    ) -> Result<GroupHold, Error> {
        let ttl = checks.infos.iter().filter_map(|info| info.ttl).min().unwrap_or(DEFAULT_HOLD_TTL);
        let tiers = checks.tiers.iter().zip(&checks.infos);
        let held: Vec<HeldTier> = tiers.map(|(tier, info)| HeldTier::new(tier, info)).collect();
        let in_flight = checks.denials_in_flight();
        let Some(mut prepared) = checks.prepare()? else {
            return Ok(GroupHold::Decided(checks.without_counters(), None));
        };
        prepared.check = prepared.check.with_hold(id.clone(), HoldOperation::HoldNew { ttl });
        let decisions = match self.inner.backend.start(&prepared.check) {
            Step::Decided(shares) => {
                let decisions = prepared.decisions(shares);
                self.inner.holds.record_hold(&decisions);
                decisions
            }
            Step::Remote(remote) => {
                let (limiter, remote, id, held) =
                    (self.clone(), Arc::clone(remote), id.clone(), held.clone());
                let deciding = async move {
                    let decisions = prepared.decide_remotely(&remote, deadline).await?;
                    limiter.inner.holds.record_hold(&decisions);
                    Ok(decisions)
                };
                // if the stream ends before this call is answered, Envoy sends no second call, so nothing else would release the hold
                let token = move |decisions: TierDecisions| {
                    decisions.confirmed_token(id, held.into_iter().enumerate())
                };
                ReleaseOnDrop::new(self, deciding, token).await?
            }
        };
        let holds = &decisions.holds;
        if let Some(full) = holds.iter().position(|hold| hold.outcome == HoldOutcome::Full) {
            return Err(Error::TooManyHolds { rule: held[full].rule() });
        }
        let id_in_use = holds.iter().any(|hold| hold.outcome == HoldOutcome::Conflict);
        let is_allowed =
            decisions.tiers.iter().all(|tier| tier.mode == Mode::Shadow || tier.outcome.is_allowed());
        if id_in_use || !is_allowed {
            // on a Cluster, another slot may have made its part of the hold
            if let Some(made) = decisions.confirmed_token(id, held.into_iter().enumerate()) {
                self.release_later(made);
            }
            let decided = GroupHold::Decided(decisions, None);
            return Ok(if id_in_use { GroupHold::IdInUse(in_flight) } else { decided });
        }
        let (settled_by_caller, settled_now): (Vec<_>, Vec<_>) =
            held.into_iter().enumerate().partition(|(position, _)| checks.has_hold(*position));
        match decisions.confirmed_token(id.clone(), settled_now.iter().cloned()) {
            Some(token) => self.keep_later(token),
            None => self.keep_in_fallback(&id, settled_now)?,
        }
        let is_made = decisions.holds.iter().any(|hold| hold.outcome == HoldOutcome::Held);
        let token = decisions.confirmed_token(id, settled_by_caller).filter(|_| is_made);
        Ok(GroupHold::Decided(decisions, token))
    }

    /// Settles the hold of some tiers that the failure policy `local` made, with its estimate and only in this process: in the store, the id
    /// may be that of another hold.
    fn keep_in_fallback(&self, id: &HoldId, tiers: Vec<(usize, HeldTier)>) -> Result<(), Error> {
        let tiers: Vec<HeldTier> = tiers.into_iter().map(|(_, tier)| tier).collect();
        let token = HoldToken { id: id.clone(), tiers, is_confirmed: false };
        if !token.is_empty() {
            self.inner.backend.adjust_fallback_hold(&token.to_keeping_check()?);
        }
        Ok(())
    }
}
