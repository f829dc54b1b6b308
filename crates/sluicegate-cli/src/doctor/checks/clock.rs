//! Check of the server's clock against this machine's.

use std::time::Duration;

use sluicegate::{StoreError, redis::inspect::ClockReading, stats::Skew};

use super::super::finding::{Finding, see};
use crate::format;

/// Minimum clock skew that is reported as advice.
const NOTABLE: Duration = Duration::from_millis(100);
/// Minimum clock skew that is reported as a problem.
const WRONG: Duration = Duration::from_secs(1);

pub(super) fn check(clock: &Result<ClockReading, StoreError>) -> Finding {
    let ClockReading { skew, uncertainty } = match clock {
        Ok(reading) => *reading,
        Err(error) => {
            return Finding::unknown("clock", format!("clock not checked: {error}"))
                .remedy("run the doctor as a user with +time", see::DOCTORS_USER);
        }
    };
    let side = match skew {
        Skew::Ahead(_) => "ahead of",
        Skew::Behind(_) => "behind",
    };
    let (size, tolerance) = (format::duration(skew.size()), format::duration(uncertainty));
    let what = if skew.size() <= uncertainty {
        format!("the server's clock agrees with this machine's, ±{tolerance}")
    } else {
        format!("the server's clock is {size} {side} this machine's, ±{tolerance}")
    };
    let why = "limits use only the server's clock, so they hold; but on a failover or a clock correction, time jumps by this \
               much: at most one more quota, and waits of up to two windows";
    let remedy = "synchronize all clocks with NTP: chronyc tracking or timedatectl shows which one is wrong";
    let certain = skew.size().saturating_sub(uncertainty);
    if certain >= WRONG {
        Finding::problem("clock", what).why(why).remedy(remedy, see::CLOCKS)
    } else if certain >= NOTABLE {
        Finding::advice("clock", what).why(why).remedy(remedy, see::CLOCKS)
    } else {
        Finding::fine("clock", what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Severity;

    #[test]
    fn clock_skew_within_the_uncertainty_is_fine() {
        let found = |skew_ms, uncertainty_ms| {
            let skew = Skew::Behind(Duration::from_millis(skew_ms));
            let uncertainty = Duration::from_millis(uncertainty_ms);
            check(&Ok(ClockReading { skew, uncertainty })).severity
        };
        assert_eq!(found(99, 0), Severity::Fine);
        assert_eq!(found(100, 0), Severity::Advice);
        assert_eq!(found(999, 0), Severity::Advice);
        assert_eq!(found(1_000, 0), Severity::Problem);
        assert_eq!(found(1_000, 950), Severity::Fine);
    }
}
