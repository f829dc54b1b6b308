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
    /// Of at least one value.
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

/// What a ratio is meant to reach.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// Within `ABOUT` of it, or better (lower).
    About(f64),
    /// At least this, or below it by no more than `ABOUT`.
    Nearly(f64),
    /// This and nothing else, in every round.
    Exactly(f64),
}

/// How far off a target that says "about" is still reached.
pub const ABOUT: f64 = 1.15;
/// Ratios up to this are noise unless repeated.
const FINE: f64 = 1.3;

impl Target {
    /// By the median, unless every round counts.
    pub fn is_reached(self, stat: &Stat) -> bool {
        match self {
            Self::AtLeast(target) => stat.median >= target,
            Self::AtMost(target) => stat.median <= target,
            Self::About(target) => stat.median <= target * ABOUT,
            Self::Nearly(target) => stat.median >= target / ABOUT,
            Self::Exactly(target) => stat.min == target && stat.max == target,
        }
    }

    /// Whether so small a ratio takes more rounds than a large one.
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
    /// The ratio with its spread; small ones with a digit more, since targets below 1 are that fine.
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

/// One question, and what came out.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    pub name: String,
    pub what: String,
    /// How often each contestant ran; some ran less often, and their text says so.
    pub rounds: usize,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    pub ratios: Vec<Ratio>,
}

/// A quantity, and how it is written.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Column {
    pub title: Cow<'static, str>,
    pub digits: usize,
}

impl Column {
    pub const fn new(title: &'static str, digits: usize) -> Self {
        Self { title: Cow::Borrowed(title), digits }
    }

    /// A figure with its spread: `83.1 (80.2..85.0)`.
    pub fn write(&self, stat: &Stat) -> String {
        let digits = self.digits;
        if stat.min == stat.max {
            return format!("{:.digits$}", stat.median);
        }
        format!("{:.digits$} ({:.digits$}..{:.digits$})", stat.median, stat.min, stat.max)
    }
}
