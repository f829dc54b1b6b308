//! The structure of the configuration file. The doc comments become the descriptions in the JSON Schema and in
//! `docs/rules.md`.

use std::collections::BTreeMap;

use sluicegate::config::{
    schema::{Defaults, Label, Rule},
    toml_reader::{Field, tables},
    values::{DurationValue, Keyword, Network},
};

use super::{
    settings::{CONNECTIONS, Listen, MAX_INSTANCES, Scope},
    values::{ByteSize, HeaderDialect, KeyPrefix, Url},
};
use crate::grpc::Closed;

tables! {
    /// Configuration of a sluicegate server
    struct Document {
        /// Listeners, TLS and tokens
        server: Server,
        /// The store of the counters
        store: Store,
        /// How labels are normalized, on every front end
        labels: BTreeMap<String, Field<Label>>,
        /// Default values for the fields of all rules
        defaults: Defaults,
        /// Named limits. All rules that match a request apply together. To remove all rules while a server runs, write `rule = []` at
        /// the top of the file
        rule: Vec<Field<Rule>>,
    }

    /// Listeners, TLS and tokens
    struct Server {
        /// Listen address for the JSON API, forward-auth, the dashboard and metrics
        #[schemars(extend("default" = "127.0.0.1:8080"))]
        http: Listen,
        /// Listen address for Envoy's rate limit service
        #[schemars(extend("default" = "127.0.0.1:8081"))]
        grpc: Listen,
        /// Listen address for the Redis protocol
        #[schemars(extend("default" = "127.0.0.1:6380"))]
        resp: Listen,
        /// Networks of proxies whose `X-Forwarded-For` and `Forwarded` headers are trusted
        #[schemars(extend("default" = []))]
        trusted_proxies: Vec<Field<Network>>,
        /// Dialect of the rate limit headers in responses
        #[schemars(extend("default" = "draft-11"))]
        headers: Keyword<HeaderDialect>,
        /// Allow listening on non-loopback addresses without tokens
        #[schemars(extend("default" = false))]
        insecure: bool,
        /// Connections of each front end at a time. One more evicts an idle one. 1000, and 500 for gRPC, if unset
        #[schemars(extend("minimum" = CONNECTIONS.start(), "maximum" = CONNECTIONS.end()))]
        max_connections: u64,
        /// Connections of each front end that one client address keeps while all are in use and other addresses connect; an IPv6 address
        /// counts by its first 64 bits. Half of `max_connections` if unset
        #[schemars(extend("minimum" = 1, "maximum" = CONNECTIONS.end()))]
        max_connections_per_address: u64,
        /// Response to Envoy when a rule with `on_store_failure = "closed"` denies: OVER_LIMIT, or the gRPC error `UNAVAILABLE`
        #[schemars(extend("default" = "over-limit"))]
        envoy_closed: Keyword<Closed>,
        /// TLS certificates, below. Connections are not encrypted if unset
        tls: Tls,
        /// Tokens for authentication, below. Without tokens every caller on this machine is allowed. To remove all tokens while a
        /// server runs, write `token = []`. At most 1000
        token: Vec<Field<Token>>,
    }

    /// Certificates of the server, as PEM files, reloaded when they change
    #[schemars(extend("required" = ["cert", "key"]))]
    struct Tls {
        /// File with the certificate chain
        cert: String,
        /// File with the private key
        key: String,
        /// File with the CA certificates that client certificates are verified against. Client certificates are not required if unset
        client_ca: String,
    }

    /// A secret that callers send as `Authorization: Bearer …`
    #[schemars(extend("required" = ["name"]))]
    struct Token {
        /// Name of the token in the log; unique
        name: String,
        /// File with the secret, which is visible ASCII without spaces; line endings at the end are ignored. Either `file` or `env` is
        /// required. Reloaded when it changes
        file: String,
        /// Environment variable with the secret, instead of `file`
        env: String,
        /// Allowed operations: `check` (check, peek, explain, forward-auth), `adjust` (charge, refund), `admin` (reset, rules, top, and
        /// non-matching rules in explain). No scope implies another
        #[schemars(extend("default" = ["check"]))]
        may: Vec<Field<Keyword<Scope>>>,
    }

    /// The store of the counters
    struct Store {
        /// `memory:` for this process, or a Redis: `redis://[user:password@]host[:port][/database]`,
        /// `redis-sentinel://[user:password@]host[:port],…/name[/database]`, `redis-cluster://[user:password@]host[:port],…`.
        /// Use `rediss` instead of `redis` for TLS
        #[schemars(extend("default" = "memory:"))]
        url: Url,
        /// Time limit for a decision, 1 ms to 10 s; after it, each rule's `on_store_failure` decides
        #[schemars(extend("default" = "50ms"))]
        deadline: DurationValue,
        /// Prefix of all keys in Redis
        #[schemars(extend("default" = "sg"))]
        prefix: KeyPrefix,
        /// Memory limit of the memory store, at least 1 MiB
        #[schemars(extend("default" = "256MiB"))]
        max_memory: ByteSize,
        /// How long a denial may be repeated without a call to the store, up to 60 s; `"0s"` disables the cache
        #[schemars(extend("default" = "1s"))]
        denial_cache: DurationValue,
        /// Expected number of instances, among which `on_store_failure = "local"` divides each limit until the store has counted them
        #[schemars(extend("default" = 1, "minimum" = 1, "maximum" = MAX_INSTANCES))]
        instances: u64,
        /// How often the server scans the keys in Redis for keys without a TTL, 1 m to 30 d. Off if unset. Needs `+scan` and `+pttl`
        key_scan_interval: DurationValue,
        /// File with the password, instead of a password in the URL
        password_file: String,
        /// PEM file with the CA certificates that servers are verified against, instead of the system's
        ca: String,
        /// PEM file with the client certificate
        cert: String,
        /// PEM file with the private key of the client certificate
        key: String,
        /// User name for the sentinels
        sentinel_user: String,
        /// File with the password for the sentinels
        sentinel_password_file: String,
        /// File with the key that secret labels are hashed with, at least 16 bytes; the same on all instances. Each process generates a
        /// random key if unset
        hash_secret_file: String,
    }
}
