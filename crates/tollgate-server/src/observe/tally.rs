//! Counts, for as many threads as there are. They only grow, but for the requests under way.
//!
//! They are counted modulo 2^64, by each thread and in their sum: costs reach that. To Prometheus a counter that begins
//! again from a small number is a counter reset, and `rate` goes on.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tollgate::{
    Operation, RuleSet,
    stats::{BOUNDS, Durations},
};

use super::{
    Call,
    outcome::{RequestOutcome, RuleOutcome},
    shard::Sharded,
    top::TopRule,
};

/// How many rules have counts of their own: the first of the configuration. The others share those of [`OTHER`].
pub const MAX_RULES_APART: usize = 500;

/// The rule of what has no counts of its own.
pub const OTHER: &str = "!other";

/// The rule of what is decided by a limit given with the request.
pub const KEYED: &str = "!key";

/// The counts of each rule. The rules are those of one moment; the counts go on.
pub(super) struct Table {
    rules: Arc<RuleSet>,
    by_name: HashMap<Arc<str>, RuleTally, foldhash::fast::RandomState>,
    /// The names, in the order of the rules.
    names: Vec<Arc<str>>,
    other: RuleTally,
    keyed: RuleTally,
}

/// The counts of one rule.
#[derive(Clone)]
pub(super) struct RuleTally {
    counts: Arc<Sharded<Counts>>,
    top: Arc<TopRule>,
}

#[derive(Default)]
struct Counts {
    decisions: [AtomicU64; RuleOutcome::ALL.len()],
    costs: [AtomicU64; RuleOutcome::ALL.len()],
    adjustments: [AtomicU64; Adjustment::ALL.len()],
}

/// What is charged or taken back without a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adjustment {
    /// Charged afterwards.
    Charged,
    /// Taken back.
    Refunded,
}

/// The requests of one front end.
#[derive(Default)]
pub(super) struct TransportTally(Sharded<Transported>);

#[derive(Default)]
struct Transported {
    entered: AtomicU64,
    left: [AtomicU64; BOUNDS.len() + 1],
    nanos: AtomicU64,
}

/// How often each call ended how.
#[derive(Default)]
pub(super) struct RequestTally(Sharded<[[AtomicU64; RequestOutcome::ALL.len()]; CALLS.len()]>);

/// The calls, in the order of their counts.
const CALLS: [Call; 5] = [
    Call::CHECK,
    Call::Decide(Operation::Peek),
    Call::Decide(Operation::Charge),
    Call::Decide(Operation::Refund { at: None }),
    Call::Reset,
];

impl Table {
    pub(super) fn new(rules: Arc<RuleSet>) -> Self {
        Self {
            by_name: HashMap::default(),
            names: Vec::new(),
            other: RuleTally::new(TopRule::new(OTHER.into(), &[])),
            keyed: RuleTally::new(TopRule::new(KEYED.into(), &[])),
            rules: Arc::clone(&rules),
        }
        .with_rules(rules)
    }

    /// The table for other rules: who keeps its name keeps its counts.
    pub(super) fn with_rules(&self, rules: Arc<RuleSet>) -> Self {
        let by_name = rules.rules().enumerate().map(|(place, rule)| {
            let counts = match self.by_name.get(&rule.name) {
                _ if place >= MAX_RULES_APART => Arc::clone(&self.other.counts),
                Some(known) if !Arc::ptr_eq(&known.counts, &self.other.counts) => Arc::clone(&known.counts),
                _ => Arc::default(),
            };
            let top = Arc::new(TopRule::new(Arc::clone(&rule.name), &rule.per));
            (Arc::clone(&rule.name), RuleTally { counts, top })
        });
        let by_name = by_name.collect();
        let names = rules.rules().take(MAX_RULES_APART).map(|rule| Arc::clone(&rule.name)).collect();
        Self { by_name, names, other: self.other.clone(), keyed: self.keyed.clone(), rules }
    }

    /// The rules that it is for.
    pub(super) fn rules(&self) -> &Arc<RuleSet> {
        &self.rules
    }

    /// The counts of a rule, if it is in force.
    pub(super) fn find(&self, rule: &str) -> Option<&RuleTally> {
        self.by_name.get(rule)
    }

    pub(super) fn other(&self) -> &RuleTally {
        &self.other
    }

    pub(super) fn keyed(&self) -> &RuleTally {
        &self.keyed
    }

    /// Everything that has counts of its own, in the order of the rules.
    pub(super) fn all(&self) -> impl Iterator<Item = (&str, &RuleTally)> {
        let apart = self.names.iter().filter_map(|name| Some((&**name, self.by_name.get(name)?)));
        apart.chain([(KEYED, &self.keyed), (OTHER, &self.other)])
    }
}

impl RuleTally {
    fn new(top: TopRule) -> Self {
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

    pub(super) fn top_rule(&self) -> &Arc<TopRule> {
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

impl TransportTally {
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

    /// How many are under way.
    pub(super) fn inflight(&self) -> u64 {
        // read first: who leaves meanwhile has entered before
        let left = sum(self.durations().counts);
        let entered = sum(self.0.all().map(|shard| read(&shard.entered)));
        entered.saturating_sub(left)
    }
}

impl RequestTally {
    pub(super) fn count(&self, call: Call, outcome: RequestOutcome) {
        let place = match call {
            Call::Decide(Operation::Check) => 0,
            Call::Decide(Operation::Peek) => 1,
            Call::Decide(Operation::Charge) => 2,
            Call::Decide(Operation::Refund { .. }) => 3,
            Call::Reset => 4,
        };
        self.0.own().add(|calls| &calls[place][outcome as usize], 1);
    }

    /// By the place of the outcome in [`RequestOutcome::ALL`], in parts.
    pub(super) fn by_outcome(&self) -> impl Iterator<Item = (usize, u64)> {
        self.0.all().flatten().flat_map(|counts| counts.iter().map(read).enumerate())
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

/// What all threads counted together.
fn sums<'a, const N: usize>(shards: impl Iterator<Item = &'a [AtomicU64; N]>) -> [u64; N] {
    shards.fold([0; N], |mut sums, counts| {
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum = sum.wrapping_add(read(count));
        }
        sums
    })
}

/// The sum of counts, modulo 2^64 as they are.
pub(super) fn sum(counts: impl IntoIterator<Item = u64>) -> u64 {
    counts.into_iter().fold(0, u64::wrapping_add)
}

fn read(count: &AtomicU64) -> u64 {
    count.load(Relaxed)
}
