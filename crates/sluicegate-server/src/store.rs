//! From a URL to a store: which kind is known only when the server starts.

use std::{fmt, str::FromStr};

use sluicegate::{
    MemoryStore, RedisStore, Store,
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

/// Builds the store that the settings name. Redis may be down: it is connected to by [`Limiter::warm_up`](sluicegate::Limiter::warm_up),
/// or with the first decision.
///
/// # Errors
/// When the settings are invalid.
pub fn open(settings: &StoreSettings) -> Result<Store, OpenError> {
    let StoreSettings { url, prefix, max_memory, redis, .. } = settings;
    let invalid = |reason: String| OpenError { url: url.clone(), reason };
    match url {
        StoreUrl::Memory => MemoryStore::new()
            .with_max_memory(*max_memory)
            .map(Store::from)
            .map_err(|error| invalid(error.to_string())),
        StoreUrl::Redis(text) => RedisStore::connect_later_with(text, redis)
            .and_then(|store| store.with_prefix(prefix))
            .map(Store::from)
            .map_err(|error| invalid(error.to_string())),
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
