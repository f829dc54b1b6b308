//! What people use: rules and a store behind one question, *may this request pass, and if not, when?*
//!
//! How one is asked about is in `asking`, several requests that pass together or not at all in `together`.

mod asking;
mod together;

use std::{fmt, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use tollgate_core::{Cost, Limit, LimitError, Operation, Terms, Timestamp, step::Share};

use self::asking::decided_here;
use crate::{
    check::{CheckError, Tier},
    decision::Decision,
    gate::{Gate, Options},
    key::{Key, KeyError},
    labels::Labels,
    rules::{Costs, Effect, MatchError, Rule, RuleSet, RulesError},
    stats::Stats,
    store::{CounterSnapshot, Store, StoreError},
};

pub use self::together::{Hits, Numbers, Request, Together};

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

    /// Logs a warning if a round trip to the store that takes this long makes it unlikely that the deadline holds. Under load
    /// that happens by itself; this is for a round trip that was measured before the first request.
    pub fn warn_if_slow(&self, round_trip: Duration) {
        self.inner.gate.warn_if_slow(round_trip);
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
                Effect::Deny { .. } => None,
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

    /// Checks counters one after the other, each for a request of its own, and tells what each says, by its place: where there is
    /// nothing to wait for because the store is in this process. Whether it is; where not, nothing was asked. For who has many
    /// keys at hand it is cheaper than [`Limiter::check_key_here`] for each.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Cost, Key, Limit, Limiter, MemoryStore, Terms, Tier};
    ///
    /// let limiter = Limiter::new(MemoryStore::new(), [])?;
    /// let terms = Terms::new(Limit::sliding_log(1, Duration::from_secs(60))?, Cost::ONE);
    /// let tier = |key| Key::without_rule(key).map(|key| Tier { key, terms });
    /// let mut passed = Vec::new();
    /// let is_here = limiter.check_each_here(&[tier("a")?, tier("a")?, tier("b")?], |_, says| passed.push(says.passes));
    /// assert_eq!((is_here, passed), (true, vec![true, false, true]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn check_each_here(&self, tiers: &[Tier], tell: impl FnMut(usize, Share)) -> bool {
        self.inner.gate.check_each_here(tiers, tell)
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
    pub async fn inspect(&self, counters: &[(Key, Limit)]) -> Result<Vec<Option<CounterSnapshot>>, Error> {
        Ok(self.inner.gate.inspect(counters, self.budget).await?)
    }
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
