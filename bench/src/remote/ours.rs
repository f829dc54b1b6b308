//! sluicegate, as an application uses it: default options but for the deadline.

use std::time::Duration;

use anyhow::{Result, bail};
use sluicegate::{Cost, Decision, Labels, Limit, Limiter, Options, RedisStore, Rule, Source};

use super::keys::Keys;

/// On a busy machine a run shall not end in failure policies.
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
    /// Decides by `check_key`.
    pub async fn limit(url: &str, keys: Keys, limit: Limit) -> Result<Self> {
        Ok(Self { limiter: limiter(url, []).await?, keys, by: By::Limit(limit) })
    }

    /// Decides by `check` under two rules: a ceiling for all, and one for each user.
    pub async fn two_rules(url: &str, users: Keys, all: Limit, each: Limit) -> Result<Self> {
        let rules = [Rule::new("everybody", all), Rule::new("per-user", each).per(["user"])];
        Ok(Self { limiter: limiter(url, rules).await?, keys: users, by: By::Rules })
    }

    /// Whether the request may pass.
    pub async fn ask(&self, random: u64) -> Result<bool> {
        let name = self.keys.name(random);
        let decision = match &self.by {
            By::Limit(limit) => self.limiter.check_key(name, limit, Cost::ONE).await?,
            By::Rules => self.limiter.check(&Labels::new([("user", name)])?, Cost::ONE).await?,
        };
        decided(&decision)
    }
}

async fn limiter(url: &str, rules: impl IntoIterator<Item = Rule>) -> Result<Limiter> {
    let options = Options { deadline: DEADLINE, ..Options::default() };
    Ok(Limiter::with_options(RedisStore::connect(url).await?, rules, options)?)
}

/// A failure policy's answer is not a decision, and must not count as one.
fn decided(decision: &Decision) -> Result<bool> {
    match decision.source {
        Source::Store | Source::Cache => Ok(decision.is_allowed()),
        _ => bail!("the store did not decide: {:?}", decision.failure),
    }
}
