//! hyper's executor for one connection: runs the calls in the connection's own task.
//!
//! By default hyper spawns a task per call. Nearly all calls complete on their first poll, so a task costs more than it gains, and
//! responses that finish on several cores are written one by one. Here, calls that arrive together run sequentially and their
//! responses are written together: 13.6 instead of 24.3 us of CPU per call.

use std::{
    collections::VecDeque,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::stream::{FuturesUnordered, StreamExt};
use hyper::rt::Executor;
use parking_lot::Mutex;

/// How many calls are started before responses are written and other tasks of the thread run: enough to share the cost of a write, few
/// enough that the first response does not wait for all calls.
const CALLS_PER_POLL: usize = 8;

/// While this many calls are queued, the connection is not read. Otherwise a client that opens and closes streams could
/// queue any number.
const MAX_QUEUED: usize = 100;

/// A call, from its first poll to the end of its response.
type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runs the calls of one connection. Their number is bounded by the connection's streams plus [`MAX_QUEUED`].
#[derive(Default)]
pub(super) struct ConnectionExecutor {
    queue: CallQueue,
    /// Calls that did not complete on their first poll.
    pending: FuturesUnordered<Call>,
}

/// Calls that have not been polled yet. hyper adds them as its executor.
#[derive(Clone, Default)]
pub(super) struct CallQueue(Arc<Mutex<VecDeque<Call>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for CallQueue {
    fn execute(&self, call: F) {
        self.0.lock().push_back(Box::pin(call));
    }
}

impl ConnectionExecutor {
    /// Returns the executor to configure hyper with.
    pub(super) fn queue(&self) -> CallQueue {
        self.queue.clone()
    }

    /// Polls the connection and its calls. Ready when the connection is closed.
    pub(super) fn poll<C: Future>(
        &mut self,
        connection: Pin<&mut C>,
        context: &mut Context<'_>,
    ) -> Poll<C::Output> {
        if self.queue.len() < MAX_QUEUED
            && let Poll::Ready(closed) = connection.poll(context)
        {
            return Poll::Ready(closed);
        }
        self.poll_calls(context);
        Poll::Pending
    }

    /// A call that completes wakes the connection, which writes the response on its next poll.
    fn poll_calls(&mut self, context: &mut Context<'_>) {
        for _ in 0..CALLS_PER_POLL {
            let Some(mut call) = self.queue.pop() else { break };
            if call.as_mut().poll(context).is_pending() {
                self.pending.push(call);
            }
        }
        while let Poll::Ready(Some(())) = self.pending.poll_next_unpin(context) {}
        if self.queue.len() > 0 {
            context.waker().wake_by_ref();
        }
    }
}

/// Drops the calls that were not polled. Each holds a handle to the queue, so the queue would otherwise keep itself alive.
impl Drop for ConnectionExecutor {
    fn drop(&mut self) {
        // Dropped after the lock is released.
        let queued = mem::take(&mut *self.queue.0.lock());
        drop(queued);
    }
}

impl CallQueue {
    fn pop(&self) -> Option<Call> {
        self.0.lock().pop_front()
    }

    fn len(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, poll_fn, ready},
        sync::atomic::{AtomicUsize, Ordering},
        task::{Wake, Waker},
    };

    use tokio::sync::oneshot;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A connection that adds this many calls at once, and counts how often it is polled.
    async fn connection(
        count: usize,
        queue: CallQueue,
        polls: Arc<AtomicUsize>,
        completed: Arc<AtomicUsize>,
    ) {
        for _ in 0..count {
            let completed = Arc::clone(&completed);
            queue.execute(async move {
                completed.fetch_add(1, Ordering::Relaxed);
            });
        }
        poll_fn::<(), _>(|_| {
            polls.fetch_add(1, Ordering::Relaxed);
            Poll::Pending
        })
        .await
    }

    #[test]
    fn calls_run_in_groups_and_the_queue_is_bounded() {
        let (polls, completed, wakes) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<Wakes>)>::default();
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut executor = ConnectionExecutor::default();
        let added = MAX_QUEUED + 2 * CALLS_PER_POLL;
        let connection = connection(added, executor.queue(), Arc::clone(&polls), Arc::clone(&completed));
        let mut connection = std::pin::pin!(connection);
        let mut poll = || {
            assert!(executor.poll(connection.as_mut(), &mut context).is_pending());
            (
                completed.load(Ordering::Relaxed),
                polls.load(Ordering::Relaxed),
                wakes.0.swap(0, Ordering::Relaxed),
            )
        };
        assert_eq!(poll(), (CALLS_PER_POLL, 1, 1), "calls are left, and the task is woken");
        assert_eq!(poll(), (2 * CALLS_PER_POLL, 1, 1), "the queue is full: the connection is not polled");
        assert_eq!(poll(), (3 * CALLS_PER_POLL, 1, 1));
        assert_eq!(poll(), (4 * CALLS_PER_POLL, 2, 1), "the queue has room: the connection is polled again");
        for _ in 4..added.div_ceil(CALLS_PER_POLL) {
            poll();
        }
        assert_eq!(poll(), (added, polls.load(Ordering::Relaxed), 0));
    }

    #[test]
    fn a_pending_call_does_not_delay_others_and_completes_later() {
        let wakes = Arc::<Wakes>::default();
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut executor = ConnectionExecutor::default();
        let (finish, finished) = oneshot::channel::<()>();
        let (first, second) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (pending_call, ready_call) = (Arc::clone(&first), Arc::clone(&second));
        executor.queue().execute(async move {
            pending_call.fetch_add(usize::from(finished.await.is_ok()), Ordering::Relaxed);
        });
        executor.queue().execute(async move {
            ready_call.fetch_add(1, Ordering::Relaxed);
        });
        let mut connection = std::pin::pin!(pending::<()>());
        let mut poll = || executor.poll(connection.as_mut(), &mut context).is_pending();
        assert!(poll());
        assert_eq!((first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)), (0, 1));
        wakes.0.store(0, Ordering::Relaxed);
        finish.send(()).unwrap();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(poll());
        assert_eq!(first.load(Ordering::Relaxed), 1);
        assert!(
            executor.poll(std::pin::pin!(ready(())), &mut context).is_ready(),
            "the connection is closed"
        );
    }

    #[test]
    fn queued_calls_are_dropped_with_the_connection() {
        let executor = ConnectionExecutor::default();
        let (held, queue) = (Arc::new(()), executor.queue());
        let (holds, own_queue) = (Arc::clone(&held), queue.clone());
        // hyper's calls hold their executor too.
        queue.execute(async move { drop((holds, own_queue)) });
        drop((executor, queue));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
