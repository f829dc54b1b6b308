//! A rate limit in one process.
//!
//! ```sh
//! cargo run -p sluicegate --example in_memory
//! ```
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::time::Duration;

use sluicegate::{Cost, Limit, Limiter, MemoryStore, Outcome, Retry};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::new(MemoryStore::new(), [])?;
    let limit = Limit::sliding_log(3, Duration::from_secs(60))?;

    for attempt in 1..=5 {
        let decision = limiter.check_key("user:42", &limit, Cost::ONE).await?;
        match decision.outcome {
            Outcome::Allowed => {
                println!("{attempt}: allowed, {} remaining", decision.remaining().unwrap_or(0))
            }
            Outcome::Denied { retry: Retry::After(wait) } => {
                println!("{attempt}: denied, retry in {wait:.1?}")
            }
            Outcome::Denied { retry: Retry::Never } => {
                println!("{attempt}: denied, the cost exceeds the limit")
            }
        }
    }
    Ok(())
}
