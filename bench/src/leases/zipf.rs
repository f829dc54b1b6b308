//! Many keys with a Zipf distribution: only the frequent ones are leased.

use std::sync::Arc;

use anyhow::Result;

use super::{
    BOUND, Effort, WITH, WITHOUT,
    contestants::{Keys, Ours, Player},
    leased,
    turn::{self, Turn, TurnKeys, ratio},
};
use crate::{
    progress::Progress,
    server::Server,
    stats::{Table, Target},
};

/// The table's name.
pub const NAME: &str = "zipf";

const KEYS: usize = 100_000;
const CALLERS: usize = 64;
const DECISIONS: u64 = 400_000;
/// Several lifetimes' worth of requests: the leases of the turn before have been returned.
const WARM_UP: u64 = 400_000;

/// The n-th key has 1/n of the share of the first one.
pub struct Zipf {
    cumulative: Vec<f64>,
}

impl Zipf {
    fn new(keys: usize) -> Self {
        let mut sum = 0.0;
        let cumulative = (1..=keys).map(|place| {
            sum += 1.0 / place as f64;
            sum
        });
        Self { cumulative: cumulative.collect() }
    }

    /// Returns the key that a random number selects.
    pub fn key(&self, random: u64) -> usize {
        let total = self.cumulative.last().copied().unwrap_or_default();
        let at = (random >> 11) as f64 / (1_u64 << 53) as f64 * total;
        self.cumulative.partition_point(|sum| *sum <= at).min(self.cumulative.len() - 1)
    }
}

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let (url, bucket, zipf) = (server.url(), BOUND.bucket()?, Arc::new(Zipf::new(KEYS)));
    let keys = || Keys::Zipf(Arc::clone(&zipf));
    let contestants = [
        (WITHOUT, Player::Ours(Ours::connect(url, bucket, keys()).await?)),
        (WITH, Player::Ours(Ours::connect(url, leased(bucket, BOUND)?, keys()).await?)),
    ];
    let part = progress.begin(NAME, effort.rounds * contestants.len());
    let mut redis = server.connect().await?;
    let mut samples = vec![Vec::new(); contestants.len()];
    let turn = Turn { callers: CALLERS, warm_up: WARM_UP, decisions: DECISIONS };
    for round in 0..effort.rounds {
        for place in effort.rotated(contestants.len(), round) {
            let (name, player) = &contestants[place];
            part.at(round, name);
            samples[place].push(turn.run(player, TurnKeys::Same, &mut redis).await?);
        }
    }
    let [without, with] = [&samples[0], &samples[1]];
    let rows = contestants.iter().zip(&samples);
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "100,000 keys with a Zipf distribution of exponent 1, token buckets of 1,000,000 per 10 s, {CALLERS} callers, all allowed. A \
             turn is {DECISIONS} decisions after {WARM_UP} that are not measured"
        ),
        rounds: effort.rounds,
        columns: turn::columns(),
        rows: rows.map(|((name, _), samples)| turn::row((*name).to_owned(), samples)).collect(),
        ratios: vec![
            ratio(
                "decisions/s, lease 1 % / no lease",
                with,
                without,
                |it| it.rate,
                Some(Target::AtLeast(1.5)),
            ),
            ratio(
                "Redis CPU per decision, lease 1 % / no lease",
                with,
                without,
                |it| it.redis_cpu_us,
                Some(Target::AtMost(0.7)),
            ),
        ],
    })
}
