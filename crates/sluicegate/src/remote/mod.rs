//! The layer between callers and a remote store: every check is answered by its deadline, and many callers share a
//! round trip.
//!
//! ```text
//! a check -> this process has leased units for it  -> allowed immediately          (leases)
//!         -> in the denial cache                   -> denied immediately           (denial_cache)
//!         -> the circuit breaker is open           -> failure policy               (circuit_breaker)
//!         -> less time left than a round trip      -> failure policy               (round_trips)
//!         -> no call is in flight                  -> sent immediately
//!         -> fewer calls in flight than the limit  -> sent in the next batch       (batch, call_limit)
//!         -> otherwise queued, with equal checks   -> sent when a call returns     (queue)
//!
//! settle a hold -> repeated if its reply is lost; queued while the store is down   (settlements)
//! ```
//!
//! No timer delays a check. A check without an answer by its deadline is decided by its rules' failure policies, one of
//! which enforces this process's share of the limit (fallback).

mod batch;
mod call_limit;
mod circuit_breaker;
mod counter_calls;
mod denial_cache;
mod fallback;
mod instance_count;
mod known_usage;
mod leases;
mod queue;
mod round_trips;
mod settlements;
#[cfg(test)]
mod tests;
mod upstreams;

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use sluicegate_core::{
    Answer, Operation, Timestamp,
    step::{Mode, Share},
};
use tokio::{
    runtime::Handle,
    task::yield_now,
    time::{Instant, timeout_at},
};

use self::{
    circuit_breaker::{CircuitBreaker, Failure},
    denial_cache::DenialCache,
    fallback::{Announcer, Fallback},
    leases::{LeasePlan, Leases},
    queue::{Load, Queue},
    settlements::Settlements,
    upstreams::{Servers, Upstreams},
};
use crate::{
    backend::CheckShares,
    check::{Check, HoldOperation, Tier},
    decision::Source,
    stats::{RemoteCounters, Stats},
    store::{CheckAnswer, Deadline, RemoteStore, StoreError},
};

/// How a limiter uses a remote store: the deadline of a decision, and how long denials are cached.
///
/// ```
/// use std::time::Duration;
/// use sluicegate::{Limiter, Options};
///
/// let options = Options::new().deadline(Duration::from_millis(20)).denial_cache(Duration::ZERO);
/// let limiter = Limiter::builder().options(options).build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// The time a decision may take; then each rule's failure policy decides. 50 ms by default.
    pub deadline: Duration,
    /// The longest time for which this process repeats a denial without a call to the store. 1 s by default; zero disables the
    /// cache.
    pub denial_cache: Duration,
    /// The number of instances among which the failure policy `local` divides a limit until the store has counted them. 1 by default.
    pub instances: u32,
}

/// The default deadline.
const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);
/// The longest deadline; a longer one is reduced to it.
const MAX_DEADLINE: Duration = Duration::from_secs(3_600);
/// How long denials are cached by default.
const DEFAULT_DENIAL_CACHE: Duration = Duration::from_secs(1);

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// The default options.
    pub const fn new() -> Self {
        Self { deadline: DEFAULT_DEADLINE, denial_cache: DEFAULT_DENIAL_CACHE, instances: 1 }
    }

    /// Sets [`Options::deadline`].
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets [`Options::denial_cache`].
    #[must_use]
    pub const fn denial_cache(mut self, denial_cache: Duration) -> Self {
        self.denial_cache = denial_cache;
        self
    }

    /// Sets [`Options::instances`].
    #[must_use]
    pub const fn instances(mut self, instances: u32) -> Self {
        self.instances = instances;
        self
    }

    /// Returns the shorter of this deadline and the caller's.
    fn deadline_within(&self, deadline: Option<Duration>) -> Duration {
        deadline.map_or(self.deadline, |deadline| deadline.min(self.deadline)).min(MAX_DEADLINE)
    }
}

/// The longest time for which a reservation lasts, in deadlines of its check: one until its last server has answered, and one for its
/// release.
const RESERVATION_DEADLINES: u32 = 2;

/// A round trip of `deadline / SLOW_PART` or more is logged. One below `deadline / FAST_PART` re-arms the warning.
const SLOW_PART: u32 = 2;
const FAST_PART: u32 = 4;

/// A remote store with the state that all callers share.
pub(crate) struct Remote {
    shared: Arc<Shared>,
    upstreams: Upstreams,
    settlements: Settlements,
}

struct Shared {
    store: Arc<dyn RemoteStore>,
    options: Options,
    denials: DenialCache,
    leases: Leases,
    /// Whether limits with leases are leased: the store supports it, and its clock runs like that of this process.
    has_leases: bool,
    fallback: Fallback,
    counters: RemoteCounters,
}

/// One server of the store, or several that decide checks together, with a queue and a circuit breaker: a server that is down does not
/// delay checks for the others.
struct Upstream {
    shared: Arc<Shared>,
    servers: Servers,
    queue: Queue,
    breaker: CircuitBreaker,
    /// Whether a warning about the round trip was logged.
    has_warned: AtomicBool,
}

impl Remote {
    pub(crate) fn new(store: Arc<dyn RemoteStore>, options: Options) -> Self {
        // a cached denial expires on this process's clock, which is independent of a manual clock
        let longest = if store.has_real_clock() { options.denial_cache } else { Duration::ZERO };
        let longest_reservation = if store.has_reservations() {
            options.deadline_within(None) * RESERVATION_DEADLINES
        } else {
            Duration::ZERO
        };
        let denials = DenialCache::new(longest, longest_reservation);
        let (fallback, counters) = (Fallback::new(options.instances), RemoteCounters::default());
        let has_leases = store.has_leases() && store.has_real_clock();
        let leases = Leases::new();
        let shared = Arc::new(Shared { store, options, denials, leases, has_leases, fallback, counters });
        Self { upstreams: Upstreams::new(&shared), shared, settlements: Settlements::default() }
    }

    /// The counters behind the statistics.
    pub(crate) fn counters(&self) -> &RemoteCounters {
        &self.shared.counters
    }

    /// Returns how long a denial is cached at most.
    pub(crate) fn denial_cache(&self) -> Duration {
        if self.shared.store.has_real_clock() { self.shared.options.denial_cache } else { Duration::ZERO }
    }

    /// Decides a check without the store: this process has leased units for it, or the store is certain to deny it now.
    pub(crate) fn decide_here(&self, check: &Check) -> Option<CheckShares> {
        if check.operation() != Operation::Check || check.hold().is_some() {
            return None;
        }
        let Shared { leases, denials, options, .. } = &*self.shared;
        let leased = if self.is_leased(check) {
            leases.spend(check, Some(options.deadline_within(None)))
        } else {
            None
        };
        leased.or_else(|| denials.lookup(check))
    }

    fn is_leased(&self, check: &Check) -> bool {
        self.shared.has_leases && check.is_leasable()
    }

    /// Ends all leases and returns what is left of them to the store.
    pub(crate) async fn return_leases(&self) {
        self.shared.return_all_leases().await;
    }

    /// As [`Self::return_leases`], in the background.
    pub(crate) fn return_leases_later(&self) {
        if let Ok(runtime) = Handle::try_current() {
            let shared = Arc::clone(&self.shared);
            runtime.spawn(async move { shared.return_all_leases().await });
        }
    }

    /// Sends a check of one request to the store. Returns by the deadline, or sooner if the caller has a shorter one. If the store
    /// denies the check or does not answer, units that this process has leased are spent.
    pub(crate) async fn decide(
        self: &Arc<Self>,
        check: &Check,
        deadline: Option<Duration>,
    ) -> Result<CheckShares, StoreError> {
        if check.hold().is_some_and(|hold| !matches!(hold.operation, HoldOperation::HoldNew { .. })) {
            return self.send_repeatedly(check, deadline).await;
        }
        let answer = self.send(check, deadline).await;
        let is_allowed = answer.as_ref().is_ok_and(|shares| shares.is_allowed(check));
        if !is_allowed && check.operation() == Operation::Check && self.is_leased(check) {
            return self.shared.leases.spend(check, None).map_or(answer, Ok);
        }
        answer
    }

    async fn send(&self, check: &Check, deadline: Option<Duration>) -> Result<CheckShares, StoreError> {
        let shared = &self.shared;
        let deadline = shared.options.deadline_within(deadline);
        let upstream = self.upstreams.for_check(check);
        if let Some(breaker) = upstream.open_breaker() {
            return Err(breaker.error());
        }
        let answer = batch::decide(&upstream, check, Instant::now() + deadline).await;
        if let Err(StoreError::Ambiguous(_)) = answer {
            shared.counters.record_ambiguous();
        }
        if frees_units(check) {
            shared.denials.record_change(check.keys());
        }
        answer
    }

    /// Returns how long a decision may take if the caller has this deadline.
    pub(crate) fn deadline(&self, deadline: Option<Duration>) -> Duration {
        self.shared.options.deadline_within(deadline)
    }

    /// Logs a warning if a round trip of this length takes too much of the deadline.
    pub(crate) fn warn_if_slow(&self, round_trip: Duration) {
        self.upstreams.first().warn_if_slow(round_trip);
    }

    /// Decides by this process's share of each limit, without the store. Also returns the tiers with those shares.
    pub(crate) fn decide_by_fallback(&self, check: &Check) -> (CheckShares, Vec<Tier>) {
        self.shared.fallback.decide(check)
    }

    /// Records what the store reported about a tier, for later decisions by the fallback.
    pub(crate) fn record_for_fallback(&self, tier: &Tier, share: &Share, at: Timestamp) {
        self.shared.fallback.record(tier, share, at);
    }

    /// Starts counting the instances among which the fallback divides a limit, and leases are shared.
    pub(crate) fn count_instances(&self) {
        if let Ok(runtime) = Handle::try_current()
            && self.shared.fallback.must_be_announced()
        {
            runtime.spawn(Announcer(Arc::downgrade(&self.shared)).run());
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        let loads: Vec<Load> = self.upstreams.all().iter().map(|upstream| upstream.queue.load()).collect();
        Stats {
            open_breakers: self.upstreams.open_servers(),
            waiting: loads.iter().map(|load| load.waiting).sum(),
            in_flight: loads.iter().map(|load| load.in_flight).sum(),
            call_limit: loads.iter().map(|load| load.limit).max().unwrap_or_default(),
            round_trip: loads.iter().filter_map(|load| load.round_trip).max(),
            store: self.shared.store.stats(),
            leases: self.shared.leases.stats(),
            holds: self.settlement_stats(),
            ..self.shared.counters.snapshot()
        }
    }

    pub(crate) async fn warm_up(&self) -> Result<(), StoreError> {
        self.shared.store.warm_up().await
    }
}

impl Shared {
    /// Adds draws and reports of leases to the checks of a call, if there are any.
    fn plan_leases(self: &Arc<Self>, checks: &[Check], sent_at: Instant) -> Option<LeasePlan> {
        if !self.leases.is_in_use() {
            return None;
        }
        self.start_returner();
        let instances = self.fallback.counted_instances();
        self.leases.plan(checks, instances, sent_at, self.options.deadline_within(None))
    }
}

impl Upstream {
    fn new(shared: &Arc<Shared>, servers: Servers) -> Arc<Self> {
        let (queue, breaker) = (Queue::new(), CircuitBreaker::default());
        let has_warned = AtomicBool::new(false);
        Arc::new(Self { shared: Arc::clone(shared), servers, queue, breaker, has_warned })
    }

    /// Logs a warning if the round trip takes too much of the deadline, once until it is well below.
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
                 {advised:?} or more (store.deadline), otherwise failure policies decide"
            );
        }
    }

    /// Calls the store for callers that wait until `deadline` at most, and returns the outcome of each check. Caches certain denials and
    /// reports success or failure to the circuit breaker.
    async fn call(
        self: &Arc<Self>,
        checks: &[Check],
        deadline: Instant,
        sent_at: Instant,
    ) -> Vec<Result<BatchAnswer, StoreError>> {
        if let Some(breaker) = self.open_breaker() {
            return vec![Err(breaker.error()); checks.len()];
        }
        let Shared { store, denials, counters, options, .. } = &*self.shared;
        let sent = denials.sent(sent_at);
        let plan = self.shared.plan_leases(checks, sent_at);
        let sent_checks = plan.as_ref().map_or(checks, |plan| &plan.checks);
        let reply = store.decide(sent_checks, Some(Deadline::Process(deadline)));
        let Some(decided) = self.wait_for_reply(sent_at, reply).await else {
            counters.record_timeout();
            plan.iter().for_each(|plan| self.shared.leases.record_no_answer(plan));
            return vec![Err(no_answer_within(options.deadline)); checks.len()];
        };
        let mut decided = validated(sent_checks, decided);
        if let Some(plan) = plan {
            decided = self.shared.leases.record(&plan, decided, sent_at);
        }
        let is_unreadable = |answer: &&Result<_, _>| matches!(answer, Err(StoreError::Unreadable { .. }));
        counters.record_unreadable(decided.iter().filter(is_unreadable).count());
        match decided.iter().filter(|answer| !is_unreadable(answer)).find_map(|answer| answer.as_ref().err())
        {
            None => counters.record_call(sent_at.elapsed()),
            Some(error) => counters.record_error(error),
        }
        let mut refunds = checks.iter().filter(|check| frees_units(check)).peekable();
        if refunds.peek().is_some() {
            denials.record_change(refunds.flat_map(Check::keys));
        }
        if decided.iter().any(|answer| answer.is_ok() || is_unreadable(&answer)) {
            self.breaker.succeeded();
        } else if let Some(error) =
            decided.iter().filter_map(|answered| answered.as_ref().err()).find(is_failure)
            && self.queue.count_failure(sent_at, Instant::now())
        {
            self.failed(error.into());
        }
        let answers = checks.iter().zip(decided).map(|(check, answered)| {
            let CheckAnswer { at, answers } = answered?;
            denials.insert_certain(check, &answers, &sent);
            Ok((answers.into(), at))
        });
        answers.collect()
    }

    /// Waits for a reply up to the configured deadline, even if every caller is dropped. If there is no reply, that
    /// counts as a failure.
    async fn wait_for_reply<T>(
        self: &Arc<Self>,
        sent_at: Instant,
        reply: impl Future<Output = T>,
    ) -> Option<T> {
        let timeout = self.shared.options.deadline_within(None);
        let end = sent_at + timeout;
        let mut reply = pin!(reply);
        loop {
            let wake = end.min(self.queue.silent_at(sent_at, timeout));
            if let Some(reply) = ready_by(wake, &mut reply).await {
                return Some(reply);
            }
            // after a pause of this process, the reply may have arrived but not been read
            yield_now().await;
            if let Some(reply) = ready_by(wake, &mut reply).await {
                return Some(reply);
            }
            let now = Instant::now();
            let is_over = now >= end;
            if let Some(silence) = self.queue.count_silence(sent_at, timeout, now) {
                self.failed(Failure::timeout(format!("no reply for {silence:.0?}")));
            } else if is_over && self.queue.count_failure(sent_at, now) {
                // other calls were answered after this one was sent
                self.failed(Failure::timeout(format!("no answer within {timeout:?}")));
            }
            if is_over {
                return None;
            }
        }
    }

    /// Counts a failure of the server. After several consecutive failures the circuit breaker opens, and a background
    /// task probes the server.
    fn failed(self: &Arc<Self>, failure: Failure) {
        // without a runtime, no task could probe the server
        if let Ok(runtime) = Handle::try_current()
            && self.breaker.failed(failure)
        {
            self.start_probing(&runtime);
        }
    }
}

/// Replaces answers that do not fit their checks by errors: a tier without an answer would not be enforced.
fn validated(
    checks: &[Check],
    decided: Vec<Result<CheckAnswer, StoreError>>,
) -> Vec<Result<CheckAnswer, StoreError>> {
    let malformed = || StoreError::Ambiguous("the answer of the store does not fit the call".to_owned());
    if decided.len() != checks.len() {
        return checks.iter().map(|_| Err(malformed())).collect();
    }
    let fits = |check: &Check, answer: CheckAnswer| {
        if answer.answers.len() == check.tiers().len() { Ok(answer) } else { Err(malformed()) }
    };
    checks.iter().zip(decided).map(|(check, answer)| fits(check, answer?)).collect()
}

/// Whether an operation may make units available, which ends cached denials.
fn frees_units(check: &Check) -> bool {
    match check.hold() {
        Some(hold) => matches!(hold.operation, HoldOperation::Settle { .. } | HoldOperation::Revert { .. }),
        None => matches!(check.operation(), Operation::Refund { .. }),
    }
}

/// Whether an error is a failure of the store. A late call may be due to a short deadline of the caller.
fn is_failure(error: &&StoreError) -> bool {
    !matches!(error, StoreError::Late(_))
}

/// The answers of a check's tiers, shared by all callers of that check, and the time of the decision.
type BatchAnswer = (Arc<[Answer]>, Timestamp);

/// The position of a request among identical ones, and how many of them were admitted.
#[derive(Clone, Copy)]
struct Position {
    index: u32,
    admitted: u32,
}

impl Position {
    const ALONE: Self = Self { index: 0, admitted: 1 };
}

impl CheckShares {
    /// Whether all enforced tiers pass.
    fn is_allowed(&self, check: &Check) -> bool {
        let tier = |position: usize| &check.tiers()[position].terms;
        self.shares.iter().all(|(position, share)| share.passes || tier(*position).mode == Mode::Shadow)
    }

    fn from_store(check: &Check, answers: &[Answer], position: Position, at: Timestamp) -> Self {
        let Position { index, admitted } = position;
        let shares = check
            .tiers()
            .iter()
            .zip(answers)
            .map(|(tier, answer)| answer.share(&tier.terms, index, admitted));
        let mut holds = Self::holds_of(check, answers);
        if index > 0 {
            // reported once, with the first of the identical requests
            holds.iter_mut().for_each(|hold| hold.released = 0);
        }
        Self { at: Some(at), source: Source::Store, shares: shares.enumerate().collect(), holds }
    }
}

/// Waits for a call up to a deadline. A call without an answer in time may have taken effect.
async fn with_deadline<T>(
    deadline: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    match ready_by(Instant::now() + deadline, call).await {
        Some(answer) => answer,
        None => Err(no_answer_within(deadline)),
    }
}

/// Returns the output of a future if it is ready by `deadline`.
async fn ready_by<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    // a ready future needs no timer, and therefore no runtime
    let ready = poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    });
    match ready.await {
        Some(output) => Some(output),
        None => timeout_at(deadline, future).await.ok(),
    }
}

fn no_answer_within(deadline: Duration) -> StoreError {
    StoreError::Ambiguous(format!("no answer within {deadline:?}"))
}
