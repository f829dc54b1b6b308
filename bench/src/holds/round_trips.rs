//! A hold and its settlement with a network round trip to Redis.

use std::time::Duration;

use anyhow::Result;

use super::{
    HAND, OURS,
    contestants::{Hand, Ours, Player, Rules},
    turn::{self, ratio, turn},
};
use crate::{
    drive::{Work, drive},
    leases::Effort,
    network::ProxyProcess,
    progress::Progress,
    remote::keys::Keys,
    server::Server,
    stats::Table,
};

/// The table's name.
pub const NAME: &str = "round-trips";

const USERS: Keys = Keys::Random(100_000);
const ROUND_TRIP: Duration = Duration::from_millis(1);
const CALLERS: [usize; 2] = [64, 256];
/// Operations of each contestant before the first round.
const FIRST: u64 = 100_000;

/// Fills the table.
pub async fn table(effort: Effort, progress: &Progress) -> Result<Table> {
    let rules = Rules::TokensAndInFlight;
    let part = progress.begin(NAME, effort.rounds * 2 * CALLERS.len());
    let mut contestants = Vec::new();
    for name in [HAND, OURS] {
        let server = Server::start().await?;
        let mut proxy = ProxyProcess::start(&server.addr().to_string())?;
        proxy.set_round_trip(ROUND_TRIP)?;
        let player = match name {
            HAND => Player::Hand(Hand::connect(proxy.url(), USERS, rules).await?),
            _ => Player::Ours(Ours::connect(proxy.url(), USERS, rules).await?),
        };
        let mut redis = server.connect().await?;
        part.before(&format!("{name}, first keys"));
        drive(&player, CALLERS[1], Work::Counted(FIRST), &mut redis).await?;
        contestants.push((name, player, redis, proxy, server));
    }
    let mut samples = vec![vec![Vec::new(); 2]; CALLERS.len()];
    for round in 0..effort.rounds {
        for (samples, callers) in samples.iter_mut().zip(CALLERS) {
            for place in effort.rotated(contestants.len(), round) {
                let (name, player, redis, ..) = &mut contestants[place];
                part.at(round, &format!("{callers} callers, {name}"));
                samples[place].push(turn(player, callers, effort, redis).await?);
            }
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for (callers, samples) in CALLERS.into_iter().zip(&samples) {
        for (name, samples) in [HAND, OURS].into_iter().zip(samples) {
            rows.push(turn::row(format!("{callers} callers, {name}"), samples));
        }
        let what = |quantity| format!("{quantity}, {callers} callers, sluicegate / hand-written");
        ratios.extend([
            ratio(what("operations/s"), &samples[1], &samples[0], |it| it.rate, None),
            ratio(what("p50"), &samples[1], &samples[0], |it| it.p50_us, None),
            ratio(what("Redis CPU per operation"), &samples[1], &samples[0], |it| it.redis_cpu_us, None),
        ]);
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: "one hold and its settlement behind a proxy that adds a round trip of 1 ms: 100,000 keys, a fixed window of tokens and an \
               in-flight limit, all allowed. An operation is two round trips"
            .to_owned(),
        rounds: effort.rounds,
        columns: turn::columns(),
        rows,
        ratios,
    })
}
