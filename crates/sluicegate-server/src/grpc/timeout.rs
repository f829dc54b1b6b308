//! The caller's timeout in `grpc-timeout`: up to eight digits and a unit.
//!
//! If a decision takes longer, Envoy applies its default, which allows the request. The rules' failure policies therefore decide before
//! that. This leaves less time for the store, so the header is used only for trusted callers such as Envoy, whose timeout is
//! configured. The middleware, which end clients call, ignores it.

use std::time::Duration;

use http::HeaderMap;

const HEADER: &str = "grpc-timeout";

/// The most digits a timeout has.
const MAX_DIGITS: usize = 8;

/// The time reserved for the response to reach the caller. 2 ms are too short for Envoy's timeout of 20 ms: a timer may be late by
/// 2 ms.
const MAX_MARGIN: Duration = Duration::from_millis(5);

/// The part of a short timeout that is reserved instead.
const MARGIN_PART: u32 = 4;

/// Returns how long a decision may take so that the response arrives in time. An invalid header is ignored.
pub(super) fn budget(headers: &HeaderMap) -> Option<Duration> {
    let timeout = parse(headers.get(HEADER)?.to_str().ok()?)?;
    Some(timeout - MAX_MARGIN.min(timeout / MARGIN_PART))
}

fn parse(text: &str) -> Option<Duration> {
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
    fn every_unit_is_parsed_and_invalid_text_is_ignored() {
        let table = [
            ("99999999H", Some(Duration::from_secs(99_999_999 * 3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("3S", Some(Duration::from_secs(3))),
            ("20m", Some(Duration::from_millis(20))),
            ("7u", Some(Duration::from_micros(7))),
            ("0n", Some(Duration::ZERO)),
        ];
        for (text, expected) in table {
            assert_eq!(parse(text), expected, "{text}");
        }
        for text in ["", "m", "20", "20x", "-1m", "+1m", "100000000m", "1é", "é", "1 m"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn time_is_reserved_for_the_response() {
        let table = [("20m", 15_000), ("4m", 3_000), ("1S", 995_000), ("0m", 0), ("1u", 0)];
        for (text, micros) in table {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, text.parse().unwrap());
            assert_eq!(budget(&headers).unwrap().as_micros(), micros, "{text}");
        }
        assert_eq!(budget(&HeaderMap::new()), None);
    }
}
