//! Durations in text form: `250ms`, `30s`, `5m`, `1h30m`, `7d`.
//!
//! Integers with a unit, in descending order of units, each unit at most once. Signs, spaces, fractions and calendar units
//! are rejected because they are ambiguous.

use std::time::Duration;

/// The units, largest first, in milliseconds.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// The text is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a duration: use whole numbers with d, h, m, s or ms, for example \"1h30m\" or \"250ms\""
)]
pub struct DurationError(String);

/// Parses a duration.
///
/// # Errors
/// If the text is not a duration, or the duration is too long.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let invalid = || DurationError(text.to_owned());
    let mut total_ms: u64 = 0;
    let mut units = UNITS.iter();
    let mut rest = text;
    while !rest.is_empty() {
        let (number, after) = split_where(rest, |c| !c.is_ascii_digit());
        let (name, after) = split_where(after, |c| c.is_ascii_digit());
        let (_, unit_ms) = units.find(|(unit, _)| *unit == name).ok_or_else(invalid)?;
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let part_ms = number.checked_mul(*unit_ms).ok_or_else(invalid)?;
        total_ms = total_ms.checked_add(part_ms).ok_or_else(invalid)?;
        rest = after;
    }
    if text.is_empty() { Err(invalid()) } else { Ok(Duration::from_millis(total_ms)) }
}

/// Formats a duration so that [`parse`] reads it; one with a fraction of a millisecond is formatted as Rust does.
pub fn text(duration: Duration) -> String {
    let mut rest_ms = match u64::try_from(duration.as_millis()) {
        Ok(millis) if Duration::from_millis(millis) == duration => millis,
        _ => return format!("{duration:?}"),
    };
    let mut text = String::new();
    for (unit, unit_ms) in UNITS {
        if rest_ms >= unit_ms {
            text.push_str(&format!("{}{unit}", rest_ms / unit_ms));
            rest_ms %= unit_ms;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

fn split_where(text: &str, ends: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(ends).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_with_units_are_parsed() {
        let table = [
            ("250ms", 250),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("7d", 604_800_000),
            ("1d2h3m4s5ms", 93_784_005),
            ("1m1ms", 60_001),
            ("0s", 0),
            ("90m", 5_400_000),
        ];
        for (text, millis) in table {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn formatted_durations_parse_to_the_same_value() {
        for (millis, written) in
            [(0, "0s"), (1, "1ms"), (60_000, "1m"), (5_400_000, "1h30m"), (93_784_005, "1d2h3m4s5ms")]
        {
            let duration = Duration::from_millis(millis);
            assert_eq!(text(duration), written);
            assert_eq!(parse(written), Ok(duration));
        }
        assert_eq!(text(Duration::from_micros(1500)), "1.5ms");
    }

    #[test]
    fn other_texts_are_rejected() {
        let invalid = [
            "",
            "1",
            "s",
            "1.5h",
            "-1s",
            "+1s",
            "1 s",
            " 1s",
            "1s ",
            "1m1h",
            "1s1s",
            "1ms1s",
            "1w",
            "1M",
            "1S",
            "1e3s",
            "PT1M",
            "1min",
            "١s",
            "1µs",
            "18446744073709551616ms",
            "18446744073709551615d",
            "213503982334d18446744073709551615ms",
        ];
        for text in invalid {
            assert_eq!(parse(text), Err(DurationError(text.to_owned())), "{text}");
        }
        assert!(parse("1.5h").unwrap_err().to_string().starts_with("\"1.5h\" is not a duration: use "));
    }
}
