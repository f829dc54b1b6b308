//! Runs a scenario: contestants interleaved, round after round, each round in another order.

use anyhow::Result;
use redis::aio::MultiplexedConnection;

#[cfg(feature = "limitador-redis")]
use super::limitador::Limitador;
use super::{batch::Batches, compare::Compare, hand::Hand, ours::Ours, peer::Peer};
use crate::{
    args::{Args, Effort},
    drive::{Contestant, Sample, Work, drive},
    progress::Progress,
    server::{self, Server},
    stats::{Column, Row, Stat, Table},
};

/// A contestant in this process.
#[derive(Clone)]
pub enum Player {
    Hand(Hand),
    Ours(Ours),
    Batches(Batches),
    #[cfg(feature = "limitador-redis")]
    Limitador(Limitador),
}

impl Contestant for Player {
    async fn decide(&self, random: u64) -> Result<bool> {
        match self {
            Self::Hand(hand) => hand.decide(random).await,
            Self::Ours(ours) => ours.decide(random).await,
            Self::Batches(batches) => batches.decide(random).await,
            #[cfg(feature = "limitador-redis")]
            Self::Limitador(limitador) => limitador.decide(random).await,
        }
    }
}

/// A contestant in this process or in another one.
pub enum Entrant {
    InProcess(Player),
    Process(Peer),
}

impl Entrant {
    async fn fill(&self, callers: usize, decisions: u64, redis: &mut MultiplexedConnection) -> Result<()> {
        match self {
            Self::InProcess(player) => {
                drive(player, callers, Work::Counted(decisions), redis).await?;
            }
            Self::Process(peer) if decisions > 0 => peer.fill(callers, redis).await?,
            Self::Process(_) => {}
        }
        Ok(())
    }

    async fn timed(
        &self,
        callers: usize,
        effort: Effort,
        redis: &mut MultiplexedConnection,
    ) -> Result<Sample> {
        match self {
            Self::InProcess(player) => timed(player, callers, effort, redis).await,
            Self::Process(peer) => peer.timed(callers, effort, redis).await,
        }
    }
}

/// One table, before it is filled.
pub struct Scenario {
    pub name: &'static str,
    pub what: String,
    pub callers: usize,
    pub entrants: Vec<(&'static str, Entrant)>,
    /// Decisions per contestant before the first round, so that keys exist.
    pub prefill: u64,
    pub compare: Vec<Compare>,
}

impl Scenario {
    /// Runs the scenario with as many rounds as its targets need.
    pub async fn run(
        mut self,
        args: &Args,
        effort: Effort,
        server: &Server,
        progress: &Progress,
    ) -> Result<Table> {
        let effort = effort.for_targets(self.compare.iter().map(|compare| compare.target));
        if let Some(part) = &args.solo {
            self.entrants.retain(|(name, _)| name.contains(part));
            self.compare.clear();
            anyhow::ensure!(!self.entrants.is_empty(), "{}: no contestant matches {part:?}", self.name);
        }
        let progress = progress.begin(self.name, effort.rounds * self.entrants.len());
        let mut redis = server.connect().await?;
        server::empty(&mut redis).await?;
        for (name, entrant) in &self.entrants {
            progress.before(&format!("{name}, first keys"));
            entrant.fill(self.callers, self.prefill, &mut redis).await?;
        }
        let mut samples: Vec<_> = self.entrants.iter().map(|(name, _)| (*name, Vec::new())).collect();
        for round in 0..effort.rounds {
            for turn in 0..self.entrants.len() {
                let place = (turn + round) % self.entrants.len();
                let (name, entrant) = &self.entrants[place];
                progress.at(round, name);
                samples[place].1.push(entrant.timed(self.callers, effort, &mut redis).await?);
            }
        }
        let row = |(name, samples): &(&str, Vec<Sample>)| Row {
            contestant: (*name).to_owned(),
            cells: cells(samples),
        };
        Ok(Table {
            name: self.name.to_owned(),
            what: self.what,
            rounds: effort.rounds,
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

/// Returns the columns of every run.
pub fn columns() -> Vec<Column> {
    vec![
        Column::new("k decisions/s", 1),
        Column::new("p50 us", 1),
        Column::new("p99 us", 1),
        Column::new(REDIS_CPU, 2),
        Column::new(CLIENT_CPU, 2),
        Column::new(SCRIPT_CALLS, 3),
    ]
}

/// Titles of the columns that the capacity page reads.
pub const REDIS_CPU: &str = "Redis CPU us";
pub const CLIENT_CPU: &str = "client CPU us";
pub const SCRIPT_CALLS: &str = "script calls";

/// Returns the figures of the columns.
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
