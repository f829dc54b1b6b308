//! The checks that wait for one server, in the order of arrival, and what is known of the calls to it. One lock guards all
//! of it; nothing here waits.

use std::{collections::VecDeque, hash::BuildHasher, sync::Arc, time::Duration};

use hashbrown::HashTable;
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::Instant};
use tollgate_core::{Answer, Operation, Timestamp};

use super::{
    Position,
    call_limit::{CallLimit, Sent},
    round_trips::RoundTrips,
};
use crate::{check::Check, hashing::RandomKeyedHash, stats::Tally, store::StoreError};

/// The most tiers of one call, which bounds how long other clients of that Redis wait: about 0.3 ms.
const MAX_CALL_TIERS: usize = 64;
/// The most callers that wait. A longer queue means that the store is down.
const MAX_WAITING: usize = 16_384;
/// How long a flush may be pending until another task takes over, since the runtime of the first may no longer be driven.
const MAX_FLUSH: Duration = Duration::from_millis(10);

/// The checks that wait for one server, and the calls to it.
pub(super) struct Queue {
    state: Mutex<State>,
    hasher: RandomKeyedHash,
}

struct State {
    /// In the order of arrival; the first has the number `taken`.
    groups: VecDeque<Group>,
    taken: usize,
    /// The numbers of the groups that further equal checks may join, by their hash.
    open: HashTable<(u64, usize)>,
    callers: usize,
    tiers: usize,
    /// Since when a task is about to send what waits, if one is.
    flushing_since: Option<Instant>,
    calls: CallLimit,
    round_trips: RoundTrips,
    last_reply: Instant,
    last_failure: Instant,
}

/// Equal checks that wait.
struct Group {
    check: Check,
    hash: u64,
    callers: Vec<Caller>,
}

/// Where a caller waits for its answer.
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

/// Checks that are sent in one call, and the callers of each.
pub(super) struct Batch {
    pub(super) checks: Vec<Check>,
    pub(super) callers: Vec<Vec<Caller>>,
    /// The latest deadline of a caller.
    pub(super) deadline: Instant,
}

/// What the end of a call tells about the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallEnd {
    Replied,
    NoReply,
}

impl CallEnd {
    pub(super) fn of<T>(outcomes: &[Result<T, StoreError>]) -> Self {
        let is_reply = |outcome: &Result<T, StoreError>| {
            matches!(outcome, Ok(_) | Err(StoreError::Late(_) | StoreError::Rejected { .. }))
        };
        if outcomes.iter().any(is_reply) { Self::Replied } else { Self::NoReply }
    }
}

/// What a caller has to do next.
pub(super) enum Joined {
    /// Nothing is in flight and nothing waits: the caller makes the call.
    Idle(Sent),
    /// The caller waits for a batch, in the group with this number.
    Waits(oneshot::Receiver<Result<GroupAnswer, StoreError>>, usize),
    /// The caller waits for a batch, and starts the flush that sends it.
    Flushes(oneshot::Receiver<Result<GroupAnswer, StoreError>>, usize),
}

/// What follows from the end of a call.
pub(super) struct AfterCall {
    /// Whether the holder of the call has to start a flush.
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
        };
        Self { state: Mutex::new(state), hasher: RandomKeyedHash::default() }
    }

    pub(super) fn join(&self, check: &Check, deadline: Instant, tally: &Tally) -> Result<Joined, StoreError> {
        let hash = self.hasher.hash_one(check);
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.callers >= MAX_WAITING {
            drop(state);
            return Err(StoreError::NotRun(format!("{MAX_WAITING} callers wait for the store already")));
        }
        if state.calls.in_flight() == 0 && state.groups.is_empty() {
            return Ok(Joined::Idle(state.calls.send(now)));
        }
        let expected = state.expected_wait() + state.round_trips.lower_quartile(now).unwrap_or_default();
        if state.calls.in_flight() > 0 && now + expected > deadline {
            drop(state);
            tally.unsent(1);
            return Err(too_short(expected));
        }
        let (sender, answer) = oneshot::channel();
        let group = state.add(check, hash, Caller { answer: sender, deadline });
        Ok(if state.start_flush(now) { Joined::Flushes(answer, group) } else { Joined::Waits(answer, group) })
    }

    /// Whether a group was not sent yet.
    pub(super) fn is_waiting(&self, group: usize) -> bool {
        group >= self.state.lock().taken
    }

    /// Returns the next batch if the limit admits a call; if not, the flush is over. Callers that have gone away are not in
    /// it, nor those that have less time left than a round trip takes.
    pub(super) fn take_batch(&self, now: Instant, tally: &Tally) -> Option<(Batch, Sent)> {
        let mut unsent = Unsent::default();
        let mut state = self.state.lock();
        let expected = state.round_trips.lower_quartile(now).unwrap_or_default();
        let taken = state.take_batch(now, expected, &mut unsent);
        if taken.is_none() {
            state.flushing_since = None;
        }
        drop(state);
        unsent.answer(expected, tally);
        taken
    }

    pub(super) fn end_call(&self, call: Sent, end: CallEnd, tiers: usize, now: Instant) -> AfterCall {
        let mut state = self.state.lock();
        match end {
            CallEnd::Replied => {
                state.last_reply = now;
                state.round_trips.note(now.duration_since(call.at), now);
                state.calls.replied(call, tiers, now);
            }
            CallEnd::NoReply => state.calls.abandon(),
        }
        AfterCall {
            must_flush: !state.groups.is_empty() && state.start_flush(now),
            round_trip: state.round_trips.lower_quartile(now),
        }
    }

    /// When the silence of the server becomes a failure, for a call that was sent then.
    pub(super) fn silent_at(&self, sent: Instant, deadline: Duration) -> Instant {
        self.state.lock().silent_at(sent, deadline)
    }

    /// Counts the silence of the server since a call was sent as a failure, once per interval. Returns whether it did.
    pub(super) fn count_silence(&self, sent: Instant, deadline: Duration, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_silent = now >= state.silent_at(sent, deadline);
        if is_silent {
            state.last_failure = now;
        }
        is_silent
    }

    /// Counts the failure of a call, unless another one was counted since it was sent: what ends many calls at once is one
    /// failure. Returns whether it did.
    pub(super) fn count_failure(&self, sent: Instant, now: Instant) -> bool {
        let mut state = self.state.lock();
        let is_first = sent >= state.last_failure;
        if is_first {
            state.last_failure = now;
        }
        is_first
    }

    /// Ends a flush that cannot go on; the next caller starts another one.
    pub(super) fn end_flush(&self) {
        self.state.lock().flushing_since = None;
    }

    /// Forgets how long calls took: the server was away.
    pub(super) fn forget_round_trips(&self) {
        self.state.lock().round_trips.forget();
    }

    /// Admits so many calls from now on.
    #[cfg(test)]
    pub(super) fn set_limit(&self, limit: usize) {
        self.state.lock().calls.set_limit(limit);
    }

    /// What waits and what is in flight now.
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

/// What waits for one server, and what is in flight to it.
pub(super) struct Load {
    pub(super) waiting: usize,
    pub(super) in_flight: usize,
    pub(super) limit: usize,
    pub(super) round_trip: Option<Duration>,
}

fn too_short(expected: Duration) -> StoreError {
    StoreError::NotRun(format!("less time is left than the store takes now ({expected:.1?})"))
}

/// Callers that a batch leaves out.
#[derive(Default)]
struct Unsent {
    /// They have gone away. Dropped outside of the lock.
    gone: Vec<Caller>,
    /// They have less time left than a round trip takes.
    short: Vec<Caller>,
}

impl Unsent {
    fn answer(self, expected: Duration, tally: &Tally) {
        if self.short.is_empty() {
            return;
        }
        tally.unsent(self.short.len() as u64);
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
            unsent.gone.extend(callers.extract_if(.., |caller| caller.answer.is_closed()));
            let is_short = |caller: &mut Caller| now + expected > caller.deadline;
            let is_last = tiers == 0 && self.groups.is_empty();
            if is_idle && is_last && callers.iter_mut().all(&is_short) {
                // one call at a time is always made, or a store that has become faster would not be noticed
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
        (!batch.checks.is_empty()).then(|| (batch, self.calls.send(now)))
    }

    fn silent_at(&self, sent: Instant, deadline: Duration) -> Instant {
        self.last_reply.max(self.last_failure).max(sent) + self.round_trips.longest_silence(deadline)
    }

    /// How long a caller that joins now waits until it is sent.
    fn expected_wait(&self) -> Duration {
        let (limit, batches) = (self.calls.limit(), self.tiers / MAX_CALL_TIERS);
        if self.calls.in_flight() < limit {
            return Duration::ZERO;
        }
        let round_trip = self.round_trips.smoothed().unwrap_or_default();
        round_trip * u32::try_from(batches).unwrap_or(u32::MAX) / u32::try_from(limit).unwrap_or(u32::MAX)
    }

    /// Whether the caller has to start a flush: the limit admits a call, and no other task is about to send it.
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
        if check.operation() == Operation::Check {
            self.open.insert_unique(hash, (hash, number), |&(hash, _)| hash);
        }
        self.tiers += check.tiers().len();
        self.groups.push_back(Group { check: check.clone(), hash, callers: vec![caller] });
        number
    }

    fn take_first(&mut self) -> Group {
        let group = self.groups.pop_front().expect("the caller has seen a first group");
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
        let count = u32::try_from(callers.len()).expect("fewer than MAX_WAITING wait");
        self.checks.push(check.times(count));
        self.callers.push(callers);
    }
}
