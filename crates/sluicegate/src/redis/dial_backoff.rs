//! When the next connection to a server may be opened.
//!
//! A lost connection is replaced immediately if it has answered, on average at most ten times per second. If the new
//! connection fails quickly, a few attempts follow in short intervals, because most interruptions are short.
//! Exponential backoff applies to further attempts, to attempts that time out, and when two consecutive connections are
//! lost before their first answer: on average, there are at most two connections per second to a server that is down or
//! closes every connection.

use std::time::Duration;

use tokio::time::Instant;

use crate::hashing::random;

/// The pause after the first failure. It doubles after each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The number of quick attempts after the loss of a connection that had answered.
pub(super) const QUICK_ATTEMPTS: u32 = 6;
/// The pause before a quick attempt.
const QUICK_PAUSE: Duration = Duration::from_millis(40);
/// A server that is briefly down rejects connections within this time. A slower failure indicates an overloaded server
/// or network.
const QUICK_FAILURE: Duration = Duration::from_millis(100);
/// After the quick attempts, the pause continues from that of this failure.
const FAILURES_AFTER_QUICK_ATTEMPTS: u32 = 2;
/// The longest pause. A server that has recovered is detected within this time.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The average time between two replacements.
const REPLACEMENT_INTERVAL: Duration = Duration::from_millis(100);
/// The number of replacements that may follow each other without a pause.
const MAX_REPLACEMENTS: u32 = 10;

/// Failures and replacements of the connections to one server.
pub(super) struct DialBackoff {
    max_quick_attempts: u32,
    /// Consecutive failures, except those of quick attempts.
    failures: u32,
    quick_attempts: u32,
    /// When all replacements are available again; one is regained per [`REPLACEMENT_INTERVAL`].
    replaced_until: Instant,
}

impl DialBackoff {
    /// With at most this many quick attempts after each loss.
    pub(super) fn new(max_quick_attempts: u32, now: Instant) -> Self {
        Self { max_quick_attempts, failures: 0, quick_attempts: 0, replaced_until: now }
    }

    /// Returns when to connect again after an attempt that took this long and failed.
    pub(super) fn failed(&mut self, now: Instant, took: Duration) -> Instant {
        if self.quick_attempts > 0 && took < QUICK_FAILURE {
            self.quick_attempts -= 1;
            self.failures = FAILURES_AFTER_QUICK_ATTEMPTS;
            return now + jittered(QUICK_PAUSE);
        }
        self.rejected(now)
    }

    /// Returns when to connect again after the server rejected this client.
    pub(super) fn rejected(&mut self, now: Instant) -> Instant {
        self.quick_attempts = 0;
        let doubled = FIRST_PAUSE * 2_u32.pow(self.failures.min(16));
        self.failures += 1;
        now + jittered(doubled.min(LONGEST_PAUSE))
    }

    /// Returns when to replace a connection that was lost.
    pub(super) fn lost(&mut self, now: Instant, has_answered: bool) -> Instant {
        if has_answered {
            self.failures = 0;
            self.quick_attempts = self.max_quick_attempts;
        } else if self.failures > 0 {
            return self.rejected(now);
        } else {
            self.failures = 1;
        }
        let burst = REPLACEMENT_INTERVAL * (MAX_REPLACEMENTS - 1);
        let not_before = now.max(self.replaced_until.checked_sub(burst).unwrap_or(now));
        self.replaced_until = self.replaced_until.max(now) + REPLACEMENT_INTERVAL;
        not_before
    }
}

/// Returns between three and five quarters of a pause, so that clients do not connect at the same time.
pub(super) fn jittered(pause: Duration) -> Duration {
    let fraction = u32::try_from(random() >> 48).expect("the highest 16 bits");
    pause * 3 / 4 + pause / 2 * fraction / (1 << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns how many connections are opened within `period`, if `end` ends each of them.
    fn opened(period: Duration, mut end: impl FnMut(&mut DialBackoff, Instant) -> Instant) -> u32 {
        let start = Instant::now();
        let (mut backoff, mut now, mut opened) = (DialBackoff::new(QUICK_ATTEMPTS, start), start, 0);
        while now < start + period {
            opened += 1;
            now = end(&mut backoff, now);
        }
        opened
    }

    /// An attempt that fails immediately.
    fn failed(backoff: &mut DialBackoff, now: Instant) -> Instant {
        backoff.failed(now, Duration::ZERO)
    }

    #[tokio::test(start_paused = true)]
    async fn an_attempt_that_times_out_is_not_repeated_quickly() {
        let now = Instant::now();
        let mut backoff = DialBackoff::new(QUICK_ATTEMPTS, now);
        backoff.lost(now, true);
        let mut pauses = (0..4).map(|_| backoff.failed(now, 2 * SECOND) - now);
        assert!(pauses.next().unwrap() <= FIRST_PAUSE * 5 / 4);
        assert!(pauses.nth(2).unwrap() >= 8 * FIRST_PAUSE * 3 / 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_server_gets_at_most_two_connections_per_second() {
        for _ in 0..100 {
            let attempts = opened(4 * SECOND, failed);
            assert!((6..=9).contains(&attempts), "{attempts} attempts in 4 s");
            let attempts = opened(60 * SECOND, failed);
            assert!((45..=90).contains(&attempts), "{attempts} attempts in 60 s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_closes_every_connection_gets_at_most_two_per_second() {
        for _ in 0..100 {
            let opened = opened(60 * SECOND, |backoff, now| backoff.lost(now, false));
            assert!((45..=90).contains(&opened), "{opened} connections in 60 s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_has_answered_is_replaced_at_once_and_at_most_ten_times_per_second() {
        let now = Instant::now();
        let mut backoff = DialBackoff::new(QUICK_ATTEMPTS, now);
        for _ in 0..MAX_REPLACEMENTS {
            assert_eq!(backoff.lost(now, true), now);
        }
        assert_eq!(backoff.lost(now, true), now + REPLACEMENT_INTERVAL);
        let replaced = opened(60 * SECOND, |backoff, now| backoff.lost(now, true));
        assert!((590..=620).contains(&replaced), "{replaced} connections in 60 s");
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_loss_a_few_attempts_follow_quickly_before_the_backoff() {
        for _ in 0..100 {
            let mut now = Instant::now();
            let mut backoff = DialBackoff::new(QUICK_ATTEMPTS, now);
            backoff.lost(now, true);
            let mut pauses = Vec::new();
            for _ in 0..12 {
                let next = failed(&mut backoff, now);
                pauses.push(next - now);
                now = next;
            }
            let (quick, others) = pauses.split_at(QUICK_ATTEMPTS.try_into().unwrap());
            assert!(quick.iter().all(|pause| *pause <= QUICK_PAUSE * 5 / 4), "{pauses:?}");
            assert!(others[0] >= 3 * FIRST_PAUSE && others[0] <= 5 * FIRST_PAUSE, "{pauses:?}");
            assert!(others[3..].iter().all(|pause| *pause >= SECOND / 2), "{pauses:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_ends_the_backoff() {
        let now = Instant::now();
        let mut backoff = DialBackoff::new(QUICK_ATTEMPTS, now);
        for _ in 0..10 {
            failed(&mut backoff, now);
        }
        assert!(backoff.lost(now, false) > now + SECOND / 2);
        assert_eq!(backoff.lost(now, true), now);
    }
}
