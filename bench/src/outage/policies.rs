//! Checks beyond a limit, with each failure policy that may admit them: how many are degraded, and how far the limit is exceeded.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use sluicegate::{Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule};
use sluicegate_testkit::oracle::{Admitted, window_violation};

use super::calls::{Call, Load, degraded_percent};
use crate::{network::pacing::Arrivals, stats::Column};

/// Names and policies of the rules.
const POLICIES: [(&str, OnStoreFailure); 2] =
    [("open", OnStoreFailure::Open), ("local", OnStoreFailure::Local)];

/// Of a sliding log.
pub const LIMIT: u64 = 200;
const WINDOW: Duration = Duration::from_secs(1);
/// With each policy: three times the limit.
pub const CHECKS_PER_SECOND: f64 = 600.0;
const WARM_UP: Duration = Duration::from_millis(300);

pub const OVER_ADMITTED: Column = Column::new("over-admitted %", 1);

/// The figures of one policy in one turn.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub degraded_percent: f64,
    pub over_admitted_percent: f64,
}

/// One value for each policy.
#[derive(Clone, Copy, Debug)]
pub struct ByPolicy<T> {
    pub open: T,
    pub local: T,
}

/// Connects a limiter with one rule for each policy.
pub async fn connect(url: &str, deadline: Duration) -> Result<Limiter> {
    let limit = Limit::sliding_log(LIMIT, WINDOW)?;
    let rules = POLICIES.map(|(name, policy)| {
        Rule::new(name, limit).when("policy", name).per(["user"]).on_store_failure(policy)
    });
    let options = Options::default().deadline(deadline);
    Ok(Limiter::builder().store(RedisStore::connect(url).await?).rules(rules).options(options).build()?)
}

/// Sends checks on another key, so that the limiter has measured the round trip before the benchmark starts.
pub async fn warm_up(limiter: &Limiter) -> Result<()> {
    load("open", "warm-up", Arrivals { per_second: CHECKS_PER_SECOND, duration: WARM_UP, seed: 0 })?
        .run(limiter)
        .await?;
    Ok(())
}

/// Sends checks with both policies at the same time.
pub async fn measure(limiter: &Limiter, duration: Duration, round: usize) -> Result<ByPolicy<Sample>> {
    let arrivals = |seed| Arrivals { per_second: CHECKS_PER_SECOND, duration, seed };
    let seed = 2 * round as u64;
    let open = load("open", "measured", arrivals(seed))?;
    let local = load("local", "measured", arrivals(seed + 1))?;
    let (open, local) = tokio::try_join!(open.run(limiter), local.run(limiter))?;
    Ok(ByPolicy { open: Sample::of(&open), local: Sample::of(&local) })
}

fn load(policy: &str, user: &str, arrivals: Arrivals) -> Result<Load> {
    let labels = Arc::new(Labels::new([("policy", policy), ("user", user)])?);
    Ok(Load { arrivals, labels, start: Instant::now() })
}

impl Sample {
    fn of(calls: &[Call]) -> Self {
        let admitted: Vec<_> = calls.iter().filter(|call| call.is_allowed).map(admission).collect();
        let violation = window_violation(&admitted, LIMIT, WINDOW);
        let excess = violation.map_or(0, |violation| violation.admitted - violation.allowed);
        Self {
            degraded_percent: degraded_percent(calls),
            over_admitted_percent: 100.0 * excess as f64 / LIMIT as f64,
        }
    }
}

/// A degraded decision is made when it is answered, any other one at an unknown time after it is sent.
fn admission(call: &Call) -> Admitted {
    let sent = if call.is_degraded { call.answered } else { call.sent };
    Admitted { sent, received: call.answered, cost: 1 }
}
