//! What a moment of this process is on the store's clock, as far as replies have shown.
//!
//! A reply carries the time at which the script ran, which was some moment between sending and receiving. Taking it
//! for the first of these errs by at most the round trip, and on the generous side: a call that arrives in time is
//! never taken for late, and one that arrives a round trip too late always is.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tollgate_core::Timestamp;

/// For how long a better reply is not given up for a newer one: clocks drift, and are set.
const LIFETIME: Duration = Duration::from_secs(10);

/// What is known of one server's clock.
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
    /// Learns from a reply: the script ran `at` this time, after the call was `sent`.
    pub(super) fn learn(&self, at: Timestamp, sent: Instant, received: Instant) {
        let new = Sample { at, sent, received };
        let mut known = self.0.lock();
        let keeps = known.is_some_and(|known| {
            known.round_trip() < new.round_trip() && received.duration_since(known.received) < LIFETIME
        });
        if !keeps {
            *known = Some(new);
        }
    }

    /// Learns from a reply that says that the call came too late, although it was sent in time: what was known before
    /// is wrong, as after the server's clock was set.
    pub(super) fn correct(&self, at: Timestamp, sent: Instant, received: Instant) {
        *self.0.lock() = Some(Sample { at, sent, received });
    }

    /// What the server's clock shows at `moment`; unknown before the first reply.
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
    async fn a_moment_is_never_taken_for_too_early_and_too_late_by_a_round_trip_at_most() {
        let (offset, sent) = (ClockOffset::default(), Instant::now());
        assert_eq!(offset.server_time(sent), None);
        // the script ran in the middle of 4 ms: the clock showed 2 ms less when the call was sent
        offset.learn(STORE, sent, sent + 4 * MILLI);
        let truth = |moment: Instant| STORE.minus(2 * MILLI).plus(moment - sent);
        for later in [5 * MILLI, 5000 * MILLI] {
            let taken = known(&offset, sent + later);
            assert!(taken >= truth(sent + later) && taken <= truth(sent + later).plus(4 * MILLI));
        }
        offset.correct(STORE, sent, sent + 9 * MILLI);
        assert_eq!(known(&offset, sent + MILLI), STORE.plus(MILLI), "also by a slower reply");
    }

    #[tokio::test(start_paused = true)]
    async fn the_shortest_round_trip_of_late_counts() {
        let (offset, start) = (ClockOffset::default(), Instant::now());
        let ran = |after: Duration| STORE.plus(after);
        offset.learn(ran(MILLI), start, start + 2 * MILLI);
        let slow = start + 100 * MILLI;
        offset.learn(ran(190 * MILLI), slow, slow + 100 * MILLI);
        assert_eq!(known(&offset, start + 10 * MILLI), ran(11 * MILLI), "the slow one told less");
        let quick = start + 300 * MILLI;
        offset.learn(ran(300 * MILLI), quick, quick + MILLI);
        assert_eq!(known(&offset, quick + 10 * MILLI), ran(310 * MILLI), "the quick one told more");
        let late = start + LIFETIME + 400 * MILLI;
        offset.learn(ran(LIFETIME + 450 * MILLI), late, late + 50 * MILLI);
        assert_eq!(known(&offset, late), ran(LIFETIME + 450 * MILLI), "the quick one was too long ago");
    }
}
