//! Checks of rules without holds, compared with an earlier revision, on Redis and on the memory store.

use std::path::Path;

use anyhow::Result;

use crate::{
    leases::{Effort, before},
    local,
    progress::Progress,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The tables' names.
pub const NAME: &str = "without-holds";
pub const MEMORY: &str = "without-holds-memory";

const KEYS: [(usize, &str); 2] = [(1, "1 key"), (1_000, "1,000 keys")];
const CONTESTANT: &str = "sluicegate";
/// Short turns in each round: the difference to detect is smaller than the noise of one turn.
const TURNS: usize = 3;
const MILLIS: u128 = 300;

/// Fills the table of checks on Redis.
pub fn table(effort: Effort, revision: &str, progress: &Progress) -> Result<Table> {
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "checks of limits without holds, this revision and revision {revision}, which has no holds: the tables random-keys and \
             hot-allowed of the benchmarks on loopback, in short turns"
        ),
        ..before::table(effort, revision, progress)?
    })
}

/// Fills the table of checks on the memory store.
pub fn memory_table(effort: Effort, revision: &str, progress: &Progress) -> Result<Table> {
    let programs = before::programs()?;
    let names = [format!("revision {revision}"), "this revision".to_owned()];
    let rounds = effort.rounds * TURNS;
    let part = progress.begin(MEMORY, rounds * programs.len());
    let mut times: [[Vec<f64>; 2]; 2] = Default::default();
    for round in 0..rounds {
        for place in effort.rotated(programs.len(), round) {
            part.at(round, &names[place]);
            for ((keys, _), times) in KEYS.into_iter().zip(&mut times) {
                times[place].push(cpu_ns(&programs[place], keys)?);
            }
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for ((_, keys), times) in KEYS.into_iter().zip(&times) {
        for (name, times) in names.iter().zip(times) {
            let cells = vec![Some(Stat::of(times.iter().copied()))];
            rows.push(Row { contestant: format!("{keys}, {name}"), cells });
        }
        ratios.push(Ratio {
            what: format!("time, {keys}, this revision / {revision}"),
            stat: Stat::of(times[1].iter().zip(&times[0]).map(|(now, before)| now / before)),
            target: Some(Target::About(1.0)),
        });
    }
    Ok(Table {
        name: MEMORY.to_owned(),
        what: format!(
            "checks of a token bucket without holds on the memory store, one thread, this revision and revision {revision}, which has no \
             holds; all allowed"
        ),
        rounds,
        columns: vec![Column::new("CPU ns", 1)],
        rows,
        ratios,
    })
}

fn cpu_ns(program: &Path, keys: usize) -> Result<f64> {
    Ok(local::measure_with(program, CONTESTANT, keys, 1, MILLIS)?.cpu_ns)
}
