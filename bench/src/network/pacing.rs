//! Arrivals of an open loop: requests start at times that do not depend on the answers.
//!
//! A dedicated thread sleeps until the next arrival and submits all that are due. tokio's timers would bunch
//! arrivals by the millisecond.

use std::{
    num::NonZeroU64,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use tokio::{runtime::Handle, sync::mpsc};

/// Arrivals are the same for every contestant of a round.
#[derive(Clone, Copy, Debug)]
pub struct Arrivals {
    pub per_second: f64,
    pub duration: Duration,
    pub seed: u64,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The intended start. Latencies are measured from here.
    pub intended: Instant,
    /// Time since the first moment of the schedule.
    pub offset: Duration,
    pub random: u64,
}

impl Arrivals {
    /// Starts a task for each arrival at its time, and returns when all have ended.
    pub async fn run<F, T>(self, request: F) -> Result<()>
    where
        F: Fn(Arrival) -> T + Send + 'static,
        T: Future<Output = ()> + Send + 'static,
    {
        // The channel is closed when the last sender is dropped, that is, when all tasks have ended.
        let (running, mut ended) = mpsc::channel::<()>(1);
        let runtime = Handle::current();
        let pace = move || {
            // With the default slack each sleep would be up to 50 us too long.
            let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
            let start = Instant::now();
            for (offset, random) in self.schedule() {
                let intended = start + offset;
                if let Some(wait) = intended.checked_duration_since(Instant::now()) {
                    thread::sleep(wait);
                }
                let (task, running) = (request(Arrival { intended, offset, random }), running.clone());
                runtime.spawn(async move {
                    task.await;
                    drop(running);
                });
            }
        };
        tokio::task::spawn_blocking(pace).await?;
        ended.recv().await;
        Ok(())
    }

    /// Poisson arrivals: exponentially distributed gaps.
    fn schedule(self) -> impl Iterator<Item = (Duration, u64)> {
        let mut random = fastrand::Rng::with_seed(self.seed);
        let mut seconds = 0.0;
        std::iter::from_fn(move || {
            seconds -= (1.0 - random.f64()).ln() / self.per_second;
            let offset = Duration::from_secs_f64(seconds);
            (offset < self.duration).then(|| (offset, random.u64(..)))
        })
    }
}
