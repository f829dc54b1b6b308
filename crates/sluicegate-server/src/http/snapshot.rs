//! The state of a counter as JSON, for display.

use serde::{Deserialize, Serialize};
use sluicegate::store::{CounterSnapshot, Snapshot};
use sluicegate_core::snapshot::Span;

/// The state of a counter at one time. All times are microseconds on the store's clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SnapshotView {
    /// The time of the snapshot.
    pub at_us: u64,
    /// The state at that time.
    #[serde(flatten)]
    pub state: SnapshotState,
}

/// The state of a counter, by algorithm.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum SnapshotState {
    /// The charges of the window count in full until its end.
    FixedWindow {
        /// The window.
        window: SpanView,
    },
    /// Each charge counts until it leaves the window.
    SlidingLog {
        /// The newest charges that count, oldest first.
        charges: Vec<SpanView>,
        /// The units of older charges, which are not listed.
        older_units: u64,
    },
    /// The weight of the previous window decreases with time.
    SlidingCounter {
        /// The previous window.
        previous: SpanView,
        /// The current window.
        current: SpanView,
        /// The time at which the counter is empty; 0 if it is empty now.
        ends_us: u64,
    },
    /// The level drains continuously.
    TokenBucket {
        /// The level, with fractions.
        level: f64,
        /// Units drained per second.
        drains_per_second: f64,
    },
    /// The units of live holds, and when the first and the last of them expire.
    Concurrency {
        /// The first and the last expiry.
        live: SpanView,
    },
}

/// Units charged in a time span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanView {
    /// The start of the span, or the time of the charge.
    pub from_us: u64,
    /// The end of the span, or the time from which the units no longer count.
    pub until_us: u64,
    /// The units.
    pub units: u64,
}

impl SnapshotView {
    /// Converts the snapshot of a counter whose usage is `used`.
    pub(super) fn new(inspected: CounterSnapshot, used: u64) -> Self {
        let state = match inspected.snapshot {
            Snapshot::FixedWindow(window) => SnapshotState::FixedWindow { window: window.into() },
            Snapshot::SlidingLog(charges) => {
                let listed = charges.iter().map(|charge| charge.units).fold(0, u64::saturating_add);
                SnapshotState::SlidingLog {
                    charges: charges.into_iter().map(SpanView::from).collect(),
                    older_units: used.saturating_sub(listed),
                }
            }
            Snapshot::SlidingCounter { previous, current, ends_us } => {
                SnapshotState::SlidingCounter { previous: previous.into(), current: current.into(), ends_us }
            }
            Snapshot::TokenBucket(level) => SnapshotState::TokenBucket {
                level: level.whole as f64 + level.part as f64 / level.rate.micros as f64,
                drains_per_second: level.rate.units as f64 * 1e6 / level.rate.micros as f64,
            },
            Snapshot::Concurrency(live) => SnapshotState::Concurrency { live: live.into() },
        };
        Self { at_us: inspected.at.as_micros(), state }
    }
}

impl From<Span> for SpanView {
    fn from(Span { from_us, until_us, units }: Span) -> Self {
        Self { from_us, until_us, units }
    }
}
