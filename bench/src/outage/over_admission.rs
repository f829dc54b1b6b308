//! How far a limit is exceeded while connections are lost repeatedly.

use std::time::Duration;

use anyhow::Result;
use sluicegate::Options;
use sluicegate_testkit::proxy::{Mode, Proxy};

use super::{
    Bench,
    fault::Fault,
    policies::{self, ByPolicy, CHECKS_PER_SECOND, LIMIT, Sample},
};
use crate::{
    progress::Progress,
    stats::{Column, Row, Stat, Table},
};

/// The table's name.
pub const NAME: &str = "over-admission";

/// Time of a turn, all of it with the fault.
const MEASURED: Duration = Duration::from_millis(2_400);

const FAULTS: [(&str, Fault); 4] = [
    ("killed every 50 ms", Fault::Killed),
    ("up 200 ms, silent 200 ms", Fault::Flapping(Mode::Stall)),
    ("up 200 ms, connections reset 200 ms", Fault::Flapping(Mode::Cut)),
    ("up 200 ms, connections refused 200 ms", Fault::Flapping(Mode::Refuse)),
];

/// Fills the table.
pub async fn table(bench: &Bench, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, bench.rounds * FAULTS.len());
    let mut samples = FAULTS.map(|_| Vec::new());
    for round in 0..bench.rounds {
        for ((name, fault), samples) in FAULTS.into_iter().zip(&mut samples) {
            part.at(round, name);
            samples.push(turn(bench, fault, round).await?);
        }
    }
    let rows = FAULTS.iter().zip(&samples).map(|((name, _), samples)| {
        let stat = |read: fn(&ByPolicy<Sample>) -> f64| Some(Stat::of(samples.iter().map(read)));
        let cells = vec![
            stat(|sample| sample.open.over_admitted_percent),
            stat(|sample| sample.local.over_admitted_percent),
        ];
        Row { contestant: (*name).to_owned(), cells }
    });
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "A fault that lasts for {} s; {CHECKS_PER_SECOND} checks/s with each policy on a sliding log of {LIMIT} per second, deadline \
             50 ms",
            MEASURED.as_secs_f64()
        ),
        rounds: bench.rounds,
        columns: vec![Column::new("`open`: over-admitted %", 1), Column::new("`local`: over-admitted %", 1)],
        rows: rows.collect(),
        ratios: Vec::new(),
    })
}

async fn turn(bench: &Bench, fault: Fault, round: usize) -> Result<ByPolicy<Sample>> {
    bench.flush().await?;
    let proxy = Proxy::start(bench.server.addr());
    let limiter = policies::connect(&proxy.url(), Options::default().deadline).await?;
    policies::warm_up(&limiter).await?;
    fault.during(proxy, MEASURED, policies::measure(&limiter, MEASURED, round)).await
}
