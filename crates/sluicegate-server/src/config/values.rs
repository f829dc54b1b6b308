//! Types of setting values: parsing, error messages and JSON Schema.

use std::net::SocketAddr;

use sluicegate::{
    config::{
        toml_reader::FromText,
        values::{Keywords, not, written_as_text},
    },
    redis::keys::MAX_PREFIX,
};
use sluicegate_tower::headers::Dialect;

use super::settings::{Listen, Scope};
use crate::{grpc::Closed, store::StoreUrl};

/// A size in bytes, such as `"256MiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ByteSize(pub(super) u64);

/// The URL of the store. Its password is not printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url(pub(super) StoreUrl);

/// The prefix of all keys in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KeyPrefix(pub(super) String);

/// The dialect of rate limit headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeaderDialect(pub(super) Dialect);

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

written_as_text! {
    Listen: { "type": "string", "title": "address", "examples": ["127.0.0.1:8080", "off"] }
    ByteSize: { "type": "string", "title": "size", "pattern": "^[0-9]+(B|KiB|MiB|GiB|TiB)$", "examples": ["256MiB"] }
    Url: { "type": "string", "title": "URL", "examples": ["memory:", "redis://127.0.0.1:6379"] }
    KeyPrefix: { "type": "string", "title": "1 to 32 letters, digits, `-`, `_`, `.`", "pattern": "^[A-Za-z0-9._-]{1,32}$" }
}

impl Keywords for HeaderDialect {
    const KEYWORDS: &'static [(&'static str, Self)] = &[
        ("draft-11", Self(Dialect::Draft11)),
        ("x-ratelimit", Self(Dialect::XRateLimit)),
        ("draft-07", Self(Dialect::Draft07)),
        ("draft-06", Self(Dialect::Draft06)),
        ("github", Self(Dialect::GitHub)),
        ("none", Self(Dialect::None)),
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
