//! The activity of one connection: its requests in flight, its timeouts, and whether it is to be closed.
//!
//! Only authenticated requests protect a connection from eviction: see [`connection_limit`](super::connection_limit).

use std::{
    future::poll_fn,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use tokio::{task::AbortHandle, time::Instant};

use super::connection_limit::INCOMPLETE_REQUEST_TIMEOUT;

/// How long a connection may take to send a complete request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    /// Before the first request.
    pub(crate) first_request: Duration,
    /// After a request.
    pub(crate) idle: Duration,
}

/// The activity of a connection, and whether it is to be closed. Cheap to clone; all clones belong to the same
/// connection.
#[derive(Clone)]
pub(crate) struct Activity(Arc<State>);

struct State {
    epoch: Instant,
    idle_timeout: Duration,
    /// Requests that are being decided.
    in_flight: AtomicU32,
    /// Responses whose body is being sent. Such a connection may be evicted, but is not over its timeout.
    streaming: AtomicU32,
    has_requested: AtomicBool,
    /// Whether bytes have arrived since the last request.
    is_receiving: AtomicBool,
    /// Whether the last request that needs a token had a valid one, or no tokens are configured.
    is_authenticated: AtomicBool,
    /// When the connection was accepted or its last authenticated request ended, in milliseconds after the epoch.
    idle_since: AtomicU64,
    /// When the next request must be complete, in milliseconds after the epoch.
    deadline: AtomicU64,
    /// Set by the reaper after the deadline.
    reaped: AtomicBool,
    is_shutting_down: AtomicBool,
    /// Wakes the connection's task when `reaped` or `is_shutting_down` is set.
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

impl Activity {
    pub(super) fn new(epoch: Instant, timeouts: Timeouts) -> Self {
        let activity = Self(Arc::new(State {
            epoch,
            idle_timeout: timeouts.idle,
            in_flight: AtomicU32::new(0),
            streaming: AtomicU32::new(0),
            has_requested: AtomicBool::new(false),
            is_receiving: AtomicBool::new(false),
            is_authenticated: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
            deadline: AtomicU64::new(0),
            reaped: AtomicBool::new(false),
            is_shutting_down: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            task: OnceLock::new(),
            thread: OnceLock::new(),
        }));
        let now = Instant::now();
        activity.0.idle_since.store(activity.millis(now), Ordering::Relaxed);
        activity.set_deadline(now + timeouts.first_request);
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

    /// Evicts the connection.
    pub(super) fn abort(&self) {
        if let Some(task) = self.0.task.get() {
            task.abort();
        }
    }

    /// The thread that serves the connection.
    pub(super) fn thread(&self) -> Option<usize> {
        self.0.thread.get().copied()
    }

    /// Records whether a request that needs a token had a valid one, or no tokens are configured.
    pub(crate) fn set_authenticated(&self, is_authenticated: bool) {
        self.0.is_authenticated.store(is_authenticated, Ordering::Relaxed);
    }

    /// Whether the last request that needs a token had a valid one, or no tokens are configured.
    pub(super) fn is_authenticated(&self) -> bool {
        self.0.is_authenticated.load(Ordering::Relaxed)
    }

    /// Records that bytes have arrived. If they are not followed by a complete request in time, the connection is closed.
    pub(crate) fn received(&self) {
        self.0.is_receiving.store(true, Ordering::Relaxed);
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

    /// Whether an authenticated request is in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.0.in_flight.load(Ordering::Acquire) > 0 && self.is_authenticated()
    }

    /// How long the connection has had no authenticated request.
    pub(crate) fn idle_time(&self, now: Instant) -> Duration {
        if self.is_busy() {
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

    /// Requests the connection to close if it is overdue.
    pub(super) fn reap(&self, now: Instant) {
        // The time of the first bytes is recorded here, so that receiving them does not read the clock.
        if self.0.is_receiving.load(Ordering::Relaxed) {
            let complete_by = self.millis(now + INCOMPLETE_REQUEST_TIMEOUT);
            self.0.deadline.fetch_min(complete_by, Ordering::Relaxed);
        }
        if self.is_overdue(now) {
            self.0.reaped.store(true, Ordering::Release);
            self.0.waker.wake();
        }
    }

    pub(super) fn idle_since(&self) -> u64 {
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
        let now = Instant::now();
        if self.0.is_authenticated() {
            state.idle_since.store(self.0.millis(now), Ordering::Relaxed);
        }
        state.is_receiving.store(false, Ordering::Relaxed);
        self.0.set_deadline(now + state.idle_timeout);
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
    use super::*;

    const TIMEOUTS: Timeouts =
        Timeouts { first_request: Duration::from_secs(10), idle: Duration::from_secs(60) };

    #[tokio::test(start_paused = true)]
    async fn only_authenticated_requests_end_the_idle_time() {
        let activity = Activity::detached(TIMEOUTS);
        let second = Duration::from_secs(1);
        let idle_seconds = |activity: &Activity| activity.idle_time(Instant::now()).as_secs();
        tokio::time::advance(second).await;
        let request = activity.start_request();
        assert_eq!(idle_seconds(&activity), 1, "a request that was not checked");
        drop(request);
        let request = activity.start_request();
        activity.set_authenticated(false);
        assert_eq!(idle_seconds(&activity), 1, "a request without a valid token");
        activity.set_authenticated(true);
        assert_eq!(idle_seconds(&activity), 0);
        tokio::time::advance(second).await;
        assert_eq!(idle_seconds(&activity), 0, "the request is in flight");
        drop(request);
        tokio::time::advance(second).await;
        assert_eq!(idle_seconds(&activity), 1);
        assert!(!activity.is_overdue(Instant::now()));
    }
}
