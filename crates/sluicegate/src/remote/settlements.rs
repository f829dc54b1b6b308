//! Operations on holds. Each takes effect only once, so unlike a check, it is repeated if its reply is lost. While the store is down,
//! settlements and releases are queued.

use std::{
    collections::{BTreeMap, VecDeque},
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::{join_all, select};
use parking_lot::Mutex;
use sluicegate_core::{Cost, HoldOutcome, Operation, Terms};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use super::{Remote, ready_by};
use crate::{
    backend::CheckShares,
    check::{Check, HoldCall, HoldOperation, Tier},
    stats::HoldStats,
    store::StoreError,
};

/// The most settlements that are queued while the store is down.
const MAX_QUEUED: usize = 16_384;
/// The most tiers of all queued settlements together: this bounds their memory, at a few hundred bytes each.
const MAX_QUEUED_TIERS: usize = 65_536;
/// How long a queued settlement is repeated. By then most holds have expired, and the store has forgotten them.
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
pub(super) struct Settlements {
    queue: Mutex<Queue>,
    /// The settlements that were queued and had another effect than their callers expect.
    late: AtomicU64,
    unknown: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Queued>,
    /// The number of settlements that are being sent.
    in_flight: usize,
    /// The tiers of all queued settlements, including those that are being sent.
    tiers: usize,
    /// Whether a task is sending them.
    is_sending: bool,
}

impl Queue {
    fn len(&self) -> usize {
        self.waiting.len() + self.in_flight
    }

    fn has_room(&self, settlements: usize, tiers: usize) -> bool {
        self.len() + settlements <= MAX_QUEUED && self.tiers + tiers <= MAX_QUEUED_TIERS
    }
}

struct Queued {
    check: Check,
    until: Instant,
    hold: QueuedHold,
}

/// Whether the store should have the hold of a queued settlement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum QueuedHold {
    /// The store, or an attempt without an answer, made it.
    Expected,
    /// It was settled in this process, or only an attempt without an answer may have made it.
    Possible,
}

impl Queued {
    fn tiers(&self) -> usize {
        self.check.tiers().len()
    }
}

impl Settlements {
    /// Records the outcomes of settlements that were queued, if their callers would not expect them.
    fn record(&self, queued: &[Queued], answers: &[Result<CheckShares, StoreError>]) {
        let answered = || {
            queued.iter().zip(answers).filter_map(|(queued, answer)| Some((queued, answer.as_ref().ok()?)))
        };
        let is_late =
            |shares: &CheckShares| shares.holds.iter().any(|hold| hold.outcome == HoldOutcome::Late);
        // without the token of a confirmed hold, some of its counters may have none
        let is_unknown =
            |shares: &CheckShares| shares.holds.iter().all(|hold| hold.outcome == HoldOutcome::Unknown);
        let late = answered().filter(|(_, shares)| is_late(shares)).count();
        let unknown = answered()
            .filter(|(queued, shares)| queued.hold == QueuedHold::Expected && is_unknown(shares))
            .count();
        self.late.fetch_add(late as u64, Ordering::Relaxed);
        self.unknown.fetch_add(unknown as u64, Ordering::Relaxed);
        if unknown > 0 {
            tracing::warn!("{unknown} queued settlements had no effect: the store has no such holds");
        }
        for error in
            answers.iter().filter_map(|answer| answer.as_ref().err()).filter(|error| !is_temporary(error))
        {
            tracing::warn!("hold not settled; it will expire: {error}");
        }
    }
}

impl Remote {
    /// Sends an operation on a hold. If there is no reply after half of the remaining time, or if the connection is lost, repeats it.
    pub(super) async fn send_repeatedly(
        self: &Arc<Self>,
        check: &Check,
        deadline: Option<Duration>,
    ) -> Result<CheckShares, StoreError> {
        let time = self.shared.options.deadline_within(deadline);
        let sent_at = Instant::now();
        let left = || (sent_at + time).saturating_duration_since(Instant::now());
        let mut first = pin!(self.send(check, Some(time)));
        let (mut attempts, sent) = match ready_by(sent_at + time / 2, &mut first).await {
            Some(answer) => (Attempts::new(answer), 1),
            None => {
                let second = pin!(self.send(check, Some(left())));
                match select(first, second).await.factor_first() {
                    (Ok(shares), _) if shares.is_allowed(check) => return Ok(shares),
                    (answer, other) => (Attempts::new(answer).and(other.await, check), 2),
                }
            }
        };
        for _ in sent..MAX_ATTEMPTS {
            if !matches!(attempts.answer, Err(StoreError::Ambiguous(_))) || left().is_zero() {
                break;
            }
            attempts = attempts.and(self.send(check, Some(left())).await, check);
        }
        let Attempts { answer, is_unanswered } = attempts;
        if is_unanswered && answer.as_ref().is_ok_and(|shares| !shares.is_allowed(check)) {
            self.release_unanswered(check);
        }
        answer
    }

    /// Releases a hold that was denied, but that an attempt without an answer may have made after the denial. A caller may repeat its own
    /// id: then the release would end the new hold, so the first one expires instead.
    fn release_unanswered(self: &Arc<Self>, hold: &Check) {
        let Some(HoldCall { id, operation: HoldOperation::Hold { .. } }) = hold.hold() else { return };
        if id.is_random() {
            let free =
                |tier: &Tier| Tier { key: tier.key.clone(), terms: Terms { cost: Cost::ZERO, ..tier.terms } };
            let tiers = hold.tiers().iter().map(free).collect();
            let release = Check::new(Operation::Charge, tiers).expect("the tiers of a check are a check");
            let operation = HoldOperation::Settle { kept: 0, max_excess: None };
            self.queue_settlement(&release.with_hold(id.clone(), operation), QueuedHold::Possible);
        }
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
            Ok(shares) => {
                self.shared.fallback.record_adjustment(check, &shares);
                return Ok(merge(shares, here));
            }
            Err(error) => error,
        };
        let is_end =
            matches!(check.hold(), Some(hold) if !matches!(hold.operation, HoldOperation::Renew { .. }));
        let is_done = |here: &CheckShares| here.holds.iter().all(|hold| hold.outcome != HoldOutcome::Unknown);
        let here = here.filter(is_done);
        let hold = if here.is_some() { QueuedHold::Possible } else { QueuedHold::Expected };
        if !(is_end && is_temporary(&error) && self.queue_settlement(check, hold)) {
            // return the error even if this process had the hold: the store may have it, too
            return Err(error);
        }
        Ok(here.unwrap_or_else(CheckShares::without_answers))
    }

    /// Settles a hold in this process only.
    pub(crate) fn adjust_fallback_hold(&self, check: &Check) {
        self.shared.fallback.adjust_hold(check);
    }

    /// Queues a settlement. Returns false if the queue is full, or if there is no runtime.
    fn queue_settlement(self: &Arc<Self>, check: &Check, hold: QueuedHold) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let parts = self.parts_by_server(check);
        let mut queue = self.settlements.queue.lock();
        let tiers = check.tiers().len();
        if !queue.has_room(parts.len(), tiers) {
            return false;
        }
        queue.tiers += tiers;
        let until = Instant::now() + MAX_AGE;
        queue.waiting.extend(parts.into_iter().map(|check| Queued { check, until, hold }));
        self.start_sender(&mut queue, &runtime);
        true
    }

    /// Sends queued settlements if the runtime that did so has stopped.
    pub(crate) fn resume_settlements(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut queue = self.settlements.queue.lock();
        if !queue.waiting.is_empty() {
            self.start_sender(&mut queue, &runtime);
        }
    }

    fn start_sender(self: &Arc<Self>, queue: &mut Queue, runtime: &Handle) {
        if !queue.is_sending {
            queue.is_sending = true;
            runtime.spawn(Sender { remote: Arc::downgrade(self), has_ended: false }.run());
        }
    }

    /// Splits a settlement by server, so that a server that is down does not delay the settlement on the others.
    fn parts_by_server(&self, check: &Check) -> Vec<Check> {
        let mut places: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (place, tier) in check.tiers().iter().enumerate() {
            places.entry(self.shared.store.server(&tier.key)).or_default().push(place);
        }
        places.values().map(|places| part_of(check, places)).collect()
    }

    /// Returns the length of the queue, and the number of queued settlements that were late or had no effect.
    pub(super) fn settlement_stats(&self) -> HoldStats {
        let Settlements { queue, late, unknown } = &self.settlements;
        HoldStats {
            waiting: queue.lock().len(),
            late: late.load(Ordering::Relaxed),
            unknown: unknown.load(Ordering::Relaxed),
            ..HoldStats::default()
        }
    }

    /// Returns the next queued settlements that are not too old; `None` if there are none: then the sending task ends.
    fn take_queued(&self) -> Option<SentSettlements<'_>> {
        let mut queue = self.settlements.queue.lock();
        let (now, before) = (Instant::now(), queue.waiting.len());
        queue.waiting.retain(|queued| queued.until > now);
        let expired = before - queue.waiting.len();
        queue.tiers = queue.waiting.iter().map(Queued::tiers).sum();
        let count = queue.waiting.len().min(MAX_SENT);
        queue.is_sending = count > 0;
        queue.in_flight = count;
        let queued: Vec<Queued> = queue.waiting.drain(..count).collect();
        drop(queue);
        if expired > 0 {
            tracing::warn!(
                "{expired} queued settlements dropped after {MAX_AGE:?} without an answer; their holds will expire"
            );
        }
        (count > 0).then_some(SentSettlements { settlements: &self.settlements, queued })
    }
}

/// Sends queued settlements until there are none, or the limiter is dropped.
struct Sender {
    remote: Weak<Remote>,
    has_ended: bool,
}

impl Sender {
    async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        loop {
            sleep(pause).await;
            let Some(remote) = self.remote.upgrade() else { return };
            let Some(mut sent) = remote.take_queued() else {
                self.has_ended = true;
                return;
            };
            let answers = sent.queued.iter().map(async |queued| {
                let answer = remote.send(&queued.check, None).await;
                if let Ok(shares) = &answer {
                    remote.shared.fallback.record_adjustment(&queued.check, shares);
                }
                answer
            });
            let answers = join_all(answers).await;
            remote.settlements.record(&sent.queued, &answers);
            let mut answers = answers.iter();
            sent.queued.retain(|_| {
                let answer = answers.next().expect("every settlement has an answer");
                answer.as_ref().is_err_and(is_temporary)
            });
            pause = if sent.queued.is_empty() {
                Duration::ZERO
            } else {
                LONGEST_PAUSE.min(pause.max(FIRST_PAUSE) * 2)
            };
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.has_ended
            && let Some(remote) = self.remote.upgrade()
        {
            // the runtime has stopped: a task on another one may take over
            remote.settlements.queue.lock().is_sending = false;
        }
    }
}

/// Settlements that are being sent. When it is dropped, those that are left are queued again: they failed, or the runtime has stopped.
struct SentSettlements<'a> {
    settlements: &'a Settlements,
    queued: Vec<Queued>,
}

impl Drop for SentSettlements<'_> {
    fn drop(&mut self) {
        let mut queue = self.settlements.queue.lock();
        queue.in_flight = 0;
        // behind the others, so that a server that is down does not delay settlements for other servers
        queue.waiting.extend(self.queued.drain(..));
        queue.tiers = queue.waiting.iter().map(Queued::tiers).sum();
    }
}

/// The outcome of some attempts at one operation.
struct Attempts {
    answer: Result<CheckShares, StoreError>,
    /// Whether one of them has no answer, so that it may have had an effect.
    is_unanswered: bool,
}

impl Attempts {
    fn new(answer: Result<CheckShares, StoreError>) -> Self {
        let is_unanswered = matches!(answer, Err(StoreError::Ambiguous(_)));
        Self { answer, is_unanswered }
    }

    /// Adds the answer of another attempt. If there are only errors, and an attempt may have had an effect, the error is ambiguous.
    fn and(self, other: Result<CheckShares, StoreError>, check: &Check) -> Self {
        let other = Self::new(other);
        let is_unanswered = self.is_unanswered || other.is_unanswered;
        let answer = match (self.answer, other.answer) {
            (_, Ok(shares)) if shares.is_allowed(check) => Ok(shares),
            (Ok(shares), _) | (_, Ok(shares)) => Ok(shares),
            (Err(error @ StoreError::Ambiguous(_)), Err(other)) if is_temporary(&other) => Err(error),
            (Err(_), Err(error)) => Err(error),
        };
        Self { answer, is_unanswered }
    }
}

/// Returns the operation on some of the tiers.
fn part_of(check: &Check, places: &[usize]) -> Check {
    let tiers = places.iter().map(|place| check.tiers()[*place].clone()).collect();
    let part = Check::new(check.operation(), tiers).expect("some tiers of a check are a check");
    match check.hold() {
        Some(HoldCall { id, operation }) => part.with_hold(id.clone(), operation.for_tiers(places)),
        None => part,
    }
}

/// Whether a later attempt may succeed.
fn is_temporary(error: &StoreError) -> bool {
    !matches!(error, StoreError::Unreadable { .. } | StoreError::TooLarge { .. })
}

/// Replaces the results of tiers whose hold exists only in this process. The store reported no usage for them.
fn merge(mut shares: CheckShares, here: Option<CheckShares>) -> CheckShares {
    for (position, hold) in here.map(|here| here.holds).into_iter().flatten().enumerate() {
        if hold.outcome != HoldOutcome::Unknown && shares.holds[position].outcome == HoldOutcome::Unknown {
            shares.holds[position] = hold;
            shares.shares.retain(|(other, _)| *other != position);
        }
    }
    shares
}
