//! Parses the JSON body of a request. Unknown and repeated fields are rejected.
//!
//! Numbers are whole and exact. `null` is rejected rather than treated as absent, since JavaScript serializes `NaN` as `null`.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Unexpected, Visitor, value::MapAccessDeserializer},
};
use sluicegate::rules::LeaseSize;
use sluicegate_core::{calendar::Anchor, time::MAX_EXACT};

use super::problem::Problem;

/// A valid body, for error messages.
const EXAMPLE: &str = r#"{"labels":{"route":"login","ip":"203.0.113.9"},"cost":1}"#;

/// A cost in several units, for error messages.
const UNITS_EXAMPLE: &str = r#"{"requests":1,"tokens":850}"#;

/// The fields of all calls.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Body {
    #[serde(default, deserialize_with = "present")]
    pub(super) labels: Option<Pairs<String>>,
    #[serde(default, deserialize_with = "present")]
    pub(super) key: Option<String>,
    #[serde(default, deserialize_with = "present_object")]
    pub(super) limit: Option<Limit>,
    #[serde(default, deserialize_with = "present")]
    pub(super) cost: Option<Cost>,
    #[serde(default, deserialize_with = "present")]
    pub(super) rules: Option<Vec<String>>,
    #[serde(default, deserialize_with = "present")]
    pub(super) all: Option<bool>,
    #[serde(default, deserialize_with = "present")]
    pub(super) at_us: Option<Whole>,
    #[serde(default, deserialize_with = "present")]
    pub(super) deadline_ms: Option<Whole>,
    #[serde(default, deserialize_with = "present")]
    pub(super) headers: Option<bool>,
    #[serde(default, deserialize_with = "present")]
    pub(super) checks: Option<Vec<Object<Body>>>,
    #[serde(default, deserialize_with = "present")]
    pub(super) id: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) token: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) ttl_ms: Option<Whole>,
}

/// A limit given in the request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limit {
    #[serde(default, deserialize_with = "present")]
    pub(super) algorithm: Option<String>,
    pub(super) amount: Whole,
    #[serde(default, deserialize_with = "present")]
    pub(super) window: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) zone: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) anchor: Option<AnchorValue>,
    #[serde(default, deserialize_with = "present")]
    pub(super) burst: Option<Whole>,
    #[serde(default, deserialize_with = "present")]
    pub(super) lease: Option<LeaseValue>,
    #[serde(default, deserialize_with = "present")]
    pub(super) lease_for: Option<String>,
    #[serde(default, deserialize_with = "present")]
    pub(super) on_expiry: Option<OnExpiryValue>,
    #[serde(default, deserialize_with = "present")]
    pub(super) max_excess: Option<Whole>,
}

/// What happens to the units of a hold that expires.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum OnExpiryValue {
    Charge,
    Release,
}

/// How much of the limit may be charged in advance: a percentage in a string, or a number.
pub(super) struct LeaseValue(pub(super) LeaseSize);

/// The first day of a calendar window: a number or a weekday.
pub(super) struct AnchorValue(pub(super) Anchor);

/// A value that is deserialized from an object only.
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        object(deserializer).map(Self)
    }
}

/// A number of requests, or an amount for each unit.
pub(super) enum Cost {
    Requests(Whole),
    Units(Pairs<Whole>),
}

/// A whole number from 0 to 2^53 - 1.
#[derive(Clone, Copy)]
pub(super) struct Whole(pub(super) u64);

/// The members of an object, in order, including repeated ones, which the caller rejects.
pub(super) struct Pairs<V>(pub(super) Vec<(String, V)>);

impl Body {
    /// Reads one JSON object and nothing after it.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, Problem> {
        let mut json = serde_json::Deserializer::from_slice(bytes);
        match object(&mut json) {
            Ok(body) => json.end().map(|()| body).map_err(|error| not_json(&error)),
            // tracking the path doubles the cost of parsing, so only an invalid body is parsed again with it
            Err(_) => Self::read_with_path(bytes),
        }
    }

    fn read_with_path(bytes: &[u8]) -> Result<Self, Problem> {
        let mut json = serde_json::Deserializer::from_slice(bytes);
        let mut track = serde_path_to_error::Track::new();
        let body = object(serde_path_to_error::Deserializer::new(&mut json, &mut track));
        let body = body.map_err(|error| invalid(&error, &track.path()))?;
        json.end().map_err(|error| not_json(&error))?;
        Ok(body)
    }
}

fn invalid(error: &serde_json::Error, path: &serde_path_to_error::Path) -> Problem {
    if !error.is_data() {
        return not_json(error);
    }
    match path.iter().next() {
        Some(_) => Problem::bad_request(format_args!("{path}: {error}")),
        None => Problem::bad_request(format_args!("invalid body: {error}; send for example {EXAMPLE}")),
    }
}

fn not_json(error: &serde_json::Error) -> Problem {
    Problem::bad_request(format_args!(
        "the body is not valid JSON: {error}; send one object, for example {EXAMPLE}"
    ))
}

/// A field that may be absent but not `null`.
fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

fn present_object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    object(deserializer).map(Some)
}

/// Deserializes a struct from an object only. Derived implementations also accept an array of the fields' values.
fn object<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    struct Members<T>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for Members<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<T, M::Error> {
            T::deserialize(MapAccessDeserializer::new(map))
        }
    }

    deserializer.deserialize_map(Members(PhantomData))
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Pairs<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Members<V> {
            type Value = Pairs<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Pairs<V>, M::Error> {
                // bounded by the size of the body
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }

        deserializer.deserialize_map(Members(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number;

        impl Visitor<'_> for Number {
            type Value = Whole;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from 0 to {MAX_EXACT}")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Whole, E> {
                match number {
                    0..=MAX_EXACT => Ok(Whole(number)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(number), &self)),
                }
            }
        }

        deserializer.deserialize_u64(Number)
    }
}

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrUnits;

        impl<'de> Visitor<'de> for NumberOrUnits {
            type Value = Cost;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(
                    f,
                    "a whole number from 0 to {MAX_EXACT}, or an object with one per unit, for example {UNITS_EXAMPLE}"
                )
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Cost, E> {
                Whole::deserialize(de::value::U64Deserializer::new(number)).map(Cost::Requests)
            }

            fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Cost, M::Error> {
                Pairs::deserialize(MapAccessDeserializer::new(map)).map(Cost::Units)
            }
        }

        deserializer.deserialize_any(NumberOrUnits)
    }
}

impl<'de> Deserialize<'de> for LeaseValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PartOrUnits;

        impl Visitor<'_> for PartOrUnits {
            type Value = LeaseValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a lease, for example \"1%\" or a whole number of units")
            }

            fn visit_u64<E: de::Error>(self, units: u64) -> Result<LeaseValue, E> {
                self.visit_str(&units.to_string())
            }

            fn visit_f64<E: de::Error>(self, part: f64) -> Result<LeaseValue, E> {
                self.visit_str(&part.to_string())
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<LeaseValue, E> {
                text.parse().map(LeaseValue).map_err(E::custom)
            }
        }

        deserializer.deserialize_any(PartOrUnits)
    }
}

impl<'de> Deserialize<'de> for AnchorValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DayOrWeekday;

        impl Visitor<'_> for DayOrWeekday {
            type Value = AnchorValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a day of the month, 1 to 31, or a weekday, for example \"monday\"")
            }

            fn visit_u64<E: de::Error>(self, day: u64) -> Result<AnchorValue, E> {
                day.to_string().parse().map(AnchorValue).map_err(E::custom)
            }

            fn visit_str<E: de::Error>(self, weekday: &str) -> Result<AnchorValue, E> {
                match weekday.parse() {
                    Ok(anchor @ Anchor::Weekday(_)) => Ok(AnchorValue(anchor)),
                    _ => Err(E::invalid_value(Unexpected::Str(weekday), &self)),
                }
            }
        }

        deserializer.deserialize_any(DayOrWeekday)
    }
}
