//! One caller at a time: the latency of a decision against that of a `PING` over the same connection path.

use std::time::Duration;

use anyhow::Result;

use super::{
    Bench, LOOPBACK, MILLISECOND,
    contestants::{Connected, Kind, Ping},
    matrix::{Figures, take_turns},
    milliseconds,
    workload::{Algorithm, Spread, Workload},
};
use crate::{
    progress::Progress,
    stats::{Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "one-caller";

const ROUND_TRIPS: [Duration; 5] =
    [LOOPBACK, Duration::from_micros(200), MILLISECOND, Duration::from_millis(2), Duration::from_millis(5)];
const QUICK_ROUND_TRIPS: [Duration; 2] = [LOOPBACK, MILLISECOND];

/// Fills the table.
pub async fn table(bench: &mut Bench, progress: &Progress) -> Result<Table> {
    let round_trips = if bench.effort.is_quick { &QUICK_ROUND_TRIPS[..] } else { &ROUND_TRIPS[..] };
    let part = progress.begin(NAME, round_trips.len() * bench.effort.rounds * (Kind::ALL.len() + 1));
    let workload = Workload::new(Algorithm::TokenBucket, Spread::OneKey);
    bench.observer.flush().await?;
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for &round_trip in round_trips {
        let mut contestants = bench.connect_all(round_trip, workload).await?;
        contestants.push(Connected::Ping(Ping::connect(bench.url(round_trip)?).await?));
        let samples = take_turns(bench, &contestants, bench.effort.load(1, round_trip), &part).await?;
        let names = Kind::ALL.map(Kind::name).into_iter().chain(["PING"]);
        for (name, samples) in names.zip(&samples) {
            let contestant = format!("{}, {name}", milliseconds(round_trip));
            rows.push(Row { contestant, cells: Figures::of(name, samples).cells() });
        }
        let rounds = samples[2].iter().zip(&samples[3]);
        ratios.push(Ratio {
            what: format!("p50, {}, sluicegate / PING", milliseconds(round_trip)),
            stat: Stat::of(rounds.map(|(ours, ping)| ours.p50_us / ping.p50_us)),
            // On loopback the script itself takes as long as the round trip.
            target: (round_trip > LOOPBACK).then_some(Target::About(1.0)),
        });
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: "one caller, one key, token bucket, against PING on a plain socket".to_owned(),
        rounds: bench.effort.rounds,
        columns: Figures::columns(),
        rows,
        ratios,
    })
}
