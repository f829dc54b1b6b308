//! Limits without leases, compared with an earlier revision: two builds of this program run the same tables.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use super::Effort;
use crate::{
    progress::Progress,
    remote::{OURS, run::REDIS_CPU},
    report::Report,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The table's name.
pub const NAME: &str = "before";
/// The tables that both revisions run.
const TABLES: [&str; 2] = ["random-keys", "hot-allowed"];
/// Short turns in each round: the difference to detect is smaller than the noise of one turn.
const TURNS: usize = 3;
/// The environment variable with the path of the earlier build; `scripts/bench` sets it.
const EARLIER_BUILD: &str = "SLUICEGATE_BENCH_BEFORE";

/// Decisions per second in thousands and Redis CPU per decision, of each of `TABLES`.
type Figures = [(f64, f64); TABLES.len()];

/// Fills the table.
pub fn table(effort: Effort, revision: &str, progress: &Progress) -> Result<Table> {
    let programs = programs()?;
    let names = [format!("revision {revision}"), "this revision".to_owned()];
    let rounds = effort.rounds * TURNS;
    let part = progress.begin(NAME, rounds * programs.len());
    let mut figures: [Vec<Figures>; 2] = Default::default();
    for round in 0..rounds {
        for place in effort.rotated(programs.len(), round) {
            part.at(round, &names[place]);
            figures[place].push(measure(&programs[place])?);
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for (place, table) in TABLES.into_iter().enumerate() {
        for (name, rounds) in names.iter().zip(&figures) {
            rows.push(Row {
                contestant: format!("{table}, {name}"),
                cells: vec![
                    Some(Stat::of(rounds.iter().map(|round| round[place].0))),
                    Some(Stat::of(rounds.iter().map(|round| round[place].1))),
                ],
            });
        }
        let rounds = || figures[1].iter().zip(&figures[0]);
        ratios.push(Ratio {
            what: format!("decisions/s, {table}, this revision / {revision}"),
            stat: Stat::of(rounds().map(|(now, before)| now[place].0 / before[place].0)),
            target: Some(Target::Nearly(1.0)),
        });
        ratios.push(Ratio {
            what: format!("Redis CPU per decision, {table}, this revision / {revision}"),
            stat: Stat::of(rounds().map(|(now, before)| now[place].1 / before[place].1)),
            target: Some(Target::About(1.0)),
        });
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "limits without leases, this revision and revision {revision}, which has no leases: the tables random-keys and hot-allowed of the \
             benchmarks on loopback, in short turns"
        ),
        rounds,
        columns: vec![Column::new("k decisions/s", 1), Column::new(REDIS_CPU, 2)],
        rows,
        ratios,
    })
}

/// Returns the paths of the earlier build and of this one.
pub fn programs() -> Result<[PathBuf; 2]> {
    let earlier = env::var_os(EARLIER_BUILD).with_context(|| {
        format!("--before needs {EARLIER_BUILD}, the path of the earlier build: use scripts/bench")
    })?;
    Ok([PathBuf::from(earlier), env::current_exe()?])
}

fn measure(program: &Path) -> Result<Figures> {
    let output = Command::new(program)
        .args(["--quick", "--rounds", "1", "--json", "--solo", OURS, "--only", &TABLES.join(",")])
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} failed: {stderr}", program.display());
    let report: Report = serde_json::from_slice(&output.stdout)?;
    let mut figures = Figures::default();
    for (figures, name) in figures.iter_mut().zip(TABLES) {
        let found = report.remote.iter().find(|table| table.name == name).and_then(|table| {
            let cpu = table.columns.iter().position(|column| column.title == REDIS_CPU)?;
            let cells = &table.rows.first()?.cells;
            Some((cells[0]?.median, cells[cpu]?.median))
        });
        *figures = found.with_context(|| format!("{} has no figures of {name}", program.display()))?;
    }
    Ok(figures)
}
