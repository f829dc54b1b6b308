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

const BEAT: Duration = Duration::from_millis(5);
/// What a beat may be late without being counted.
const LATE: Duration = Duration::from_millis(50);

static BEATS: Once = Once::new();
static STOOD_STILL_MILLIS: AtomicU64 = AtomicU64::new(0);

/// For how long the machine has stood still up to now, since this was first asked.
pub(crate) fn stood_still() -> Duration {
    BEATS.call_once(|| drop(thread::spawn(beat)));
    Duration::from_millis(STOOD_STILL_MILLIS.load(Ordering::Relaxed))
}

fn beat() {
    let mut last = Instant::now();
    loop {
        thread::park_timeout(BEAT);
        let now = Instant::now();
        if now - last > LATE {
            let millis = u64::try_from((now - last).as_millis()).unwrap();
            STOOD_STILL_MILLIS.fetch_add(millis, Ordering::Relaxed);
        }
        last = now;
    }
}
