//! The Redis store: one script call per batch, decided next to the data, on Redis's own clock.
//!
//! Only this module names the Redis client. It does not know rules, deadlines or failure policies: it
//! says truthfully what is known about a call, and never sends one again whose bytes have left, unless the
//! reply proves that it did not run.

pub mod keys;
mod presence;
mod script;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::RwLock;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use tokio::time::Instant;
use tollgate_core::{Algorithm, Timestamp};

pub use self::script::MAX_BATCH;
use self::{
    keys::{DEFAULT_PREFIX, MAX_PREFIX, instances_key, redis_key},
    script::{Call, DIGEST, Moments, SOURCE, decode, encode},
};
use crate::{
    check::Check,
    clock::ManualClock,
    key::Key,
    store::{Decided, Store, StoreError},
};

/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the client waits for a reply before it gives the call up; callers give up sooner.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection whose handshake was refused is kept before another is tried.
const RENEWAL_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two attempts to reconnect.
const MAX_RECONNECT_DELAY: Duration = Duration::from_secs(1);

/// Counters in Redis or Valkey. Cheap to clone.
#[derive(Clone)]
pub struct RedisStore {
    link: Arc<Link>,
    prefix: String,
    clock: Option<ManualClock>,
}

/// The connection that all calls share. It comes back by itself after it was lost; but one whose handshake the
/// server refused (a password that is being changed, say) would repeat that refusal for ever, and is made anew.
struct Link {
    client: redis::Client,
    config: ConnectionManagerConfig,
    manager: RwLock<Made>,
}

struct Made {
    manager: ConnectionManager,
    at: Instant,
}

impl Link {
    fn new(client: redis::Client, config: ConnectionManagerConfig) -> redis::RedisResult<Self> {
        let manager = ConnectionManager::new_lazy_with_config(client.clone(), config.clone())?;
        Ok(Self { client, config, manager: RwLock::new(Made { manager, at: Instant::now() }) })
    }

    fn connection(&self) -> ConnectionManager {
        self.manager.read().manager.clone()
    }

    fn renew_if_refused(&self, error: &redis::RedisError) {
        let refused = error.kind() == redis::ErrorKind::AuthenticationFailed
            || matches!(error.code(), Some("WRONGPASS" | "NOAUTH" | "NOPERM"));
        if !refused {
            return;
        }
        let mut made = self.manager.write();
        if made.at.elapsed() < RENEWAL_PAUSE {
            return;
        }
        if let Ok(manager) = ConnectionManager::new_lazy_with_config(self.client.clone(), self.config.clone())
        {
            *made = Made { manager, at: Instant::now() };
        }
    }
}

/// Why a Redis store cannot be set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RedisSetupError {
    /// The URL is not one of a Redis server.
    #[error("{0}: use redis://[user:password@]host[:port][/database]")]
    Url(String),
    /// The server could not be reached, or refused the connection.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The prefix cannot start a key.
    #[error("prefix {0:?} cannot be used: use 1 to {MAX_PREFIX} letters, digits, '-', '_' or '.'")]
    Prefix(String),
}

impl RedisStore {
    /// Connects to `redis://[user:password@]host[:port][/database]`.
    ///
    /// # Errors
    /// When the URL is wrong or the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, RedisSetupError> {
        let store = Self::connect_later(url)?;
        let attempt = async {
            // one attempt that says what is wrong, where the store's own connection would keep trying
            let client = redis::Client::open(url)?;
            redis::cmd("PING").exec_async(&mut client.get_multiplexed_async_connection().await?).await?;
            // so that the first decision finds a connection, and the script
            redis::cmd("SCRIPT").arg("LOAD").arg(SOURCE).exec_async(&mut store.link.connection()).await
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, attempt).await {
            Ok(Ok(())) => Ok(store),
            Ok(Err(error)) => Err(RedisSetupError::Connect(error.to_string())),
            Err(_) => Err(RedisSetupError::Connect(format!("no answer within {CONNECT_TIMEOUT:?}"))),
        }
    }

    /// A store that connects with its first call, so that it can be set up while the server is away.
    ///
    /// # Errors
    /// When the URL is wrong.
    pub fn connect_later(url: &str) -> Result<Self, RedisSetupError> {
        let wrong = |error: redis::RedisError| RedisSetupError::Url(error.to_string());
        let config = ConnectionManagerConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(RESPONSE_TIMEOUT))
            .set_max_delay(MAX_RECONNECT_DELAY);
        let client = redis::Client::open(url).map_err(wrong)?;
        let link = Arc::new(Link::new(client, config).map_err(wrong)?);
        Ok(Self { link, prefix: DEFAULT_PREFIX.to_owned(), clock: None })
    }

    /// The same store with another prefix, so that several can share one Redis.
    ///
    /// # Errors
    /// When the prefix is empty, too long, or has other characters than letters, digits, `-`, `_` and `.`.
    pub fn with_prefix(mut self, prefix: &str) -> Result<Self, RedisSetupError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if prefix.is_empty() || prefix.len() > MAX_PREFIX || !prefix.bytes().all(plain) {
            return Err(RedisSetupError::Prefix(prefix.to_owned()));
        }
        self.prefix = prefix.to_owned();
        Ok(self)
    }

    /// The same store on a clock that is moved by hand instead of the server's: for tests and replays. Keys
    /// then live an hour longer.
    pub fn with_clock(mut self, clock: ManualClock) -> Self {
        self.clock = Some(clock);
        self
    }

    async fn call(&self, call: &Call) -> Result<Vec<u8>, StoreError> {
        match self.send(call, "EVALSHA", &DIGEST).await {
            Err(error) if error.code() == Some("NOSCRIPT") => self.send(call, "EVAL", SOURCE).await,
            reply => reply,
        }
        .map_err(classified)
    }

    async fn send(&self, call: &Call, command: &str, script: &str) -> redis::RedisResult<Vec<u8>> {
        let mut request = redis::cmd(command);
        request.arg(script);
        call.write_to(&mut request);
        let reply = request.query_async(&mut self.link.connection()).await;
        if let Err(error) = &reply {
            self.link.renew_if_refused(error);
        }
        reply
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.prefix)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

impl Store for RedisStore {
    async fn decide(&self, checks: &[Check], deadline: Option<Timestamp>) -> Result<Decided, StoreError> {
        let moments = Moments { now: self.clock.as_ref().map(ManualClock::now), deadline };
        let call = encode(&self.prefix, checks, moments)?;
        let reply = self.call(&call).await?;
        decode(&reply, &call, checks)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn keeps_real_time(&self) -> bool {
        self.clock.is_none()
    }

    async fn probe(&self) -> Result<(), StoreError> {
        // no checks: it shows that scripts run, and touches no key
        let nothing = encode(&self.prefix, &[], Moments::default())?;
        self.call(&nothing).await.map(drop)
    }

    async fn announce(&self, instance: u64, lifetime: Duration) -> Result<u32, StoreError> {
        self.announce_in(&instances_key(&self.prefix), instance, lifetime).await
    }

    async fn reset(&self, counters: &[(Key, Algorithm)]) -> Result<u64, StoreError> {
        let mut forgotten = 0;
        for counters in counters.chunks(MAX_BATCH) {
            let mut request = redis::cmd("UNLINK");
            for (key, algorithm) in counters {
                request.arg(redis_key(&self.prefix, key, *algorithm));
            }
            let found: u64 = request.query_async(&mut self.link.connection()).await.map_err(classified)?;
            forgotten += found;
        }
        Ok(forgotten)
    }
}

/// An error that the server sent is its word that the call did not run; anything else leaves it open.
fn classified(error: redis::RedisError) -> StoreError {
    match error.code() {
        Some(code) => StoreError::NotRun(format!("{code} {}", error.detail().unwrap_or_default())),
        None if error.is_connection_refusal() => StoreError::NotRun(error.to_string()),
        None => StoreError::Ambiguous(error.to_string()),
    }
}
