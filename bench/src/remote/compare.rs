//! Ratios of two contestants, round by round.

use anyhow::{Context, Result};

use crate::{
    drive::Sample,
    stats::{Ratio, Stat, Target},
};

/// A ratio of two contestants.
pub struct Compare {
    what: &'static str,
    over: &'static str,
    under: &'static str,
    read: fn(&Sample) -> f64,
    pub target: Option<Target>,
}

impl Compare {
    pub fn rate(over: &'static str, under: &'static str, target: Target) -> Self {
        Self { target: Some(target), ..Self::rate_without_target(over, under) }
    }

    pub fn rate_without_target(over: &'static str, under: &'static str) -> Self {
        Self { what: "decisions/s", over, under, read: |sample| sample.rate, target: None }
    }

    pub fn redis_cpu(over: &'static str, under: &'static str, target: Option<Target>) -> Self {
        Self { what: "Redis CPU per decision", over, under, read: |sample| sample.redis_cpu_us, target }
    }

    pub fn p50(over: &'static str, under: &'static str, target: Target) -> Self {
        Self { what: "p50", over, under, read: |sample| sample.p50_us, target: Some(target) }
    }

    /// Computed per round, so that a slow round affects both contestants equally.
    pub fn ratio(&self, samples: &[(&'static str, Vec<Sample>)]) -> Result<Ratio> {
        let of = |name| {
            let found = samples.iter().find(|(contestant, _)| *contestant == name);
            found.map(|(_, samples)| samples).with_context(|| format!("{name} did not take part"))
        };
        let rounds = of(self.over)?.iter().zip(of(self.under)?);
        let stat = Stat::of(rounds.map(|(over, under)| (self.read)(over) / (self.read)(under)));
        let what = format!("{}, {} / {}", self.what, self.over, self.under);
        Ok(Ratio { what, stat, target: self.target })
    }
}
