//! Counts holds by outcome.

use std::sync::atomic::{AtomicU64, Ordering};

use sluicegate_core::{HoldAnswer, HoldOutcome};

use super::SettleOutcome;
use crate::stats::HoldStats;

/// Counts holds by outcome.
#[derive(Debug, Default)]
pub(super) struct HoldCounters {
    held: AtomicU64,
    expired: AtomicU64,
    settled: AtomicU64,
    released: AtomicU64,
    already: AtomicU64,
    late: AtomicU64,
    unknown: AtomicU64,
    queued: AtomicU64,
}

impl HoldCounters {
    /// Records the holds that a check, or another hold, found to have expired.
    pub(super) fn record_expired(&self, holds: &[HoldAnswer]) {
        let expired: u64 = holds.iter().map(|hold| u64::from(hold.released)).sum();
        if expired > 0 {
            self.expired.fetch_add(expired, Ordering::Relaxed);
        }
    }

    pub(super) fn record_hold(&self, holds: &[HoldAnswer]) {
        self.record_expired(holds);
        if holds.iter().any(|hold| hold.outcome == HoldOutcome::Held) {
            self.held.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn record_settlement(&self, outcome: SettleOutcome) {
        let counter = match outcome {
            SettleOutcome::Settled => &self.settled,
            SettleOutcome::Released => &self.released,
            SettleOutcome::Already => &self.already,
            SettleOutcome::Late => &self.late,
            SettleOutcome::Queued => &self.queued,
            SettleOutcome::Unknown => &self.unknown,
            SettleOutcome::Renewed => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> HoldStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HoldStats {
            held: read(&self.held),
            settled: read(&self.settled),
            released: read(&self.released),
            expired: read(&self.expired),
            already: read(&self.already),
            late: read(&self.late),
            unknown: read(&self.unknown),
            queued: read(&self.queued),
            waiting: 0,
        }
    }
}
