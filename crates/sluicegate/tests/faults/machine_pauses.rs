//! Measures pauses of the machine: on shared machines, whole processes may stop for seconds. A thread outside the
//! runtime wakes up at a fixed interval, so that a blocked runtime does not count as a pause.

use std::{
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::time::Instant;

const INTERVAL: Duration = Duration::from_millis(5);
/// Delay of a wake-up that is not counted.
const TOLERANCE: Duration = Duration::from_millis(50);

static MONITOR: Once = Once::new();
static TOTAL_PAUSE_MILLIS: AtomicU64 = AtomicU64::new(0);

/// Returns the total time of pauses since the first call of this function.
pub(crate) fn total_pause() -> Duration {
    MONITOR.call_once(|| drop(thread::spawn(monitor)));
    Duration::from_millis(TOTAL_PAUSE_MILLIS.load(Ordering::Relaxed))
}

fn monitor() {
    let mut last = Instant::now();
    loop {
        thread::park_timeout(INTERVAL);
        let now = Instant::now();
        if now - last > TOLERANCE {
            let millis = u64::try_from((now - last).as_millis()).unwrap();
            TOTAL_PAUSE_MILLIS.fetch_add(millis, Ordering::Relaxed);
        }
        last = now;
    }
}
