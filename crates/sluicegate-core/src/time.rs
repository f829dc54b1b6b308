//! Time as a value in whole microseconds. The store that owns the clock passes it in.

use std::time::Duration;

/// The largest number that a Redis script represents exactly, and so the largest count, cost and time.
pub const MAX_EXACT: u64 = (1 << 53) - 1;

/// The longest wait that is reported: 285 years.
pub const MAX_WAIT_US: u64 = MAX_EXACT;

/// A moment on a store's clock: whole microseconds since the Unix epoch.
///
/// ```
/// use std::time::Duration;
/// use sluicegate_core::Timestamp;
///
/// let now = Timestamp::from_micros(1_794_765_441_799_839);
/// assert_eq!(now.plus(Duration::from_millis(1)).as_micros(), 1_794_765_441_800_839);
/// assert!(now.minus(Duration::from_secs(1)) < now);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Creates the moment `micros` after the epoch, saturating in the year 2255.
    pub const fn from_micros(micros: u64) -> Self {
        Self(if micros > MAX_EXACT { MAX_EXACT } else { micros })
    }

    /// Returns the whole microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// Adds a duration, saturating at the end of the range.
    pub fn plus(self, duration: Duration) -> Self {
        Self::from_micros(self.0.saturating_add(duration.as_micros().try_into().unwrap_or(u64::MAX)))
    }

    /// Subtracts a duration, saturating at the epoch.
    pub fn minus(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration.as_micros().try_into().unwrap_or(u64::MAX)))
    }
}
