//! The pure core of sluicegate: limits, algorithms and decisions.
//!
//! Everything here is a function of state and time, without I/O, clock, lock or async code. A store reads its own
//! clock, passes the time in, and keeps the returned state.
//!
//! ```
//! use std::time::Duration;
//! use sluicegate_core::{Cost, Limit, Operation, State, Terms, Timestamp, step::step};
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
//! To limit requests, use the crate `sluicegate`, which adds stores, rules and a clock. Use this crate to build another limiter on
//! the same algorithms.
//!
//! * [`limit`]: amount, window and algorithm, validated on construction
//! * [`calendar`]: days, weeks, months, quarters and years of a time zone as windows
//! * [`cost`]: the cost of one request
//! * [`time`]: a moment of a store's clock
//! * [`algorithm`]: the algorithms, their states, and the table that registers them
//! * [`hold`]: admitted requests whose cost is corrected later
//! * [`step`]: the decision for many identical requests on one counter
//! * [`packed`]: states in three numbers
//! * [`decision`]: the outcome, and the only place where waits are rounded for display
//! * [`snapshot`]: the state of a counter, for display
//! * [`oracle`]: checks whether the admitted calls are within a limit, using only the callers' clocks

pub mod algorithm;
pub mod calendar;
pub mod cost;
pub mod decision;
pub mod hold;
pub mod limit;
pub mod oracle;
pub mod packed;
pub mod snapshot;
pub mod step;
pub mod time;

pub use algorithm::{Algorithm, Bound, State};
pub use calendar::Calendar;
pub use cost::{Cost, CostError};
pub use decision::{Outcome, Retry};
pub use hold::{HoldAnswer, HoldOutcome, OnExpiry};
pub use limit::{Lease, Limit, LimitError, Window};
pub use packed::Scale;
pub use snapshot::Snapshot;
pub use step::{Answer, Operation, Terms};
pub use time::Timestamp;
