//! A program without a runtime: five requests of a limit of three.

use std::time::Duration;

use sluicegate::{Cost, Limit, Limiter, MemoryStore};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::new(MemoryStore::new(), [])?;
    let limit = Limit::sliding_log(3, Duration::from_secs(60))?;
    let mut allowed = 0;
    for _ in 0..5 {
        allowed += u32::from(limiter.try_check_key("user:42", &limit, Cost::ONE)?.is_allowed());
    }
    println!("{allowed} of 5 allowed");
    Ok(())
}
