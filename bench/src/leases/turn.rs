//! One turn of a contestant in this process, and the columns of its figures.

use anyhow::{Result, ensure};
use redis::aio::MultiplexedConnection;

use super::contestants::Player;
use crate::{
    drive::{self, Work, drive},
    remote::run,
    stats::{Column, Ratio, Row, Stat, Target},
};

/// The size of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub callers: usize,
    /// Decisions that are not measured.
    pub warm_up: u64,
    pub decisions: u64,
}

/// The figures of one turn.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub figures: drive::Sample,
    /// The part of the decisions that was made by leases.
    pub leased: f64,
}

impl Turn {
    /// Measures decisions, all of which must be allowed. A hot key is not the one of the warm-up.
    pub async fn run(
        &self,
        player: &Player,
        keys: TurnKeys,
        redis: &mut MultiplexedConnection,
    ) -> Result<Sample> {
        drive(player, self.callers, Work::Counted(self.warm_up), redis).await?;
        let player = match keys {
            TurnKeys::NewKey => player.with_new_key(),
            TurnKeys::Same => player.clone(),
        };
        let before = player.leased().await;
        let figures = drive(&player, self.callers, Work::Counted(self.decisions), redis).await?;
        let leased = (player.leased().await - before) as f64 / figures.decisions as f64;
        ensure!(figures.allowed == figures.decisions, "a limit above the demand was reached");
        Ok(Sample { figures, leased })
    }
}

/// The keys of a turn.
#[derive(Clone, Copy, Debug)]
pub enum TurnKeys {
    NewKey,
    Same,
}

/// Returns the columns of every turn, with more digits for the small figures of leases.
pub fn columns() -> Vec<Column> {
    let digits_of = |title: &str, digits| match title {
        run::REDIS_CPU => 3,
        run::SCRIPT_CALLS => 4,
        _ => digits,
    };
    let mut columns: Vec<_> = run::columns()
        .into_iter()
        .map(|column| Column { digits: digits_of(&column.title, column.digits), ..column })
        .collect();
    columns.push(Column::new("decided by leases, %", 1));
    columns
}

/// Returns the row of a contestant.
pub fn row(contestant: String, samples: &[Sample]) -> Row {
    let figures: Vec<_> = samples.iter().map(|sample| sample.figures).collect();
    let mut cells = run::cells(&figures);
    cells.push(Some(Stat::of(samples.iter().map(|sample| sample.leased * 100.0))));
    Row { contestant, cells }
}

/// Returns a ratio of two contestants, round by round.
pub fn ratio(
    what: impl Into<String>,
    over: &[Sample],
    under: &[Sample],
    read: fn(&drive::Sample) -> f64,
    target: Option<Target>,
) -> Ratio {
    let rounds = over.iter().zip(under);
    let stat = Stat::of(rounds.map(|(over, under)| read(&over.figures) / read(&under.figures)));
    Ratio { what: what.into(), stat, target }
}
