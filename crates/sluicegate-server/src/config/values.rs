//! Types of setting values: parsing, error messages and JSON Schema.

use std::{borrow::Cow, net::SocketAddr, time::Duration};

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use sluicegate::{Algorithm, OnStoreFailure, address, redis::keys::MAX_PREFIX, rules::Absent};
use sluicegate_tower::headers::Dialect;

use super::{
    settings::{Listen, Scope},
    toml_reader::{Field, FromText, FromToml, TomlReader, TomlValue, shown, suggestion},
};
use crate::{duration, grpc::Closed, labels::LabelKind, store::StoreUrl};

/// A duration, such as `"1h30m"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DurationValue(pub(super) Duration);

/// A size in bytes, such as `"256MiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteSize(pub(super) u64);

/// An IP network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Network(pub(super) IpNet);

/// The URL of the store. Its password is not printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url(pub(super) StoreUrl);

/// The prefix of all keys in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyPrefix(pub(super) String);

/// The name of an HTTP header, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderName(pub(super) String);

/// A value from a fixed set of keywords.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keyword<T>(pub(super) T);

/// Types whose values are written as keywords.
pub(super) trait Keywords: Copy + PartialEq + 'static {
    const KEYWORDS: &'static [(&'static str, Self)];

    /// The keyword of this value.
    fn keyword(self) -> &'static str {
        let entry = Self::KEYWORDS.iter().find(|(_, value)| *value == self);
        entry.expect("every value has a keyword").0
    }
}

/// The patterns of a condition: one, or a list of alternatives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Patterns(pub(super) Vec<Field<String>>);

impl FromText for Listen {
    const EXPECTED: &'static str =
        "an address: use an IP address and a port, for example \"127.0.0.1:8080\", or \"off\"";

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            _ => text.parse::<SocketAddr>().map(Self::Address).map_err(|_| not::<Self>(text)),
        }
    }
}

impl FromText for DurationValue {
    const EXPECTED: &'static str =
        "a duration: use whole numbers with d, h, m, s or ms, in quotes, for example \"1h30m\" or \"250ms\"";

    fn from_text(text: &str) -> Result<Self, String> {
        duration::parse(text).map(Self).map_err(|error| error.to_string())
    }
}

impl FromText for ByteSize {
    const EXPECTED: &'static str =
        "a size: use a whole number with B, KiB, MiB, GiB or TiB, in quotes, for example \"256MiB\"";

    fn from_text(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, u64); 5] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
        let read = || {
            let digits = text.find(|c: char| !c.is_ascii_digit())?;
            let (number, unit) = text.split_at(digits);
            let (_, bytes) = UNITS.into_iter().find(|(name, _)| *name == unit)?;
            number.parse::<u64>().ok()?.checked_mul(bytes)
        };
        read().map(Self).ok_or_else(|| not::<Self>(text))
    }
}

impl FromText for Network {
    const EXPECTED: &'static str =
        "a network: use an address and a prefix length, for example \"10.0.0.0/8\", or one address";

    fn from_text(text: &str) -> Result<Self, String> {
        address::parse_network(text).map(Self).ok_or_else(|| not::<Self>(text))
    }
}

impl FromText for Url {
    const EXPECTED: &'static str = "a store URL: use for example \"memory:\" or \"redis://127.0.0.1:6379\"";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: crate::store::StoreUrlError| error.to_string())
    }
}

impl FromText for KeyPrefix {
    const EXPECTED: &'static str = "a prefix: use 1 to 32 letters, digits, '-', '_' or '.'";

    fn from_text(text: &str) -> Result<Self, String> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let fits = !text.is_empty() && text.len() <= MAX_PREFIX && text.bytes().all(plain);
        if fits { Ok(Self(text.to_owned())) } else { Err(not::<Self>(text)) }
    }
}

impl FromText for HeaderName {
    const EXPECTED: &'static str = "a header name: use for example \"x-api-key\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let name = axum::http::HeaderName::from_bytes(text.as_bytes());
        name.map(|name| Self(name.as_str().to_owned())).map_err(|_| not::<Self>(text))
    }
}

impl FromText for bool {
    const EXPECTED: &'static str = "true or false";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| not::<Self>(text))
    }
}

impl FromText for u64 {
    const EXPECTED: &'static str = "a non-negative integer";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| not::<Self>(text))
    }
}

impl FromText for String {
    const EXPECTED: &'static str = "a string: write it in quotes";

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

impl<T: Keywords> FromText for Keyword<T> {
    const EXPECTED: &'static str = "one of the allowed values: write it in quotes";

    fn from_text(text: &str) -> Result<Self, String> {
        let found = T::KEYWORDS.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| Self(*value)).ok_or_else(|| {
            let words: Vec<_> = T::KEYWORDS.iter().map(|(word, _)| *word).collect();
            let remedy = match suggestion(text, &words) {
                Some(word) => format!("did you mean \"{word}\"? Use one of {}", words.join(", ")),
                None => format!("use one of {}", words.join(", ")),
            };
            format!("{text:?} is unknown: {remedy}")
        })
    }
}

fn not<T: FromText>(text: &str) -> String {
    format!("{text:?} is not {}", T::EXPECTED)
}

impl FromToml for Patterns {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        if value.get_ref().is_str() || value.get_ref().is_array() {
            return match value.get_ref().as_str() {
                Some(text) => Some(Self(vec![Field::Given(text.to_owned(), reader.location(value.span()))])),
                None => Vec::from_toml(value, reader).map(Self),
            };
        }
        let message = "write a string, \"x*\" for a prefix, \"*\" for any value, or a list of these";
        reader.wrong(value, format!("{} is not a pattern: {message}", shown(value.get_ref())));
        None
    }
}

impl JsonSchema for Patterns {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Pattern".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "title": "pattern",
            "description": "a value, \"x*\" for a prefix, \"*\" for any value, or a list of these",
            "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }],
        })
    }
}

/// Reads a value that is written as a string.
fn text<T: FromText>(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<T> {
    match value.get_ref().as_str() {
        Some(text) => T::from_text(text).map_err(|message| reader.wrong(value, message)).ok(),
        None => {
            reader.wrong(value, format!("{} is not {}", shown(value.get_ref()), T::EXPECTED));
            None
        }
    }
}

/// Implements [`FromToml`] and [`JsonSchema`] for types that are written as strings.
macro_rules! written_as_text {
    ($($kind:ty: $schema:tt)*) => { $(
        impl FromToml for $kind {
            fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
                text(value, reader)
            }
        }

        impl JsonSchema for $kind {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($kind).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    )* };
}

written_as_text! {
    Listen: { "type": "string", "title": "address", "examples": ["127.0.0.1:8080", "off"] }
    DurationValue: { "type": "string", "title": "duration", "pattern": "^([0-9]+(d|h|ms|m|s))+$", "examples": ["1h30m", "250ms"] }
    ByteSize: { "type": "string", "title": "size", "pattern": "^[0-9]+(B|KiB|MiB|GiB|TiB)$", "examples": ["256MiB"] }
    Network: { "type": "string", "title": "network", "examples": ["10.0.0.0/8", "2001:db8::/32"] }
    Url: { "type": "string", "title": "URL", "examples": ["memory:", "redis://127.0.0.1:6379"] }
    KeyPrefix: { "type": "string", "title": "1 to 32 letters, digits, `-`, `_`, `.`", "pattern": "^[A-Za-z0-9._-]{1,32}$" }
    HeaderName: { "type": "string", "title": "header name", "minLength": 1, "examples": ["x-api-key"] }
}

impl<T: Keywords> FromToml for Keyword<T> {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        text(value, reader)
    }
}

impl<T: Keywords> JsonSchema for Keyword<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Keyword".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let words: Vec<_> = T::KEYWORDS.iter().map(|(word, _)| *word).collect();
        json_schema!({ "type": "string", "enum": words })
    }
}

impl Keywords for Dialect {
    const KEYWORDS: &'static [(&'static str, Self)] = &[
        ("draft-11", Self::Draft11),
        ("x-ratelimit", Self::XRateLimit),
        ("draft-07", Self::Draft07),
        ("draft-06", Self::Draft06),
        ("github", Self::GitHub),
        ("none", Self::None),
    ];
}

impl Keywords for Closed {
    const KEYWORDS: &'static [(&'static str, Self)] =
        &[("over-limit", Self::OverLimit), ("unavailable", Self::Unavailable)];
}

impl Keywords for Scope {
    const KEYWORDS: &'static [(&'static str, Self)] =
        &[("check", Self::Check), ("adjust", Self::Adjust), ("admin", Self::Admin)];
}

impl Keywords for LabelKind {
    const KEYWORDS: &'static [(&'static str, Self)] = &[("text", Self::Text), ("ip", Self::Ip)];
}

impl Keywords for OnStoreFailure {
    const KEYWORDS: &'static [(&'static str, Self)] =
        &[("open", Self::Open), ("closed", Self::Closed), ("local", Self::Local)];
}

impl Keywords for Absent {
    const KEYWORDS: &'static [(&'static str, Self)] =
        &[("skip", Self::Skip), ("shared", Self::Shared), ("deny", Self::Deny)];
}

impl Keywords for Algorithm {
    const KEYWORDS: &'static [(&'static str, Self)] = Self::NAMES;
}
