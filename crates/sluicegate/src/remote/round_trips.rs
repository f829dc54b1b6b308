//! Recent round trips of one server. They determine whether a caller has enough time left, and when the absence of a
//! reply is a failure.

use std::time::Duration;

use tokio::time::Instant;

use super::circuit_breaker::MAX_FAILURES;

/// The number of samples.
const SAMPLES: usize = 16;
/// The age at which a sample is ignored.
const LIFETIME: Duration = Duration::from_secs(1);
/// With fewer recent samples than this there is no estimate.
const MIN_SAMPLES: usize = 5;
/// The absence of a reply for less than this is never a failure, no matter how fast the store is.
const MIN_SILENCE: Duration = Duration::from_millis(10);
/// The absence of a reply for this many smoothed round trips is a failure.
const SILENT_ROUND_TRIPS: u32 = 4;
/// One failure per `deadline / MAX_FAILURES` without a reply, so that the breaker opens after about one deadline.
const SILENT_PART_OF_DEADLINE: u32 = MAX_FAILURES;

/// The latest round trips of one server.
#[derive(Debug, Default)]
pub(super) struct RoundTrips {
    /// A ring buffer: sample `n` is at `n` modulo [`SAMPLES`].
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
    /// Records the round trip of a reply.
    pub(super) fn record(&mut self, took: Duration, now: Instant) {
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

    /// The lower quartile of the recent round trips; `None` if there were too few.
    pub(super) fn lower_quartile(&self, now: Instant) -> Option<Duration> {
        let latest = self.samples[self.count.wrapping_sub(1) % SAMPLES]?;
        self.lower_quartile.filter(|_| latest.is_recent(now))
    }

    /// The moving average.
    pub(super) fn smoothed(&self) -> Option<Duration> {
        self.smoothed
    }

    /// How long a server with calls in flight may not reply before that is a failure.
    pub(super) fn longest_silence(&self, deadline: Duration) -> Duration {
        let round_trips = self.smoothed.unwrap_or_default() * SILENT_ROUND_TRIPS;
        round_trips.max(MIN_SILENCE).max(deadline / SILENT_PART_OF_DEADLINE).min(deadline)
    }

    /// Discards all samples.
    pub(super) fn clear(&mut self) {
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
            trips.record(ms(took as u64), now);
            assert_eq!(trips.lower_quartile(now), None, "{took} samples are too few");
        }
        for took in 1..=16 {
            trips.record(ms(took), now);
        }
        assert_eq!(trips.lower_quartile(now), Some(ms(4)), "a quarter is faster");

        for _ in 0..SAMPLES {
            trips.record(ms(60), now);
        }
        assert_eq!(trips.lower_quartile(now), Some(ms(60)));
        for _ in 0..SAMPLES / 4 {
            trips.record(ms(1), now);
        }
        assert_eq!(trips.lower_quartile(now), Some(ms(1)), "a quarter of fast replies suffices");

        now += LIFETIME;
        assert_eq!(trips.lower_quartile(now), None, "old samples do not count");
        trips.record(ms(200), now);
        assert_eq!(trips.lower_quartile(now), None, "one slow reply does not count");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_measured_in_round_trips_within_bounds() {
        let (mut trips, now) = (RoundTrips::default(), Instant::now());
        assert_eq!(trips.longest_silence(ms(50)), MIN_SILENCE);
        trips.record(ms(5), now);
        assert_eq!(trips.longest_silence(ms(50)), ms(20));
        assert_eq!(trips.longest_silence(ms(15)), ms(15), "at most the deadline");
        assert_eq!(trips.longest_silence(ms(500)), ms(100), "at least a fifth of the deadline");
        trips.clear();
        assert_eq!(trips.longest_silence(ms(50)), MIN_SILENCE);
        assert_eq!(trips.longest_silence(ms(5)), ms(5));
    }
}
