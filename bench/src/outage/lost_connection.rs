//! One connection that is lost at different ages, while Redis is up.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use sluicegate_testkit::proxy::Proxy;

use super::{
    Bench, DEGRADED, LONGEST_DEGRADED,
    calls::{self, Call, Load},
    millis, ratio, unlimited, user,
};
use crate::{
    network::pacing::Arrivals,
    progress::Progress,
    stats::{Column, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "lost-connection";

const AGES: [Duration; 3] =
    [Duration::from_millis(50), Duration::from_millis(300), Duration::from_millis(1_200)];
const CHECKS_PER_SECOND: f64 = 2_000.0;
/// Several calls are in flight when the connection is lost.
const DELAY_EACH_WAY: Duration = Duration::from_millis(1);
/// The measured time after the loss.
const AFTER: Duration = Duration::from_millis(1_500);
/// The time until the proxy has reset the connection. Checks that are sent later are not in flight.
const RESET_TIME: Duration = Duration::from_millis(1);

/// The figures of one turn.
struct Sample {
    degraded: usize,
    degraded_not_in_flight: usize,
    degraded_percent: f64,
    longest_degraded: Duration,
}

/// Fills the table.
pub async fn table(bench: &Bench, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, bench.rounds * AGES.len());
    let mut samples = AGES.map(|_| Vec::new());
    for round in 0..bench.rounds {
        for (age, samples) in AGES.into_iter().zip(&mut samples) {
            part.at(round, &format!("age {age:?}"));
            samples.push(turn(bench, age, round).await?);
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for (age, samples) in AGES.into_iter().zip(&samples) {
        let stat = |read: fn(&Sample) -> f64| Stat::of(samples.iter().map(read));
        let age = format!("age {} s", age.as_secs_f64());
        let degraded_not_in_flight = stat(|sample| sample.degraded_not_in_flight as f64);
        let what = format!("degraded checks that were not in flight, {age}");
        ratios.push(ratio(what, degraded_not_in_flight, Target::Exactly(0.0)));
        rows.push(Row {
            contestant: age,
            cells: vec![
                Some(stat(|sample| sample.degraded as f64)),
                Some(degraded_not_in_flight),
                Some(stat(|sample| sample.degraded_percent)),
                Some(stat(|sample| millis(sample.longest_degraded))),
            ],
        });
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "The connection is reset once, at this age. {CHECKS_PER_SECOND} checks/s, a proxy that delays requests and replies by 1 ms \
             each, deadline 50 ms. The share of degraded decisions is that of the {} s after the loss",
            AFTER.as_secs_f64()
        ),
        rounds: bench.rounds,
        columns: vec![
            Column::new("degraded checks", 0),
            Column::new("of these, not in flight", 0),
            DEGRADED,
            LONGEST_DEGRADED,
        ],
        rows,
        ratios,
    })
}

async fn turn(bench: &Bench, age: Duration, round: usize) -> Result<Sample> {
    let proxy = Proxy::start(bench.server.addr());
    proxy.delay(DELAY_EACH_WAY);
    let limiter = unlimited(&proxy.url()).await?;
    let start = Instant::now();
    let arrivals = Arrivals { per_second: CHECKS_PER_SECOND, duration: age + AFTER, seed: round as u64 };
    let load = Load { arrivals, labels: user(NAME)?, start };
    let fault = tokio::task::spawn_blocking(move || {
        thread::sleep(age.saturating_sub(start.elapsed()));
        let lost = start.elapsed();
        proxy.reset_connections();
        (proxy, lost)
    });
    let calls = load.run(&limiter).await?;
    let (_proxy, lost) = fault.await?;
    let degraded = calls.iter().filter(|call| call.is_degraded);
    let after: Vec<Call> = calls.iter().copied().filter(|call| call.answered >= lost).collect();
    Ok(Sample {
        degraded: degraded.clone().count(),
        degraded_not_in_flight: degraded.filter(|call| call.sent > lost + RESET_TIME).count(),
        degraded_percent: calls::degraded_percent(&after),
        longest_degraded: calls::longest_degraded(&calls),
    })
}
