//! The file as it was written. The structs say which keys there are; their comments are the JSON Schema's.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use tollgate::{Absent, Algorithm, OnStoreFailure};
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
        /// Named limits; all that match a request apply together
        rule: Vec<Field<Rule>>,
    }

    /// Where the server listens, and who may call
    struct Server {
        /// Address of the JSON API, forward-auth, the dashboard and metrics; "off" turns it off, port 0 picks one
        http: Listen,
        /// Address of Envoy's rate limit service
        grpc: Listen,
        /// Address of the Redis protocol
        resp: Listen,
        /// Networks whose X-Forwarded-For and Forwarded are believed
        trusted_proxies: Vec<Field<Network>>,
        /// The headers that tell clients their limits
        headers: Word<Dialect>,
        /// Allows listeners that other machines reach although there is no token
        insecure: bool,
        /// What Envoy is told when a rule that fails closed refuses
        envoy_closed: Word<Closed>,
        /// Certificates; without them connections are not encrypted
        tls: Tls,
        /// Who may call; without any, everybody on this machine may
        token: Vec<Field<Token>>,
    }

    /// Certificates of the server, as PEM; read again when they change
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
        /// What it is called in the log
        name: String,
        /// File of the secret
        file: String,
        /// Environment variable of the secret
        env: String,
        /// What it allows
        may: Vec<Field<Word<Scope>>>,
    }

    /// Where counters are kept
    struct Store {
        /// memory: or the URL of a Redis
        url: Url,
        /// How long a decision may take; then each rule's on_store_failure answers
        deadline: Span,
        /// What all keys in Redis begin with
        prefix: Prefix,
        /// The most memory that the memory store takes
        max_memory: Bytes,
        /// For how long at most a certain refusal is answered without asking the store; "0s" turns that off
        refusal_cache: Span,
        /// File of the password, instead of one in the URL
        password_file: String,
        /// File of the authorities whose servers are trusted instead of the system's, as PEM
        ca: String,
        /// File of the certificate by which servers know this client, as PEM
        cert: String,
        /// File of its private key, as PEM
        key: String,
        /// The user of the sentinels
        sentinel_user: String,
        /// File of the password of the sentinels
        sentinel_password_file: String,
        /// File of the key that secret labels are hashed with; the same on all instances
        hash_secret_file: String,
    }

    /// How one label is read and cleaned
    struct Label {
        /// "ip": an IP address, in one spelling, which may be matched against networks
        kind: Word<Kind>,
        /// Of an IP address: how many leading bits of IPv6 are kept
        ipv6_prefix: u64,
        /// The header it is read from, where requests are passed through
        header: HeaderName,
        /// It is hashed before it becomes a key, a log line or a row of the dashboard
        secret: bool,
    }

    /// A named limit: which requests it applies to, who is counted apart, and in which unit
    #[schemars(extend("required" = ["name"]))]
    struct Rule {
        /// What it is called in answers, metrics and keys: printable ASCII, unique
        name: String,
        /// It applies to requests that match all of these
        when: Conditions,
        /// And to none that match any of these
        unless: Conditions,
        /// The labels whose values are counted apart; [] is one counter for all
        per: Vec<Field<String>>,
        /// How it counts
        algorithm: Word<Algorithm>,
        /// How many pass in a window
        amount: u64,
        /// In which time
        window: Span,
        /// Of a token bucket: how many may pass at once; the amount unless set
        burst: u64,
        /// What is counted
        unit: String,
        /// Multiplies the caller's cost
        cost: u64,
        /// What it does when the store does not answer in time
        on_store_failure: Word<OnStoreFailure>,
        /// It is evaluated and never refuses
        shadow: bool,
        /// It admits while anything remains and charges in full, into debt
        overdraft: bool,
        /// The labels, of those in per, that decide where in a Redis Cluster the counter is
        tag: Vec<Field<String>>,
        /// What becomes of a request that lacks one of the labels in per
        absent: Word<Absent>,
        /// It applies only to requests without labels other than those in when and per
        exact: bool,
        /// Of a fixed window: each key's windows begin at a moment of its own
        stagger: bool,
        /// File of further overrides, as CSV
        overrides_file: String,
        /// Other numbers for some; in order, field by field, a later match wins
        r#override: Vec<Field<Override>>,
    }

    /// Same key, other numbers
    #[schemars(extend("required" = ["when"]))]
    struct Override {
        /// For requests that match all of these
        when: Conditions,
        /// Another amount
        amount: u64,
        /// Another window
        window: Span,
        /// Another burst
        burst: u64,
        /// Another factor of the caller's cost
        cost: u64,
        /// The rule does not apply
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
