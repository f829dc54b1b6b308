//! The limiters that are compared.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, bail};
use sluicegate::{Cost, Limit, Limiter, Options, RedisStore, Source};

use super::zipf::Zipf;
use crate::{drive::Contestant, remote::hand::Hand};

/// Long enough that no failure policy decides on a busy machine.
const DEADLINE: Duration = Duration::from_secs(5);

/// A contestant in this process.
#[derive(Clone)]
pub enum Player {
    Hand(Hand),
    Ours(Ours),
}

impl Contestant for Player {
    async fn decide(&self, random: u64) -> Result<bool> {
        match self {
            Self::Hand(hand) => hand.decide(random).await,
            Self::Ours(ours) => ours.decide(random).await,
        }
    }
}

impl Player {
    /// Returns the number of units that leases have admitted so far.
    pub async fn leased(&self) -> u64 {
        match self {
            Self::Hand(_) => 0,
            Self::Ours(ours) => ours.leased().await,
        }
    }

    /// Returns the same limiter with a key that has not been used. The rate of the hand-written one does not depend on its key.
    pub fn with_new_key(&self) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        match self {
            Self::Hand(hand) => Self::Hand(hand.clone()),
            Self::Ours(ours) => {
                let key = format!("hot:{}", NUMBER.fetch_add(1, Ordering::Relaxed));
                Self::Ours(ours.with_key(&key))
            }
        }
    }
}

/// The keys of the requests.
#[derive(Clone)]
pub enum Keys {
    One(Arc<str>),
    Zipf(Arc<Zipf>),
}

/// sluicegate as an application uses it, with default options except for the deadline.
#[derive(Clone)]
pub struct Ours {
    limiter: Limiter,
    limit: Limit,
    keys: Keys,
}

impl Ours {
    pub async fn connect(url: &str, limit: Limit, keys: Keys) -> Result<Self> {
        let options = Options::default().deadline(DEADLINE);
        let limiter =
            Limiter::builder().store(RedisStore::connect(url).await?).rules([]).options(options).build()?;
        Ok(Self { limiter, limit, keys })
    }

    /// Returns the same limiter with one key.
    pub fn with_key(&self, key: &str) -> Self {
        Self { keys: Keys::One(key.into()), ..self.clone() }
    }

    /// Ends all leases, and returns the number of units that leases have admitted so far.
    pub async fn leased(&self) -> u64 {
        self.limiter.return_leases().await;
        self.limiter.stats().leases.spent
    }

    /// Returns whether the request is allowed.
    pub async fn decide(&self, random: u64) -> Result<bool> {
        let decision = match &self.keys {
            Keys::One(key) => self.limiter.check_key(&**key, &self.limit, Cost::ONE).await?,
            Keys::Zipf(zipf) => {
                let key = format!("user:{}", zipf.key(random));
                self.limiter.check_key(key, &self.limit, Cost::ONE).await?
            }
        };
        match decision.source {
            Source::Store | Source::Cache | Source::Lease => Ok(decision.is_allowed()),
            _ => bail!("the store did not decide: {:?}", decision.failure),
        }
    }
}
