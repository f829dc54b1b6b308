//! Parser of times in the usual formats.

use jiff::{Timestamp, civil::DateTime, fmt::strtime, tz::TimeZone};

/// The format of access logs.
const ACCESS_LOG_FORMAT: &str = "%d/%b/%Y:%H:%M:%S %z";

/// The unit of a number follows from its size: seconds up to the year 5138, milliseconds from 1973, and so on.
const SECONDS_BELOW: u128 = 100_000_000_000;

/// Parses times. The last result is cached, because adjacent lines often have the same time.
#[derive(Debug)]
pub(super) struct TimeParser {
    format: Option<String>,
    last_text: Vec<u8>,
    last_us: u64,
}

impl TimeParser {
    /// Creates a parser of `format` (strftime), or of the usual formats.
    pub(super) fn new(format: Option<&str>) -> Self {
        Self { format: format.map(str::to_owned), last_text: Vec::new(), last_us: 0 }
    }

    /// Returns microseconds since the epoch; none for an invalid time or one before the epoch.
    #[inline]
    pub(super) fn read(&mut self, text: &[u8]) -> Option<u64> {
        if text != self.last_text || text.is_empty() {
            self.last_us = self.parse(std::str::from_utf8(text).ok()?)?;
            self.last_text.clear();
            self.last_text.extend_from_slice(text);
        }
        Some(self.last_us)
    }

    fn parse(&self, text: &str) -> Option<u64> {
        let timestamp = match &self.format {
            Some(format) => by_format(format, text)?,
            None if text.as_bytes().get(2) == Some(&b'/') => by_format(ACCESS_LOG_FORMAT, text)?,
            None => match since_epoch(text) {
                Some(micros) => return Some(micros),
                None => iso(text)?,
            },
        };
        u64::try_from(timestamp.as_microsecond()).ok()
    }

    /// The expected form, for messages.
    pub(super) fn expected(&self) -> String {
        match &self.format {
            Some(format) => format!("a time like {format:?}"),
            None => {
                "a time such as 16/Nov/2026:04:54:28 +0000, 2026-11-16T04:54:28Z or 1794804868.123".to_owned()
            }
        }
    }
}

/// Parses a time by a format. Without an offset it is in UTC.
fn by_format(format: &str, text: &str) -> Option<Timestamp> {
    let time = strtime::parse(format, text).ok()?;
    time.to_timestamp().ok().or_else(|| in_utc(time.to_datetime().ok()?))
}

fn iso(text: &str) -> Option<Timestamp> {
    text.parse().ok().or_else(|| in_utc(text.parse().ok()?))
}

fn in_utc(time: DateTime) -> Option<Timestamp> {
    TimeZone::UTC.to_timestamp(time).ok()
}

/// Parses a number of seconds, milliseconds, microseconds or nanoseconds, by its size.
fn since_epoch(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || whole.len() > 20 || !is_number(whole) || !is_number(fraction) {
        return None;
    }
    let whole: u128 = whole.parse().ok()?;
    // scaled by 10^6: the whole number followed by six digits of the fraction
    let millionths = fraction.bytes().chain(std::iter::repeat(b'0')).take(6);
    let scaled = millionths.fold(whole, |number, digit| number * 10 + u128::from(digit - b'0'));
    let unit = [(1, 1), (1_000, 1_000), (1_000_000, 1_000_000)]
        .into_iter()
        .find(|(times, _)| whole < SECONDS_BELOW * times)
        .map_or(1_000_000_000, |(_, per_second)| per_second);
    u64::try_from(scaled / unit).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_formats_are_parsed_to_the_microsecond() {
        const AT: u64 = 1_794_804_868_000_000;
        let mut times = TimeParser::new(None);
        for (text, micros) in [
            ("16/Nov/2026:04:54:28 +0000", AT),
            ("16/Nov/2026:05:54:28 +0100", AT),
            ("2026-11-16T04:54:28Z", AT),
            ("2026-11-16T06:54:28.123456+02:00", AT + 123_456),
            ("2026-11-16 04:54:28", AT),
            ("1794804868", AT),
            ("1794804868.123", AT + 123_000),
            ("1794804868.1234567", AT + 123_456),
            ("1794804868123", AT + 123_000),
            ("1794804868123456", AT + 123_456),
            ("1794804868123456789", AT + 123_456),
            ("1.5", 1_500_000),
        ] {
            assert_eq!(times.read(text.as_bytes()), Some(micros), "{text}");
            assert_eq!(times.read(text.as_bytes()), Some(micros), "{text}, again");
        }
    }

    #[test]
    fn invalid_times_are_rejected() {
        let mut times = TimeParser::new(None);
        for text in ["", "yesterday", "16/Nov/2026", "1.2.3", "-5", "1e9", "1969-12-31T00:00:00Z", "."] {
            assert_eq!(times.read(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_custom_format_is_parsed() {
        let mut times = TimeParser::new(Some("%Y%m%d %H%M%S"));
        assert_eq!(times.read(b"20261116 045428"), Some(1_794_804_868_000_000));
        assert_eq!(times.read(b"2026-11-16T04:54:28Z"), None);
    }
}
