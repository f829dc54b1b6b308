//! Checks as an open loop, and how many of them were degraded.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::Result;
use sluicegate::{Labels, Limiter, Source};

use crate::network::pacing::Arrivals;

/// One check. Times are measured from the start of the turn.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub sent: Duration,
    pub answered: Duration,
    pub source: Source,
    pub is_degraded: bool,
    pub is_allowed: bool,
}

/// The checks of one turn.
#[derive(Clone, Debug)]
pub struct Load {
    pub arrivals: Arrivals,
    pub labels: Arc<Labels>,
    /// The origin of all times.
    pub start: Instant,
}

impl Load {
    /// Sends each check at its time, whether or not earlier ones are answered. Returns them in the order of sending.
    pub async fn run(self, limiter: &Limiter) -> Result<Vec<Call>> {
        let Self { arrivals, labels, start } = self;
        let calls = Arc::new(Mutex::new(Vec::new()));
        let (limiter, shared) = (limiter.clone(), Arc::clone(&calls));
        let check = move |_| {
            let (limiter, labels, calls) = (limiter.clone(), Arc::clone(&labels), Arc::clone(&shared));
            async move {
                let sent = start.elapsed();
                let call = limiter.check(&labels, 1).await.map(|decision| Call {
                    sent,
                    answered: start.elapsed(),
                    source: decision.source,
                    is_degraded: decision.is_degraded(),
                    is_allowed: decision.is_allowed(),
                });
                calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
            }
        };
        arrivals.run(check).await?;
        let calls = std::mem::take(&mut *calls.lock().unwrap_or_else(PoisonError::into_inner));
        let mut calls = calls.into_iter().collect::<Result<Vec<Call>, _>>()?;
        calls.sort_by_key(|call| call.sent);
        Ok(calls)
    }
}

/// Returns the share of degraded decisions in percent. Decisions from the denial cache do not count, because they need no store.
pub fn degraded_percent(calls: &[Call]) -> f64 {
    let decided = calls.iter().filter(|call| call.source != Source::Cache).count();
    let degraded = calls.iter().filter(|call| call.is_degraded).count();
    100.0 * degraded as f64 / decided.max(1) as f64
}

/// Returns the longest time in which all decisions were degraded: from sending the first of them to the answer of the last.
pub fn longest_degraded(calls: &[Call]) -> Duration {
    let periods = calls.chunk_by(|a, b| a.is_degraded == b.is_degraded).filter(|calls| calls[0].is_degraded);
    let lengths = periods.flat_map(|calls| calls.iter().map(|call| call.answered - calls[0].sent));
    lengths.max().unwrap_or_default()
}
