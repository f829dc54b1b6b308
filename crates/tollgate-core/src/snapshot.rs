//! What a counter holds at one moment, for people to look at. Nothing is decided by it.

use crate::algorithm::token_bucket::Level;

/// The most charges of a sliding log that a snapshot shows: the newest ones.
pub const MAX_CHARGES: usize = 500;

/// What counts at one moment. Times are microseconds since the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// One window: what was charged in it counts in full until its end.
    FixedWindow(Span),
    /// The newest charges that count, oldest first, at most [`MAX_CHARGES`]: each from when it was made until it stops
    /// counting.
    SlidingLog(Vec<Span>),
    /// The window before, of which less counts as time passes, and the one under way, of which less counts once it
    /// is over.
    SlidingCounter {
        /// The window before.
        previous: Span,
        /// The window under way.
        current: Span,
        /// When nothing counts any more; 0 when nothing does.
        ends_us: u64,
    },
    /// What is in the bucket, and how fast it drains.
    TokenBucket(Level),
}

/// Units that were charged in some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its beginning.
    pub from_us: u64,
    /// Its end.
    pub until_us: u64,
    /// How many.
    pub units: u64,
}
