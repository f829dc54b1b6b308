//! Redis CPU per decision when a thousand callers keep Redis or the client busy.

use std::time::Duration;

use anyhow::Result;

use super::{
    Bench, LOOPBACK, MILLISECOND,
    closed_loop::{self, Load},
    contestants::Kind,
    matrix::{Figures, take_turns},
    milliseconds,
    workload::{Algorithm, MANY_KEYS, Spread, Workload},
};
use crate::{
    progress::Progress,
    stats::{Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "saturation";

const CALLERS: usize = 1000;
const ROUND_TRIPS: [Duration; 2] = [LOOPBACK, MILLISECOND];
/// Longer than in the matrix, for accurate CPU times.
const TURN: Load =
    Load { callers: CALLERS, warm_up: Duration::from_millis(200), measured: Duration::from_millis(800) };
const TARGET: Target = Target::AtMost(0.6);

/// Fills the table.
pub async fn table(bench: &mut Bench, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, ROUND_TRIPS.len() * bench.effort.rounds * Kind::ALL.len());
    let workload = Workload::new(Algorithm::TokenBucket, Spread::ManyKeys);
    part.before("creating the keys");
    bench.observer.flush().await?;
    for contestant in bench.connect_all(LOOPBACK, workload).await? {
        closed_loop::prefill(&contestant, MANY_KEYS).await?;
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for round_trip in ROUND_TRIPS {
        let contestants = bench.connect_all(round_trip, workload).await?;
        let samples = take_turns(bench, &contestants, TURN, &part).await?;
        for (kind, samples) in Kind::ALL.iter().zip(&samples) {
            let contestant = format!("{}, {}", milliseconds(round_trip), kind.name());
            rows.push(Row { contestant, cells: Figures::of(kind.name(), samples).cells() });
        }
        for (peer, samples_of_peer) in Kind::ALL.iter().zip(&samples).take(2) {
            let rounds = samples[2].iter().zip(samples_of_peer);
            ratios.push(Ratio {
                what: format!(
                    "Redis CPU per decision, {}, sluicegate / {}",
                    milliseconds(round_trip),
                    peer.name()
                ),
                stat: Stat::of(rounds.map(|(ours, peer)| ours.redis_cpu_us / peer.redis_cpu_us)),
                target: Some(TARGET),
            });
        }
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!("{CALLERS} callers, 100,000 keys, token bucket"),
        rounds: bench.effort.rounds,
        columns: Figures::columns(),
        rows,
        ratios,
    })
}
