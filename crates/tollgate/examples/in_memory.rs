//! How do I limit something in one process?
//!
//! ```sh
//! cargo run -p tollgate --example in_memory
//! ```
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use tollgate::{Cost, Limit, Limiter, MemoryStore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = Limiter::new(MemoryStore::new(), [])?;
    let limit = Limit::sliding_log(3, Duration::from_secs(60))?;

    for attempt in 1..=5 {
        let decision = limiter.check_key("user:42", &limit, Cost::ONE).await?;
        match decision.retry_after() {
            None => println!("{attempt}: passed, {} left", decision.remaining().unwrap_or_default()),
            Some(wait) => println!("{attempt}: refused, come back in {wait:.1?}"),
        }
    }
    Ok(())
}
