//! The kinds of values that settings have: how each is written, read and refused.

use std::{
    borrow::Cow,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use tollgate::{Absent, Algorithm, OnStoreFailure, redis::keys::MAX_PREFIX};
use tollgate_tower::headers::Dialect;

use super::{
    reader::{Field, FromText, FromToml, Reader, Value, meant, shown},
    settings::{Listen, Scope},
};
use crate::{duration, grpc::Closed, labels::Kind, store::StoreUrl};

/// A length of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span(pub(super) Duration);

/// A size of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) u64);

/// A network of IP addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Network(pub(super) IpNet);

/// Where the store is. It does not print its password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url(pub(super) StoreUrl);

/// What all keys in Redis begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prefix(pub(super) String);

/// The name of an HTTP header, in small letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HeaderName(pub(super) String);

/// One of a few words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word<T>(pub(super) T);

/// What is written as one of a few words.
pub(super) trait Words: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];

    /// How it is written.
    fn word(self) -> &'static str {
        let written = Self::WORDS.iter().find(|(_, value)| *value == self);
        written.expect("every value has a word").0
    }
}

/// What a label's value must look like: one text, or any of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OneOrMore(pub(super) Vec<Field<String>>);

impl FromText for Listen {
    const WHAT: &'static str =
        "an address: use an IP address and a port, for example \"127.0.0.1:8080\", or \"off\"";

    fn from_text(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            _ => text.parse::<SocketAddr>().map(Self::Address).map_err(|_| not::<Self>(text)),
        }
    }
}

impl FromText for Span {
    const WHAT: &'static str =
        "a duration: use whole numbers with d, h, m, s or ms, in quotes, for example \"1h30m\" or \"250ms\"";

    fn from_text(text: &str) -> Result<Self, String> {
        duration::parse(text).map(Self).map_err(|error| error.to_string())
    }
}

impl FromText for Bytes {
    const WHAT: &'static str =
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
    const WHAT: &'static str =
        "a network: use an address and a prefix length, for example \"10.0.0.0/8\", or one address";

    fn from_text(text: &str) -> Result<Self, String> {
        let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        network.map(|network| Self(without_mapping(network))).map_err(|_| not::<Self>(text))
    }
}

/// The network without host bits; one of IPv4 written as IPv6 as IPv4.
fn without_mapping(network: IpNet) -> IpNet {
    /// How many bits come before an IPv4 address written as IPv6.
    const MAPPING: u8 = 96;
    let mapped = match network {
        IpNet::V6(v6) if v6.prefix_len() >= MAPPING => v6.network().to_ipv4_mapped(),
        _ => None,
    };
    match mapped.and_then(|v4| Ipv4Net::new(v4, network.prefix_len() - MAPPING).ok()) {
        Some(v4) => IpNet::V4(v4),
        None => network.trunc(),
    }
}

impl FromText for Url {
    const WHAT: &'static str =
        "the URL of a store: use for example \"memory:\" or \"redis://127.0.0.1:6379\"";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: crate::store::StoreUrlError| error.to_string())
    }
}

impl FromText for Prefix {
    const WHAT: &'static str = "a prefix: use 1 to 32 letters, digits, '-', '_' or '.'";

    fn from_text(text: &str) -> Result<Self, String> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let fits = !text.is_empty() && text.len() <= MAX_PREFIX && text.bytes().all(plain);
        if fits { Ok(Self(text.to_owned())) } else { Err(not::<Self>(text)) }
    }
}

impl FromText for HeaderName {
    const WHAT: &'static str = "the name of a header: use for example \"x-api-key\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let name = axum::http::HeaderName::from_bytes(text.as_bytes());
        name.map(|name| Self(name.as_str().to_owned())).map_err(|_| not::<Self>(text))
    }
}

impl FromText for bool {
    const WHAT: &'static str = "true or false";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| not::<Self>(text))
    }
}

impl FromText for u64 {
    const WHAT: &'static str = "a whole number from 0";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| not::<Self>(text))
    }
}

impl FromText for String {
    const WHAT: &'static str = "a text: write it in quotes";

    fn from_text(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

impl<T: Words> FromText for Word<T> {
    const WHAT: &'static str = "one of the words here: write it in quotes";

    fn from_text(text: &str) -> Result<Self, String> {
        let found = T::WORDS.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| Self(*value)).ok_or_else(|| {
            let words: Vec<_> = T::WORDS.iter().map(|(word, _)| *word).collect();
            let remedy = match meant(text, &words) {
                Some(word) => format!("did you mean \"{word}\"? The choice is {}", words.join(", ")),
                None => format!("use {}", words.join(", ")),
            };
            format!("{text:?} is unknown: {remedy}")
        })
    }
}

fn not<T: FromText>(text: &str) -> String {
    format!("{text:?} is not {}", T::WHAT)
}

impl FromToml for OneOrMore {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
        if value.get_ref().is_str() || value.get_ref().is_array() {
            return match value.get_ref().as_str() {
                Some(text) => Some(Self(vec![Field::Given(text.to_owned(), reader.place(value.span()))])),
                None => Vec::from_toml(value, reader).map(Self),
            };
        }
        let message = "write a value in quotes, \"x*\" for a prefix, \"*\" for any value, or a list of these";
        reader.wrong(value, format!("{} is not a pattern: {message}", shown(value.get_ref())));
        None
    }
}

impl JsonSchema for OneOrMore {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Pattern".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "title": "pattern",
            "description": "a value, \"x*\" a prefix, \"*\" any present value, a list any of its members",
            "anyOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }],
        })
    }
}

/// Reads what is written as text.
fn text<T: FromText>(value: &Value<'_>, reader: &mut Reader) -> Option<T> {
    match value.get_ref().as_str() {
        Some(text) => T::from_text(text).map_err(|message| reader.wrong(value, message)).ok(),
        None => {
            reader.wrong(value, format!("{} is not {}", shown(value.get_ref()), T::WHAT));
            None
        }
    }
}

/// Implements what a kind that is written as text needs beyond its [`FromText`].
macro_rules! written_as_text {
    ($($kind:ty: $schema:tt)*) => { $(
        impl FromToml for $kind {
            fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
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
    Span: { "type": "string", "title": "duration", "pattern": "^([0-9]+(d|h|ms|m|s))+$", "examples": ["1h30m", "250ms"] }
    Bytes: { "type": "string", "title": "size", "pattern": "^[0-9]+(B|KiB|MiB|GiB|TiB)$", "examples": ["256MiB"] }
    Network: { "type": "string", "title": "network", "examples": ["10.0.0.0/8", "2001:db8::/32"] }
    Url: { "type": "string", "title": "URL", "examples": ["memory:", "redis://127.0.0.1:6379"] }
    Prefix: { "type": "string", "title": "1 to 32 letters, digits, `-`, `_`, `.`", "pattern": "^[A-Za-z0-9._-]{1,32}$" }
    HeaderName: { "type": "string", "title": "name of a header", "minLength": 1, "examples": ["x-api-key"] }
}

impl<T: Words> FromToml for Word<T> {
    fn from_toml(value: &Value<'_>, reader: &mut Reader) -> Option<Self> {
        text(value, reader)
    }
}

impl<T: Words> JsonSchema for Word<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Word".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let words: Vec<_> = T::WORDS.iter().map(|(word, _)| *word).collect();
        json_schema!({ "type": "string", "enum": words })
    }
}

impl Words for Dialect {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("draft-11", Self::Draft11),
        ("x-ratelimit", Self::XRateLimit),
        ("draft-07", Self::Draft07),
        ("draft-06", Self::Draft06),
        ("github", Self::GitHub),
        ("none", Self::None),
    ];
}

impl Words for Closed {
    const WORDS: &'static [(&'static str, Self)] =
        &[("over-limit", Self::OverLimit), ("unavailable", Self::Unavailable)];
}

impl Words for Scope {
    const WORDS: &'static [(&'static str, Self)] =
        &[("check", Self::Check), ("adjust", Self::Adjust), ("admin", Self::Admin)];
}

impl Words for Kind {
    const WORDS: &'static [(&'static str, Self)] = &[("text", Self::Text), ("ip", Self::Ip)];
}

impl Words for OnStoreFailure {
    const WORDS: &'static [(&'static str, Self)] =
        &[("open", Self::Open), ("closed", Self::Closed), ("local", Self::Local)];
}

impl Words for Absent {
    const WORDS: &'static [(&'static str, Self)] =
        &[("skip", Self::Skip), ("shared", Self::Shared), ("refuse", Self::Deny)];
}

impl Words for Algorithm {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("fixed-window", Self::FixedWindow),
        ("sliding-log", Self::SlidingLog),
        ("sliding-counter", Self::SlidingCounter),
        ("token-bucket", Self::TokenBucket),
        ("gcra", Self::TokenBucket),
    ];
}
