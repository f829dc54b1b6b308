//! Faults of the connections to a store that is up, injected by a proxy.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use sluicegate_testkit::proxy::{Mode, Proxy, RequestFilter};

const KILL_INTERVAL: Duration = Duration::from_millis(50);
const DROPPED_REPLY: u64 = 10;
/// The duration of each phase: the store is up, then down for the same time.
const FLAP_INTERVAL: Duration = Duration::from_millis(200);

/// The fault of the connections.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// They are reset every [`KILL_INTERVAL`].
    Killed,
    /// Every tenth reply is dropped, and its connection closed.
    DroppedReplies,
    /// The proxy is in this mode for half of the time.
    Flapping(Mode),
}

impl Fault {
    /// Runs `load` while this fault lasts.
    pub async fn during<T>(
        self,
        proxy: Proxy,
        duration: Duration,
        load: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let end = Instant::now() + duration;
        let faults = tokio::task::spawn_blocking(move || {
            self.inject(&proxy, end);
            proxy
        });
        let result = load.await?;
        faults.await?;
        Ok(result)
    }

    /// Starts the fault, and repeats its steps until `end`. Blocks the thread.
    fn inject(self, proxy: &Proxy, end: Instant) {
        match self {
            Self::Killed => every(KILL_INTERVAL, end, |_| proxy.reset_connections()),
            Self::DroppedReplies => proxy.drop_every_nth_reply(DROPPED_REPLY, RequestFilter::SCRIPTS),
            Self::Flapping(down) => every(FLAP_INTERVAL, end, |step| {
                proxy.set(if step % 2 == 0 { down } else { Mode::Pass });
            }),
        }
    }
}

/// Runs numbered steps until `end`, the first one after an interval.
fn every(interval: Duration, end: Instant, run: impl Fn(u64)) {
    let mut next = Instant::now() + interval;
    for step in 0.. {
        if next >= end {
            return;
        }
        thread::sleep(next.saturating_duration_since(Instant::now()));
        run(step);
        next += interval;
    }
}
