//! Whether more was admitted than the limit allows, on any key and in any window, by the callers' own clock.
//!
//! It judges beside the load, in bounded memory, and never raises a false alarm: what it has no room for it makes coarser or
//! leaves out, which hides violations and invents none.

use std::{collections::HashMap, time::Duration};

use tollgate::{
    Bound, Limit,
    oracle::{Admitted, Violation, bucket_violation, window_violation},
};

/// How many calls are held, at most.
const MAX_HELD: usize = 1 << 20;
/// How much later than another call, received at the same time, one may be reported.
const REPORTED_LATE: Duration = Duration::from_secs(1);

/// Which key a call was about.
pub(super) type KeyNumber = u32;

/// A call that was admitted, and its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) key: KeyNumber,
    pub(super) admitted: Admitted,
}

/// The searches for the interval that comes closest to the bound of a limit.
trait ClosestInterval {
    fn closest(self, key: KeyNumber, calls: &[Admitted]) -> Option<Closest>;
}

impl ClosestInterval for Bound {
    /// The interval in which most was admitted, measured by what is allowed in it; none if the window is too short to tell.
    fn closest(self, key: KeyNumber, calls: &[Admitted]) -> Option<Closest> {
        match self {
            Self::Window { most, window } => {
                let found = window_violation(calls, 0, window)?;
                let Violation { from, until, admitted, .. } = found;
                Some(Closest { key, admitted, allowed: most.into(), from, until })
            }
            Self::Bucket { burst, amount, window } => {
                // without a burst, each admitted unit beyond the rate is in excess
                let found = bucket_violation(calls, 0, amount, window);
                let Violation { from, until, admitted, allowed } =
                    found.or_else(|| within_the_rate(calls, amount, window))?;
                Some(Closest { key, admitted, allowed: allowed + u128::from(burst), from, until })
            }
        }
    }
}

/// All calls, which need no burst: the rate alone allows them.
fn within_the_rate(calls: &[Admitted], amount: u64, window: Duration) -> Option<Violation> {
    let from = calls.iter().map(|call| call.sent).min()?;
    let until = calls.iter().map(|call| call.received).max()?;
    let admitted = calls.iter().map(|call| u128::from(call.cost)).sum();
    let allowed = (until - from).as_nanos() * u128::from(amount) / window.as_nanos().max(1);
    Some(Violation { from, until, admitted, allowed })
}

/// How near to the bound it came, or how far beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closest {
    pub(super) key: KeyNumber,
    pub(super) admitted: u128,
    pub(super) allowed: u128,
    /// From the beginning of the load.
    pub(super) from: Duration,
    pub(super) until: Duration,
}

impl Closest {
    pub(super) fn is_kept(&self) -> bool {
        self.admitted <= self.allowed
    }

    fn excess(&self) -> i128 {
        let number = |units: u128| i128::try_from(units).unwrap_or(i128::MAX);
        number(self.admitted) - number(self.allowed)
    }
}

/// Judges one load.
pub(super) struct Judge {
    bound: Bound,
    calls: HashMap<KeyNumber, Vec<Admitted>>,
    held: usize,
    max_held: usize,
    closest: Option<Closest>,
}

impl Judge {
    pub(super) fn new(limit: &Limit) -> Self {
        Self { bound: limit.bound(), calls: HashMap::new(), held: 0, max_held: MAX_HELD, closest: None }
    }

    pub(super) fn add(&mut self, calls: impl IntoIterator<Item = Call>) {
        for Call { key, admitted } in calls {
            self.calls.entry(key).or_default().push(admitted);
            self.held += 1;
        }
        if self.held > self.max_held {
            self.look();
            self.forget();
        }
    }

    /// How near any key came to its bound; none if nothing was admitted. And how many keys were asked for.
    pub(super) fn finish(mut self) -> (Option<Closest>, usize) {
        self.look();
        (self.closest, self.calls.len())
    }

    fn look(&mut self) {
        for (key, calls) in &self.calls {
            let Some(found) = self.bound.closest(*key, calls) else { continue };
            if self.closest.is_none_or(|closest| found.excess() > closest.excess()) {
                self.closest = Some(found);
            }
        }
    }

    /// Leaves out what no window has together with a call to come; if that is not enough, joins neighbours.
    fn forget(&mut self) {
        if let Bound::Window { window, .. } = self.bound {
            let latest = self.calls.values().flatten().map(|call| call.received).max().unwrap_or_default();
            let horizon = latest.saturating_sub(window + REPORTED_LATE);
            self.calls.values_mut().for_each(|calls| calls.retain(|call| call.sent >= horizon));
        }
        self.count();
        while self.held > self.max_held / 2 {
            let before = self.held;
            self.calls.values_mut().for_each(join_neighbours);
            self.count();
            if self.held == before {
                // one for each key
                break;
            }
        }
    }

    fn count(&mut self) {
        self.held = self.calls.values().map(Vec::len).sum();
    }
}

/// Makes one call of two: it was certainly decided between the first send and the last receipt.
fn join_neighbours(calls: &mut Vec<Admitted>) {
    calls.sort_unstable_by_key(|call| call.sent);
    let joined = calls.chunks(2).map(|pair| Admitted {
        sent: pair[0].sent,
        received: pair.iter().map(|call| call.received).max().unwrap_or_default(),
        cost: pair.iter().map(|call| call.cost).sum(),
    });
    *calls = joined.collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn call(key: KeyNumber, at_ms: u64) -> Call {
        Call { key, admitted: Admitted { sent: ms(at_ms), received: ms(at_ms), cost: 1 } }
    }

    fn judged(limit: Limit, max_held: usize, calls: impl IntoIterator<Item = Call>) -> Closest {
        let mut judge = Judge { max_held, ..Judge::new(&limit) };
        for call in calls {
            judge.add([call]);
            assert!(judge.held <= max_held);
        }
        judge.finish().0.unwrap()
    }

    #[test]
    fn the_limit_is_kept_and_one_more_is_not_also_in_little_memory() {
        // ten a second on each of two keys, for a minute
        let kept = (0..600).flat_map(|n| [call(1, 100 * n), call(2, 100 * n)]);
        let limit = Limit::sliding_log(10, SECOND).unwrap();
        for max_held in [MAX_HELD, 100] {
            let closest = judged(limit, max_held, kept.clone());
            assert_eq!((closest.admitted, closest.allowed, closest.is_kept()), (10, 10, true));
            let one_more = kept.clone().chain([call(2, 59_950)]);
            let closest = judged(limit, max_held, one_more);
            assert_eq!((closest.key, closest.admitted, closest.is_kept()), (2, 11, false));
        }
    }

    #[test]
    fn a_bucket_may_give_its_burst_and_rate_and_not_one_more() {
        let limit = Limit::token_bucket(10, SECOND).unwrap().with_burst(5).unwrap();
        let kept = (0..5).map(|_| call(7, 0)).chain((1..600).map(|n| call(7, 100 * n)));
        for max_held in [MAX_HELD, 64] {
            assert!(judged(limit, max_held, kept.clone()).is_kept());
        }
        let closest = judged(limit, MAX_HELD, kept.chain([call(7, 59_900)]));
        assert_eq!((closest.admitted, closest.is_kept()), (closest.allowed + 1, false));
    }

    #[test]
    fn a_rate_that_nobody_reaches_is_kept_and_a_window_too_short_to_tell_is_not_judged() {
        let slow = (0..10).map(|n| call(7, 1_000 * n)).map(|mut call| {
            call.admitted.received += ms(5);
            call
        });
        let closest = judged(Limit::token_bucket(1_000, SECOND).unwrap(), MAX_HELD, slow.clone());
        assert_eq!((closest.admitted, closest.allowed, closest.is_kept()), (10, 1_000 + 9_005, true));
        let mut judge = Judge::new(&Limit::sliding_log(1, ms(2)).unwrap());
        judge.add(slow);
        assert_eq!(judge.finish(), (None, 1));
    }

    #[test]
    fn joining_neighbours_never_accuses() {
        let limit = Limit::sliding_log(3, SECOND).unwrap();
        let mut judge = Judge { max_held: 8, ..Judge::new(&limit) };
        judge.add((0..40).map(|n| call(1, 334 * n)));
        let (closest, keys) = judge.finish();
        assert_eq!((closest.unwrap().is_kept(), keys), (true, 1));
    }
}
