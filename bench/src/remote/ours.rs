//! sluicegate as an application uses it, with default options except for the deadline.

use std::time::Duration;

use anyhow::{Result, bail};
use sluicegate::{Cost, Decision, Labels, Limit, Limiter, Options, RedisStore, Rule, Source};

use super::keys::Keys;

/// Long enough that no failure policy decides on a busy machine.
const DEADLINE: Duration = Duration::from_secs(5);

/// sluicegate, with a limit per call or with rules.
#[derive(Clone)]
pub struct Ours {
    limiter: Limiter,
    keys: Keys,
    by: By,
}

#[derive(Clone)]
enum By {
    Limit(Limit),
    Rules,
}

impl Ours {
    /// Decides with `check_key`.
    pub async fn limit(url: &str, keys: Keys, limit: Limit) -> Result<Self> {
        Ok(Self { limiter: limiter(url, []).await?, keys, by: By::Limit(limit) })
    }

    /// Decides with `check` and two rules: a limit for all users and one per user.
    pub async fn two_rules(url: &str, users: Keys, all: Limit, each: Limit) -> Result<Self> {
        let rules = [Rule::new("global", all), Rule::new("per-user", each).per(["user"])];
        Ok(Self { limiter: limiter(url, rules).await?, keys: users, by: By::Rules })
    }

    /// Returns whether the request is allowed.
    pub async fn decide(&self, random: u64) -> Result<bool> {
        let name = self.keys.name(random);
        let decision = match &self.by {
            By::Limit(limit) => self.limiter.check_key(name, limit, Cost::ONE).await?,
            By::Rules => self.limiter.check(&Labels::new([("user", name)])?, Cost::ONE).await?,
        };
        decided(&decision)
    }
}

async fn limiter(url: &str, rules: impl IntoIterator<Item = Rule>) -> Result<Limiter> {
    let options = Options::default().deadline(DEADLINE);
    Ok(Limiter::builder().store(RedisStore::connect(url).await?).rules(rules).options(options).build()?)
}

/// Returns whether the request is allowed, or an error if a failure policy decided.
fn decided(decision: &Decision) -> Result<bool> {
    match decision.source {
        Source::Store | Source::Cache | Source::Lease => Ok(decision.is_allowed()),
        _ => bail!("the store did not decide: {:?}", decision.failure),
    }
}
