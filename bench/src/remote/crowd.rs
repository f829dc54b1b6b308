//! One hot key with an increasing number of callers.

use anyhow::Result;

use super::{
    bounds::NEVER_REACHED,
    keys::Keys,
    ours::Ours,
    run::{Player, cells, columns, timed},
};
use crate::{
    args::Effort,
    progress::Progress,
    server::Server,
    stats::{Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "many-callers";
/// Numbers of callers.
const CALLERS: [usize; 6] = [1, 4, 16, 64, 256, 1000];
/// Minimum rate of the largest number of callers relative to the best of fewer.
const KEPT: Target = Target::AtLeast(0.8);

/// Returns the title of the row with the most callers.
pub fn most_callers() -> String {
    title(CALLERS[CALLERS.len() - 1])
}

fn title(callers: usize) -> String {
    if callers == 1 { "sluicegate, 1 caller".to_owned() } else { format!("sluicegate, {callers} callers") }
}

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let effort = effort.for_targets([Some(KEPT)]);
    let progress = progress.begin(NAME, effort.rounds * CALLERS.len());
    let ours = Player::Ours(Ours::limit(server.url(), Keys::Hot, NEVER_REACHED.bucket()?).await?);
    let mut redis = server.connect().await?;
    let mut samples = vec![Vec::new(); CALLERS.len()];
    for round in 0..effort.rounds {
        for (callers, samples) in CALLERS.into_iter().zip(&mut samples) {
            progress.at(round, &title(callers));
            samples.push(timed(&ours, callers, effort, &mut redis).await?);
        }
    }
    let (largest, smaller) = samples.split_last().expect("CALLERS is not empty");
    let kept = (0..effort.rounds).map(|round| {
        let best = smaller.iter().map(|samples| samples[round].rate).fold(f64::MIN_POSITIVE, f64::max);
        largest[round].rate / best
    });
    let ratios = vec![Ratio {
        what: "decisions/s, 1000 callers / the best of fewer".to_owned(),
        stat: Stat::of(kept),
        target: Some(KEPT),
    }];
    let row =
        |(callers, samples): (usize, &Vec<_>)| Row { contestant: title(callers), cells: cells(samples) };
    Ok(Table {
        name: NAME.to_owned(),
        what: "one key whose limit is never reached, and an increasing number of callers".to_owned(),
        rounds: effort.rounds,
        columns: columns(),
        rows: CALLERS.into_iter().zip(&samples).map(row).collect(),
        ratios,
    })
}
