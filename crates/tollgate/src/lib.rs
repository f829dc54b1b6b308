//! A rate limiter that many processes share: *may this request pass, and if not, when?*
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use tollgate::{Cost, Limit, Limiter, MemoryStore};
//!
//! let limiter = Limiter::new(MemoryStore::new(), [])?;
//! let limit = Limit::sliding_log(100, Duration::from_secs(60))?;
//! let decision = limiter.check_key("user:42", &limit, Cost::ONE).await?;
//! assert!(decision.is_allowed());
//! assert_eq!(decision.remaining(), Some(99));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! # Rules
//!
//! Without rules, the limit comes with each question, as above. With rules, a request says what it is ([`Labels`]), and every
//! [`Rule`] that matches applies: all or none, in one atomic step. A refusal charges nobody.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use tollgate::{Cost, Labels, Limit, Limiter, MemoryStore, OnStoreFailure, Rule};
//!
//! let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
//! let rules = [
//!     Rule::new("everybody", Limit::token_bucket(1_000, second)?.with_burst(2_000)?),
//!     Rule::new("login-per-ip", Limit::sliding_log(10, minute)?)
//!         .when("route", "login")
//!         .per(["ip"])
//!         .on_store_failure(OnStoreFailure::Local),
//! ];
//! let limiter = Limiter::new(MemoryStore::new(), rules)?;
//!
//! let labels = Labels::new([("route", "login"), ("ip", "203.0.113.9")])?;
//! let decision = limiter.check(&labels, Cost::ONE).await?;
//! assert_eq!((decision.rule(), decision.remaining()), (Some("login-per-ip"), Some(9)));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! # Several processes
//!
//! `RedisStore::connect("redis://127.0.0.1:6379").await?` in place of `MemoryStore::new()`, and all processes share their counters: one
//! Redis or Valkey, Sentinel or a Cluster. Callers share round trips, and an answer comes by a deadline (50 ms, [`Options`]); if Redis has
//! not answered by then, each rule's [`OnStoreFailure`] does, and [`Decision::is_degraded`] says so.
//!
//! # Which algorithm
//!
//! [`Limit::token_bucket`] to smooth traffic and let short bursts pass, [`Limit::sliding_log`] where the limit must hold exactly in any
//! window, [`Limit::sliding_counter`] for the same nearly, in constant memory, [`Limit::fixed_window`] for coarse quotas. What each
//! promises is in [`tollgate_core::algorithm`].
//!
//! # In tests
//!
//! Move the time instead of waiting for it: [`ManualClock`].
//!
//! # The parts
//!
//! A decision, top to bottom: a [`Limiter`] matches [`Labels`] against its [`Rule`]s, makes a [`Check`] of those
//! that apply, and asks its [`Store`], which decides in one atomic step on its own clock; if the store
//! does not answer in time, each rule's failure policy does.
//!
//! * [`limiter`]: the API, with and without rules
//! * [`rules`], [`labels`]: which limits a request meets
//! * [`key`], [`check`]: one counter's name, one request's question
//! * [`store`], [`memory`], [`redis`]: where counters are kept and decided over
//! * [`decision`]: the answer
//! * [`stats`]: what the store put a limiter through
//!
//! Limits and algorithms are in [`tollgate_core`], re-exported here. For axum, hyper and tonic there is the crate `tollgate-tower`; for
//! everything else the server, `tollgate serve`.

#[doc(hidden)]
pub mod address;
mod backend;
pub mod check;
mod clock;
pub mod decision;
mod hashing;
pub mod key;
pub mod labels;
pub mod limiter;
pub mod memory;
pub mod redis;
mod remote;
pub mod rules;
pub mod stats;
pub mod store;

pub use tollgate_core::{
    Algorithm, Answer, Bound, Cost, CostError, Limit, LimitError, Operation, Outcome, Retry, Snapshot, Terms,
    Timestamp, oracle,
    step::{Admission, Mode, Share},
};

#[doc(hidden)]
pub use self::hashing::random;
pub use self::{
    check::{Check, CheckError, Tier},
    clock::ManualClock,
    decision::{Decision, Source, TierDecision},
    key::{Key, KeyError},
    labels::{LabelError, Labels},
    limiter::{Error, GroupDecision, LimitOverride, Limiter, PendingDecision, Progress, Request, Subject},
    memory::MemoryStore,
    redis::{RedisSetupError, RedisStore},
    remote::Options,
    rules::{
        Absent, Costs, CostsError, MatchError, OnStoreFailure, Override, Pattern, Rule, RuleSet, RulesError,
    },
    stats::{Stats, StoreStats},
    store::{Answered, BoxFuture, CounterSnapshot, Deadline, Decided, RemoteStore, Store, StoreError},
};

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
