//! One hot key with demand below its limit.

use anyhow::Result;

use super::{
    BOUND, Effort, HAND, WITH, WITHOUT,
    contestants::{Keys, Ours, Player},
    leased,
    turn::{self, Turn, TurnKeys, ratio},
};
use crate::{
    progress::Progress,
    remote::{self, hand::Hand},
    server::Server,
    stats::{Table, Target},
};

/// The table's name.
pub const NAME: &str = "hot-key";

const CALLERS: usize = 64;
/// Below the limit, for the contestant that makes them in less than a window.
const LEASED_DECISIONS: u64 = 900_000;
/// Enough for a rate that does not depend on the state of the counter.
const STORE_DECISIONS: u64 = 150_000;
const WARM_UP: u64 = 20_000;

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let (url, bucket) = (server.url(), BOUND.bucket()?);
    let key = || Keys::One("hot".into());
    let contestants = [
        (HAND, Player::Hand(Hand::gcra(url, remote::keys::Keys::Hot, BOUND).await?), STORE_DECISIONS),
        (WITHOUT, Player::Ours(Ours::connect(url, bucket, key()).await?), STORE_DECISIONS),
        (WITH, Player::Ours(Ours::connect(url, leased(bucket, BOUND)?, key()).await?), LEASED_DECISIONS),
    ];
    let part = progress.begin(NAME, effort.rounds * contestants.len());
    let mut redis = server.connect().await?;
    let mut samples = vec![Vec::new(); contestants.len()];
    for round in 0..effort.rounds {
        for place in effort.rotated(contestants.len(), round) {
            let (name, player, decisions) = &contestants[place];
            part.at(round, name);
            let turn = Turn { callers: CALLERS, warm_up: WARM_UP, decisions: *decisions };
            samples[place].push(turn.run(player, TurnKeys::NewKey, &mut redis).await?);
        }
    }
    let [hand, without, with] = [&samples[0], &samples[1], &samples[2]];
    let rows = contestants.iter().zip(&samples);
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "one key, token bucket of 1,000,000 per 10 s, {CALLERS} callers, all allowed. A turn is {LEASED_DECISIONS} decisions on a \
             new key with leases and {STORE_DECISIONS} without, after {WARM_UP} on another key"
        ),
        rounds: effort.rounds,
        columns: turn::columns(),
        rows: rows.map(|((name, ..), samples)| turn::row((*name).to_owned(), samples)).collect(),
        ratios: vec![
            ratio(
                "decisions/s, lease 1 % / hand-written",
                with,
                hand,
                |it| it.rate,
                Some(Target::AtLeast(15.0)),
            ),
            ratio(
                "Redis CPU per decision, lease 1 % / hand-written",
                with,
                hand,
                |it| it.redis_cpu_us,
                Some(Target::AtMost(0.02)),
            ),
            ratio("decisions/s, lease 1 % / no lease", with, without, |it| it.rate, None),
            ratio("Redis CPU per decision, lease 1 % / no lease", with, without, |it| it.redis_cpu_us, None),
        ],
    })
}
