//! Two limits that processes share through Redis. A request is charged to both or to neither.
//!
//! ```sh
//! redis-server --port 6379 &
//! cargo run -p sluicegate --example redis_two_tiers
//! ```
//! Run it in several terminals: the processes share the limits.
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use std::time::Duration;

use sluicegate::{Cost, Labels, Limit, Limiter, OnStoreFailure, Outcome, RedisStore, Rule};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("SLUICEGATE_STORE_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let store = RedisStore::connect(&url).await?;
    let minute = Duration::from_secs(60);
    let rules = [
        Rule::new("global", Limit::token_bucket(100, minute)?),
        Rule::new("per-user", Limit::sliding_log(5, minute)?).per(["user"]),
    ];
    // while Redis is down, this process enforces its share of the limits
    let rules = rules.map(|rule| rule.on_store_failure(OnStoreFailure::Local));
    let limiter = Limiter::new(store, rules)?;

    for user in ["alice", "bob"] {
        let labels = Labels::new([("user", user)])?;
        for attempt in 1..=6 {
            let decision = limiter.check(&labels, Cost::ONE).await?;
            let rule = decision.rule().unwrap_or("no rule");
            match decision.outcome {
                Outcome::Allowed => {
                    println!("{user} {attempt}: allowed, {rule} has {:?} remaining", decision.remaining())
                }
                // a denial by one rule does not charge the other
                Outcome::Denied { retry } => println!("{user} {attempt}: denied by {rule}, {retry:.1?}"),
            }
        }
    }
    Ok(())
}
