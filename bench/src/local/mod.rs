//! In-process contestants. Each runs in its own child process.

mod child;
#[cfg(feature = "limitador")]
mod limitador;
mod quota;
#[cfg(feature = "throttlecrab")]
mod throttlecrab;

use std::{env, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use self::child::CONTESTANTS;
pub use self::child::{Measured, run};
use crate::{
    args::{Args, Effort},
    progress::Progress,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

const GOVERNOR: &str = "governor";
const OURS: &str = "sluicegate";
/// The time limit of a child process, enforced by coreutils' `timeout`: a store that does not finish with a million
/// keys is reported as an error.
const CHILD_TIMEOUT_S: u64 = 60;

/// All tables, in order.
pub const TABLES: [&str; 3] = ["memory-1-key", "memory-1k-keys", "memory-1M-keys"];
/// Above this number, keys are formatted per call, and memory is measured.
const FEW: usize = 10_000;

/// One table per number of keys.
pub fn tables(args: &Args, progress: &Progress) -> Result<Vec<Table>> {
    let wanted = TABLES.into_iter().zip([1, 1_000, 1_000_000]).filter(|(name, _)| args.wants(name));
    wanted.map(|(name, keys)| table(name, keys, args.effort(), progress)).collect()
}

fn table(name: &str, keys: usize, effort: Effort, progress: &Progress) -> Result<Table> {
    let targets = targets(keys);
    let effort = effort.for_targets(targets.all());
    let players: Vec<_> = CONTESTANTS.iter().filter(|contestant| contestant.takes(keys, effort)).collect();
    let progress = progress.begin(name, effort.rounds * players.len());
    let mut one = vec![Vec::new(); players.len()];
    let mut two = vec![Vec::new(); players.len()];
    for round in 0..effort.rounds {
        for turn in 0..players.len() {
            let place = (turn + round) % players.len();
            progress.at(round, players[place].name);
            if round < players[place].rounds(keys, effort) {
                one[place].push(measure(players[place].name, keys, 1, effort)?);
                two[place].push(measure(players[place].name, keys, 2, effort)?);
            }
        }
    }
    let rows = players.iter().zip(one.iter().zip(&two)).map(|(player, (one, two))| Row {
        contestant: player.title.to_owned(),
        cells: vec![
            Some(Stat::of(one.iter().map(|measured| measured.cpu_ns))),
            Some(Stat::of(two.iter().map(|measured| measured.cpu_ns))),
            Some(Stat::of(two.iter().map(|measured| measured.rate / 1e6))),
            (keys > FEW).then(|| Stat::of(one.iter().map(|measured| measured.bytes_per_key))),
        ],
    });

    let place = |name| players.iter().position(|player| player.name == name);
    let governor = place(GOVERNOR).context("governor takes part in every table")?;
    let ours = place(if keys > FEW { "sluicegate-str" } else { OURS }).context("sluicegate takes part")?;
    let ratio = |what: &str, samples: &[Vec<Measured>], read: fn(&Measured) -> f64, target| Ratio {
        what: format!("{what}, {} / {}", players[ours].title, players[governor].title),
        stat: Stat::of(samples[ours].iter().zip(&samples[governor]).map(|(a, b)| read(a) / read(b))),
        target,
    };
    let mut ratios = vec![
        ratio("time, 1 thread", &one, |measured| measured.cpu_ns, targets.one_thread),
        ratio("time, 2 threads", &two, |measured| measured.rate.recip(), targets.two_threads),
    ];
    if keys > FEW {
        ratios.push(ratio("bytes per key", &one, |measured| measured.bytes_per_key, targets.bytes));
    }
    Ok(Table {
        name: name.to_owned(),
        what: what(keys),
        rounds: effort.rounds,
        columns: vec![
            Column::new("CPU ns, 1 thread", 0),
            Column::new("CPU ns, 2 threads", 0),
            Column::new("M decisions/s, 2 threads", 2),
            Column::new("bytes/key", 0),
        ],
        rows: rows.collect(),
        ratios,
    })
}

struct Targets {
    one_thread: Option<Target>,
    two_threads: Option<Target>,
    bytes: Option<Target>,
}

impl Targets {
    fn all(&self) -> [Option<Target>; 3] {
        [self.one_thread, self.two_threads, self.bytes]
    }
}

fn targets(keys: usize) -> Targets {
    if keys > FEW {
        let (time, bytes) = (Some(Target::AtMost(0.75)), Some(Target::AtMost(0.7)));
        return Targets { one_thread: time, two_threads: None, bytes };
    }
    let about = Some(Target::About(1.0));
    Targets { one_thread: about, two_threads: about, bytes: None }
}

fn what(keys: usize) -> String {
    match keys {
        1 => "one key, all allowed. The key is built before the measurement: a `String` for governor, a `Key` for sluicegate \
              except in the row with `&str`, which builds the `Key` in every call"
            .to_owned(),
        1_000 => "1,000 keys in random order, all allowed; keys built before the measurement, as above".to_owned(),
        _ => "1,000,000 keys in random order, all allowed. Every call writes the key's text into the same \
              `String` (a few ns) and looks it up: governor hashes it, sluicegate builds a `Key` from it first. sluicegate's \
              bound is 1 GiB here: it reserves memory for growing tables, and its default of 256 MiB \
              holds slightly less than a million. limitador is measured in two rounds only"
            .to_owned(),
    }
}

fn measure(contestant: &str, keys: usize, threads: usize, effort: Effort) -> Result<Measured> {
    let millis = effort.measured.as_millis() / 2;
    measure_with(&env::current_exe()?, contestant, keys, threads, millis)
}

/// Measures a contestant of a build of this program.
pub fn measure_with(
    program: &Path,
    contestant: &str,
    keys: usize,
    threads: usize,
    millis: u128,
) -> Result<Measured> {
    let output = Command::new("timeout")
        .arg(CHILD_TIMEOUT_S.to_string())
        .arg(program)
        .args(["in-process", contestant, &keys.to_string(), &threads.to_string(), &millis.to_string()])
        .output()?;
    ensure!(
        output.status.success(),
        "{contestant} failed or took over {CHILD_TIMEOUT_S} s: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}
