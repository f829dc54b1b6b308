//! Holds that a store has not answered.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::runtime::Handle;

use super::{Error, HoldDecision, Limiter, decide::TierDecisions, hold::held_decision, hold_token::HeldTier};
use crate::{decision::TierDecision, key::HoldId, store::BoxFuture};

/// A hold that the store has not answered.
pub(super) struct UnansweredHold {
    pub(super) limiter: Limiter,
    pub(super) id: HoldId,
    pub(super) ttl: Duration,
    pub(super) held: Vec<HeldTier>,
    /// The rules that deny without a counter.
    pub(super) denials: Vec<TierDecision>,
}

impl UnansweredHold {
    pub(super) fn answered(self, decisions: TierDecisions) -> Result<HoldDecision, Error> {
        let Self { limiter, id, ttl, held, denials } = self;
        limiter.inner.holds.record_hold(&decisions.holds);
        let mut held = held_decision(id, ttl, held, decisions, denials)?;
        if !held.decision.is_allowed()
            && let Some(token) = held.token.take()
            && !token.is_empty()
        {
            // the store did not answer, and the failure policy denied: the store may have the hold
            limiter.release_later(token);
        }
        Ok(held)
    }
}

/// A hold in flight whose id only its caller could use. If the caller is dropped, for example because its client disconnected, the hold is
/// completed in the background and released; otherwise it would count until it expires.
pub(super) struct ReleasedIfDropped<'a> {
    limiter: &'a Limiter,
    deciding: Option<BoxFuture<'static, Result<HoldDecision, Error>>>,
}

impl<'a> ReleasedIfDropped<'a> {
    pub(super) fn new(
        limiter: &'a Limiter,
        deciding: impl Future<Output = Result<HoldDecision, Error>> + Send + 'static,
    ) -> Self {
        Self { limiter, deciding: Some(Box::pin(deciding)) }
    }
}

impl Future for ReleasedIfDropped<'_> {
    type Output = Result<HoldDecision, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // taken, so that a hold that panics is not polled again
        let mut deciding = self.deciding.take().expect("a hold is not polled after its end");
        let progress = deciding.as_mut().poll(context);
        if progress.is_pending() {
            self.deciding = Some(deciding);
        }
        progress
    }
}

impl Drop for ReleasedIfDropped<'_> {
    fn drop(&mut self) {
        if let Some(deciding) = self.deciding.take()
            && let Ok(runtime) = Handle::try_current()
        {
            let limiter = self.limiter.clone();
            runtime.spawn(async move {
                if let Ok(HoldDecision { token: Some(token), .. }) = deciding.await {
                    limiter.release_later(token);
                }
            });
        }
    }
}
