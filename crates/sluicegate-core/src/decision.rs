//! The parts of a decision, and the only place where waits are rounded for display and headers.

use std::time::Duration;

/// Whether a request is allowed.
///
/// ```
/// use std::time::Duration;
/// use sluicegate_core::{Outcome, Retry, decision::whole_seconds_up};
///
/// let denied = Outcome::Denied { retry: Retry::After(Duration::from_millis(1_400)) };
/// let status = match denied {
///     Outcome::Allowed => "200".to_owned(),
///     Outcome::Denied { retry: Retry::After(wait) } => format!("429, Retry-After: {}", whole_seconds_up(wait)),
///     Outcome::Denied { retry: Retry::Never } => "429".to_owned(),
/// };
/// assert_eq!(status, "429, Retry-After: 2");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request is allowed. A check has charged it.
    Allowed,
    /// The request is denied.
    Denied {
        /// When a retry would be allowed.
        retry: Retry,
    },
}

impl Outcome {
    /// Returns whether the request is allowed.
    pub const fn is_allowed(self) -> bool {
        matches!(self, Self::Allowed)
    }
}

/// When a denied request would be allowed, without other requests in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// After this wait, to the microsecond; never zero.
    After(Duration),
    /// Never: the cost exceeds the capacity of the limit.
    Never,
}

/// Returns a wait in whole seconds, rounded up, so that no client retries too early.
pub fn whole_seconds_up(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0))
}

/// Returns a wait in whole milliseconds, rounded up and saturating.
pub fn whole_millis_up(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_round_up_and_never_to_zero() {
        let table = [(0, 0, 0), (1, 1, 1), (999_999, 1_000, 1), (1_000_000, 1_000, 1), (1_000_001, 1_001, 2)];
        for (micros, millis, seconds) in table {
            let wait = Duration::from_micros(micros);
            assert_eq!((whole_millis_up(wait), whole_seconds_up(wait)), (millis, seconds), "{micros} us");
        }
        assert_eq!(whole_millis_up(Duration::MAX), u64::MAX);
        assert_eq!(whole_seconds_up(Duration::MAX), u64::MAX);
    }
}
