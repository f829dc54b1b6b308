//! How long the machine stood still: on shared ones, whole processes do for seconds, which is nobody's fault here. A thread that
//! does nothing but wake up notices it. It is none of the runtime's, so that a runtime that stands still is no excuse.

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
/// What a beat may be late without being counted.
const TOLERANCE: Duration = Duration::from_millis(50);

static MONITOR: Once = Once::new();
static TOTAL_PAUSE_MILLIS: AtomicU64 = AtomicU64::new(0);

/// For how long the machine has stood still up to now, since this was first asked.
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
