//! Settling, releasing and renewing holds.

use std::{sync::Arc, time::Duration};

use sluicegate_core::{Algorithm, Cost, HoldOutcome, Limit, Operation, Terms, Timestamp, step::Share};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use super::{
    Error, Limiter,
    hold::check_ttl,
    hold_token::{HeldTier, HoldToken},
    pending_hold::FinishOnDrop,
};
use crate::{
    backend::CheckShares,
    check::{Check, CheckError, HoldOperation, MAX_TIERS, Tier},
    decision::Source,
    rules::{Costs, MatchError, Unit},
};

/// How often [`Limiter::flush_settlements`] checks whether settlements are left.
const FLUSH_INTERVAL: Duration = Duration::from_millis(5);

/// The outcome of settling, releasing or renewing a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settlement {
    /// The worst of the outcomes of all counters.
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
            HoldOutcome::Settled | HoldOutcome::Renewed => kind.completed(),
            HoldOutcome::Already => Self::Already,
            HoldOutcome::Late => Self::Late,
            _ => Self::Unknown,
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
}

impl AdjustmentKind {
    /// The outcome if every counter completes the operation.
    fn completed(self) -> SettleOutcome {
        match self {
            Self::Settle => SettleOutcome::Settled,
            Self::Release => SettleOutcome::Released,
            Self::Renew => SettleOutcome::Renewed,
        }
    }
}

impl Limiter {
    /// Replaces the estimate of a hold with the actual cost, exactly once: refunds the difference to the charge of the hold, or charges the
    /// excess, even beyond the limit. A unit that is not named keeps its estimate.
    ///
    /// If this future is dropped before the store answers, the settlement is completed in the background.
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
        self.adjust_later(token, None, None);
    }

    /// [`Limiter::settle`] in the background. With the memory store, it has completed when this function returns. If a cost is too large, this
    /// is logged, and the hold keeps its estimate.
    pub fn settle_later(&self, token: HoldToken, costs: impl Into<Costs>) {
        self.adjust_later(token, Some(costs.into()), None);
    }

    /// Settles a hold with its estimate, in the background.
    pub(super) fn keep_later(&self, token: HoldToken) {
        if token.is_empty() {
            return;
        }
        let limiter = self.clone();
        self.run_later(None, async move {
            let check = token.to_keeping_check()?;
            Ok(limiter.inner.backend.adjust_hold(&check, limiter.deadline).await.map(drop)?)
        });
    }

    /// Settles or releases a hold in the background: outside of a tokio runtime, on `runtime`.
    pub(super) fn adjust_later(&self, token: HoldToken, costs: Option<Costs>, runtime: Option<Handle>) {
        if token.is_empty() {
            return;
        }
        let limiter = self.clone();
        self.run_later(runtime, async move {
            let Some(costs) = costs else {
                return limiter.adjust_attached(&token, Adjustment::Release).await.map(drop);
            };
            let settle = Adjustment::Settle { costs: &costs, max_excess: Some(u64::MAX) };
            let mut settled = limiter.adjust_attached(&token, settle).await;
            if let Err(error @ Error::Match(_)) = settled {
                tracing::warn!("hold settled with its estimate: {error}");
                let costs = Costs::new::<&str>([]).expect("no unit is invalid");
                let keep = Adjustment::Settle { costs: &costs, max_excess: None };
                settled = limiter.adjust_attached(&token, keep).await;
            }
            settled.map(drop)
        });
    }

    fn run_later(
        &self,
        runtime: Option<Handle>,
        adjusted: impl Future<Output = Result<(), Error>> + Send + 'static,
    ) {
        let unfinished = self.inner.unfinished.start();
        let adjusting = async move {
            if let Err(error) = adjusted.await {
                tracing::warn!("hold not settled; it will expire: {error}");
            }
            unfinished.finish();
        };
        if !self.is_remote() {
            // the memory store never waits
            let _ = futures_util::FutureExt::now_or_never(adjusting);
        } else if let Some(runtime) = Handle::try_current().ok().or(runtime) {
            runtime.spawn(adjusting);
        }
    }

    /// Waits until the store has answered the settlements and releases of this process that run in the background or are queued, at most for
    /// `timeout`. Returns how many are left. Call it before the process ends, after the last request: holds that are left expire.
    pub async fn flush_settlements(&self, timeout: Duration) -> usize {
        // `None` is later than any time
        let end = Instant::now().checked_add(timeout);
        loop {
            self.inner.backend.resume_settlements();
            let left = self.inner.unfinished.get() + self.stats().holds.waiting;
            if left == 0 || end.is_some_and(|end| Instant::now() >= end) {
                return left;
            }
            sleep(FLUSH_INTERVAL).await;
        }
    }

    /// Runs an operation on a hold. A settlement or release is completed even if the caller is dropped.
    pub(super) async fn adjust_hold(
        &self,
        token: &HoldToken,
        adjustment: Adjustment<'_>,
    ) -> Result<Settlement, Error> {
        let kind = adjustment.kind();
        if !self.is_remote() || kind == AdjustmentKind::Renew || token.is_empty() {
            return self.adjust_attached(token, adjustment).await;
        }
        let check = token.to_check(adjustment)?;
        let (limiter, token, unfinished) = (self.clone(), token.clone(), self.inner.unfinished.start());
        FinishOnDrop::new(async move {
            let settlement = limiter.send_adjustment(&token, &check, kind).await;
            unfinished.finish();
            settlement
        })
        .await
    }

    /// Runs an operation on a hold. It is cancelled if the caller is dropped.
    async fn adjust_attached(
        &self,
        token: &HoldToken,
        adjustment: Adjustment<'_>,
    ) -> Result<Settlement, Error> {
        let kind = adjustment.kind();
        if token.is_empty() {
            let outcome = if token.is_confirmed { kind.completed() } else { SettleOutcome::Unknown };
            return Ok(Settlement::of(Vec::new(), outcome));
        }
        self.send_adjustment(token, &token.to_check(adjustment)?, kind).await
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
    /// Returns the check that settles the hold with its estimate.
    pub(super) fn to_keeping_check(&self) -> Result<Check, Error> {
        let units = vec![None; self.tiers.len()];
        self.to_check(Adjustment::SettleTiers { units: &units, max_excess: None })
    }

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
        // If the hold is not confirmed, it may exist for only some of the tiers: not for shadow rules that would have denied, rules added since,
        // or rules that a failure policy decided.
        if !self.is_confirmed && tiers.iter().any(|tier| tier.outcome != SettleOutcome::Unknown) {
            tiers.retain(|tier| tier.outcome != SettleOutcome::Unknown);
        }
        Settlement::of(tiers, SettleOutcome::Settled)
    }
}

impl HeldTier {
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
