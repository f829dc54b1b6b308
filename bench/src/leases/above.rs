//! Four client processes that request more than the limit: how much is admitted.

use std::time::Duration;

use anyhow::Result;
use sluicegate_testkit::oracle::{Admitted, window_violation};

use super::{
    Effort, LEASE_PART, WITH, WITHOUT,
    processes::{CALLERS, Demand, PROCESSES, Turn, turn},
};
use crate::{
    progress::Progress,
    remote::bounds::Bound,
    server::Server,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "demand-above-limit";

/// The same rate as that of the other tables, with a window short enough to measure several.
pub const BOUND: Bound = Bound { amount: 100_000, window: Duration::from_secs(1) };
const WINDOWS: u32 = 5;
const QUICK_WINDOWS: u32 = 2;

/// The part of what is certainly available: the limit without the lease.
const UTILISATION: Target = Target::AtLeast(0.99);

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let contestants = [(WITHOUT, false), (WITH, true)];
    let windows = if effort.is_quick { QUICK_WINDOWS } else { WINDOWS };
    // the first and the last window are not complete
    let demand = Demand::Above(BOUND.window * (windows + 1));
    let part = progress.begin(NAME, effort.rounds * contestants.len());
    let mut samples: [Vec<Sample>; 2] = Default::default();
    for round in 0..effort.rounds {
        for place in effort.rotated(contestants.len(), round) {
            let (name, is_leased) = contestants[place];
            part.at(round, name);
            samples[place].push(Sample::of(&turn(server, is_leased, demand).await?, is_leased));
        }
    }
    let cells: [fn(&Sample) -> f64; 6] = [
        |sample| sample.lowest,
        |sample| sample.highest,
        |sample| sample.violations,
        |sample| sample.redis_cpu_us,
        |sample| sample.scripts,
        |sample| sample.leased,
    ];
    let row = |((name, _), samples): (&(&str, bool), &Vec<Sample>)| Row {
        contestant: (*name).to_owned(),
        cells: cells.iter().map(|read| Some(Stat::of(samples.iter().map(read)))).collect(),
    };
    let with = &samples[1];
    let of_window = |part: f64| BOUND.amount as f64 * part;
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "{PROCESSES} processes with {CALLERS} callers each on one key, fixed window of 100,000 per second, {windows} complete windows or \
             more in each turn. A caller that is denied pauses for 1 ms. Admitted units of the window with the fewest and of the one with the most, \
             by the callers' clock: a unit that is leased at the end of a window may be spent in the next. Violations are those that the oracle finds: \
             more than the bound of the algorithm plus the lease in any interval of one window. CPU time and script calls are per admitted request"
        ),
        rounds: effort.rounds,
        columns: vec![
            Column::new("admitted, lowest", 0),
            Column::new("admitted, highest", 0),
            Column::new("violations", 0),
            Column::new("Redis CPU us", 3),
            Column::new("script calls", 4),
            Column::new("decided by leases, %", 1),
        ],
        rows: contestants.iter().zip(&samples).map(row).collect(),
        ratios: vec![
            Ratio {
                what: "violations of the bound plus the lease".to_owned(),
                stat: Stat::of(with.iter().map(|sample| sample.violations)),
                target: Some(Target::Exactly(0.0)),
            },
            Ratio {
                what: "most admitted in a window / the limit plus the lease".to_owned(),
                stat: Stat::of(with.iter().map(|it| it.highest / of_window(1.0 + LEASE_PART))),
                target: Some(Target::AtMost(1.0)),
            },
            Ratio {
                what: "fewest admitted in a window / the limit less the lease".to_owned(),
                stat: Stat::of(with.iter().map(|it| it.lowest / of_window(1.0 - LEASE_PART))),
                target: Some(UTILISATION),
            },
            Ratio {
                what: "Redis CPU per admitted request, lease 1 % / no lease".to_owned(),
                stat: Stat::of(
                    with.iter().zip(&samples[0]).map(|(it, other)| it.redis_cpu_us / other.redis_cpu_us),
                ),
                target: None,
            },
        ],
    })
}

/// The figures of one turn.
struct Sample {
    /// Units that were admitted in a complete window.
    lowest: f64,
    highest: f64,
    violations: f64,
    /// Per admitted request.
    redis_cpu_us: f64,
    scripts: f64,
    leased: f64,
}

impl Sample {
    fn of(turn: &Turn, is_leased: bool) -> Self {
        let lease = if is_leased { (BOUND.amount as f64 * LEASE_PART) as u64 } else { 0 };
        let calls = turn.clients.iter().flat_map(|client| &client.admitted);
        let calls: Vec<_> = calls
            .map(|admissions| Admitted {
                sent: Duration::from_millis(admissions.sent_ms),
                received: Duration::from_millis(admissions.received_ms),
                cost: admissions.count,
            })
            .collect();
        let admitted = turn.admitted();
        let windows = complete_windows(turn, &calls);
        Self {
            lowest: windows.iter().copied().min().unwrap_or_default() as f64,
            highest: windows.iter().copied().max().unwrap_or_default() as f64,
            violations: f64::from(window_violation(&calls, 2 * BOUND.amount + lease, BOUND.window).is_some()),
            redis_cpu_us: turn.redis_cpu_us / admitted,
            scripts: turn.scripts / admitted,
            leased: turn.clients.iter().map(|client| client.leased).sum::<u64>() as f64 * 100.0 / admitted,
        }
    }
}

/// Returns the admitted units of each window in which all processes were running.
fn complete_windows(turn: &Turn, calls: &[Admitted]) -> Vec<u64> {
    let window_ms = BOUND.window.as_millis();
    let begun = turn.clients.iter().map(|client| client.begun).max().unwrap_or_default();
    let ended = turn.clients.iter().map(|client| client.ended).min().unwrap_or_default();
    let (first, last) = (begun.as_millis().div_ceil(window_ms), ended.as_millis() / window_ms);
    let admitted_in = |window: u128| {
        let is_in = |call: &&Admitted| call.sent.as_millis() / window_ms == window;
        calls.iter().filter(is_in).map(|call| call.cost).sum()
    };
    (first..last).map(admitted_in).collect()
}
