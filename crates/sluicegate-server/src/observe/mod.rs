//! Observability: metrics, heavy hitters, history, logs and traces. Every decision is observed once, in the [engine](crate::engine).
//!
//! | module | contents |
//! |---|---|
//! | `mod` | the [`Observer`], which records decisions |
//! | `outcome` | the `outcome` label of a decision |
//! | `counters`, `per_thread` | counters with one cell per thread |
//! | [`metrics`] | names, labels and help texts of all metrics, in OpenMetrics format |
//! | [`heavy_hitters`] | the keys with the most checks and the most denials |
//! | [`history`] | decisions per second of the last hour |
//! | [`decision_rates`] | decisions per second of each rule over the last ten seconds |
//! | [`overflow`] | whether the memory store is full |
//! | [`key_scans`] | the results of the scans for keys without a TTL |
//! | [`logs`] | log format, filter and audit lines |
//! | [`log_queue`] | the bounded queue of lines, and the thread that writes them |
//! | [`trace`] | a span for each request, as part of the caller's trace |
//! | `otlp` | export of spans to an OpenTelemetry collector |
//!
//! Memory use is bounded independently of request content: keys are never metric labels. Nothing in this module influences
//! decisions.

mod counters;
pub mod decision_rates;
pub mod heavy_hitters;
pub mod history;
pub mod key_scans;
pub mod log_queue;
pub mod logs;
pub mod metrics;
#[cfg(feature = "otlp")]
pub mod otlp;
mod outcome;
pub mod overflow;
mod per_thread;
pub mod trace;

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use quanta::{Clock, Instant};
use sluicegate::{
    Decision, Error, Source, TierDecision,
    decision::Mode,
    limiter::{GroupDecision, HoldDecision, Operation, Request, Subject},
    rules::{Effect, RuleSet},
};

use self::{
    counters::{Adjustment, CounterTable, RequestCounters, RuleCounters, SourceCounters, TransportCounters},
    decision_rates::DecisionRates,
    heavy_hitters::{HeavyHitters, KeyOutcome},
    key_scans::KeyScans,
    outcome::{RequestOutcome, RuleOutcome},
    overflow::OverflowMonitor,
};
use crate::engine::Transport;

/// Records the outcomes of requests.
pub struct Observer {
    clock: Clock,
    started: Instant,
    /// The counters of each rule. Replaced when the rules change, so that a decision finds its counters without a lock.
    table: ArcSwap<CounterTable>,
    /// The counters of checks without rules, which every table shares.
    keyed: RuleCounters,
    /// Held while the table is replaced.
    swapping: Mutex<()>,
    transports: [TransportCounters; Transport::ALL.len()],
    requests: RequestCounters,
    sources: SourceCounters,
    reloads: metrics::Reloads,
    top: HeavyHitters,
    history: history::History,
    rates: DecisionRates,
    overflow: OverflowMonitor,
    key_scans: KeyScans,
}

/// The observation of one request in flight. It ends when this is dropped, including if the caller is dropped.
pub struct Observation<'a> {
    observer: &'a Observer,
    transport: Transport,
    started: Instant,
}

/// A call to the engine. Resets and the calls for holds are not operations on counters but are counted like them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// An operation of the limiter.
    Decide(Operation),
    /// A reset.
    Reset,
    /// A hold, which decides like a check.
    Hold,
    /// Replaces the estimate of a hold with its actual cost.
    Settle,
    /// Refunds the estimate of a hold.
    Release,
    /// Moves the expiry of a hold.
    Renew,
}

impl Call {
    /// A check.
    pub const CHECK: Self = Self::Decide(Operation::Check);

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decide(Operation::Check) => "check",
            Self::Decide(Operation::Peek) => "peek",
            Self::Decide(Operation::Charge) => "charge",
            Self::Decide(Operation::Refund { .. }) => "refund",
            Self::Reset => "reset",
            Self::Hold => "hold",
            Self::Settle => "settle",
            Self::Release => "release",
            Self::Renew => "renew",
        }
    }
}

/// A decision, and whether its group is allowed: in a denied group, individual decisions can be allowed.
#[derive(Clone, Copy)]
struct ObservedDecision<'a> {
    decision: &'a Decision,
    is_allowed: bool,
}

impl Observer {
    /// Creates an observer for these rules.
    pub fn new(rules: Arc<RuleSet>) -> Self {
        Self::with_clock(rules, Clock::new())
    }

    fn with_clock(rules: Arc<RuleSet>, clock: Clock) -> Self {
        let table = CounterTable::new(rules);
        Self {
            started: clock.now(),
            clock,
            keyed: table.keyed().clone(),
            table: ArcSwap::from_pointee(table),
            swapping: Mutex::new(()),
            transports: Default::default(),
            requests: RequestCounters::default(),
            sources: SourceCounters::default(),
            reloads: metrics::Reloads::default(),
            top: HeavyHitters::default(),
            history: history::History::default(),
            rates: DecisionRates::default(),
            overflow: OverflowMonitor::default(),
            key_scans: KeyScans::default(),
        }
    }

    /// Records the start of a request.
    pub fn begin(&self, transport: Transport) -> Observation<'_> {
        self.begin_at(transport, self.now())
    }

    /// Records the start of a request at an earlier time.
    pub(crate) fn begin_at(&self, transport: Transport, started: Instant) -> Observation<'_> {
        self.transports[transport as usize].entered();
        Observation { observer: self, transport, started }
    }

    /// Counts an invalid request.
    pub fn invalid(&self, call: Call) {
        self.requests.count(call, RequestOutcome::Invalid);
    }

    /// Counts a request without sufficient authorization.
    pub fn unauthorized(&self, call: Call) {
        self.requests.count(call, RequestOutcome::Unauthorized);
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    /// The results of configuration reloads.
    pub fn reloads(&self) -> &metrics::Reloads {
        &self.reloads
    }

    /// The results of the scans for keys without a TTL.
    pub fn key_scans(&self) -> &KeyScans {
        &self.key_scans
    }

    /// Returns the keys with the most checks and the most denials.
    pub fn top(&self, count: usize) -> heavy_hitters::HeavyHitterSnapshot {
        self.top.snapshot(count, self.uptime())
    }

    /// The time since the observer was created.
    pub fn uptime(&self) -> Duration {
        self.clock.now().duration_since(self.started)
    }

    /// Replaces the table if the active rules differ.
    fn follow(&self, rules: Arc<RuleSet>) -> Arc<CounterTable> {
        let _guard = self.swapping.lock();
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
    /// Records a decision. `active_rules` returns the active rules, which are needed if the decision contains rules
    /// that are not in the current table.
    pub fn decided(
        &self,
        request: &Request<'_>,
        decision: &Decision,
        active_rules: impl Fn() -> Arc<RuleSet>,
    ) {
        self.observer.requests.count(Call::Decide(request.operation), outcome::of_request(decision));
        if request.operation == Operation::Check {
            self.observer.sources.count(decision.source);
        }
        let observed = ObservedDecision { decision, is_allowed: decision.is_allowed() };
        self.record(request, observed, &active_rules);
    }

    /// Records the decision of a hold. A repeated hold counts only as a request, because nothing was decided or charged again.
    pub fn held(&self, request: &Request<'_>, held: &HoldDecision, active_rules: impl Fn() -> Arc<RuleSet>) {
        let decision = &held.decision;
        self.observer.requests.count(Call::Hold, outcome::of_request(decision));
        if held.is_repeated {
            return;
        }
        self.observer.sources.count(decision.source);
        let observed = ObservedDecision { decision, is_allowed: decision.is_allowed() };
        self.record(request, observed, &active_rules);
    }

    /// Records the decision of several requests that are allowed together or not at all, by a check or a hold.
    pub fn decided_group(
        &self,
        call: Call,
        requests: &[Request<'_>],
        group: &GroupDecision,
        active_rules: impl Fn() -> Arc<RuleSet>,
    ) {
        let GroupDecision { overall, each, .. } = group;
        self.observer.requests.count(call, outcome::of_request(overall));
        self.observer.sources.count(overall.source);
        let is_allowed = overall.is_allowed();
        for (request, decision) in requests.iter().zip(each) {
            // a refund of a denied group is not made
            if is_allowed || !matches!(request.operation, Operation::Refund { .. }) {
                self.record(request, ObservedDecision { decision, is_allowed }, &active_rules);
            }
        }
    }

    /// Counts the decision for each rule that matched.
    fn record(
        &self,
        request: &Request<'_>,
        observed: ObservedDecision<'_>,
        active_rules: &impl Fn() -> Arc<RuleSet>,
    ) {
        let operation = request.operation;
        if operation == Operation::Peek {
            return;
        }
        for tier in &observed.decision.tiers {
            let Some(rule) = tier.rule.as_deref() else {
                self.record_tier(request, observed, tier, &self.observer.keyed);
                continue;
            };
            match self.observer.table.load().find(rule) {
                Some(counters) => self.record_tier(request, observed, tier, counters),
                None => {
                    let table = self.observer.follow(active_rules());
                    let counters = table.find(rule).unwrap_or(table.other());
                    self.record_tier(request, observed, tier, counters);
                }
            }
        }
        if observed.decision.is_degraded() && operation == Operation::Check {
            self.record_without_store(request, observed, &active_rules());
        }
    }

    fn record_tier(
        &self,
        request: &Request<'_>,
        observed: ObservedDecision<'_>,
        tier: &TierDecision,
        counters: &RuleCounters,
    ) {
        let cost = request.cost(&tier.unit).units();
        match request.operation {
            Operation::Check => {
                counters.decided(outcome::of_tier(observed, tier), cost);
                if tier.mode == Mode::Enforced {
                    self.record_key(request, tier, counters);
                }
            }
            Operation::Charge => counters.adjusted(Adjustment::Charged, cost),
            Operation::Refund { .. } => counters.adjusted(Adjustment::Refunded, cost),
            Operation::Peek => {}
        }
    }

    /// Counts a request that failed.
    pub fn failed(&self, call: Call, error: &Error) {
        self.observer.requests.count(call, outcome::of_error(error));
    }

    /// Counts a completed request without a decision.
    pub fn done(&self, call: Call) {
        self.observer.requests.count(call, RequestOutcome::Allowed);
    }

    /// Counts the matching rules that a degraded decision does not list.
    fn record_without_store(
        &self,
        request: &Request<'_>,
        observed: ObservedDecision<'_>,
        rules: &Arc<RuleSet>,
    ) {
        let ObservedDecision { decision, is_allowed } = observed;
        let outcome = if is_allowed { RuleOutcome::FailedOpen } else { RuleOutcome::Overruled };
        let Subject::Labels { labels, costs, .. } = &request.subject else {
            if decision.source == Source::Open {
                self.observer.keyed.decided(outcome, request.cost("").units());
            }
            return;
        };
        let table = self.observer.follow(Arc::clone(rules));
        for applied in rules.matching(labels, costs).unwrap_or_default() {
            let is_same_rule = |tier: &TierDecision| tier.rule.as_deref() == Some(&*applied.rule.name);
            if matches!(applied.effect, Effect::Limit { .. }) && !decision.tiers.iter().any(is_same_rule) {
                let counters = table.find(&applied.rule.name).unwrap_or(table.other());
                counters.decided(outcome, request.cost(&applied.rule.unit).units());
            }
        }
    }

    fn record_key(&self, request: &Request<'_>, tier: &TierDecision, counters: &RuleCounters) {
        let Observer { top, started, .. } = self.observer;
        let now = self.started.duration_since(*started);
        let outcome = if tier.outcome.is_allowed() { KeyOutcome::Allowed } else { KeyOutcome::Denied };
        match &request.subject {
            Subject::Labels { labels, .. } if tier.rule.is_some() => {
                top.record_rule(counters.top_rule(), labels, outcome, now)
            }
            Subject::Labels { labels, .. } => top.record_labels(labels, outcome, now),
            Subject::Key { key, .. } => top.record_key(key, outcome, now),
        }
    }
}

impl Drop for Observation<'_> {
    fn drop(&mut self) {
        let took = self.observer.clock.now().duration_since(self.started);
        self.observer.transports[self.transport as usize].left(took);
    }
}
