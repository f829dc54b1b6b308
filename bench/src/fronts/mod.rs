//! `scripts/bench fronts`: the server's front ends and the tower layer, each compared with a counterpart that reads the same
//! requests and always allows, and with throttlecrab's server where it has the same front end.
//!
//! Every server is a separate process with a thread per core, and shares the cores with the clients. For what is not
//! measured, see [`report`](crate::report).

mod always_allow;
mod grpc;
mod http;
mod load;
mod process;
mod resp;
mod scenarios;
mod template;
mod tools;
mod tower_app;

use anyhow::{Result, ensure};

use self::{
    load::{Sample, sample},
    process::{Contestant, Process},
    scenarios::{Generator, SCENARIOS, Scenario},
};
use crate::{
    args::{Args, Effort},
    machine::{self, Machine},
    progress::Progress,
    report::Report,
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

pub use self::{
    http::complete_body,
    process::{Addresses, serve_always_allow, serve_tower_app},
    tower_app::Variant as TowerAppVariant,
};

/// Number of concurrent requests or pipelines: one per connection, or over gRPC on [`grpc::CHANNELS`] connections.
const CONCURRENCY: usize = 64;
/// Number of users.
const USERS: u32 = 100_000;

const COLUMNS: [Column; 3] =
    [Column::new("responses/s", 0), Column::new("server CPU us", 2), Column::new("client CPU us", 2)];

/// Measures the selected scenarios.
pub async fn run(args: &Args) -> Result<Report> {
    let scenarios: Vec<_> = SCENARIOS
        .iter()
        .filter(|scenario| args.wants(scenario.name))
        .filter(|scenario| scenario.contestants.iter().any(|contestant| takes_part(*contestant, args)))
        .collect();
    ensure!(!scenarios.is_empty(), "no scenario and contestant match --only and --solo");
    let mut processes = Vec::new();
    for contestant in Contestant::ALL.into_iter().filter(|contestant| takes_part(*contestant, args)) {
        if scenarios.iter().any(|scenario| scenario.contestants.contains(&contestant)) {
            processes.push(Process::start(contestant).await?);
        }
    }
    let mut machine = Machine::here("not used".to_owned())?;
    machine.peers = machine::versions_of(&["axum", "hyper", "tonic", "tokio"]);
    machine.peers.extend(args.wants_peers().then(|| process::THROTTLECRAB.to_owned()));

    let progress = Progress::new(scenarios.len());
    let mut tables = Vec::new();
    for scenario in scenarios {
        let processes: Vec<_> =
            processes.iter().filter(|process| scenario.contestants.contains(&process.contestant)).collect();
        tables.push(table(scenario, args.effort(), &processes, &progress).await?);
    }
    progress.end();
    Ok(Report {
        machine,
        command: crate::command(),
        load_after: machine::load()?,
        remote: Vec::new(),
        local: tables,
    })
}

fn takes_part(contestant: Contestant, args: &Args) -> bool {
    let is_selected = args.solo.as_ref().is_none_or(|part| contestant.name().contains(part));
    is_selected && (contestant != Contestant::Throttlecrab || args.wants_peers())
}

/// Fills the table of a scenario. The order of the contestants rotates from round to round.
async fn table(
    scenario: &Scenario,
    effort: Effort,
    processes: &[&Process],
    progress: &Progress,
) -> Result<Table> {
    let effort = effort.for_targets([Some(scenario.target)]);
    let part = progress.begin(scenario.name, effort.rounds * processes.len());
    let mut samples = vec![Vec::new(); processes.len()];
    for round in 0..effort.rounds {
        for turn in 0..processes.len() {
            let place = (turn + round) % processes.len();
            let process = processes[place];
            part.at(round, process.contestant.name());
            samples[place].push(match scenario.generator {
                Generator::Own(workload) => sample(workload, process, effort).await?,
                Generator::Tool(tool) => tool.sample(process, effort).await?,
            });
        }
    }
    Ok(Table {
        name: scenario.name.to_owned(),
        what: scenario.description.to_owned(),
        rounds: effort.rounds,
        columns: COLUMNS.to_vec(),
        rows: processes.iter().zip(&samples).map(|(process, samples)| row(process, samples)).collect(),
        ratios: ratios(scenario, processes, &samples),
    })
}

fn row(process: &Process, samples: &[Sample]) -> Row {
    let stat = |figure: fn(&Sample) -> f64| Some(Stat::of(samples.iter().map(figure)));
    Row {
        contestant: process.contestant.name().to_owned(),
        cells: vec![
            stat(|sample| sample.rate),
            stat(|sample| sample.server_cpu_us),
            stat(|sample| sample.clients_cpu_us),
        ],
    }
}

/// Compares the scenario's first contestant with the others, if it takes part.
fn ratios(scenario: &Scenario, processes: &[&Process], samples: &[Vec<Sample>]) -> Vec<Ratio> {
    let mut rows = processes.iter().map(|process| process.contestant).zip(samples);
    let Some((ours, our_samples)) = rows.next().filter(|(first, _)| *first == scenario.contestants[0]) else {
        return Vec::new();
    };
    rows.map(|(other, samples)| Ratio {
        what: format!("responses/s, {} / {}", ours.name(), other.name()),
        stat: Stat::of(our_samples.iter().zip(samples).map(|(ours, other)| ours.rate / other.rate)),
        target: Some(match other {
            Contestant::Throttlecrab => Target::AtLeast(1.0),
            _ => scenario.target,
        }),
    })
    .collect()
}
