//! Counts holds by outcome.

use std::sync::atomic::{AtomicU64, Ordering};

use sluicegate_core::{HoldAnswer, HoldOutcome};

use super::{SettleOutcome, decide::TierDecisions};
use crate::stats::HoldStats;

/// Counts holds by outcome.
#[derive(Debug, Default)]
pub(super) struct HoldCounters {
    held: AtomicU64,
    releasing: AtomicU64,
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

    pub(super) fn record_hold(&self, decisions: &TierDecisions) {
        self.record_expired(&decisions.holds);
        let is_held = |hold: &HoldAnswer| hold.outcome == HoldOutcome::Held;
        if !decisions.holds.iter().any(is_held) {
            return;
        }
        self.held.fetch_add(1, Ordering::Relaxed);
        let releasing = decisions.tiers.iter().enumerate().filter(|(index, tier)| {
            let position = decisions.positions.as_ref().map_or(*index, |positions| positions[*index]);
            let releases = tier.policy.is_some_and(|limit| limit.releases_expired());
            releases && decisions.holds.get(position).is_some_and(is_held)
        });
        self.releasing.fetch_add(releasing.count() as u64, Ordering::Relaxed);
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
            releasing: read(&self.releasing),
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
