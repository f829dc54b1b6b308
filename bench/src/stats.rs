//! Medians, spreads, ratios and targets.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Several values of one quantity.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Stat {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Stat {
    /// Computes the statistics of at least one value.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            (values[middle - 1] + values[middle]) / 2.0
        } else {
            values[middle]
        };
        Self { median, min: values[0], max: values[values.len() - 1] }
    }
}

/// The target of a ratio.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// Within a factor of `ABOUT`, or lower.
    About(f64),
    /// At least this, or lower by a factor of at most `ABOUT`.
    Nearly(f64),
    /// Exactly this, in every round.
    Exactly(f64),
}

/// Factor within which an *about* target is reached.
pub const ABOUT: f64 = 1.15;
/// Ratios up to this value need more rounds to stand out from noise.
const FINE: f64 = 1.3;

impl Target {
    /// Returns whether the target is reached: by the median, or in every round if it is exact.
    pub fn is_reached(self, stat: &Stat) -> bool {
        match self {
            Self::AtLeast(target) => stat.median >= target,
            Self::AtMost(target) => stat.median <= target,
            Self::About(target) => stat.median <= target * ABOUT,
            Self::Nearly(target) => stat.median >= target / ABOUT,
            Self::Exactly(target) => stat.min == target && stat.max == target,
        }
    }

    /// Returns whether the target is close enough to 1 to need more rounds.
    pub fn is_fine(self) -> bool {
        match self {
            Self::AtLeast(target) | Self::AtMost(target) | Self::About(target) | Self::Nearly(target) => {
                target <= FINE
            }
            Self::Exactly(_) => false,
        }
    }

    pub fn text(self) -> String {
        match self {
            Self::AtLeast(target) => format!(">= {target}"),
            Self::AtMost(target) => format!("<= {target}"),
            Self::About(target) => format!("about {target:.1}"),
            Self::Nearly(target) => format!("about {target}"),
            Self::Exactly(target) => format!("exactly {target}"),
        }
    }
}

/// One contestant against another in the same round, over all rounds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ratio {
    pub what: String,
    pub stat: Stat,
    pub target: Option<Target>,
}

impl Ratio {
    /// Formats the ratio with its spread; ratios below 1 have three decimals.
    pub fn text(&self) -> String {
        Column::new("ratio", if self.stat.median < 1.0 { 3 } else { 2 }).write(&self.stat)
    }
}

/// One contestant's figures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub contestant: String,
    pub cells: Vec<Option<Stat>>,
}

/// One scenario and its results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    pub name: String,
    pub what: String,
    /// Rounds per contestant; exceptions are described in the text.
    pub rounds: usize,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    pub ratios: Vec<Ratio>,
}

/// A quantity and its number of decimals.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Column {
    pub title: Cow<'static, str>,
    pub digits: usize,
}

impl Column {
    pub const fn new(title: &'static str, digits: usize) -> Self {
        Self { title: Cow::Borrowed(title), digits }
    }

    /// Formats a figure with its spread: `83.1 (80.2..85.0)`.
    pub fn write(&self, stat: &Stat) -> String {
        let digits = self.digits;
        if stat.min == stat.max {
            return format!("{:.digits$}", stat.median);
        }
        format!("{:.digits$} ({:.digits$}..{:.digits$})", stat.median, stat.min, stat.max)
    }
}
