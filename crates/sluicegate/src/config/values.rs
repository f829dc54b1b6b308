//! Types of setting values: parsing, error messages and JSON Schema.

use std::{borrow::Cow, time::Duration};

use ipnet::IpNet;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use sluicegate_core::{
    Algorithm,
    calendar::{Anchor, Weekday},
    hold::OnExpiry,
};
use toml::de::DeValue;

use super::toml_reader::{Field, FromText, FromToml, TomlReader, TomlValue, shown, suggestion};
use crate::{
    address,
    calendar::Zone,
    duration,
    label_policy::LabelKind,
    rules::{Absent, LeaseSize, OnStoreFailure, lease_size_forms},
    window::{self, WrittenWindow},
};

/// A duration, such as `"1h30m"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationValue(pub Duration);

/// The window of a limit, such as `"1h30m"` or `"1 month"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowValue(pub WrittenWindow);

/// The name of a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZoneValue(pub Zone);

/// The first day of calendar periods: a day of the month, or a weekday.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnchorValue(pub Anchor);

/// An IP network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network(pub IpNet);

/// The name of an HTTP header, in lower case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderName(pub String);

/// A value from a fixed set of keywords.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keyword<T>(pub T);

/// Types whose values are written as keywords.
pub trait Keywords: Copy + PartialEq + 'static {
    const KEYWORDS: &'static [(&'static str, Self)];

    /// The keyword of this value.
    fn keyword(self) -> &'static str {
        let entry = Self::KEYWORDS.iter().find(|(_, value)| *value == self);
        entry.expect("every value has a keyword").0
    }
}

/// The patterns of a condition: one, or a list of alternatives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patterns(pub Vec<Field<String>>);

impl FromText for DurationValue {
    const EXPECTED: &'static str =
        "a duration: use whole numbers with d, h, m, s or ms, in quotes, for example \"1h30m\" or \"250ms\"";

    fn from_text(text: &str) -> Result<Self, String> {
        duration::parse(text).map(Self).map_err(|error| error.to_string())
    }
}

impl FromText for WindowValue {
    const EXPECTED: &'static str = "a window: use whole numbers with d, h, m, s or ms, in quotes, for example \"1h30m\", or a \
                                    calendar window such as \"1 month\"";

    fn from_text(text: &str) -> Result<Self, String> {
        window::parse(text).map(Self).map_err(|error| error.to_string())
    }
}

impl FromText for ZoneValue {
    const EXPECTED: &'static str =
        "a time zone: write its IANA name in quotes, for example \"Europe/Berlin\"";

    fn from_text(text: &str) -> Result<Self, String> {
        Zone::named(text).map(Self).map_err(|error| {
            let names: Vec<String> = Zone::names().map(|name| name.to_ascii_lowercase()).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            match suggestion(text, &names).and_then(|name| Zone::named(name).ok()) {
                Some(zone) => format!("zone {text:?} is unknown: did you mean {:?}?", zone.name()),
                None => error.to_string(),
            }
        })
    }
}

impl FromText for AnchorValue {
    const EXPECTED: &'static str =
        "an anchor: write a day of the month, 1 to 31, or a weekday in quotes, for example \"monday\"";

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: sluicegate_core::calendar::CalendarError| error.to_string())
    }
}

impl FromText for Network {
    const EXPECTED: &'static str =
        "a network: use an address and a prefix length, for example \"10.0.0.0/8\", or one address";

    fn from_text(text: &str) -> Result<Self, String> {
        address::parse_network(text).map(Self).ok_or_else(|| not::<Self>(text))
    }
}

impl FromText for HeaderName {
    const EXPECTED: &'static str = "a header name: use for example \"x-api-key\"";

    fn from_text(text: &str) -> Result<Self, String> {
        let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        let is_name = !text.is_empty() && text.bytes().all(is_name_byte);
        if is_name { Ok(Self(text.to_ascii_lowercase())) } else { Err(not::<Self>(text)) }
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

/// The message for text that is not a `T`.
pub fn not<T: FromText>(text: &str) -> String {
    format!("{text:?} is not {}", T::EXPECTED)
}

/// The size of a lease: `"1%"`, a fraction or units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseValue(pub LeaseSize);

impl FromText for LeaseValue {
    const EXPECTED: &'static str = lease_size_forms();

    fn from_text(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| not::<Self>(text))
    }
}

impl FromToml for LeaseValue {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        let written = match value.get_ref() {
            DeValue::String(text) => Some(text.to_string()),
            DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
            DeValue::Float(number) => Some(number.as_str().to_owned()),
            _ => None,
        };
        let read = written.and_then(|text| text.parse().ok());
        if read.is_none() {
            reader.wrong(value, format!("{} is not {}", shown(value.get_ref()), Self::EXPECTED));
        }
        read.map(Self)
    }
}

impl JsonSchema for LeaseValue {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Lease".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "title": "lease",
            "anyOf": [
                { "type": "string", "pattern": "^([0-9]+(\\.[0-9]{1,4})?%|[0-9]+|[01]\\.[0-9]{1,6})$", "examples": ["1%"] },
                { "type": "integer", "minimum": 0, "maximum": 1_000_000_000 },
                { "type": "number", "minimum": 0, "maximum": 1 },
            ],
        })
    }
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
pub fn text<T: FromText>(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<T> {
    match value.get_ref().as_str() {
        Some(text) => T::from_text(text).map_err(|message| reader.wrong(value, message)).ok(),
        None => {
            reader.wrong(value, format!("{} is not {}", shown(value.get_ref()), T::EXPECTED));
            None
        }
    }
}

/// Implements [`FromToml`] and [`JsonSchema`] for types that are written as strings.
#[doc(hidden)]
#[macro_export]
macro_rules! config_text_values {
    ($($kind:ty: $schema:tt)*) => { $(
        impl $crate::config::toml_reader::FromToml for $kind {
            fn from_toml(
                value: &$crate::config::toml_reader::TomlValue<'_>,
                reader: &mut $crate::config::toml_reader::TomlReader,
            ) -> Option<Self> {
                $crate::config::values::text(value, reader)
            }
        }

        impl schemars::JsonSchema for $kind {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($kind).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($schema)
            }
        }
    )* };
}
pub use config_text_values as written_as_text;

impl FromToml for AnchorValue {
    fn from_toml(value: &TomlValue<'_>, reader: &mut TomlReader) -> Option<Self> {
        match value.get_ref().as_integer() {
            Some(_) => {
                let day = shown(value.get_ref());
                Self::from_text(&day).map_err(|message| reader.wrong(value, message)).ok()
            }
            None => match text(value, reader)? {
                Self(Anchor::DayOfMonth(day)) => {
                    reader.wrong(
                        value,
                        format!("\"{day}\" is not an anchor: write a day of the month without quotes"),
                    );
                    None
                }
                weekday => Some(weekday),
            },
        }
    }
}

impl JsonSchema for AnchorValue {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Anchor".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "title": "anchor",
            "anyOf": [
                { "type": "integer", "minimum": 1, "maximum": 31 },
                { "type": "string", "enum": Weekday::ALL.map(Weekday::name) },
            ],
        })
    }
}

written_as_text! {
    WindowValue: { "type": "string", "title": "window", "pattern": "^(([0-9]+(d|h|ms|m|s))+|1 (day|week|month|quarter|year))$", "examples": ["1h30m", "1 month"] }
    ZoneValue: { "type": "string", "title": "time zone", "examples": ["Europe/Berlin", "UTC"] }
    DurationValue: { "type": "string", "title": "duration", "pattern": "^([0-9]+(d|h|ms|m|s))+$", "examples": ["1h30m", "250ms"] }
    Network: { "type": "string", "title": "network", "examples": ["10.0.0.0/8", "2001:db8::/32"] }
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

impl Keywords for OnExpiry {
    const KEYWORDS: &'static [(&'static str, Self)] =
        &[(Self::Charge.name(), Self::Charge), (Self::Release.name(), Self::Release)];
}

impl Keywords for Algorithm {
    const KEYWORDS: &'static [(&'static str, Self)] = Self::NAMES;
}
