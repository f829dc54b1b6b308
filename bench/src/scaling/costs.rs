//! What a decision costs, as measured.

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
    /// Of Redis, per decision: one key per call, calls over many connections. A busy Cluster is like this.
    pub alone_us: f64,
    /// The same over one connection, where Redis reads several calls at once.
    pub alone_pipelined_us: f64,
    /// The same with 64 keys per call.
    pub batched_us: f64,
    /// Of Redis, per decision, in the batches of 64 callers in one process; and its calls per decision.
    pub random_us: f64,
    pub random_calls: f64,
    /// Of Redis, per decision of a hot key that 1000 callers in one process share; and its calls per decision.
    pub hot_us: f64,
    pub hot_calls: f64,
    /// Of the client, per decision.
    pub client_us: f64,
}

impl Costs {
    /// As the tables of this run have them.
    pub fn of(report: &Report) -> Result<Self> {
        let read = |table: &str, row: &str, column: &str| {
            let found = report.remote.iter().find(|it| it.name == table).and_then(|table| {
                let place = table.columns.iter().position(|it| it.title == column)?;
                table.rows.iter().find(|it| it.contestant == row)?.cells[place]
            });
            found.map(|stat| stat.median).with_context(|| {
                format!("the figures lack {column:?} of {row:?} in {table:?}: run scripts/bench --write without --only")
            })
        };
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

    /// What a decision adds to a call that is made anyway: a straight line through one and 64 keys per call.
    pub fn decision_us(&self) -> f64 {
        const MANY: f64 = 64.0;
        let call = (self.alone_pipelined_us - self.batched_us) * MANY / (MANY - 1.0);
        (self.alone_pipelined_us - call).max(0.0)
    }

    /// What a call costs before its first decision, over many connections.
    pub fn call_us(&self) -> f64 {
        (self.alone_us - self.decision_us()).max(0.0)
    }

    /// Of Redis, per decision, with so many keys per call.
    pub fn with_keys_per_call(&self, keys: f64) -> f64 {
        self.call_us() / keys + self.decision_us()
    }
}
