//! The structure of the configuration file. The doc comments become the descriptions in the JSON Schema and in
//! `docs/rules.md`.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use sluicegate::{Algorithm, OnStoreFailure, rules::Absent};
use sluicegate_core::{limit::MAX_AMOUNT, time::MAX_EXACT};
use sluicegate_tower::headers::Dialect;

use super::{
    settings::{CONNECTIONS, Listen, MAX_INSTANCES, Scope},
    toml_reader::{Field, FromToml, TomlReader, TomlValue, tables},
    values::{ByteSize, DurationValue, HeaderName, KeyPrefix, Keyword, Network, Patterns, Url},
};
use crate::{grpc::Closed, labels::LabelKind};

/// Labels, each with the patterns that its value must match.
pub(super) type Conditions = BTreeMap<String, Field<Patterns>>;

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
        headers: Keyword<Dialect>,
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
        /// How long a denial may be repeated without asking the store, up to 60 s; `"0s"` disables the cache
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

    /// How one label is normalized
    struct Label {
        /// `ip`: an IP address, brought to its canonical form; rules can match it against networks. The labels `ip`,
        /// `remote_address` and `masked_remote_address` have this kind by default
        #[schemars(extend("default" = "text"))]
        kind: Keyword<LabelKind>,
        /// Number of leading IPv6 bits to keep
        #[schemars(extend("default" = 64, "minimum" = 1, "maximum" = 128))]
        ipv6_prefix: u64,
        /// Request header that forward-auth reads the label from
        header: HeaderName,
        /// Hash the value (HMAC-SHA-256, 128 bits) before it is used in a key, a log line or the dashboard. Rules can match it by
        /// whole values, written in plain text, and by `"*"`
        #[schemars(extend("default" = false))]
        secret: bool,
    }

    /// A named limit: match conditions, counting labels and unit
    #[schemars(extend("required" = ["name"]))]
    struct Rule {
        /// Name of the rule in responses, metrics and keys: 1 to 128 printable ASCII characters, unique
        name: String,
        /// Apply the rule only if all these labels match. `"x"` matches a value, `"x*"` a prefix, `"*"` any value, a list any of its
        /// members; an address label also matches networks. Matches every request if unset. At most 64 labels and 10,000 list members
        when: Conditions,
        /// Do not apply the rule if one of these labels matches
        unless: Conditions,
        /// Labels to count by: one counter for each combination of their values. `[]` means one counter for all requests. At most 16
        #[schemars(extend("default" = []))]
        per: Vec<Field<String>>,
        /// Algorithm; `gcra` is an alias of `token-bucket`
        #[schemars(extend("default" = "token-bucket"))]
        algorithm: Keyword<Algorithm>,
        /// Units admitted per window; at most 200,000 for `sliding-log`. Required here or in `[defaults]`
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        amount: u64,
        /// Length of the window: 1 ms to 3650 days. Required here or in `[defaults]`
        window: DurationValue,
        /// Capacity of a token bucket. Equal to `amount` if unset
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        burst: u64,
        /// Unit that is counted: 1 to 64 letters, digits, `-`, `_`, `.`. A request can have costs in several units
        #[schemars(extend("default" = "requests"))]
        unit: String,
        /// Factor for the caller's cost
        #[schemars(extend("default" = 1, "maximum" = MAX_EXACT))]
        cost: u64,
        /// Failure policy when the store does not answer in time: `open` allows, `closed` denies, `local` enforces this instance's share
        /// of the limit (recommended)
        #[schemars(extend("default" = "open"))]
        on_store_failure: Keyword<OnStoreFailure>,
        /// Evaluate the rule without ever denying
        #[schemars(extend("default" = false))]
        shadow: bool,
        /// Allow a request while any quota remains and charge its full cost, which may leave a debt
        #[schemars(extend("default" = false))]
        overdraft: bool,
        /// Labels of `per` that select the node in a Redis Cluster: rules with equal tag values are checked in one call. All labels of
        /// `per` if unset
        tag: Vec<Field<String>>,
        /// What to do with a request that lacks a label of `per`: `skip` does not apply the rule, `shared` counts all such requests
        /// together, `deny` denies
        #[schemars(extend("default" = "skip"))]
        absent: Keyword<Absent>,
        /// Apply the rule only to requests that have no labels other than those in `when` and `per`
        #[schemars(extend("default" = false))]
        exact: bool,
        /// Start each key's fixed windows at a different time
        #[schemars(extend("default" = false))]
        stagger: bool,
        /// CSV file with further overrides
        overrides_file: String,
        /// Overrides for some requests, below. For each field the last matching override wins. At most 1,000,000 over all rules
        r#override: Vec<Field<Override>>,
    }

    /// Different limits for the same key
    #[schemars(extend("required" = ["when"]))]
    struct Override {
        /// Apply the override only if all these labels match, as in a rule
        when: Conditions,
        /// Replaces the amount
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        amount: u64,
        /// Replaces the window
        window: DurationValue,
        /// Replaces the burst
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        burst: u64,
        /// Replaces the factor for the caller's cost
        #[schemars(extend("maximum" = MAX_EXACT))]
        cost: u64,
        /// Do not apply the rule. Of `unlimited` and `blocked`, the later one wins
        unlimited: bool,
        /// Always deny
        blocked: bool,
        /// Replaces the failure policy
        on_store_failure: Keyword<OnStoreFailure>,
        /// Whether to evaluate the rule without denying
        shadow: bool,
    }
}

/// Default values for rule fields: a rule without a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Defaults(pub(super) Rule);

impl FromToml for Defaults {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let rule = Rule::from_toml(value, reader)?;
        if !rule.name.is_absent() {
            let key = value.get_ref().as_table()?.iter().find(|(key, _)| key.get_ref() == "name")?.1;
            reader.wrong(key, "defaults apply to all rules and have no name: remove it");
        }
        Some(Self(rule))
    }
}

impl JsonSchema for Defaults {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Defaults".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = Rule::json_schema(generator);
        schema.remove("required");
        if let Some(properties) = schema.get_mut("properties").and_then(|all| all.as_object_mut()) {
            properties.remove("name");
        }
        schema.insert("description".to_owned(), "Default values for the fields of all rules".into());
        schema
    }
}
