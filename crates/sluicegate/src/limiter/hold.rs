//! Holds: admitted requests whose cost is corrected later, and which count as in flight until then.

use std::{
    future::IntoFuture,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sluicegate_core::{
    Algorithm, Cost, HoldAnswer, HoldOutcome, Limit, Operation, Terms, Timestamp,
    hold::{DEFAULT_HOLD_TTL, MAX_HOLD_TTL, MIN_HOLD_TTL},
    step::{Mode, Share},
};
use tokio::runtime::Handle;

use super::{
    Error, Limiter, Request,
    decide::{ConcurrencyRules, MatchedRules, PreparedCheck, TierDecisions, TierInfo, without_counters},
    hold_token::{HeldTier, HoldToken},
    pending_hold::{CompletedIfDropped, ReleasedIfDropped, UnansweredHold},
};
use crate::{
    backend::{CheckShares, Step},
    check::{Check, CheckError, HoldOperation, MAX_TIERS, Tier},
    decision::{Decision, Source},
    key::HoldId,
    rules::{Costs, MatchError, Unit},
    stats::HoldStats,
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

/// An admitted hold. Dropping it releases the hold in the background; settle it to charge the actual cost.
///
/// A hold that was denied has nothing to settle: see [`Hold::is_allowed`].
#[derive(Debug)]
pub struct Hold {
    limiter: Limiter,
    decision: HoldDecision,
    /// The token, until the hold is settled or the caller takes it.
    open: Option<HoldToken>,
}

/// The outcome of settling, releasing or renewing a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settlement {
    /// The worst outcome of a counter.
    pub outcome: SettleOutcome,
    /// The outcome of each counter.
    pub tiers: Vec<SettledTier>,
}

/// The outcome of settling, releasing or renewing a hold on one counter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SettledTier {
    /// The rule; `None` for a limit that was given with the request.
    pub rule: Option<Arc<str>>,
    /// The unit that is counted.
    pub unit: Unit,
    /// The outcome.
    pub outcome: SettleOutcome,
    /// The units that the hold has charged in total; `None` if the hold is unknown.
    pub charged: Option<u64>,
    /// Whole units available now, if the operation changed the hold.
    pub remaining: Option<u64>,
    /// When the hold expires, on the store's clock; `None` if the hold is unknown.
    pub expires_at: Option<Timestamp>,
}

/// The outcome of settling, releasing or renewing a hold, ordered from the best to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum SettleOutcome {
    /// The actual cost replaced the estimate.
    Settled,
    /// The estimate was refunded.
    Released,
    /// The expiry was moved.
    Renewed,
    /// The hold was settled or released before. Nothing changed.
    Already,
    /// The hold had expired. Settling charged the actual cost once; renewing changed nothing.
    Late,
    /// The store did not respond. The operation is repeated in the background.
    Queued,
    /// There is no such hold. Nothing changed.
    Unknown,
}

impl SettleOutcome {
    /// The name in responses, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Released => "released",
            Self::Renewed => "renewed",
            Self::Already => "already",
            Self::Late => "late",
            Self::Queued => "queued",
            Self::Unknown => "unknown",
        }
    }

    fn of(outcome: HoldOutcome, kind: AdjustmentKind) -> Self {
        match outcome {
            HoldOutcome::Settled if kind == AdjustmentKind::Release => Self::Released,
            HoldOutcome::Settled => Self::Settled,
            HoldOutcome::Renewed => Self::Renewed,
            HoldOutcome::Already => Self::Already,
            HoldOutcome::Late => Self::Late,
            _ => Self::Unknown,
        }
    }
}

/// Counts holds by outcome.
#[derive(Debug, Default)]
pub(super) struct HoldCounters {
    held: AtomicU64,
    expired: AtomicU64,
    settled: AtomicU64,
    released: AtomicU64,
    already: AtomicU64,
    late: AtomicU64,
    unknown: AtomicU64,
    queued: AtomicU64,
}

impl HoldCounters {
    /// Records the holds that a check, or another hold, found to have expired.
    pub(super) fn record_expired(&self, holds: &[HoldAnswer]) {
        let expired: u64 = holds.iter().map(|hold| u64::from(hold.released)).sum();
        if expired > 0 {
            self.expired.fetch_add(expired, Ordering::Relaxed);
        }
    }

    pub(super) fn record_hold(&self, holds: &[HoldAnswer]) {
        self.record_expired(holds);
        if holds.iter().any(|hold| hold.outcome == HoldOutcome::Held) {
            self.held.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn record_settlement(&self, outcome: SettleOutcome) {
        let counter = match outcome {
            SettleOutcome::Settled => &self.settled,
            SettleOutcome::Released => &self.released,
            SettleOutcome::Already => &self.already,
            SettleOutcome::Late => &self.late,
            SettleOutcome::Queued => &self.queued,
            SettleOutcome::Unknown => &self.unknown,
            SettleOutcome::Renewed => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> HoldStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HoldStats {
            held: read(&self.held),
            settled: read(&self.settled),
            released: read(&self.released),
            expired: read(&self.expired),
            already: read(&self.already),
            late: read(&self.late),
            unknown: read(&self.unknown),
            queued: read(&self.queued),
            waiting: 0,
        }
    }
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
            let token = decision.is_allowed().then(|| HoldToken { id, tiers: Vec::new() });
            return Ok(HoldDecision { decision, token, expires_at: None, ttl, is_repeated: false });
        }
        let held = tiers.iter().zip(&infos).map(|(tier, info)| HeldTier::new(tier, info)).collect();
        let check = Check::from_tiers(Operation::Check, tiers)?;
        let check = check.with_hold(id.clone(), HoldOperation::Hold { ttl });
        let mut prepared = PreparedCheck { check, tiers: infos };
        let unanswered = UnansweredHold { limiter: limiter.clone(), id, ttl, held, denials };
        match limiter.inner.backend.start(&prepared.check) {
            Step::Decided(shares) => unanswered.answered(prepared.decisions(shares)),
            Step::Remote(remote) => {
                let remote = Arc::clone(remote);
                let deciding =
                    async move { unanswered.answered(prepared.decide_remotely(&remote, deadline).await?) };
                if has_own_id {
                    deciding.await
                } else {
                    ReleasedIfDropped::new(limiter, deciding, |held| held.token).await
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
    let token = HoldToken { id, tiers: decisions.held_tiers(held) };
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
        let tiers = tiers.into_iter().enumerate().filter(|(position, _)| self.may_hold(*position));
        tiers.map(|(_, tier)| tier).collect()
    }

    /// Returns the tiers whose answer confirms that this request made the hold. Without an answer, a request with an untrusted id must not
    /// end a hold with the same id.
    pub(super) fn made_tiers(&self, tiers: Vec<HeldTier>) -> Vec<HeldTier> {
        let tiers = tiers.into_iter().enumerate().filter(|(position, _)| self.has_made(*position));
        tiers.map(|(_, tier)| tier).collect()
    }

    /// Whether an answer confirms that this request made the hold of a tier.
    pub(super) fn has_made(&self, position: usize) -> bool {
        self.holds.get(position).is_some_and(|hold| hold.outcome == HoldOutcome::Held)
    }

    /// Whether a tier has the hold, or may have it.
    pub(super) fn may_hold(&self, position: usize) -> bool {
        let is_unknown = matches!(self.failure, Some(StoreError::Ambiguous(_)));
        is_unknown || self.holds.get(position).is_some_and(is_made)
    }
}

fn check_ttl(ttl: Duration) -> Result<(), Error> {
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
            Ok(Hold { limiter, decision, open })
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
            self.limiter.release_later(token);
        }
    }
}

impl Settlement {
    pub(super) fn of(tiers: Vec<SettledTier>, without_tiers: SettleOutcome) -> Self {
        let outcome = tiers.iter().map(|tier| tier.outcome).max().unwrap_or(without_tiers);
        Self { outcome, tiers }
    }
}

/// An operation on a hold that was made before.
#[derive(Clone, Copy)]
pub(super) enum Adjustment<'a> {
    /// By the cost in each unit.
    Settle {
        costs: &'a Costs,
        max_excess: Option<u64>,
    },
    /// By the units of each tier; `None` keeps the estimate.
    SettleTiers {
        units: &'a [Option<Cost>],
        max_excess: Option<u64>,
    },
    Release,
    Renew(Duration),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AdjustmentKind {
    Settle,
    Release,
    Renew,
}

impl Adjustment<'_> {
    fn kind(self) -> AdjustmentKind {
        match self {
            Self::Settle { .. } | Self::SettleTiers { .. } => AdjustmentKind::Settle,
            Self::Release => AdjustmentKind::Release,
            Self::Renew(_) => AdjustmentKind::Renew,
        }
    }

    /// The outcome of a hold without counters.
    fn without_tiers(self) -> SettleOutcome {
        match self {
            Self::Settle { .. } | Self::SettleTiers { .. } => SettleOutcome::Settled,
            Self::Release => SettleOutcome::Released,
            Self::Renew(_) => SettleOutcome::Renewed,
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
        Ok(HoldToken { id, tiers: tiers.collect() })
    }

    /// Replaces the estimate of a hold with the actual cost, exactly once: refunds the difference to the charge of the hold, or charges the
    /// excess, even beyond the limit. A unit that is not named keeps its estimate.
    ///
    /// If this future is dropped while the store settles, that is completed in the background.
    ///
    /// # Errors
    /// If a cost is too large, or if the store does not respond and the queue of settlements is full.
    pub async fn settle(&self, token: &HoldToken, costs: impl Into<Costs>) -> Result<Settlement, Error> {
        let costs = costs.into();
        self.adjust_hold(token, Adjustment::Settle { costs: &costs, max_excess: Some(u64::MAX) }).await
    }

    /// [`Limiter::settle`] for callers that are not trusted: the excess is at most the [`Limit::max_excess`] that was recorded with the hold.
    ///
    /// # Errors
    /// As [`Limiter::settle`].
    pub async fn settle_bounded(
        &self,
        token: &HoldToken,
        costs: impl Into<Costs>,
    ) -> Result<Settlement, Error> {
        let costs = costs.into();
        self.adjust_hold(token, Adjustment::Settle { costs: &costs, max_excess: None }).await
    }

    /// Refunds the estimate of a hold: settles it with zero.
    ///
    /// # Errors
    /// As [`Limiter::settle`].
    pub async fn release(&self, token: &HoldToken) -> Result<Settlement, Error> {
        self.adjust_hold(token, Adjustment::Release).await
    }

    /// Moves the expiry of a live hold to `ttl` from now, if that is later.
    ///
    /// # Errors
    /// When `ttl` is out of range, or the store does not answer.
    pub async fn renew(&self, token: &HoldToken, ttl: Duration) -> Result<Settlement, Error> {
        check_ttl(ttl)?;
        self.adjust_hold(token, Adjustment::Renew(ttl)).await
    }

    /// [`Limiter::release`] in the background. With the memory store, it has completed when this function returns.
    pub fn release_later(&self, token: HoldToken) {
        self.adjust_later(token, None);
    }

    /// [`Limiter::settle`] in the background. With the memory store, it has completed when this function returns. If a cost is too large, this
    /// is logged, and the hold keeps its estimate.
    pub fn settle_later(&self, token: HoldToken, costs: impl Into<Costs>) {
        self.adjust_later(token, Some(costs.into()));
    }

    /// Settles a hold with its estimate, in the background.
    pub(super) fn keep_later(&self, token: HoldToken) {
        if token.is_empty() {
            return;
        }
        let limiter = self.clone();
        self.run_later(async move {
            let units = vec![None; token.tiers.len()];
            let adjustment = Adjustment::SettleTiers { units: &units, max_excess: None };
            let check = token.to_check(adjustment)?;
            Ok(limiter.inner.backend.adjust_hold(&check, limiter.deadline).await.map(drop)?)
        });
    }

    fn adjust_later(&self, token: HoldToken, costs: Option<Costs>) {
        let limiter = self.clone();
        self.run_later(async move {
            let adjusted = match costs {
                Some(costs) => match limiter.settle(&token, costs).await {
                    Err(error @ Error::Match(_)) => {
                        tracing::warn!("a hold keeps its estimate: {error}");
                        let nothing = Costs::new::<&str>([]).expect("no unit is invalid");
                        limiter.settle(&token, nothing).await
                    }
                    settled => settled,
                },
                None => limiter.release(&token).await,
            };
            adjusted.map(drop)
        });
    }

    fn run_later(&self, adjusted: impl Future<Output = Result<(), Error>> + Send + 'static) {
        let adjusting = async move {
            if let Err(error) = adjusted.await {
                tracing::warn!("a hold was not settled, it expires instead: {error}");
            }
        };
        if !self.is_remote() {
            // the memory store never waits
            let _ = futures_util::FutureExt::now_or_never(adjusting);
        } else if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(adjusting);
        }
    }

    pub(super) async fn adjust_hold(
        &self,
        token: &HoldToken,
        adjustment: Adjustment<'_>,
    ) -> Result<Settlement, Error> {
        if token.is_empty() {
            return Ok(Settlement::of(Vec::new(), adjustment.without_tiers()));
        }
        let (check, kind) = (token.to_check(adjustment)?, adjustment.kind());
        if !self.is_remote() || kind == AdjustmentKind::Renew {
            return self.send_adjustment(token, &check, kind).await;
        }
        let (limiter, token) = (self.clone(), token.clone());
        CompletedIfDropped::new(async move { limiter.send_adjustment(&token, &check, kind).await }).await
    }

    async fn send_adjustment(
        &self,
        token: &HoldToken,
        check: &Check,
        kind: AdjustmentKind,
    ) -> Result<Settlement, Error> {
        let shares = self.inner.backend.adjust_hold(check, self.deadline).await?;
        let settlement = token.settlement(shares, kind);
        self.inner.holds.record_settlement(settlement.outcome);
        Ok(settlement)
    }
}

impl HoldToken {
    /// Returns the check of an operation on the hold. Its limits have no effect: the store uses those that it recorded.
    fn to_check(&self, adjustment: Adjustment<'_>) -> Result<Check, Error> {
        if self.tiers.len() > MAX_TIERS {
            return Err(CheckError::Tiers(self.tiers.len()).into());
        }
        let mut kept = 0_u64;
        let mut tiers = Vec::with_capacity(self.tiers.len());
        for (position, tier) in self.tiers.iter().enumerate() {
            let cost = match adjustment {
                Adjustment::Settle { costs, .. } => tier.actual_cost(costs)?,
                Adjustment::SettleTiers { units, .. } => units[position],
                Adjustment::Release | Adjustment::Renew(_) => Some(Cost::ZERO),
            };
            if cost.is_none() {
                kept |= 1 << position;
            }
            let terms = Terms::new(any_limit(tier.algorithm), cost.unwrap_or(Cost::ZERO));
            tiers.push(Tier { key: tier.key.clone(), terms });
        }
        let operation = match adjustment {
            Adjustment::Settle { max_excess, .. } | Adjustment::SettleTiers { max_excess, .. } => {
                let max_excess = max_excess.map(|most| most.min(Cost::MAX.units()));
                HoldOperation::Settle { kept, max_excess }
            }
            Adjustment::Release => HoldOperation::Settle { kept: 0, max_excess: None },
            Adjustment::Renew(ttl) => HoldOperation::Renew { ttl },
        };
        Ok(Check::new(Operation::Charge, tiers)?.with_hold(self.id.clone(), operation))
    }

    fn settlement(&self, shares: CheckShares, kind: AdjustmentKind) -> Settlement {
        let CheckShares { source, shares, holds, .. } = shares;
        let remaining = |position: usize, outcome: SettleOutcome| {
            use SettleOutcome::{Late, Released, Renewed, Settled};
            let changed = match outcome {
                Settled | Released | Renewed => source != Source::Fallback,
                Late => source != Source::Fallback && kind != AdjustmentKind::Renew,
                _ => false,
            };
            let share: Option<&Share> =
                shares.iter().find(|(other, _)| *other == position).map(|(_, share)| share);
            share.filter(|_| changed).map(|share| share.remaining)
        };
        let tiers = self.tiers.iter().enumerate().map(|(position, tier)| {
            let hold = holds.get(position);
            let outcome = match hold {
                Some(hold) => SettleOutcome::of(hold.outcome, kind),
                None => SettleOutcome::Queued,
            };
            let known = hold.filter(|hold| hold.expires_at.as_micros() > 0);
            SettledTier {
                rule: tier.rule(),
                unit: tier.unit.clone(),
                outcome,
                charged: known.map(|hold| hold.charged),
                remaining: remaining(position, outcome),
                expires_at: known.map(|hold| hold.expires_at),
            }
        });
        let mut tiers: Vec<SettledTier> = tiers.collect();
        // shadow rules, and rules that were added since, may have no record of a hold that exists for other rules
        if tiers.iter().any(|tier| tier.outcome != SettleOutcome::Unknown) {
            tiers.retain(|tier| tier.outcome != SettleOutcome::Unknown);
        }
        Settlement::of(tiers, SettleOutcome::Settled)
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

    /// Returns the units of the actual cost; `None` if its unit is not named.
    fn actual_cost(&self, costs: &Costs) -> Result<Option<Cost>, Error> {
        let Some((_, cost)) = costs.iter().find(|(unit, _)| **unit == *self.unit) else { return Ok(None) };
        let product = cost.units().checked_mul(self.factor.units()).and_then(|units| Cost::new(units).ok());
        product.map(Some).ok_or_else(|| {
            let rule = self.rule().unwrap_or_else(|| "".into());
            Error::Match(MatchError::CostTooLarge {
                rule,
                unit: self.unit.clone(),
                cost,
                factor: self.factor,
            })
        })
    }
}

/// Returns an arbitrary limit of an algorithm.
fn any_limit(algorithm: Algorithm) -> Limit {
    if algorithm.properties().has_window {
        Limit::new(algorithm, 1, Duration::from_secs(1)).expect("one per second is valid")
    } else {
        Limit::concurrency(1).expect("one is valid")
    }
}
