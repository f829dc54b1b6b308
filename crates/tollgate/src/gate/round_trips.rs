//! How long calls to one server take of late: what a caller's remaining time is compared with, and what silence means.

use std::time::Duration;

use tokio::time::Instant;

use super::breaker::MAX_FAILURES;

/// How many of the latest calls count.
const SAMPLES: usize = 16;
/// For how long a call counts: a store that was slow is not held against it for longer.
const LIFETIME: Duration = Duration::from_secs(1);
/// Of [`SAMPLES`] calls, so many were faster than the low estimate: time below it hardly ever suffices.
const FASTER: usize = SAMPLES / 4;
/// Silence shorter than this is no failure, however fast the store is.
const MIN_SILENCE: Duration = Duration::from_millis(10);
/// How many smoothed round trips without any reply are a failure.
const SILENT_ROUND_TRIPS: u32 = 4;
/// Which part of the deadline without any reply is a failure: several make up one deadline, as calls one after the other
/// would.
const SILENT_PART_OF_DEADLINE: u32 = MAX_FAILURES;

/// The latest round trips of one server.
#[derive(Debug, Default)]
pub(super) struct RoundTrips {
    /// The latest, by their number modulo [`SAMPLES`].
    samples: [Option<Sample>; SAMPLES],
    count: usize,
    low: Duration,
    smoothed: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    took: Duration,
    received: Instant,
}

impl RoundTrips {
    /// Notes a reply that took so long.
    pub(super) fn note(&mut self, took: Duration, now: Instant) {
        self.samples[self.count % SAMPLES] = Some(Sample { took, received: now });
        self.count = self.count.wrapping_add(1);
        let smoothed = self.smoothed.unwrap_or(took);
        self.smoothed = Some((smoothed * 7 + took) / 8);

        let mut recent = [Duration::MAX; SAMPLES];
        let mut len = 0;
        for sample in self.samples.iter().flatten().filter(|sample| sample.is_recent(now)) {
            recent[len] = sample.took;
            len += 1;
        }
        let place = (len - 1) * FASTER / SAMPLES;
        self.low = *recent[..len].select_nth_unstable(place).1;
    }

    /// A round trip that most calls of late took at least; nothing if there were none.
    pub(super) fn low(&self, now: Instant) -> Option<Duration> {
        let latest = self.samples[self.count.wrapping_sub(1) % SAMPLES]?;
        latest.is_recent(now).then_some(self.low)
    }

    /// The moving average.
    pub(super) fn smoothed(&self) -> Option<Duration> {
        self.smoothed
    }

    /// How long a server that has calls to answer may be silent until that is a failure.
    pub(super) fn longest_silence(&self, deadline: Duration) -> Duration {
        let round_trips = self.smoothed.unwrap_or_default() * SILENT_ROUND_TRIPS;
        round_trips.max(MIN_SILENCE).max(deadline / SILENT_PART_OF_DEADLINE).min(deadline)
    }

    /// Forgets everything: the server was away.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Sample {
    fn is_recent(&self, now: Instant) -> bool {
        now.duration_since(self.received) < LIFETIME
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[tokio::test(start_paused = true)]
    async fn the_low_estimate_follows_and_decays() {
        let (mut trips, mut now) = (RoundTrips::default(), Instant::now());
        assert_eq!(trips.low(now), None);
        for took in 1..=16 {
            trips.note(ms(took), now);
        }
        assert_eq!(trips.low(now), Some(ms(4)), "a quarter was faster");

        for _ in 0..SAMPLES {
            trips.note(ms(60), now);
        }
        assert_eq!(trips.low(now), Some(ms(60)));
        for _ in 0..=FASTER {
            trips.note(ms(1), now);
        }
        assert_eq!(trips.low(now), Some(ms(1)), "some fast replies suffice");

        now += LIFETIME;
        assert_eq!(trips.low(now), None, "what was long ago does not count");
        trips.note(ms(200), now);
        assert_eq!(trips.low(now), Some(ms(200)));
        trips.note(ms(1), now);
        assert_eq!(trips.low(now), Some(ms(1)), "one stall is forgotten with the next reply");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_measured_in_round_trips_between_bounds() {
        let (mut trips, now) = (RoundTrips::default(), Instant::now());
        assert_eq!(trips.longest_silence(ms(50)), MIN_SILENCE);
        trips.note(ms(5), now);
        assert_eq!(trips.longest_silence(ms(50)), ms(20));
        assert_eq!(trips.longest_silence(ms(15)), ms(15), "the deadline is the longest");
        assert_eq!(trips.longest_silence(ms(500)), ms(100), "long deadlines mean patience");
        trips.forget();
        assert_eq!(trips.longest_silence(ms(50)), MIN_SILENCE);
        assert_eq!(trips.longest_silence(ms(5)), ms(5));
    }
}
