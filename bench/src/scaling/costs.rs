//! The measured cost of a decision.

use anyhow::{Context, Result};

use crate::{
    remote::{
        OURS, batch, most_callers,
        run::{CLIENT_CPU, REDIS_CPU, SCRIPT_CALLS},
    },
    report::Report,
};

/// CPU times in microseconds, each a median of the run.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// Redis, per decision: one key per call over many connections, as in a busy Cluster.
    pub alone_us: f64,
    /// The same over one connection, on which Redis reads several calls together.
    pub alone_pipelined_us: f64,
    /// The same with 64 keys per call.
    pub batched_us: f64,
    /// Redis, per decision, with the batches of 64 callers in one process; and the calls per decision.
    pub random_us: f64,
    pub random_calls: f64,
    /// Redis, per decision on a hot key that 1000 callers in one process share; and the calls per decision.
    pub hot_us: f64,
    pub hot_calls: f64,
    /// The client, per decision.
    pub client_us: f64,
}

impl Costs {
    /// Reads the costs from the tables of a report.
    pub fn of(report: &Report) -> Result<Self> {
        let read = |table: &str, row: &str, column: &str| median(report, table, row, column);
        let (random, hot) = ("random-keys", "many-callers");
        Ok(Self {
            alone_us: read(batch::NAME, batch::SPREAD, REDIS_CPU)?,
            alone_pipelined_us: read(batch::NAME, batch::ONE, REDIS_CPU)?,
            batched_us: read(batch::NAME, batch::MANY, REDIS_CPU)?,
            random_us: read(random, OURS, REDIS_CPU)?,
            random_calls: read(random, OURS, SCRIPT_CALLS)?,
            hot_us: read(hot, &most_callers(), REDIS_CPU)?,
            hot_calls: read(hot, &most_callers(), SCRIPT_CALLS)?,
            client_us: read(random, OURS, CLIENT_CPU)?,
        })
    }

    /// The cost that each decision adds to a call, by linear interpolation between one and 64 keys per call.
    pub fn decision_us(&self) -> f64 {
        const MANY: f64 = 64.0;
        let call = (self.alone_pipelined_us - self.batched_us) * MANY / (MANY - 1.0);
        (self.alone_pipelined_us - call).max(0.0)
    }

    /// The fixed cost of a call, over many connections.
    pub fn call_us(&self) -> f64 {
        (self.alone_us - self.decision_us()).max(0.0)
    }

    /// The cost of Redis per decision with this number of keys per call.
    pub fn with_keys_per_call(&self, keys: f64) -> f64 {
        self.call_us() / keys + self.decision_us()
    }
}

/// Returns the median of a figure.
pub fn median(report: &Report, table: &str, row: &str, column: &str) -> Result<f64> {
    let found = report.remote.iter().find(|it| it.name == table).and_then(|table| {
        let place = table.columns.iter().position(|it| it.title == column)?;
        table.rows.iter().find(|it| it.contestant == row)?.cells[place]
    });
    found.map(|stat| stat.median).with_context(|| {
        format!(
            "the figures lack {column:?} of {row:?} in {table:?}: run scripts/bench --write without --only"
        )
    })
}
