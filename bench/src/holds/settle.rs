//! A hold and its settlement on many keys.

use anyhow::{Result, ensure};
use redis::aio::MultiplexedConnection;

use super::{
    HAND, OURS,
    contestants::{Hand, Ours, Player, Rules},
    turn::{self, ratio, turn},
};
use crate::{
    args::Args,
    drive::{Work, drive},
    leases::Effort,
    progress::Progress,
    remote::keys::Keys,
    server::Server,
    stats::{Table, Target},
};

/// The table's name.
pub const NAME: &str = "hold-and-settle";

const USERS: Keys = Keys::Random(100_000);
const CALLERS: usize = 64;
/// Operations of each contestant before the first round, so that counters exist.
const FIRST: u64 = 200_000;
const VARIANTS: [(Rules, &str); 2] =
    [(Rules::TokensAndInFlight, "tokens and in flight"), (Rules::Tokens, "tokens")];

struct Entrant {
    variant: &'static str,
    name: &'static str,
    player: Player,
    redis: MultiplexedConnection,
    /// Is stopped when it is dropped.
    _server: Server,
}

/// Fills the table.
pub async fn table(args: &Args, effort: Effort, progress: &Progress) -> Result<Table> {
    let mut entrants = entrants().await?;
    if let Some(part) = &args.solo {
        entrants.retain(|entrant| format!("{}, {}", entrant.variant, entrant.name).contains(part));
        ensure!(!entrants.is_empty(), "{NAME}: no contestant matches {part:?}");
    }
    let part = progress.begin(NAME, effort.rounds * entrants.len());
    for Entrant { variant, name, player, redis, .. } in &mut entrants {
        part.before(&format!("{variant}, {name}, first keys"));
        drive(player, CALLERS, Work::Counted(FIRST), redis).await?;
    }
    let mut samples = vec![Vec::new(); entrants.len()];
    for round in 0..effort.rounds {
        for place in effort.rotated(entrants.len(), round) {
            let Entrant { variant, name, player, redis, .. } = &mut entrants[place];
            part.at(round, &format!("{variant}, {name}"));
            samples[place].push(turn(player, CALLERS, effort, redis).await?);
        }
    }
    let of = |variant, name| {
        let place = entrants.iter().position(|it| it.variant == variant && it.name == name)?;
        Some(&*samples[place])
    };
    let mut ratios = Vec::new();
    for (_, variant) in VARIANTS {
        let (Some(hand), Some(ours)) = (of(variant, HAND), of(variant, OURS)) else { continue };
        let what = |quantity| format!("{quantity}, {variant}, sluicegate / hand-written");
        ratios.extend([
            ratio(what("operations/s"), ours, hand, |it| it.rate, Some(Target::AtLeast(1.5))),
            ratio(what("Redis CPU per operation"), ours, hand, |it| it.redis_cpu_us, None),
            ratio(what("client CPU per operation"), ours, hand, |it| it.client_cpu_us, None),
        ]);
    }
    let rows = entrants.iter().zip(&samples);
    Ok(Table {
        name: NAME.to_owned(),
        what: format!(
            "one hold of 800 tokens, which is settled with 320: 100,000 keys, {CALLERS} callers, all allowed. The rules are a fixed window \
             of tokens, with and without an in-flight limit. The hand-written limiter makes two script calls"
        ),
        rounds: effort.rounds,
        columns: turn::columns(),
        rows: rows.map(|(it, samples)| turn::row(format!("{}, {}", it.variant, it.name), samples)).collect(),
        ratios,
    })
}

async fn entrants() -> Result<Vec<Entrant>> {
    let mut entrants = Vec::new();
    for (rules, variant) in VARIANTS {
        for name in [HAND, OURS] {
            let server = Server::start().await?;
            let player = match name {
                HAND => Player::Hand(Hand::connect(server.url(), USERS, rules).await?),
                _ => Player::Ours(Ours::connect(server.url(), USERS, rules).await?),
            };
            let redis = server.connect().await?;
            entrants.push(Entrant { variant, name, player, redis, _server: server });
        }
    }
    Ok(entrants)
}
