//! Operations on holds. Each takes effect only once, so unlike a check, it is repeated if its reply is lost. While the store is down,
//! settlements and releases are queued.

use std::{
    collections::VecDeque,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::{join_all, select};
use parking_lot::Mutex;
use sluicegate_core::HoldOutcome;
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout},
};

use super::Remote;
use crate::{
    backend::CheckShares,
    check::{Check, HoldOperation},
    store::StoreError,
};

/// The most settlements that are queued while the store is down.
const MAX_QUEUED: usize = 16_384;
/// The most tiers of all queued settlements together: this bounds their memory, at a few hundred bytes each.
const MAX_QUEUED_TIERS: usize = 65_536;
/// How long a queued settlement is repeated. By then the store has forgotten the hold.
const MAX_AGE: Duration = Duration::from_secs(600);
/// The most queued settlements that are sent at a time.
const MAX_SENT: usize = 256;
/// The first pause after a failure. It doubles after each one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause after a failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often an operation is sent within its deadline.
const MAX_ATTEMPTS: u32 = 4;

/// Settlements and releases that the store did not answer.
#[derive(Default)]
pub(super) struct Settlements(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Queued>,
    /// The tiers of all queued settlements.
    tiers: usize,
    /// The number of settlements that are being sent.
    in_flight: usize,
    /// Whether a task is sending them.
    is_sending: bool,
}

struct Queued {
    check: Check,
    until: Instant,
}

impl Remote {
    /// Sends an operation on a hold. If there is no reply after half of the remaining time, or if the connection is lost, repeats it.
    pub(super) async fn send_repeatedly(
        &self,
        check: &Check,
        deadline: Option<Duration>,
    ) -> Result<CheckShares, StoreError> {
        let time = self.shared.options.deadline_within(deadline);
        let ends = Instant::now() + time;
        let left = || ends.saturating_duration_since(Instant::now());
        let mut first = pin!(self.send(check, Some(time)));
        let mut answer = match timeout(time / 2, &mut first).await {
            Ok(answer) => answer,
            Err(_) => {
                let second = pin!(self.send(check, Some(left())));
                match select(first, second).await.factor_first() {
                    (Ok(shares), _) if shares.is_allowed(check) => Ok(shares),
                    (answer, other) => combine(answer, other.await, check),
                }
            }
        };
        for _ in 1..MAX_ATTEMPTS {
            if !matches!(answer, Err(StoreError::Ambiguous(_))) || left().is_zero() {
                break;
            }
            answer = match self.send(check, Some(left())).await {
                // an earlier attempt may have had an effect
                Err(StoreError::NotRun(reason)) => Err(StoreError::Ambiguous(reason)),
                answer => answer,
            };
        }
        answer
    }

    /// Settles, releases or renews a hold in the store, and in this process if a failure policy made it here. If the store does not
    /// respond, a settlement or release is queued, and the answer has no results.
    pub(crate) async fn adjust_hold(
        self: &Arc<Self>,
        check: &Check,
        deadline: Option<Duration>,
    ) -> Result<CheckShares, StoreError> {
        let here = self.shared.fallback.adjust_hold(check);
        let error = match self.send_repeatedly(check, deadline).await {
            Ok(shares) => return Ok(merge(shares, here)),
            Err(error) => error,
        };
        let is_end =
            matches!(check.hold(), Some(hold) if !matches!(hold.operation, HoldOperation::Renew { .. }));
        let is_queued = is_end && is_temporary(&error) && self.queue_settlement(check);
        match here {
            Some(here) if here.holds.iter().all(|hold| hold.outcome != HoldOutcome::Unknown) => Ok(here),
            _ if is_queued => Ok(CheckShares::without_answers()),
            _ => Err(error),
        }
    }

    /// Queues a settlement. Returns false if the queue is full, or if there is no runtime.
    fn queue_settlement(self: &Arc<Self>, check: &Check) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let mut queue = self.settlements.0.lock();
        let tiers = check.tiers().len();
        if queue.waiting.len() >= MAX_QUEUED || queue.tiers + tiers > MAX_QUEUED_TIERS {
            return false;
        }
        queue.tiers += tiers;
        queue.waiting.push_back(Queued { check: check.clone(), until: Instant::now() + MAX_AGE });
        if !queue.is_sending {
            queue.is_sending = true;
            runtime.spawn(Sender(Arc::downgrade(self)).run());
        }
        true
    }

    /// Returns how many settlements are queued.
    pub(super) fn queued_settlements(&self) -> usize {
        let queue = self.settlements.0.lock();
        queue.waiting.len() + queue.in_flight
    }

    /// Returns the next queued settlements that are not too old; without any, the task must end.
    fn take_queued(&self) -> Vec<Queued> {
        let mut queue = self.settlements.0.lock();
        let now = Instant::now();
        queue.waiting.retain(|queued| queued.until > now);
        let count = queue.waiting.len().min(MAX_SENT);
        queue.is_sending = count > 0;
        queue.in_flight = count;
        let taken = queue.waiting.drain(..count).collect();
        queue.tiers = queue.waiting.iter().map(|queued| queued.check.tiers().len()).sum();
        taken
    }
}

/// Sends queued settlements until there are none, or the limiter is dropped.
struct Sender(Weak<Remote>);

impl Sender {
    async fn run(self) {
        let mut pause = FIRST_PAUSE;
        loop {
            sleep(pause).await;
            let Some(remote) = self.0.upgrade() else { return };
            let queued = remote.take_queued();
            if queued.is_empty() {
                return;
            }
            let sent = queued.into_iter().map(async |queued| {
                let answer = remote.send(&queued.check, None).await;
                answer.is_err_and(|error| is_temporary(&error)).then_some(queued)
            });
            let failed: Vec<Queued> = join_all(sent).await.into_iter().flatten().collect();
            pause = if failed.is_empty() {
                Duration::ZERO
            } else {
                LONGEST_PAUSE.min(pause.max(FIRST_PAUSE) * 2)
            };
            let mut queue = remote.settlements.0.lock();
            queue.in_flight = 0;
            // behind the others, so that a server that is down does not delay settlements for other servers
            queue.tiers += failed.iter().map(|queued| queued.check.tiers().len()).sum::<usize>();
            queue.waiting.extend(failed);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if let Some(remote) = self.0.upgrade() {
            // the runtime has stopped: a task on another one may take over
            remote.settlements.0.lock().is_sending = false;
        }
    }
}

/// Returns the outcome of two attempts, of which the first was not admitted. If one of them may have had an effect, the error is ambiguous.
fn combine(
    one: Result<CheckShares, StoreError>,
    other: Result<CheckShares, StoreError>,
    check: &Check,
) -> Result<CheckShares, StoreError> {
    match (one, other) {
        (_, Ok(shares)) if shares.is_allowed(check) => Ok(shares),
        (Ok(shares), _) | (_, Ok(shares)) => Ok(shares),
        (Err(error @ StoreError::Ambiguous(_)), Err(_)) | (Err(_), Err(error)) => Err(error),
    }
}

/// Whether a later attempt may succeed.
fn is_temporary(error: &StoreError) -> bool {
    !matches!(error, StoreError::Unreadable { .. } | StoreError::TooLarge { .. })
}

/// Replaces the results of tiers whose hold exists only in this process.
fn merge(mut shares: CheckShares, here: Option<CheckShares>) -> CheckShares {
    for (position, hold) in here.map(|here| here.holds).into_iter().flatten().enumerate() {
        if hold.outcome != HoldOutcome::Unknown && shares.holds[position].outcome == HoldOutcome::Unknown {
            shares.holds[position] = hold;
        }
    }
    shares
}
