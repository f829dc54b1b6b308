//! What the server tells about itself. Every decision is observed once, at the [engine](crate::engine).
//!
//! | module | has |
//! |---|---|
//! | `mod` | the [`Observer`]: what is noted of a decision |
//! | `outcome` | what a decision means for each rule, in one word |
//! | `tally`, `shard` | counts, for as many threads as there are |
//! | [`metrics`] | every metric's name, labels and meaning, and the text that Prometheus reads |
//! | [`top`] | the keys that ask the most and are refused the most |
//! | [`history`] | decisions a second, of the last hour |
//! | [`logs`] | what is logged, and where it goes |
//! | [`trace`] | a span for each request, in the trace of the one who sent it |
//! | `otlp` | spans to an OpenTelemetry collector |
//!
//! Memory is bounded, whatever requests name: keys are never labels of a metric. Nothing here decides anything.

pub mod history;
pub mod logs;
pub mod metrics;
#[cfg(feature = "otlp")]
pub mod otlp;
mod outcome;
mod shard;
mod tally;
pub mod top;
pub mod trace;

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use quanta::{Clock, Instant};
use tollgate::{
    Decision, Error, GroupDecision, Mode, Operation, Request, RuleSet, Source, Subject, TierDecision,
    rules::Effect,
};

use self::{
    outcome::{RequestOutcome, RuleOutcome},
    tally::{Adjustment, RequestTally, RuleTally, Table, TransportTally},
    top::{Noted, Top},
};
use crate::engine::Transport;

/// Notes what becomes of requests.
pub struct Observer {
    clock: Clock,
    begun: Instant,
    /// The rules that are counted apart. Swapped when others are in force, so that a decision finds its counters
    /// without a lock.
    table: ArcSwap<Table>,
    /// The table's counts of checks without rules, which are the same in every table.
    keyed: RuleTally,
    /// Held by who swaps the table.
    swapping: Mutex<()>,
    transports: [TransportTally; Transport::ALL.len()],
    requests: RequestTally,
    reloads: metrics::Reloads,
    top: Top,
    history: history::History,
}

/// The observation of one request in flight. It ends when this is dropped, also if the caller has gone away.
pub struct Observation<'a> {
    observer: &'a Observer,
    transport: Transport,
    begun: Instant,
}

/// What is asked of the desk. A reset is no operation of the limiter, but is counted like one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// To decide, or to adjust.
    Decide(Operation),
    /// To forget.
    Reset,
}

impl Call {
    /// A check.
    pub const CHECK: Self = Self::Decide(Operation::Check);

    /// Its name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decide(Operation::Check) => "check",
            Self::Decide(Operation::Peek) => "peek",
            Self::Decide(Operation::Charge) => "charge",
            Self::Decide(Operation::Refund { .. }) => "refund",
            Self::Reset => "reset",
        }
    }
}

/// What was decided, and whether what it is part of passed: of several that pass together, those say allowed that are
/// not to blame for a refusal.
#[derive(Clone, Copy)]
struct Verdict<'a> {
    decision: &'a Decision,
    passed: bool,
}

impl Observer {
    /// An observer of a server with these rules.
    pub fn new(rules: Arc<RuleSet>) -> Self {
        Self::with_clock(rules, Clock::new())
    }

    fn with_clock(rules: Arc<RuleSet>, clock: Clock) -> Self {
        let table = Table::new(rules);
        Self {
            begun: clock.now(),
            clock,
            keyed: table.keyed().clone(),
            table: ArcSwap::from_pointee(table),
            swapping: Mutex::new(()),
            transports: Default::default(),
            requests: RequestTally::default(),
            reloads: metrics::Reloads::default(),
            top: Top::default(),
            history: history::History::default(),
        }
    }

    /// A request has come.
    pub fn begin(&self, transport: Transport) -> Observation<'_> {
        self.begin_at(transport, self.now())
    }

    /// A request had come then.
    pub(crate) fn begin_at(&self, transport: Transport, begun: Instant) -> Observation<'_> {
        self.transports[transport as usize].entered();
        Observation { observer: self, transport, begun }
    }

    /// A request has come that cannot be asked about: its caller's mistake.
    pub fn invalid(&self, call: Call) {
        self.requests.count(call, RequestOutcome::Invalid);
    }

    /// A request has come whose caller may not ask.
    pub fn unauthorized(&self, call: Call) {
        self.requests.count(call, RequestOutcome::Unauthorized);
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// How often the configuration was read, and how that went.
    pub fn reloads(&self) -> &metrics::Reloads {
        &self.reloads
    }

    /// The keys that ask the most and are refused the most.
    pub fn top(&self, count: usize) -> top::Snapshot {
        self.top.snapshot(count, self.uptime())
    }

    /// How long it has been watching.
    pub fn uptime(&self) -> Duration {
        self.clock.now().duration_since(self.begun)
    }

    /// Counts by the rules in force, from now on.
    fn follow(&self, rules: Arc<RuleSet>) -> Arc<Table> {
        let _one_at_a_time = self.swapping.lock();
        let table = self.table.load_full();
        if Arc::ptr_eq(table.rules(), &rules) {
            return table;
        }
        let next = Arc::new(table.with_rules(rules));
        self.table.store(Arc::clone(&next));
        next
    }
}

impl Observation<'_> {
    /// It was decided. `in_force` are the rules to look at if those that are known do not explain the decision.
    pub fn decided(&self, request: &Request<'_>, decision: &Decision, in_force: impl Fn() -> Arc<RuleSet>) {
        self.observer.requests.count(Call::Decide(request.operation), outcome::of_request(decision));
        let verdict = Verdict { decision, passed: decision.is_allowed() };
        self.note(request, verdict, &in_force);
    }

    /// Several requests were decided together, all or none.
    pub fn decided_group(
        &self,
        requests: &[Request<'_>],
        group: &GroupDecision,
        in_force: impl Fn() -> Arc<RuleSet>,
    ) {
        let GroupDecision { overall, each } = group;
        self.observer.requests.count(Call::CHECK, outcome::of_request(overall));
        let passed = overall.is_allowed();
        for (request, decision) in requests.iter().zip(each) {
            // a refund of a denied group is not made
            if passed || !matches!(request.operation, Operation::Refund { .. }) {
                self.note(request, Verdict { decision, passed }, &in_force);
            }
        }
    }

    /// Counts by each rule that was met.
    fn note(&self, request: &Request<'_>, verdict: Verdict<'_>, in_force: &impl Fn() -> Arc<RuleSet>) {
        let operation = request.operation;
        if operation == Operation::Peek {
            return;
        }
        for tier in &verdict.decision.tiers {
            let Some(rule) = tier.rule.as_deref() else {
                self.note_tier(request, verdict, tier, &self.observer.keyed);
                continue;
            };
            match self.observer.table.load().find(rule) {
                Some(tally) => self.note_tier(request, verdict, tier, tally),
                None => {
                    let table = self.observer.follow(in_force());
                    let tally = table.find(rule).unwrap_or(table.other());
                    self.note_tier(request, verdict, tier, tally);
                }
            }
        }
        if verdict.decision.is_degraded() && operation == Operation::Check {
            self.note_without_store(request, verdict, &in_force());
        }
    }

    fn note_tier(&self, request: &Request<'_>, verdict: Verdict<'_>, tier: &TierDecision, tally: &RuleTally) {
        let cost = request.cost(&tier.unit).units();
        match request.operation {
            Operation::Check => {
                tally.decided(outcome::of_tier(verdict, tier), cost);
                if tier.mode == Mode::Enforced {
                    self.note_key(request, tier, tally);
                }
            }
            Operation::Charge => tally.adjusted(Adjustment::Charged, cost),
            Operation::Refund { .. } => tally.adjusted(Adjustment::Refunded, cost),
            Operation::Peek => {}
        }
    }

    /// It cannot be decided.
    pub fn failed(&self, call: Call, error: &Error) {
        self.observer.requests.count(call, outcome::of_error(error));
    }

    /// It has been done.
    pub fn done(&self, call: Call) {
        self.observer.requests.count(call, RequestOutcome::Allowed);
    }

    /// The rules that have no say in a decision that was made without the store: it does not name them.
    fn note_without_store(&self, request: &Request<'_>, verdict: Verdict<'_>, rules: &Arc<RuleSet>) {
        let Verdict { decision, passed } = verdict;
        let outcome = if passed { RuleOutcome::FailedOpen } else { RuleOutcome::Overruled };
        let Subject::Labels { labels, costs, .. } = &request.subject else {
            if decision.source == Source::Open {
                self.observer.keyed.decided(outcome, request.cost("").units());
            }
            return;
        };
        let table = self.observer.follow(Arc::clone(rules));
        for applied in rules.matching(labels, costs).unwrap_or_default() {
            let has_say = |tier: &TierDecision| tier.rule.as_deref() == Some(&*applied.rule.name);
            if matches!(applied.effect, Effect::Limit { .. }) && !decision.tiers.iter().any(has_say) {
                let tally = table.find(&applied.rule.name).unwrap_or(table.other());
                tally.decided(outcome, request.cost(&applied.rule.unit).units());
            }
        }
    }

    fn note_key(&self, request: &Request<'_>, tier: &TierDecision, tally: &RuleTally) {
        let Observer { top, begun, .. } = self.observer;
        let now = self.begun.duration_since(*begun);
        let noted = if tier.outcome.is_allowed() { Noted::Passed } else { Noted::Refused };
        match &request.subject {
            Subject::Labels { labels, .. } if tier.rule.is_some() => {
                top.note_rule(tally.top_rule(), labels, noted, now)
            }
            Subject::Labels { labels, .. } => top.note_labels(labels, noted, now),
            Subject::Key { key, .. } => top.note_key(key, noted, now),
        }
    }
}

impl Drop for Observation<'_> {
    fn drop(&mut self) {
        let took = self.observer.clock.now().duration_since(self.begun);
        self.observer.transports[self.transport as usize].left(took);
    }
}
