//! Between callers and a store: every check is answered by its deadline, whatever the store does, and many callers share
//! a round trip.
//!
//! ```text
//! a check -> the store is in this process          -> decided at once
//!         -> denied for certain until later        -> answered at once             (refusals)
//!         -> the circuit breaker is open           -> failure policy               (breaker)
//!         -> less time left than a round trip      -> failure policy               (round_trips)
//!         -> no call is in flight                  -> sent at once
//!         -> fewer calls in flight than the limit  -> sent with what arrives now   (batch, call_limit)
//!         -> otherwise it waits, with equal checks -> sent when a call returns     (queue)
//! ```
//!
//! No timer delays a check. A check without an answer by its deadline is decided by its rules' failure policies, one of
//! which enforces this process's share of the limit (fallback).

mod batch;
mod breaker;
mod call_limit;
mod fallback;
mod queue;
mod refusals;
mod round_trips;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use parking_lot::RwLock;
use smallvec::SmallVec;
use tokio::{
    runtime::Handle,
    task::yield_now,
    time::{Instant, timeout_at},
};
use tollgate_core::{Algorithm, Answer, Limit, Operation, Timestamp, step::Share};

use self::{
    breaker::{Breaker, Probe},
    fallback::{Fallback, Presence},
    queue::{Load, Queue},
    refusals::Refusals,
};
use crate::{
    check::{Check, Tier},
    key::Key,
    stats::{Stats, Tally},
    store::{Answered, Deadline, Look, Store, StoreError},
};

/// How long a decision may take, and what is remembered of refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long a decision may take; then each rule's failure policy answers. 50 ms unless set.
    pub deadline: Duration,
    /// For how long at most a refusal that is certain is answered in this process, without asking the store
    /// again. 1 s unless set; zero asks every time.
    pub denial_cache: Duration,
}

/// The deadline unless another is set.
const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);
/// The longest deadline; a longer one counts as this.
const MAX_DEADLINE: Duration = Duration::from_secs(3_600);
/// How long a look at counters may take: it is for people, and no request waits for it.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);
/// How long refusals are remembered unless set otherwise.
const DEFAULT_DENIAL_CACHE: Duration = Duration::from_secs(1);

impl Default for Options {
    fn default() -> Self {
        Self { deadline: DEFAULT_DEADLINE, denial_cache: DEFAULT_DENIAL_CACHE }
    }
}

impl Options {
    fn deadline_within(&self, budget: Option<Duration>) -> Duration {
        budget.map_or(self.deadline, |budget| budget.min(self.deadline)).min(MAX_DEADLINE)
    }
}

/// What the tiers of a check say to one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// When the store decided; absent when the refusal was known here.
    pub(crate) at: Option<Timestamp>,
    /// Each tier asked, by its place in the check, and what it says. All of them, unless refused here.
    pub(crate) shares: SmallVec<[(usize, Share); 1]>,
}

/// What the tiers of a check say has been told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    /// When the store decided; absent when the refusal was known here.
    pub(crate) at: Option<Timestamp>,
}

/// A round trip of `deadline / SLOW_PART` or more is logged; one below `deadline / FAST_PART` re-arms the warning.
const SLOW_PART: u32 = 2;
const FAST_PART: u32 = 4;

/// How many servers of a store are told apart; what is more shares the first one's lane.
const MAX_LANES: usize = 1024;

/// A store, and what is shared by everybody who asks it.
pub(crate) struct Gate<S> {
    shared: Arc<Shared<S>>,
    first: Arc<Lane<S>>,
    others: RwLock<HashMap<u64, Arc<Lane<S>>>>,
}

struct Shared<S> {
    store: S,
    options: Options,
    refusals: Refusals,
    fallback: Fallback,
    tally: Tally,
}

/// The way to one of the store's servers: who asks it, and whether it answers, has nothing to do with the others.
struct Lane<S> {
    shared: Arc<Shared<S>>,
    number: u64,
    queue: Queue,
    breaker: Breaker,
    /// Whether a warning about the round trip was logged.
    has_warned: AtomicBool,
}

impl<S> Gate<S> {
    pub(crate) fn store(&self) -> &S {
        &self.shared.store
    }

    /// Where it is counted what the store put callers through.
    pub(crate) fn tally(&self) -> &Tally {
        &self.shared.tally
    }
}

impl<S: Store> Gate<S> {
    pub(crate) fn new(store: S, options: Options) -> Self {
        // a refusal ends on this process's clock: one that stands still or jumps would never end it
        let longest = if store.keeps_real_time() { options.denial_cache } else { Duration::ZERO };
        let refusals = Refusals::new(longest);
        let (fallback, tally) = (Fallback::default(), Tally::default());
        let shared = Arc::new(Shared { store, options, refusals, fallback, tally });
        Self { first: Lane::new(&shared, 0), shared, others: RwLock::default() }
    }

    /// Decides one request, if that needs no waiting, and tells what each of its tiers says, by its place in the check:
    /// the store is in this process, or is certain to refuse.
    #[inline]
    pub(crate) fn decide_at_once(&self, check: &Check, mut tell: impl FnMut(usize, Share)) -> Option<Told> {
        let Shared { store, refusals, .. } = &*self.shared;
        let mut tiers = check.tiers().iter().enumerate();
        let at = store.decide_here(check, &mut |answer| {
            if let Some((place, tier)) = tiers.next() {
                tell(place, answer.share(&tier.terms, 0, 1));
            }
        });
        if at.is_some() {
            return Some(Told { at });
        }
        if check.operation() != Operation::Check {
            return None;
        }
        let Verdict { at, shares } = refusals.of(check)?;
        shares.into_iter().for_each(|(place, share)| tell(place, share));
        Some(Told { at })
    }

    /// Decides one request that meets one counter, if the store is in this process. When, and what it says.
    #[inline]
    pub(crate) fn decide_one_here(&self, operation: Operation, tier: &Tier) -> Option<(Timestamp, Share)> {
        let (answer, at) = self.shared.store.decide_one_here(operation, tier)?;
        Some((at, answer.share(&tier.terms, 0, 1)))
    }

    /// Checks counters one after the other, each for a request of its own, and tells what each says, by its place, if the store is
    /// in this process. Whether it is.
    #[inline]
    pub(crate) fn check_each_here(&self, tiers: &[Tier], mut tell: impl FnMut(usize, Share)) -> bool {
        let mut asked = tiers.iter().enumerate();
        self.shared.store.check_each_here(tiers, &mut |answer| {
            if let Some((place, tier)) = asked.next() {
                tell(place, answer.share(&tier.terms, 0, 1));
            }
        })
    }

    /// Decides one request that has to wait. The answer comes by the deadline, or sooner if the caller waits no longer, or
    /// there is none.
    pub(crate) async fn ask_store(
        &self,
        check: &Check,
        budget: Option<Duration>,
    ) -> Result<Verdict, StoreError> {
        let shared = &self.shared;
        let deadline = shared.options.deadline_within(budget);
        let lane = self.lane(shared.store.lane(check));
        if lane.breaker.is_open() {
            return Err(lane.breaker.left_alone());
        }
        let verdict = batch::ask(&lane, check, Instant::now() + deadline).await;
        if let Err(StoreError::Ambiguous(_)) = verdict {
            shared.tally.left_unknown();
        }
        if let Operation::Refund { .. } = check.operation() {
            shared.refusals.forget_all();
        }
        verdict
    }

    fn lane(&self, number: u64) -> Arc<Lane<S>> {
        if number == 0 {
            return Arc::clone(&self.first);
        }
        if let Some(lane) = self.others.read().get(&number) {
            return Arc::clone(lane);
        }
        let mut others = self.others.write();
        if others.len() >= MAX_LANES && !others.contains_key(&number) {
            return Arc::clone(&self.first);
        }
        Arc::clone(others.entry(number).or_insert_with(|| Lane::new(&self.shared, number)))
    }

    /// How long a decision may take for a caller who waits no longer than `budget`.
    pub(crate) fn deadline(&self, budget: Option<Duration>) -> Duration {
        self.shared.options.deadline_within(budget)
    }

    /// Warns if a round trip that takes this long makes it unlikely that the deadline holds.
    pub(crate) fn warn_if_slow(&self, round_trip: Duration) {
        self.first.warn_if_slow(round_trip);
    }

    /// Decides by this process's share of each limit, without the store. Also says what the shares are.
    pub(crate) fn decide_without_store(&self, check: &Check) -> (Verdict, Vec<Tier>) {
        self.shared.fallback.decide(check)
    }

    /// Sees to it that the processes are counted that a limit would have to be divided by.
    pub(crate) fn prepare_fallback(&self) {
        if self.shared.store.is_remote()
            && let Ok(runtime) = Handle::try_current()
            && self.shared.fallback.must_be_announced()
        {
            runtime.spawn(Presence(Arc::downgrade(&self.shared)).run());
        }
    }

    /// What callers have been through, and what is so now.
    pub(crate) fn stats(&self) -> Stats {
        let others = self.others.read();
        let lanes = || others.values().chain([&self.first]);
        let loads: Vec<Load> = lanes().map(|lane| lane.queue.load()).collect();
        Stats {
            left_alone: lanes().filter(|lane| lane.breaker.is_open()).count(),
            waiting: loads.iter().map(|load| load.waiting).sum(),
            in_flight: loads.iter().map(|load| load.in_flight).sum(),
            call_limit: loads.iter().map(|load| load.limit).max().unwrap_or_default(),
            round_trip: loads.iter().filter_map(|load| load.round_trip).max(),
            store: self.shared.store.stats(),
            ..self.shared.tally.snapshot()
        }
    }

    /// What counters hold.
    pub(crate) async fn look(
        &self,
        counters: &[(Key, Limit)],
        budget: Option<Duration>,
    ) -> Result<Vec<Option<Look>>, StoreError> {
        if self.first.breaker.is_open() {
            return Err(self.first.breaker.left_alone());
        }
        within(
            budget.map_or(LOOK_PATIENCE, |budget| budget.min(LOOK_PATIENCE)),
            self.shared.store.look(counters),
        )
        .await
    }

    /// Forgets counters, and every refusal that was due to them.
    pub(crate) async fn reset(
        &self,
        counters: &[(Key, Algorithm)],
        budget: Option<Duration>,
    ) -> Result<u64, StoreError> {
        if self.first.breaker.is_open() {
            return Err(self.first.breaker.left_alone());
        }
        let deadline = self.shared.options.deadline_within(budget);
        let reset = within(deadline, self.shared.store.reset(counters)).await;
        self.shared.refusals.forget_all();
        reset
    }
}

impl<S: Store> Lane<S> {
    fn new(shared: &Arc<Shared<S>>, number: u64) -> Arc<Self> {
        let (queue, breaker) = (Queue::new(), Breaker::default());
        let has_warned = AtomicBool::new(false);
        Arc::new(Self { shared: Arc::clone(shared), number, queue, breaker, has_warned })
    }

    /// Warns when the round trip makes it unlikely that the deadline holds, once until it is well below.
    fn warn_if_slow(&self, round_trip: Duration) {
        let deadline = self.shared.options.deadline;
        if round_trip * SLOW_PART < deadline {
            if round_trip * FAST_PART < deadline && self.has_warned.load(Ordering::Relaxed) {
                self.has_warned.store(false, Ordering::Relaxed);
            }
        } else if !self.has_warned.swap(true, Ordering::Relaxed) {
            let advised =
                Duration::from_millis(u64::try_from((round_trip * 4).as_millis()).unwrap_or(u64::MAX));
            tracing::warn!(
                "the round trip to the store takes {round_trip:.1?} of a deadline of {deadline:?}: set the deadline to \
                 {advised:?} or more (store.deadline), or failure policies will decide"
            );
        }
    }

    /// Asks the store, for callers that wait until `deadline` at most. Remembers which denials are certain, and whether
    /// the store answered. Returns the outcome of each check.
    async fn call(
        self: &Arc<Self>,
        checks: &[Check],
        deadline: Instant,
        sent_at: Instant,
    ) -> Vec<Result<Handout, StoreError>> {
        if self.breaker.is_open() {
            return vec![Err(self.breaker.left_alone()); checks.len()];
        }
        let Shared { store, refusals, tally, options, .. } = &*self.shared;
        let sent = refusals.sent(sent_at);
        let reply = store.decide_each(checks, Some(Deadline::Process(deadline)));
        let Some(decided) = self.wait_for_reply(sent_at, reply).await else {
            tally.timed_out();
            return vec![Err(no_answer_within(options.deadline)); checks.len()];
        };
        match decided.iter().find_map(|answered| answered.as_ref().err()) {
            None => tally.called(sent_at.elapsed()),
            Some(error) => tally.failed(error),
        }
        if checks.iter().any(|check| matches!(check.operation(), Operation::Refund { .. })) {
            refusals.forget_all();
        }
        if decided.iter().any(Result::is_ok) {
            self.breaker.succeeded();
        } else if let Some(error) =
            decided.iter().filter_map(|answered| answered.as_ref().err()).find(is_failure)
            && self.queue.count_failure(sent_at, Instant::now())
        {
            self.breaker.note(error);
            self.failed();
        }
        let handouts = checks.iter().zip(decided).map(|(check, answered)| {
            let Answered { at, answers } = answered?;
            refusals.remember(check, &answers, &sent);
            Ok((answers.into(), at))
        });
        handouts.collect()
    }

    /// Waits for a reply up to the configured deadline, even if every caller has gone. Silence counts as a failure.
    async fn wait_for_reply<T>(
        self: &Arc<Self>,
        sent_at: Instant,
        reply: impl Future<Output = T>,
    ) -> Option<T> {
        let patience = self.shared.options.deadline_within(None);
        let end = sent_at + patience;
        let mut reply = pin!(reply);
        loop {
            let wake = end.min(self.queue.silent_at(sent_at, patience));
            if let Some(reply) = by(wake, &mut reply).await {
                return Some(reply);
            }
            // if this process stood still, the reply may be waiting to be read
            yield_now().await;
            if let Some(reply) = by(wake, &mut reply).await {
                return Some(reply);
            }
            let now = Instant::now();
            let is_over = now >= end;
            if self.queue.count_silence(sent_at, patience, now)
                || (is_over && self.queue.count_failure(sent_at, now))
            {
                self.breaker.note(&StoreError::Ambiguous(format!("no reply for {:.0?}", now - sent_at)));
                self.failed();
            }
            if is_over {
                return None;
            }
        }
    }

    /// Notes a failure of the store; after several in a row it is only probed, in the background.
    fn failed(self: &Arc<Self>) {
        // without a runtime, nothing could probe the store
        if let Ok(runtime) = Handle::try_current()
            && self.breaker.failed()
        {
            let reason = self.breaker.reason();
            tracing::warn!("store unavailable ({reason}); applying failure policies");
            runtime.spawn(Probe(Arc::downgrade(self)).run());
        }
    }
}

/// Whether an error says that the store does not decide. A call that arrived too late may be the caller's fault.
fn is_failure(error: &&StoreError) -> bool {
    !matches!(error, StoreError::Late(_))
}

/// What a store decided about a check, for all callers that asked it.
type Handout = (Arc<[Answer]>, Timestamp);

/// Which of several identical requests this is, and how many of them passed.
#[derive(Clone, Copy)]
struct Place {
    index: u32,
    granted: u32,
}

impl Place {
    const ALONE: Self = Self { index: 0, granted: 1 };
}

impl Verdict {
    fn of(check: &Check, answers: &[Answer], place: Place, at: Timestamp) -> Self {
        let shares = check.tiers().iter().zip(answers).enumerate();
        let shares = shares
            .map(|(tier, (asked, answer))| (tier, answer.share(&asked.terms, place.index, place.granted)));
        Self { at: Some(at), shares: shares.collect() }
    }
}

/// The answer of a call, or that it did not come in time: it may have run all the same.
async fn within<T>(
    deadline: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match by(Instant::now() + deadline, call).await {
        Some(answer) => answer,
        None => Err(no_answer_within(deadline)),
    }
}

/// The output of a future, if it is there by `deadline`.
async fn by<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    // a future that is ready needs no timer, and so no runtime that has one
    let at_once = poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    });
    match at_once.await {
        Some(output) => Some(output),
        None => timeout_at(deadline, future).await.ok(),
    }
}

fn no_answer_within(deadline: Duration) -> StoreError {
    StoreError::Ambiguous(format!("no answer within {deadline:?}"))
}
