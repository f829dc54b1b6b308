//! The scenarios in which all contestants decide the same requests.

use anyhow::Result;

#[cfg(feature = "limitador-redis")]
use super::limitador::Limitador;
use super::{
    CALLERS, HAND, OURS, USERS,
    bounds::{Bound, EXHAUSTED, NEVER_REACHED, PER_USER},
    compare::Compare,
    hand::Hand,
    keys::Keys,
    ours::Ours,
    peer::{Peer, Program},
    run::{Entrant, Player, Scenario},
};
use crate::{args::Args, stats::Target};

pub const RANDOM_KEYS: &str = "random-keys";
pub const HOT_ALLOWED: &str = "hot-allowed";
pub const HOT_DENIED: &str = "hot-denied";
pub const TWO_TIERS: &str = "two-tiers";
pub const IDLE: &str = "idle";

/// Decisions before the first round of a scenario with many keys.
const FIRST_KEYS: u64 = 200_000;

/// The contestants' names.
const LIMITS: &str = "limits (Python)";
const FLEXIBLE: &str = "rate-limiter-flexible (Node)";
const FLEXIBLE_BLOCKING: &str = "rate-limiter-flexible, in-memory block";
#[cfg(feature = "limitador-redis")]
const LIMITADOR: &str = "limitador";

pub async fn random_keys(args: &Args, url: &str) -> Result<Scenario> {
    let mut entrants = both(url, USERS, PER_USER).await?;
    entrants.extend(others(args, url, USERS, PER_USER).await?);
    let mut compare = vec![
        Compare::rate(OURS, HAND, Target::AtLeast(2.0)),
        Compare::p50(OURS, HAND, Target::AtMost(1.0)),
        Compare::redis_cpu(OURS, HAND, Some(Target::AtMost(0.4))),
    ];
    compare.extend(against_others(&entrants));
    Ok(Scenario {
        name: RANDOM_KEYS,
        what: "100,000 keys, equally likely, all allowed, 64 callers. Token buckets; limits, rate-limiter-flexible and \
               limitador have fixed windows, which are less work"
            .to_owned(),
        callers: CALLERS,
        entrants,
        prefill: FIRST_KEYS,
        compare,
    })
}

pub async fn hot_allowed(args: &Args, url: &str) -> Result<Scenario> {
    let mut entrants = both(url, Keys::Hot, NEVER_REACHED).await?;
    entrants.extend(others(args, url, Keys::Hot, NEVER_REACHED).await?);
    let mut compare =
        vec![Compare::rate(OURS, HAND, Target::AtLeast(3.0)), Compare::redis_cpu(OURS, HAND, None)];
    compare.extend(against_others(&entrants));
    Ok(Scenario {
        name: HOT_ALLOWED,
        what: "one key for all 64 callers, with a limit that is never reached".to_owned(),
        callers: CALLERS,
        entrants,
        prefill: 0,
        compare,
    })
}

pub async fn hot_denied(args: &Args, url: &str) -> Result<Scenario> {
    let mut entrants = both(url, Keys::Hot, EXHAUSTED).await?;
    entrants.extend(others(args, url, Keys::Hot, EXHAUSTED).await?);
    if args.wants_peers() {
        let peer = Peer::new(Program::FlexibleBlocking, url, Keys::Hot, EXHAUSTED);
        entrants.push((FLEXIBLE_BLOCKING, Entrant::Process(peer)));
    }
    let mut compare = vec![Compare::rate(OURS, HAND, Target::AtLeast(20.0))];
    compare.extend(against_others(&entrants));
    Ok(Scenario {
        name: HOT_DENIED,
        what: "one exhausted key for all 64 callers: every decision is a denial. sluicegate caches a certain denial for at most \
               a second; rate-limiter-flexible can be configured to cache it until its window ends; the others always call Redis"
            .to_owned(),
        callers: CALLERS,
        entrants,
        prefill: 1,
        compare,
    })
}

pub async fn two_tiers(url: &str) -> Result<Scenario> {
    const TWO: &str = "hand-written, two calls";
    const ONE: &str = "hand-written, one call for both";
    const RULES: &str = "sluicegate, two rules";
    let rules = Ours::two_rules(url, USERS, NEVER_REACHED.bucket()?, PER_USER.bucket()?).await?;
    Ok(Scenario {
        name: TWO_TIERS,
        what:
            "a ceiling shared by all users and a bucket for each of 100,000 users, all allowed, 64 callers. \
               Two calls are not atomic: a denied user has already been charged to the ceiling"
                .to_owned(),
        callers: CALLERS,
        entrants: vec![
            (TWO, hand(Hand::two_calls(url, USERS, NEVER_REACHED, PER_USER).await?)),
            (ONE, hand(Hand::one_call(url, USERS, NEVER_REACHED, PER_USER).await?)),
            (RULES, Entrant::InProcess(Player::Ours(rules))),
        ],
        prefill: FIRST_KEYS,
        compare: vec![
            Compare::rate(RULES, TWO, Target::AtLeast(3.0)),
            Compare::rate_without_target(RULES, ONE),
            Compare::redis_cpu(RULES, TWO, None),
            Compare::redis_cpu(RULES, ONE, None),
        ],
    })
}

pub async fn idle(url: &str) -> Result<Scenario> {
    Ok(Scenario {
        name: IDLE,
        what: "one caller alone, one key: the overhead of sluicegate on a single round trip; four times as many rounds, each a \
               quarter as long"
            .to_owned(),
        callers: 1,
        entrants: both(url, Keys::Hot, NEVER_REACHED).await?,
        prefill: 0,
        compare: vec![Compare::p50(OURS, HAND, Target::About(1.0))],
    })
}

fn hand(hand: Hand) -> Entrant {
    Entrant::InProcess(Player::Hand(hand))
}

/// Returns the two contestants of every scenario, with a token bucket.
async fn both(url: &str, keys: Keys, bound: Bound) -> Result<Vec<(&'static str, Entrant)>> {
    let ours = Player::Ours(Ours::limit(url, keys, bound.bucket()?).await?);
    Ok(vec![(HAND, hand(Hand::gcra(url, keys, bound).await?)), (OURS, Entrant::InProcess(ours))])
}

/// Returns the other contestants, with a fixed window.
async fn others(args: &Args, url: &str, keys: Keys, bound: Bound) -> Result<Vec<(&'static str, Entrant)>> {
    let mut others = Vec::new();
    #[cfg(feature = "limitador-redis")]
    others
        .push((LIMITADOR, Entrant::InProcess(Player::Limitador(Limitador::window(url, keys, bound).await?))));
    if args.wants_peers() {
        let peer = |program| Entrant::Process(Peer::new(program, url, keys, bound));
        others.push((FLEXIBLE, peer(Program::Flexible)));
        others.push((LIMITS, peer(Program::Limits)));
    }
    Ok(others)
}

fn against_others(entrants: &[(&'static str, Entrant)]) -> Vec<Compare> {
    let others = entrants.iter().filter(|(name, _)| ![HAND, OURS].contains(name));
    others.map(|(name, _)| Compare::rate_without_target(OURS, name)).collect()
}
