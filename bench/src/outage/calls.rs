//! Checks as an open loop.

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
