//! CPU time of Redis per call and per decision: direct calls to the store, without batching by the limiter, with 1 to 64 keys
//! per call. The capacity page uses these figures.

use std::sync::Arc;

use anyhow::Result;
use sluicegate::{
    Cost, RedisStore,
    limiter::Operation,
    store::{Check, Key, RemoteStore, Terms, Tier},
};

use super::{
    CALLERS, USERS,
    bounds::PER_USER,
    keys::Keys,
    run::{Player, cells, columns, timed},
};
use crate::{
    args::Effort,
    drive::Sample,
    progress::Progress,
    server::{self, Server},
    stats::{Row, Table},
};

/// The table's name.
pub const NAME: &str = "batch";

/// Minimum number of calls in flight, with large batches.
const CALLS: usize = 2;

/// A shape of calls.
struct CallShape {
    title: &'static str,
    keys_per_call: usize,
    connections: usize,
}

/// The titles are read by the capacity page.
pub const SPREAD: &str = "1 key per call, 64 connections";
pub const ONE: &str = "1 key per call, one connection";
pub const MANY: &str = "64 keys per call, one connection";

const SHAPES: [CallShape; 5] = [
    CallShape { title: SPREAD, keys_per_call: 1, connections: 64 },
    CallShape { title: ONE, keys_per_call: 1, connections: 1 },
    CallShape { title: "4 keys per call, one connection", keys_per_call: 4, connections: 1 },
    CallShape { title: "16 keys per call, one connection", keys_per_call: 16, connections: 1 },
    CallShape { title: MANY, keys_per_call: 64, connections: 1 },
];

/// Decides several keys in every call.
#[derive(Clone)]
pub struct Batches {
    stores: Arc<[RedisStore]>,
    keys: Keys,
    keys_per_call: usize,
    terms: Terms,
}

impl Batches {
    async fn new(url: &str, shape: &CallShape) -> Result<Self> {
        let mut stores = Vec::new();
        for _ in 0..shape.connections {
            stores.push(RedisStore::connect(url).await?);
        }
        let terms = Terms::new(PER_USER.bucket()?, Cost::ONE);
        Ok(Self { stores: stores.into(), keys: USERS, keys_per_call: shape.keys_per_call, terms })
    }

    /// Returns whether all requests are allowed.
    pub async fn decide(&self, random: u64) -> Result<bool> {
        let mut random = fastrand::Rng::with_seed(random);
        let store = &self.stores[random.usize(..self.stores.len())];
        let check = |_| {
            let key = Key::without_rule(self.keys.name(random.u64(..)))?;
            Ok(Check::new(Operation::Check, vec![Tier { key, terms: self.terms }])?)
        };
        let checks = (0..self.keys_per_call).map(check).collect::<Result<Vec<_>>>()?;
        for answered in store.decide(&checks, None).await {
            if answered?.answers.iter().any(|answer| answer.passes != 1) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let progress = progress.begin(NAME, effort.rounds * SHAPES.len());
    let mut redis = server.connect().await?;
    server::empty(&mut redis).await?;
    let mut samples = vec![Vec::new(); SHAPES.len()];
    let mut players = Vec::new();
    for shape in &SHAPES {
        players.push(Player::Batches(Batches::new(server.url(), shape).await?));
    }
    for round in 0..effort.rounds {
        for turn in 0..SHAPES.len() {
            let place = (turn + round) % SHAPES.len();
            let shape = &SHAPES[place];
            progress.at(round, shape.title);
            let callers = (CALLERS / shape.keys_per_call).max(CALLS);
            let sample = timed(&players[place], callers, effort, &mut redis).await?;
            samples[place].push(per_decision(sample, shape.keys_per_call as f64));
        }
    }
    let row = |(shape, samples): (&CallShape, &Vec<_>)| Row {
        contestant: shape.title.to_owned(),
        cells: cells(samples),
    };
    Ok(Table {
        name: NAME.to_owned(),
        what: "cost per call and per decision: 100,000 keys, token bucket, all allowed; direct calls to sluicegate's store, \
               64 decisions in flight (128 where 64 share a call). Latencies are those of calls"
            .to_owned(),
        rounds: effort.rounds,
        columns: columns(),
        rows: SHAPES.iter().zip(&samples).map(row).collect(),
        ratios: Vec::new(),
    })
}

/// Converts a sample that counts a call for several keys as one decision.
fn per_decision(sample: Sample, keys_per_call: f64) -> Sample {
    Sample {
        decisions: sample.decisions * keys_per_call as u64,
        allowed: sample.allowed * keys_per_call as u64,
        rate: sample.rate * keys_per_call,
        redis_cpu_us: sample.redis_cpu_us / keys_per_call,
        calls: sample.calls / keys_per_call,
        client_cpu_us: sample.client_cpu_us / keys_per_call,
        ..sample
    }
}
