//! The calls of a connection, answered in the connection's own task.
//!
//! hyper would make each call a task of its own. Nearly all are answered the first time they are looked at, so that a task costs more
//! than it is for; and answers that come from several cores are written one by one. Here those that came together are answered
//! one after the other, and leave in few writes.

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

/// How many calls are answered before their answers are written, and others on the same core have their turn: enough that a
/// write costs each of them little, and few enough that their client does not have to wait for all of them.
const CALLS_PER_TURN: usize = 8;

/// While so many are left over, the connection takes no more: a client that opens and closes streams would leave ever more of them.
const MAX_LEFT_OVER: usize = 100;

/// A call, from its first look to the end of its answer.
type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The calls of one connection. There are never more than it may have streams, and [`MAX_LEFT_OVER`].
#[derive(Default)]
pub(super) struct Turns {
    arrived: Arrived,
    /// Those that could not be answered at once.
    waiting: FuturesUnordered<Call>,
}

/// Where hyper leaves the calls that nobody has looked at yet.
#[derive(Clone, Default)]
pub(super) struct Arrived(Arc<Mutex<VecDeque<Call>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Arrived {
    fn execute(&self, call: F) {
        self.0.lock().push_back(Box::pin(call));
    }
}

impl Turns {
    /// Where hyper is to leave calls.
    pub(super) fn arrived(&self) -> Arrived {
        self.arrived.clone()
    }

    /// Takes calls from the connection, and gives it their answers. Ready when the connection has ended.
    pub(super) fn poll<C: Future>(
        &mut self,
        connection: Pin<&mut C>,
        context: &mut Context<'_>,
    ) -> Poll<C::Output> {
        if self.arrived.count() < MAX_LEFT_OVER
            && let Poll::Ready(ended) = connection.poll(context)
        {
            return Poll::Ready(ended);
        }
        self.answer(context);
        Poll::Pending
    }

    /// A call that is answered wakes the connection, which has it written in the next turn.
    fn answer(&mut self, context: &mut Context<'_>) {
        for _ in 0..CALLS_PER_TURN {
            let Some(mut call) = self.arrived.next() else { break };
            if call.as_mut().poll(context).is_pending() {
                self.waiting.push(call);
            }
        }
        while let Poll::Ready(Some(())) = self.waiting.poll_next_unpin(context) {}
        if self.arrived.count() > 0 {
            context.waker().wake_by_ref();
        }
    }
}

/// Those that nobody has looked at when the connection ends are not decided. Each knows where hyper leaves calls, and so itself:
/// nobody else would let go of them.
impl Drop for Turns {
    fn drop(&mut self) {
        let left = mem::take(&mut *self.arrived.0.lock());
        drop(left);
    }
}

impl Arrived {
    fn next(&self) -> Option<Call> {
        self.0.lock().pop_front()
    }

    fn count(&self) -> usize {
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

    /// A connection that brings so many calls, once, and how often it was looked at.
    async fn bringing(count: usize, arrived: Arrived, looks: Arc<AtomicUsize>, answered: Arc<AtomicUsize>) {
        for _ in 0..count {
            let answered = Arc::clone(&answered);
            arrived.execute(async move {
                answered.fetch_add(1, Ordering::Relaxed);
            });
        }
        poll_fn::<(), _>(|_| {
            looks.fetch_add(1, Ordering::Relaxed);
            Poll::Pending
        })
        .await
    }

    #[test]
    fn calls_that_came_together_are_answered_in_turns_and_no_more_are_taken_than_are_kept() {
        let (looks, answered, wakes) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<Wakes>)>::default();
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut turns = Turns::default();
        let brought = MAX_LEFT_OVER + 2 * CALLS_PER_TURN;
        let connection = bringing(brought, turns.arrived(), Arc::clone(&looks), Arc::clone(&answered));
        let mut connection = std::pin::pin!(connection);
        let mut turn = || {
            assert!(turns.poll(connection.as_mut(), &mut context).is_pending());
            (
                answered.load(Ordering::Relaxed),
                looks.load(Ordering::Relaxed),
                wakes.0.swap(0, Ordering::Relaxed),
            )
        };
        assert_eq!(turn(), (CALLS_PER_TURN, 1, 1), "some are left, for a turn that comes at once");
        assert_eq!(turn(), (2 * CALLS_PER_TURN, 1, 1), "and the connection brings no more for now");
        assert_eq!(turn(), (3 * CALLS_PER_TURN, 1, 1));
        assert_eq!(turn(), (4 * CALLS_PER_TURN, 2, 1), "now it does, and has answers to write");
        for _ in 4..brought.div_ceil(CALLS_PER_TURN) {
            turn();
        }
        assert_eq!(turn(), (brought, looks.load(Ordering::Relaxed), 0));
    }

    #[test]
    fn a_call_that_waits_holds_nobody_up_and_is_answered_in_the_end() {
        let wakes = Arc::<Wakes>::default();
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut turns = Turns::default();
        let (go, wait) = oneshot::channel::<()>();
        let (first, second) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let (waits, passes) = (Arc::clone(&first), Arc::clone(&second));
        turns.arrived().execute(async move {
            waits.fetch_add(usize::from(wait.await.is_ok()), Ordering::Relaxed);
        });
        turns.arrived().execute(async move {
            passes.fetch_add(1, Ordering::Relaxed);
        });
        let mut connection = std::pin::pin!(pending::<()>());
        let mut turn = || turns.poll(connection.as_mut(), &mut context).is_pending();
        assert!(turn());
        assert_eq!((first.load(Ordering::Relaxed), second.load(Ordering::Relaxed)), (0, 1));
        wakes.0.store(0, Ordering::Relaxed);
        go.send(()).unwrap();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(turn());
        assert_eq!(first.load(Ordering::Relaxed), 1);
        assert!(turns.poll(std::pin::pin!(ready(())), &mut context).is_ready(), "as the connection ends");
    }

    #[test]
    fn calls_that_nobody_looked_at_end_with_the_connection() {
        let turns = Turns::default();
        let (held, arrived) = (Arc::new(()), turns.arrived());
        let (holds, knows) = (Arc::clone(&held), arrived.clone());
        // as hyper's do
        arrived.execute(async move { drop((holds, knows)) });
        drop((turns, arrived));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
