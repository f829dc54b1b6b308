//! What people use: rules and a store behind one question, *may this request pass, and if not, when?*
//!
//! Several requests that pass together or not at all are in `together`.

mod together;

use std::{fmt, mem, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use smallvec::SmallVec;
use tollgate_core::{
    Cost, Limit, LimitError, Operation, Outcome, Retry, Terms, Timestamp,
    step::{Admission, Mode, Share},
};

use crate::{
    check::{Check, CheckError, Tier, Tiers},
    decision::{Decision, Source, TierDecision},
    gate::{Gate, Options, Told},
    key::{Key, KeyError},
    labels::Labels,
    rules::{Applied, Costs, Effect, MatchError, OnStoreFailure, Rule, RuleSet, RulesError, Unit},
    stats::Stats,
    store::{Look, Store, StoreError},
};

pub use self::together::{Hits, Numbers, Request, Together};

/// When a caller refused because the store is away is asked to come back.
const CLOSED_RETRY: Duration = Duration::from_secs(1);

/// How many names of rules an error lists.
const NAMES_IN_ERROR: usize = 10;

/// Decides requests by rules, or by a limit given with the request. Cheap to clone.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
///
/// let per_ip = Limit::sliding_log(10, Duration::from_secs(60))?;
/// let rules = [Rule::new("login-per-ip", per_ip).when("route", "login").per(["ip"])];
/// let limiter = Limiter::new(MemoryStore::new(), rules)?;
///
/// let labels = Labels::new([("route", "login"), ("ip", "203.0.113.9")])?;
/// let decision = limiter.check(&labels, Cost::ONE).await?;
/// assert!(decision.is_allowed());
/// assert_eq!((decision.rule(), decision.remaining()), (Some("login-per-ip"), Some(9)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
pub struct Limiter<S> {
    inner: Arc<Inner<S>>,
    /// How long its callers wait, where that is shorter than the deadline.
    budget: Option<Duration>,
}

struct Inner<S> {
    gate: Gate<S>,
    rules: ArcSwap<RuleSet>,
}

/// Why a request cannot be decided: its own mistake, but for [`Error::Store`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The request's cost is too large for a rule.
    #[error(transparent)]
    Match(#[from] MatchError),
    /// More rules match than one check may have tiers.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The limit that the request brings cannot be used.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A rule was named that is not in force.
    #[error("there is no rule {name:?}: {}", in_force(known))]
    UnknownRule {
        /// The name that was given.
        name: String,
        /// Some of the names that could have been given.
        known: Vec<String>,
    },
    /// A charge, a refund or a reset did not reach the store. A check and a peek do not end here: the rules'
    /// failure policies answer.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What is to be said of a tier when its answer comes, once.
struct Asked {
    rule: Option<Arc<str>>,
    unit: Unit,
    on_store_failure: OnStoreFailure,
}

/// What a request asks of the store, and what is to be said of its answer.
struct Question {
    check: Check,
    /// For each tier of the check.
    asked: SmallVec<[Asked; 1]>,
    /// Rules that would refuse without counting, were they no shadows.
    refusing: Vec<TierDecision>,
}

/// How far a request comes without waiting.
enum Begun {
    Decided(Decision),
    Waits(Box<Question>),
}

/// What a rule that a request meets comes to.
enum Met {
    /// A counter to ask.
    Counter(Asked, Tier),
    /// A refusal, whatever is counted.
    Refusal(TierDecision),
}

/// When and where the tiers of a check were decided.
#[derive(Clone)]
struct Settled {
    at: Option<Timestamp>,
    source: Source,
    failure: Option<StoreError>,
}

impl<S: fmt::Debug> fmt::Debug for Limiter<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.inner.rules.load().len();
        f.debug_struct("Limiter").field("store", self.inner.gate.store()).field("rules", &rules).finish()
    }
}

impl<S> Clone for Limiter<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), budget: self.budget }
    }
}

impl<S: Store> Limiter<S> {
    /// A limiter over a store, with these rules.
    ///
    /// # Errors
    /// When a rule is impossible; see [`RuleSet::new`].
    pub fn new(store: S, rules: impl IntoIterator<Item = Rule>) -> Result<Self, RulesError> {
        Self::with_options(store, rules, Options::default())
    }

    /// A limiter with another deadline, or another memory of refusals.
    ///
    /// # Errors
    /// As [`Limiter::new`].
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Limiter, MemoryStore, Options};
    ///
    /// let options = Options { deadline: Duration::from_millis(50), ..Options::default() };
    /// let limiter = Limiter::with_options(MemoryStore::new(), [], options)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub fn with_options(
        store: S,
        rules: impl IntoIterator<Item = Rule>,
        options: Options,
    ) -> Result<Self, RulesError> {
        let rules = ArcSwap::from_pointee(RuleSet::new(rules.into_iter().collect())?);
        Ok(Self { inner: Arc::new(Inner { gate: Gate::new(store, options), rules }), budget: None })
    }

    /// The same limiter for a caller who waits no longer than this: a decision comes by then, or by the deadline,
    /// whichever is sooner.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Cost, Limit, Limiter, MemoryStore};
    ///
    /// let limiter = Limiter::new(MemoryStore::new(), [])?;
    /// let limit = Limit::token_bucket(100, Duration::from_secs(1))?;
    /// let hurried = limiter.within(Duration::from_millis(2));
    /// assert!(hurried.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub fn within(&self, budget: Duration) -> Self {
        let budget = self.budget.map_or(budget, |other| other.min(budget));
        Self { inner: Arc::clone(&self.inner), budget: Some(budget) }
    }

    /// Puts other rules in force, from the next decision on. What was used under a rule of the same name stays
    /// used, unless its algorithm, its `per` or its `tag` is another: then its counters start fresh. Impossible
    /// rules change nothing.
    ///
    /// # Errors
    /// As [`Limiter::new`].
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let minute = Duration::from_secs(60);
    /// let rule = |amount| Limit::sliding_log(amount, minute).map(|limit| Rule::new("per-user", limit).per(["user"]));
    /// let limiter = Limiter::new(MemoryStore::new(), [rule(10)?])?;
    /// let labels = Labels::new([("user", "42")])?;
    /// limiter.check(&labels, Cost::new(4)?).await?;
    ///
    /// limiter.reconfigure([rule(100)?])?;
    /// let decision = limiter.check(&labels, Cost::ONE).await?;
    /// assert_eq!(decision.remaining(), Some(95));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub fn reconfigure(&self, rules: impl IntoIterator<Item = Rule>) -> Result<(), RulesError> {
        let rules = Arc::new(RuleSet::new(rules.into_iter().collect())?);
        self.inner.rules.store(rules);
        Ok(())
    }

    /// The rules in force.
    pub fn rules(&self) -> Arc<RuleSet> {
        self.inner.rules.load_full()
    }

    /// The store.
    pub fn store(&self) -> &S {
        self.inner.gate.store()
    }

    /// What the store has put callers through, and how it is now.
    pub fn stats(&self) -> Stats {
        self.inner.gate.stats()
    }

    /// Decides a request by all rules that match it, all or none, and charges it if it may pass.
    ///
    /// # Errors
    /// When the request is invalid; nothing is charged.
    pub async fn check(&self, labels: &Labels, cost: impl Into<Costs>) -> Result<Decision, Error> {
        self.by_rules(Operation::Check, labels, &cost.into(), None).await
    }

    /// [`Limiter::check`] without a future, where there is nothing to wait for because the store is in this process;
    /// absent where it is not, and then nothing was asked.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let rule = Rule::new("per-user", Limit::fixed_window(1, Duration::from_secs(60))?).per(["user"]);
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("user", "42")])?;
    /// let decision = limiter.check_here(&labels, Cost::ONE).expect("memory is here")?;
    /// assert!(decision.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_here(&self, labels: &Labels, cost: impl Into<Costs>) -> Option<Result<Decision, Error>> {
        if self.store().is_remote() {
            return None;
        }
        decided_here(self.begin_by_rules(Operation::Check, labels, &cost.into(), None))
    }

    /// Would it pass? Changes nothing.
    ///
    /// # Errors
    /// When the request is invalid.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let rule = Rule::new("per-user", Limit::fixed_window(10, Duration::from_secs(60))?).per(["user"]);
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("user", "42")])?;
    /// for _ in 0..3 {
    ///     assert_eq!(limiter.peek(&labels, Cost::ONE).await?.remaining(), Some(10));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub async fn peek(&self, labels: &Labels, cost: impl Into<Costs>) -> Result<Decision, Error> {
        self.by_rules(Operation::Peek, labels, &cost.into(), None).await
    }

    /// Charges what is known only afterwards, into debt if need be: all rules that match, or only some.
    ///
    /// # Errors
    /// When the request is invalid or a rule is named that is not in force: then nothing is charged. When the store
    /// does not answer: [`StoreError`] says what is known.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Cost, Costs, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let hour = Duration::from_secs(3600);
    /// let rule = Rule::new("tokens", Limit::token_bucket(1_000, hour)?).per(["tenant"]).unit("tokens").overdraft();
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("tenant", "acme")])?;
    ///
    /// // what an answer of a language model took is known when it is there, and may be more than was left
    /// let took = Costs::new([("tokens", Cost::new(1_200)?)])?;
    /// let decision = limiter.charge(&labels, took, None).await?;
    /// assert_eq!(decision.remaining(), Some(0));
    /// let next = limiter.check(&labels, Costs::new([("tokens", Cost::ONE)])?).await?;
    /// assert!(!next.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub async fn charge(
        &self,
        labels: &Labels,
        cost: impl Into<Costs>,
        only: Option<&[&str]>,
    ) -> Result<Decision, Error> {
        self.by_rules(Operation::Charge, labels, &cost.into(), only).await
    }

    /// Takes back at most what counts now, from all rules that match or only from some: the newest charges,
    /// or exactly the one made `at` the time that a decision carried.
    ///
    /// # Errors
    /// When the request is invalid or a rule is named that is not in force: then nothing is taken back. When the
    /// store does not answer: [`StoreError`] says what is known.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let rule = Rule::new("uploads", Limit::sliding_log(10, Duration::from_secs(60))?).per(["user"]);
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("user", "42")])?;
    ///
    /// let upload = limiter.check(&labels, Cost::new(3)?).await?;
    /// assert_eq!(upload.remaining(), Some(7));
    /// // it failed: exactly that charge is taken back
    /// let after = limiter.refund(&labels, Cost::new(3)?, upload.at, None).await?;
    /// assert_eq!(after.remaining(), Some(10));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub async fn refund(
        &self,
        labels: &Labels,
        cost: impl Into<Costs>,
        at: Option<Timestamp>,
        only: Option<&[&str]>,
    ) -> Result<Decision, Error> {
        self.by_rules(Operation::Refund { at }, labels, &cost.into(), only).await
    }

    /// Forgets the counters of all rules that match, or only of some. How many there were.
    ///
    /// # Errors
    /// When a rule is named that is not in force, or the store does not answer.
    pub async fn reset(&self, labels: &Labels, only: Option<&[&str]>) -> Result<u64, Error> {
        let rules = self.rules();
        known(&rules, only)?;
        let counters: Vec<_> = rules
            .matching(labels, &Costs::from(Cost::ZERO))?
            .into_iter()
            .filter(|applied| is_meant(applied.rule, only))
            .filter_map(|applied| match applied.effect {
                Effect::Limit { key, limit, .. } => Some((key, limit.algorithm())),
                Effect::Refuse { .. } => None,
            })
            .collect();
        Ok(self.inner.gate.reset(&counters, self.budget).await?)
    }

    /// Decides by a limit given with the request, without rules.
    ///
    /// # Errors
    /// When the key is empty or too long; nothing is charged.
    pub async fn check_key(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
    ) -> Result<Decision, Error> {
        self.by_limit(Operation::Check, key.as_ref(), Terms::new(*limit, cost)).await
    }

    /// [`Limiter::check_key`] without a future, where there is nothing to wait for because the store is in this process;
    /// absent where it is not, and then nothing was asked.
    #[inline]
    pub fn check_key_here(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
    ) -> Option<Result<Decision, Error>> {
        if self.store().is_remote() {
            return None;
        }
        decided_here(self.begin_by_limit(Operation::Check, key.as_ref(), Terms::new(*limit, cost)))
    }

    /// Would it pass? Changes nothing.
    ///
    /// # Errors
    /// When the key is empty or too long.
    pub async fn peek_key(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
    ) -> Result<Decision, Error> {
        self.by_limit(Operation::Peek, key.as_ref(), Terms::new(*limit, cost)).await
    }

    /// Charges what is known only afterwards, into debt if need be.
    ///
    /// # Errors
    /// When the key is empty or too long; nothing is charged.
    pub async fn charge_key(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
    ) -> Result<Decision, Error> {
        self.by_limit(Operation::Charge, key.as_ref(), Terms::new(*limit, cost)).await
    }

    /// Takes back at most what counts now: the newest charges, or exactly the one made `at` that time.
    ///
    /// # Errors
    /// When the key is empty or too long; nothing is taken back.
    pub async fn refund_key(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
        at: Option<Timestamp>,
    ) -> Result<Decision, Error> {
        self.by_limit(Operation::Refund { at }, key.as_ref(), Terms::new(*limit, cost)).await
    }

    /// Forgets the counter of a key under the limit's algorithm. Whether there was one.
    ///
    /// # Errors
    /// When the key is empty or too long, or the store does not answer.
    pub async fn reset_key(&self, key: impl AsRef<[u8]>, limit: &Limit) -> Result<bool, Error> {
        let counter = (Key::without_rule(key)?, limit.algorithm());
        Ok(self.inner.gate.reset(&[counter], self.budget).await? > 0)
    }

    /// What these counters hold now, for people to look at; nothing for one whose state makes no sense. Changes nothing.
    ///
    /// # Errors
    /// When the store does not answer, or cannot say.
    pub async fn look(&self, counters: &[(Key, Limit)]) -> Result<Vec<Option<Look>>, Error> {
        Ok(self.inner.gate.look(counters, self.budget).await?)
    }

    async fn by_limit(&self, operation: Operation, key: &[u8], terms: Terms) -> Result<Decision, Error> {
        let begun = self.begin_by_limit(operation, key, terms)?;
        self.finish(begun).await
    }

    fn begin_by_limit(&self, operation: Operation, key: &[u8], terms: Terms) -> Result<Begun, Error> {
        let check = Check::of_one(operation, Tier { key: Key::without_rule(key)?, terms });
        let (unit, on_store_failure) = (Unit::default(), OnStoreFailure::default());
        let mut asked = [Asked { rule: None, unit, on_store_failure }];
        Ok(match self.decide_here(&check, &mut asked, Vec::new()) {
            Ok(decision) => Begun::Decided(decision),
            Err(refusing) => Begun::Waits(Box::new(Question { check, asked: asked.into(), refusing })),
        })
    }

    async fn by_rules(
        &self,
        operation: Operation,
        labels: &Labels,
        costs: &Costs,
        only: Option<&[&str]>,
    ) -> Result<Decision, Error> {
        let begun = self.begin_by_rules(operation, labels, costs, only)?;
        self.finish(begun).await
    }

    fn begin_by_rules(
        &self,
        operation: Operation,
        labels: &Labels,
        costs: &Costs,
        only: Option<&[&str]>,
    ) -> Result<Begun, Error> {
        let (mut asked, mut tiers) = (SmallVec::new(), Tiers::new());
        let mut refusing = Vec::new();
        let rules = self.inner.rules.load();
        known(&rules, only)?;
        for applied in rules.matching(labels, costs)? {
            if !is_meant(applied.rule, only) {
                continue;
            }
            match Met::from(applied) {
                Met::Counter(by, tier) => {
                    asked.push(by);
                    tiers.push(tier);
                }
                Met::Refusal(tier) => refusing.push(tier),
            }
        }
        drop(rules);
        if matches!(operation, Operation::Charge | Operation::Refund { .. }) {
            refusing.clear();
        }
        let is_refused = refusing.iter().any(|tier| tier.mode == Mode::Enforced);
        if is_refused || tiers.is_empty() {
            return Ok(Begun::Decided(Decision::of_tiers(refusing, None, Source::Local)));
        }
        let check = Check::of(operation, tiers)?;
        Ok(match self.decide_here(&check, &mut asked, refusing) {
            Ok(decision) => Begun::Decided(decision),
            Err(refusing) => Begun::Waits(Box::new(Question { check, asked, refusing })),
        })
    }

    /// Decides what needs no waiting: without a future, which would have to be made and moved for nothing. Else gives
    /// back what it was given.
    fn decide_here(
        &self,
        check: &Check,
        asked: &mut [Asked],
        mut refusing: Vec<TierDecision>,
    ) -> Result<Decision, Vec<TierDecision>> {
        let mut said = Vec::with_capacity(asked.len() + refusing.len());
        match self.settle_here(asked, check, |_, tier| said.push(tier)) {
            Some(settled) => {
                said.append(&mut refusing);
                Ok(settled.decision(said))
            }
            None => Err(refusing),
        }
    }

    async fn finish(&self, begun: Begun) -> Result<Decision, Error> {
        match begun {
            Begun::Decided(decision) => Ok(decision),
            // boxed, so that who is answered at once does not make room for those who wait
            Begun::Waits(question) => Box::pin(self.ask_store(*question)).await,
        }
    }

    async fn ask_store(&self, question: Question) -> Result<Decision, Error> {
        let Question { check, mut asked, refusing } = question;
        let mut said = Vec::with_capacity(asked.len() + refusing.len());
        let settled = self.settle_by_store(&mut asked, &check, |_, tier| said.push(tier)).await?;
        if settled.failure.is_none() {
            said.extend(refusing);
        }
        Ok(settled.decision(said))
    }

    /// Asks the store, or whoever stands in for it, and tells what each tier says, by its place in the check. Not
    /// all of them have something to say.
    async fn settle(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Result<Settled, Error> {
        match self.settle_here(asked, check, &mut tell) {
            Some(settled) => Ok(settled),
            None => Box::pin(self.settle_by_store(asked, check, tell)).await,
        }
    }

    /// The same, if it needs no waiting.
    #[inline]
    fn settle_here(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Option<Settled> {
        let Told { at } = self.inner.gate.decide_at_once(check, |place, share| {
            tell(place, asked[place].decision(&check.tiers()[place].terms, share));
        })?;
        Some(Settled::by_store(at))
    }

    async fn settle_by_store(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Result<Settled, Error> {
        if asked.iter().any(|asked| asked.on_store_failure == OnStoreFailure::Local) {
            self.inner.gate.prepare_fallback();
        }
        match self.inner.gate.ask_store(check, self.budget).await {
            Ok(verdict) => {
                for (place, share) in verdict.shares {
                    tell(place, asked[place].decision(&check.tiers()[place].terms, share));
                }
                Ok(Settled::by_store(verdict.at))
            }
            Err(failure) => match check.operation() {
                Operation::Check | Operation::Peek => {
                    let source = self.without_store(asked, check, tell);
                    Ok(Settled { at: None, source, failure: Some(failure) })
                }
                // a policy can answer a question, but not stand in for a charge
                Operation::Charge | Operation::Refund { .. } => Err(Error::Store(failure)),
            },
        }
    }

    /// The rules' own policies: refused as soon as one that can refuse says `closed`; else those that say `local`
    /// decide by this process's share, all or none; else let through.
    fn without_store(
        &self,
        asked: &mut [Asked],
        check: &Check,
        mut tell: impl FnMut(usize, TierDecision),
    ) -> Source {
        let tiers = check.tiers();
        let of_policy = |asked: &[Asked], policy| -> Vec<usize> {
            let places = 0..tiers.len();
            places.filter(|&place| asked[place].on_store_failure == policy).collect()
        };
        let mut source = Source::Open;
        for place in of_policy(asked, OnStoreFailure::Closed) {
            let terms = &tiers[place].terms;
            if terms.mode == Mode::Enforced {
                tell(place, asked[place].decision(terms, Share::refusing_for(CLOSED_RETRY)));
                source = Source::Closed;
            }
        }
        let places = of_policy(asked, OnStoreFailure::Local);
        if source == Source::Open && !places.is_empty() {
            let own = places.iter().map(|&place| tiers[place].clone()).collect();
            let own = Check::new(check.operation(), own).expect("some tiers of a valid check are one");
            let (verdict, own) = self.inner.gate.decide_without_store(&own);
            for (at, share) in verdict.shares {
                tell(places[at], asked[places[at]].decision(&own[at].terms, share));
            }
            source = Source::Fallback;
        }
        self.inner.gate.tally().stood_in(source);
        source
    }
}

#[inline]
fn decided_here(begun: Result<Begun, Error>) -> Option<Result<Decision, Error>> {
    match begun {
        Ok(Begun::Decided(decision)) => Some(Ok(decision)),
        Ok(Begun::Waits(_)) => None,
        Err(error) => Some(Err(error)),
    }
}

impl Settled {
    /// The store decided, or is known to refuse.
    fn by_store(at: Option<Timestamp>) -> Self {
        let source = if at.is_some() { Source::Store } else { Source::Local };
        Self { at, source, failure: None }
    }

    #[inline]
    fn decision(self, tiers: Vec<TierDecision>) -> Decision {
        let mut decision = Decision::of_tiers(tiers, self.at, self.source);
        decision.failure = self.failure;
        decision
    }
}

impl From<Applied<'_>> for Met {
    fn from(applied: Applied<'_>) -> Self {
        let rule = applied.rule;
        match applied.effect {
            Effect::Limit { key, limit, cost, shadow, overdraft, on_store_failure } => {
                let admission = if overdraft { Admission::Overdraft } else { Admission::InFull };
                let terms = Terms { limit, cost, mode: mode(shadow), admission };
                let (rule, unit) = (Some(Arc::clone(&rule.name)), rule.unit.clone());
                Self::Counter(Asked { rule, unit, on_store_failure }, Tier { key, terms })
            }
            Effect::Refuse { shadow, .. } => Self::Refusal(refusing_tier(rule, shadow)),
        }
    }
}

impl Asked {
    #[inline]
    fn decision(&mut self, terms: &Terms, share: Share) -> TierDecision {
        let outcome = match share.retry {
            _ if share.passes => Outcome::Allowed,
            Some(retry) => Outcome::Denied { retry },
            None => Outcome::Denied { retry: Retry::Never },
        };
        TierDecision {
            rule: self.rule.take(),
            unit: mem::take(&mut self.unit),
            mode: terms.mode,
            outcome,
            policy: Some(terms.limit),
            limit: terms.limit.capacity(),
            remaining: share.remaining,
            reset_after: share.reset_after,
        }
    }
}

/// A rule that refuses without counting, as a tier: nothing ever fits.
fn refusing_tier(rule: &Rule, shadow: bool) -> TierDecision {
    TierDecision {
        rule: Some(Arc::clone(&rule.name)),
        unit: rule.unit.clone(),
        mode: mode(shadow),
        outcome: Outcome::Denied { retry: Retry::Never },
        policy: None,
        limit: 0,
        remaining: 0,
        reset_after: Duration::ZERO,
    }
}

fn mode(shadow: bool) -> Mode {
    if shadow { Mode::Shadow } else { Mode::Enforced }
}

fn is_meant(rule: &Rule, only: Option<&[&str]>) -> bool {
    only.is_none_or(|names| names.contains(&&*rule.name))
}

fn in_force(names: &[String]) -> String {
    if names.is_empty() {
        "no rules are in force".to_owned()
    } else {
        format!("in force are {}", names.join(", "))
    }
}

fn known(rules: &RuleSet, only: Option<&[&str]>) -> Result<(), Error> {
    match only.unwrap_or_default().iter().find(|name| rules.get(name).is_none()) {
        Some(name) => Err(Error::UnknownRule {
            name: (*name).to_owned(),
            known: rules.rules().take(NAMES_IN_ERROR).map(|rule| rule.name.to_string()).collect(),
        }),
        None => Ok(()),
    }
}
