//! One concurrency counter with few and with many live holds.

use std::time::Duration;

use anyhow::Result;
use tokio::task::JoinSet;

use super::{
    contestants::Ours,
    turn::{self, ratio, turn},
};
use crate::{
    drive::Contestant,
    leases::Effort,
    progress::Progress,
    remote::keys::Keys,
    server::Server,
    stats::{Table, Target},
};

/// The table's name.
pub const NAME: &str = "live-holds";

const LIVE: [u64; 3] = [10, 1_000, 10_000];
const CALLERS: [usize; 2] = [1, 64];
/// Above the number of live holds.
const AMOUNT: u64 = 1_000_000;
/// Longer than a run.
const LIFETIME: Duration = Duration::from_secs(3_600);
/// Holds that are made at a time.
const CONCURRENT: u64 = 100;
const INDEPENDENT: Target = Target::AtMost(1.2);

/// Makes holds and releases them at once.
#[derive(Clone)]
struct Releasing(Ours);

impl Contestant for Releasing {
    async fn decide(&self, random: u64) -> Result<bool> {
        self.0.hold_and_release(random).await
    }
}

/// Fills the table.
pub async fn table(effort: Effort, progress: &Progress) -> Result<Table> {
    let part = progress.begin(NAME, effort.rounds * LIVE.len() * CALLERS.len());
    let mut contestants = Vec::new();
    for live in LIVE {
        part.before(&format!("{live} live holds"));
        let server = Server::start().await?;
        let ours = Ours::in_flight(server.url(), Keys::Hot, AMOUNT).await?;
        fill(&ours, live).await?;
        let redis = server.connect().await?;
        contestants.push((live, Releasing(ours), redis, server));
    }
    let mut samples = vec![vec![Vec::new(); LIVE.len()]; CALLERS.len()];
    for round in 0..effort.rounds {
        for place in effort.rotated(LIVE.len(), round) {
            let (live, player, redis, _) = &mut contestants[place];
            for (samples, callers) in samples.iter_mut().zip(CALLERS) {
                part.at(round, &format!("{callers} callers, {live} live holds"));
                samples[place].push(turn(player, callers, effort, redis).await?);
            }
        }
    }
    let (mut rows, mut ratios) = (Vec::new(), Vec::new());
    for (callers, samples) in CALLERS.into_iter().zip(&samples) {
        let callers = if callers == 1 { "1 caller".to_owned() } else { format!("{callers} callers") };
        for (live, samples) in LIVE.into_iter().zip(samples) {
            rows.push(turn::row(format!("{callers}, {live} live holds"), samples));
        }
        let (few, many) = (&samples[0], &samples[LIVE.len() - 1]);
        let what = |quantity| format!("{quantity}, {callers}, 10,000 live holds / 10");
        ratios.extend([
            ratio(what("time per operation"), many, few, |it| it.rate.recip(), Some(INDEPENDENT)),
            ratio(what("Redis CPU per operation"), many, few, |it| it.redis_cpu_us, Some(INDEPENDENT)),
        ]);
    }
    Ok(Table {
        name: NAME.to_owned(),
        what: "one hold, which is released, on one concurrency counter with 10 to 10,000 other live holds"
            .to_owned(),
        rounds: effort.rounds,
        columns: turn::columns(),
        rows,
        ratios,
    })
}

async fn fill(ours: &Ours, live: u64) -> Result<()> {
    for first in (0..live).step_by(CONCURRENT as usize) {
        let mut holds = JoinSet::new();
        for place in first..live.min(first + CONCURRENT) {
            let ours = ours.clone();
            holds.spawn(async move { ours.hold_for(place, LIFETIME).await });
        }
        while let Some(held) = holds.join_next().await {
            held??;
        }
    }
    Ok(())
}
