//! The entry point of every front end. It normalizes labels, starts the decision, and records its metrics.

use std::{convert::Infallible, fmt, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use sluicegate::{
    Cost, Costs, Decision, Error, Labels, Limit, Limiter,
    label_policy::{CleanError, LabelPolicy},
    limiter::{
        GroupDecision, HoldDecision, HoldToken, Operation, PendingDecision, Progress, Request, Reset,
        RuleSelection, Settlement, Subject,
    },
    store::{CounterSnapshot, HoldId, Key},
};
use tokio::time::MissedTickBehavior;
use tracing::{Instrument, Span};

use crate::{
    completion::run_to_completion,
    observe::{Call, Observation, Observer, history, trace},
};

/// Decides requests for all front ends. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    limiter: Limiter,
    observer: Arc<Observer>,
    labels: ArcSwap<LabelPolicy>,
}

/// The front ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// The JSON API.
    Http,
    /// Forward-auth for nginx, Caddy and Traefik.
    ForwardAuth,
    /// Envoy's rate limit service.
    Grpc,
    /// The Redis protocol.
    Resp,
}

impl Transport {
    /// All front ends.
    pub const ALL: [Self; 4] = [Self::Http, Self::ForwardAuth, Self::Grpc, Self::Resp];

    /// The name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::ForwardAuth => "forward_auth",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
        }
    }
}

/// An operation on a hold that was made before.
#[derive(Clone, Debug)]
pub enum HoldAdjustment {
    /// Replaces the estimate with the actual costs. A unit that is not named keeps its estimate.
    Settle {
        /// The actual costs.
        costs: Costs,
        /// The bound of the excess.
        excess: Excess,
    },
    /// Refunds the estimate.
    Release,
    /// Moves the expiry to this time from now, if that is later.
    Renew(Duration),
}

/// The bound of the excess: how much the actual cost of a hold may exceed its estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Excess {
    /// By at most [`Limit::max_excess`]: for callers without the scope `adjust`.
    Bounded,
    /// By any number of units.
    Unbounded,
}

impl HoldAdjustment {
    fn call(&self) -> Call {
        match self {
            Self::Settle { .. } => Call::Settle,
            Self::Release => Call::Release,
            Self::Renew(_) => Call::Renew,
        }
    }

    async fn apply(&self, limiter: &Limiter, token: &HoldToken) -> Result<Settlement, Error> {
        match self {
            Self::Settle { costs, excess: Excess::Bounded } => {
                limiter.settle_bounded(token, costs.clone()).await
            }
            Self::Settle { costs, excess: Excess::Unbounded } => limiter.settle(token, costs.clone()).await,
            Self::Release => limiter.release(token).await,
            Self::Renew(ttl) => limiter.renew(token, *ttl).await,
        }
    }
}

impl Engine {
    /// Creates an engine over a limiter.
    pub fn new(limiter: Limiter) -> Self {
        let observer = Arc::new(Observer::new(limiter.rules()));
        Self { inner: Arc::new(Inner { limiter, observer, labels: ArcSwap::default() }) }
    }

    /// The limiter.
    pub fn limiter(&self) -> &Limiter {
        &self.inner.limiter
    }

    /// The observer of all decisions.
    pub fn observer(&self) -> &Arc<Observer> {
        &self.inner.observer
    }

    /// Returns the metrics as text of the type [`CONTENT_TYPE`](crate::observe::metrics::CONTENT_TYPE).
    pub fn metrics(&self) -> String {
        let Inner { limiter, observer, .. } = &*self.inner;
        observer.exposition(limiter.stats(), limiter.rules())
    }

    /// Records the [history] of the last hour until the future is dropped.
    pub async fn record_history(&self) -> Infallible {
        let mut interval = tokio::time::interval(history::INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.inner.observer.record_second(&self.inner.limiter.stats());
        }
    }

    /// Normalizes the labels of a request by the label policy.
    ///
    /// # Errors
    /// When a label is invalid.
    pub fn labels<N, V>(&self, pairs: impl IntoIterator<Item = (N, V)>) -> Result<Labels, CleanError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        self.inner.labels.load().clean(pairs)
    }

    /// The same, where a long value is [shortened](LabelPolicy::clean_shortened) instead of rejected.
    ///
    /// # Errors
    /// When a label is invalid.
    pub fn labels_shortened<N, V>(
        &self,
        pairs: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Labels, CleanError>
    where
        N: AsRef<str>,
        V: AsRef<[u8]>,
    {
        self.inner.labels.load().clean_shortened(pairs)
    }

    /// The active label policy.
    pub fn label_policy(&self) -> Arc<LabelPolicy> {
        self.inner.labels.load_full()
    }

    /// Replaces the label policy.
    pub fn set_label_policy(&self, policy: LabelPolicy) {
        self.inner.labels.store(Arc::new(policy));
    }

    /// Starts a check, peek, charge or refund. On the memory store it is decided when this returns.
    ///
    /// # Errors
    /// As [`Limiter::start`].
    pub fn start(&self, transport: Transport, request: &Request<'_>) -> Result<Progress, Error> {
        let Inner { limiter, observer, .. } = &*self.inner;
        let started = observer.now();
        let span = trace::decision_span(transport, Call::Decide(request.operation));
        let progress = span.in_scope(|| limiter.start(request));
        match progress {
            Ok(Progress::Pending(pending)) => {
                let (engine, request) = (self.clone(), request.clone().into_owned());
                Ok(Progress::Pending(PendingDecision::new(async move {
                    let observation = engine.inner.observer.begin_at(transport, started);
                    let decided = pending.instrument(span.clone()).await;
                    engine.observe(&observation, &span, &request, decided.as_ref());
                    decided
                })))
            }
            Ok(Progress::Decided(ref decision)) => {
                self.observe(&observer.begin_at(transport, started), &span, request, Ok(decision));
                progress
            }
            Err(ref error) => {
                self.observe(&observer.begin_at(transport, started), &span, request, Err(error));
                progress
            }
        }
    }

    fn observe(
        &self,
        observation: &Observation<'_>,
        span: &Span,
        request: &Request<'_>,
        decided: Result<&Decision, &Error>,
    ) {
        match decided {
            Ok(decision) => {
                trace::record(span, decision);
                observation.decided(request, decision, || self.inner.limiter.rules());
            }
            Err(error) => observation.failed(Call::Decide(request.operation), error),
        }
    }

    /// Starts a request and waits for its decision.
    ///
    /// # Errors
    /// As [`Engine::start`], and when a charge or a refund did not reach the store.
    pub async fn decide(&self, transport: Transport, request: &Request<'_>) -> Result<Decision, Error> {
        self.start(transport, request)?.decision().await
    }

    /// Decides several requests, all or none, within one deadline.
    ///
    /// # Errors
    /// As [`Limiter::check_group`].
    pub async fn decide_group(
        &self,
        transport: Transport,
        requests: &[Request<'_>],
        deadline: Option<Duration>,
    ) -> Result<GroupDecision, Error> {
        let observation = self.inner.observer.begin(transport);
        let span = trace::decision_span(transport, Call::CHECK);
        let decided = self.with_deadline(deadline).check_group(requests).instrument(span.clone()).await;
        match &decided {
            Ok(group) => {
                trace::record(&span, &group.overall);
                observation.decided_group(Call::CHECK, requests, group, || self.inner.limiter.rules());
            }
            Err(error) => observation.failed(Call::Decide(Operation::Check), error),
        }
        decided
    }

    /// Makes a hold. Without an id, it gets a random one, and is released if the caller is dropped while the store decides. Without a
    /// `ttl`, the shortest of the rules that match applies.
    ///
    /// # Errors
    /// As [`Limiter::hold`].
    pub async fn hold(
        &self,
        transport: Transport,
        request: &Request<'_>,
        id: Option<HoldId>,
        ttl: Option<Duration>,
    ) -> Result<HoldDecision, Error> {
        let Inner { limiter, observer, .. } = &*self.inner;
        let observation = observer.begin(transport);
        let span = trace::decision_span(transport, Call::Hold);
        let mut hold = limiter.hold_request(request.clone());
        if let Some(id) = id {
            hold = hold.id(id);
        }
        if let Some(ttl) = ttl {
            hold = hold.ttl(ttl);
        }
        let held = hold.decide().instrument(span.clone()).await;
        match &held {
            Ok(held) => {
                trace::record(&span, &held.decision);
                observation.held(request, held, || limiter.rules());
            }
            Err(error) => observation.failed(Call::Hold, error),
        }
        held
    }

    /// Settles, releases or renews a hold. Completes even if its caller is dropped: otherwise the estimate would stay charged if the client
    /// disconnects.
    ///
    /// # Errors
    /// As [`Limiter::settle`].
    pub async fn adjust_hold(
        &self,
        transport: Transport,
        token: HoldToken,
        adjustment: HoldAdjustment,
        deadline: Option<Duration>,
    ) -> Result<Settlement, Error> {
        let engine = self.clone();
        run_to_completion(async move {
            let observation = engine.inner.observer.begin(transport);
            let (call, limiter) = (adjustment.call(), engine.with_deadline(deadline));
            let span = trace::decision_span(transport, call);
            let adjusted = adjustment.apply(&limiter, &token).instrument(span.clone()).await;
            match &adjusted {
                Ok(settlement) => {
                    trace::record_settlement(&span, settlement);
                    observation.done(call);
                }
                Err(error) => observation.failed(call, error),
            }
            adjusted
        })
        .await
    }

    /// Deletes the counters of a request.
    ///
    /// # Errors
    /// As [`Limiter::reset`].
    pub async fn reset(&self, transport: Transport, request: &Request<'_>) -> Result<Reset, Error> {
        let observation = self.inner.observer.begin(transport);
        let limiter = self.with_deadline(request.deadline);
        let reset = match &request.subject {
            Subject::Labels { labels, rules, .. } => limiter.reset(labels, rules).await,
            Subject::Key { key, limit, .. } => limiter.reset_key(key, limit).await,
        };
        match &reset {
            Ok(_) => observation.done(Call::Reset),
            Err(error) => observation.failed(Call::Reset, error),
        }
        reset
    }

    /// Returns the state of these counters for display.
    ///
    /// # Errors
    /// As [`Limiter::inspect`], also when the caller's deadline has passed.
    pub async fn inspect(
        &self,
        counters: &[(Key, Limit)],
        deadline: Option<Duration>,
    ) -> Result<Vec<Option<CounterSnapshot>>, Error> {
        self.with_deadline(deadline).inspect(counters).await
    }

    fn with_deadline(&self, deadline: Option<Duration>) -> Limiter {
        match deadline {
            Some(deadline) => self.inner.limiter.with_deadline(deadline),
            None => self.inner.limiter.clone(),
        }
    }
}

/// The longest value in a [`Summary`], in characters. Longer values are truncated.
const MAX_SHOWN: usize = 64;

/// The most rule names in a [`Summary`]; the others are counted.
const MAX_RULES_SHOWN: usize = 16;

/// A request in one line, for audit logs: `route=login ip=203.0.113.9, 5 requests, for login-per-ip`, or `key user:42`. Ambiguous
/// values are quoted.
pub struct Summary<'a>(pub &'a Request<'a>);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.subject {
            Subject::Labels { labels, costs, rules, .. } => {
                for (index, (name, value)) in labels.iter().enumerate() {
                    let space = if index > 0 { " " } else { "" };
                    write!(f, "{space}{name}={}", shown(value))?;
                }
                for (unit, cost) in costs.iter().filter(|_| *costs != Costs::from(Cost::ONE)) {
                    write!(f, ", {} {unit}", cost.units())?;
                }
                let RuleSelection::Named(names) = rules else { return Ok(()) };
                for (index, rule) in names.iter().take(MAX_RULES_SHOWN).enumerate() {
                    write!(f, "{}{}", if index == 0 { ", for " } else { " and " }, shown(rule.as_bytes()))?;
                }
                match names.len().saturating_sub(MAX_RULES_SHOWN) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
            Subject::Key { key, cost: Cost::ONE, .. } => write!(f, "key {}", shown(key)),
            Subject::Key { key, cost, .. } => write!(f, "key {}, {}", shown(key), cost.units()),
        }
    }
}

fn shown(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value);
    let is_plain = |c: char| c.is_alphanumeric() || "-._:/@*+".contains(c);
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None if !text.is_empty() && text.chars().all(is_plain) => text.into_owned(),
        None => format!("{text:?}"),
    }
}
