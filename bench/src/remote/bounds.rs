//! The limits, once for all contestants.

use std::time::Duration;

use anyhow::Result;
use sluicegate::Limit;

const DAY: Duration = Duration::from_secs(86_400);

/// So many per window.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// How many.
    pub amount: u64,
    /// In which time.
    pub window: Duration,
}

/// For each of many users: never reached here, and long enough that keys stay.
pub const PER_USER: Bound = Bound { amount: 10_000, window: DAY };
/// For one key that everybody shares: never reached here. One unit comes back every 100 us.
pub const NEVER_REACHED: Bound = Bound { amount: 1_000_000_000, window: Duration::from_secs(100_000) };
/// Used up by the first request.
pub const EXHAUSTED: Bound = Bound { amount: 1, window: DAY };
/// Reached in a second, and no unit comes back meanwhile.
pub const EXACT: Bound = Bound { amount: 10_000, window: Duration::from_secs(365 * 86_400) };
/// A log that holds a thousand entries and then refuses.
pub const LOG: Bound = Bound { amount: 1_000, window: DAY };
/// A log whose entries leave after a second, and that is not used up before it gets 5,000 of them in one.
pub const LOG_CHURNING: Bound = Bound { amount: 5_000, window: Duration::from_secs(1) };
/// A log that only grows while measured.
pub const LOG_GROWING: Bound = Bound { amount: 1_000_000, window: DAY };

impl Bound {
    /// The time in which one unit comes back.
    pub fn interval_us(&self) -> f64 {
        self.window.as_micros() as f64 / self.amount as f64
    }

    /// As a token bucket.
    pub fn bucket(&self) -> Result<Limit> {
        Ok(Limit::token_bucket(self.amount, self.window)?)
    }

    /// As a sliding log.
    pub fn log(&self) -> Result<Limit> {
        Ok(Limit::sliding_log(self.amount, self.window)?)
    }
}
