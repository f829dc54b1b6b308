//! Whether the server's clock is right, as far as this machine's is.

use std::time::Duration;

use tollgate::{StoreError, redis::inspect::ClockReading, stats::Skew};

use super::super::finding::{Finding, see};
use crate::output;

/// From where on clocks are worth a look, and from where on one of them is wrong.
const NOTABLE: Duration = Duration::from_millis(100);
const WRONG: Duration = Duration::from_secs(1);

pub(super) fn judge(clock: &Result<ClockReading, StoreError>) -> Finding {
    let ClockReading { skew, uncertainty } = match clock {
        Ok(reading) => *reading,
        Err(error) => {
            return Finding::unseen("clock", format!("its clock: {error}"))
                .remedy("run the doctor as a user with +time", see::DOCTORS_USER);
        }
    };
    let side = match skew {
        Skew::Ahead(_) => "ahead of",
        Skew::Behind(_) => "behind",
    };
    let (size, give) = (output::duration(skew.size()), output::duration(uncertainty));
    let what = if skew.size() <= uncertainty {
        format!("its clock agrees with this machine's, give or take {give}")
    } else {
        format!("its clock is {size} {side} this machine's, give or take {give}")
    };
    let why = "limits are kept by the server's clock alone, so they hold; but when another server takes over, or the clock is \
               set right, time jumps by so much: at most one quota more, and waits of up to two windows";
    let remedy = "keep all clocks by NTP: chronyc tracking or timedatectl shows which one is wrong";
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
    fn a_clock_is_wrong_only_beyond_what_the_round_trip_leaves_open() {
        let found = |skew_ms, uncertainty_ms| {
            let skew = Skew::Behind(Duration::from_millis(skew_ms));
            let uncertainty = Duration::from_millis(uncertainty_ms);
            judge(&Ok(ClockReading { skew, uncertainty })).severity
        };
        assert_eq!(found(99, 0), Severity::Fine);
        assert_eq!(found(100, 0), Severity::Advice);
        assert_eq!(found(999, 0), Severity::Advice);
        assert_eq!(found(1_000, 0), Severity::Problem);
        assert_eq!(found(1_000, 950), Severity::Fine);
    }
}
