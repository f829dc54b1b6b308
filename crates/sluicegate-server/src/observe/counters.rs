//! Counters of requests, decisions and costs, with one cell per thread.
//!
//! All counters wrap modulo 2^64, per cell and in their sum, because costs can reach that. Prometheus treats the wrap as a
//! counter reset, and `rate` continues.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use sluicegate::{
    Source,
    limiter::Operation,
    rules::RuleSet,
    stats::{BOUNDS, Durations},
};

use super::{
    Call,
    heavy_hitters::KeyedRule,
    outcome::{RequestOutcome, RuleOutcome},
    per_thread::PerThread,
};

/// Number of rules with their own counters, in configuration order. The others share those of [`OTHER_RULES`].
pub const MAX_COUNTED_RULES: usize = 500;

/// The `rule` label of rules without their own counters.
pub const OTHER_RULES: &str = "!other";

/// The `rule` label of decisions by a limit that came with the request.
pub const KEY_RULE: &str = "!key";

/// The counters of each rule. A table belongs to one set of rules; the counters outlive it.
pub(super) struct CounterTable {
    rules: Arc<RuleSet>,
    by_name: HashMap<Arc<str>, RuleCounters, foldhash::fast::RandomState>,
    /// The names, in the order of the rules.
    names: Vec<Arc<str>>,
    other: RuleCounters,
    keyed: RuleCounters,
}

/// The counters of one rule.
#[derive(Clone)]
pub(super) struct RuleCounters {
    counts: Arc<PerThread<Counts>>,
    top: Arc<KeyedRule>,
}

#[derive(Default)]
struct Counts {
    decisions: [AtomicU64; RuleOutcome::ALL.len()],
    costs: [AtomicU64; RuleOutcome::ALL.len()],
    adjustments: [AtomicU64; Adjustment::ALL.len()],
}

/// A cost that is charged or refunded without a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adjustment {
    /// Charged.
    Charged,
    /// Refunded.
    Refunded,
}

/// The requests of one front end.
#[derive(Default)]
pub(super) struct TransportCounters(PerThread<Transported>);

#[derive(Default)]
struct Transported {
    entered: AtomicU64,
    left: [AtomicU64; BOUNDS.len() + 1],
    nanos: AtomicU64,
}

/// The requests by call and outcome.
#[derive(Default)]
pub(super) struct RequestCounters(PerThread<[[AtomicU64; RequestOutcome::ALL.len()]; CALLS.len()]>);

/// The decisions of checks by their source.
#[derive(Default)]
pub(super) struct SourceCounters(PerThread<[AtomicU64; Source::ALL.len()]>);

impl SourceCounters {
    pub(super) fn count(&self, source: Source) {
        self.0.own().add(|counts| &counts[source as usize], 1);
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Source::ALL.iter().map(|source| source.name()).zip(sums(self.0.all()))
    }
}

/// The calls, in the order of their counters.
const CALLS: [Call; 9] = [
    Call::CHECK,
    Call::Decide(Operation::Peek),
    Call::Decide(Operation::Charge),
    Call::Decide(Operation::Refund { at: None }),
    Call::Reset,
    Call::Hold,
    Call::Settle,
    Call::Release,
    Call::Renew,
];

impl CounterTable {
    pub(super) fn new(rules: Arc<RuleSet>) -> Self {
        Self {
            by_name: HashMap::default(),
            names: Vec::new(),
            other: RuleCounters::new(KeyedRule::new(OTHER_RULES.into(), &[])),
            keyed: RuleCounters::new(KeyedRule::new(KEY_RULE.into(), &[])),
            rules: Arc::clone(&rules),
        }
        .with_rules(rules)
    }

    /// Creates the table for other rules. Rules with the same name keep their counters.
    pub(super) fn with_rules(&self, rules: Arc<RuleSet>) -> Self {
        let by_name = rules.rules().enumerate().map(|(place, rule)| {
            let counts = match self.by_name.get(&rule.name) {
                _ if place >= MAX_COUNTED_RULES => Arc::clone(&self.other.counts),
                Some(known) if !Arc::ptr_eq(&known.counts, &self.other.counts) => Arc::clone(&known.counts),
                _ => Arc::default(),
            };
            let top = Arc::new(KeyedRule::new(Arc::clone(&rule.name), &rule.per));
            (Arc::clone(&rule.name), RuleCounters { counts, top })
        });
        let by_name = by_name.collect();
        let names = rules.rules().take(MAX_COUNTED_RULES).map(|rule| Arc::clone(&rule.name)).collect();
        Self { by_name, names, other: self.other.clone(), keyed: self.keyed.clone(), rules }
    }

    /// The rules of this table.
    pub(super) fn rules(&self) -> &Arc<RuleSet> {
        &self.rules
    }

    /// The counters of a rule, if it is active.
    pub(super) fn find(&self, rule: &str) -> Option<&RuleCounters> {
        self.by_name.get(rule)
    }

    pub(super) fn other(&self) -> &RuleCounters {
        &self.other
    }

    pub(super) fn keyed(&self) -> &RuleCounters {
        &self.keyed
    }

    /// All counters with their rule names, in the order of the rules.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &RuleCounters)> {
        let own = self.names.iter().filter_map(|name| Some((&**name, self.by_name.get(name)?)));
        own.chain([(KEY_RULE, &self.keyed), (OTHER_RULES, &self.other)])
    }
}

impl RuleCounters {
    fn new(top: KeyedRule) -> Self {
        Self { counts: Arc::default(), top: Arc::new(top) }
    }

    pub(super) fn decided(&self, outcome: RuleOutcome, cost: u64) {
        let counts = self.counts.own();
        counts.add(|counts| &counts.decisions[outcome as usize], 1);
        counts.add(|counts| &counts.costs[outcome as usize], cost);
    }

    pub(super) fn adjusted(&self, adjustment: Adjustment, cost: u64) {
        self.counts.own().add(|counts| &counts.adjustments[adjustment as usize], cost);
    }

    pub(super) fn decisions(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = sums(self.counts.all().map(|counts| &counts.decisions));
        RuleOutcome::ALL.iter().map(|outcome| outcome.name()).zip(counts)
    }

    pub(super) fn costs(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let names = RuleOutcome::ALL.iter().map(|outcome| outcome.name());
        let names = names.chain(Adjustment::ALL.iter().map(|adjustment| adjustment.name()));
        let costs = sums(self.counts.all().map(|counts| &counts.costs));
        names.zip(costs.into_iter().chain(sums(self.counts.all().map(|counts| &counts.adjustments))))
    }

    pub(super) fn top_rule(&self) -> &Arc<KeyedRule> {
        &self.top
    }
}

impl Adjustment {
    const ALL: [Self; 2] = [Self::Charged, Self::Refunded];

    const fn name(self) -> &'static str {
        match self {
            Self::Charged => "charged",
            Self::Refunded => "refunded",
        }
    }
}

impl TransportCounters {
    pub(super) fn entered(&self) {
        self.0.own().add(|counts| &counts.entered, 1);
    }

    pub(super) fn left(&self, took: Duration) {
        let own = self.0.own();
        let bucket = BOUNDS.iter().position(|bound| took <= *bound).unwrap_or(BOUNDS.len());
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        own.add(|counts| &counts.nanos, nanos);
        own.add(|counts| &counts.left[bucket], 1);
    }

    pub(super) fn durations(&self) -> Durations {
        let nanos = sum(self.0.all().map(|shard| read(&shard.nanos)));
        Durations { counts: sums(self.0.all().map(|shard| &shard.left)), total: Duration::from_nanos(nanos) }
    }

    /// Number of requests in progress.
    pub(super) fn inflight(&self) -> u64 {
        // Finished requests are read first: a request that finishes in between has already been counted as started.
        let left = sum(self.durations().counts);
        let entered = sum(self.0.all().map(|shard| read(&shard.entered)));
        entered.saturating_sub(left)
    }
}

impl RequestCounters {
    pub(super) fn count(&self, call: Call, outcome: RequestOutcome) {
        let place = match call {
            Call::Decide(Operation::Check) => 0,
            Call::Decide(Operation::Peek) => 1,
            Call::Decide(Operation::Charge) => 2,
            Call::Decide(Operation::Refund { .. }) => 3,
            Call::Reset => 4,
            Call::Hold => 5,
            Call::Settle => 6,
            Call::Release => 7,
            Call::Renew => 8,
        };
        self.0.own().add(|calls| &calls[place][outcome as usize], 1);
    }

    /// Partial counts with the index of their outcome in [`RequestOutcome::ALL`]. A settlement, release or renewal counts only
    /// if it fails: the request was counted when its hold was made.
    pub(super) fn by_outcome(&self) -> impl Iterator<Item = (usize, u64)> {
        let counts = self.0.all().flat_map(|calls| CALLS.iter().zip(calls));
        counts.flat_map(|(call, counts)| {
            let follows_hold = matches!(call, Call::Settle | Call::Release | Call::Renew);
            let skipped = follows_hold.then_some(RequestOutcome::Allowed as usize);
            counts.iter().map(read).enumerate().filter(move |(place, _)| Some(*place) != skipped)
        })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        CALLS.into_iter().enumerate().flat_map(|(place, call)| {
            let counts = sums(self.0.all().map(|calls| &calls[place]));
            RequestOutcome::ALL
                .iter()
                .zip(counts)
                .map(move |(outcome, count)| (call.name(), outcome.name(), count))
        })
    }
}

/// The sums over all cells.
fn sums<'a, const N: usize>(shards: impl Iterator<Item = &'a [AtomicU64; N]>) -> [u64; N] {
    shards.fold([0; N], |mut sums, counts| {
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum = sum.wrapping_add(read(count));
        }
        sums
    })
}

/// The sum modulo 2^64.
pub(super) fn sum(counts: impl IntoIterator<Item = u64>) -> u64 {
    counts.into_iter().fold(0, u64::wrapping_add)
}

fn read(count: &AtomicU64) -> u64 {
    count.load(Relaxed)
}
