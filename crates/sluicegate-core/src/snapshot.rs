//! The state of a counter at one moment, for display. No decision depends on it.

use crate::algorithm::token_bucket::Level;

/// The largest number of charges in the snapshot of a sliding log. It contains the newest ones.
pub const MAX_CHARGES: usize = 500;

/// The units that count at one moment. Times are microseconds since the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// One window. The units charged in it count in full until its end.
    FixedWindow(Span),
    /// The newest charges that count, oldest first, at most [`MAX_CHARGES`]. Each span reaches from the charge until it
    /// stops counting.
    SlidingLog(Vec<Span>),
    /// The previous window, which fades out, and the current one, which fades out once it has ended.
    SlidingCounter {
        /// The previous window.
        previous: Span,
        /// The current window.
        current: Span,
        /// When no units count any more; 0 if none count now.
        ends_us: u64,
    },
    /// The level of the bucket and the rate at which it drains.
    TokenBucket(Level),
    /// The units of live holds, and when the first and the last of them expire.
    Concurrency(Span),
}

/// Units and the interval in which they were charged or count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Start.
    pub from_us: u64,
    /// End.
    pub until_us: u64,
    /// Number of units.
    pub units: u64,
}
