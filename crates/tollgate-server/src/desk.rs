//! Where every front end asks: labels are read the same way, the limiter decides within the caller's own time, and
//! what comes of it is observed once.

use std::{convert::Infallible, fmt, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tokio::time::MissedTickBehavior;
use tollgate::{
    Cost, Costs, CounterSnapshot, Decision, Error, Hits, Key, Labels, Limit, Limiter, Operation, Request,
    Share, Store, Tier, Together,
};
use tracing::Instrument;

use crate::{
    labels::{CleanError, LabelPolicy},
    observe::{About, Call, Observer, history, trace},
};

/// The one way from a front end to a decision. Cheap to clone.
pub struct Desk<S> {
    inner: Arc<Inner<S>>,
}

struct Inner<S> {
    limiter: Limiter<S>,
    observer: Arc<Observer>,
    labels: ArcSwap<LabelPolicy>,
}

/// Who asks, and how long they wait for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Which front end they came to.
    pub transport: Transport,
    /// How long they wait, if they said so; a decision never takes longer than the store's deadline.
    pub budget: Option<Duration>,
}

/// The front ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// The JSON API.
    Http,
    /// A proxy's question before it passes a request on.
    ForwardAuth,
    /// Envoy's rate limit service.
    Grpc,
    /// The Redis protocol.
    Resp,
}

/// What is asked about.
#[derive(Clone, Debug)]
pub enum Subject {
    /// The rules that match these labels; an adjustment may be for some of them only.
    Rules {
        /// What the request says about itself.
        labels: Labels,
        /// What it costs.
        costs: Costs,
        /// The rules that are meant, where not all that match are.
        only: Option<Vec<String>>,
    },
    /// One key, by a limit of its own.
    Key {
        /// The key.
        key: Vec<u8>,
        /// Its limit.
        limit: Limit,
        /// What is asked for.
        cost: Cost,
    },
}

/// The longest value that is shown, in characters; a longer one is cut, by itself, so that it hides no other.
const MAX_SHOWN: usize = 64;

/// How many rules are shown that a request names; the others are counted.
const MAX_RULES_SHOWN: usize = 16;

impl fmt::Display for Subject {
    /// `route=login ip=203.0.113.9, 5 requests, for login-per-ip`, or `key user:42`. What could be mistaken for more than one value
    /// is in quotes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rules { labels, costs, only } => {
                for (place, (name, value)) in labels.iter().enumerate() {
                    let space = if place > 0 { " " } else { "" };
                    write!(f, "{space}{name}={}", shown(value))?;
                }
                for (unit, cost) in costs.iter().filter(|_| *costs != Costs::from(Cost::ONE)) {
                    write!(f, ", {} {unit}", cost.units())?;
                }
                let only = only.as_deref().unwrap_or_default();
                for (place, rule) in only.iter().take(MAX_RULES_SHOWN).enumerate() {
                    write!(f, "{}{}", if place == 0 { ", for " } else { " and " }, shown(rule.as_bytes()))?;
                }
                match only.len().saturating_sub(MAX_RULES_SHOWN) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
            Self::Key { key, cost: Cost::ONE, .. } => write!(f, "key {}", shown(key)),
            Self::Key { key, cost, .. } => write!(f, "key {}, {}", shown(key), cost.units()),
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

impl Transport {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Http, Self::ForwardAuth, Self::Grpc, Self::Resp];

    /// Its name in metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::ForwardAuth => "forward_auth",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
        }
    }
}

impl Caller {
    /// A caller who waits for as long as a decision may take.
    pub const fn at(transport: Transport) -> Self {
        Self { transport, budget: None }
    }
}

impl<S> Clone for Desk<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: Store> Desk<S> {
    /// A desk in front of a limiter.
    pub fn new(limiter: Limiter<S>) -> Self {
        let observer = Arc::new(Observer::new(limiter.rules()));
        Self { inner: Arc::new(Inner { limiter, observer, labels: ArcSwap::default() }) }
    }

    /// What decides.
    pub fn limiter(&self) -> &Limiter<S> {
        &self.inner.limiter
    }

    /// What watches.
    pub fn observer(&self) -> &Arc<Observer> {
        &self.inner.observer
    }

    /// The text that Prometheus reads; it is [`CONTENT_TYPE`](crate::observe::metrics::CONTENT_TYPE).
    pub fn metrics(&self) -> String {
        let Inner { limiter, observer, .. } = &*self.inner;
        observer.exposition(limiter.stats(), limiter.rules())
    }

    /// Keeps the [history] of the last hour, for as long as this is awaited.
    pub async fn keep_history(&self) -> Infallible {
        let mut interval = tokio::time::interval(history::INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.inner.observer.keep_second(&self.inner.limiter.stats());
        }
    }

    /// What a request says about itself, as rules see it.
    ///
    /// # Errors
    /// When a label cannot be used.
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
    /// When a label cannot be used.
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

    /// How labels are read and cleaned now.
    pub fn label_policy(&self) -> Arc<LabelPolicy> {
        self.inner.labels.load_full()
    }

    /// Reads and cleans labels so from now on.
    pub fn clean_labels_by(&self, policy: LabelPolicy) {
        self.inner.labels.store(Arc::new(policy));
    }

    /// Checks, peeks, charges or refunds.
    ///
    /// # Errors
    /// As the limiter's methods of those names.
    pub async fn decide(
        &self,
        caller: Caller,
        operation: Operation,
        subject: &Subject,
    ) -> Result<Decision, Error> {
        let pending = self.inner.observer.begin(caller.transport);
        let span = trace::decision_span(caller.transport, operation);
        let decided = if span.is_disabled() {
            self.ask(caller, operation, subject).await
        } else {
            // boxed, so that who is not traced does not make room for it
            Box::pin(self.ask(caller, operation, subject).instrument(span.clone())).await
        };
        match &decided {
            Ok(decision) => {
                trace::record(&span, decision);
                pending.decided(operation, About::from(subject), decision, || self.inner.limiter.rules());
            }
            Err(error) => pending.failed(Call::Decide(operation), error),
        }
        decided
    }

    /// Checks without a future, where there is nothing to wait for; else nothing was asked.
    pub fn check_here(&self, transport: Transport, subject: &Subject) -> Option<Result<Decision, Error>> {
        match subject {
            Subject::Rules { labels, costs, .. } => {
                let about = About::Rules { labels, costs };
                self.ask_here(transport, about, |limiter| limiter.check_here(labels, costs.clone()))
            }
            Subject::Key { key, limit, cost } => {
                let about = About::Key { key, cost: *cost };
                self.ask_here(transport, about, |limiter| limiter.check_key_here(key, limit, *cost))
            }
        }
    }

    /// [Decides together](Self::decide_together) without a future, where there is one request that takes something, and nothing to
    /// wait for; else nothing was asked.
    pub fn check_alone_here(
        &self,
        transport: Transport,
        requests: &[Request],
    ) -> Option<Result<Decision, Error>> {
        let [Request { labels, costs, hits: Hits::Taken, numbers: None }] = requests else { return None };
        let about = About::Rules { labels, costs };
        self.ask_here(transport, about, |limiter| limiter.check_here(labels, costs.clone()))
    }

    #[inline]
    fn ask_here(
        &self,
        transport: Transport,
        about: About<'_>,
        ask: impl FnOnce(&Limiter<S>) -> Option<Result<Decision, Error>>,
    ) -> Option<Result<Decision, Error>> {
        let Inner { limiter, observer, .. } = &*self.inner;
        if limiter.store().is_remote() {
            return None;
        }
        let begun = observer.now();
        let span = trace::decision_span(transport, Operation::Check);
        let entered = (!span.is_disabled()).then(|| span.enter());
        let decided = ask(limiter)?;
        drop(entered);
        let pending = observer.begin_at(transport, begun);
        match &decided {
            Ok(decision) => {
                trace::record(&span, decision);
                pending.decided(Operation::Check, about, decision, || limiter.rules());
            }
            Err(error) => pending.failed(Call::Decide(Operation::Check), error),
        }
        Some(decided)
    }

    /// Whether [`Desk::check_keys_here`] can be asked: there is nothing to wait for, and nobody follows traces.
    #[inline]
    pub fn has_keys_here(&self) -> bool {
        !trace::is_followed() && self.inner.limiter.check_each_here(&[], |_, _| {})
    }

    /// Checks keys one after the other, by limits of their own, and tells what each limit says, by its place. `key` is how each
    /// was sent.
    pub fn check_keys_here<'a>(
        &self,
        transport: Transport,
        key: impl Fn(usize) -> &'a [u8],
        tiers: &[Tier],
        mut tell: impl FnMut(usize, &Share),
    ) {
        let Inner { limiter, observer, .. } = &*self.inner;
        let mut checks = observer.begin_keys(transport);
        limiter.check_each_here(tiers, |place, share| {
            checks.decided(key(place), tiers[place].terms.cost, share.passes);
            tell(place, &share);
        });
        checks.end();
    }

    async fn ask(&self, caller: Caller, operation: Operation, subject: &Subject) -> Result<Decision, Error> {
        let own;
        let limiter = match caller.budget {
            Some(budget) => {
                own = self.inner.limiter.within(budget);
                &own
            }
            None => &self.inner.limiter,
        };
        match subject {
            Subject::Rules { labels, costs, only } => {
                let (costs, only) = (costs.clone(), names(only));
                match operation {
                    Operation::Check => limiter.check(labels, costs).await,
                    Operation::Peek => limiter.peek(labels, costs).await,
                    Operation::Charge => limiter.charge(labels, costs, only.as_deref()).await,
                    Operation::Refund { at } => limiter.refund(labels, costs, at, only.as_deref()).await,
                }
            }
            Subject::Key { key, limit, cost } => match operation {
                Operation::Check => limiter.check_key(key, limit, *cost).await,
                Operation::Peek => limiter.peek_key(key, limit, *cost).await,
                Operation::Charge => limiter.charge_key(key, limit, *cost).await,
                Operation::Refund { at } => limiter.refund_key(key, limit, *cost, at).await,
            },
        }
    }

    /// Decides several requests together, all or none.
    ///
    /// # Errors
    /// As [`Limiter::check_together`].
    pub async fn decide_together(&self, caller: Caller, requests: &[Request]) -> Result<Together, Error> {
        let pending = self.inner.observer.begin(caller.transport);
        let span = trace::decision_span(caller.transport, Operation::Check);
        let limiter = self.within(caller);
        let together = if span.is_disabled() {
            limiter.check_together(requests).await
        } else {
            Box::pin(limiter.check_together(requests).instrument(span.clone())).await
        };
        match &together {
            Ok(decided) => {
                trace::record(&span, &decided.overall);
                pending.decided_together(requests, decided, || self.inner.limiter.rules());
            }
            Err(error) => pending.failed(Call::Decide(Operation::Check), error),
        }
        together
    }

    /// Forgets counters. How many there were.
    ///
    /// # Errors
    /// As [`Limiter::reset`].
    pub async fn reset(&self, caller: Caller, subject: &Subject) -> Result<u64, Error> {
        let pending = self.inner.observer.begin(caller.transport);
        let limiter = self.within(caller);
        let reset = match subject {
            Subject::Rules { labels, only, .. } => limiter.reset(labels, names(only).as_deref()).await,
            Subject::Key { key, limit, .. } => limiter.reset_key(key, limit).await.map(u64::from),
        };
        match &reset {
            Ok(_) => pending.done(Call::Reset),
            Err(error) => pending.failed(Call::Reset, error),
        }
        reset
    }

    /// What these counters hold, for people to look at.
    ///
    /// # Errors
    /// As [`Limiter::look`], also when the caller waits no longer.
    pub async fn inspect(
        &self,
        caller: Caller,
        counters: &[(Key, Limit)],
    ) -> Result<Vec<Option<CounterSnapshot>>, Error> {
        self.within(caller).inspect(counters).await
    }

    fn within(&self, caller: Caller) -> Limiter<S> {
        match caller.budget {
            Some(budget) => self.inner.limiter.within(budget),
            None => self.inner.limiter.clone(),
        }
    }
}

fn names(only: &Option<Vec<String>>) -> Option<Vec<&str>> {
    only.as_ref().map(|names| names.iter().map(String::as_str).collect())
}
