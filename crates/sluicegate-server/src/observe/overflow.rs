//! Detects that the memory store is full: new keys share overflow counters, and are denied together once these are exhausted.
//!
//! The number of decisions on overflow counters is sampled once a second, so that a decision has no additional cost. The log has one
//! line at the start and one at the end, which is delayed by [`QUIET_SECONDS`]: a store at its bound alternates between full and not.

use parking_lot::Mutex;
use sluicegate::stats::StoreStats;

/// Number of seconds without a decision on an overflow counter after which the store is no longer full.
pub const QUIET_SECONDS: u32 = 60;

/// Whether the memory store is full.
#[derive(Default)]
pub(super) struct OverflowMonitor(Mutex<OverflowState>);

#[derive(Default)]
struct OverflowState {
    /// The number of decisions on overflow counters at the last sample.
    decisions: u64,
    period: Option<OverflowPeriod>,
}

/// A period in which the store is full.
struct OverflowPeriod {
    /// The number of decisions on overflow counters before it.
    decisions_before: u64,
    /// The number of seconds since the last of these decisions.
    quiet_seconds: u32,
}

impl OverflowMonitor {
    /// Whether new keys share overflow counters, or did within the last [`QUIET_SECONDS`].
    pub(super) fn is_full(&self) -> bool {
        self.0.lock().period.is_some()
    }

    /// Records the state of the store, once a second. Logs a line when it becomes full and when it is no longer full.
    pub(super) fn record(&self, store: &StoreStats) {
        let StoreStats { bytes, max_bytes, overflow_decisions, .. } = store;
        let mut state = self.0.lock();
        let is_overflowing = *overflow_decisions > state.decisions;
        match &mut state.period {
            None if is_overflowing => {
                tracing::warn!(
                    "memory store full ({bytes} of {max_bytes} bytes used): new keys share overflow counters and may be \
                     denied; raise store.max_memory, or use shorter windows or fewer labels in per"
                );
                let decisions_before = state.decisions;
                state.period = Some(OverflowPeriod { decisions_before, quiet_seconds: 0 });
            }
            Some(period) if is_overflowing => period.quiet_seconds = 0,
            Some(period) => {
                period.quiet_seconds += 1;
                if period.quiet_seconds == QUIET_SECONDS {
                    let decisions = overflow_decisions - period.decisions_before;
                    tracing::info!(
                        "memory store no longer full ({bytes} of {max_bytes} bytes used): no overflow counter used for {QUIET_SECONDS} s, \
                         after {decisions} decisions on them"
                    );
                    state.period = None;
                }
            }
            None => {}
        }
        state.decisions = *overflow_decisions;
    }
}
