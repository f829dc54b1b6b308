//! Forms batches of the checks for one server, and sends them.
//!
//! There is no timer. If no call is in flight, a check is sent immediately. Checks that arrive while the call limit is
//! reached form the next batch. Below the limit, a flush yields once, so that checks of other runnable tasks share its
//! call: callers that are answered together usually send their next checks together. Equal checks are queued as one group and sent
//! as one check with a count. The admitted count is assigned in order of arrival.
//!
//! A call does not belong to a single caller. A caller that is dropped while queued is not charged. A caller that is dropped later
//! does not cancel the call.

use std::{
    future::Future,
    mem,
    pin::Pin,
    slice,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::future::BoxFuture;
use sluicegate_core::step::granted;
use tokio::{runtime::Handle, task::yield_now, time::Instant};

use super::{
    BatchAnswer, Position, Upstream,
    call_limit::Sent,
    queue::{AfterCall, Batch, CallEnd, Caller, GroupAnswer, Joined},
    ready_by,
};
use crate::{backend::CheckShares, check::Check, store::StoreError};

/// Sends a check, in one call with those of other callers where possible.
pub(super) async fn decide(
    upstream: &Arc<Upstream>,
    check: &Check,
    deadline: Instant,
) -> Result<CheckShares, StoreError> {
    let (answer, group) = match upstream.queue.join(check, deadline, &upstream.shared.counters)? {
        Joined::Idle(sent) => {
            let call = OwnCall::new(upstream, check.clone(), deadline, sent);
            return ready_by(deadline, call).await.unwrap_or_else(|| Err(timed_out()));
        }
        Joined::Queued(answer, group) => (answer, group),
        Joined::MustFlush(answer, group) => {
            spawn_flush(Flush::new(upstream));
            (answer, group)
        }
    };
    match ready_by(deadline, answer).await {
        Some(Ok(outcome)) => {
            let GroupAnswer { answers, at, position } = outcome?;
            Ok(CheckShares::from_store(check, &answers, position, at))
        }
        Some(Err(_)) => Err(StoreError::Ambiguous("call ended without an answer".to_owned())),
        None if upstream.queue.is_waiting(group) => {
            Err(StoreError::NotRun("still queued in this process at the deadline".to_owned()))
        }
        None => Err(timed_out()),
    }
}

/// A call driven by its caller's task. With a spawned task, a call of a single caller would take 59 us of CPU time
/// instead of 40 us (on loopback). If the caller is dropped, a spawned task continues the call.
struct OwnCall {
    upstream: Arc<Upstream>,
    call: Option<BoxFuture<'static, Result<CheckShares, StoreError>>>,
}

impl OwnCall {
    fn new(upstream: &Arc<Upstream>, check: Check, deadline: Instant, sent: Sent) -> Self {
        let call = CallInFlight { upstream: Arc::clone(upstream), sent, has_ended: false };
        let call = Box::pin(async move {
            let outcome = call.upstream.call(slice::from_ref(&check), deadline, sent.at).await.pop();
            let outcome = outcome.expect("one check has one outcome");
            if let Some(flush) =
                call.end(CallEnd::from_outcomes(slice::from_ref(&outcome)), check.tiers().len())
            {
                spawn_flush(flush);
            }
            let (answers, at) = outcome?;
            Ok(CheckShares::from_store(&check, &answers, Position::ALONE, at))
        });
        Self { upstream: Arc::clone(upstream), call: Some(call) }
    }
}

impl Future for OwnCall {
    type Output = Result<CheckShares, StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // taken, so that a call that panics is not polled again
        let mut call = self.call.take().expect("a call is not polled after its end");
        let progress = call.as_mut().poll(context);
        if progress.is_pending() {
            self.call = Some(call);
        }
        progress
    }
}

impl Drop for OwnCall {
    fn drop(&mut self) {
        if let Some(call) = self.call.take()
            && let Ok(runtime) = Handle::try_current()
        {
            let upstream = Arc::clone(&self.upstream);
            runtime.spawn(async move {
                let is_answered = call.await.is_ok();
                upstream.shared.counters.record_late_answers(u64::from(is_answered));
            });
        }
    }
}

fn spawn_flush(flush: Flush) {
    tokio::spawn(flush_and_send(flush));
}

fn spawn_send((batch, call): (Batch, CallInFlight)) {
    tokio::spawn(async move {
        if let Some(flush) = send(batch, call).await {
            flush_and_send(flush).await;
        }
    });
}

/// Sends queued checks, up to the limit of calls in flight. Continues after each reply until the queue is empty or
/// another task flushes.
async fn flush_and_send(mut flush: Flush) {
    loop {
        // checks of other runnable tasks join the batch
        yield_now().await;
        let Some(mut next) = flush.next_batch() else { return };
        while let Some(further) = flush.next_batch() {
            spawn_send(mem::replace(&mut next, further));
        }
        let (batch, call) = next;
        match send(batch, call).await {
            Some(next) => flush = next,
            None => return,
        }
    }
}

/// Makes one call and answers its callers. Returns a [`Flush`] if checks are queued and no task is flushing.
async fn send(batch: Batch, call: CallInFlight) -> Option<Flush> {
    let Batch { checks, callers, deadline } = batch;
    let upstream = Arc::clone(&call.upstream);
    let outcomes = upstream.call(&checks, deadline, call.sent.at).await;
    let tiers = checks.iter().map(|check| check.tiers().len()).sum();
    let flush = call.end(CallEnd::from_outcomes(&outcomes), tiers);
    let mut late = 0;
    for ((check, callers), outcome) in checks.iter().zip(callers).zip(outcomes) {
        late += answer_callers(check, callers, outcome);
    }
    upstream.shared.counters.record_late_answers(late);
    flush
}

/// Answers the callers of a check. Returns how many callers were dropped before the answer.
fn answer_callers(check: &Check, callers: Vec<Caller>, outcome: Result<BatchAnswer, StoreError>) -> u64 {
    let mut late = 0;
    match outcome {
        Ok((answers, at)) => {
            let passes = answers.iter().map(|answer| answer.passes);
            let terms = check.tiers().iter().map(|tier| &tier.terms);
            let admitted = granted(check.count(), terms.zip(passes));
            for (index, caller) in (0..).zip(callers) {
                let answers = Arc::clone(&answers);
                let answer_of_group = GroupAnswer { answers, at, position: Position { index, admitted } };
                late += u64::from(caller.answer.send(Ok(answer_of_group)).is_err());
            }
        }
        Err(error) => {
            for caller in callers {
                let _ = caller.answer.send(Err(error.clone()));
            }
        }
    }
    late
}

/// Permission to send queued checks. Only one task at a time has it.
struct Flush {
    upstream: Arc<Upstream>,
    has_ended: bool,
}

impl Flush {
    fn new(upstream: &Arc<Upstream>) -> Self {
        Self { upstream: Arc::clone(upstream), has_ended: false }
    }

    /// Returns the next batch if the limit admits a call. Otherwise the flush ends.
    fn next_batch(&mut self) -> Option<(Batch, CallInFlight)> {
        if self.has_ended {
            return None;
        }
        let Upstream { queue, shared, .. } = &*self.upstream;
        let Some((batch, sent)) = queue.take_batch(Instant::now(), &shared.counters) else {
            self.has_ended = true;
            return None;
        };
        Some((batch, CallInFlight { upstream: Arc::clone(&self.upstream), sent, has_ended: false }))
    }
}

impl Drop for Flush {
    fn drop(&mut self) {
        // after a panic or the end of the runtime, the next caller takes over
        if !self.has_ended {
            self.upstream.queue.end_flush();
        }
    }
}

/// A call in flight. Dropping it ends the call, even after a panic.
struct CallInFlight {
    upstream: Arc<Upstream>,
    sent: Sent,
    has_ended: bool,
}

impl CallInFlight {
    /// Ends the call. Returns a [`Flush`] if checks are queued and no task is flushing.
    fn end(mut self, end: CallEnd, tiers: usize) -> Option<Flush> {
        self.has_ended = true;
        let AfterCall { must_flush, round_trip } =
            self.upstream.queue.end_call(self.sent, end, tiers, Instant::now());
        let flush = must_flush.then(|| Flush::new(&self.upstream));
        if let Some(round_trip) = round_trip {
            self.upstream.warn_if_slow(round_trip);
        }
        flush
    }
}

impl Drop for CallInFlight {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        if self.upstream.queue.end_call(self.sent, CallEnd::NoReply, 0, Instant::now()).must_flush {
            let flush = Flush::new(&self.upstream);
            if Handle::try_current().is_ok() {
                spawn_flush(flush);
            }
        }
    }
}

fn timed_out() -> StoreError {
    StoreError::Ambiguous("no answer by the deadline".to_owned())
}
