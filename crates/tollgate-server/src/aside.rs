//! Something to wait for beside something that happens all the time.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::Mutex;

/// A future that is polled only once it was woken: where it stands beside one that is polled with every request, it costs nothing.
pub(crate) struct Aside<F> {
    future: Pin<Box<F>>,
    bell: Arc<Bell>,
    /// Rings the bell.
    waker: Waker,
    /// Whom the bell wakes.
    owner: Option<Waker>,
}

struct Bell {
    has_rung: AtomicBool,
    owner: Mutex<Option<Waker>>,
}

impl<F: Future> Aside<F> {
    pub(crate) fn new(future: F) -> Self {
        let bell = Arc::new(Bell { has_rung: AtomicBool::new(true), owner: Mutex::default() });
        Self { future: Box::pin(future), waker: Waker::from(Arc::clone(&bell)), bell, owner: None }
    }

    /// The future, to look at it.
    pub(crate) fn look(&self) -> &F {
        &self.future
    }

    /// The future, to change it; it is polled again in any case.
    pub(crate) fn change(&mut self) -> Pin<&mut F> {
        self.bell.has_rung.store(true, Ordering::Relaxed);
        self.future.as_mut()
    }
}

impl<F: Future> Future for Aside<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { future, bell, waker, owner } = self.get_mut();
        if !owner.as_ref().is_some_and(|owner| owner.will_wake(context.waker())) {
            *owner = Some(context.waker().clone());
            bell.owner.lock().clone_from(owner);
        }
        // whoever rings does so before it looks for the owner: one that found another owner is heard here
        if !bell.has_rung.load(Ordering::Relaxed) || !bell.has_rung.swap(false, Ordering::Acquire) {
            return Poll::Pending;
        }
        future.as_mut().poll(&mut Context::from_waker(waker))
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.has_rung.store(true, Ordering::Release);
        let owner = self.owner.lock().clone();
        if let Some(owner) = owner {
            owner.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        future::{pending, poll_fn},
        pin::pin,
        thread,
        time::Duration,
    };

    use tokio::{
        sync::oneshot,
        task::yield_now,
        time::{Instant, sleep, timeout},
    };

    use super::*;

    #[tokio::test]
    async fn only_what_was_woken_is_polled() {
        let polls = Cell::new(0);
        let (tell, told) = oneshot::channel();
        let mut told = pin!(told);
        let mut aside = Aside::new(poll_fn(|context| {
            polls.set(polls.get() + 1);
            told.as_mut().poll(context)
        }));
        for _ in 0..10 {
            tokio::select! {
                biased;
                _ = &mut aside => unreachable!("nothing was told"),
                () = yield_now() => {}
            }
        }
        assert_eq!(polls.get(), 1);
        tell.send("news").unwrap();
        assert_eq!((aside.await, polls.get()), (Ok("news"), 2));
    }

    #[tokio::test]
    async fn whoever_has_it_now_is_woken() {
        let (tell, told) = oneshot::channel::<()>();
        let mut aside = Aside::new(told);
        // somebody else looks first
        assert!(Pin::new(&mut aside).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let waiting = tokio::spawn(aside);
        yield_now().await;
        tell.send(()).unwrap();
        timeout(Duration::from_secs(5), waiting).await.expect("it is woken").unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_changed_is_polled_again() {
        let mut timer = Aside::new(sleep(Duration::from_secs(60)));
        assert!(Pin::new(&mut timer).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let soon = Instant::now() + Duration::from_secs(1);
        timer.change().reset(soon);
        timer.await;
        assert!(Instant::now() < soon + Duration::from_secs(1));
    }

    /// The bell rings at any moment: before, between and after looks at it.
    #[test]
    fn no_ring_is_missed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for round in 0..2_000 {
            let (ring, rung) = oneshot::channel::<()>();
            let ringing = thread::spawn(move || ring.send(()).unwrap());
            runtime.block_on(async {
                let looks = async {
                    for _ in 0..round % 50 {
                        yield_now().await;
                    }
                    pending().await
                };
                let heard = async {
                    tokio::select! {
                        biased;
                        heard = Aside::new(rung) => heard.unwrap(),
                        () = looks => {}
                    }
                };
                timeout(Duration::from_secs(5), heard).await.expect("it is heard");
            });
            ringing.join().unwrap();
        }
    }
}
