//! hyper's timer for heads of requests.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant as StdInstant},
};

use hyper::rt;
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep};

use crate::aside::Aside;

/// The timer of one connection, of which hyper has at most one run at a time. hyper sets it for each request and lets it go soon after;
/// here it is only set again when it goes off too early, so that a request costs no timer. Cheap to clone; all clones are the same timer.
#[derive(Clone)]
pub(crate) struct Unhurried(Arc<Mutex<Aside<Sleep>>>);

impl Unhurried {
    /// One that mostly runs for so long.
    pub(crate) fn new(usually: Duration) -> Self {
        Self(Arc::new(Mutex::new(Aside::new(sleep(usually)))))
    }
}

impl rt::Timer for Unhurried {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn rt::Sleep>> {
        self.sleep_until(self.now() + duration)
    }

    fn sleep_until(&self, deadline: StdInstant) -> Pin<Box<dyn rt::Sleep>> {
        Box::pin(Running { timer: self.clone(), until: deadline.into() })
    }

    fn now(&self) -> StdInstant {
        Instant::now().into()
    }
}

struct Running {
    timer: Unhurried,
    until: Instant,
}

impl Future for Running {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut timer = self.timer.0.lock();
        if self.until < timer.look().deadline() {
            timer.change().reset(self.until);
        }
        loop {
            ready!(Pin::new(&mut *timer).poll(context));
            // whoever asks once more is told once more
            let timer = timer.change();
            if self.until <= Instant::now() {
                return Poll::Ready(());
            }
            timer.reset(self.until);
        }
    }
}

impl rt::Sleep for Running {}

#[cfg(test)]
mod tests {
    use hyper::rt::Timer;
    use tokio::time::advance;

    use super::*;

    const USUALLY: Duration = Duration::from_secs(30);

    async fn takes(timer: &Unhurried, duration: Duration) {
        let begin = Instant::now();
        timer.sleep(duration).await;
        let took = begin.elapsed();
        assert!(
            took >= duration && took <= duration + Duration::from_millis(2),
            "{took:?}, not {duration:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn it_goes_off_in_time_however_it_was_set_before() {
        let timer = Unhurried::new(USUALLY);
        for seconds in [10, 30, 60, 30, 1] {
            takes(&timer, Duration::from_secs(seconds)).await;
        }
        // one that was let go, and one after the timer went off with nobody there
        drop(timer.sleep(USUALLY));
        advance(2 * USUALLY).await;
        takes(&timer, USUALLY).await;
        let mut sleep = timer.sleep(USUALLY);
        advance(USUALLY + Duration::from_millis(1)).await;
        sleep.as_mut().await;
        sleep.await;
    }
}
