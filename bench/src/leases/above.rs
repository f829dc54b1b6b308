//! Four client processes that request more than the limit: how much is admitted.

use std::time::Duration;

use anyhow::Result;
use sluicegate::Limit;
use sluicegate_testkit::oracle::{Admitted, bucket_violation, window_violation};

use super::{
    Effort, LEASE_PART, WITH, WITHOUT,
    processes::{Algorithm, CALLERS, Demand, PROCESSES, Turn, turn},
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

/// Returns the limit that is exceeded.
pub fn limit(algorithm: Algorithm) -> Result<Limit> {
    Ok(match algorithm {
        Algorithm::FixedWindow => Limit::fixed_window(BOUND.amount, BOUND.window)?,
        Algorithm::TokenBucket => BOUND.bucket()?,
    })
}

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    const ALGORITHMS: [(Algorithm, &str); 2] =
        [(Algorithm::FixedWindow, "fixed window"), (Algorithm::TokenBucket, "token bucket")];
    let contestants = [(WITHOUT, false), (WITH, true)];
    let windows = if effort.is_quick { QUICK_WINDOWS } else { WINDOWS };
    // the first and the last window are not complete
    let time = BOUND.window * (windows + 1);
    let part = progress.begin(NAME, effort.rounds * ALGORITHMS.len() * contestants.len());
    let mut samples: [[Vec<Sample>; 2]; 2] = Default::default();
    for round in 0..effort.rounds {
        for ((algorithm, algorithm_name), samples) in ALGORITHMS.into_iter().zip(&mut samples) {
            for place in effort.rotated(contestants.len(), round) {
                let (name, is_leased) = contestants[place];
                part.at(round, &format!("{algorithm_name}, {name}"));
                let turn = turn(server, is_leased, Demand::Above { algorithm, time }).await?;
                samples[place].push(Sample::of(&turn, algorithm, is_leased));
            }
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for ((algorithm, name), samples) in ALGORITHMS.into_iter().zip(&samples) {
        for ((contestant, _), samples) in contestants.iter().zip(samples) {
            rows.push(Row { contestant: format!("{name}, {contestant}"), cells: Sample::cells(samples) });
        }
        ratios.extend(ratios_of(algorithm, name, samples));
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "{PROCESSES} processes with {CALLERS} callers each on one key, 100,000 per second, {windows} complete windows or more in each \
             turn. A caller that is denied pauses for 1 ms. Admitted requests of the window with the fewest and of the one with the most, by the \
             time of sending: a request that is sent at the end of a window may be decided in the next, and a unit that is leased at the end of a \
             window may be spent in the next. The first window of a token bucket begins with its burst. Violations are the turns in which the \
             oracle finds an interval with more than the bound of the algorithm plus the lease; the bound of a fixed window is twice its limit in \
             any interval of that length. CPU time and script calls are per admitted request"
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
        rows,
        ratios,
    })
}

fn ratios_of(algorithm: Algorithm, name: &str, [without, with]: &[Vec<Sample>; 2]) -> Vec<Ratio> {
    let of_window = |part: f64| BOUND.amount as f64 * part;
    let mut ratios = vec![Ratio {
        what: format!("{name}, violations of the bound plus the lease"),
        stat: Stat::of(with.iter().map(|it| it.violations)),
        target: Some(Target::Exactly(0.0)),
    }];
    if matches!(algorithm, Algorithm::FixedWindow) {
        ratios.push(Ratio {
            what: format!("{name}, most admitted in a window / the limit plus the lease"),
            stat: Stat::of(with.iter().map(|it| it.highest / of_window(1.0 + LEASE_PART))),
            target: Some(Target::AtMost(1.0)),
        });
    }
    ratios.push(Ratio {
        what: format!("{name}, fewest admitted in a window / the limit less the lease"),
        stat: Stat::of(with.iter().map(|it| it.lowest / of_window(1.0 - LEASE_PART))),
        target: Some(UTILISATION),
    });
    let cpu = with.iter().zip(without).map(|(with, without)| with.redis_cpu_us / without.redis_cpu_us);
    ratios.push(Ratio {
        what: format!("{name}, Redis CPU per admitted request, lease 1 % / no lease"),
        stat: Stat::of(cpu),
        target: None,
    });
    ratios
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
    fn cells(samples: &[Self]) -> Vec<Option<Stat>> {
        let reads: [fn(&Self) -> f64; 6] = [
            |sample| sample.lowest,
            |sample| sample.highest,
            |sample| sample.violations,
            |sample| sample.redis_cpu_us,
            |sample| sample.scripts,
            |sample| sample.leased,
        ];
        reads.into_iter().map(|read| Some(Stat::of(samples.iter().map(read)))).collect()
    }

    fn of(turn: &Turn, algorithm: Algorithm, is_leased: bool) -> Self {
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
        let Bound { amount, window } = BOUND;
        let violation = match algorithm {
            Algorithm::FixedWindow => window_violation(&calls, 2 * amount + lease, window),
            Algorithm::TokenBucket => bucket_violation(&calls, amount + lease, amount, window),
        };
        Self {
            lowest: windows.iter().copied().min().unwrap_or_default() as f64,
            highest: windows.iter().copied().max().unwrap_or_default() as f64,
            violations: f64::from(violation.is_some()),
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
