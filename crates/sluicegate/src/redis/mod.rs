//! The Redis store: one script call per batch, decided on the server and on its clock.
//!
//! Only this module uses the Redis client. It is independent of rules and failure policies. It reports whether a call
//! ran, did not run or may have run, and never repeats a call that was sent, unless the reply proves that it did not
//! run.

#![cfg_attr(not(feature = "inspect"), expect(dead_code, reason = "some of it is only for inspection"))]

mod clock_offset;
mod cluster;
mod connection;
mod connector;
mod dial_backoff;
mod health;
#[cfg(feature = "inspect")]
pub mod inspect;
mod instances;
pub mod keys;
mod primary;
mod script;
mod sentinel;
mod settings;
mod snapshot;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;
mod url;

use std::{fmt, slice, sync::Arc, time::Duration};

use redis::{FromRedisValue, Value};
use sluicegate_core::{Algorithm, Limit, Timestamp};

use self::{
    cluster::Cluster,
    connection::{CallFailure, RedisRequest},
    connector::Connector,
    keys::{
        DEFAULT_PREFIX, INSTANCES, MAX_PREFIX, counter_keys, holds_key, instances_key, lease_key, probe_key,
        redis_key,
    },
    primary::Primary,
    script::{CallTimes, SOURCE, decode, encode},
    sentinel::Sentinels,
    url::{Node, UrlTopology},
};
pub use self::{
    script::MAX_BATCH,
    settings::{DEFAULT_CLIENT_NAME, RedisSettings, Secret},
    url::SCHEMES,
};
use crate::{
    check::Check,
    clock::ManualClock,
    key::Key,
    stats::StoreStats,
    store::{BoxFuture, CheckAnswer, CounterSnapshot, Deadline, RemoteStore, StoreError, per_check},
};

/// The complete script. Programs in other languages can call it with the same keys and share the counters: see `docs/lua.md` in
/// the repository.
pub const SCRIPT: &str = SOURCE;

/// Counters in Redis or Valkey. Cheap to clone.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use sluicegate::{Cost, Limit, Limiter, RedisStore};
///
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?.with_prefix("shop")?;
/// let limiter = Limiter::new(store, [])?;
/// let limit = Limit::token_bucket(100, Duration::from_secs(1))?;
/// let decision = limiter.check_key("user:42", &limit, Cost::ONE).await?;
/// # Ok(())
/// # }
/// ```
///
/// [`RedisStore::connect_later`] does not wait for Redis: until Redis is available, the failure policy of each rule decides. For
/// passwords and certificates, see [`RedisSettings`].
#[derive(Clone)]
pub struct RedisStore {
    backend: Backend,
    prefix: String,
    clock: Option<ManualClock>,
}

/// The servers behind a store.
#[derive(Clone)]
enum Backend {
    Primary(Arc<Primary>),
    Cluster(Arc<Cluster>),
}

/// Why a Redis store cannot be created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RedisSetupError {
    /// The URL is invalid.
    #[error("{0}: use {URLS}")]
    Url(String),
    /// There is a user without a password.
    #[error("user without password: set both, or only the password of the user `default`")]
    Credentials,
    /// A certificate or key cannot be used.
    #[error("{0}: use PEM and a rediss:// URL")]
    Tls(String),
    /// The client name is invalid.
    #[error("client name {0:?} is invalid: use 1 to 64 visible ASCII characters without spaces")]
    ClientName(String),
    /// The server is unreachable or rejected the connection.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The prefix is invalid.
    #[error("prefix {0:?} is invalid: use 1 to {MAX_PREFIX} letters, digits, '-', '_' or '.'")]
    Prefix(String),
}

/// The URLs of a [`RedisStore`]. Use `rediss` instead of `redis` for TLS.
pub const URLS: &str = "redis://[user:password@]host[:port][/database], \
    redis-sentinel://[user:password@]host[:port],…/name[/database] or \
    redis-cluster://[user:password@]host[:port],…, each with rediss for TLS";

/// Where the servers are and how to connect to them, from URL and settings.
struct Deployment {
    /// Connects to the servers that hold data.
    connector: Connector,
    topology: UrlTopology,
    /// The server, the sentinels, or some nodes of the Cluster; never empty.
    nodes: Vec<Node>,
    is_tls: bool,
    database: u32,
}

impl Deployment {
    fn of(url: &str, settings: &RedisSettings) -> Result<Self, RedisSetupError> {
        let address = url::parse(url)?;
        let mut credentials = address.credentials;
        if settings.data.password.is_some() {
            credentials.password.clone_from(&settings.data.password);
        }
        if settings.data.user.is_some() {
            credentials.user.clone_from(&settings.data.user);
        }
        let database = settings.database.or(address.database).unwrap_or(0);
        let connector = Connector::new(address.is_tls, &credentials, database, settings)?;
        Ok(Self {
            connector,
            topology: address.topology,
            nodes: address.nodes,
            is_tls: address.is_tls,
            database,
        })
    }
}

/// Validates a key prefix.
fn valid_prefix(prefix: &str) -> Result<String, RedisSetupError> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if prefix.is_empty() || prefix.len() > MAX_PREFIX || !prefix.bytes().all(is_valid) {
        return Err(RedisSetupError::Prefix(prefix.to_owned()));
    }
    Ok(prefix.to_owned())
}

impl RedisStore {
    /// Connects to a server, to the primary behind sentinels, or to a Cluster; with TLS for `rediss`. Returns when Redis is ready for
    /// the first decision: see [`RedisStore::warm_up`].
    ///
    /// * `redis://[user:password@]host[:port][/database]`
    /// * `redis-sentinel://[user:password@]host[:port],…/name[/database]`; user and password are those of the primary
    /// * `redis-cluster://[user:password@]host[:port],…`: some of its nodes
    ///
    /// # Errors
    /// If the URL is invalid or the server is unreachable.
    pub async fn connect(url: &str) -> Result<Self, RedisSetupError> {
        Self::connect_with(url, &RedisSettings::default()).await
    }

    /// Connects with settings beyond the URL.
    ///
    /// # Errors
    /// If the URL or the settings are invalid, or the server is unreachable.
    pub async fn connect_with(url: &str, settings: &RedisSettings) -> Result<Self, RedisSetupError> {
        let store = Self::connect_later_with(url, settings)?;
        match store.warm_up().await {
            Ok(()) => Ok(store),
            Err(StoreError::NotRun(reason)) => Err(RedisSetupError::Connect(reason)),
            Err(error) => Err(RedisSetupError::Connect(error.to_string())),
        }
    }

    /// Prepares the first decision of a store that was created with [`RedisStore::connect_later`]: connects (on a Cluster to every
    /// primary), loads the script, and measures the offset of the server's clock. No key changes.
    ///
    /// # Errors
    /// If the server does not answer; on a Cluster, if no primary does.
    pub async fn warm_up(&self) -> Result<(), StoreError> {
        // an empty batch takes the path of every decision and needs no permission on any key
        let call = encode(&self.prefix, &[], CallTimes::default())?;
        match &self.backend {
            Backend::Primary(primary) => {
                primary.ready().await.map_err(StoreError::NotRun)?;
                primary.send(RedisRequest::Script(&call)).await?;
            }
            Backend::Cluster(cluster) => cluster.warm_up(RedisRequest::Script(&call)).await?,
        }
        Ok(())
    }

    /// Creates a store that connects on its first call, so that it can be created while the server is unavailable.
    ///
    /// # Errors
    /// If the URL is invalid.
    pub fn connect_later(url: &str) -> Result<Self, RedisSetupError> {
        Self::connect_later_with(url, &RedisSettings::default())
    }

    /// Creates a store like [`RedisStore::connect_later`], with settings beyond the URL.
    ///
    /// # Errors
    /// If the URL or the settings are invalid.
    pub fn connect_later_with(url: &str, settings: &RedisSettings) -> Result<Self, RedisSetupError> {
        let Deployment { connector, topology, mut nodes, is_tls, database } = Deployment::of(url, settings)?;
        let backend = match topology {
            UrlTopology::Standalone => Backend::Primary(Arc::new(Primary::fixed(connector, nodes.remove(0)))),
            UrlTopology::Sentinel { name } => {
                let to_sentinels = Connector::new(is_tls, &settings.sentinel, 0, settings)?;
                let sentinels = Sentinels::new(to_sentinels, nodes, name);
                Backend::Primary(Arc::new(Primary::watched(connector, sentinels)))
            }
            UrlTopology::Cluster if database != 0 => {
                return Err(RedisSetupError::Url("a Cluster has only database 0".to_owned()));
            }
            UrlTopology::Cluster => Backend::Cluster(Cluster::new(connector, nodes)),
        };
        Ok(Self { backend, prefix: DEFAULT_PREFIX.to_owned(), clock: None })
    }

    /// Returns the same store with another key prefix, so that several stores can share one Redis.
    ///
    /// # Errors
    /// If the prefix is empty, too long, or has other characters than letters, digits, `-`, `_` and `.`.
    pub fn with_prefix(mut self, prefix: &str) -> Result<Self, RedisSetupError> {
        self.prefix = valid_prefix(prefix)?;
        Ok(self)
    }

    /// Returns the same store on a manual clock instead of the server's, for tests and replays. Keys then live an hour longer.
    pub fn with_clock(mut self, clock: ManualClock) -> Self {
        self.clock = Some(clock);
        self
    }

    fn times(&self, deadline: Option<Deadline>) -> CallTimes {
        let (deadline, process_deadline) = match deadline {
            None => (None, None),
            Some(Deadline::Store(deadline)) => (Some(deadline), None),
            // a manual clock is unrelated to the process's clock
            Some(Deadline::Process(_)) if self.clock.is_some() => (None, None),
            Some(Deadline::Process(by)) => (None, Some(by)),
        };
        CallTimes { now: self.clock.as_ref().map(ManualClock::now), deadline, process_deadline }
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

impl RemoteStore for RedisStore {
    fn decide<'a>(
        &'a self,
        checks: &'a [Check],
        deadline: Option<Deadline>,
    ) -> BoxFuture<'a, Vec<Result<CheckAnswer, StoreError>>> {
        Box::pin(async move {
            match &self.backend {
                Backend::Primary(primary) => {
                    per_check(self.decide_on(primary, checks, deadline).await, checks.len())
                }
                Backend::Cluster(cluster) => cluster.decide(&self.prefix, checks, self.times(deadline)).await,
            }
        })
    }

    fn has_real_clock(&self) -> bool {
        self.clock.is_none()
    }

    fn has_reservations(&self) -> bool {
        matches!(self.backend, Backend::Cluster(_))
    }

    fn has_leases(&self) -> bool {
        true
    }

    fn server(&self, key: &Key) -> u64 {
        match &self.backend {
            Backend::Primary(_) => 0,
            Backend::Cluster(cluster) => cluster.node_number(key),
        }
    }

    fn server_name(&self, server: u64) -> Option<String> {
        match &self.backend {
            Backend::Primary(primary) => Some(primary.connection().target_name()),
            Backend::Cluster(cluster) => cluster.node_name(server),
        }
    }

    fn connect_error(&self, server: u64) -> Option<String> {
        match &self.backend {
            Backend::Primary(primary) => primary.connection().connect_error(),
            Backend::Cluster(cluster) => cluster.connect_error(server),
        }
    }

    fn probe(&self, server: u64) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            match &self.backend {
                Backend::Primary(primary) => {
                    let key = probe_key(&self.prefix, INSTANCES);
                    primary.send_once_connected(RedisRequest::Probe(&key)).await?
                }
                Backend::Cluster(cluster) => cluster.probe(server, &self.prefix).await?,
            };
            Ok(())
        })
    }

    fn announce(&self, instance: u64, lifetime: Duration) -> BoxFuture<'_, Result<u32, StoreError>> {
        Box::pin(async move {
            let key = instances_key(&self.prefix);
            let request = instances::announcement(&key, instance, lifetime);
            let reply = match &self.backend {
                Backend::Primary(primary) => primary.send(RedisRequest::Command(&request)).await?,
                Backend::Cluster(cluster) => {
                    cluster.send_for_tag(INSTANCES, RedisRequest::Command(&request)).await?
                }
            };
            Ok(u32::try_from(number(reply)?).unwrap_or(u32::MAX))
        })
    }

    fn warm_up(&self) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.warm_up())
    }

    fn stats(&self) -> StoreStats {
        match &self.backend {
            Backend::Primary(primary) => {
                primary.connection().connector().health().stats(slice::from_ref(primary.connection()))
            }
            Backend::Cluster(cluster) => cluster.connector().health().stats(&cluster.connections()),
        }
    }

    fn inspect<'a>(
        &'a self,
        counters: &'a [(Key, Limit)],
    ) -> BoxFuture<'a, Result<Vec<Option<CounterSnapshot>>, StoreError>> {
        Box::pin(async move {
            let now = self.clock.as_ref().map(ManualClock::now);
            let mut snapshots = Vec::with_capacity(counters.len());
            for (key, limit) in counters {
                snapshots.push(self.inspect_one(key, limit, now).await?);
            }
            Ok(snapshots)
        })
    }

    fn reset<'a>(&'a self, counters: &'a [(Key, Algorithm)]) -> BoxFuture<'a, Result<u64, StoreError>> {
        Box::pin(async move {
            let primary = match &self.backend {
                Backend::Primary(primary) => primary,
                Backend::Cluster(cluster) => return cluster.reset(&self.prefix, counters).await,
            };
            let mut deleted = 0;
            for counters in counters.chunks(MAX_BATCH) {
                let mut request = redis::cmd("UNLINK");
                for (key, algorithm) in counters {
                    request.arg(counter_keys(&self.prefix, key, *algorithm));
                }
                let keys = number(primary.send(RedisRequest::Command(&request)).await?)?;
                deleted += keys.min(u64::try_from(counters.len()).unwrap_or(u64::MAX));
            }
            Ok(deleted)
        })
    }
}

impl RedisStore {
    async fn inspect_one(
        &self,
        key: &Key,
        limit: &Limit,
        now: Option<Timestamp>,
    ) -> Result<Option<CounterSnapshot>, StoreError> {
        let algorithm = limit.algorithm();
        let request = snapshot::holds_request(&holds_key(&self.prefix, key, algorithm), limit, now);
        let (at, holds) = snapshot::read_holds(self.send_for(key, &request).await?, now)?;
        if !algorithm.properties().has_window {
            return Ok(holds.map(|holds| holds.snapshot(at)));
        }
        let request = snapshot::request(&redis_key(&self.prefix, key, algorithm), algorithm);
        let mut snapshot = snapshot::read(self.send_for(key, &request).await?, limit, now)?;
        if let Some(snapshot) = &mut snapshot {
            snapshot.holds = holds.map(|holds| holds.live).unwrap_or_default();
            if limit.lease().is_some() {
                snapshot.leased = self.leased(key, algorithm, snapshot.at).await?;
            }
        }
        Ok(snapshot)
    }

    /// Sends a command for one counter.
    async fn send_for(&self, key: &Key, request: &redis::Cmd) -> Result<Value, StoreError> {
        Ok(match &self.backend {
            Backend::Primary(primary) => primary.send(RedisRequest::Command(request)).await?,
            Backend::Cluster(cluster) => cluster.send_for_key(key, RedisRequest::Command(request)).await?,
        })
    }

    /// Returns the units of a counter that processes have leased and not spent.
    async fn leased(&self, key: &Key, algorithm: Algorithm, at: Timestamp) -> Result<u64, StoreError> {
        let mut request = redis::cmd("GET");
        request.arg(lease_key(&self.prefix, key, algorithm));
        let reply = self.send_for(key, &request).await?;
        let record = Option::<Vec<u8>>::from_redis_value(reply)
            .map_err(|error| CallFailure::ReplyLost(error.to_string()))?;
        Ok(snapshot::leased_units(&record.unwrap_or_default(), at))
    }

    async fn decide_on(
        &self,
        primary: &Primary,
        checks: &[Check],
        deadline: Option<Deadline>,
    ) -> Result<Vec<Result<CheckAnswer, StoreError>>, StoreError> {
        let call = encode(&self.prefix, checks, self.times(deadline))?;
        let reply = primary.send(RedisRequest::Script(&call)).await?;
        decode(&bytes(reply)?, &call, checks)
    }
}

/// Returns the reply of the script.
fn bytes(reply: Value) -> Result<Vec<u8>, CallFailure> {
    Vec::from_redis_value(reply).map_err(|error| CallFailure::ReplyLost(error.to_string()))
}

/// Returns the reply of a command that returns a count.
fn number(reply: Value) -> Result<u64, CallFailure> {
    u64::from_redis_value(reply).map_err(|error| CallFailure::ReplyLost(error.to_string()))
}
