//! The connection slots of one listener: how many there are, which connection is evicted when all are taken, and the reaper that closes
//! connections over their timeout.
//!
//! A connection that sends nothing, or half a request, costs its client next to nothing. It must not keep other clients out.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::poll_fn,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

/// How long a connection must have been idle before it is evicted for a new one.
pub(crate) const MIN_IDLE: Duration = Duration::from_secs(1);

/// How long a connection counts as active after its last request, or after it was accepted.
const ACTIVE: Duration = Duration::from_secs(5);

/// How often a pending connection checks for an idle connection to evict.
const EVICTION_INTERVAL: Duration = Duration::from_millis(100);

/// How often the reaper checks all connections. A timeout takes effect late by up to this.
pub const REAP_INTERVAL: Duration = Duration::from_secs(1);

/// How long connections may send no complete request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// Before the first request.
    pub(crate) first_request: Duration,
    /// After a request.
    pub(crate) idle: Duration,
}

/// The slots of one listener, and the connections that occupy them.
pub(crate) struct ConnectionLimiter {
    free: Arc<Semaphore>,
    timeouts: Timeouts,
    epoch: Instant,
    next_id: AtomicU64,
    /// By id, so that the oldest of equally idle connections comes first. Bounded by the number of slots.
    occupied: Arc<Mutex<BTreeMap<u64, Activity>>>,
}

/// The slot of one connection, freed on drop.
pub(crate) struct Slot {
    occupied: Arc<Mutex<BTreeMap<u64, Activity>>>,
    id: u64,
    activity: Activity,
    _permit: OwnedSemaphorePermit,
}

/// What a connection does, and whether it is to be closed. Cheap to clone; all clones belong to the same connection.
#[derive(Clone)]
pub(crate) struct Activity(Arc<State>);

struct State {
    epoch: Instant,
    idle_timeout: Duration,
    /// Requests that are being decided. While there is one, the connection is not idle.
    in_flight: AtomicU32,
    /// Responses whose body is being sent. Such a connection may be evicted, but is not over its timeout.
    streaming: AtomicU32,
    has_requested: AtomicBool,
    /// Since when the connection is idle, in milliseconds after the epoch. Meaningless while a request is in flight.
    idle_since: AtomicU64,
    /// When the next request must be complete, in milliseconds after the epoch.
    deadline: AtomicU64,
    /// Set by the reaper after the deadline.
    reaped: AtomicBool,
    is_shutting_down: AtomicBool,
    /// Wakes the connection's task when one of the two is set.
    waker: AtomicWaker,
    task: OnceLock<AbortHandle>,
    /// The thread that serves the connection, where threads keep their connections.
    thread: OnceLock<usize>,
}

/// Why a connection is to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// It has sent no complete request in time.
    TimedOut,
    /// The server stops.
    Shutdown,
}

/// A request that is being decided, until this is dropped.
pub(crate) struct InFlight(Activity);

/// A response whose body is being sent, until this is dropped.
pub(crate) struct Streaming(Activity);

impl ConnectionLimiter {
    pub(crate) fn new(max_connections: usize, timeouts: Timeouts) -> Self {
        Self {
            free: Arc::new(Semaphore::new(max_connections)),
            timeouts,
            epoch: Instant::now(),
            next_id: AtomicU64::new(0),
            occupied: Arc::default(),
        }
    }

    /// Waits for a slot. While there is none, evicts the connection that has been idle the longest; those that never sent a request
    /// go first.
    pub(crate) async fn acquire(&self) -> Slot {
        loop {
            if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
                return self.occupy(permit);
            }
            self.evict_most_idle();
            let freed = timeout(EVICTION_INTERVAL, Arc::clone(&self.free).acquire_owned()).await;
            if let Ok(permit) = freed {
                return self.occupy(permit.expect("the semaphore is never closed"));
            }
        }
    }

    fn occupy(&self, permit: OwnedSemaphorePermit) -> Slot {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let activity = Activity::new(self.epoch, self.timeouts);
        self.occupied.lock().insert(id, activity.clone());
        Slot { occupied: Arc::clone(&self.occupied), id, activity, _permit: permit }
    }

    /// How many active connections each thread serves.
    pub(crate) fn active_per_thread(&self, threads: usize) -> Vec<usize> {
        let (mut active, now) = (vec![0; threads], Instant::now());
        for activity in self.occupied.lock().values().filter(|activity| activity.idle_time(now) < ACTIVE) {
            if let Some(count) = activity.0.thread.get().and_then(|&thread| active.get_mut(thread)) {
                *count += 1;
            }
        }
        active
    }

    fn evict_most_idle(&self) {
        let (occupied, now) = (self.occupied.lock(), Instant::now());
        let idle = occupied.values().filter(|activity| activity.idle_time(now) >= MIN_IDLE);
        let most_idle = idle.min_by_key(|activity| (activity.has_requested(), activity.idle_since()));
        if let Some(task) = most_idle.and_then(|activity| activity.0.task.get()) {
            task.abort();
        }
    }

    /// The reaper: closes connections over their timeout, for as long as it is polled.
    pub(crate) async fn reap(&self) -> Infallible {
        loop {
            sleep(REAP_INTERVAL).await;
            let now = Instant::now();
            for activity in self.occupied.lock().values() {
                if activity.is_overdue(now) {
                    activity.0.reaped.store(true, Ordering::Release);
                    activity.0.waker.wake();
                }
            }
        }
    }

    /// Requests every connection to close.
    pub(crate) fn shut_down(&self) {
        for activity in self.occupied.lock().values() {
            activity.shut_down();
        }
    }
}

impl Slot {
    pub(crate) fn activity(&self) -> Activity {
        self.activity.clone()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.occupied.lock().remove(&self.id);
    }
}

impl Activity {
    fn new(epoch: Instant, timeouts: Timeouts) -> Self {
        let activity = Self(Arc::new(State {
            epoch,
            idle_timeout: timeouts.idle,
            in_flight: AtomicU32::new(0),
            streaming: AtomicU32::new(0),
            has_requested: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
            deadline: AtomicU64::new(0),
            reaped: AtomicBool::new(false),
            is_shutting_down: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            task: OnceLock::new(),
            thread: OnceLock::new(),
        }));
        activity.set_idle(Instant::now(), timeouts.first_request);
        activity
    }

    /// The activity of a connection without a slot.
    pub(crate) fn detached(timeouts: Timeouts) -> Self {
        Self::new(Instant::now(), timeouts)
    }

    /// Sets the task that is aborted when the connection is evicted.
    pub(crate) fn set_task(&self, task: AbortHandle) {
        let _only_once = self.0.task.set(task);
    }

    /// Sets the thread that serves the connection.
    pub(crate) fn set_thread(&self, thread: usize) {
        let _only_once = self.0.thread.set(thread);
    }

    /// Records a request. The connection is idle again when everything that this returned is dropped.
    pub(crate) fn start_request(&self) -> InFlight {
        self.0.has_requested.store(true, Ordering::Relaxed);
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(self.clone())
    }

    /// Records a response whose body takes longer than its request.
    pub(crate) fn start_streaming(&self) -> Streaming {
        self.0.streaming.fetch_add(1, Ordering::Relaxed);
        Streaming(self.clone())
    }

    /// Whether the connection has ever sent a request.
    pub(crate) fn has_requested(&self) -> bool {
        self.0.has_requested.load(Ordering::Relaxed)
    }

    /// How long the connection has been idle.
    pub(crate) fn idle_time(&self, now: Instant) -> Duration {
        if self.0.in_flight.load(Ordering::Acquire) > 0 {
            return Duration::ZERO;
        }
        let since = Duration::from_millis(self.idle_since());
        now.duration_since(self.0.epoch).saturating_sub(since)
    }

    /// Sets when the next request must be complete.
    pub(crate) fn set_deadline(&self, deadline: Instant) {
        self.0.deadline.store(self.millis(deadline), Ordering::Relaxed);
    }

    /// Waits until the connection is to be closed, and returns why.
    pub(crate) async fn close_requested(&self) -> CloseReason {
        poll_fn(|context| self.poll_close_requested(context)).await
    }

    fn poll_close_requested(&self, context: &Context<'_>) -> Poll<CloseReason> {
        self.0.waker.register(context.waker());
        if self.is_shutting_down() {
            return Poll::Ready(CloseReason::Shutdown);
        }
        // A request may have arrived since the reaper set the flag.
        if self.0.reaped.load(Ordering::Acquire)
            && self.0.reaped.swap(false, Ordering::Relaxed)
            && self.is_overdue(Instant::now())
        {
            return Poll::Ready(CloseReason::TimedOut);
        }
        Poll::Pending
    }

    /// Whether the server stops.
    pub(crate) fn is_shutting_down(&self) -> bool {
        self.0.is_shutting_down.load(Ordering::Acquire)
    }

    /// Requests the connection to close because the server stops.
    pub(crate) fn shut_down(&self) {
        self.0.is_shutting_down.store(true, Ordering::Release);
        self.0.waker.wake();
    }

    /// Whether the deadline has passed, with no request in flight and no response being sent.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        self.0.in_flight.load(Ordering::Acquire) == 0
            && self.0.streaming.load(Ordering::Acquire) == 0
            && self.0.deadline.load(Ordering::Relaxed) <= self.millis(now)
    }

    fn set_idle(&self, now: Instant, timeout: Duration) {
        self.0.idle_since.store(self.millis(now), Ordering::Relaxed);
        self.set_deadline(now + timeout);
    }

    fn idle_since(&self) -> u64 {
        self.0.idle_since.load(Ordering::Relaxed)
    }

    fn millis(&self, instant: Instant) -> u64 {
        let elapsed = instant.duration_since(self.0.epoch).as_millis();
        u64::try_from(elapsed).expect("a process runs for less than 500 million years")
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let Activity(state) = &self.0;
        self.0.set_idle(Instant::now(), state.idle_timeout);
        // Released last: a thread that reads zero also reads the times.
        state.in_flight.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        let Activity(state) = &self.0;
        self.0.set_deadline(Instant::now() + state.idle_timeout);
        state.streaming.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::task::{JoinHandle, yield_now};

    use super::*;

    const TIMEOUTS: Timeouts =
        Timeouts { first_request: Duration::from_secs(10), idle: Duration::from_secs(60) };

    /// The activity and the task of a connection that has a slot.
    struct Open {
        activity: Activity,
        task: JoinHandle<()>,
    }

    impl Open {
        async fn acquire(limiter: &ConnectionLimiter) -> Self {
            let slot = timeout(2 * MIN_IDLE, limiter.acquire()).await.expect("a connection is evicted");
            let activity = slot.activity();
            let task = tokio::spawn(async move {
                let _slot = slot;
                pending().await
            });
            activity.set_task(task.abort_handle());
            Self { activity, task }
        }

        async fn assert_evicted(self) {
            assert!(self.task.await.unwrap_err().is_cancelled());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_idle_connection_is_evicted_and_none_with_a_request_in_flight() {
        let limiter = ConnectionLimiter::new(3, TIMEOUTS);
        let first = Open::acquire(&limiter).await;
        let second = Open::acquire(&limiter).await;
        let third = Open::acquire(&limiter).await;
        let in_flight = first.activity.start_request();
        drop((first.activity.start_request(), second.activity.start_request()));
        tokio::time::advance(MIN_IDLE).await;
        let begin = Instant::now();
        let fourth = Open::acquire(&limiter).await;
        third.assert_evicted().await;
        assert_eq!(begin.elapsed(), Duration::ZERO, "the third never sent a request");
        let fifth = Open::acquire(&limiter).await;
        second.assert_evicted().await;
        assert_eq!(begin.elapsed(), Duration::ZERO, "the fourth has just been accepted");
        drop(fifth.activity.start_request());
        let sixth = Open::acquire(&limiter).await;
        fourth.assert_evicted().await;
        assert!(begin.elapsed() >= MIN_IDLE && begin.elapsed() <= MIN_IDLE + EVICTION_INTERVAL * 2);
        for open in [first, fifth, sixth] {
            assert!(!open.task.is_finished());
            open.task.abort();
            open.assert_evicted().await;
        }
        drop(in_flight);
        assert!(limiter.occupied.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_thread_is_rated_by_its_active_connections() {
        let limiter = ConnectionLimiter::new(10, TIMEOUTS);
        let mut connections = Vec::new();
        for thread in [0, 0, 0, 1, 7] {
            let open = Open::acquire(&limiter).await;
            open.activity.set_thread(thread);
            connections.push(open);
        }
        assert_eq!(limiter.active_per_thread(2), [3, 1]);
        tokio::time::advance(ACTIVE).await;
        assert_eq!(limiter.active_per_thread(2), [0, 0]);
        drop(connections[3].activity.start_request());
        let _in_flight = connections[0].activity.start_request();
        assert_eq!(limiter.active_per_thread(2), [1, 1]);
        tokio::time::advance(ACTIVE).await;
        assert_eq!(limiter.active_per_thread(2), [1, 0]);
    }

    /// How long the reaper takes to close a connection.
    async fn time_to_close(limiter: &ConnectionLimiter, activity: &Activity) -> Duration {
        let begin = Instant::now();
        tokio::select! {
            never = limiter.reap() => match never {},
            reason = activity.close_requested() => assert_eq!(reason, CloseReason::TimedOut),
        }
        begin.elapsed()
    }

    fn assert_about(took: Duration, expected: Duration) {
        assert!(took >= expected && took <= expected + REAP_INTERVAL, "{took:?} instead of {expected:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_reaper_closes_connections_over_their_timeout() {
        let limiter = ConnectionLimiter::new(10, TIMEOUTS);
        let open = async || limiter.acquire().await;
        let unused = open().await;
        assert_about(time_to_close(&limiter, &unused.activity()).await, TIMEOUTS.first_request);
        let used = open().await;
        drop(used.activity().start_request());
        assert_about(time_to_close(&limiter, &used.activity()).await, TIMEOUTS.idle);
        let partial = open().await;
        drop(partial.activity().start_request());
        let soon = Duration::from_secs(5);
        partial.activity().set_deadline(Instant::now() + soon);
        assert_about(time_to_close(&limiter, &partial.activity()).await, soon);
    }

    #[tokio::test(start_paused = true)]
    async fn the_reaper_leaves_requests_in_flight_and_responses_alone() {
        let limiter = ConnectionLimiter::new(10, TIMEOUTS);
        let slot = limiter.acquire().await;
        let activity = slot.activity();
        let request = activity.start_request();
        let streaming = activity.start_streaming();
        drop(request);
        let closed = timeout(10 * TIMEOUTS.idle, time_to_close(&limiter, &activity)).await;
        assert!(closed.is_err(), "the response is not complete");
        drop(streaming);
        let request = activity.start_request();
        let closed = timeout(10 * TIMEOUTS.idle, time_to_close(&limiter, &activity)).await;
        assert!(closed.is_err(), "the request is not answered");
        drop(request);
        assert_about(time_to_close(&limiter, &activity).await, TIMEOUTS.idle);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_arrives_after_the_reaper_decided_keeps_the_connection() {
        let limiter = ConnectionLimiter::new(10, TIMEOUTS);
        let slot = limiter.acquire().await;
        let activity = slot.activity();
        let _reaped = timeout(TIMEOUTS.first_request + REAP_INTERVAL, limiter.reap()).await;
        assert!(activity.0.reaped.load(Ordering::Relaxed));
        drop(activity.start_request());
        assert_about(time_to_close(&limiter, &activity).await, TIMEOUTS.idle);
    }

    #[tokio::test]
    async fn a_shutdown_wakes_every_connection() {
        let limiter = ConnectionLimiter::new(10, TIMEOUTS);
        let slots = [limiter.acquire().await, limiter.acquire().await];
        let waiting = slots.each_ref().map(|slot| {
            let activity = slot.activity();
            tokio::spawn(async move { activity.close_requested().await })
        });
        yield_now().await;
        limiter.shut_down();
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap(), CloseReason::Shutdown);
        }
    }
}
