//! The pure core of tollgate: what a limit is, how each algorithm decides, what an answer says.
//!
//! Everything here is a function of state and time. There is no IO, no clock, no lock and no async:
//! a store reads its own clock, hands the time in, and keeps what comes back.
//!
//! * [`limit`]: how much and how fast; impossible to build wrong
//! * [`cost`]: how much one request takes
//! * [`time`]: a moment on a store's clock
//! * [`algorithm`]: the state of each algorithm and what it does with a charge
//! * [`step`]: many identical requests against one counter, decided at once
//! * [`decision`]: the answer, and the only place where it is rounded for people

pub mod algorithm;
pub mod cost;
pub mod decision;
pub mod limit;
pub mod step;
pub mod time;

pub use algorithm::State;
pub use cost::{Cost, CostError};
pub use decision::{Outcome, Retry};
pub use limit::{Algorithm, Limit, LimitError};
pub use step::{Answer, Operation, Terms};
pub use time::Timestamp;
