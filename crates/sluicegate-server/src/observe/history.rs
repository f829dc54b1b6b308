//! Decisions per second of the last hour, for the dashboard.
//!
//! Once a second the counters are read and their increase is kept, so that a decision has no additional cost. For each
//! second the [`MAX_RULES`] busiest rules are kept, and none that were idle.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use parking_lot::Mutex;
use serde::Serialize;
use sluicegate::stats::{BOUNDS, HoldStats, Stats};
use tokio::{sync::watch, time::Instant};

use super::{
    Observer,
    counters::{CounterTable, OTHER_RULES, sum},
    decision_rates::{RuleTotals, increase},
    outcome::{RequestOutcome, RuleOutcome},
};

/// Number of seconds recorded.
pub const SECONDS: usize = 3_600;

/// Number of rules kept for one second.
pub const MAX_RULES: usize = 32;

/// Interval between readings of the counters.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// The activity of one second.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Second {
    /// Sequence number since the start of the server, from 1.
    pub number: u64,
    /// End of the second, in milliseconds since 1970.
    pub at_ms: u64,
    /// Allowed requests.
    pub allowed: u64,
    /// Denied requests.
    pub denied: u64,
    /// Requests without a matching rule.
    pub unmatched: u64,
    /// Invalid, unauthorized and failed requests.
    pub errors: u64,
    /// Requests decided without the store.
    pub degraded: u64,
    /// Successful calls to the store.
    pub store_calls: u64,
    /// Total duration of these calls, in microseconds.
    pub store_micros: u64,
    /// Median duration of these calls, in microseconds.
    pub store_p50_us: u64,
    /// 99th percentile of the duration of these calls, in microseconds.
    pub store_p99_us: u64,
    /// Failed calls to the store.
    pub store_errors: u64,
    /// Open circuit breakers at the end of the second.
    pub breakers_open: u64,
    /// Memory used by the memory store at the end of the second, in bytes.
    pub store_bytes: u64,
    /// Checks and charges on overflow counters, one for each matching rule, because the memory store is full.
    pub overflow_decisions: u64,
    /// Holds by outcome, if there were any.
    #[serde(skip_serializing_if = "HoldsSecond::is_idle")]
    pub holds: HoldsSecond,
    /// The busiest rules in descending order, then the sum of the others.
    pub rules: Vec<RuleSecond>,
}

/// The holds of one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HoldsSecond {
    /// Holds that were made.
    pub held: u64,
    /// Holds that were settled or released.
    pub ended: u64,
    /// Expired holds that this process detected, once for each counter.
    pub expired: u64,
    /// Holds that were settled after they had expired.
    pub late: u64,
    /// Settlements of holds that do not exist.
    pub unknown: u64,
    /// Settlements that the store did not answer.
    pub queued: u64,
}

impl HoldsSecond {
    fn is_idle(&self) -> bool {
        *self == Self::default()
    }

    /// The increase between two totals.
    fn between(before: &HoldStats, now: &HoldStats) -> Self {
        let of = |count: fn(&HoldStats) -> u64| increase(count(now), count(before));
        Self {
            held: of(|holds| holds.held),
            ended: of(|holds| holds.settled) + of(|holds| holds.released),
            expired: of(|holds| holds.expired),
            late: of(|holds| holds.late),
            unknown: of(|holds| holds.unknown),
            queued: of(|holds| holds.queued),
        }
    }
}

/// The activity of one rule in one second.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RuleSecond {
    /// Its name.
    pub rule: Arc<str>,
    /// Checks it allowed.
    pub allowed: u64,
    /// Checks it denied, with or without the store.
    pub denied: u64,
    /// Checks it would have denied as an enforced rule.
    pub shadow_denied: u64,
}

/// The last hour.
pub struct History {
    /// Identifies this run of the server, since sequence numbers restart with each run.
    run: Box<str>,
    seconds: Mutex<RecordedSeconds>,
    /// The sequence number of the last second.
    last: watch::Sender<u64>,
}

#[derive(Default)]
struct RecordedSeconds {
    seconds: VecDeque<Arc<Second>>,
    before: Totals,
}

/// All counters at one time.
#[derive(Default)]
struct Totals {
    requests: [u64; RequestOutcome::ALL.len()],
    degraded: u64,
    store_calls: [u64; BOUNDS.len() + 1],
    store_micros: u64,
    store_errors: u64,
    overflow_decisions: u64,
    holds: HoldStats,
    rules: Arc<RuleTotals>,
}

impl Default for History {
    fn default() -> Self {
        let run = format!("{:016x}", sluicegate::random());
        Self { run: run.into(), seconds: Mutex::default(), last: watch::Sender::new(0) }
    }
}

impl History {
    /// The identifier of this run of the server.
    pub fn run(&self) -> &str {
        &self.run
    }

    /// Returns the seconds after this sequence number, oldest first.
    pub fn since(&self, number: u64) -> Vec<Arc<Second>> {
        let recorded = self.seconds.lock();
        let first = recorded.seconds.partition_point(|second| second.number <= number);
        recorded.seconds.range(first..).cloned().collect()
    }

    /// Subscribes to the sequence number of the last second.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    #[expect(clippy::disallowed_methods, reason = "the time is only displayed")]
    fn record(&self, totals: Totals, stats: &Stats) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut recorded = self.seconds.lock();
        let number = recorded.seconds.back().map_or(1, |second| second.number + 1);
        let mut second = totals.since(&recorded.before);
        second.number = number;
        second.at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        second.breakers_open = u64::try_from(stats.open_breakers).unwrap_or(u64::MAX);
        second.store_bytes = stats.store.bytes;
        if recorded.seconds.len() == SECONDS {
            recorded.seconds.pop_front();
        }
        recorded.seconds.push_back(Arc::new(second));
        recorded.before = totals;
        drop(recorded);
        self.last.send_replace(number);
    }
}

impl Observer {
    /// The last hour, filled by [`Observer::record_second`].
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Records the activity since the previous call. Call it every [`INTERVAL`].
    pub fn record_second(&self, stats: &Stats) {
        let totals = self.totals(stats);
        self.rates.record(Instant::now(), Arc::clone(&totals.rules));
        self.overflow.record(&stats.store);
        self.history.record(totals, stats);
    }

    fn totals(&self, stats: &Stats) -> Totals {
        let mut requests = [0; RequestOutcome::ALL.len()];
        for (place, count) in self.requests.by_outcome() {
            requests[place] = sum([requests[place], count]);
        }
        let table: &CounterTable = &self.table.load();
        let rules = table.all().map(|(rule, counters)| {
            let mut counts = [0; RuleOutcome::ALL.len()];
            for (place, (_, count)) in counters.decisions().enumerate() {
                counts[place] = count;
            }
            (Arc::from(rule), counts)
        });
        Totals {
            requests,
            degraded: sum(stats.degraded.iter().map(|(_, count)| *count)),
            store_calls: stats.calls.counts,
            store_micros: u64::try_from(stats.calls.total.as_micros()).unwrap_or(u64::MAX),
            store_errors: sum(stats.errors.iter().map(|(_, count)| *count)),
            overflow_decisions: stats.store.overflow_decisions,
            holds: stats.holds,
            rules: Arc::new(rules.collect()),
        }
    }
}

impl Totals {
    /// The increase since earlier totals.
    fn since(&self, before: &Self) -> Second {
        let of = |outcome: RequestOutcome| {
            increase(self.requests[outcome as usize], before.requests[outcome as usize])
        };
        let mut calls = self.store_calls;
        for (count, before) in calls.iter_mut().zip(before.store_calls) {
            *count = increase(*count, before);
        }
        Second {
            allowed: of(RequestOutcome::Allowed),
            denied: of(RequestOutcome::Denied),
            unmatched: of(RequestOutcome::Unmatched),
            errors: sum(
                [RequestOutcome::Invalid, RequestOutcome::Unauthorized, RequestOutcome::Failed].map(of)
            ),
            degraded: increase(self.degraded, before.degraded),
            store_calls: sum(calls),
            store_micros: increase(self.store_micros, before.store_micros),
            store_p50_us: quantile(&calls, 50),
            store_p99_us: quantile(&calls, 99),
            store_errors: increase(self.store_errors, before.store_errors),
            overflow_decisions: increase(self.overflow_decisions, before.overflow_decisions),
            holds: HoldsSecond::between(&before.holds, &self.holds),
            rules: self.rules_since(before),
            ..Second::default()
        }
    }

    fn rules_since(&self, before: &Self) -> Vec<RuleSecond> {
        let idle = [0; RuleOutcome::ALL.len()];
        let mut rules: Vec<_> = self
            .rules
            .iter()
            .map(|(rule, counts)| {
                let before = before.rules.get(rule).unwrap_or(&idle);
                let of = |outcome: RuleOutcome| increase(counts[outcome as usize], before[outcome as usize]);
                RuleSecond {
                    rule: Arc::clone(rule),
                    allowed: of(RuleOutcome::Allowed)
                        + of(RuleOutcome::FallbackAllowed)
                        + of(RuleOutcome::FailedOpen)
                        + of(RuleOutcome::Overruled),
                    denied: of(RuleOutcome::Denied)
                        + of(RuleOutcome::FallbackDenied)
                        + of(RuleOutcome::FailedClosed),
                    shadow_denied: of(RuleOutcome::ShadowDenied),
                }
            })
            .filter(|rule| rule.checks() > 0)
            .collect();
        rules.sort_by(|one, two| two.checks().cmp(&one.checks()).then_with(|| one.rule.cmp(&two.rule)));
        if rules.len() > MAX_RULES {
            let mut others = RuleSecond { rule: OTHER_RULES.into(), allowed: 0, denied: 0, shadow_denied: 0 };
            for rule in rules.drain(MAX_RULES..) {
                others.allowed += rule.allowed;
                others.denied += rule.denied;
                others.shadow_denied += rule.shadow_denied;
            }
            rules.push(others);
        }
        rules
    }
}

impl RuleSecond {
    fn checks(&self) -> u64 {
        self.allowed + self.denied + self.shadow_denied
    }
}

/// Estimates a percentile in microseconds by linear interpolation within a bucket. Durations beyond the last bound count as
/// that bound.
fn quantile(counts: &[u64; BOUNDS.len() + 1], percent: u64) -> u64 {
    let micros = |bound: Duration| u64::try_from(bound.as_micros()).unwrap_or(u64::MAX);
    let rank = (counts.iter().sum::<u64>() * percent).div_ceil(100);
    let (mut below, mut lower) = (0, 0);
    for (count, upper) in counts.iter().zip(BOUNDS.map(micros)) {
        if *count > 0 && below + count >= rank {
            return lower + (upper - lower) * (rank - below) / count;
        }
        (below, lower) = (below + count, upper);
    }
    if below == 0 && counts[BOUNDS.len()] == 0 { 0 } else { lower }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated_within_their_bucket() {
        let mut counts = [0; BOUNDS.len() + 1];
        assert_eq!((quantile(&counts, 50), quantile(&counts, 99)), (0, 0));
        counts[0] = 10;
        assert_eq!((quantile(&counts, 50), quantile(&counts, 99)), (50, 100));
        counts[2] = 10;
        assert_eq!((quantile(&counts, 50), quantile(&counts, 75), quantile(&counts, 99)), (100, 375, 500));
        counts[BOUNDS.len()] = 1_000;
        assert_eq!(quantile(&counts, 99), 1_000_000);
    }
}
