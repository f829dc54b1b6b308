//! Waits for other processes by polling a condition, for a bounded time.

use std::fmt::Display;
use std::thread;
use std::time::{Duration, Instant};

/// A timeout that is long enough for any wait on a busy but healthy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The time between two polls.
const INTERVAL: Duration = Duration::from_millis(5);

/// Blocks the thread until the condition holds.
///
/// # Panics
///
/// When it does not hold within the bound: `timed out after 5s waiting until {what}`.
pub fn until(what: impl Display, bound: Duration, mut condition: impl FnMut() -> bool) {
    for_some(what, bound, || condition().then_some(()));
}

/// Blocks the thread until `ask` returns a value, and returns it.
///
/// # Panics
///
/// When there is no value within the bound.
#[expect(clippy::disallowed_methods, reason = "other processes run in real time and send no notification")]
pub fn for_some<T>(what: impl Display, bound: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < bound, "timed out after {bound:?} waiting until {what}");
        thread::sleep(INTERVAL);
    }
}

/// Waits until the condition holds, without blocking the runtime.
///
/// # Panics
///
/// When it does not hold within the bound.
#[expect(
    clippy::disallowed_methods,
    reason = "other processes run in real time even if tokio's clock is paused"
)]
pub async fn until_async(what: impl Display, bound: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < bound, "timed out after {bound:?} waiting until {what}");
        tokio::time::sleep(INTERVAL).await;
    }
}
