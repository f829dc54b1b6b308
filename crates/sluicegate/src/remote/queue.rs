//! The queue of checks for one server, in order of arrival, and the measurements of its calls. One lock guards everything; nothing
//! here waits.

use std::{collections::VecDeque, hash::BuildHasher, sync::Arc, time::Duration};

use hashbrown::HashTable;
use parking_lot::Mutex;
use sluicegate_core::{Answer, Operation, Timestamp};
use tokio::{sync::oneshot, time::Instant};

use super::{
    Position,
    call_limit::{CallLimit, Sent},
    round_trips::RoundTrips,
};
use crate::{check::Check, hashing::RandomKeyedHash, stats::RemoteCounters, store::StoreError};

/// The maximum number of tiers in one call. This bounds the time for which a call blocks other clients of that Redis:
/// about 0.3 ms.
const MAX_CALL_TIERS: usize = 64;
/// The maximum number of queued callers. A longer queue means that the store is down.
const MAX_WAITING: usize = 16_384;
/// How long a flush may be pending before another task takes over. The runtime of the first task may have stopped.
const MAX_FLUSH: Duration = Duration::from_millis(10);

/// The queued checks for one server, and the calls to it.
pub(super) struct Queue {
    state: Mutex<State>,
    hasher: RandomKeyedHash,
}

struct State {
    /// In order of arrival; the first has the number `taken`.
    groups: VecDeque<Group>,
    taken: usize,
    /// The numbers of the groups that further equal checks may join, by their hash.
    open: HashTable<(u64, usize)>,
    callers: usize,
    tiers: usize,
    /// When the current flush started, if there is one.
    flushing_since: Option<Instant>,
    calls: CallLimit,
    round_trips: RoundTrips,
    last_reply: Instant,
    last_failure: Instant,
    /// Since when calls have been unanswered: when the first one was sent, or the last reply if that was later.
    unanswered_since: Option<Instant>,
}

/// Equal checks in the queue.
struct Group {
    check: Check,
    hash: u64,
    callers: Vec<Caller>,
}

/// A queued caller.
pub(super) struct Caller {
    pub(super) answer: oneshot::Sender<Result<GroupAnswer, StoreError>>,
    deadline: Instant,
}

/// The answer to a group, and the position of this caller in it.
pub(super) struct GroupAnswer {
    pub(super) answers: Arc<[Answer]>,
    pub(super) at: Timestamp,
    pub(super) position: Position,
}

/// The checks of one call, and the callers of each.
pub(super) struct Batch {
    pub(super) checks: Vec<Check>,
    pub(super) callers: Vec<Vec<Caller>>,
    /// The latest deadline of a caller.
    pub(super) deadline: Instant,
}

/// Whether a call ended with a reply of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallEnd {
    Replied,
    NoReply,
}

impl CallEnd {
    pub(super) fn from_outcomes<T>(outcomes: &[Result<T, StoreError>]) -> Self {
        let is_reply = |outcome: &Result<T, StoreError>| {
            use StoreError::{Late, Rejected, Unreadable};
            matches!(outcome, Ok(_) | Err(Late(_) | Rejected { .. } | Unreadable { .. }))
        };
        if outcomes.iter().any(is_reply) { Self::Replied } else { Self::NoReply }
    }
}

/// What a caller does next.
pub(super) enum Joined {
    /// No call is in flight and the queue is empty: the caller makes the call.
    Idle(Sent),
    /// The caller is queued in the group with this number.
    Queued(oneshot::Receiver<Result<GroupAnswer, StoreError>>, usize),
    /// The caller is queued and must start a flush.
    MustFlush(oneshot::Receiver<Result<GroupAnswer, StoreError>>, usize),
}

/// What the holder of a call does after it has ended.
pub(super) struct AfterCall {
    /// Whether to start a flush.
    pub(super) must_flush: bool,
    pub(super) round_trip: Option<Duration>,
}

impl Queue {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let state = State {
            groups: VecDeque::new(),
            taken: 0,
            open: HashTable::new(),
            callers: 0,
            tiers: 0,
            flushing_since: None,
            calls: CallLimit::new(now),
            round_trips: RoundTrips::default(),
            last_reply: now,
            last_failure: now,
            unanswered_since: None,
        };
        Self { state: Mutex::new(state), hasher: RandomKeyedHash::default() }
    }

    pub(super) fn join(
        &self,
        check: &Check,
        deadline: Instant,
        counters: &RemoteCounters,
    ) -> Result<Joined, StoreError> {
        let hash = self.hasher.hash_one(check);
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.callers >= MAX_WAITING {
            drop(state);
            return Err(StoreError::NotRun(format!(
                "{MAX_WAITING} callers are already waiting for the store"
            )));
        }
        if state.calls.in_flight() == 0 && state.groups.is_empty() {
            return Ok(Joined::Idle(state.send(now)));
        }
        let expected = state.expected_wait() + state.round_trips.lower_quartile(now).unwrap_or_default();
        if state.calls.in_flight() > 0 && now + expected > deadline {
            drop(state);
            counters.record_unsent(1);
            return Err(too_short(expected));
        }
        let (sender, answer) = oneshot::channel();
        let group = state.add(check, hash, Caller { answer: sender, deadline });
        Ok(if state.start_flush(now) {
            Joined::MustFlush(answer, group)
        } else {
            Joined::Queued(answer, group)
        })
    }

    /// Whether a group is still queued.
    pub(super) fn is_waiting(&self, group: usize) -> bool {
        group >= self.state.lock().taken
    }

    /// Returns the next batch if the limit admits a call; otherwise the flush ends. Callers that were dropped, or have less time left
    /// than a round trip takes, are excluded.
    pub(super) fn take_batch(&self, now: Instant, counters: &RemoteCounters) -> Option<(Batch, Sent)> {
        let mut unsent = Unsent::default();
        let mut state = self.state.lock();
        let expected = state.round_trips.lower_quartile(now).unwrap_or_default();
        let taken = state.take_batch(now, expected, &mut unsent);
        if taken.is_none() {
            state.flushing_since = None;
        }
        drop(state);
        unsent.answer(expected, counters);
        taken
    }

    pub(super) fn end_call(&self, call: Sent, end: CallEnd, tiers: usize, now: Instant) -> AfterCall {
        let mut state = self.state.lock();
        match end {
            CallEnd::Replied => {
                state.last_reply = now;
                state.round_trips.record(now.duration_since(call.at), now);
                state.calls.replied(call, tiers, now);
                state.unanswered_since = (state.calls.in_flight() > 0).then_some(now);
            }
            CallEnd::NoReply => state.calls.abandon(),
        }
        AfterCall {
            must_flush: !state.groups.is_empty() && state.start_flush(now),
            round_trip: state.round_trips.lower_quartile(now),
        }
    }

    /// Returns when the absence of a reply becomes a failure, for a call sent at `sent`.
    pub(super) fn silent_at(&self, sent: Instant, deadline: Duration) -> Instant {
        self.state.lock().silent_at(sent, deadline)
    }

    /// Counts a failure if the server has not replied since a call was sent, once per interval. Returns how long the server has not
    /// replied, if it did.
    pub(super) fn count_silence(&self, sent: Instant, deadline: Duration, now: Instant) -> Option<Duration> {
        let mut state = self.state.lock();
        if now < state.silent_at(sent, deadline) {
            return None;
        }
        state.last_failure = now;
        Some(now.duration_since(state.unanswered_since.unwrap_or(sent)))
    }

    /// Counts the failure of a call, unless another failure was counted since it was sent: an event that ends many
    /// calls counts as one failure. Returns whether it did.
    pub(super) fn count_failure(&self, sent: Instant, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_first = sent >= state.last_failure;
        if is_first {
            state.last_failure = now;
        }
        is_first
    }

    /// Ends a flush that cannot continue. The next caller starts another one.
    pub(super) fn end_flush(&self) {
        self.state.lock().flushing_since = None;
    }

    /// Discards the measured round trips after an outage, and ends the silence.
    pub(super) fn end_outage(&self) {
        let mut state = self.state.lock();
        state.round_trips.clear();
        state.unanswered_since = None;
    }

    /// Sets the call limit.
    #[cfg(test)]
    pub(super) fn set_limit(&self, limit: usize) {
        self.state.lock().calls.set_limit(limit);
    }

    /// Returns the current load.
    pub(super) fn load(&self) -> Load {
        let state = self.state.lock();
        Load {
            waiting: state.callers,
            in_flight: state.calls.in_flight(),
            limit: state.calls.limit(),
            round_trip: state.round_trips.lower_quartile(Instant::now()),
        }
    }
}

/// Queued callers and calls in flight of one server.
pub(super) struct Load {
    pub(super) waiting: usize,
    pub(super) in_flight: usize,
    pub(super) limit: usize,
    pub(super) round_trip: Option<Duration>,
}

fn too_short(expected: Duration) -> StoreError {
    StoreError::NotRun(format!("less time left than a round trip takes now ({expected:.1?})"))
}

/// Callers that are excluded from a batch.
#[derive(Default)]
struct Unsent {
    /// Their futures were dropped. Freed outside of the lock.
    dropped: Vec<Caller>,
    /// They have less time left than a round trip takes.
    short: Vec<Caller>,
}

impl Unsent {
    fn answer(self, expected: Duration, counters: &RemoteCounters) {
        if self.short.is_empty() {
            return;
        }
        counters.record_unsent(self.short.len() as u64);
        let error = too_short(expected);
        for caller in self.short {
            let _ = caller.answer.send(Err(error.clone()));
        }
    }
}

impl State {
    fn take_batch(&mut self, now: Instant, expected: Duration, unsent: &mut Unsent) -> Option<(Batch, Sent)> {
        if self.groups.is_empty() || !self.calls.admits(now) {
            return None;
        }
        let is_idle = self.calls.in_flight() == 0;
        let mut batch = Batch { checks: Vec::new(), callers: Vec::new(), deadline: now };
        let mut tiers = 0;
        while let Some(group) = self.groups.front()
            && (tiers == 0 || tiers + group.check.tiers().len() <= MAX_CALL_TIERS)
        {
            let Group { check, mut callers, .. } = self.take_first();
            unsent.dropped.extend(callers.extract_if(.., |caller| caller.answer.is_closed()));
            let is_short = |caller: &mut Caller| now + expected > caller.deadline;
            let is_last = tiers == 0 && self.groups.is_empty();
            if is_idle && is_last && callers.iter_mut().all(&is_short) {
                // one call at a time is always made; otherwise a store that has become faster would not be detected
                let last = callers.pop();
                unsent.short.append(&mut callers);
                callers.extend(last);
            } else {
                unsent.short.extend(callers.extract_if(.., is_short));
            }
            if callers.is_empty() {
                continue;
            }
            tiers += check.tiers().len();
            batch.push(check, callers);
        }
        (!batch.checks.is_empty()).then(|| (batch, self.send(now)))
    }

    fn send(&mut self, now: Instant) -> Sent {
        self.unanswered_since.get_or_insert(now);
        self.calls.send(now)
    }

    fn silent_at(&self, sent: Instant, deadline: Duration) -> Instant {
        self.last_reply.max(self.last_failure).max(sent) + self.round_trips.longest_silence(deadline)
    }

    /// Estimates how long a check that is queued now waits before it is sent.
    fn expected_wait(&self) -> Duration {
        let (limit, batches) = (self.calls.limit(), self.tiers / MAX_CALL_TIERS);
        if self.calls.in_flight() < limit {
            return Duration::ZERO;
        }
        let round_trip = self.round_trips.smoothed().unwrap_or_default();
        round_trip * u32::try_from(batches).unwrap_or(u32::MAX) / u32::try_from(limit).unwrap_or(u32::MAX)
    }

    /// Returns whether the caller must start a flush: the limit admits a call, and no other task is flushing.
    fn start_flush(&mut self, now: Instant) -> bool {
        let is_flushing = self.flushing_since.is_some_and(|since| now.duration_since(since) < MAX_FLUSH);
        let starts = !is_flushing && self.calls.admits(now);
        if starts {
            self.flushing_since = Some(now);
        }
        starts
    }

    /// Adds a caller to the group of its check. Returns the number of the group.
    fn add(&mut self, check: &Check, hash: u64, caller: Caller) -> usize {
        self.callers += 1;
        let is_equal = |&(other, number): &(u64, usize)| {
            other == hash && self.groups[number - self.taken].check == *check
        };
        if let Some(&(_, number)) = self.open.find(hash, is_equal) {
            self.groups[number - self.taken].callers.push(caller);
            return number;
        }
        let number = self.taken + self.groups.len();
        if check.operation() == Operation::Check && check.hold().is_none() {
            self.open.insert_unique(hash, (hash, number), |&(hash, _)| hash);
        }
        self.tiers += check.tiers().len();
        self.groups.push_back(Group { check: check.clone(), hash, callers: vec![caller] });
        number
    }

    fn take_first(&mut self) -> Group {
        let group = self.groups.pop_front().expect("the queue is not empty");
        let number = self.taken;
        self.taken += 1;
        if let Ok(open) = self.open.find_entry(group.hash, |&(_, other)| other == number) {
            open.remove();
        }
        self.callers -= group.callers.len();
        self.tiers -= group.check.tiers().len();
        group
    }
}

impl Batch {
    fn push(&mut self, check: Check, callers: Vec<Caller>) {
        let latest = callers.iter().map(|caller| caller.deadline).max();
        self.deadline = self.deadline.max(latest.unwrap_or(self.deadline));
        let count = u32::try_from(callers.len()).expect("at most MAX_WAITING callers are queued");
        self.checks.push(check.times(count));
        self.callers.push(callers);
    }
}
