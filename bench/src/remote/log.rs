//! Sliding logs of about a thousand entries: speed while they grow, speed while entries expire as fast as new ones are added,
//! and memory in Redis.

use std::time::Duration;

use anyhow::{Context, Result};
use redis::aio::MultiplexedConnection;

use super::{
    CALLERS, HAND, OURS,
    bounds::{LOG, LOG_CHURNING, LOG_GROWING},
    compare::Compare,
    hand::{Hand, hand_key},
    keys::Keys,
    ours::Ours,
    run::{Entrant, Player, Scenario, cells, columns},
};
use crate::{
    args::Effort,
    drive::{Work, drive},
    progress::Progress,
    server::{self, Server},
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// The tables' names.
pub const GROWING: &str = "log";
pub const CHURN: &str = "log-churn";

/// Target for both rates relative to a sorted set.
const SPEED: Target = Target::AtLeast(1.3);
/// Number of logs.
const LOGS: u64 = 100;
/// Mean number of entries of a log before and after the measurement.
const GROWS: (u64, u64) = (800, 1200);
/// Longer than the window of the churning logs: afterwards, entries expire as fast as they are added.
const UNTIL_STEADY: Duration = Duration::from_millis(1200);

/// Entries are added and expire. A faster contestant has longer logs to search.
pub async fn churn(url: &str) -> Result<Scenario> {
    let keys = Keys::Random(LOGS);
    let ours = Ours::limit(url, keys, LOG_CHURNING.log()?).await?;
    Ok(Scenario {
        name: CHURN,
        what: format!(
            "sliding logs in a steady state: {LOGS} of them with a window of a second, so that each holds a hundredth of \
             the rate and every new entry replaces an expired one; all allowed, 64 callers. A faster contestant has longer \
             logs"
        ),
        callers: CALLERS,
        entrants: vec![
            (HAND, Entrant::InProcess(Player::Hand(Hand::log(url, keys, LOG_CHURNING).await?))),
            (OURS, Entrant::InProcess(Player::Ours(ours))),
        ],
        prefill: 0,
        compare: vec![Compare::rate(OURS, HAND, SPEED), Compare::redis_cpu(OURS, HAND, None)],
    })
}

/// Extends the warm-up until entries expire.
pub fn until_steady(effort: Effort) -> Effort {
    effort.with_warm_up(UNTIL_STEADY)
}

/// Measures logs that grow, and the memory of one.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let effort = effort.for_targets([Some(SPEED)]);
    let progress = progress.begin(GROWING, 2 * effort.rounds);
    let mut redis = server.connect().await?;
    let mut samples = vec![(HAND, Vec::new()), (OURS, Vec::new())];
    for round in 0..effort.rounds {
        for turn in 0..samples.len() {
            let place = (turn + round) % samples.len();
            let (name, samples) = &mut samples[place];
            progress.at(round, name);
            server::empty(&mut redis).await?;
            let player = growing(name, server.url()).await?;
            drive(&player, CALLERS, Work::Counted(LOGS * GROWS.0), &mut redis).await?;
            let work = Work::Counted(LOGS * (GROWS.1 - GROWS.0));
            samples.push(drive(&player, CALLERS, work, &mut redis).await?);
        }
    }

    let (hand_bytes, our_bytes) =
        (memory(HAND, server, &mut redis).await?, memory(OURS, server, &mut redis).await?);
    let rows = samples.iter().zip([hand_bytes, our_bytes]).map(|((name, samples), bytes)| {
        let mut cells = cells(samples);
        cells.push(Some(Stat::of([bytes])));
        Row { contestant: (*name).to_owned(), cells }
    });
    let speed = Compare::rate(OURS, HAND, SPEED).ratio(&samples)?;
    let cpu = Compare::redis_cpu(OURS, HAND, None).ratio(&samples)?;
    let memory = Ratio {
        what: format!("bytes of 1000 entries, {OURS} / {HAND}"),
        stat: Stat::of([our_bytes / hand_bytes]),
        target: Some(Target::AtMost(0.12)),
    };
    let mut columns = columns();
    columns.push(Column::new("bytes of 1000 entries", 0));
    Ok(Table {
        name: GROWING.to_owned(),
        what: format!(
            "sliding logs: {LOGS} of them grow from {} to {} entries, all allowed, 64 callers; and MEMORY USAGE \
             of one that holds 1000. The hand-written one is a sorted set",
            GROWS.0, GROWS.1
        ),
        rounds: effort.rounds,
        columns,
        rows: rows.collect(),
        ratios: vec![speed, memory, cpu],
    })
}

async fn growing(name: &str, url: &str) -> Result<Player> {
    let keys = Keys::Random(LOGS);
    Ok(if name == HAND {
        Player::Hand(Hand::log(url, keys, LOG_GROWING).await?)
    } else {
        Player::Ours(Ours::limit(url, keys, LOG_GROWING.log()?).await?)
    })
}

/// Returns the memory of a log after a thousand sequential requests.
async fn memory(name: &str, server: &Server, redis: &mut MultiplexedConnection) -> Result<f64> {
    server::empty(redis).await?;
    let (url, keys) = (server.url(), Keys::Hot);
    let player = if name == HAND {
        Player::Hand(Hand::log(url, keys, LOG).await?)
    } else {
        Player::Ours(Ours::limit(url, keys, LOG.log()?).await?)
    };
    let sample = drive(&player, 1, Work::Counted(LOG.amount), redis).await?;
    anyhow::ensure!(sample.allowed == LOG.amount, "{} of {} were admitted", sample.allowed, LOG.amount);
    let found: Vec<String> = redis::cmd("KEYS").arg("*").query_async(redis).await?;
    let key = found.first().with_context(|| format!("there is no {}", hand_key(keys, 0)))?;
    anyhow::ensure!(found.len() == 1, "one log is one key, not {found:?}");
    Ok(redis::cmd("MEMORY").arg("USAGE").arg(key).arg("SAMPLES").arg(0).query_async(redis).await?)
}
