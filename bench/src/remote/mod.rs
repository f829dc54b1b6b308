//! Redis-backed contestants: one private server, one process, callers in closed loops.
//!
//! Each scenario is a table: who plays, what is read off, and which ratio has a target.

mod bounds;
mod hand;
mod keys;
mod log;
mod ours;
mod run;

use anyhow::Result;

use self::{
    bounds::{EXACT, EXHAUSTED, NEVER_REACHED, PER_USER},
    hand::Hand,
    keys::Keys,
    ours::Ours,
    run::{Compare, Player, Scenario, columns},
};
use crate::{
    args::{Args, Effort},
    drive::Work,
    progress::Progress,
    server::Server,
    stats::{Column, Row, Stat, Table, Target},
};

/// How many callers, unless the scenario is about their number.
const CALLERS: usize = 64;
/// How many users.
const USERS: Keys = Keys::Random(100_000);
/// Asked at a limit that admits 10,000 of them.
const EXACT_REQUESTS: u64 = 30_000;
/// How many callers the crowd has.
const CROWDS: [usize; 6] = [1, 4, 16, 64, 256, 1000];

const HAND: &str = "hand-written";
const OURS: &str = "tollgate";

/// All tables that are wanted.
pub async fn tables(args: &Args, server: &Server, progress: &Progress) -> Result<Vec<Table>> {
    let (url, effort) = (server.url(), args.effort());
    let mut tables = Vec::new();
    for name in ["random-keys", "hot-allowed", "hot-refused", "two-tiers", "idle", "crowd", "exact", "log"] {
        if !args.wants(name) {
            continue;
        }
        tables.push(match name {
            "random-keys" => random_keys(url).await?.run(args, effort, server, progress).await?,
            "hot-allowed" => hot_allowed(url).await?.run(args, effort, server, progress).await?,
            "hot-refused" => hot_refused(url).await?.run(args, effort, server, progress).await?,
            "two-tiers" => two_tiers(url).await?.run(args, effort, server, progress).await?,
            "idle" => idle(url).await?.run(args, effort.in_short_turns(), server, progress).await?,
            "crowd" => crowd(url, effort, server, progress).await?,
            "exact" => exact(effort, server, progress).await?,
            _ => log::table(effort, server, progress).await?,
        });
    }
    Ok(tables)
}

async fn random_keys(url: &str) -> Result<Scenario> {
    Ok(Scenario {
        name: "random-keys",
        what: "100,000 keys, equally likely, token bucket, all allowed, 64 callers",
        callers: CALLERS,
        players: vec![
            (HAND, Player::Hand(Hand::gcra(url, USERS, PER_USER).await?)),
            (OURS, Player::Ours(Ours::limit(url, USERS, PER_USER.bucket()?).await?)),
        ],
        prefill: 200_000,
        compare: vec![
            Compare::rate(OURS, HAND, Target::AtLeast(2.0)),
            Compare::redis_cpu(OURS, HAND, Some(Target::AtMost(0.4))),
        ],
    })
}

async fn hot_allowed(url: &str) -> Result<Scenario> {
    Ok(Scenario {
        name: "hot-allowed",
        what: "one key for all 64 callers, token bucket that is never used up",
        callers: CALLERS,
        players: vec![
            (HAND, Player::Hand(Hand::gcra(url, Keys::Hot, NEVER_REACHED).await?)),
            (OURS, Player::Ours(Ours::limit(url, Keys::Hot, NEVER_REACHED.bucket()?).await?)),
        ],
        prefill: 0,
        compare: vec![Compare::rate(OURS, HAND, Target::AtLeast(3.0)), Compare::redis_cpu(OURS, HAND, None)],
    })
}

async fn hot_refused(url: &str) -> Result<Scenario> {
    Ok(Scenario {
        name: "hot-refused",
        what: "one key for all 64 callers, used up: every decision is a refusal. tollgate repeats a certain \
               refusal for at most a second before it asks Redis again; the hand-written one always asks",
        callers: CALLERS,
        players: vec![
            (HAND, Player::Hand(Hand::gcra(url, Keys::Hot, EXHAUSTED).await?)),
            (OURS, Player::Ours(Ours::limit(url, Keys::Hot, EXHAUSTED.bucket()?).await?)),
        ],
        prefill: 1,
        compare: vec![Compare::rate(OURS, HAND, Target::AtLeast(20.0))],
    })
}

async fn two_tiers(url: &str) -> Result<Scenario> {
    const TWO: &str = "hand-written, two calls";
    const ONE: &str = "hand-written, one call for both";
    const RULES: &str = "tollgate, two rules";
    Ok(Scenario {
        name: "two-tiers",
        what: "a ceiling shared by everybody and a bucket for each of 100,000 users, all allowed, 64 callers. \
               Two calls are not atomic: a user's refusal has already used the ceiling",
        callers: CALLERS,
        players: vec![
            (TWO, Player::Hand(Hand::two_calls(url, USERS, NEVER_REACHED, PER_USER).await?)),
            (ONE, Player::Hand(Hand::one_call(url, USERS, NEVER_REACHED, PER_USER).await?)),
            (
                RULES,
                Player::Ours(Ours::two_rules(url, USERS, NEVER_REACHED.bucket()?, PER_USER.bucket()?).await?),
            ),
        ],
        prefill: 200_000,
        compare: vec![
            Compare::rate(RULES, TWO, Target::AtLeast(3.0)),
            Compare::rate_without_target(RULES, ONE),
            Compare::redis_cpu(RULES, TWO, None),
            Compare::redis_cpu(RULES, ONE, None),
        ],
    })
}

async fn idle(url: &str) -> Result<Scenario> {
    Ok(Scenario {
        name: "idle",
        what: "one caller alone, one key: what the gate adds to a single round trip",
        callers: 1,
        players: vec![
            (HAND, Player::Hand(Hand::gcra(url, Keys::Hot, NEVER_REACHED).await?)),
            (OURS, Player::Ours(Ours::limit(url, Keys::Hot, NEVER_REACHED.bucket()?).await?)),
        ],
        prefill: 0,
        compare: vec![Compare::p50(OURS, HAND, Target::About(1.0))],
    })
}

/// The hot key again, with a growing number of callers.
async fn crowd(url: &str, effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let ours = Player::Ours(Ours::limit(url, Keys::Hot, NEVER_REACHED.bucket()?).await?);
    let mut redis = server.connect().await?;
    let mut samples = vec![Vec::new(); CROWDS.len()];
    for round in 0..effort.rounds {
        for (callers, samples) in CROWDS.into_iter().zip(&mut samples) {
            progress.at("crowd", round, &format!("{callers} callers"));
            samples.push(run::timed(&ours, callers, effort, &mut redis).await?);
        }
    }
    let row = |(callers, samples): (usize, &Vec<_>)| Row {
        contestant: format!("tollgate, {callers} callers"),
        cells: run::cells(samples),
    };
    Ok(Table {
        name: "crowd".to_owned(),
        what: "one key that is never used up, and a growing number of callers".to_owned(),
        columns: columns(),
        rows: CROWDS.into_iter().zip(&samples).map(row).collect(),
        ratios: Vec::new(),
    })
}

/// Does a limit of 10,000 admit 10,000?
async fn exact(effort: Effort, server: &Server, progress: &Progress) -> Result<Table> {
    let mut redis = server.connect().await?;
    let url = server.url();
    let mut rows = Vec::new();
    for name in [HAND, OURS] {
        let mut admitted = Vec::new();
        for round in 0..effort.rounds {
            progress.at("exact", round, name);
            crate::server::empty(&mut redis).await?;
            // a limiter of its own for each round: one that has seen the key refused would remember it
            let player = if name == HAND {
                Player::Hand(Hand::gcra(url, Keys::Hot, EXACT).await?)
            } else {
                Player::Ours(Ours::limit(url, Keys::Hot, EXACT.bucket()?).await?)
            };
            let work = Work::Counted(EXACT_REQUESTS);
            admitted.push(crate::drive::drive(&player, CALLERS, work, &mut redis).await?.allowed as f64);
        }
        rows.push(Row { contestant: name.to_owned(), cells: vec![Some(Stat::of(admitted))] });
    }
    Ok(Table {
        name: "exact".to_owned(),
        what: format!("{EXACT_REQUESTS} requests by 64 callers at one key whose limit is {}", EXACT.amount),
        columns: vec![Column::new("admitted", 0)],
        rows,
        ratios: Vec::new(),
    })
}
