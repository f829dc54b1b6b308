//! The file as it was written. The structs say which keys there are; their comments are the JSON Schema's, and through it
//! those of `docs/rules.md`.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use tollgate::{Absent, Algorithm, OnStoreFailure};
use tollgate_core::{limit::MAX_AMOUNT, time::MAX_EXACT};
use tollgate_tower::headers::Dialect;

use super::{
    kinds::{Bytes, HeaderName, Network, OneOrMore, Prefix, Span, Url, Word},
    reader::{Field, FromToml, Reader, Value, tables},
    settings::{Listen, Scope},
};
use crate::{grpc::Closed, labels::Kind};

/// Pairs of a label and what its value must look like.
pub(super) type Conditions = BTreeMap<String, Field<OneOrMore>>;

tables! {
    /// The configuration of a tollgate server
    struct Document {
        /// Where it listens, and who may call
        server: Server,
        /// Where counters are kept
        store: Store,
        /// How labels are read and cleaned, on every front end
        labels: BTreeMap<String, Field<Label>>,
        /// Fields of all rules that do not say otherwise
        defaults: Defaults,
        /// Named limits; all that match a request apply together. To drop all of them while a server runs, write `rule = []` at the
        /// top of the file
        rule: Vec<Field<Rule>>,
    }

    /// Where the server listens, and who may call
    struct Server {
        /// Address of the JSON API, forward-auth, the dashboard and metrics
        #[schemars(extend("default" = "127.0.0.1:8080"))]
        http: Listen,
        /// Address of Envoy's rate limit service
        #[schemars(extend("default" = "127.0.0.1:8081"))]
        grpc: Listen,
        /// Address of the Redis protocol
        #[schemars(extend("default" = "127.0.0.1:6380"))]
        resp: Listen,
        /// Networks whose X-Forwarded-For and Forwarded are believed
        #[schemars(extend("default" = []))]
        trusted_proxies: Vec<Field<Network>>,
        /// The headers that tell clients their limits
        #[schemars(extend("default" = "draft-11"))]
        headers: Word<Dialect>,
        /// Allows listeners that other machines reach although there is no token
        #[schemars(extend("default" = false))]
        insecure: bool,
        /// What Envoy is told when a rule that fails closed refuses: that it is over the limit, or the gRPC error `UNAVAILABLE`
        #[schemars(extend("default" = "over-limit"))]
        envoy_closed: Word<Closed>,
        /// Certificates, below; without them connections are not encrypted
        tls: Tls,
        /// Who may call, below; without any, everybody on this machine may. To drop all of them while a server runs, write
        /// `token = []`. At most 1000
        token: Vec<Field<Token>>,
    }

    /// Certificates of the server, as files of PEM; read again when they change
    #[schemars(extend("required" = ["cert", "key"]))]
    struct Tls {
        /// File of the certificate and those that lead to its authority
        cert: String,
        /// File of its private key
        key: String,
        /// File of the authorities whose clients are let in; without it, clients need no certificate
        client_ca: String,
    }

    /// Who may call: a secret that is sent as `Authorization: Bearer …`
    #[schemars(extend("required" = ["name"]))]
    struct Token {
        /// What it is called in the log; unique
        name: String,
        /// File of the secret, which is visible ASCII without spaces; the end of the line does not belong to it. This or `env` is
        /// needed. Read again when it changes
        file: String,
        /// Environment variable of the secret, instead of a file
        env: String,
        /// What it allows: `check` (check, peek, explain, forward-auth), `adjust` (charge, refund), `admin` (reset, rules, top, in
        /// explain the rules that do not apply). None implies another
        #[schemars(extend("default" = ["check"]))]
        may: Vec<Field<Word<Scope>>>,
    }

    /// Where counters are kept
    struct Store {
        /// `memory:`, or a Redis: `redis://[user:password@]host[:port][/database]`,
        /// `redis-sentinel://[user:password@]host[:port],…/name[/database]`, `redis-cluster://[user:password@]host[:port],…`;
        /// each with `rediss` for TLS
        #[schemars(extend("default" = "memory:"))]
        url: Url,
        /// How long a decision may take, 1 ms to 10 s; then each rule's `on_store_failure` answers
        #[schemars(extend("default" = "50ms"))]
        deadline: Span,
        /// What all keys in Redis begin with
        #[schemars(extend("default" = "tg"))]
        prefix: Prefix,
        /// The most memory that the memory store takes, from 1 MiB
        #[schemars(extend("default" = "256MiB"))]
        max_memory: Bytes,
        /// For how long at most a certain refusal is answered without asking the store, up to 60 s; `"0s"` turns that off
        #[schemars(extend("default" = "1s"))]
        denial_cache: Span,
        /// File of the password, instead of one in the URL
        password_file: String,
        /// File of the authorities whose servers are trusted instead of the system's, as PEM
        ca: String,
        /// File of the certificate by which servers know this client, as PEM
        cert: String,
        /// File of its private key, as PEM
        key: String,
        /// As whom the sentinels are asked
        sentinel_user: String,
        /// File of the password of the sentinels
        sentinel_password_file: String,
        /// File of the key that secret labels are hashed with, from 16 bytes; the same on all instances. Without it each process makes
        /// one up
        hash_secret_file: String,
    }

    /// How one label is read and cleaned
    struct Label {
        /// `ip`: an address, in one spelling, which may be matched against networks. The label `ip` is one also when it is not listed
        #[schemars(extend("default" = "text"))]
        kind: Word<Kind>,
        /// Of an address: how many leading bits of IPv6 are kept
        #[schemars(extend("default" = 64, "minimum" = 1, "maximum" = 128))]
        ipv6_prefix: u64,
        /// The header it is read from, where requests are passed through: forward-auth
        header: HeaderName,
        /// It is hashed (HMAC-SHA-256, 128 bits) before it becomes a key, a log line or a row of the dashboard. It can be matched by
        /// whole values, written plainly, and by `"*"`
        #[schemars(extend("default" = false))]
        secret: bool,
    }

    /// A named limit: which requests it applies to, who is counted apart, and in which unit
    #[schemars(extend("required" = ["name"]))]
    struct Rule {
        /// What it is called in answers, metrics and keys: 1 to 128 printable ASCII characters, unique
        name: String,
        /// It applies to requests of which all these labels match: `"x"` is a value, `"x*"` a prefix, `"*"` any value that is present,
        /// a list any of its members; of an address, a network. All requests unless set. At most 64 labels, and 10,000 members
        when: Conditions,
        /// And of which none of these matches
        unless: Conditions,
        /// The labels whose values are counted apart: a counter for each combination. `[]` is one for all. At most 16
        #[schemars(extend("default" = []))]
        per: Vec<Field<String>>,
        /// How it counts; `gcra` is `token-bucket`
        #[schemars(extend("default" = "token-bucket"))]
        algorithm: Word<Algorithm>,
        /// How many pass in a window; of a `sliding-log` at most 1,000,000. Needed, here or in `[defaults]`
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        amount: u64,
        /// In which time: 1 ms to 3650 days. Needed, here or in `[defaults]`
        window: Span,
        /// Of a token bucket: how many may pass at once; the amount unless set
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        burst: u64,
        /// What is counted: 1 to 64 letters, digits, `-`, `_`, `.`. A request's cost may name several units
        #[schemars(extend("default" = "requests"))]
        unit: String,
        /// Multiplies the caller's cost
        #[schemars(extend("default" = 1, "maximum" = MAX_EXACT))]
        cost: u64,
        /// When the store does not answer in time: `open` admits, `closed` refuses, `local` enforces this instance's share of the limit
        /// (recommended)
        #[schemars(extend("default" = "open"))]
        on_store_failure: Word<OnStoreFailure>,
        /// It is evaluated and never refuses
        #[schemars(extend("default" = false))]
        shadow: bool,
        /// It admits while anything remains and charges in full, into debt
        #[schemars(extend("default" = false))]
        overdraft: bool,
        /// The labels, of those in `per`, that decide where in a Redis Cluster the counter is: rules with the same tag are asked in one
        /// call. All of them unless set
        tag: Vec<Field<String>>,
        /// When a request lacks one of the labels in `per`: `skip` does not apply the rule, `shared` counts all such requests together,
        /// `refuse` refuses
        #[schemars(extend("default" = "skip"))]
        absent: Word<Absent>,
        /// It applies only to requests without labels other than those in `when` and `per`
        #[schemars(extend("default" = false))]
        exact: bool,
        /// Of a fixed window: each key's windows begin at a moment of its own
        #[schemars(extend("default" = false))]
        stagger: bool,
        /// File of further overrides, as CSV
        overrides_file: String,
        /// Other numbers for some, below; in order, field by field, a later match wins. At most 1,000,000 over all rules
        r#override: Vec<Field<Override>>,
    }

    /// Same key, other numbers
    #[schemars(extend("required" = ["when"]))]
    struct Override {
        /// For requests that match all of these, as in a rule
        when: Conditions,
        /// Another amount
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        amount: u64,
        /// Another window
        window: Span,
        /// Another burst
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        burst: u64,
        /// Another factor of the caller's cost
        #[schemars(extend("maximum" = MAX_EXACT))]
        cost: u64,
        /// The rule does not apply. Of `unlimited` and `blocked` the later one wins
        unlimited: bool,
        /// The rule always refuses
        blocked: bool,
        /// Another failure policy
        on_store_failure: Word<OnStoreFailure>,
        /// Whether it is evaluated without refusing
        shadow: bool,
    }
}

/// Fields of all rules: a rule without a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Defaults(pub(super) Rule);

impl FromToml for Defaults {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
        let rule = Rule::from_toml(value, reader)?;
        if !rule.name.is_absent() {
            let key = value.get_ref().as_table()?.iter().find(|(key, _)| key.get_ref() == "name")?.1;
            reader.wrong(key, "defaults are for all rules and have no name: leave it out");
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
        schema.insert("description".to_owned(), "Fields of all rules that do not say otherwise".into());
        schema
    }
}
