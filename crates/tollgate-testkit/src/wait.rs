//! Waiting for what other processes do: by asking again, for a bounded time, never by sleeping and hoping.

use std::fmt::Display;
use std::thread;
use std::time::{Duration, Instant};

/// A bound that is generous for anything a healthy machine does, however busy it is.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Time between two questions.
const INTERVAL: Duration = Duration::from_millis(5);

/// Blocks the thread until the condition holds.
///
/// # Panics
///
/// When it does not within the bound: `waited 5s in vain until {what}`.
pub fn until(what: impl Display, bound: Duration, mut condition: impl FnMut() -> bool) {
    for_some(what, bound, || condition().then_some(()));
}

/// Blocks the thread until there is an answer, and returns it.
///
/// # Panics
///
/// When there is none within the bound.
#[expect(clippy::disallowed_methods, reason = "other processes act in real time, and do not tell when")]
pub fn for_some<T>(what: impl Display, bound: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < bound, "waited {bound:?} in vain until {what}");
        thread::sleep(INTERVAL);
    }
}

/// Waits until the condition holds, and lets other tasks of the runtime go on meanwhile.
///
/// # Panics
///
/// When it does not within the bound.
#[expect(
    clippy::disallowed_methods,
    reason = "other processes act in real time, also if tokio's clock is paused"
)]
pub async fn until_async(what: impl Display, bound: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < bound, "waited {bound:?} in vain until {what}");
        tokio::time::sleep(INTERVAL).await;
    }
}
