//! A rate limiter that many processes share.

pub mod check;
mod clock;
pub mod key;
pub mod labels;
pub mod memory;
pub mod redis;
pub mod rules;
pub mod store;

pub use tollgate_core::{
    Algorithm, Answer, Cost, CostError, Limit, LimitError, Operation, Outcome, Retry, Terms, Timestamp,
};

pub use self::{
    check::{Check, CheckError, Tier},
    clock::ManualClock,
    key::{Key, KeyError},
    memory::MemoryStore,
    redis::RedisStore,
    store::{Decided, Store, StoreError},
};
