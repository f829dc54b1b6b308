//! The structure of `[labels]`, `[defaults]` and `[[rule]]`. The doc comments become the descriptions in the JSON Schema and in
//! `docs/rules.md`.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use sluicegate_core::{Algorithm, hold::OnExpiry, limit::MAX_AMOUNT, time::MAX_EXACT};

use super::{
    toml_reader::{Field, FromToml, TomlReader, TomlValue, tables},
    values::{AnchorValue, DurationValue, HeaderName, Keyword, LeaseValue, Patterns, WindowValue, ZoneValue},
};
use crate::{
    label_policy::LabelKind,
    rules::{Absent, OnStoreFailure},
};

/// Labels, each with the patterns that its value must match.
pub type Conditions = BTreeMap<String, Field<Patterns>>;

tables! {
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
        /// Units admitted per window, or at the same time for `concurrency`; at most 200,000 for `sliding-log`. Required here or in `[defaults]`
        #[schemars(extend("minimum" = 1, "maximum" = MAX_AMOUNT))]
        amount: u64,
        /// Length of the window: 1 ms to 3650 days, for example `"1h30m"` or `"1d"`. For `fixed-window` also a period of the calendar:
        /// `"1 day"`, `"1 week"`, `"1 month"`, `"1 quarter"` or `"1 year"`. Required here or in `[defaults]`, except for `concurrency`, which
        /// has none
        window: WindowValue,
        /// Time zone of a calendar window, by its IANA name. UTC if unset
        zone: ZoneValue,
        /// First day of a calendar window: a day of the month, 1 to 31 (in shorter months the last day), or for weeks a weekday, for example
        /// `"sunday"`. The first day of the month, or Monday, if unset
        anchor: AnchorValue,
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
        /// How much of the limit processes may charge in advance, over all processes: `"1%"`, a fraction or units. Requests of hot keys are
        /// then decided without a call to the store. Only with Redis. Unset or 0: the store decides every request
        lease: LeaseValue,
        /// How long a process may spend what it has charged in advance: 1 ms to the window, at most 1 hour. A tenth of the window and at
        /// most 1 s if unset
        lease_for: DurationValue,
        /// Time until a hold expires if the request does not set it: 1 ms to 1 day. If several rules match, the shortest; `"60s"` if no
        /// matching rule sets it
        ttl: DurationValue,
        /// What happens to the units of a hold that expires: `charge` keeps the estimate charged, `release` refunds it. `concurrency` always
        /// releases
        #[schemars(extend("default" = "charge"))]
        on_expiry: Keyword<OnExpiry>,
        /// The most units that a settlement charges beyond the estimate of its hold, for callers without the scope `adjust`. The capacity if
        /// unset. Not for `concurrency`
        #[schemars(extend("minimum" = 0, "maximum" = MAX_AMOUNT))]
        max_excess: u64,
        /// Label that contains the id of a hold, for front ends whose requests have no field for it, such as Envoy
        hold: String,
        /// Evaluate the rule without ever denying
        #[schemars(extend("default" = false))]
        shadow: bool,
        /// Allow a request while any quota remains and charge its full cost, which may leave a debt. Not for `concurrency`
        #[schemars(extend("default" = false))]
        overdraft: bool,
        /// Labels of `per` that select the node in a Redis Cluster: rules with equal tag values are checked in one call. All labels of
        /// `per` if unset
        tag: Vec<Field<String>>,
        /// What to do with a request that lacks a label of `per`: `skip` does not apply the rule, `shared` counts all such requests
        /// together, `deny` denies
        #[schemars(extend("default" = "skip"))]
        absent: Keyword<Absent>,
        /// Apply the rule only to requests that have no labels other than those in `when` and `per`, and that of `hold`
        #[schemars(extend("default" = false))]
        exact: bool,
        /// Start each key's fixed windows at a different time. Not for calendar windows
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
        window: WindowValue,
        /// Replaces the time zone of a calendar window
        zone: ZoneValue,
        /// Replaces the first day of a calendar window
        anchor: AnchorValue,
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
        /// Replaces the lease; 0 means none
        lease: LeaseValue,
        /// Replaces the lifetime of leases
        lease_for: DurationValue,
        /// Whether to evaluate the rule without denying
        shadow: bool,
    }
}

/// Default values for rule fields: a rule without a name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Defaults(pub Rule);

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
