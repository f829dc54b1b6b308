//! Opens the store that a URL names.

use std::{fmt, str::FromStr};

use sluicegate::{
    MemoryStore, RedisStore,
    redis::{SCHEMES, URLS},
    store::Store,
};

use crate::config::StoreSettings;

/// The URL of a store. Printed without its user and password.
#[derive(Clone, PartialEq, Eq)]
pub enum StoreUrl {
    /// `memory:`, the memory of this process.
    Memory,
    /// `redis://…` and the other URLs of a [`RedisStore`].
    Redis(String),
}

/// The URL is invalid. The error does not quote it, since it may contain a password.
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
            // Split at the last `@`: an unescaped `@` in the password must not reveal its rest.
            Self::Redis(url) => match url.rsplit_once('@') {
                Some((_, host)) => write!(f, "{}://…@{host}", scheme(url).unwrap_or_default()),
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

/// Builds the store of these settings. Redis may be down: [`Limiter::warm_up`](sluicegate::Limiter::warm_up) or the first decision
/// connects to it.
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
    fn other_urls_are_rejected_without_being_quoted() {
        for url in ["", "memory", "memory:x", "Redis://:s3cret@host", "postgres://:s3cret@host"] {
            let error = url.parse::<StoreUrl>().unwrap_err().to_string();
            assert!(error.contains("redis://[user:password@]host") && !error.contains("s3cret"), "{error}");
        }
    }
}
