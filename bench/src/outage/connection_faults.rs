//! Connections that are lost repeatedly while Redis is up.

use std::time::{Duration, Instant};

use anyhow::Result;
use sluicegate_testkit::proxy::{Mode, Proxy};

use super::{
    Bench, DEGRADED, LONGEST_DEGRADED,
    calls::{self, Load},
    fault::Fault,
    millis, ratio, unlimited, user,
};
use crate::{
    network::pacing::Arrivals,
    progress::Progress,
    stats::{Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "connection-faults";

/// Time of a turn, all of it with the fault.
const MEASURED: Duration = Duration::from_millis(2_400);

/// A row of the table.
struct Scenario {
    name: &'static str,
    fault: Fault,
    checks_per_second: f64,
    /// Target for the share of degraded decisions.
    target: Option<Target>,
}

const DROPPED_TARGET: Option<Target> = Some(Target::AtMost(0.15));
const FLAPPING_TARGET: Option<Target> = Some(Target::AtMost(0.6));

const SCENARIOS: [Scenario; 6] = [
    Scenario { name: "killed every 50 ms", fault: Fault::Killed, checks_per_second: 500.0, target: None },
    Scenario {
        name: "every tenth reply dropped, 80 checks/s",
        fault: Fault::DroppedReplies,
        // every tenth of these is less than ten connections per second
        checks_per_second: 80.0,
        target: DROPPED_TARGET,
    },
    Scenario {
        name: "every tenth reply dropped, 500 checks/s",
        fault: Fault::DroppedReplies,
        checks_per_second: 500.0,
        target: DROPPED_TARGET,
    },
    Scenario {
        name: "up 200 ms, silent 200 ms",
        fault: Fault::Flapping(Mode::Stall),
        checks_per_second: 500.0,
        target: FLAPPING_TARGET,
    },
    Scenario {
        name: "up 200 ms, connections reset 200 ms",
        fault: Fault::Flapping(Mode::Cut),
        checks_per_second: 500.0,
        target: FLAPPING_TARGET,
    },
    Scenario {
        name: "up 200 ms, connections refused 200 ms",
        fault: Fault::Flapping(Mode::Refuse),
        checks_per_second: 500.0,
        target: FLAPPING_TARGET,
    },
];

/// The figures of one turn.
struct Sample {
    degraded_percent: f64,
    longest_degraded: Duration,
}

/// Fills the table.
pub async fn table(bench: &Bench, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, bench.rounds * SCENARIOS.len());
    let mut samples = SCENARIOS.map(|_| Vec::new());
    for round in 0..bench.rounds {
        for (scenario, samples) in SCENARIOS.iter().zip(&mut samples) {
            part.at(round, scenario.name);
            samples.push(turn(bench, scenario, round).await?);
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for (scenario, samples) in SCENARIOS.iter().zip(&samples) {
        let stat = |read: fn(&Sample) -> f64| Stat::of(samples.iter().map(read));
        if let Some(target) = scenario.target {
            let what = format!("degraded decisions / decisions, {}", scenario.name);
            ratios.push(ratio(what, stat(|sample| sample.degraded_percent / 100.0), target));
        }
        rows.push(Row {
            contestant: scenario.name.to_owned(),
            cells: vec![
                Some(stat(|sample| sample.degraded_percent)),
                Some(stat(|sample| millis(sample.longest_degraded))),
            ],
        });
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "A fault that lasts for {} s; 500 checks/s unless stated otherwise, deadline 50 ms",
            MEASURED.as_secs_f64()
        ),
        rounds: bench.rounds,
        columns: vec![DEGRADED, LONGEST_DEGRADED],
        rows,
        ratios,
    })
}

async fn turn(bench: &Bench, scenario: &Scenario, round: usize) -> Result<Sample> {
    let proxy = Proxy::start(bench.server.addr());
    let limiter = unlimited(&proxy.url()).await?;
    let arrivals =
        Arrivals { per_second: scenario.checks_per_second, duration: MEASURED, seed: round as u64 };
    let load = Load { arrivals, labels: user(NAME)?, start: Instant::now() };
    let calls = scenario.fault.during(proxy, MEASURED, load.run(&limiter)).await?;
    Ok(Sample {
        degraded_percent: calls::degraded_percent(&calls),
        longest_degraded: calls::longest_degraded(&calls),
    })
}
