//! The pure core of tollgate: what a limit is, how each algorithm decides, what an answer says.
//!
//! Everything here is a function of state and time. There is no IO, no clock, no lock and no async:
//! a store reads its own clock, hands the time in, and keeps what comes back.
//!
//! ```
//! use std::time::Duration;
//! use tollgate_core::{Cost, Limit, Operation, State, Terms, Timestamp, step::step};
//!
//! let limit = Limit::sliding_log(2, Duration::from_secs(60))?;
//! let terms = Terms::new(limit, Cost::ONE);
//! let mut state = State::fresh(limit.algorithm());
//! let noon = Timestamp::from_micros(1_794_744_000_000_000);
//!
//! assert_eq!(step(&mut state, &terms, Operation::Check, 1, noon).passes, 1);
//! assert_eq!(step(&mut state, &terms, Operation::Check, 1, noon).passes, 1);
//! assert_eq!(step(&mut state, &terms, Operation::Check, 1, noon).passes, 0);
//! let later = noon.plus(Duration::from_secs(60));
//! assert_eq!(step(&mut state, &terms, Operation::Check, 1, later).passes, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! To limit requests, use the crate `tollgate`, which brings stores, rules and a clock; this one is for whoever builds something
//! of their own on the same algorithms.
//!
//! * [`limit`]: how much and how fast; impossible to build wrong
//! * [`cost`]: how much one request takes
//! * [`time`]: a moment on a store's clock
//! * [`algorithm`]: the state of each algorithm and what it does with a charge
//! * [`step`]: many identical requests against one counter, decided at once
//! * [`decision`]: the answer, and the only place where it is rounded for people
//! * [`oracle`]: whether what was admitted keeps to a limit, from nothing but the callers' clocks

pub mod algorithm;
pub mod cost;
pub mod decision;
pub mod limit;
pub mod oracle;
pub mod snapshot;
pub mod step;
pub mod time;

pub use algorithm::State;
pub use cost::{Cost, CostError};
pub use decision::{Outcome, Retry};
pub use limit::{Algorithm, Limit, LimitError};
pub use snapshot::Snapshot;
pub use step::{Answer, Operation, Terms};
pub use time::Timestamp;
