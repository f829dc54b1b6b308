//! Verifies that no more was admitted than the limit allows, on any key and in any window, by the callers' clock.
//!
//! It runs concurrently with the load, in bounded memory, and reports no false violations: when memory is short, calls are merged or
//! dropped, which can hide violations but not create any.

use std::{collections::HashMap, time::Duration};

use sluicegate::Limit;
use sluicegate_core::{
    Bound,
    oracle::{Admitted, Violation, bucket_violation, window_violation},
};

/// The maximum number of calls held in memory.
const MAX_HELD: usize = 1 << 20;
/// The maximum delay between two reports of calls received at the same time.
const MAX_REPORT_DELAY: Duration = Duration::from_secs(1);

/// The index of a key.
pub(super) type KeyNumber = u32;

/// An admitted call and its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdmittedCall {
    pub(super) key: KeyNumber,
    pub(super) admitted: Admitted,
}

/// The searches for the interval that comes closest to the bound of a limit.
trait FindClosest {
    fn closest(self, key: KeyNumber, calls: &[Admitted]) -> Option<ClosestInterval>;
}

impl FindClosest for Bound {
    /// The interval with the most units admitted relative to its bound; none if the window is too short to verify.
    fn closest(self, key: KeyNumber, calls: &[Admitted]) -> Option<ClosestInterval> {
        match self {
            Self::Window { most, window } => {
                let found = window_violation(calls, 0, window)?;
                let Violation { from, until, admitted, .. } = found;
                Some(ClosestInterval { key, admitted, allowed: most.into(), from, until })
            }
            Self::Bucket { burst, amount, window } => {
                // with a burst of 0, each admitted unit beyond the rate is excess
                let found = bucket_violation(calls, 0, amount, window);
                let Violation { from, until, admitted, allowed } =
                    found.or_else(|| within_the_rate(calls, amount, window))?;
                Some(ClosestInterval { key, admitted, allowed: allowed + u128::from(burst), from, until })
            }
            // its units have no window: a load of checks does not use it
            Self::Live { .. } => None,
        }
    }
}

/// All calls as one interval: the rate alone allows them, without any burst.
fn within_the_rate(calls: &[Admitted], amount: u64, window: Duration) -> Option<Violation> {
    let from = calls.iter().map(|call| call.sent).min()?;
    let until = calls.iter().map(|call| call.received).max()?;
    let admitted = calls.iter().map(|call| u128::from(call.cost)).sum();
    let allowed = (until - from).as_nanos() * u128::from(amount) / window.as_nanos().max(1);
    Some(Violation { from, until, admitted, allowed })
}

/// The interval that came closest to the bound, or exceeded it most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClosestInterval {
    pub(super) key: KeyNumber,
    pub(super) admitted: u128,
    pub(super) allowed: u128,
    /// Since the start of the load.
    pub(super) from: Duration,
    pub(super) until: Duration,
}

impl ClosestInterval {
    pub(super) fn is_within_limit(&self) -> bool {
        self.admitted <= self.allowed
    }

    fn excess(&self) -> i128 {
        let number = |units: u128| i128::try_from(units).unwrap_or(i128::MAX);
        number(self.admitted) - number(self.allowed)
    }
}

/// Verifies the admitted calls of one load.
pub(super) struct LimitVerifier {
    bound: Bound,
    calls: HashMap<KeyNumber, Vec<Admitted>>,
    held: usize,
    max_held: usize,
    closest: Option<ClosestInterval>,
}

impl LimitVerifier {
    pub(super) fn new(limit: &Limit) -> Self {
        Self { bound: limit.bound(), calls: HashMap::new(), held: 0, max_held: MAX_HELD, closest: None }
    }

    pub(super) fn add(&mut self, calls: impl IntoIterator<Item = AdmittedCall>) {
        for AdmittedCall { key, admitted } in calls {
            self.calls.entry(key).or_default().push(admitted);
            self.held += 1;
        }
        if self.held > self.max_held {
            self.verify();
            self.shrink();
        }
    }

    /// Returns the closest interval of all keys, none if nothing was admitted, and the number of keys.
    pub(super) fn finish(mut self) -> (Option<ClosestInterval>, usize) {
        self.verify();
        (self.closest, self.calls.len())
    }

    fn verify(&mut self) {
        for (key, calls) in &self.calls {
            let Some(found) = self.bound.closest(*key, calls) else { continue };
            if self.closest.is_none_or(|closest| found.excess() > closest.excess()) {
                self.closest = Some(found);
            }
        }
    }

    /// Drops calls that cannot share a window with a future call; if that is not enough, merges adjacent calls.
    fn shrink(&mut self) {
        if let Bound::Window { window, .. } = self.bound {
            let latest = self.calls.values().flatten().map(|call| call.received).max().unwrap_or_default();
            let horizon = latest.saturating_sub(window + MAX_REPORT_DELAY);
            self.calls.values_mut().for_each(|calls| calls.retain(|call| call.sent >= horizon));
        }
        self.count();
        while self.held > self.max_held / 2 {
            let before = self.held;
            self.calls.values_mut().for_each(merge_neighbours);
            self.count();
            if self.held == before {
                // one call per key is left
                break;
            }
        }
    }

    fn count(&mut self) {
        self.held = self.calls.values().map(Vec::len).sum();
    }
}

/// Merges each two calls into one, decided between the first send and the last receipt.
fn merge_neighbours(calls: &mut Vec<Admitted>) {
    calls.sort_unstable_by_key(|call| call.sent);
    let merged = calls.chunks(2).map(|pair| Admitted {
        sent: pair[0].sent,
        received: pair.iter().map(|call| call.received).max().unwrap_or_default(),
        cost: pair.iter().map(|call| call.cost).sum(),
    });
    *calls = merged.collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn call(key: KeyNumber, at_ms: u64) -> AdmittedCall {
        AdmittedCall { key, admitted: Admitted { sent: ms(at_ms), received: ms(at_ms), cost: 1 } }
    }

    fn verified(
        limit: Limit,
        max_held: usize,
        calls: impl IntoIterator<Item = AdmittedCall>,
    ) -> ClosestInterval {
        let mut verifier = LimitVerifier { max_held, ..LimitVerifier::new(&limit) };
        for call in calls {
            verifier.add([call]);
            assert!(verifier.held <= max_held);
        }
        verifier.finish().0.unwrap()
    }

    #[test]
    fn one_call_above_the_limit_is_detected_even_with_little_memory() {
        // ten a second on each of two keys, for a minute
        let kept = (0..600).flat_map(|n| [call(1, 100 * n), call(2, 100 * n)]);
        let limit = Limit::sliding_log(10, SECOND).unwrap();
        for max_held in [MAX_HELD, 100] {
            let closest = verified(limit, max_held, kept.clone());
            assert_eq!((closest.admitted, closest.allowed, closest.is_within_limit()), (10, 10, true));
            let one_more = kept.clone().chain([call(2, 59_950)]);
            let closest = verified(limit, max_held, one_more);
            assert_eq!((closest.key, closest.admitted, closest.is_within_limit()), (2, 11, false));
        }
    }

    #[test]
    fn a_bucket_admits_its_burst_and_rate_and_no_more() {
        let limit = Limit::token_bucket(10, SECOND).unwrap().with_burst(5).unwrap();
        let kept = (0..5).map(|_| call(7, 0)).chain((1..600).map(|n| call(7, 100 * n)));
        for max_held in [MAX_HELD, 64] {
            assert!(verified(limit, max_held, kept.clone()).is_within_limit());
        }
        let closest = verified(limit, MAX_HELD, kept.chain([call(7, 59_900)]));
        assert_eq!((closest.admitted, closest.is_within_limit()), (closest.allowed + 1, false));
    }

    #[test]
    fn a_rate_below_the_limit_is_accepted_and_a_too_short_window_is_not_verified() {
        let slow = (0..10).map(|n| call(7, 1_000 * n)).map(|mut call| {
            call.admitted.received += ms(5);
            call
        });
        let closest = verified(Limit::token_bucket(1_000, SECOND).unwrap(), MAX_HELD, slow.clone());
        assert_eq!((closest.admitted, closest.allowed, closest.is_within_limit()), (10, 1_000 + 9_005, true));
        let mut verifier = LimitVerifier::new(&Limit::sliding_log(1, ms(2)).unwrap());
        verifier.add(slow);
        assert_eq!(verifier.finish(), (None, 1));
    }

    #[test]
    fn merging_neighbours_creates_no_violation() {
        let limit = Limit::sliding_log(3, SECOND).unwrap();
        let mut verifier = LimitVerifier { max_held: 8, ..LimitVerifier::new(&limit) };
        verifier.add((0..40).map(|n| call(1, 334 * n)));
        let (closest, keys) = verifier.finish();
        assert_eq!((closest.unwrap().is_within_limit(), keys), (true, 1));
    }
}
