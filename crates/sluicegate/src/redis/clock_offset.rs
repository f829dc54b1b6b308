//! The offset between this process's clock and the server's clock, measured from replies.
//!
//! A reply contains the time at which the script ran, which lies between sending and receiving. It is used as the time
//! of sending, with an error of at most one round trip, always towards later: a call that arrives in time is never
//! treated as late, and a call that arrives a round trip too late always is.

use std::time::Duration;

use parking_lot::Mutex;
use sluicegate_core::Timestamp;
use tokio::time::Instant;

/// How long a sample with a shorter round trip is preferred to a newer one: clocks drift and are adjusted.
const LIFETIME: Duration = Duration::from_secs(10);

/// The clock offset of one server.
#[derive(Default)]
pub(super) struct ClockOffset(Mutex<Option<Sample>>);

#[derive(Clone, Copy)]
struct Sample {
    at: Timestamp,
    sent: Instant,
    received: Instant,
}

impl Sample {
    fn round_trip(&self) -> Duration {
        self.received - self.sent
    }
}

impl ClockOffset {
    /// Records a reply: the script ran `at` this time, after the call was `sent`.
    pub(super) fn record(&self, at: Timestamp, sent: Instant, received: Instant) {
        let new = Sample { at, sent, received };
        let mut known = self.0.lock();
        let keeps = known.is_some_and(|known| {
            known.round_trip() < new.round_trip() && received.duration_since(known.received) < LIFETIME
        });
        if !keeps {
            *known = Some(new);
        }
    }

    /// Replaces the sample after a call that was sent in time was reported as late: the previous sample is wrong, for example because the
    /// server's clock was adjusted.
    pub(super) fn correct(&self, at: Timestamp, sent: Instant, received: Instant) {
        *self.0.lock() = Some(Sample { at, sent, received });
    }

    /// Returns the server's time at `moment`; `None` before the first reply.
    pub(super) fn server_time(&self, moment: Instant) -> Option<Timestamp> {
        let known = *self.0.lock();
        known.map(|known| known.at.plus(moment.saturating_duration_since(known.sent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);
    const STORE: Timestamp = Timestamp::from_micros(1_794_765_441_799_839);

    fn known(offset: &ClockOffset, moment: Instant) -> Timestamp {
        offset.server_time(moment).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_server_time_is_never_early_and_late_by_at_most_a_round_trip() {
        let (offset, sent) = (ClockOffset::default(), Instant::now());
        assert_eq!(offset.server_time(sent), None);
        // the script ran in the middle of 4 ms: the clock showed 2 ms less when the call was sent
        offset.record(STORE, sent, sent + 4 * MILLI);
        let truth = |moment: Instant| STORE.minus(2 * MILLI).plus(moment - sent);
        for later in [5 * MILLI, 5000 * MILLI] {
            let taken = known(&offset, sent + later);
            assert!(taken >= truth(sent + later) && taken <= truth(sent + later).plus(4 * MILLI));
        }
        offset.correct(STORE, sent, sent + 9 * MILLI);
        assert_eq!(known(&offset, sent + MILLI), STORE.plus(MILLI), "also by a slower reply");
    }

    #[tokio::test(start_paused = true)]
    async fn the_shortest_recent_round_trip_is_used() {
        let (offset, start) = (ClockOffset::default(), Instant::now());
        let ran = |after: Duration| STORE.plus(after);
        offset.record(ran(MILLI), start, start + 2 * MILLI);
        let slow = start + 100 * MILLI;
        offset.record(ran(190 * MILLI), slow, slow + 100 * MILLI);
        assert_eq!(known(&offset, start + 10 * MILLI), ran(11 * MILLI), "the slow reply is less precise");
        let quick = start + 300 * MILLI;
        offset.record(ran(300 * MILLI), quick, quick + MILLI);
        assert_eq!(known(&offset, quick + 10 * MILLI), ran(310 * MILLI), "the fast reply is more precise");
        let late = start + LIFETIME + 400 * MILLI;
        offset.record(ran(LIFETIME + 450 * MILLI), late, late + 50 * MILLI);
        assert_eq!(known(&offset, late), ran(LIFETIME + 450 * MILLI), "the fast reply has expired");
    }
}
