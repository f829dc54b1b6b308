//! Operations on holds that a store has not answered.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::runtime::Handle;

use super::{
    Error, HoldDecision, HoldToken, Limiter, decide::TierDecisions, hold::held_decision, hold_token::HeldTier,
};
use crate::{
    decision::TierDecision,
    key::HoldId,
    store::{BoxFuture, StoreError},
};

/// Counts settlements and holds that are not finished yet, also if their callers were dropped.
#[derive(Debug, Default)]
pub(super) struct UnfinishedCount(Arc<AtomicUsize>);

/// An operation that is counted until it is finished. If it is dropped before, this is logged.
pub(super) struct Unfinished {
    count: Arc<AtomicUsize>,
    is_finished: bool,
}

impl UnfinishedCount {
    pub(super) fn start(&self) -> Unfinished {
        self.0.fetch_add(1, Ordering::Relaxed);
        Unfinished { count: Arc::clone(&self.0), is_finished: false }
    }

    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Unfinished {
    pub(super) fn finish(mut self) {
        self.is_finished = true;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        if !self.is_finished {
            tracing::warn!("hold not settled; it will expire: there is no tokio runtime, or it has stopped");
        }
    }
}

/// A hold that the store has not answered.
pub(super) struct HoldInProgress {
    pub(super) limiter: Limiter,
    pub(super) id: HoldId,
    pub(super) ttl: Duration,
    pub(super) held: Vec<HeldTier>,
    /// The rules that deny without a counter.
    pub(super) denials: Vec<TierDecision>,
}

impl HoldInProgress {
    pub(super) fn answered(self, decisions: TierDecisions) -> Result<HoldDecision, Error> {
        let Self { limiter, id, ttl, held, denials } = self;
        limiter.inner.holds.record_hold(&decisions);
        // The store may have made a hold that the failure policy denies. It is released only if its id is random: a caller may repeat its own
        // id, and the release would end the repeated hold.
        let may_exist = matches!(decisions.failure, Some(StoreError::Ambiguous(_))) && id.is_random();
        let unconfirmed =
            may_exist.then(|| HoldToken { id: id.clone(), tiers: held.clone(), is_confirmed: false });
        match held_decision(id, ttl, held, decisions, denials) {
            Ok(held) if held.decision.is_allowed() => Ok(held),
            not_held => {
                if let Some(token) = unconfirmed {
                    limiter.release_later(token);
                }
                not_held.map(|denied| HoldDecision { token: None, ..denied })
            }
        }
    }
}

/// A hold that the store is deciding, with a random id. If its caller is dropped, for example because a client disconnected, the hold is
/// completed in the background and released. Otherwise it would count until it expires.
pub(super) struct ReleaseOnDrop<'a, T: Send + 'static, F: FnOnce(T) -> Option<HoldToken> + Send + 'static> {
    limiter: &'a Limiter,
    deciding: Option<BoxFuture<'static, Result<T, Error>>>,
    /// Returns the token of a hold that was made.
    token: Option<F>,
}

impl<'a, T, F> ReleaseOnDrop<'a, T, F>
where
    T: Send + 'static,
    F: FnOnce(T) -> Option<HoldToken> + Send + 'static,
{
    pub(super) fn new(
        limiter: &'a Limiter,
        deciding: impl Future<Output = Result<T, Error>> + Send + 'static,
        token: F,
    ) -> Self {
        Self { limiter, deciding: Some(Box::pin(deciding)), token: Some(token) }
    }
}

impl<T, F> Future for ReleaseOnDrop<'_, T, F>
where
    T: Send + 'static,
    F: FnOnce(T) -> Option<HoldToken> + Send + Unpin + 'static,
{
    type Output = Result<T, Error>;

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

impl<T: Send + 'static, F: FnOnce(T) -> Option<HoldToken> + Send + 'static> Drop for ReleaseOnDrop<'_, T, F> {
    fn drop(&mut self) {
        if let (Some(deciding), Some(token)) = (self.deciding.take(), self.token.take()) {
            let (limiter, unfinished) = (self.limiter.clone(), self.limiter.inner.unfinished.start());
            let Ok(runtime) = Handle::try_current() else { return };
            runtime.spawn(async move {
                if let Some(token) = deciding.await.ok().and_then(token) {
                    limiter.release_later(token);
                }
                unfinished.finish();
            });
        }
    }
}

/// A hold that was made for a request whose answer is not complete. If the caller is dropped before, the hold is released in the background.
pub(super) struct ReleaseUnlessReturned<'a> {
    limiter: &'a Limiter,
    token: Option<HoldToken>,
}

impl<'a> ReleaseUnlessReturned<'a> {
    pub(super) fn new(limiter: &'a Limiter, token: Option<HoldToken>) -> Self {
        Self { limiter, token }
    }

    /// Keeps the hold: the caller has the answer.
    pub(super) fn returned(mut self) {
        self.token = None;
    }
}

impl Drop for ReleaseUnlessReturned<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token.take() {
            self.limiter.release_later(token);
        }
    }
}

/// A settlement or release that was sent. If its future is dropped, it is completed in the background: otherwise the hold would count until it
/// expires.
pub(super) struct FinishOnDrop<T: Send + 'static>(Option<BoxFuture<'static, T>>);

impl<T: Send + 'static> FinishOnDrop<T> {
    pub(super) fn new(ending: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(ending)))
    }
}

impl<T: Send + 'static> Future for FinishOnDrop<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        // taken, so that an operation that panics is not polled again
        let mut ending = self.0.take().expect("an operation is not polled after its end");
        let progress = ending.as_mut().poll(context);
        if progress.is_pending() {
            self.0 = Some(ending);
        }
        progress
    }
}

impl<T: Send + 'static> Drop for FinishOnDrop<T> {
    fn drop(&mut self) {
        if let Some(ending) = self.0.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(ending);
        }
    }
}
