//! The limiters that are compared.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use redis::{Script, ScriptInvocation, aio::ConnectionManager};
use sluicegate::{
    Cost, Costs, Labels, Limit, Limiter, Options, RedisStore, Rule, Source,
    limiter::{HoldDecision, SettleOutcome},
};

use super::{ACTUAL, ESTIMATE, IN_FLIGHT, TOKENS, TTL, WINDOW};
use crate::{
    drive::Contestant,
    remote::{hand, keys::Keys},
};

/// Long enough that no failure policy decides on a busy machine.
const DEADLINE: Duration = Duration::from_secs(5);
/// The label that rules count by, and the unit of the budget.
const USER: &str = "user";
const TOKENS_UNIT: &str = "tokens";

/// The rules of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rules {
    /// A fixed window of tokens.
    Tokens,
    /// The same, and an in-flight limit.
    TokensAndInFlight,
}

/// A contestant in this process. It decides a hold, and settles it.
#[derive(Clone)]
pub enum Player {
    Hand(Hand),
    Ours(Ours),
}

impl Contestant for Player {
    async fn decide(&self, random: u64) -> Result<bool> {
        match self {
            Self::Hand(hand) => hand.hold_and_settle(random).await,
            Self::Ours(ours) => ours.hold_and_settle(random).await,
        }
    }
}

/// The hand-written limiter: two scripts, called by their digests.
#[derive(Clone)]
pub struct Hand {
    connection: ConnectionManager,
    scripts: Arc<[Script; 2]>,
    rules: Rules,
    keys: Keys,
    ids: Arc<Ids>,
}

/// Unique ids, such as `5f3a9c0117b2d4e6-17`.
struct Ids {
    process: u64,
    count: AtomicU64,
}

impl Ids {
    fn next(&self) -> String {
        format!("{:016x}-{}", self.process, self.count.fetch_add(1, Ordering::Relaxed))
    }
}

impl Hand {
    pub async fn connect(url: &str, keys: Keys, rules: Rules) -> Result<Self> {
        let sources = match rules {
            Rules::Tokens => [
                include_str!("../remote/lua/hold_tokens.lua"),
                include_str!("../remote/lua/settle_tokens.lua"),
            ],
            Rules::TokensAndInFlight => [
                include_str!("../remote/lua/hold_in_flight.lua"),
                include_str!("../remote/lua/settle_in_flight.lua"),
            ],
        };
        let connection = hand::connect(url).await?;
        let scripts = sources.map(Script::new);
        for script in &scripts {
            script.load_async(&mut connection.clone()).await?;
        }
        let ids = Arc::new(Ids { process: fastrand::u64(..), count: AtomicU64::new(0) });
        Ok(Self { connection, scripts: Arc::new(scripts), rules, keys, ids })
    }

    async fn hold_and_settle(&self, random: u64) -> Result<bool> {
        let [hold, settle] = &*self.scripts;
        let (user, id) = (hand::hand_key(self.keys, random), self.ids.next());
        let mut call = self.call(hold, &user, &id);
        call.arg(TOKENS).arg(WINDOW.as_millis() as u64).arg(ESTIMATE).arg(TTL.as_millis() as u64);
        if self.rules == Rules::TokensAndInFlight {
            call.arg(IN_FLIGHT).arg(&id);
        }
        let (is_allowed, _wait): (u8, i64) = call.invoke_async(&mut self.connection.clone()).await?;
        if is_allowed == 0 {
            return Ok(false);
        }
        let mut call = self.call(settle, &user, &id);
        call.arg(ACTUAL);
        if self.rules == Rules::TokensAndInFlight {
            call.arg(&id);
        }
        let is_settled: u8 = call.invoke_async(&mut self.connection.clone()).await?;
        ensure!(is_settled == 1, "the hold is not known");
        Ok(true)
    }

    fn call<'a>(&self, script: &'a Script, user: &str, id: &str) -> ScriptInvocation<'a> {
        let mut call = script.key(user);
        call.key(format!("hold:{id}"));
        if self.rules == Rules::TokensAndInFlight {
            call.key(format!("{user}:in-flight"));
        }
        call
    }
}

/// sluicegate as an application uses it, with default options except for the deadline.
#[derive(Clone)]
pub struct Ours {
    limiter: Limiter,
    keys: Keys,
    costs: Costs,
    actual: Costs,
}

impl Ours {
    pub async fn connect(url: &str, keys: Keys, rules: Rules) -> Result<Self> {
        let tokens = Rule::new("tokens", Limit::fixed_window(TOKENS, WINDOW)?).unit(TOKENS_UNIT).per([USER]);
        let in_flight = Rule::new("in-flight", Limit::concurrency(IN_FLIGHT)?).per([USER]);
        match rules {
            Rules::Tokens => Self::with_rules(url, keys, vec![tokens]).await,
            Rules::TokensAndInFlight => Self::with_rules(url, keys, vec![tokens, in_flight]).await,
        }
    }

    /// Connects a limiter with one in-flight limit.
    pub async fn in_flight(url: &str, keys: Keys, amount: u64) -> Result<Self> {
        let rule = Rule::new("in-flight", Limit::concurrency(amount)?).per([USER]);
        Self::with_rules(url, keys, vec![rule]).await
    }

    async fn with_rules(url: &str, keys: Keys, rules: Vec<Rule>) -> Result<Self> {
        let options = Options::default().deadline(DEADLINE);
        let limiter = Limiter::builder()
            .store(RedisStore::connect(url).await?)
            .rules(rules)
            .options(options)
            .build()?;
        let tokens = |count| Ok::<_, anyhow::Error>(Costs::new([(TOKENS_UNIT, Cost::new(count)?)])?);
        Ok(Self { limiter, keys, costs: tokens(ESTIMATE)?, actual: tokens(ACTUAL)? })
    }

    async fn hold_and_settle(&self, random: u64) -> Result<bool> {
        let hold = self.limiter.hold(&self.labels(random)?, self.costs.clone()).await?;
        ensure_stored(hold.decision())?;
        if !hold.is_allowed() {
            return Ok(false);
        }
        match hold.settle(self.actual.clone()).await?.outcome {
            SettleOutcome::Settled => Ok(true),
            other => bail!("the hold was not settled: {other:?}"),
        }
    }

    /// Makes a hold that stays live.
    pub async fn hold_for(&self, random: u64, ttl: Duration) -> Result<()> {
        let hold = self.limiter.hold(&self.labels(random)?, self.costs.clone()).ttl(ttl).decide().await?;
        ensure_stored(&hold)?;
        ensure!(hold.decision.is_allowed(), "a limit above the demand was reached");
        Ok(())
    }

    /// Makes a hold, and releases it.
    pub async fn hold_and_release(&self, random: u64) -> Result<bool> {
        let hold = self.limiter.hold(&self.labels(random)?, self.costs.clone()).await?;
        ensure_stored(hold.decision())?;
        if !hold.is_allowed() {
            return Ok(false);
        }
        match hold.release().await?.outcome {
            SettleOutcome::Released => Ok(true),
            other => bail!("the hold was not released: {other:?}"),
        }
    }

    fn labels(&self, random: u64) -> Result<Labels> {
        Ok(Labels::new([(USER, self.keys.name(random))])?)
    }
}

fn ensure_stored(hold: &HoldDecision) -> Result<()> {
    let decision = &hold.decision;
    ensure!(decision.source == Source::Store, "the store did not decide: {:?}", decision.failure);
    Ok(())
}
