//! Decisions per second of each rule, as a mean over the last [`INTERVALS`] samples.
//!
//! The rates are the increase of the existing counters between two samples, so that a decision has no additional cost.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::outcome::RuleOutcome;

/// Number of sampling intervals that a rate covers: about 10 s.
pub const INTERVALS: usize = 10;

/// The decisions of each rule so far, by outcome in the order of [`RuleOutcome::ALL`].
pub(super) type RuleTotals = HashMap<Arc<str>, [u64; RuleOutcome::ALL.len()]>;

/// The last samples of the counters: at most one more than [`INTERVALS`].
#[derive(Default)]
pub(super) struct DecisionRates(Mutex<VecDeque<Sample>>);

#[derive(Clone)]
struct Sample {
    at: Instant,
    totals: Arc<RuleTotals>,
}

/// The oldest and the newest sample.
pub(super) struct RatePeriod(Option<(Sample, Sample)>);

impl DecisionRates {
    /// Records a sample. Call it once a second.
    pub(super) fn record(&self, at: Instant, totals: Arc<RuleTotals>) {
        let mut samples = self.0.lock();
        if samples.len() > INTERVALS {
            samples.pop_front();
        }
        samples.push_back(Sample { at, totals });
    }

    /// Returns the period that the current rates cover.
    pub(super) fn period(&self) -> RatePeriod {
        let samples = self.0.lock();
        RatePeriod(samples.front().cloned().zip(samples.back().cloned()))
    }
}

impl RatePeriod {
    /// Returns the decisions per second of a rule with their outcomes; 0 until there are two samples.
    pub(super) fn rates(&self, rule: &str) -> impl Iterator<Item = (&'static str, f64)> {
        let mut rates = [0.0; RuleOutcome::ALL.len()];
        if let Some((oldest, newest)) = &self.0
            && let Some(totals) = newest.totals.get(rule)
        {
            let seconds = newest.at.duration_since(oldest.at).as_secs_f64();
            let before = oldest.totals.get(rule).copied().unwrap_or_default();
            for ((rate, total), before) in rates.iter_mut().zip(totals).zip(before) {
                if seconds > 0.0 {
                    *rate = increase(*total, before) as f64 / seconds;
                }
            }
        }
        RuleOutcome::ALL.iter().map(|outcome| outcome.name()).zip(rates)
    }
}

/// The increase of a counter; after a reset, its whole value.
pub(super) fn increase(now: u64, before: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn allowed(rates: &DecisionRates, rule: &str) -> f64 {
        rates.period().rates(rule).find(|(outcome, _)| *outcome == "allowed").unwrap().1
    }

    /// Records samples, each some seconds after the previous one, with the number of allowed checks of the rule `r` so far.
    fn record(rates: &DecisionRates, at: &mut Instant, samples: impl IntoIterator<Item = (u64, u64)>) {
        for (seconds, total) in samples {
            *at += Duration::from_secs(seconds);
            let mut counts = [0; RuleOutcome::ALL.len()];
            counts[RuleOutcome::Allowed as usize] = total;
            rates.record(*at, Arc::new(RuleTotals::from([("r".into(), counts)])));
        }
    }

    #[test]
    fn a_rate_is_the_mean_of_the_last_ten_intervals() {
        let (rates, mut at) = (DecisionRates::default(), Instant::now());
        assert_eq!(allowed(&rates, "r"), 0.0);
        record(&rates, &mut at, [(0, 100)]);
        assert_eq!(allowed(&rates, "r"), 0.0, "one sample is no interval");
        record(&rates, &mut at, [(1, 150)]);
        assert_eq!(allowed(&rates, "r"), 50.0);
        record(&rates, &mut at, (0..9).map(|_| (1, 150)));
        assert_eq!(allowed(&rates, "r"), 5.0);
        record(&rates, &mut at, [(1, 150)]);
        assert_eq!(allowed(&rates, "r"), 0.0, "the increase is older than ten intervals");
        assert_eq!(allowed(&rates, "unknown"), 0.0);
        assert_eq!(rates.0.lock().len(), INTERVALS + 1);
    }

    #[test]
    fn a_delayed_sample_does_not_raise_the_rate() {
        let (rates, mut at) = (DecisionRates::default(), Instant::now());
        record(&rates, &mut at, [(0, 0), (1, 10), (4, 50)]);
        assert_eq!(allowed(&rates, "r"), 10.0);
    }

    #[test]
    fn counters_that_start_again_count_from_zero() {
        let (rates, mut at) = (DecisionRates::default(), Instant::now());
        rates.record(at, Arc::default());
        record(&rates, &mut at, [(1, 30)]);
        assert_eq!(allowed(&rates, "r"), 30.0, "the rule is new");
        let (rates, mut at) = (DecisionRates::default(), Instant::now());
        record(&rates, &mut at, [(0, 1_000), (1, 20)]);
        assert_eq!(allowed(&rates, "r"), 20.0, "the rule was removed and added again");
    }
}
