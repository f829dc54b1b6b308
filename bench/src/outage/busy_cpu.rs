//! Late answers while the CPU is busy.

use std::time::Duration;

use anyhow::Result;

use super::{
    Bench, DEGRADED,
    cpu_load::CpuLoad,
    policies::{self, ByPolicy, CHECKS_PER_SECOND, LIMIT, OVER_ADMITTED, Sample},
};
use crate::{
    progress::Progress,
    stats::{Row, Stat, Table},
};

/// The prefix of the tables' names.
pub const NAME: &str = "busy-cpu";

/// At 400 percent, four threads spin on each core.
const LOADS_PERCENT: [u32; 5] = [25, 50, 80, 100, 400];
const DEADLINES_MS: [u64; 4] = [10, 20, 50, 100];
/// More rounds would take too long.
const MAX_ROUNDS: usize = 3;
const MEASURED: Duration = Duration::from_secs(2);

/// A load and a deadline.
#[derive(Clone, Copy, Debug)]
struct Situation {
    load_percent: u32,
    deadline: Duration,
}

impl Situation {
    fn all() -> Vec<Self> {
        let deadlines = DEADLINES_MS.map(Duration::from_millis);
        let with_load =
            |load_percent| deadlines.into_iter().map(move |deadline| Self { load_percent, deadline });
        LOADS_PERCENT.into_iter().flat_map(with_load).collect()
    }

    fn name(self) -> String {
        format!("load {} %, deadline {} ms", self.load_percent, self.deadline.as_millis())
    }

    async fn turn(self, bench: &Bench, round: usize) -> Result<ByPolicy<Sample>> {
        bench.flush().await?;
        let limiter = policies::connect(bench.server.url(), self.deadline).await?;
        let _load = CpuLoad::start(self.load_percent)?;
        policies::warm_up(&limiter).await?;
        policies::measure(&limiter, MEASURED, round).await
    }
}

/// Fills one table for each policy.
pub async fn tables(bench: &Bench, progress: &Progress) -> Result<[Table; 2]> {
    let rounds = bench.rounds.min(MAX_ROUNDS);
    let situations = Situation::all();
    let part = progress.begin(NAME, rounds * situations.len());
    let mut samples = vec![Vec::new(); situations.len()];
    for round in 0..rounds {
        for (situation, samples) in situations.iter().zip(&mut samples) {
            part.at(round, &situation.name());
            samples.push(situation.turn(bench, round).await?);
        }
    }
    let table = |policy: &str, read: fn(&ByPolicy<Sample>) -> Sample| Table {
        name: format!("{NAME}-{policy}"),
        what: format!(
            "Failure policy `{policy}`, by background load of all cores and deadline. {CHECKS_PER_SECOND} checks/s on a sliding log of \
             {LIMIT} per second; as many checks with the other policy run at the same time"
        ),
        rounds,
        columns: vec![DEGRADED, OVER_ADMITTED],
        rows: situations
            .iter()
            .zip(&samples)
            .map(|(situation, samples)| {
                let stat = |value: fn(Sample) -> f64| {
                    Some(Stat::of(samples.iter().map(|sample| value(read(sample)))))
                };
                let cells =
                    vec![stat(|sample| sample.degraded_percent), stat(|sample| sample.over_admitted_percent)];
                Row { contestant: situation.name(), cells }
            })
            .collect(),
        ratios: Vec::new(),
    };
    Ok([table("open", |sample| sample.open), table("local", |sample| sample.local)])
}
