//! Forms batches of the checks for one server, and sends them.
//!
//! There is no timer. If no call is in flight, a check is sent immediately. Checks that arrive while the call limit is
//! reached form the next batch. Below the limit, a flush yields once, so that checks of other runnable tasks share its
//! call: callers that are answered together usually ask again together. Equal checks wait as one group and become
//! "up to n", first come, first served.
//!
//! A call belongs to no single caller. A caller that goes away while it waits is not charged; one that goes away later
//! does not end the call.

use std::{
    collections::VecDeque,
    future::Future,
    hash::BuildHasher,
    mem,
    pin::Pin,
    slice,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::future::BoxFuture;
use hashbrown::HashTable;
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::oneshot, task::yield_now, time::Instant};
use tollgate_core::{Answer, Operation, Timestamp, step::granted};

use super::{
    Handout, Lane, Place, Verdict, by,
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
/// The most callers that wait. A longer queue means that the store is down.
const MAX_WAITING: usize = 16_384;
/// How long a flush may be pending until another task takes over, since the runtime of the first may no longer be driven.
const MAX_FLUSH: Duration = Duration::from_millis(10);

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
struct Caller {
    answer: oneshot::Sender<Result<GroupAnswer, StoreError>>,
    deadline: Instant,
}

/// The answer to a group, and which of its callers this one is.
struct GroupAnswer {
    answers: Arc<[Answer]>,
    at: Timestamp,
    place: Place,
}

/// Checks that are sent in one call, and the callers of each.
struct Batch {
    checks: Vec<Check>,
    callers: Vec<Vec<Caller>>,
    /// The latest deadline of a caller.
    deadline: Instant,
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
    let (answer, group) = match lane.batcher.join(check, deadline, &lane.shared.tally)? {
        Joined::Idle(sent) => {
            let call = OwnCall::new(lane, check.clone(), deadline, sent);
            return by(deadline, call).await.unwrap_or_else(|| Err(no_answer()));
        }
        Joined::Waits(answer, group) => (answer, group),
        Joined::Flushes(answer, group) => {
            spawn_flush(Flush::of(lane));
            (answer, group)
        }
    };
    match by(deadline, answer).await {
        Some(Ok(answered)) => {
            let GroupAnswer { answers, at, place } = answered?;
            Ok(Verdict::of(check, &answers, place, at))
        }
        Some(Err(_)) => Err(StoreError::Ambiguous("the call ended without an answer".to_owned())),
        None if lane.batcher.is_waiting(group) => {
            Err(StoreError::NotRun("still queued in this process at the deadline".to_owned()))
        }
        None => Err(no_answer()),
    }
}

/// A call driven by its caller's task: a task of its own costs a lone caller half as much CPU time again (59 us instead of
/// 40 us on loopback). If the caller is dropped, a spawned task continues the call.
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
        // taken out, so that a call that panics is not continued
        let mut call = self.call.take().expect("a call is not polled after its end");
        let progress = call.as_mut().poll(context);
        if progress.is_pending() {
            self.call = Some(call);
        }
        progress
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

fn spawn_send<S: Store>((batch, call): (Batch, CallInFlight<S>)) {
    tokio::spawn(async move {
        if let Some(flush) = send(batch, call).await {
            flush_and_send(flush).await;
        }
    });
}

/// Sends what waits, as far as the limit admits, until nothing waits or other calls will go on.
async fn flush_and_send<S: Store>(mut flush: Flush<S>) {
    loop {
        // what other tasks ask that are ready to run joins the batch
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

/// Makes one call and answers its callers. Returns a [`Flush`] if checks wait and no task is flushing.
async fn send<S: Store>(batch: Batch, call: CallInFlight<S>) -> Option<Flush<S>> {
    let Batch { checks, callers, deadline } = batch;
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
                let answer_of_group = GroupAnswer { answers, at, place: Place { index, granted } };
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

/// The right to send what waits. One task at a time has it.
struct Flush<S: Store> {
    lane: Arc<Lane<S>>,
    has_ended: bool,
}

impl<S: Store> Flush<S> {
    fn of(lane: &Arc<Lane<S>>) -> Self {
        Self { lane: Arc::clone(lane), has_ended: false }
    }

    /// Returns the next batch if the limit admits one. If not, the flush is over.
    fn next_batch(&mut self) -> Option<(Batch, CallInFlight<S>)> {
        if self.has_ended {
            return None;
        }
        let Lane { batcher, shared, .. } = &*self.lane;
        let Some((batch, sent)) = batcher.take_batch(Instant::now(), &shared.tally) else {
            self.has_ended = true;
            return None;
        };
        Some((batch, CallInFlight { lane: Arc::clone(&self.lane), sent, has_ended: false }))
    }
}

impl<S: Store> Drop for Flush<S> {
    fn drop(&mut self) {
        // after a panic or the end of the runtime, the next caller takes over
        if !self.has_ended {
            self.lane.batcher.state.lock().flushing_since = None;
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
    /// Ends the call. Returns a [`Flush`] if checks wait and no task is flushing.
    fn end(mut self, end: CallEnd, tiers: usize) -> Option<Flush<S>> {
        self.has_ended = true;
        let AfterCall { must_flush, round_trip } =
            self.lane.batcher.end_call(self.sent, end, tiers, Instant::now());
        let flush = must_flush.then(|| Flush::of(&self.lane));
        if let Some(round_trip) = round_trip {
            self.lane.warn_if_slow(round_trip);
        }
        flush
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
    /// The caller waits for a batch, in the group with this number.
    Waits(oneshot::Receiver<Result<GroupAnswer, StoreError>>, usize),
    /// The caller waits for a batch, and starts the flush that sends it.
    Flushes(oneshot::Receiver<Result<GroupAnswer, StoreError>>, usize),
}

/// What follows from the end of a call.
struct AfterCall {
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
            tiers: 0,
            flushing_since: None,
            calls: CallLimit::new(now),
            round_trips: RoundTrips::default(),
            last_reply: now,
            last_failure: now,
        };
        Self { state: Mutex::new(state), hasher: Keyed::default() }
    }

    fn join(&self, check: &Check, deadline: Instant, tally: &Tally) -> Result<Joined, StoreError> {
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
    fn is_waiting(&self, group: usize) -> bool {
        group >= self.state.lock().taken
    }

    /// Returns the next batch if the limit admits a call; if not, the flush is over. Callers that have gone away are not in
    /// it, nor those that have less time left than a round trip takes.
    fn take_batch(&self, now: Instant, tally: &Tally) -> Option<(Batch, Sent)> {
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

    fn end_call(&self, call: Sent, end: CallEnd, tiers: usize, now: Instant) -> AfterCall {
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

fn no_answer() -> StoreError {
    StoreError::Ambiguous("no answer by the deadline".to_owned())
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
