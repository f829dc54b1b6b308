//! Runs a scenario: contestants interleaved, round after round, each round in another order.

use anyhow::{Context, Result};
use redis::aio::MultiplexedConnection;

use super::{hand::Hand, ours::Ours};
use crate::{
    args::{Args, Effort},
    drive::{Contestant, Sample, Work, drive},
    progress::Progress,
    server::{self, Server},
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// Somebody who takes part.
#[derive(Clone)]
pub enum Player {
    Hand(Hand),
    Ours(Ours),
}

impl Contestant for Player {
    async fn ask(&self, random: u64) -> Result<bool> {
        match self {
            Self::Hand(hand) => hand.ask(random).await,
            Self::Ours(ours) => ours.ask(random).await,
        }
    }
}

/// One table, before it is filled.
pub struct Scenario {
    pub name: &'static str,
    pub what: &'static str,
    pub callers: usize,
    pub players: Vec<(&'static str, Player)>,
    /// How many decisions each makes before the first round, so that keys are there.
    pub prefill: u64,
    pub compare: Vec<Compare>,
}

/// A ratio of two contestants.
pub struct Compare {
    what: &'static str,
    over: &'static str,
    under: &'static str,
    read: fn(&Sample) -> f64,
    target: Option<Target>,
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

    /// Round by round, so that what slows one round down slows both.
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

impl Scenario {
    /// Runs it.
    pub async fn run(
        mut self,
        args: &Args,
        effort: Effort,
        server: &Server,
        progress: &Progress,
    ) -> Result<Table> {
        if let Some(part) = &args.solo {
            self.players.retain(|(name, _)| name.contains(part));
            self.compare.clear();
            anyhow::ensure!(!self.players.is_empty(), "{}: nobody is called {part:?}", self.name);
        }
        let mut redis = server.connect().await?;
        server::empty(&mut redis).await?;
        for (name, player) in &self.players {
            progress.at(self.name, 0, &format!("{name}, first keys"));
            drive(player, self.callers, Work::Counted(self.prefill), &mut redis).await?;
        }
        let mut samples: Vec<_> = self.players.iter().map(|(name, _)| (*name, Vec::new())).collect();
        for round in 0..effort.rounds {
            for turn in 0..self.players.len() {
                let place = (turn + round) % self.players.len();
                let (name, player) = &self.players[place];
                progress.at(self.name, round, name);
                samples[place].1.push(timed(player, self.callers, effort, &mut redis).await?);
            }
        }
        let row = |(name, samples): &(&str, Vec<Sample>)| Row {
            contestant: (*name).to_owned(),
            cells: cells(samples),
        };
        Ok(Table {
            name: self.name.to_owned(),
            what: self.what.to_owned(),
            columns: columns(),
            rows: samples.iter().map(row).collect(),
            ratios: self.compare.iter().map(|compare| compare.ratio(&samples)).collect::<Result<_>>()?,
        })
    }
}

/// One measurement with a warm-up.
pub async fn timed(
    player: &Player,
    callers: usize,
    effort: Effort,
    redis: &mut MultiplexedConnection,
) -> Result<Sample> {
    let work = Work::Timed { warm_up: effort.warm_up, measured: effort.measured };
    drive(player, callers, work, redis).await
}

/// What is read off every run.
pub fn columns() -> Vec<Column> {
    vec![
        Column::new("k decisions/s", 1),
        Column::new("p50 us", 1),
        Column::new("p99 us", 1),
        Column::new("Redis CPU us", 2),
        Column::new("client CPU us", 2),
        Column::new("script calls", 3),
    ]
}

/// The columns' figures.
pub fn cells(samples: &[Sample]) -> Vec<Option<Stat>> {
    let reads: [fn(&Sample) -> f64; 6] = [
        |sample| sample.rate / 1e3,
        |sample| sample.p50_us,
        |sample| sample.p99_us,
        |sample| sample.redis_cpu_us,
        |sample| sample.client_cpu_us,
        |sample| sample.calls,
    ];
    reads.into_iter().map(|read| Some(Stat::of(samples.iter().map(read)))).collect()
}
