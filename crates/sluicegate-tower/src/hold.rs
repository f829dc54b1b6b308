//! Held requests: the hold of a request, which ends with the response, and the actual cost that the handler sets.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::Extensions;
use sluicegate::{
    Cost, Costs, Decision, Limiter,
    limiter::{HoldDecision, HoldToken, SettleOutcome},
    rules::MAX_UNITS,
};
use tokio::{runtime::Handle, task::AbortHandle, time::sleep};

/// A hold is renewed after its time to live divided by this.
const RENEWAL_DIVISOR: u32 = 2;
/// If the store does not respond, the renewal is repeated after the time to live divided by this.
const RETRY_DIVISOR: u32 = 8;

/// The actual cost of a held request, which its handler sets. Cheap to clone.
///
/// The layer adds it to the extensions of every request that it holds, and settles the hold with it when the response ends: after the last
/// frame of its body, when the body fails, or when it is dropped, for example because the client disconnected. It can be set until then,
/// also while the body is streamed. A unit that is not set keeps its estimate. Slots of [in-flight limits](sluicegate::Limit::concurrency)
/// are always freed.
///
/// With axum, it is an extractor; if the request is not held, setting it has no effect. In other services, get it from the extensions of
/// the request. A service without access to them can add a new one to the extensions of its response.
///
/// ```
/// use std::time::Duration;
/// use axum::{Router, routing::post};
/// use sluicegate::{Cost, Costs, Limit, Limiter, Rule};
/// use sluicegate_tower::{ActualCosts, RateLimitLayer};
///
/// let per_hour = Limit::fixed_window(1_000_000, Duration::from_secs(3_600))?;
/// let limiter = Limiter::in_memory([Rule::new("tokens", per_hour).unit("tokens")])?;
/// let estimate = Costs::new([("tokens", Cost::from(2_000))])?;
/// let layer = RateLimitLayer::new(limiter).estimate(move |_| estimate.clone());
///
/// async fn complete(actual: ActualCosts) -> String {
///     actual.set("tokens", 120); // reported by the model
///     "an answer".to_owned()
/// }
/// let app: Router = Router::new().route("/complete", post(complete)).layer(layer);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct ActualCosts(Arc<Mutex<Actual>>);

#[derive(Default)]
struct Actual {
    costs: Vec<(Box<str>, Cost)>,
    is_cancelled: bool,
}

impl ActualCosts {
    /// Creates costs for the extensions of a response.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the cost in a unit, in place of the estimate. A unit that no rule counts has no effect.
    pub fn set(&self, unit: &str, cost: u64) {
        self.update(unit, |_| cost);
    }

    /// Adds to the cost in a unit, which is zero before the first call.
    pub fn add(&self, unit: &str, cost: u64) {
        self.update(unit, |sum| sum.saturating_add(cost));
    }

    /// Refunds the whole estimate when the response ends, for a request that was not served. Costs that are set have no effect.
    pub fn cancel(&self) {
        self.lock().is_cancelled = true;
    }

    fn update(&self, unit: &str, change: impl FnOnce(u64) -> u64) {
        let mut actual = self.lock();
        let position = actual.costs.iter().position(|(name, _)| **name == *unit);
        let before = position.map_or(Cost::ZERO, |position| actual.costs[position].1);
        let after = Cost::new(change(before.units())).unwrap_or(Cost::MAX);
        match position {
            Some(position) => actual.costs[position].1 = after,
            // one more unit is stored, so that the settlement reports the error
            None if actual.costs.len() <= MAX_UNITS => actual.costs.push((unit.into(), after)),
            None => {}
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Actual> {
        // no code that panics runs under the lock
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ActualCosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let actual = self.lock();
        let costs = actual.costs.iter().map(|(unit, cost)| (unit, cost.units()));
        f.debug_map().entries(costs).finish()
    }
}

#[cfg(feature = "axum")]
impl<S: Sync> axum::extract::FromRequestParts<S> for ActualCosts {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(
        request: &mut http::request::Parts,
        _: &S,
    ) -> Result<Self, std::convert::Infallible> {
        Ok(request.extensions.get().cloned().unwrap_or_default())
    }
}

/// A hold whose request is not being served yet.
pub(crate) struct UnstartedHold {
    /// `None` if the request was denied.
    token: Option<HoldToken>,
    ttl: Duration,
}

impl UnstartedHold {
    pub(crate) fn of(hold: HoldDecision) -> (Decision, Self) {
        let HoldDecision { decision, token, ttl, .. } = hold;
        (decision, Self { token, ttl })
    }

    /// Starts to renew the hold, and adds [`ActualCosts`] to the request. Returns `None` if no counter has the hold.
    pub(crate) fn start(self, limiter: &Limiter, request: &mut Extensions) -> Option<SettleOnDrop> {
        // an outer layer may hold the request, too: both holds are settled with the same cost
        let actual = request.get_or_insert_default::<ActualCosts>().clone();
        let token = Arc::new(self.token.filter(|token| !token.is_empty())?);
        let limiter = limiter.clone();
        let runtime = Handle::try_current().ok();
        let renewal = runtime.as_ref().map(|runtime| {
            runtime.spawn(renew(limiter.clone(), Arc::clone(&token), self.ttl)).abort_handle()
        });
        Some(SettleOnDrop { limiter, token, actual, runtime, renewal })
    }
}

/// The hold of a request that is being served. Dropping it settles the hold in the background.
pub(crate) struct SettleOnDrop {
    limiter: Limiter,
    token: Arc<HoldToken>,
    actual: ActualCosts,
    /// The runtime of the request, for a body that is dropped elsewhere. The memory store needs none.
    runtime: Option<Handle>,
    renewal: Option<AbortHandle>,
}

impl SettleOnDrop {
    /// Uses the actual costs in the extensions of a response, if there are any.
    pub(crate) fn use_costs_of(&mut self, response: &Extensions) {
        if let Some(actual) = response.get::<ActualCosts>() {
            self.actual = actual.clone();
        }
    }
}

impl fmt::Debug for SettleOnDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettleOnDrop")
            .field("id", self.token.id())
            .field("actual", &self.actual)
            .finish_non_exhaustive()
    }
}

impl Drop for SettleOnDrop {
    fn drop(&mut self) {
        if let Some(renewal) = &self.renewal {
            renewal.abort();
        }
        let is_outside = Handle::try_current().is_err();
        let _runtime = self.runtime.as_ref().filter(|_| is_outside).map(Handle::enter);
        let token = HoldToken::clone(&self.token);
        let (costs, is_cancelled) = {
            let actual = self.actual.lock();
            (actual.costs.clone(), actual.is_cancelled)
        };
        if is_cancelled {
            return self.limiter.release_later(token);
        }
        let costs = Costs::new(costs).unwrap_or_else(|error| {
            tracing::warn!("hold settled with its estimate: {error}");
            Costs::new::<&str>([]).expect("no unit is invalid")
        });
        self.limiter.settle_later(token, costs);
    }
}

/// Renews a hold until it ends.
async fn renew(limiter: Limiter, token: Arc<HoldToken>, ttl: Duration) {
    let mut pause = ttl / RENEWAL_DIVISOR;
    loop {
        sleep(pause).await;
        pause = match limiter.renew(&token, ttl).await {
            Ok(renewal) if renewal.tiers.iter().any(|tier| tier.outcome == SettleOutcome::Renewed) => {
                ttl / RENEWAL_DIVISOR
            }
            // the store did not answer when the hold was made, or it was reset since
            Ok(renewal) if renewal.outcome == SettleOutcome::Unknown => return,
            Ok(_) => {
                tracing::warn!(
                    "hold expired before it was renewed: its request no longer counts as in flight; use a longer ttl"
                );
                return;
            }
            Err(_) => ttl / RETRY_DIVISOR,
        };
    }
}
