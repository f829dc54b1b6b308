//! Sliding logs of about a thousand entries: speed while they grow, and what one takes in Redis.

use anyhow::{Context, Result};
use redis::aio::MultiplexedConnection;

use super::{
    CALLERS, HAND, OURS,
    bounds::{LOG, LOG_GROWING},
    hand::{Hand, hand_key},
    keys::Keys,
    ours::Ours,
    run::{Compare, Player, cells, columns},
};
use crate::{
    args::Effort,
    drive::{Work, drive},
    progress::Progress,
    server::{self, Server},
    stats::{Column, Ratio, Row, Stat, Table, Target},
};

/// How many logs grow at once.
const LOGS: u64 = 100;
/// How many entries each has before and after the measurement, on average.
const GROWS: (u64, u64) = (800, 1200);

/// Fills the table.
pub async fn table(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let mut redis = server.connect().await?;
    let mut samples = vec![(HAND, Vec::new()), (OURS, Vec::new())];
    for round in 0..effort.rounds {
        for turn in 0..samples.len() {
            let place = (turn + round) % samples.len();
            let (name, samples) = &mut samples[place];
            progress.at("log", round, name);
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
    let speed = Compare::rate(OURS, HAND, Target::AtLeast(1.3)).ratio(&samples)?;
    let cpu = Compare::redis_cpu(OURS, HAND, None).ratio(&samples)?;
    let memory = Ratio {
        what: format!("bytes of 1000 entries, {OURS} / {HAND}"),
        stat: Stat::of([our_bytes / hand_bytes]),
        target: Some(Target::AtMost(0.12)),
    };
    let mut columns = columns();
    columns.push(Column::new("bytes of 1000 entries", 0));
    Ok(Table {
        name: "log".to_owned(),
        what: format!(
            "sliding logs: {LOGS} of them grow from {} to {} entries, all allowed, 64 callers; and MEMORY USAGE \
             of one that holds 1000. The hand-written one is a sorted set",
            GROWS.0, GROWS.1
        ),
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

/// What Redis says about the only key there is, after a thousand requests one by one.
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
