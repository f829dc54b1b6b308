//! Validated settings of the server and the store. Secrets have types that do not print.

use std::{fmt, net::SocketAddr, num::NonZeroUsize, ops::RangeInclusive, time::Duration};

use ipnet::IpNet;
use sha2::{Digest as _, Sha256};
use sluicegate::{
    Options,
    config::values::Keywords,
    memory::DEFAULT_MAX_MEMORY,
    redis::{RedisSettings, keys::DEFAULT_PREFIX},
};
use sluicegate_tower::headers::Dialect;

use crate::{grpc::Closed, store::StoreUrl};

/// Minimum deadline of a decision.
pub const MIN_DEADLINE: Duration = Duration::from_millis(1);
/// Maximum deadline of a decision.
pub const MAX_DEADLINE: Duration = Duration::from_secs(10);
/// Maximum time for which a denial is cached.
pub const MAX_DENIAL_CACHE: Duration = Duration::from_secs(60);
/// Minimum interval between scans of the keys in Redis.
pub(super) const MIN_KEY_SCAN_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum interval between scans of the keys in Redis.
pub(super) const MAX_KEY_SCAN_INTERVAL: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// The largest expected number of instances.
pub(super) const MAX_INSTANCES: u32 = 100_000;
/// The valid numbers of connections of each front end.
pub(super) const CONNECTIONS: RangeInclusive<u64> = 10..=100_000;
/// Maximum number of tokens.
pub const MAX_TOKENS: usize = 1_000;

/// Listeners, TLS and tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// JSON API, forward-auth, dashboard, metrics.
    pub http: Listen,
    /// Envoy's rate limit service.
    pub grpc: Listen,
    /// The Redis protocol.
    pub resp: Listen,
    /// Networks of proxies whose X-Forwarded-For and Forwarded headers are trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// Dialect of the rate limit headers in responses.
    pub headers: Dialect,
    /// Whether non-loopback listeners are allowed without tokens.
    pub insecure: bool,
    /// Connections of each front end at a time; the front end's default if unset.
    pub max_connections: Option<NonZeroUsize>,
    /// Connections of each front end that one address keeps while all are in use and other addresses connect; half of all if unset.
    pub max_connections_per_address: Option<NonZeroUsize>,
    /// Response to Envoy when a rule with the failure policy `closed` denies.
    pub envoy_closed: Closed,
    /// TLS certificates; connections are not encrypted without them.
    pub tls: Option<Tls>,
    /// Tokens for authentication; without any, every caller is allowed.
    pub tokens: Vec<Token>,
}

/// The listen address of one front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// The front end is disabled.
    Off,
    /// Listens on this address; port 0 selects a free port.
    Address(SocketAddr),
}

/// The server's certificates, as PEM. `Debug` does not print them.
#[derive(Clone, PartialEq, Eq)]
pub struct Tls {
    /// The certificate chain.
    pub cert: Vec<u8>,
    /// The private key.
    pub key: Vec<u8>,
    /// The CA certificates for client certificates, which are not required without it.
    pub client_ca: Option<Vec<u8>>,
}

/// A token for authentication. Only the hash of its secret is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// Its name in the log.
    pub name: String,
    /// The allowed operations.
    pub may: Scopes,
    digest: Digest,
}

/// The SHA-256 hash of a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Digest([u8; 32]);

/// A group of operations that a token can allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Check, peek, explain, forward-auth.
    Check,
    /// Charge and refund.
    Adjust,
    /// Reset, and list rules and heavy hitters.
    Admin,
}

/// The scopes of a token. No scope implies another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scopes {
    /// [`Scope::Check`].
    pub check: bool,
    /// [`Scope::Adjust`].
    pub adjust: bool,
    /// [`Scope::Admin`].
    pub admin: bool,
}

/// Settings of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSettings {
    /// The store's URL.
    pub url: StoreUrl,
    /// Time limit for a decision.
    pub deadline: Duration,
    /// Prefix of all keys in Redis.
    pub prefix: String,
    /// Memory limit of the memory store, in bytes.
    pub max_memory: usize,
    /// How long a denial may be repeated without a call to the store.
    pub denial_cache: Duration,
    /// Expected number of instances, until the store has counted them.
    pub instances: u32,
    /// How often the keys in Redis are scanned for keys without a TTL; never if unset.
    pub key_scan_interval: Option<Duration>,
    /// Passwords and certificates for Redis, read from their files.
    pub redis: RedisSettings,
}

impl Default for ServerSettings {
    fn default() -> Self {
        let local = |port| Listen::Address(SocketAddr::from(([127, 0, 0, 1], port)));
        Self {
            http: local(8080),
            grpc: local(8081),
            resp: local(6380),
            trusted_proxies: Vec::new(),
            headers: Dialect::default(),
            insecure: false,
            max_connections: None,
            max_connections_per_address: None,
            envoy_closed: Closed::default(),
            tls: None,
            tokens: Vec::new(),
        }
    }
}

impl Default for StoreSettings {
    fn default() -> Self {
        let Options { deadline, denial_cache, instances, .. } = Options::default();
        Self {
            url: StoreUrl::Memory,
            deadline,
            prefix: DEFAULT_PREFIX.to_owned(),
            max_memory: DEFAULT_MAX_MEMORY,
            denial_cache,
            instances,
            key_scan_interval: None,
            redis: RedisSettings::default(),
        }
    }
}

impl StoreSettings {
    /// The options of the limiter.
    pub fn options(&self) -> Options {
        Options::new().deadline(self.deadline).denial_cache(self.denial_cache).instances(self.instances)
    }
}

impl Listen {
    /// The listen address, if the front end is enabled.
    pub fn address(self) -> Option<SocketAddr> {
        match self {
            Self::Off => None,
            Self::Address(address) => Some(address),
        }
    }
}

impl Digest {
    /// Hashes a secret.
    pub fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }
}

impl Token {
    /// Creates a token with this secret.
    pub fn new(name: &str, secret: &[u8], may: Scopes) -> Self {
        Self { name: name.to_owned(), may, digest: Digest::of(secret) }
    }

    /// Whether both tokens have the same secret.
    pub fn has_same_secret(&self, other: &Self) -> bool {
        self.accepts(&other.digest)
    }

    /// Whether the hash is that of the token's secret. Takes constant time: the hashes are always compared in full.
    pub fn accepts(&self, Digest(given): &Digest) -> bool {
        given.iter().zip(&self.digest.0).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
    }
}

impl Scopes {
    /// All scopes.
    pub const ALL: Self = Self { check: true, adjust: true, admin: true };

    /// Whether a scope is included.
    pub fn allows(self, scope: Scope) -> bool {
        match scope {
            Scope::Check => self.check,
            Scope::Adjust => self.adjust,
            Scope::Admin => self.admin,
        }
    }

    pub(super) fn with(mut self, scope: Scope) -> Self {
        match scope {
            Scope::Check => self.check = true,
            Scope::Adjust => self.adjust = true,
            Scope::Admin => self.admin = true,
        }
        self
    }
}

impl Scope {
    /// Its name in the configuration.
    pub fn name(self) -> &'static str {
        self.keyword()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, may, digest: _ } = self;
        f.debug_struct("Token").field("name", name).field("may", may).finish_non_exhaustive()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}
