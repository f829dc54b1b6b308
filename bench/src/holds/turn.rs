//! One turn of a contestant, and the columns of its figures.

use std::time::Duration;

use anyhow::{Result, ensure};
use redis::aio::MultiplexedConnection;

use crate::{
    drive::{Contestant, Sample, Work, drive},
    leases::Effort,
    remote::run,
    stats::{Column, Ratio, Row, Stat, Target},
};

/// Measures operations for a time, all of which must be allowed.
pub async fn turn(
    player: &impl Contestant,
    callers: usize,
    effort: Effort,
    redis: &mut MultiplexedConnection,
) -> Result<Sample> {
    const MEASURED: Duration = Duration::from_secs(1);
    const QUICK: Duration = Duration::from_millis(500);
    // lets the limiter adapt to the round trip
    const WARM_UP: Duration = Duration::from_millis(200);
    let measured = if effort.is_quick { QUICK } else { MEASURED };
    let sample = drive(player, callers, Work::Timed { warm_up: WARM_UP, measured }, redis).await?;
    ensure!(sample.allowed == sample.decisions, "a limit above the demand was reached");
    Ok(sample)
}

/// Returns the columns of every turn, whose unit is an operation.
pub fn columns() -> Vec<Column> {
    let mut columns = run::columns();
    columns[0] = Column::new("k operations/s", 1);
    columns
}

/// Returns the row of a contestant.
pub fn row(contestant: String, samples: &[Sample]) -> Row {
    Row { contestant, cells: run::cells(samples) }
}

/// Returns a ratio of two contestants, round by round.
pub fn ratio(
    what: impl Into<String>,
    over: &[Sample],
    under: &[Sample],
    read: fn(&Sample) -> f64,
    target: Option<Target>,
) -> Ratio {
    let stat = Stat::of(over.iter().zip(under).map(|(over, under)| read(over) / read(under)));
    Ratio { what: what.into(), stat, target }
}
