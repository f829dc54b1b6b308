//! From a URL to a store: which kind is known only when the server starts.

use std::{fmt, str::FromStr, time::Duration};

use tollgate::{
    Algorithm, Answer, Answered, Check, CounterSnapshot, Deadline, Decided, Key, Limit, MemoryStore,
    Operation, RedisStore, Store, StoreError, StoreStats, Tier, Timestamp,
    redis::{SCHEMES, URLS},
};

use crate::config::StoreSettings;

/// Where counters are kept. Shown without its user and password.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `memory:`: in this process.
    Memory,
    /// `redis://…` and the other URLs of a [`RedisStore`].
    Redis(String),
}

/// A URL of no store. What was given is not repeated: it may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store's URL names no store: use memory: or {URLS}")]
pub struct StoreUrlError;

/// A store of either kind.
pub enum AnyStore {
    /// In this process.
    Memory(MemoryStore),
    /// In Redis.
    Redis(RedisStore),
}

/// Why a store cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("store {url}: {reason}")]
pub struct OpenError {
    url: StoreUrl,
    reason: String,
}

impl FromStr for StoreUrl {
    type Err = StoreUrlError;

    fn from_str(url: &str) -> Result<Self, StoreUrlError> {
        match url {
            "memory:" => Ok(Self::Memory),
            _ if scheme(url).is_some_and(|scheme| SCHEMES.contains(&scheme)) => {
                Ok(Self::Redis(url.to_owned()))
            }
            _ => Err(StoreUrlError),
        }
    }
}

fn scheme(url: &str) -> Option<&str> {
    url.split_once("://").map(|(scheme, _)| scheme)
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory:"),
            // The last `@`, so that one inside a password that was not escaped gives nothing away.
            Self::Redis(url) => match url.rsplit_once('@') {
                Some((_, place)) => write!(f, "{}://…@{place}", scheme(url).unwrap_or_default()),
                None => f.write_str(url),
            },
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoreUrl({self})")
    }
}

impl AnyStore {
    /// The store that the settings name. Redis may be away: it is connected to by [`AnyStore::warm_up`], or with the first decision.
    ///
    /// # Errors
    /// When the settings cannot be used.
    pub fn set_up(settings: &StoreSettings) -> Result<Self, OpenError> {
        let StoreSettings { url, prefix, max_memory, redis, .. } = settings;
        let refused = |reason: String| OpenError { url: url.clone(), reason };
        match url {
            StoreUrl::Memory => {
                let store = MemoryStore::new().with_max_memory(*max_memory);
                store.map(Self::Memory).map_err(|error| refused(error.to_string()))
            }
            StoreUrl::Redis(text) => RedisStore::connect_later_with(text, redis)
                .and_then(|store| store.with_prefix(prefix))
                .map(Self::Redis)
                .map_err(|error| refused(error.to_string())),
        }
    }
}

impl AnyStore {
    /// Does in advance what the first decision would otherwise wait for: see [`RedisStore::warm_up`].
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn warm_up(&self) -> Result<(), StoreError> {
        match self {
            Self::Memory(_) => Ok(()),
            Self::Redis(store) => store.warm_up().await,
        }
    }
}

impl Store for AnyStore {
    async fn decide(&self, checks: &[Check], deadline: Option<Deadline>) -> Result<Decided, StoreError> {
        match self {
            Self::Memory(store) => store.decide(checks, deadline).await,
            Self::Redis(store) => store.decide(checks, deadline).await,
        }
    }

    fn decide_here(&self, check: &Check, tell: &mut dyn FnMut(&Answer)) -> Option<Timestamp> {
        match self {
            Self::Memory(store) => store.decide_here(check, tell),
            Self::Redis(store) => store.decide_here(check, tell),
        }
    }

    #[inline]
    fn decide_one_here(&self, operation: Operation, tier: &Tier) -> Option<(Answer, Timestamp)> {
        match self {
            Self::Memory(store) => store.decide_one_here(operation, tier),
            Self::Redis(store) => store.decide_one_here(operation, tier),
        }
    }

    fn check_each_here(&self, tiers: &[Tier], tell: &mut dyn FnMut(&Answer)) -> bool {
        match self {
            Self::Memory(store) => store.check_each_here(tiers, tell),
            Self::Redis(store) => store.check_each_here(tiers, tell),
        }
    }

    async fn decide_each(
        &self,
        checks: &[Check],
        deadline: Option<Deadline>,
    ) -> Vec<Result<Answered, StoreError>> {
        match self {
            Self::Memory(store) => store.decide_each(checks, deadline).await,
            Self::Redis(store) => store.decide_each(checks, deadline).await,
        }
    }

    fn lane(&self, check: &Check) -> u64 {
        match self {
            Self::Memory(store) => store.lane(check),
            Self::Redis(store) => store.lane(check),
        }
    }

    fn is_remote(&self) -> bool {
        match self {
            Self::Memory(store) => store.is_remote(),
            Self::Redis(store) => store.is_remote(),
        }
    }

    async fn probe(&self, lane: u64) -> Result<(), StoreError> {
        match self {
            Self::Memory(store) => store.probe(lane).await,
            Self::Redis(store) => store.probe(lane).await,
        }
    }

    async fn announce(&self, instance: u64, lifetime: Duration) -> Result<u32, StoreError> {
        match self {
            Self::Memory(store) => store.announce(instance, lifetime).await,
            Self::Redis(store) => store.announce(instance, lifetime).await,
        }
    }

    fn stats(&self) -> StoreStats {
        match self {
            Self::Memory(store) => store.stats(),
            Self::Redis(store) => store.stats(),
        }
    }

    async fn inspect(&self, counters: &[(Key, Limit)]) -> Result<Vec<Option<CounterSnapshot>>, StoreError> {
        match self {
            Self::Memory(store) => store.inspect(counters).await,
            Self::Redis(store) => store.inspect(counters).await,
        }
    }

    async fn reset(&self, counters: &[(Key, Algorithm)]) -> Result<u64, StoreError> {
        match self {
            Self::Memory(store) => store.reset(counters).await,
            Self::Redis(store) => store.reset(counters).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_shown() {
        for url in ["redis://me:s3cret@host:1/2", "redis://:s3cret@host:1/2", "redis://:s3@s3cret@host:1/2"] {
            let url: StoreUrl = url.parse().unwrap();
            assert_eq!(url.to_string(), "redis://…@host:1/2");
            assert_eq!(format!("{url:?}"), "StoreUrl(redis://…@host:1/2)");
        }
        for (url, shown) in [
            ("rediss://me:s3cret@host", "rediss://…@host"),
            ("redis-sentinel://:s3cret@a:1,b:2/main/3", "redis-sentinel://…@a:1,b:2/main/3"),
            ("rediss-sentinel://a:1,b:2/main", "rediss-sentinel://a:1,b:2/main"),
            ("redis-cluster://me:s3cret@a:1,b:2", "redis-cluster://…@a:1,b:2"),
        ] {
            assert_eq!(url.parse::<StoreUrl>().unwrap().to_string(), shown);
        }
        assert_eq!("redis://host".parse::<StoreUrl>().unwrap().to_string(), "redis://host");
    }

    #[test]
    fn other_urls_are_refused_without_being_repeated() {
        for url in ["", "memory", "memory:x", "Redis://:s3cret@host", "postgres://:s3cret@host"] {
            let refusal = url.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(
                refusal.contains("redis://[user:password@]host") && !refusal.contains("s3cret"),
                "{refusal}"
            );
        }
    }
}
