//! Forms batches of the checks that wait for one server, and sends them.
//!
//! There is no timer. An idle path sends at once. What arrives while as many calls are in flight as [`CallLimit`] admits
//! forms the next batch; so does what arrives together: callers that are answered together usually ask again together.
//! Equal checks wait as one group and become "up to n", first come, first served.
//!
//! A call belongs to no single caller. A caller that goes away while it waits is not charged, and one that goes away
//! later does not end the call.

use std::{
    collections::VecDeque,
    future::Future,
    hash::BuildHasher,
    mem,
    pin::Pin,
    slice,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures_util::future::BoxFuture;
use hashbrown::HashTable;
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::oneshot, task::yield_now, time::Instant};
use tollgate_core::{Answer, Operation, Timestamp, step::granted};

use super::{
    Handout, Lane, Place, Verdict,
    call_limit::{CallLimit, Sent},
    round_trips::RoundTrips,
};
use crate::{
    check::Check,
    hashing::Keyed,
    stats::Tally,
    store::{Store, StoreError},
};

/// The most tiers of one call, which bounds how long other clients of that Redis wait: about 0.3 ms.
const MAX_CALL_TIERS: usize = 64;
/// The most callers that wait. More than that is no queue but a store that is down.
const MAX_WAITING: usize = 16_384;

/// The checks that wait for one server, and the calls to it.
pub(super) struct Batcher {
    state: Mutex<State>,
    hasher: Keyed,
}

struct State {
    /// In the order of arrival; the first has the number `taken`.
    groups: VecDeque<Group>,
    taken: usize,
    /// The numbers of the groups that further equal checks may join, by their hash.
    open: HashTable<(u64, usize)>,
    callers: usize,
    /// Whether a task is about to send what waits.
    is_flushing: bool,
    calls: CallLimit,
    round_trips: RoundTrips,
    /// When the server last replied, or its silence was last counted as a failure.
    last_sign: Instant,
}

/// Equal checks that wait.
struct Group {
    check: Check,
    hash: u64,
    callers: Vec<Caller>,
}

/// Where a caller waits for its answer.
struct Caller {
    answer: oneshot::Sender<Result<Handed, StoreError>>,
    deadline: Instant,
}

/// The answer to a group, and which of its callers this one is.
struct Handed {
    answers: Arc<[Answer]>,
    at: Timestamp,
    place: Place,
}

/// Checks that are sent in one call, and the callers of each.
struct Batch<S: Store> {
    checks: Vec<Check>,
    callers: Vec<Vec<Caller>>,
    /// The latest deadline of a caller.
    deadline: Instant,
    call: CallInFlight<S>,
}

/// What the end of a call tells about the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallEnd {
    Replied,
    NoReply,
}

/// Asks the store, together with other callers where that saves a call.
pub(super) async fn ask<S: Store>(
    lane: &Arc<Lane<S>>,
    check: &Check,
    deadline: Instant,
) -> Result<Verdict, StoreError> {
    let answer = match lane.batcher.join(check, deadline, &lane.shared.tally)? {
        Joined::Idle(sent) => return OwnCall::new(lane, check.clone(), deadline, sent).await,
        Joined::Waits(answer) => answer,
        Joined::Flushes(answer) => {
            spawn_flush(Flush::of(lane));
            answer
        }
    };
    let handed =
        answer.await.map_err(|_| StoreError::Ambiguous("the call ended without an answer".to_owned()))??;
    Ok(Verdict::of(check, &handed.answers, handed.place, handed.at))
}

/// A call for one caller, made in its own task: handing it to another one and back costs a single caller 30 % more CPU
/// time. If the caller goes away, another task goes on with it.
struct OwnCall<S: Store> {
    lane: Arc<Lane<S>>,
    call: Option<BoxFuture<'static, Result<Verdict, StoreError>>>,
}

impl<S: Store> OwnCall<S> {
    fn new(lane: &Arc<Lane<S>>, check: Check, deadline: Instant, sent: Sent) -> Self {
        let call = CallInFlight { lane: Arc::clone(lane), sent, has_ended: false };
        let call = Box::pin(async move {
            let outcome = call.lane.call(slice::from_ref(&check), deadline, sent.at).await.pop();
            let outcome = outcome.expect("one check has one outcome");
            if let Some(flush) = call.end(CallEnd::of(slice::from_ref(&outcome)), check.tiers().len()) {
                spawn_flush(flush);
            }
            let (answers, at) = outcome?;
            Ok(Verdict::of(&check, &answers, Place::ALONE, at))
        });
        Self { lane: Arc::clone(lane), call: Some(call) }
    }
}

impl<S: Store> Future for OwnCall<S> {
    type Output = Result<Verdict, StoreError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let call = self.call.as_mut().expect("a call is not polled after its end");
        let answer = ready!(call.as_mut().poll(context));
        self.call = None;
        Poll::Ready(answer)
    }
}

impl<S: Store> Drop for OwnCall<S> {
    fn drop(&mut self) {
        if let Some(call) = self.call.take()
            && let Ok(runtime) = Handle::try_current()
        {
            let lane = Arc::clone(&self.lane);
            runtime.spawn(async move {
                let is_answered = call.await.is_ok();
                lane.shared.tally.answered_late(u64::from(is_answered));
            });
        }
    }
}

fn spawn_flush<S: Store>(flush: Flush<S>) {
    tokio::spawn(flush_and_send(flush));
}

fn spawn_send<S: Store>(batch: Batch<S>) {
    tokio::spawn(async move {
        if let Some(flush) = send(batch).await {
            flush_and_send(flush).await;
        }
    });
}

/// Sends what waits, as far as the limit admits, until nothing waits or other calls will go on.
async fn flush_and_send<S: Store>(mut flush: Flush<S>) {
    loop {
        // what other tasks ask that are ready to run joins the batch
        yield_now().await;
        let Some(mut batch) = flush.next_batch() else { return };
        while let Some(next) = flush.next_batch() {
            spawn_send(mem::replace(&mut batch, next));
        }
        match send(batch).await {
            Some(next) => flush = next,
            None => return,
        }
    }
}

/// Makes one call and answers its callers. Returns the duty to send what waits, if that has none.
async fn send<S: Store>(batch: Batch<S>) -> Option<Flush<S>> {
    let Batch { checks, callers, deadline, call } = batch;
    let lane = Arc::clone(&call.lane);
    let outcomes = lane.call(&checks, deadline, call.sent.at).await;
    let tiers = checks.iter().map(|check| check.tiers().len()).sum();
    let flush = call.end(CallEnd::of(&outcomes), tiers);
    let mut late = 0;
    for ((check, callers), outcome) in checks.iter().zip(callers).zip(outcomes) {
        late += hand_out(check, callers, outcome);
    }
    lane.shared.tally.answered_late(late);
    flush
}

impl CallEnd {
    fn of<T>(outcomes: &[Result<T, StoreError>]) -> Self {
        let is_reply = |outcome: &Result<T, StoreError>| {
            matches!(outcome, Ok(_) | Err(StoreError::Late(_) | StoreError::Refused { .. }))
        };
        if outcomes.iter().any(is_reply) { Self::Replied } else { Self::NoReply }
    }
}

/// Answers the callers of a check. Returns how many decisions came after their callers had gone away.
fn hand_out(check: &Check, callers: Vec<Caller>, outcome: Result<Handout, StoreError>) -> u64 {
    let mut late = 0;
    match outcome {
        Ok((answers, at)) => {
            let passes = answers.iter().map(|answer| answer.passes);
            let terms = check.tiers().iter().map(|tier| &tier.terms);
            let granted = granted(check.count(), terms.zip(passes));
            for (index, caller) in (0..).zip(callers) {
                let answers = Arc::clone(&answers);
                let handed = Handed { answers, at, place: Place { index, granted } };
                late += u64::from(caller.answer.send(Ok(handed)).is_err());
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

/// The duty to send what waits, which one task at a time has.
struct Flush<S: Store> {
    lane: Arc<Lane<S>>,
    has_ended: bool,
}

impl<S: Store> Flush<S> {
    fn of(lane: &Arc<Lane<S>>) -> Self {
        Self { lane: Arc::clone(lane), has_ended: false }
    }

    /// The next batch, if the limit admits one. If not, this duty is done.
    fn next_batch(&mut self) -> Option<Batch<S>> {
        if self.has_ended {
            return None;
        }
        let Lane { batcher, shared, .. } = &*self.lane;
        let Some(taken) = batcher.take_batch(Instant::now(), &shared.tally) else {
            self.has_ended = true;
            return None;
        };
        let Taken { checks, callers, deadline, sent } = taken;
        let call = CallInFlight { lane: Arc::clone(&self.lane), sent, has_ended: false };
        Some(Batch { checks, callers, deadline, call })
    }
}

impl<S: Store> Drop for Flush<S> {
    fn drop(&mut self) {
        // a panic, or the end of the runtime: the next caller takes over
        if !self.has_ended {
            self.lane.batcher.state.lock().is_flushing = false;
        }
    }
}

/// A call in flight. It ends with its holder, also if that panics or is never run.
struct CallInFlight<S: Store> {
    lane: Arc<Lane<S>>,
    sent: Sent,
    has_ended: bool,
}

impl<S: Store> CallInFlight<S> {
    /// Ends the call. Returns the duty to send what waits, if no other task has it.
    fn end(mut self, end: CallEnd, tiers: usize) -> Option<Flush<S>> {
        self.has_ended = true;
        let Ended { must_flush, round_trip } =
            self.lane.batcher.end_call(self.sent, end, tiers, Instant::now());
        if let Some(round_trip) = round_trip {
            self.lane.compare_with_deadline(round_trip);
        }
        must_flush.then(|| Flush::of(&self.lane))
    }
}

impl<S: Store> Drop for CallInFlight<S> {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        if self.lane.batcher.end_call(self.sent, CallEnd::NoReply, 0, Instant::now()).must_flush {
            let flush = Flush::of(&self.lane);
            if Handle::try_current().is_ok() {
                spawn_flush(flush);
            }
        }
    }
}

/// What a caller has to do next.
enum Joined {
    /// Nothing is in flight and nothing waits: the caller makes the call.
    Idle(Sent),
    /// The caller waits for a batch.
    Waits(oneshot::Receiver<Result<Handed, StoreError>>),
    /// The caller waits for a batch, and starts the flush that sends it.
    Flushes(oneshot::Receiver<Result<Handed, StoreError>>),
}

/// What is taken out of the queue for one call.
struct Taken {
    checks: Vec<Check>,
    callers: Vec<Vec<Caller>>,
    deadline: Instant,
    sent: Sent,
}

/// What follows from the end of a call.
struct Ended {
    /// Whether the holder of the call has to start a flush.
    must_flush: bool,
    round_trip: Option<Duration>,
}

impl Batcher {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        let state = State {
            groups: VecDeque::new(),
            taken: 0,
            open: HashTable::new(),
            callers: 0,
            is_flushing: false,
            calls: CallLimit::new(now),
            round_trips: RoundTrips::default(),
            last_sign: now,
        };
        Self { state: Mutex::new(state), hasher: Keyed::default() }
    }

    fn join(&self, check: &Check, deadline: Instant, tally: &Tally) -> Result<Joined, StoreError> {
        let hash = self.hasher.hash_one(check);
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.callers >= MAX_WAITING {
            return Err(StoreError::NotRun(format!("{MAX_WAITING} callers wait for the store already")));
        }
        let expected = state.expected_round_trip(now) + state.expected_wait();
        if now + expected > deadline {
            tally.unsent();
            return Err(too_short(deadline.saturating_duration_since(now), expected));
        }
        if state.calls.in_flight() == 0 && state.groups.is_empty() {
            return Ok(Joined::Idle(state.calls.send(now)));
        }
        let (sender, answer) = oneshot::channel();
        state.add(check, hash, Caller { answer: sender, deadline });
        Ok(if state.start_flush(now) { Joined::Flushes(answer) } else { Joined::Waits(answer) })
    }

    /// The next batch, if the limit admits a call. Callers that have gone away are not in it, nor those whose time
    /// cannot suffice. If there is none, the flush is over.
    fn take_batch(&self, now: Instant, tally: &Tally) -> Option<Taken> {
        let mut state = self.state.lock();
        let expected = state.expected_round_trip(now);
        let (mut checks, mut callers, mut tiers) = (Vec::new(), Vec::new(), 0);
        let mut latest = now;
        if state.calls.admits(now) {
            while let Some(group) = state.groups.front()
                && (tiers == 0 || tiers + group.check.tiers().len() <= MAX_CALL_TIERS)
            {
                let mut group = state.take_first();
                group.callers.retain(|caller| !caller.answer.is_closed());
                let short = group.callers.extract_if(.., |caller| now + expected > caller.deadline);
                for caller in short {
                    tally.unsent();
                    let _ = caller
                        .answer
                        .send(Err(too_short(caller.deadline.saturating_duration_since(now), expected)));
                }
                let Some(deadline) = group.callers.iter().map(|caller| caller.deadline).max() else {
                    continue;
                };
                latest = latest.max(deadline);
                tiers += group.check.tiers().len();
                let count = u32::try_from(group.callers.len()).expect("fewer than MAX_WAITING wait");
                checks.push(group.check.times(count));
                callers.push(group.callers);
            }
        }
        if checks.is_empty() {
            state.is_flushing = false;
            return None;
        }
        Some(Taken { checks, callers, deadline: latest, sent: state.calls.send(now) })
    }

    fn end_call(&self, call: Sent, end: CallEnd, tiers: usize, now: Instant) -> Ended {
        let mut state = self.state.lock();
        match end {
            CallEnd::Replied => {
                state.last_sign = now;
                state.round_trips.note(now.duration_since(call.at), now);
                state.calls.replied(call, tiers, now);
            }
            CallEnd::NoReply => state.calls.abandon(),
        }
        Ended {
            must_flush: !state.groups.is_empty() && state.start_flush(now),
            round_trip: state.round_trips.low(now),
        }
    }

    /// When the silence of the server becomes a failure, for a call that was sent then.
    pub(super) fn silent_at(&self, sent: Instant, deadline: Duration) -> Instant {
        let state = self.state.lock();
        state.last_sign.max(sent) + state.round_trips.longest_silence(deadline)
    }

    /// Counts the silence of the server since a call was sent as a failure, unless it has replied, or that was counted,
    /// a moment ago.
    pub(super) fn is_silent(&self, sent: Instant, deadline: Duration, now: Instant) -> bool {
        let mut state = self.state.lock();
        let silent_at = state.last_sign.max(sent) + state.round_trips.longest_silence(deadline);
        let is_silent = now >= silent_at;
        if is_silent {
            state.last_sign = now;
        }
        is_silent
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
            round_trip: state.round_trips.low(Instant::now()),
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

fn too_short(left: Duration, expected: Duration) -> StoreError {
    StoreError::NotRun(format!("{left:?} are left, and the store takes {expected:?} now"))
}

impl State {
    /// What a call takes at least. Nothing while none is in flight: one call at a time is always made, or a store that has
    /// become faster would never be noticed.
    fn expected_round_trip(&self, now: Instant) -> Duration {
        if self.calls.in_flight() == 0 {
            Duration::ZERO
        } else {
            self.round_trips.low(now).unwrap_or_default()
        }
    }

    /// How long a caller that joins now waits until it is sent.
    fn expected_wait(&self) -> Duration {
        let (limit, batches) = (self.calls.limit(), self.groups.len() / MAX_CALL_TIERS);
        if self.calls.in_flight() < limit {
            return Duration::ZERO;
        }
        let round_trip = self.round_trips.smoothed().unwrap_or_default();
        round_trip * u32::try_from(batches).unwrap_or(u32::MAX) / u32::try_from(limit).unwrap_or(u32::MAX)
    }

    /// Whether the caller has to start a flush: the limit admits a call, and no other task is about to send it.
    fn start_flush(&mut self, now: Instant) -> bool {
        let starts = !self.is_flushing && self.calls.admits(now);
        self.is_flushing |= starts;
        starts
    }

    fn add(&mut self, check: &Check, hash: u64, caller: Caller) {
        self.callers += 1;
        let is_equal = |&(other, number): &(u64, usize)| {
            other == hash && self.groups[number - self.taken].check == *check
        };
        if let Some(&(_, number)) = self.open.find(hash, is_equal) {
            self.groups[number - self.taken].callers.push(caller);
            return;
        }
        if check.operation() == Operation::Check {
            let number = self.taken + self.groups.len();
            self.open.insert_unique(hash, (hash, number), |&(hash, _)| hash);
        }
        self.groups.push_back(Group { check: check.clone(), hash, callers: vec![caller] });
    }

    fn take_first(&mut self) -> Group {
        let group = self.groups.pop_front().expect("the caller has seen a first group");
        let number = self.taken;
        self.taken += 1;
        if let Ok(open) = self.open.find_entry(group.hash, |&(_, other)| other == number) {
            open.remove();
        }
        self.callers -= group.callers.len();
        group
    }
}
