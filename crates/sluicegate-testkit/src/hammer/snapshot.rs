//! Verifies that all fields of a reply are consistent.

use std::time::Duration;

use sluicegate::{Algorithm, Cost, Decision, Limit, Outcome, Retry, Source, TierDecision};

/// Checks that all fields of a reply are consistent: outcome, remaining, retry and reset, in each tier and between tiers. Applies to
/// enforced rules without overdraft and debt.
///
/// `ahead` is how far a counter may be dated ahead of a decision: zero in Redis, where one thread reads one clock; in memory, the time
/// a thread may be suspended between reading the clock and taking the lock.
///
/// # Errors
///
/// The inconsistency, with the reply.
pub fn check_snapshot(
    decision: &Decision,
    limits: &[Limit],
    cost: Cost,
    ahead: Duration,
) -> Result<(), String> {
    let inconsistent =
        |what: String| Err(format!("{what}, at a cost of {} under {limits:?}: {decision:?}", cost.units()));
    if decision.source == Source::Cache {
        return match is_cached_denial(decision, limits, cost) {
            true => Ok(()),
            false => inconsistent("neither a cached denial nor decided by the store".to_owned()),
        };
    }
    let Some(at) = decision.at.filter(|_| matches!(decision.source, Source::Store | Source::Memory)) else {
        return inconsistent("not decided by the store".to_owned());
    };
    if decision.tiers.len() != limits.len() {
        return inconsistent("wrong number of tiers".to_owned());
    }
    for (index, (tier, limit)) in decision.tiers.iter().zip(limits).enumerate() {
        let asked = TierCheck {
            limit,
            cost: cost.units(),
            at_us: at.as_micros(),
            ahead,
            charged: decision.is_allowed(),
        };
        if let Some(what) = asked.inconsistency(tier) {
            return inconsistent(format!("tier {index}: {what}"));
        }
    }
    let denials = decision.tiers.iter().filter_map(|tier| match tier.outcome {
        Outcome::Denied { retry } => Some(retry),
        Outcome::Allowed => None,
    });
    let expected = denials.max().map_or(Outcome::Allowed, |retry| Outcome::Denied { retry });
    if decision.outcome != expected {
        return inconsistent(format!("its tiers imply {expected:?}"));
    }
    Ok(())
}

/// Returns whether a decision without the store is a denial by some tiers with a retry_after.
fn is_cached_denial(decision: &Decision, limits: &[Limit], cost: Cost) -> bool {
    let denies = |tier: &TierDecision| {
        let waits = matches!(tier.outcome, Outcome::Denied { retry: Retry::After(wait) } if !wait.is_zero());
        let has_limit = limits.iter().any(|limit| limit.capacity() == tier.limit);
        waits && has_limit && tier.remaining < cost.units()
    };
    let is_known = decision.at.is_none() && !decision.is_allowed() && decision.retry_after().is_some();
    is_known && !decision.tiers.is_empty() && decision.tiers.iter().all(denies)
}

/// The check of one tier, and whether the whole check was charged.
struct TierCheck<'a> {
    limit: &'a Limit,
    cost: u64,
    at_us: u64,
    ahead: Duration,
    charged: bool,
}

impl TierCheck<'_> {
    fn inconsistency(&self, tier: &TierDecision) -> Option<&'static str> {
        let retry_wrong = match tier.outcome {
            Outcome::Allowed => false,
            Outcome::Denied { retry: Retry::Never } => self.cost <= tier.limit,
            Outcome::Denied { retry: Retry::After(wait) } => wait.is_zero() || wait > tier.reset_after,
        };
        let fits_wrong = match tier.outcome {
            Outcome::Allowed if self.charged => tier.limit.saturating_sub(tier.remaining) < self.cost,
            Outcome::Allowed => tier.remaining < self.cost,
            Outcome::Denied { .. } => tier.remaining >= self.cost,
        };
        let reset_us = u64::try_from(tier.reset_after.as_micros()).unwrap_or(u64::MAX);
        [
            (tier.limit != self.limit.capacity(), "the limit is not the capacity"),
            (tier.remaining > tier.limit, "more remains than the limit"),
            (retry_wrong, "retry does not match the outcome"),
            (fits_wrong, "remaining does not match the outcome"),
            (
                (tier.remaining == tier.limit) != (reset_us == 0),
                "reset_after without usage, or usage without reset_after",
            ),
            (reset_us > 0 && !self.reset_is_possible(tier, reset_us), "reset_after is not possible"),
        ]
        .into_iter()
        .find_map(|(is_wrong, what)| is_wrong.then_some(what))
    }

    /// Returns whether this reset_after is consistent with the usage and with the charge of this check.
    fn reset_is_possible(&self, tier: &TierDecision, reset_us: u64) -> bool {
        let window = self.limit.window_us();
        let just_charged = self.charged && self.cost > 0;
        let ahead = u64::try_from(self.ahead.as_micros()).unwrap_or(u64::MAX);
        let is_edge = |phase: u64| (self.at_us + reset_us - phase).is_multiple_of(window);
        let (shortest, longest) = match self.limit.algorithm() {
            Algorithm::FixedWindow if !is_edge(self.limit.phase_us()) => return false,
            Algorithm::SlidingCounter if !is_edge(0) => return false,
            Algorithm::FixedWindow => (1, window),
            Algorithm::SlidingLog => (if just_charged { window } else { 1 }, window),
            Algorithm::SlidingCounter => (if just_charged { window + 1 } else { 1 }, 2 * window),
            Algorithm::TokenBucket => {
                let used = tier.limit.saturating_sub(tier.remaining);
                (self.drain_us(used.saturating_sub(1)), self.drain_us(used))
            }
            Algorithm::Concurrency => unreachable!("its requests are holds"),
        };
        (shortest..=longest.saturating_add(ahead)).contains(&reset_us)
    }

    /// Returns how long a bucket takes to drain `units`, rounded up.
    fn drain_us(&self, units: u64) -> u64 {
        let micros = u128::from(units) * u128::from(self.limit.window_us());
        u64::try_from(micros.div_ceil(u128::from(self.limit.amount()))).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluicegate::{Limiter, ManualClock, MemoryStore, Timestamp};

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns one admitted and one denied reply of each algorithm.
    fn replies() -> Vec<(Limit, Decision)> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let limiter = Limiter::new(MemoryStore::new().with_clock(clock), []).unwrap();
        let mut replies = Vec::new();
        for algorithm in Algorithm::WINDOWED {
            let limit = Limit::new(algorithm, 5, SECOND).unwrap();
            for _ in 0..2 {
                let decision = runtime.block_on(limiter.check_key("k", &limit, Cost::from(3))).unwrap();
                replies.push((limit, decision));
            }
        }
        replies
    }

    #[test]
    fn a_consistent_reply_is_accepted_and_any_altered_one_is_not() {
        type Alteration = (&'static str, fn(&mut Decision));
        let alterations: [Alteration; 10] = [
            ("source", |reply| reply.source = Source::Open),
            ("time", |reply| reply.at = None),
            ("tiers", |reply| reply.tiers.clear()),
            ("outcome", |reply| {
                reply.outcome = match reply.outcome {
                    Outcome::Allowed => Outcome::Denied { retry: Retry::Never },
                    Outcome::Denied { .. } => Outcome::Allowed,
                };
            }),
            ("retry", |reply| {
                reply.tiers[0].outcome = Outcome::Denied { retry: Retry::After(Duration::ZERO) };
            }),
            ("never", |reply| reply.tiers[0].outcome = Outcome::Denied { retry: Retry::Never }),
            ("limit", |reply| reply.tiers[0].limit += 1),
            ("remaining", |reply| reply.tiers[0].remaining = 5),
            ("no reset", |reply| reply.tiers[0].reset_after = Duration::ZERO),
            ("late reset", |reply| reply.tiers[0].reset_after += 2 * SECOND),
        ];
        for (limit, reply) in replies() {
            let cost = Cost::from(3);
            assert_eq!(check_snapshot(&reply, &[limit], cost, Duration::ZERO), Ok(()));
            for (what, alter) in &alterations {
                let mut altered = reply.clone();
                alter(&mut altered);
                let verdict = check_snapshot(&altered, &[limit], cost, Duration::ZERO);
                assert!(verdict.is_err(), "an altered {what} is not detected: {altered:?}");
            }
        }
    }
}
