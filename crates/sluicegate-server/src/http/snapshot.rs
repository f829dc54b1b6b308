//! What a counter holds, as JSON that can be drawn.

use serde::{Deserialize, Serialize};
use sluicegate::{CounterSnapshot, Snapshot};
use sluicegate_core::snapshot::Span as Charged;

/// A counter at one moment. All times are microseconds of the store's clock.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SnapshotView {
    /// When.
    pub at_us: u64,
    /// What counts then.
    #[serde(flatten)]
    pub shape: Shape,
}

/// What counts, by how it is counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Shape {
    /// What was charged in the window counts in full until its end.
    FixedWindow {
        /// The window.
        window: Span,
    },
    /// Each charge counts until it leaves.
    SlidingLog {
        /// The newest ones that count, oldest first.
        charges: Vec<Span>,
        /// What older ones, that are not listed, count.
        older_units: u64,
    },
    /// Of the window before, less counts as time passes.
    SlidingCounter {
        /// The window before.
        previous: Span,
        /// The window under way.
        current: Span,
        /// When nothing counts any more; 0 when nothing does.
        ends_us: u64,
    },
    /// It drains all the time.
    TokenBucket {
        /// What is in it, with fractions.
        level: f64,
        /// How much drains in a second.
        drains_per_second: f64,
    },
}

/// Units that were charged in some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its beginning, or when they were charged.
    pub from_us: u64,
    /// Its end, or when they stop counting.
    pub until_us: u64,
    /// How many.
    pub units: u64,
}

impl SnapshotView {
    /// A counter of which `used` units count.
    pub(super) fn new(inspected: CounterSnapshot, used: u64) -> Self {
        let shape = match inspected.snapshot {
            Snapshot::FixedWindow(window) => Shape::FixedWindow { window: window.into() },
            Snapshot::SlidingLog(charges) => {
                let listed = charges.iter().map(|charge| charge.units).fold(0, u64::saturating_add);
                Shape::SlidingLog {
                    charges: charges.into_iter().map(Span::from).collect(),
                    older_units: used.saturating_sub(listed),
                }
            }
            Snapshot::SlidingCounter { previous, current, ends_us } => {
                Shape::SlidingCounter { previous: previous.into(), current: current.into(), ends_us }
            }
            Snapshot::TokenBucket(level) => Shape::TokenBucket {
                level: level.whole as f64 + level.part as f64 / level.rate.micros as f64,
                drains_per_second: level.rate.units as f64 * 1e6 / level.rate.micros as f64,
            },
        };
        Self { at_us: inspected.at.as_micros(), shape }
    }
}

impl From<Charged> for Span {
    fn from(Charged { from_us, until_us, units }: Charged) -> Self {
        Self { from_us, until_us, units }
    }
}
