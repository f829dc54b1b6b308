//! How long calls to one server take of late: what a caller's remaining time is compared with, and what silence means.

use std::time::Duration;

use tokio::time::Instant;

use super::circuit_breaker::MAX_FAILURES;

/// How many of the latest calls count.
const SAMPLES: usize = 16;
/// The age at which a sample is ignored.
const LIFETIME: Duration = Duration::from_secs(1);
/// With fewer recent samples than this there is no estimate.
const MIN_SAMPLES: usize = 5;
/// Silence shorter than this is no failure, however fast the store is.
const MIN_SILENCE: Duration = Duration::from_millis(10);
/// How many smoothed round trips without any reply are a failure.
const SILENT_ROUND_TRIPS: u32 = 4;
/// One failure per `deadline / MAX_FAILURES` of silence, so that the breaker opens after about one silent deadline.
const SILENT_PART_OF_DEADLINE: u32 = MAX_FAILURES;

/// The latest round trips of one server.
#[derive(Debug, Default)]
pub(super) struct RoundTrips {
    /// The latest, by their number modulo [`SAMPLES`].
    samples: [Option<Sample>; SAMPLES],
    count: usize,
    lower_quartile: Option<Duration>,
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
        let recent = &mut recent[..len];
        self.lower_quartile = (len >= MIN_SAMPLES).then(|| *recent.select_nth_unstable((len - 1) / 4).1);
    }

    /// The round trip that three quarters of the recent calls took at least; unknown if there were few.
    pub(super) fn lower_quartile(&self, now: Instant) -> Option<Duration> {
        let latest = self.samples[self.count.wrapping_sub(1) % SAMPLES]?;
        self.lower_quartile.filter(|_| latest.is_recent(now))
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
    async fn the_estimate_follows_the_round_trip_and_expires() {
        let (mut trips, mut now) = (RoundTrips::default(), Instant::now());
        for took in 1..MIN_SAMPLES {
            trips.note(ms(took as u64), now);
            assert_eq!(trips.lower_quartile(now), None, "{took} calls say little");
        }
        for took in 1..=16 {
            trips.note(ms(took), now);
        }
        assert_eq!(trips.lower_quartile(now), Some(ms(4)), "a quarter was faster");

        for _ in 0..SAMPLES {
            trips.note(ms(60), now);
        }
        assert_eq!(trips.lower_quartile(now), Some(ms(60)));
        for _ in 0..SAMPLES / 4 {
            trips.note(ms(1), now);
        }
        assert_eq!(trips.lower_quartile(now), Some(ms(1)), "some fast replies suffice");

        now += LIFETIME;
        assert_eq!(trips.lower_quartile(now), None, "old samples do not count");
        trips.note(ms(200), now);
        assert_eq!(trips.lower_quartile(now), None, "nor does one stall");
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
