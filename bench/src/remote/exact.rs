//! Whether a limit of 10,000 admits exactly 10,000 requests.

use anyhow::Result;

use super::{CALLERS, HAND, OURS, bounds::EXACT, hand::Hand, keys::Keys, ours::Ours, run::Player};
use crate::{
    args::Effort,
    drive::{Work, drive},
    progress::Progress,
    server::{self, Server},
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "exact";
/// Requests to a limit that admits 10,000 of them.
const REQUESTS: u64 = 30_000;

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let names = [HAND, OURS];
    let progress = progress.begin(NAME, effort.rounds * names.len());
    let mut redis = server.connect().await?;
    let url = server.url();
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for name in names {
        let mut admitted = Vec::new();
        for round in 0..effort.rounds {
            progress.at(round, name);
            server::empty(&mut redis).await?;
            // a new limiter for each round, because the denial cache of the previous one still has the key
            let player = if name == HAND {
                Player::Hand(Hand::gcra(url, Keys::Hot, EXACT).await?)
            } else {
                Player::Ours(Ours::limit(url, Keys::Hot, EXACT.bucket()?).await?)
            };
            let sample = drive(&player, CALLERS, Work::Counted(REQUESTS), &mut redis).await?;
            admitted.push(sample.allowed as f64);
        }
        if name == OURS {
            ratios.push(Ratio {
                what: format!("admitted, {name} / the limit"),
                stat: Stat::of(admitted.iter().map(|admitted| admitted / EXACT.amount as f64)),
                target: Some(Target::Exactly(1.0)),
            });
        }
        rows.push(Row { contestant: name.to_owned(), cells: vec![Some(Stat::of(admitted))] });
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!("{REQUESTS} requests by 64 callers at one key whose limit is {}", EXACT.amount),
        rounds: effort.rounds,
        columns: vec![Column::new("admitted", 0)],
        rows,
        ratios,
    })
}
