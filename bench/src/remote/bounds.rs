//! The limits that all contestants use.

use std::time::Duration;

use anyhow::Result;
use sluicegate::Limit;

const DAY: Duration = Duration::from_secs(86_400);

/// An amount per window.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Number of requests.
    pub amount: u64,
    /// Length of the window.
    pub window: Duration,
}

/// For each of many users: never reached, and long enough that keys do not expire.
pub const PER_USER: Bound = Bound { amount: 10_000, window: DAY };
/// For one shared key: never reached. One unit is refilled every 100 us.
pub const NEVER_REACHED: Bound = Bound { amount: 1_000_000_000, window: Duration::from_secs(100_000) };
/// Exhausted by the first request.
pub const EXHAUSTED: Bound = Bound { amount: 1, window: DAY };
/// Reached in a second, without a refill in that time.
pub const EXACT: Bound = Bound { amount: 10_000, window: Duration::from_secs(365 * 86_400) };
/// A log that holds a thousand entries and then denies.
pub const LOG: Bound = Bound { amount: 1_000, window: DAY };
/// A log whose entries expire after a second; exhausted only at 5,000 per second.
pub const LOG_CHURNING: Bound = Bound { amount: 5_000, window: Duration::from_secs(1) };
/// A log that only grows while measured.
pub const LOG_GROWING: Bound = Bound { amount: 1_000_000, window: DAY };

impl Bound {
    /// Returns the time in which one unit is refilled.
    pub fn interval_us(&self) -> f64 {
        self.window.as_micros() as f64 / self.amount as f64
    }

    /// Returns a token bucket.
    pub fn bucket(&self) -> Result<Limit> {
        Ok(Limit::token_bucket(self.amount, self.window)?)
    }

    /// Returns a sliding log.
    pub fn log(&self) -> Result<Limit> {
        Ok(Limit::sliding_log(self.amount, self.window)?)
    }
}
