//! How long Envoy waits, as it says in `grpc-timeout`: up to eight digits and a unit.
//!
//! A decision that comes later is worth nothing to Envoy, which then passes the request by its own default: the rules' policies
//! answer before. That shortens what the store has, so it is for callers who are trusted to ask, as Envoy is, whose time its
//! configuration sets. The middleware, which end clients call, does not look at the field.

use std::time::Duration;

use http::HeaderMap;

const FIELD: &str = "grpc-timeout";

/// The most digits a timeout has.
const MAX_DIGITS: usize = 8;

/// The time reserved for the answer to reach the caller. With 2 ms, Envoy's timeout of 20 ms ends first: a timer may be late
/// by 2 ms.
const MAX_MARGIN: Duration = Duration::from_millis(5);

/// The part of a short timeout that is reserved instead.
const MARGIN_PART: u32 = 4;

/// How long a decision may take so that the answer still finds the caller waiting. A field that cannot be read says
/// nothing.
pub(super) fn budget(headers: &HeaderMap) -> Option<Duration> {
    let timeout = parsed(headers.get(FIELD)?.to_str().ok()?)?;
    Some(timeout - MAX_MARGIN.min(timeout / MARGIN_PART))
}

fn parsed(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > MAX_DIGITS || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 60 * 60),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read_and_nonsense_is_nothing() {
        let table = [
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("20m", Some(Duration::from_millis(20))),
            ("7u", Some(Duration::from_micros(7))),
            ("0n", Some(Duration::ZERO)),
        ];
        for (text, expected) in table {
            assert_eq!(parsed(text), expected, "{text}");
        }
        for text in ["", "m", "20", "20x", "-1m", "+1m", "100000000m", "1é", "é", "1 m"] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }

    #[test]
    fn the_answer_has_time_to_arrive() {
        let table = [("20m", 15_000), ("4m", 3_000), ("1S", 995_000), ("0m", 0), ("1u", 0)];
        for (text, micros) in table {
            let mut headers = HeaderMap::new();
            headers.insert(FIELD, text.parse().unwrap());
            assert_eq!(budget(&headers).unwrap().as_micros(), micros, "{text}");
        }
        assert_eq!(budget(&HeaderMap::new()), None);
    }
}
