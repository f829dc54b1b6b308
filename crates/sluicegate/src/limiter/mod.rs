//! The API: decides requests by rules and a store.
//!
//! | file | contents |
//! |---|---|
//! | `builder` | the settings of a limiter |
//! | `request` | one request |
//! | `adjust` | charges and refunds |
//! | `decide` | from a request to a decision |
//! | `group` | several requests, all or none |
//! | `hold`, `hold_token`, `pending_hold`, `settlement` | requests whose cost is corrected later |
//! | `label_hold` | holds whose id is in a label |
//! | `reset` | deleting counters |

mod adjust;
mod builder;
mod decide;
mod group;
mod hold;
mod hold_counters;
mod hold_token;
mod label_hold;
mod pending_hold;
mod request;
mod reset;
mod settlement;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use sluicegate_core::{
    Cost, Limit, LimitError,
    hold::{MAX_HOLD_TTL, MAX_LIVE_HOLDS, MIN_HOLD_TTL},
};

use crate::{
    backend::Backend,
    check::CheckError,
    decision::Decision,
    key::{HoldId, HoldIdError, Key, KeyError},
    labels::Labels,
    memory::MemoryStore,
    rules::{Costs, MatchError, Rule, RuleSet, RulesError},
    stats::{HoldStats, Stats},
    store::{CounterSnapshot, Store, StoreError},
};

pub use sluicegate_core::{OnExpiry, Operation};

pub use self::{
    adjust::{Charge, Refund},
    builder::LimiterBuilder,
    decide::{PendingDecision, Progress},
    group::GroupDecision,
    hold::{Hold, HoldDecision, HoldRequest},
    hold_token::{HoldToken, HoldTokenError},
    label_hold::{GroupHoldDecision, LabelHold},
    request::{LimitOverride, OnConcurrency, Request, RuleSelection, Subject},
    reset::{DeletedCounter, Reset, UnmatchedRule},
    settlement::{SettleOutcome, SettledTier, Settlement},
};
use self::{hold_counters::HoldCounters, pending_hold::UnfinishedCount};

/// Decides requests by rules, or by a limit given with the request. Cheap to clone.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
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
#[derive(Clone)]
pub struct Limiter {
    inner: Arc<Inner>,
    /// The callers' own deadline, if it is shorter than that of the options.
    deadline: Option<Duration>,
}

struct Inner {
    backend: Backend,
    rules: ArcSwap<RuleSet>,
    /// Checks that skipped a concurrency rule.
    skipped_concurrency: AtomicU64,
    holds: HoldCounters,
    unfinished: UnfinishedCount,
}

impl Inner {
    fn record_skipped(&self, has_skipped: bool) {
        if has_skipped {
            self.skipped_concurrency.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Why a request has no decision. All variants except [`Error::Store`], [`Error::PartialReset`] and [`Error::TooManyHolds`] are errors of the
/// request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key is invalid.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The cost is too large for a rule.
    #[error(transparent)]
    Match(#[from] MatchError),
    /// More rules match than one check may have tiers.
    #[error(transparent)]
    Check(#[from] CheckError),
    /// The limit given with the request is invalid.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The request names a rule that does not exist.
    #[error("there is no rule {name:?}: {}", list_rules(known))]
    UnknownRule {
        /// The name that was given.
        name: String,
        /// Some of the names that exist.
        known: Vec<String>,
    },
    /// `try_check` and `try_check_key` decide on the memory store only. Nothing was sent or charged.
    #[error("a remote store cannot decide synchronously: use check or check_key")]
    NotLocal,
    /// A check matches a concurrency rule, which requires a hold.
    #[error("{} counts requests in flight: use hold, and settle or release it at the end", named(rule.as_deref()))]
    NeedsHold {
        /// The rule; `None` for a limit that was given with the request.
        rule: Option<Arc<str>>,
    },
    /// The id of a hold is invalid.
    #[error(transparent)]
    HoldId(#[from] HoldIdError),
    /// The token of a hold is invalid.
    #[error(transparent)]
    HoldToken(#[from] HoldTokenError),
    /// The time until a hold expires is out of range.
    #[error(
        "ttl {0:?} is out of range: use {MIN_HOLD_TTL:?} to {MAX_HOLD_TTL:?}, and renew the hold for longer work"
    )]
    HoldTtl(Duration),
    /// The id belongs to a hold with another cost, or to one that has ended. Nothing was charged.
    #[error("id {:?} belongs to a hold with another cost, or to one that has ended: use another id", .0.decoded())]
    HoldConflict(HoldId),
    /// A counter has too many live holds, or the memory store is full. Nothing was charged.
    #[error("{} has {MAX_LIVE_HOLDS} live holds, or memory is full: settle or release holds, or use a shorter ttl", named(rule.as_deref()))]
    TooManyHolds {
        /// The rule; `None` for a limit that was given with the request.
        rule: Option<Arc<str>>,
    },
    /// A request of a group is neither a check nor a refund without a time.
    #[error("a group cannot contain {0:?}: use checks, and refunds without a time")]
    GroupOperation(Operation),
    /// A reset deleted some counters and failed for others.
    #[error("only {deleted} counters were reset, not {failed}: {error}")]
    PartialReset {
        /// How many counters were deleted.
        deleted: usize,
        /// The keys of the counters that were not, or may not have been.
        failed: String,
        /// The first error of the store.
        #[source]
        error: StoreError,
    },
    /// The store did not confirm a charge, refund, reset or renewal, or it did not answer a settlement and the queue was full. The operation may
    /// have taken effect. Checks and peeks do not return this error: the rules' failure policies decide them.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules = self.inner.rules.load().len();
        f.debug_struct("Limiter").field("rules", &rules).finish_non_exhaustive()
    }
}

impl Limiter {
    /// Creates a limiter over a store, with these rules and default options.
    ///
    /// # Errors
    /// When a rule is invalid; see [`RuleSet::new`].
    pub fn new(store: impl Into<Store>, rules: impl IntoIterator<Item = Rule>) -> Result<Self, RulesError> {
        Self::builder().store(store).rules(rules).build()
    }

    /// Creates a limiter with these rules and counters in the memory of this process.
    ///
    /// # Errors
    /// As [`Limiter::new`].
    pub fn in_memory(rules: impl IntoIterator<Item = Rule>) -> Result<Self, RulesError> {
        Self::new(MemoryStore::new(), rules)
    }

    /// Builds a limiter with options, such as another deadline. By default it has no rules and a memory store.
    pub fn builder() -> LimiterBuilder {
        LimiterBuilder::default()
    }

    /// Returns the same limiter for callers with their own deadline. The shorter deadline applies.
    ///
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Limit, Limiter, MemoryStore};
    ///
    /// let limiter = Limiter::new(MemoryStore::new(), [])?;
    /// let limit = Limit::token_bucket(100, Duration::from_secs(1))?;
    /// let limiter = limiter.with_deadline(Duration::from_millis(2));
    /// assert!(limiter.check_key("user:42", &limit, Cost::ONE).await?.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    #[must_use]
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        let deadline = self.deadline.map_or(deadline, |other| other.min(deadline));
        Self { inner: Arc::clone(&self.inner), deadline: Some(deadline) }
    }

    /// Replaces the rules from the next decision on. Usage under a rule of the same name is kept, unless its algorithm, its `per`
    /// or its `tag` changes: then its counters start fresh. Invalid rules change nothing.
    ///
    /// # Errors
    /// As [`Limiter::new`].
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
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
        self.inner.backend.return_leases_later();
        Ok(())
    }

    /// Returns the units that this process has charged in advance and not spent ([`Limit::with_lease`]) to the store. Call it before the
    /// process ends, after the last request; otherwise they count until their window ends. Takes at most about half a second.
    pub async fn return_leases(&self) {
        self.inner.backend.return_leases().await;
    }

    /// The active rules.
    pub fn rules(&self) -> Arc<RuleSet> {
        self.inner.rules.load_full()
    }

    /// Whether decisions are made by a store on another host.
    pub fn is_remote(&self) -> bool {
        self.inner.backend.is_remote()
    }

    /// Connects to a remote store before the first decision needs it. No effect on the memory store.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn warm_up(&self) -> Result<(), StoreError> {
        self.inner.backend.warm_up().await
    }

    /// Returns counters and gauges about the store and the calls to it.
    pub fn stats(&self) -> Stats {
        let skipped_concurrency = self.inner.skipped_concurrency.load(Ordering::Relaxed);
        let stats = self.inner.backend.stats();
        let holds = self.inner.holds.snapshot();
        let HoldStats { late, unknown, waiting, .. } = stats.holds;
        let holds = HoldStats { late: holds.late + late, unknown: holds.unknown + unknown, waiting, ..holds };
        Stats { skipped_concurrency, holds, ..stats }
    }

    /// Logs a warning if a round trip of this length leaves too little of the deadline. Under load the limiter measures round trips by
    /// itself; this is for one that was measured before the first request.
    pub fn warn_if_slow(&self, round_trip: Duration) {
        self.inner.backend.warn_if_slow(round_trip);
    }

    /// Decides a request by all rules that match it, all or none, and charges it if it is allowed.
    ///
    /// # Errors
    /// When the request is invalid; nothing is charged.
    pub async fn check(&self, labels: &Labels, cost: impl Into<Costs>) -> Result<Decision, Error> {
        self.start(&Request::new(labels, cost))?.decision().await
    }

    /// [`Limiter::check`] without a future or a runtime, on the memory store.
    ///
    /// ```
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let rule = Rule::new("per-user", Limit::fixed_window(1, Duration::from_secs(60))?).per(["user"]);
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("user", "42")])?;
    /// assert!(limiter.try_check(&labels, Cost::ONE)?.is_allowed());
    /// assert!(!limiter.try_check(&labels, Cost::ONE)?.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Limiter::check`], and [`Error::NotLocal`] if a remote store has to decide.
    pub fn try_check(&self, labels: &Labels, cost: impl Into<Costs>) -> Result<Decision, Error> {
        self.try_start(&Request::new(labels, cost))
    }

    /// Decides as [`Limiter::check`] would, and charges nothing.
    ///
    /// # Errors
    /// When the request is invalid.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
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
        self.start(&Request::new(labels, cost).operation(Operation::Peek))?.decision().await
    }

    /// Charges usage whose amount is known after the request, even beyond the limit: all rules that match, or only those named
    /// ([`Charge::rules`]). The charge is made when it is awaited.
    ///
    /// # Errors
    /// When the request is invalid or names an unknown rule: then nothing is charged. When the store does not answer:
    /// the [`StoreError`] variant states whether the charge may have been made.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Costs, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let hour = Duration::from_secs(3600);
    /// let rule = Rule::new("tokens", Limit::token_bucket(1_000, hour)?).per(["tenant"]).unit("tokens").overdraft();
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("tenant", "acme")])?;
    ///
    /// // the number of tokens of an LLM response is known only when it has ended, and may exceed the remaining units
    /// let used = Costs::new([("tokens", Cost::new(1_200)?)])?;
    /// let decision = limiter.charge(&labels, used).await?;
    /// assert_eq!(decision.remaining(), Some(0));
    /// let next = limiter.check(&labels, Costs::new([("tokens", Cost::ONE)])?).await?;
    /// assert!(!next.is_allowed());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub fn charge<'a>(&'a self, labels: &'a Labels, cost: impl Into<Costs>) -> Charge<'a> {
        Charge { limiter: self, request: Request::new(labels, cost).operation(Operation::Charge) }
    }

    /// Refunds at most the current usage of all rules that match, or only of those named ([`Refund::rules`]): the newest charges, or
    /// exactly the charge of an earlier decision ([`Refund::at`]). The refund is made when it is awaited.
    ///
    /// # Errors
    /// When the request is invalid or names an unknown rule: then nothing is refunded. When the store does not answer:
    /// the [`StoreError`] variant states whether the refund may have been made.
    ///
    /// # Examples
    /// ```
    /// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
    /// use std::time::Duration;
    /// use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule};
    ///
    /// let rule = Rule::new("uploads", Limit::sliding_log(10, Duration::from_secs(60))?).per(["user"]);
    /// let limiter = Limiter::new(MemoryStore::new(), [rule])?;
    /// let labels = Labels::new([("user", "42")])?;
    ///
    /// let upload = limiter.check(&labels, Cost::new(3)?).await?;
    /// assert_eq!(upload.remaining(), Some(7));
    /// // the upload failed: refund exactly its charge
    /// let after = limiter.refund(&labels, Cost::new(3)?).at(upload.at).await?;
    /// assert_eq!(after.remaining(), Some(10));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub fn refund<'a>(&'a self, labels: &'a Labels, cost: impl Into<Costs>) -> Refund<'a> {
        let operation = Operation::Refund { at: None };
        Refund { limiter: self, request: Request::new(labels, cost).operation(operation) }
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
        self.start(&Request::for_key(key.as_ref(), *limit, cost))?.decision().await
    }

    /// [`Limiter::check_key`] without a future or a runtime, on the memory store.
    ///
    /// # Errors
    /// As [`Limiter::check_key`], and [`Error::NotLocal`] if a remote store has to decide.
    pub fn try_check_key(&self, key: impl AsRef<[u8]>, limit: &Limit, cost: Cost) -> Result<Decision, Error> {
        self.try_start(&Request::for_key(key.as_ref(), *limit, cost))
    }

    /// Decides as [`Limiter::check_key`] would, and charges nothing.
    ///
    /// # Errors
    /// When the key is empty or too long.
    pub async fn peek_key(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
    ) -> Result<Decision, Error> {
        let request = Request::for_key(key.as_ref(), *limit, cost).operation(Operation::Peek);
        self.start(&request)?.decision().await
    }

    /// Charges usage whose amount is known after the request, even beyond the limit.
    ///
    /// # Errors
    /// When the key is empty or too long, or the store does not answer.
    pub async fn charge_key(
        &self,
        key: impl AsRef<[u8]>,
        limit: &Limit,
        cost: Cost,
    ) -> Result<Decision, Error> {
        let request = Request::for_key(key.as_ref(), *limit, cost).operation(Operation::Charge);
        self.start(&request)?.decision().await
    }

    /// Refunds at most the current usage: the newest charges, or exactly the charge of an earlier decision ([`Refund::at`]). The
    /// refund is made when it is awaited.
    ///
    /// # Errors
    /// When the key is empty or too long, or the store does not answer.
    pub fn refund_key<'a>(
        &'a self,
        key: &'a (impl AsRef<[u8]> + ?Sized),
        limit: &Limit,
        cost: Cost,
    ) -> Refund<'a> {
        let request = Request::for_key(key.as_ref(), *limit, cost);
        Refund { limiter: self, request: request.operation(Operation::Refund { at: None }) }
    }

    /// Returns the state of these counters for display; `None` for a counter whose state is corrupt.
    ///
    /// # Errors
    /// When the store does not answer, or does not support it.
    pub async fn inspect(&self, counters: &[(Key, Limit)]) -> Result<Vec<Option<CounterSnapshot>>, Error> {
        Ok(self.inner.backend.inspect(counters, self.deadline).await?)
    }
}

impl Limiter {
    fn try_start(&self, request: &Request<'_>) -> Result<Decision, Error> {
        if self.is_remote() {
            return Err(Error::NotLocal);
        }
        match self.start(request)? {
            Progress::Decided(decision) => Ok(decision),
            Progress::Pending(_) => Err(Error::NotLocal),
        }
    }
}

/// Returns how a message names a rule.
fn named(rule: Option<&str>) -> String {
    rule.map_or_else(|| "this limit".to_owned(), |rule| format!("rule {rule:?}"))
}

fn list_rules(names: &[String]) -> String {
    if names.is_empty() { "there are no rules".to_owned() } else { format!("use {}", names.join(", ")) }
}
