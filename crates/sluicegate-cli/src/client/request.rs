//! Request arguments and the API's JSON body. Only the syntax is checked here; the API validates the values.

use clap::{ArgGroup, Args, builder::PossibleValuesParser};
use serde::{Serialize, Serializer};
use sluicegate::{duration, window};
use sluicegate_core::{Algorithm, time::MAX_EXACT};

use crate::value_parsers::whole_number;

/// The group of arguments of which a command that needs a request requires one.
pub(super) fn required_request() -> ArgGroup {
    ArgGroup::new("request").args(["labels", "key"]).required(true)
}

/// Labels, or a key with its limit. Commands that need them add [`required_request`].
#[derive(Args)]
#[command(group(ArgGroup::new("subject").args(["labels", "key"])))]
pub(super) struct RequestArgs {
    /// Labels of the request, for example route=login ip=203.0.113.9
    #[arg(value_name = "LABEL=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Key to check without rules, for example --key user:42 --limit "100 per 1m"
    #[arg(long, requires = "limit", help_heading = WITHOUT_RULES)]
    key: Option<String>,

    /// Limit of the key; the window is a duration such as 250ms, 30s, 5m, 1h30m, 7d, or second, minute, hour, day; for
    /// fixed-window also a calendar window: 1 day, 1 week, 1 month, 1 quarter, 1 year; for concurrency only an amount
    #[arg(long, value_name = "AMOUNT per WINDOW", requires = "key", conflicts_with = "labels", value_parser = key_limit, help_heading = WITHOUT_RULES)]
    limit: Option<KeyLimit>,

    /// Algorithm of the limit [default: token-bucket]
    #[arg(long, requires = "key", conflicts_with = "labels", value_parser = algorithm_names(), help_heading = WITHOUT_RULES)]
    algorithm: Option<String>,

    /// Burst of a token bucket [default: the amount]
    #[arg(long, value_name = "COUNT", requires = "key", conflicts_with = "labels", value_parser = whole_number::<u64>(0..=u64::MAX, 200), allow_negative_numbers = true, help_heading = WITHOUT_RULES)]
    burst: Option<u64>,
    /// Time zone of a calendar window, for example Europe/Berlin [default: UTC]
    #[arg(long, value_name = "NAME", requires = "key", conflicts_with = "labels", help_heading = WITHOUT_RULES)]
    zone: Option<String>,
    /// First day of a calendar window: a day of the month, or a weekday [default: 1 or monday]
    #[arg(long, value_name = "DAY", requires = "key", conflicts_with = "labels", value_parser = anchor, help_heading = WITHOUT_RULES)]
    anchor: Option<AnchorValue>,
}

/// Accepts the name of an algorithm, also for completions.
pub(crate) fn algorithm_names() -> PossibleValuesParser {
    PossibleValuesParser::new(Algorithm::NAMES.iter().map(|(name, _)| *name))
}

/// Accepts the name of an algorithm that counts units per window.
pub(crate) fn windowed_algorithm_names() -> PossibleValuesParser {
    let names = Algorithm::NAMES.iter().filter(|(_, algorithm)| algorithm.properties().has_window);
    PossibleValuesParser::new(names.map(|(name, _)| *name))
}

/// The unit of a cost without a unit.
const DEFAULT_UNIT: &str = "requests";

/// Windows given as one unit: its name, its abbreviation, and the duration sent to the API.
const UNIT_WINDOWS: [(&str, &str, &str); 4] =
    [("second", "s", "1s"), ("minute", "m", "1m"), ("hour", "h", "1h"), ("day", "d", "1d")];

/// The accepted forms of a rate.
const RATE_FORMS: &str =
    "use a whole number and a window, for example \"100 per 1m\", \"100 per minute\" or 100/1m";

const WITHOUT_RULES: &str = "Without rules";

#[derive(Args)]
pub(crate) struct CostArg {
    /// Cost of the request: a number of requests, or a number for each unit as in requests=1,tokens=850
    #[arg(long, value_parser = cost, allow_negative_numbers = true)]
    pub(crate) cost: Option<CostValue>,
}

#[derive(Args)]
pub(crate) struct ActualCostArg {
    /// Actual cost of the request: a number of requests, or a number for each unit as in tokens=120 [default: the estimate]
    #[arg(long, value_parser = cost, allow_negative_numbers = true)]
    pub(crate) cost: Option<CostValue>,
}

/// A request body of the API.
#[derive(Default, Serialize)]
pub(super) struct RequestBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "pairs")]
    pub(super) labels: Option<&'a [(String, String)]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) limit: Option<LimitBody<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost: Option<&'a CostValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rules: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) all: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) at_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ttl_ms: Option<u64>,
}

#[derive(Serialize)]
pub(super) struct LimitBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<&'a str>,
    amount: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    window: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    zone: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    anchor: Option<&'a AnchorValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
}

/// An amount per window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    pub(crate) amount: u64,
    pub(crate) window: String,
}

/// The limit of a key. Concurrency has no window.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeyLimit {
    amount: u64,
    window: Option<String>,
}

/// The first day of a calendar window.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
enum AnchorValue {
    DayOfMonth(u64),
    Weekday(String),
}

/// A number of requests, or a number for each unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum CostValue {
    Requests(u64),
    #[serde(serialize_with = "units")]
    Units(Vec<(String, u64)>),
}

impl RequestBody<'_> {
    /// Returns an argument that looks like several labels joined into one, such as `route=login,ip=203.0.113.9`.
    pub(super) fn joined_labels(&self) -> Option<String> {
        let joins = |(_, value): &&(String, String)| {
            let parts = value.split([',', ' ', '&', ';']).skip(1);
            parts.into_iter().any(|part| label(part).is_ok())
        };
        self.labels?.iter().find(joins).map(|(name, value)| format!("{name}={value}"))
    }

    /// The cost in each unit.
    pub(super) fn costs(&self) -> Vec<(&str, u64)> {
        match self.cost {
            None => vec![(DEFAULT_UNIT, 1)],
            Some(CostValue::Requests(number)) => vec![(DEFAULT_UNIT, *number)],
            Some(CostValue::Units(units)) => units.iter().map(|(unit, number)| (&**unit, *number)).collect(),
        }
    }
}

impl RequestArgs {
    /// Returns the body of the request.
    ///
    /// # Errors
    /// If the limit has no window, and its algorithm needs one.
    pub(super) fn body(&self) -> Result<RequestBody<'_>, String> {
        let has_window = self.limit.as_ref().is_none_or(|limit| limit.window.is_some());
        if !has_window && self.algorithm.as_deref() != Some(Algorithm::Concurrency.name()) {
            return Err(format!("--limit has no window: {RATE_FORMS}; only concurrency has none"));
        }
        let limit = self.limit.as_ref().map(|KeyLimit { amount, window }| LimitBody {
            algorithm: self.algorithm.as_deref(),
            amount: *amount,
            window: window.as_deref(),
            zone: self.zone.as_deref(),
            anchor: self.anchor.as_ref(),
            burst: self.burst,
        });
        let labels = self.key.is_none().then_some(&*self.labels);
        Ok(RequestBody { labels, key: self.key.as_deref(), limit, ..RequestBody::default() })
    }
}

/// Serializes all pairs, including repeated names, which the API rejects.
fn pairs<S: Serializer>(pairs: &Option<&[(String, String)]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied().flatten().map(|(name, value)| (name, value)))
}

fn units<S: Serializer>(units: &[(String, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(units.iter().map(|(unit, number)| (unit, number)))
}

/// Parses `label=value`. The value may contain further `=` and may be empty.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("use label=value, for example route=login".to_owned()),
    }
}

/// Parses `100 per 1m`, `100 per minute`, `100/1m` or `100 per 1 month`.
pub(crate) fn rate(text: &str) -> Result<Rate, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let calendar_window;
    let (amount, written) = match *words {
        [amount, "per", window] => (amount, window),
        [amount, "per", "1", unit] => {
            calendar_window = format!("1 {unit}");
            (amount, &*calendar_window)
        }
        [both] => both.split_once('/').unwrap_or_default(),
        _ => Default::default(),
    };
    match amount.parse() {
        Ok(amount) if !written.is_empty() => Ok(Rate { amount, window: api_window(written)? }),
        _ => Err(RATE_FORMS.to_owned()),
    }
}

/// Parses a rate, or an amount without a window.
fn key_limit(text: &str) -> Result<KeyLimit, String> {
    if let Ok(amount) = text.parse() {
        return Ok(KeyLimit { amount, window: None });
    }
    rate(text).map(|Rate { amount, window }| KeyLimit { amount, window: Some(window) })
}

/// Parses a duration into milliseconds.
pub(super) fn duration_ms(text: &str) -> Result<u64, String> {
    let duration = duration::parse(text).map_err(|error| error.to_string())?;
    u64::try_from(duration.as_millis()).map_err(|error| error.to_string())
}

/// Converts a window to that of the API.
fn api_window(text: &str) -> Result<String, String> {
    if let Some((_, _, window)) =
        UNIT_WINDOWS.iter().find(|(word, letter, _)| [*word, *letter].contains(&text))
    {
        return Ok((*window).to_owned());
    }
    match window::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) if text.bytes().all(|byte| byte.is_ascii_digit()) => Err(format!(
            "{text} has no unit: use {text}s for seconds, {text}m for minutes, {text}h, {text}d or {text}ms"
        )),
        Err(error) => Err(format!("{error}; or use second, minute, hour or day")),
    }
}

/// Parses a day of the month or a weekday.
fn anchor(text: &str) -> Result<AnchorValue, std::convert::Infallible> {
    Ok(text.parse().map_or_else(|_| AnchorValue::Weekday(text.to_owned()), AnchorValue::DayOfMonth))
}

/// Parses a time in microseconds since the epoch.
pub(super) fn timestamp_us(text: &str) -> Result<u64, String> {
    let timestamp_us = text.parse().ok().filter(|timestamp_us| *timestamp_us <= MAX_EXACT);
    timestamp_us.ok_or_else(|| {
        "use the at_us of the response that counted it, for example 1794805374160575".to_owned()
    })
}

fn cost(text: &str) -> Result<CostValue, String> {
    let number = |text: &str| text.parse().ok().filter(|number| *number <= MAX_EXACT);
    if let Some(requests) = number(text) {
        return Ok(CostValue::Requests(requests));
    }
    let unit = |part: &str| {
        let (unit, cost) = part.split_once('=')?;
        Some((unit.to_owned(), number(cost)?))
    };
    let units: Option<Vec<_>> = text.split(',').map(unit).collect();
    units.map(CostValue::Units).ok_or_else(|| {
        format!("use a whole number up to {MAX_EXACT}, or one for each unit as in requests=1,tokens=850")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_split_at_its_first_equals_sign() {
        let pair = |name: &str, value: &str| Ok((name.to_owned(), value.to_owned()));
        assert_eq!(label("route=login"), pair("route", "login"));
        assert_eq!(label("query=a=b"), pair("query", "a=b"));
        assert_eq!(label("empty="), pair("empty", ""));
        for wrong in ["route", "=login", ""] {
            assert!(label(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_rate_is_an_amount_per_window() {
        let expected = Ok(Rate { amount: 100, window: "1m".to_owned() });
        for text in ["100 per 1m", " 100  per 1m ", "100/1m"] {
            assert_eq!(rate(text), expected, "{text}");
        }
        for wrong in [
            "",
            "100",
            "100 1m",
            "x per 1m",
            "100 per",
            "-1 per 1m",
            "1.5 per 1m",
            "100/",
            "100 per 5 minutes",
        ] {
            assert!(rate(wrong).unwrap_err().contains("\"100 per minute\" or 100/1m"), "{wrong}");
        }
    }

    #[test]
    fn the_limit_of_a_key_may_have_no_window() {
        assert_eq!(key_limit("10"), Ok(KeyLimit { amount: 10, window: None }));
        assert_eq!(key_limit("10 per hour"), Ok(KeyLimit { amount: 10, window: Some("1h".to_owned()) }));
        assert!(key_limit("ten").unwrap_err().contains("use a whole number and a window"));
    }

    #[test]
    fn a_window_of_one_unit_may_be_a_unit_name() {
        let table = [
            ("second", "1s"),
            ("minute", "1m"),
            ("hour", "1h"),
            ("day", "1d"),
            ("s", "1s"),
            ("m", "1m"),
            ("h", "1h"),
        ];
        for (word, window) in table.into_iter().chain([("d", "1d"), ("60s", "60s"), ("1h30m", "1h30m")]) {
            for text in [format!("100 per {word}"), format!("100/{word}")] {
                assert_eq!(rate(&text), Ok(Rate { amount: 100, window: window.to_owned() }), "{text}");
            }
        }
        for wrong in ["fortnight", "1y", "min", "minutes", "1minute", "M"] {
            let error = rate(&format!("100 per {wrong}")).unwrap_err();
            assert!(error.contains(&format!("{wrong:?} is not a duration")), "{error}");
            assert!(error.ends_with("or use second, minute, hour or day"), "{error}");
        }
        let month = Rate { amount: 100, window: "1 month".to_owned() };
        assert_eq!(rate("100 per 1 month"), Ok(month));
        assert!(rate("100 per month").unwrap_err().contains("\"1 month\""));
        assert!(rate("100 per 60").unwrap_err().contains("60s for seconds"));
    }

    #[test]
    fn a_cost_is_a_number_or_one_for_each_unit() {
        assert_eq!(cost("2"), Ok(CostValue::Requests(2)));
        let units = vec![("requests".to_owned(), 1), ("tokens".to_owned(), 850)];
        assert_eq!(cost("requests=1,tokens=850"), Ok(CostValue::Units(units)));
        assert_eq!(cost("9007199254740991"), Ok(CostValue::Requests(MAX_EXACT)));
        for wrong in [
            "",
            "-1",
            "1.5",
            "tokens",
            "tokens=",
            "tokens=x",
            "tokens=1,",
            "9007199254740992",
            "a=9007199254740992",
        ] {
            assert!(cost(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn joined_labels_are_detected() {
        for (value, is_joined) in
            [("login", false), ("a=b", false), ("a, b", false), ("login,ip=1", true), ("login ip=1", true)]
        {
            let given = [("route".to_owned(), value.to_owned())];
            let body = RequestBody { labels: Some(&given), ..RequestBody::default() };
            assert_eq!(body.joined_labels().is_some(), is_joined, "{value}");
        }
    }

    #[test]
    fn a_body_contains_repeated_labels() {
        let given = [("a".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())];
        let cost = CostValue::Units(vec![("tokens".to_owned(), 5)]);
        let body = RequestBody { labels: Some(&given), cost: Some(&cost), ..RequestBody::default() };
        let json = serde_json::to_string(&body).unwrap();
        assert_eq!(json, r#"{"labels":{"a":"1","a":"2"},"cost":{"tokens":5}}"#);
    }
}
