//! A hot key with a network round trip to Redis.

use std::time::Duration;

use anyhow::Result;

use super::{
    BOUND, Effort, WITH, WITHOUT,
    contestants::{Keys, Ours, Player},
    leased,
    turn::{self, Sample, Turn, TurnKeys, ratio},
};
use crate::{
    network::{ProxyProcess, milliseconds},
    progress::Progress,
    server::Server,
    stats::{Ratio, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "round-trips";

const CALLERS: usize = 256;
/// Below the limit.
const LEASED_DECISIONS: u64 = 900_000;
/// Fewer, because every decision takes a round trip.
const STORE_DECISIONS: u64 = 100_000;
/// Lets the limiter adapt to the round trip.
const WARM_UP: u64 = 10_000;
const P50_US: f64 = 100.0;

/// A round trip, and the target of the ratio of rates.
const POINTS: [(Duration, Option<Target>); 3] = [
    (Duration::from_millis(1), Some(Target::AtLeast(4.0))),
    (Duration::from_millis(2), None),
    (Duration::from_millis(5), Some(Target::AtLeast(10.0))),
];

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let mut proxy = ProxyProcess::start(&server.addr().to_string())?;
    let (url, bucket) = (proxy.url().to_owned(), BOUND.bucket()?);
    let key = || Keys::One("hot".into());
    let contestants = [
        (WITHOUT, Player::Ours(Ours::connect(&url, bucket, key()).await?), STORE_DECISIONS),
        (WITH, Player::Ours(Ours::connect(&url, leased(bucket, BOUND)?, key()).await?), LEASED_DECISIONS),
    ];
    let part = progress.begin(NAME, effort.rounds * POINTS.len() * contestants.len());
    let mut redis = server.connect().await?;
    let mut samples: [[Vec<Sample>; 2]; 3] = Default::default();
    for round in 0..effort.rounds {
        for (point, (round_trip, _)) in POINTS.into_iter().enumerate() {
            proxy.set_round_trip(round_trip)?;
            for place in effort.rotated(contestants.len(), round) {
                let (name, player, decisions) = &contestants[place];
                part.at(round, &format!("{}, {name}", milliseconds(round_trip)));
                let turn = Turn { callers: CALLERS, warm_up: WARM_UP, decisions: *decisions };
                samples[point][place].push(turn.run(player, TurnKeys::NewKey, &mut redis).await?);
            }
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for ((round_trip, target), [without, with]) in POINTS.into_iter().zip(&samples) {
        let trip = milliseconds(round_trip);
        for ((name, ..), samples) in contestants.iter().zip([without, with]) {
            rows.push(turn::row(format!("{trip}, {name}"), samples));
        }
        let what = format!("decisions/s at {trip}, lease 1 % / no lease");
        ratios.push(ratio(what, with, without, |it| it.rate, target));
        ratios.push(Ratio {
            what: format!("p50 at {trip}, lease 1 % / 0.1 ms"),
            stat: Stat::of(with.iter().map(|sample| sample.figures.p50_us / P50_US)),
            target: Some(Target::AtMost(1.0)),
        });
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "one key behind a proxy that delays each direction by half of the round trip, token bucket of 1,000,000 per 10 s, {CALLERS} \
             callers, all allowed. A turn is {LEASED_DECISIONS} decisions on a new key with leases and {STORE_DECISIONS} without"
        ),
        rounds: effort.rounds,
        columns: turn::columns(),
        rows,
        ratios,
    })
}
