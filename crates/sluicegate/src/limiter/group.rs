//! Several requests that are allowed together or not at all, for example the descriptors of one Envoy call.
//!
//! Each request matches rules by itself. All counters that they reach form one check; a counter that several requests reach is
//! charged once, with the largest cost. Refunds follow in a separate step, and only if the checks pass, so that a denied call
//! changes nothing.

use std::{mem, sync::Arc, time::Duration};

use sluicegate_core::{Operation, Terms, step::Mode};
use tokio::time::Instant;

use super::{
    Error, Limiter, Request,
    decide::{
        ConcurrencyRules, MatchedRules, PreparedCheck, TierDecisions, TierInfo, TierInfos, denial, mode,
        without_counters,
    },
    hold_token::HoldToken,
    label_hold::{GroupHold, GroupHoldDecision},
    pending_hold::ReleaseUnlessReturned,
};
use crate::{
    backend::{Backend, Step},
    check::{Check, CheckError, MAX_TIERS, Tier, Tiers},
    decision::{Decision, Source, TierDecision},
    key::HoldId,
    rules::{OnStoreFailure, RuleSet},
};

/// The decision over several requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupDecision {
    /// The decision for the group. Its tiers are those of all checked requests, each counter once.
    pub overall: Decision,
    /// The decision of each request, in order. In a denied group, requests that did not cause the denial are allowed here; a
    /// refund of a denied group has no tiers.
    pub each: Vec<Decision>,
}

impl Limiter {
    /// Checks several requests, all or none, and then performs the refunds among them. Where two requests reach one counter under
    /// different limits, the stricter limit applies.
    ///
    /// A request is either checked, or refunded without a time. The shortest deadline of the requests applies to all.
    ///
    /// # Errors
    /// When a request is invalid, or has another operation; nothing is charged.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, limiter::Request};
    ///
    /// let minute = Duration::from_secs(60);
    /// let rules = [
    ///     Rule::new("per-ip", Limit::sliding_log(100, minute)?).per(["ip"]),
    ///     Rule::new("per-user", Limit::sliding_log(1, minute)?).per(["user"]),
    /// ];
    /// let limiter = Limiter::new(MemoryStore::new(), rules)?;
    /// let request = |name, value| Labels::new([(name, value)]).map(|labels| Request::new(labels, Cost::ONE));
    /// let both = [request("ip", "203.0.113.9")?, request("user", "42")?];
    /// assert!(limiter.check_group(&both).await?.overall.is_allowed());
    /// let denied = limiter.check_group(&both).await?;
    /// assert_eq!(denied.overall.rule(), Some("per-user"));
    /// assert_eq!(denied.each[0].remaining(), Some(99)); // the other counter was not charged
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub async fn check_group(&self, requests: &[Request<'_>]) -> Result<GroupDecision, Error> {
        Ok(self.decide_group(requests, None).await?.group)
    }

    /// Decides a group, as a hold if there is an id.
    pub(super) async fn decide_group(
        &self,
        requests: &[Request<'_>],
        hold: Option<HoldId>,
    ) -> Result<GroupHoldDecision, Error> {
        let rules = self.rules();
        let use_of_concurrency =
            if hold.is_some() { ConcurrencyRules::of_held } else { ConcurrencyRules::of };
        let mut checks = JointCheck::of_checks(&rules, requests, use_of_concurrency)?;
        let mut refunds = JointCheck { operation: REFUND, ..JointCheck::default() };
        let mut deadline = self.deadline;
        for (index, request) in requests.iter().enumerate() {
            match request.operation {
                Operation::Check => {}
                REFUND => refunds.add(&rules, index, request, ConcurrencyRules::Skip)?,
                operation => return Err(Error::GroupOperation(operation)),
            }
            deadline = deadline.into_iter().chain(request.deadline).min();
        }
        refunds.denials.clear();
        self.inner.record_skipped(checks.has_skipped);
        let started = Instant::now();
        let CheckedGroup { checks, decisions, token } = match hold {
            None => {
                let decisions = self.counting_expired(checks.decide(&self.inner.backend, deadline).await?);
                CheckedGroup { checks, decisions, token: None }
            }
            // boxed to keep the future of groups without holds small
            Some(id) => Box::pin(self.decide_held(&rules, requests, checks, id, deadline)).await?,
        };
        let is_degraded = decisions.failure.is_some();
        let mut group = checks.group_decision(decisions, requests.len());
        let is_held = token.is_some() && group.overall.is_allowed();
        if refunds.tiers.is_empty() || !group.overall.is_allowed() {
            return Ok(GroupHoldDecision { group, is_held });
        }
        let unreturned = ReleaseUnlessReturned::new(self, token);
        let backend = &self.inner.backend;
        let deadline = if is_degraded {
            Some(Duration::ZERO)
        } else {
            backend.time_left(self.deadline, started.elapsed())
        };
        let refunded = match refunds.decide(backend, deadline).await {
            // the checks are charged: a refund that fails denies nothing
            Err(Error::Store(failure)) => TierDecisions::none(Source::Open, Some(failure)),
            refunded => refunded?,
        };
        for (index, _) in requests.iter().enumerate().filter(|(_, request)| is_refund(request)) {
            group.each[index] = refunds.decision_of(&refunded, index);
        }
        unreturned.returned();
        Ok(GroupHoldDecision { group, is_held })
    }

    /// Decides the checks of a group as a hold; if another hold has the id, without a hold.
    async fn decide_held(
        &self,
        rules: &Arc<RuleSet>,
        requests: &[Request<'_>],
        mut checks: JointCheck,
        id: HoldId,
        deadline: Option<Duration>,
    ) -> Result<CheckedGroup, Error> {
        let started = Instant::now();
        match self.hold_jointly(&mut checks, id, deadline).await? {
            GroupHold::Decided(decisions, token) => Ok(CheckedGroup { checks, decisions, token }),
            GroupHold::IdInUse(in_flight) => {
                let mut checks = JointCheck::of_checks(rules, requests, |_| ConcurrencyRules::Skip)?;
                checks.denials.extend(in_flight);
                checks.deny_without_store();
                let backend = &self.inner.backend;
                let deadline = backend.time_left(deadline, started.elapsed());
                let decisions = self.counting_expired(checks.decide(backend, deadline).await?);
                Ok(CheckedGroup { checks, decisions, token: None })
            }
        }
    }
}

/// The checks of a group with their decisions, and the token of the hold if the store confirmed that it was made.
struct CheckedGroup {
    checks: JointCheck,
    decisions: TierDecisions,
    token: Option<HoldToken>,
}

impl Limiter {
    fn counting_expired(&self, decisions: TierDecisions) -> TierDecisions {
        self.inner.holds.record_expired(&decisions.holds);
        decisions
    }
}

fn is_refund(request: &Request<'_>) -> bool {
    matches!(request.operation, Operation::Refund { .. })
}

/// The operation of a request of a group that is not checked.
const REFUND: Operation = Operation::Refund { at: None };

/// The counters that several requests reach, each once.
pub(super) struct JointCheck {
    operation: Operation,
    pub(super) infos: TierInfos,
    pub(super) tiers: Tiers,
    /// Whether one of the requests that reach each counter contains the id of a hold.
    has_hold: Vec<bool>,
    /// Which request reaches which counter: (request, position of the tier).
    reached: Vec<(usize, usize)>,
    /// Which request matches a rule that denies without counting.
    denials: Vec<(usize, TierDecision)>,
    has_skipped: bool,
}

impl Default for JointCheck {
    fn default() -> Self {
        let (infos, tiers, has_hold, reached, denials) = Default::default();
        Self { operation: Operation::Check, infos, tiers, has_hold, reached, denials, has_skipped: false }
    }
}

impl JointCheck {
    /// Combines the requests that are checked.
    fn of_checks(
        rules: &Arc<RuleSet>,
        requests: &[Request<'_>],
        use_of_concurrency: impl Fn(&Request<'_>) -> ConcurrencyRules,
    ) -> Result<Self, Error> {
        let mut joint = Self::default();
        for (index, request) in requests.iter().enumerate() {
            if request.operation == Operation::Check {
                joint.add(rules, index, request, use_of_concurrency(request))?;
            }
        }
        Ok(joint)
    }

    fn add(
        &mut self,
        rules: &Arc<RuleSet>,
        index: usize,
        request: &Request<'_>,
        concurrency: ConcurrencyRules,
    ) -> Result<(), Error> {
        let mut matched = MatchedRules::default();
        matched.add(|| rules, request, concurrency)?;
        self.has_skipped |= matched.has_skipped;
        self.denials.extend(matched.denials.into_iter().map(|tier| (index, tier)));
        for (info, mut tier) in matched.infos.into_iter().zip(matched.tiers) {
            if is_in_flight(&tier) {
                tier.terms.cost = info.factor;
            }
            self.add_counter(index, info, tier)?;
            let (_, position) = self.reached[self.reached.len() - 1];
            self.has_hold[position] |= concurrency == ConcurrencyRules::Apply;
        }
        Ok(())
    }

    fn add_counter(&mut self, index: usize, info: TierInfo, tier: Tier) -> Result<(), Error> {
        let known = self.tiers.iter().position(|other| other.same_counter(&tier));
        let position = known.unwrap_or(self.tiers.len());
        if known.is_some() {
            let (own, terms) = (&mut self.infos[position], &mut self.tiers[position].terms);
            own.on_store_failure = stricter_policy(own.on_store_failure, info.on_store_failure);
            *terms = merged(terms, &tier.terms);
        } else if position == MAX_TIERS {
            return Err(CheckError::Tiers(MAX_TIERS + 1).into());
        } else {
            self.infos.push(info);
            self.tiers.push(tier);
            self.has_hold.push(false);
        }
        self.reached.push((index, position));
        Ok(())
    }

    /// Whether a request that contains the id of a hold reaches a counter.
    pub(super) fn has_hold(&self, position: usize) -> bool {
        self.has_hold[position]
    }

    /// Returns the denials by all concurrency rules, by the request that reaches them.
    pub(super) fn denials_in_flight(&self) -> Vec<(usize, TierDecision)> {
        let reached = self.reached.iter().filter(|(_, position)| is_in_flight(&self.tiers[*position]));
        let denied = reached.map(|&(request, position)| {
            let (info, terms) = (&self.infos[position], &self.tiers[position].terms);
            let denial = denial(info.rule.as_ref(), &info.unit, terms.mode);
            let limit = terms.limit.capacity();
            (request, TierDecision { policy: Some(terms.limit), limit, ..denial })
        });
        denied.collect()
    }

    /// Replaces the failure policy `open` with `closed`. A repeated id needs a second call, which has less time, and a client must not be
    /// admitted because of that.
    fn deny_without_store(&mut self) {
        for info in self.infos.iter_mut().filter(|info| info.on_store_failure == OnStoreFailure::Open) {
            info.on_store_failure = OnStoreFailure::Closed;
        }
    }

    /// Returns the check of all counters; `None` if there are none, or a rule denies without counting.
    pub(super) fn prepare(&mut self) -> Result<Option<PreparedCheck>, Error> {
        let is_denied = self.denials.iter().any(|(_, tier)| tier.mode == Mode::Enforced);
        if is_denied || self.tiers.is_empty() {
            return Ok(None);
        }
        let check = Check::from_tiers(self.operation, mem::take(&mut self.tiers))?;
        Ok(Some(PreparedCheck { check, tiers: mem::take(&mut self.infos) }))
    }

    /// Returns the decisions if there is no such check.
    pub(super) fn without_counters(&self) -> TierDecisions {
        TierDecisions::none(without_counters(!self.denials.is_empty()), None)
    }

    /// Decides over all counters in one step, unless a rule denies without counting.
    pub(super) async fn decide(
        &mut self,
        backend: &Backend,
        deadline: Option<Duration>,
    ) -> Result<TierDecisions, Error> {
        let Some(mut prepared) = self.prepare()? else { return Ok(self.without_counters()) };
        match backend.start(&prepared.check) {
            Step::Decided(shares) => Ok(prepared.decisions(shares)),
            Step::Remote(remote) => prepared.decide_remotely(remote, deadline).await,
        }
    }

    fn group_decision(&self, decisions: TierDecisions, count: usize) -> GroupDecision {
        let each = (0..count).map(|request| self.decision_of(&decisions, request)).collect();
        let denials = self.denials.iter().map(|(_, tier)| tier.clone()).collect();
        GroupDecision { overall: decisions.combine(denials), each }
    }

    /// The part of the decisions that concerns one request.
    fn decision_of(&self, decisions: &TierDecisions, request: usize) -> Decision {
        let reached = self.reached.iter().filter(|(other, _)| *other == request);
        let tiers = reached.filter_map(|(_, position)| decisions.tier(*position).cloned()).collect();
        let denials = self.denials.iter().filter(|(other, _)| *other == request);
        let TierDecisions { at, source, ref failure, .. } = *decisions;
        TierDecisions { tiers, positions: None, at, source, failure: failure.clone(), holds: Vec::new() }
            .combine(denials.map(|(_, tier)| tier.clone()).collect())
    }
}

/// Whether this is the counter of a concurrency rule.
fn is_in_flight(tier: &Tier) -> bool {
    !tier.terms.limit.algorithm().properties().has_window
}

/// The terms of a counter that two requests reach: the larger cost, under the stricter limit.
fn merged(one: &Terms, other: &Terms) -> Terms {
    let less = other.limit.capacity() < one.limit.capacity();
    let slower = one.limit.rate().is_faster_than(other.limit.rate());
    let is_stricter = less || (slower && other.limit.capacity() == one.limit.capacity());
    let is_enforced = one.mode == Mode::Enforced || other.mode == Mode::Enforced;
    Terms {
        limit: if is_stricter { other.limit } else { one.limit },
        cost: one.cost.max(other.cost),
        mode: mode(!is_enforced),
        admission: one.admission,
    }
}

fn stricter_policy(one: OnStoreFailure, other: OnStoreFailure) -> OnStoreFailure {
    match (one, other) {
        (OnStoreFailure::Closed, _) | (_, OnStoreFailure::Closed) => OnStoreFailure::Closed,
        (OnStoreFailure::Local, _) | (_, OnStoreFailure::Local) => OnStoreFailure::Local,
        (OnStoreFailure::Open, OnStoreFailure::Open) => OnStoreFailure::Open,
    }
}
