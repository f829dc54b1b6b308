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
//! Limits and algorithms are in [`tollgate_core`], re-exported here.

pub mod check;
mod clock;
pub mod decision;
mod gate;
mod hashing;
pub mod key;
pub mod labels;
pub mod limiter;
pub mod memory;
pub mod redis;
pub mod rules;
pub mod stats;
pub mod store;

pub use tollgate_core::{
    Algorithm, Answer, Cost, CostError, Limit, LimitError, Operation, Outcome, Retry, Terms, Timestamp,
    step::{Admission, Mode},
};

pub use self::{
    check::{Check, CheckError, Tier},
    clock::ManualClock,
    decision::{Decision, Source, TierDecision},
    gate::Options,
    key::{Key, KeyError},
    labels::{LabelError, Labels},
    limiter::{Error, Hits, Limiter, Numbers, Request, Together},
    memory::MemoryStore,
    redis::{RedisSetupError, RedisStore},
    rules::{
        Absent, Costs, CostsError, MatchError, OnStoreFailure, Override, Pattern, Rule, RuleSet, RulesError,
    },
    stats::{Stats, StoreStats},
    store::{Answered, Deadline, Decided, Store, StoreError},
};

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
