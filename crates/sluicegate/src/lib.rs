//! A distributed rate limiter: decides whether a request is allowed, and if not, when to retry.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use sluicegate::{Cost, Limit, Limiter, MemoryStore};
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
//! Without rules, each request carries its limit, as above. With rules, a request is described by [`Labels`], and every [`Rule`] that
//! matches applies: all counters are charged or none, in one atomic step. A denial charges nothing.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! use std::time::Duration;
//! use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, OnStoreFailure, Rule};
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
//! Use `RedisStore::connect("redis://127.0.0.1:6379").await?` instead of `MemoryStore::new()` to share counters between processes, on a
//! single Redis or Valkey, Sentinel or a Cluster. Callers share round trips, and every check is decided within a deadline (50 ms,
//! [`Options`]). If Redis has not answered by then, each rule's [`OnStoreFailure`] policy decides, and [`Decision::is_degraded`] is true.
//!
//! # Which algorithm
//!
//! Use [`Limit::token_bucket`] to smooth traffic and admit short bursts, [`Limit::sliding_log`] if the limit must hold exactly in any
//! window, [`Limit::sliding_counter`] to approximate that in constant memory, and [`Limit::fixed_window`] for coarse quotas, also per
//! calendar month or day of a time zone (feature `calendar`). The guarantees of each are documented in [`sluicegate_core::algorithm`].
//!
//! # Features
//!
//! | feature | default | contents |
//! |---|---|---|
//! | `redis` | yes | `RedisStore` |
//! | `tls` | yes | `rediss://` URLs; needs a C compiler |
//! | `calendar` | no | `calendar`: windows that are days, weeks, months, quarters or years of a time zone; embeds the time zone database |
//! | `toml` | no | `config::RulesFile`, which reads rules from the server's configuration file |
//! | `inspect` | no | `redis::inspect`, which examines the servers of a store for diagnosis |
//!
//! Without them, counters are in memory or in a [`RemoteStore`](store::RemoteStore) of your own.
//!
//! # In tests
//!
//! [`ManualClock`] moves time without waiting.
//!
//! # Modules
//!
//! A [`Limiter`] matches [`Labels`] against its [`Rule`]s and combines those that apply into a [`Check`](store::Check). Its
//! [`Store`](store::Store) decides the check in one atomic step on its own clock. If the store does not answer in time, each rule's failure
//! policy decides.
//!
//! * [`limiter`]: the API, with and without rules
//! * [`rules`], [`labels`]: which limits apply to a request
//! * [`memory`], `redis`: where counters live
//! * [`decision`]: the answer
//! * [`store`]: what the author of another store needs
//! * [`stats`]: statistics of a limiter and its store
//!
//! Limits and algorithms are defined in [`sluicegate_core`] and re-exported here. The crate `sluicegate-tower` is the middleware for axum,
//! hyper and tonic. Other applications use the server, `sluicegate serve`.

#[doc(hidden)]
pub mod address;
mod backend;
#[cfg(feature = "calendar")]
pub mod calendar;
mod check;
mod clock;
#[cfg(feature = "toml")]
pub mod config;
pub mod decision;
#[doc(hidden)]
#[cfg(feature = "toml")]
pub mod duration;
mod hashing;
mod key;
#[cfg(feature = "toml")]
pub mod label_policy;
pub mod labels;
pub mod limiter;
pub mod memory;
#[cfg(feature = "redis")]
pub mod redis;
mod remote;
pub mod rules;
pub mod stats;
pub mod store;
#[doc(hidden)]
#[cfg(feature = "toml")]
pub mod window;

pub use sluicegate_core::{Algorithm, Cost, CostError, Limit, LimitError, Outcome, Retry, Timestamp, Window};

#[doc(hidden)]
pub use self::hashing::random;
#[cfg(feature = "redis")]
pub use self::redis::RedisStore;
pub use self::{
    clock::ManualClock,
    decision::{Decision, Source, TierDecision},
    labels::Labels,
    limiter::{Error, Limiter},
    memory::MemoryStore,
    remote::Options,
    rules::{Costs, OnStoreFailure, Override, Rule},
    store::StoreError,
};

/// The README's examples, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
