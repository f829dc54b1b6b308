//! What is asked, as the API's JSON. What it means is for the API to say: here is only what a shell's words are.

use clap::{ArgGroup, Args, builder::PossibleValuesParser};
use serde::{Serialize, Serializer};
use tollgate_core::time::MAX_EXACT;
use tollgate_server::duration;

use crate::numbers::whole;

/// Labels, or a key with its limit.
#[derive(Args)]
#[command(group(ArgGroup::new("about").args(["labels", "key"]).required(true)))]
pub(super) struct Subject {
    /// What the request says about itself, for example route=login ip=203.0.113.9
    #[arg(value_name = "LABEL=VALUE", value_parser = label)]
    labels: Vec<(String, String)>,

    /// Asks about this key without any rules, for example --key user:42 --limit "100 per 1m"
    #[arg(long, requires = "limit", help_heading = WITHOUT_RULES)]
    key: Option<String>,

    /// How much passes in which time: 250ms, 30s, 5m, 1h30m, 7d, or second, minute, hour, day
    #[arg(long, value_name = "AMOUNT per WINDOW", requires = "key", conflicts_with = "labels", value_parser = rate, help_heading = WITHOUT_RULES)]
    limit: Option<Rate>,

    /// How it is counted: token-bucket (unless set), sliding-log, sliding-counter, fixed-window
    #[arg(long, requires = "key", conflicts_with = "labels", value_parser = PossibleValuesParser::new(ALGORITHMS), hide_possible_values = true, help_heading = WITHOUT_RULES)]
    algorithm: Option<String>,

    /// Of a token bucket: how much passes at once; the amount unless set
    #[arg(long, value_name = "COUNT", requires = "key", conflicts_with = "labels", value_parser = whole::<u64>(0..=u64::MAX, 200), allow_negative_numbers = true, help_heading = WITHOUT_RULES)]
    burst: Option<u64>,
}

/// The algorithms by name, for completions; the API says the last word.
pub(crate) const ALGORITHMS: [&str; 5] =
    ["token-bucket", "sliding-log", "sliding-counter", "fixed-window", "gcra"];

/// The unit of a cost that names none.
const REQUESTS: &str = "requests";

/// Windows of one unit, as a word, in short, and as the API reads it.
const ONE_UNIT: [(&str, &str, &str); 4] =
    [("second", "s", "1s"), ("minute", "m", "1m"), ("hour", "h", "1h"), ("day", "d", "1d")];

const WITHOUT_RULES: &str = "Without rules";

#[derive(Args)]
pub(crate) struct Amount {
    /// What the request costs: a number of requests, or one for each unit as in requests=1,tokens=850
    #[arg(long, value_parser = cost, allow_negative_numbers = true)]
    pub(crate) cost: Option<Cost>,
}

/// A body of the API.
#[derive(Default, Serialize)]
pub(super) struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "pairs")]
    pub(super) labels: Option<&'a [(String, String)]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) limit: Option<Limit<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cost: Option<&'a Cost>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rules: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) at_us: Option<u64>,
}

#[derive(Serialize)]
pub(super) struct Limit<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    algorithm: Option<&'a str>,
    amount: u64,
    window: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u64>,
}

/// So much in such a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    pub(crate) amount: u64,
    pub(crate) window: String,
}

/// So many requests, or so much of each unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub(crate) enum Cost {
    Requests(u64),
    #[serde(serialize_with = "units")]
    Units(Vec<(String, u64)>),
}

impl Body<'_> {
    /// A word that holds several labels, as if they were one.
    pub(super) fn joined(&self) -> Option<String> {
        let joins = |(_, value): &&(String, String)| {
            let parts = value.split([',', ' ', '&', ';']).skip(1);
            parts.into_iter().any(|part| label(part).is_ok())
        };
        self.labels?.iter().find(joins).map(|(name, value)| format!("{name}={value}"))
    }

    /// What is asked for in each unit, as the API understands it.
    pub(super) fn costs(&self) -> Vec<(&str, u64)> {
        match self.cost {
            None => vec![(REQUESTS, 1)],
            Some(Cost::Requests(number)) => vec![(REQUESTS, *number)],
            Some(Cost::Units(units)) => units.iter().map(|(unit, number)| (&**unit, *number)).collect(),
        }
    }
}

impl Subject {
    pub(super) fn body(&self) -> Body<'_> {
        let limit = self.limit.as_ref().map(|Rate { amount, window }| Limit {
            algorithm: self.algorithm.as_deref(),
            amount: *amount,
            window,
            burst: self.burst,
        });
        let labels = self.key.is_none().then_some(&*self.labels);
        Body { labels, key: self.key.as_deref(), limit, ..Body::default() }
    }
}

/// All pairs, repeated ones too: the API refuses those in its own words.
fn pairs<S: Serializer>(pairs: &Option<&[(String, String)]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied().flatten().map(|(name, value)| (name, value)))
}

fn units<S: Serializer>(units: &[(String, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(units.iter().map(|(unit, number)| (unit, number)))
}

/// A label and its value; the value may have further `=`, and be empty.
pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write a label and its value, for example route=login".to_owned()),
    }
}

/// So much in such a time; a window of one unit may also be a word.
pub(crate) fn rate(text: &str) -> Result<Rate, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let (amount, written) = match *words {
        [amount, "per", window] => (amount, window),
        [both] => both.split_once('/').unwrap_or_default(),
        _ => Default::default(),
    };
    match amount.parse() {
        Ok(amount) if !written.is_empty() => Ok(Rate { amount, window: window(written)? }),
        _ => {
            Err("write a whole number and a window, for example \"100 per 1m\", \"100 per minute\" or 100/1m"
                .to_owned())
        }
    }
}

/// A window as the API reads it.
fn window(text: &str) -> Result<String, String> {
    if let Some((_, _, window)) = ONE_UNIT.iter().find(|(word, letter, _)| [*word, *letter].contains(&text)) {
        return Ok((*window).to_owned());
    }
    match duration::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) if text.bytes().all(|byte| byte.is_ascii_digit()) => Err(format!(
            "{text} of what? write the unit with it: {text}s for seconds, {text}m for minutes, {text}h, {text}d or {text}ms"
        )),
        Err(error) => Err(format!("{error}; or one of second, minute, hour, day")),
    }
}

/// When something was counted.
pub(super) fn moment(text: &str) -> Result<u64, String> {
    let moment = text.parse().ok().filter(|moment| *moment <= MAX_EXACT);
    moment.ok_or_else(|| {
        "write the at_us of the answer that counted it, for example 1794805374160575".to_owned()
    })
}

fn cost(text: &str) -> Result<Cost, String> {
    let number = |text: &str| text.parse().ok().filter(|number| *number <= MAX_EXACT);
    if let Some(requests) = number(text) {
        return Ok(Cost::Requests(requests));
    }
    let unit = |part: &str| {
        let (unit, cost) = part.split_once('=')?;
        Some((unit.to_owned(), number(cost)?))
    };
    let units: Option<Vec<_>> = text.split(',').map(unit).collect();
    units.map(Cost::Units).ok_or_else(|| {
        format!("write a whole number up to {MAX_EXACT}, or one for each unit as in requests=1,tokens=850")
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
    fn a_window_of_one_unit_may_be_a_word() {
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
            assert!(error.ends_with("one of second, minute, hour, day"), "{error}");
        }
        assert!(rate("100 per 60").unwrap_err().contains("60s for seconds"));
    }

    #[test]
    fn a_cost_is_a_number_or_one_for_each_unit() {
        assert_eq!(cost("2"), Ok(Cost::Requests(2)));
        let units = vec![("requests".to_owned(), 1), ("tokens".to_owned(), 850)];
        assert_eq!(cost("requests=1,tokens=850"), Ok(Cost::Units(units)));
        assert_eq!(cost("9007199254740991"), Ok(Cost::Requests(MAX_EXACT)));
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
    fn labels_that_were_meant_to_be_several_are_noticed() {
        for (value, is_joined) in
            [("login", false), ("a=b", false), ("a, b", false), ("login,ip=1", true), ("login ip=1", true)]
        {
            let given = [("route".to_owned(), value.to_owned())];
            let body = Body { labels: Some(&given), ..Body::default() };
            assert_eq!(body.joined().is_some(), is_joined, "{value}");
        }
    }

    #[test]
    fn a_body_has_what_was_given_and_repeated_labels_too() {
        let given = [("a".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())];
        let cost = Cost::Units(vec![("tokens".to_owned(), 5)]);
        let body = Body { labels: Some(&given), cost: Some(&cost), ..Body::default() };
        let json = serde_json::to_string(&body).unwrap();
        assert_eq!(json, r#"{"labels":{"a":"1","a":"2"},"cost":{"tokens":5}}"#);
    }
}
