//! Makes holds: admitted requests whose cost is corrected later. Settling them is in `settlement.rs`.

use std::{future::IntoFuture, pin::Pin, sync::Arc, time::Duration};

use sluicegate_core::{
    Cost, HoldAnswer, HoldOutcome, Limit, Operation, Timestamp,
    hold::{DEFAULT_HOLD_TTL, MAX_HOLD_TTL, MIN_HOLD_TTL},
    step::Mode,
};
use tokio::runtime::Handle;

use super::{
    Error, Limiter, Request, SettleOutcome, Settlement,
    decide::{ConcurrencyRules, MatchedRules, PreparedCheck, TierDecisions, TierInfo, without_counters},
    hold_token::{HeldTier, HoldToken},
    pending_hold::{HoldInProgress, ReleaseOnDrop},
};
use crate::{
    backend::Step,
    check::{Check, HoldOperation, Tier},
    decision::Decision,
    key::HoldId,
    rules::Costs,
    store::StoreError,
};

/// A hold, made when it is awaited. See [`Limiter::hold`].
#[derive(Clone, Debug)]
#[must_use = "a hold is made when it is awaited"]
pub struct HoldRequest<'a> {
    limiter: &'a Limiter,
    request: Request<'a>,
    id: Option<HoldId>,
    ttl: Option<Duration>,
}

/// The decision of a hold, with the token to settle it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldDecision {
    /// The decision.
    pub decision: Decision,
    /// The token; `None` if the hold was denied.
    pub token: Option<HoldToken>,
    /// When the hold expires, on the store's clock; `None` if it was denied or no store recorded it.
    pub expires_at: Option<Timestamp>,
    /// The time from making or renewing the hold until it expires.
    pub ttl: Duration,
    /// Whether the hold existed already: this is the first answer, and nothing was charged again.
    pub is_repeated: bool,
}

/// A hold, admitted or denied: see [`Hold::is_allowed`]. Dropping an admitted hold releases it in the background; settle it to charge the actual
/// cost.
///
/// A denied hold has nothing to settle.
#[derive(Debug)]
pub struct Hold {
    limiter: Limiter,
    decision: HoldDecision,
    /// The token, until the hold is settled or the caller takes it.
    open: Option<HoldToken>,
    /// The runtime that made the hold, for a guard that is dropped elsewhere. The memory store needs none.
    runtime: Option<Handle>,
}

impl<'a> HoldRequest<'a> {
    /// Sets the id, which must be unique to the request. Repeating a live hold with its id returns the first answer, so that a caller can
    /// repeat a hold whose answer was lost. The default is a random id.
    pub fn id(mut self, id: HoldId) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets the time until the hold expires if it is not settled, released or renewed. The default is the shortest of the matching rules,
    /// or 60 seconds.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Makes the hold, and returns the decision without a guard.
    ///
    /// If this future is dropped while the store decides, a hold without [`HoldRequest::id`] is released in the background. One with an id
    /// may have been made: repeat it, or release it with [`Limiter::hold_token`].
    ///
    /// # Errors
    /// As [`Limiter::hold`].
    pub async fn decide(self) -> Result<HoldDecision, Error> {
        let Self { limiter, request, id, ttl } = self;
        let id = id.unwrap_or_else(HoldId::random);
        let has_own_id = !id.is_random();
        let deadline = limiter.deadline.into_iter().chain(request.deadline).min();
        let mut matched = MatchedRules::default();
        matched.add(|| limiter.inner.rules.load(), &request, ConcurrencyRules::Apply)?;
        let MatchedRules { tiers, infos, denials, .. } = matched;
        let shortest = infos.iter().filter_map(|info| info.ttl).min();
        let ttl = ttl.or(shortest).unwrap_or(DEFAULT_HOLD_TTL);
        check_ttl(ttl)?;
        let is_denied = denials.iter().any(|tier| tier.mode == Mode::Enforced);
        if is_denied || tiers.is_empty() {
            let source = without_counters(!denials.is_empty());
            let decision = Decision::from_tiers(denials, None, source);
            let token =
                decision.is_allowed().then(|| HoldToken { id, tiers: Vec::new(), is_confirmed: true });
            return Ok(HoldDecision { decision, token, expires_at: None, ttl, is_repeated: false });
        }
        let held = tiers.iter().zip(&infos).map(|(tier, info)| HeldTier::new(tier, info)).collect();
        let check = Check::from_tiers(Operation::Check, tiers)?;
        let check = check.with_hold(id.clone(), HoldOperation::Hold { ttl });
        let mut prepared = PreparedCheck { check, tiers: infos };
        let unanswered = HoldInProgress { limiter: limiter.clone(), id, ttl, held, denials };
        match limiter.inner.backend.start(&prepared.check) {
            Step::Decided(shares) => unanswered.answered(prepared.decisions(shares)),
            Step::Remote(remote) => {
                let remote = Arc::clone(remote);
                let deciding =
                    async move { unanswered.answered(prepared.decide_remotely(&remote, deadline).await?) };
                if has_own_id {
                    deciding.await
                } else {
                    ReleaseOnDrop::new(limiter, deciding, |held| held.token).await
                }
            }
        }
    }
}

/// Combines the decisions of the tiers with the results of their holds.
pub(super) fn held_decision(
    id: HoldId,
    ttl: Duration,
    held: Vec<HeldTier>,
    decisions: TierDecisions,
    denials: Vec<crate::decision::TierDecision>,
) -> Result<HoldDecision, Error> {
    let holds = &decisions.holds;
    if holds.iter().any(|hold| hold.outcome == HoldOutcome::Conflict) {
        return Err(Error::HoldConflict(id));
    }
    if let Some(full) = holds.iter().position(|hold| hold.outcome == HoldOutcome::Full) {
        return Err(Error::TooManyHolds { rule: held[full].rule() });
    }
    let is_repeated = holds.iter().any(|hold| hold.outcome == HoldOutcome::Repeated);
    let expires_at = holds.iter().filter(|hold| is_made(hold)).map(|hold| hold.expires_at).min();
    let made_at = holds.iter().filter(|hold| is_made(hold)).map(|hold| hold.at).max();
    let is_confirmed = decisions.failure.is_none();
    let token = HoldToken { id, tiers: decisions.held_tiers(held), is_confirmed };
    let mut decision = decisions.combine(denials);
    if is_repeated {
        decision.at = made_at;
    }
    let expires_at = expires_at.filter(|_| decision.is_allowed());
    Ok(HoldDecision { decision, token: Some(token), expires_at, ttl, is_repeated })
}

fn is_made(hold: &HoldAnswer) -> bool {
    matches!(hold.outcome, HoldOutcome::Held | HoldOutcome::Repeated)
}

impl TierDecisions {
    /// Returns the tiers that have the hold, or that may have it because the store did not answer.
    pub(super) fn held_tiers(&self, tiers: Vec<HeldTier>) -> Vec<HeldTier> {
        let tiers = tiers.into_iter().enumerate().filter(|(position, _)| self.may_be_held(*position));
        tiers.map(|(_, tier)| tier).collect()
    }

    /// Returns the token of a hold with an untrusted id, with the tiers for which the store confirms that this request made the hold. Without
    /// an answer of the store there is none: the id may be that of another hold, so a hold that a failure policy made expires.
    pub(super) fn confirmed_token(
        &self,
        id: HoldId,
        tiers: impl IntoIterator<Item = (usize, HeldTier)>,
    ) -> Option<HoldToken> {
        if self.failure.is_some() {
            return None;
        }
        let tiers = tiers.into_iter().filter(|(position, _)| self.is_confirmed(*position));
        Some(HoldToken { id, tiers: tiers.map(|(_, tier)| tier).collect(), is_confirmed: true })
    }

    /// Whether an answer confirms that this request made the hold of a tier.
    pub(super) fn is_confirmed(&self, position: usize) -> bool {
        self.holds.get(position).is_some_and(|hold| hold.outcome == HoldOutcome::Held)
    }

    /// Whether a tier has the hold, or may have it.
    pub(super) fn may_be_held(&self, position: usize) -> bool {
        let is_unknown = matches!(self.failure, Some(StoreError::Ambiguous(_)));
        is_unknown || self.holds.get(position).is_some_and(is_made)
    }
}

pub(super) fn check_ttl(ttl: Duration) -> Result<(), Error> {
    if (MIN_HOLD_TTL..=MAX_HOLD_TTL).contains(&ttl) { Ok(()) } else { Err(Error::HoldTtl(ttl)) }
}

impl<'a> IntoFuture for HoldRequest<'a> {
    type Output = Result<Hold, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Hold, Error>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        let limiter = self.limiter.clone();
        Box::pin(async move {
            let decision = self.decide().await?;
            let open = decision.token.clone();
            Ok(Hold { limiter, decision, open, runtime: Handle::try_current().ok() })
        })
    }
}

impl Hold {
    /// Whether the request is allowed.
    pub fn is_allowed(&self) -> bool {
        self.decision.decision.is_allowed()
    }

    /// The decision.
    pub fn decision(&self) -> &HoldDecision {
        &self.decision
    }

    /// Replaces the estimate with the actual cost. A unit that is not named keeps its estimate.
    ///
    /// # Errors
    /// As [`Limiter::settle`]. Then the hold is not released when it is dropped: it expires.
    pub async fn settle(mut self, costs: impl Into<Costs>) -> Result<Settlement, Error> {
        match self.open.take() {
            Some(token) => self.limiter.settle(&token, costs).await,
            None => Ok(Settlement::of(Vec::new(), SettleOutcome::Settled)),
        }
    }

    /// Refunds the estimate and waits until that is done. Dropping the hold does the same in the background.
    ///
    /// # Errors
    /// As [`Limiter::settle`].
    pub async fn release(mut self) -> Result<Settlement, Error> {
        match self.open.take() {
            Some(token) => self.limiter.release(&token).await,
            None => Ok(Settlement::of(Vec::new(), SettleOutcome::Released)),
        }
    }

    /// Moves the expiry to `ttl` from now, if that is later.
    ///
    /// # Errors
    /// As [`Limiter::renew`].
    pub async fn renew(&self, ttl: Duration) -> Result<Settlement, Error> {
        match &self.open {
            Some(token) => self.limiter.renew(token, ttl).await,
            None => Ok(Settlement::of(Vec::new(), SettleOutcome::Renewed)),
        }
    }

    /// Returns the token, with which another task or process settles the hold. The guard then releases nothing when it is dropped.
    ///
    /// # Panics
    /// If the hold was denied.
    pub fn into_token(mut self) -> HoldToken {
        self.open.take().expect("only an admitted hold has a token")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(token) = self.open.take() {
            self.limiter.adjust_later(token, None, self.runtime.take());
        }
    }
}

impl Limiter {
    /// Checks a request with an estimated cost, and holds it until the actual cost is known. All matching rules are charged in one atomic
    /// step, or none is. Concurrency rules require a hold. The hold is made when the returned value is awaited.
    ///
    /// A hold that is not settled, released or renewed expires after its time to live, for example because its process crashed.
    /// [`Limit::on_expiry`] determines what happens to its units.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Costs, Labels, Limit, Limiter, Rule};
    ///
    /// let limiter = Limiter::in_memory([
    ///     Rule::new("in-flight", Limit::concurrency(2)?).per(["tenant"]),
    ///     Rule::new("tokens", Limit::fixed_window(1_000, Duration::from_secs(3_600))?).per(["tenant"]).unit("tokens"),
    /// ])?;
    /// let labels = Labels::new([("tenant", "acme")])?;
    ///
    /// let estimate = Costs::new([("requests", Cost::ONE), ("tokens", Cost::new(500)?)])?;
    /// let hold = limiter.hold(&labels, estimate).await?;
    /// assert!(hold.is_allowed());
    /// // … the model answers with 120 tokens
    /// let settlement = hold.settle(Costs::new([("tokens", Cost::new(120)?)])?).await?;
    /// assert_eq!(settlement.tiers[1].remaining, Some(880));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// If the request is invalid, if the id belongs to a hold with another cost or to a hold that has ended, or if a counter has too many
    /// live holds. Nothing is charged.
    pub fn hold<'a>(&'a self, labels: &'a crate::Labels, costs: impl Into<Costs>) -> HoldRequest<'a> {
        self.hold_request(Request::new(labels, costs))
    }

    /// [`Limiter::hold`] with a limit given with the request, without rules.
    ///
    /// # Errors
    /// As [`Limiter::hold`].
    pub fn hold_key<'a>(
        &'a self,
        key: &'a (impl AsRef<[u8]> + ?Sized),
        limit: &Limit,
        cost: Cost,
    ) -> HoldRequest<'a> {
        self.hold_request(Request::for_key(key.as_ref(), *limit, cost))
    }

    /// [`Limiter::hold`] of any request. Its operation has no effect.
    pub fn hold_request<'a>(&'a self, request: Request<'a>) -> HoldRequest<'a> {
        HoldRequest { limiter: self, request, id: None, ttl: None }
    }

    /// Returns the token of the hold that this request made with this id, for callers that cannot store the token. The current rules determine
    /// its counters.
    ///
    /// # Errors
    /// When the request is invalid.
    pub fn hold_token(&self, request: &Request<'_>, id: HoldId) -> Result<HoldToken, Error> {
        let mut matched = MatchedRules::default();
        matched.add(|| self.inner.rules.load(), request, ConcurrencyRules::Apply)?;
        let tiers = matched.tiers.iter().zip(&matched.infos).map(|(tier, info)| HeldTier::new(tier, info));
        Ok(HoldToken { id, tiers: tiers.collect(), is_confirmed: false })
    }
}

impl HeldTier {
    pub(super) fn new(tier: &Tier, info: &TierInfo) -> Self {
        Self {
            key: tier.key.clone(),
            algorithm: tier.terms.limit.algorithm(),
            unit: info.unit.clone(),
            factor: info.factor,
        }
    }
}
