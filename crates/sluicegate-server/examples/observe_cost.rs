//! Measures the cost of observing a decision.
//!
//! `cargo run --release -p sluicegate-server --example observe_cost`
//!
//! Measured: all metrics of one decision by one rule, including its duration. Not measured: the decision itself, and spans with
//! a subscriber.
#![expect(clippy::print_stdout, reason = "a benchmark prints its results")]

use std::{
    error::Error,
    hint::black_box,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, limiter::Request, rules::RuleSet};
use sluicegate_server::{engine::Transport, observe::Observer};

const KEYS: usize = 1 << 16;
const DECISIONS: u32 = 5_000_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let limit = Limit::token_bucket(1, Duration::from_secs(3600))?;
    let limiter = Limiter::new(MemoryStore::new(), [Rule::new("per-ip", limit).per(["ip"])])?;
    let labels = (0..KEYS).map(|n| Labels::new([("ip", format!("203.0.{}.{}", n >> 8, n & 255))]));
    let labels = labels.collect::<Result<Vec<_>, _>>()?;
    let allowed = limiter.check(&labels[0], Cost::ONE).await?;
    let denied = limiter.check(&labels[0], Cost::ONE).await?;
    let rules = limiter.rules();
    for threads in [1, 2] {
        let report = |what: &str, each: Duration| {
            println!("{what:<24} {threads} thread(s) {:>5} ns per decision", each.as_nanos());
        };
        report("one key, allowed", measure(threads, &rules, &labels[..1], &allowed));
        report("one key, denied", measure(threads, &rules, &labels[..1], &denied));
        report("65,536 keys, allowed", measure(threads, &rules, &labels, &allowed));
        report("65,536 keys, denied", measure(threads, &rules, &labels, &denied));
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
fn measure(
    threads: u32,
    rules: &Arc<RuleSet>,
    labels: &[Labels],
    decision: &sluicegate::Decision,
) -> Duration {
    let observer = Observer::new(Arc::clone(rules));
    let started = Instant::now();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for labels in labels.iter().cycle().take(DECISIONS as usize) {
                    let observation = observer.begin(Transport::Http);
                    let request = Request::new(labels, Cost::ONE);
                    observation.decided(&request, black_box(decision), || Arc::clone(rules));
                }
            });
        }
    });
    started.elapsed() / DECISIONS
}
