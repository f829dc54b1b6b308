//! Formatting of numbers, sizes, durations and times for text output.

use std::{fmt::Write, time::Duration};

use jiff::Timestamp;

/// Formats a duration in a fitting unit with three significant digits: `85 us`, `1.23 ms`, `2.5 s`.
pub(crate) fn duration(duration: Duration) -> String {
    let (value, unit) = match duration.as_nanos() {
        nanos @ ..1_000 => return format!("{nanos} ns"),
        1_000..1_000_000 => (duration.as_secs_f64() * 1e6, "us"),
        1_000_000..1_000_000_000 => (duration.as_secs_f64() * 1e3, "ms"),
        _ => (duration.as_secs_f64(), "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// Formats a duration in its two largest units: `2h 5m`.
pub(crate) fn coarse_duration(seconds: f64) -> String {
    if seconds < 10.0 && seconds.fract() > 0.0 {
        return format!("{seconds:.1}s");
    }
    let mut rest = seconds.round() as u64;
    let mut text = String::new();
    let mut units = 0;
    for (unit, length) in [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)] {
        if (rest >= length || unit == "s" && text.is_empty()) && units < 2 {
            let space = if text.is_empty() { "" } else { " " };
            write!(text, "{space}{}{unit}", rest / length).expect("writing to a string cannot fail");
            units += 1;
        } else if units > 0 {
            units += 1;
        }
        rest %= length;
    }
    text
}

/// Formats a time in UTC: `2026-11-16 04:54:28`.
pub(crate) fn timestamp(time: Timestamp) -> String {
    time.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

/// Escapes control and invisible characters, which could change what a terminal shows: `a\u{1b}[2J`.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            c => shown.extend(c.escape_debug()),
        }
    }
    shown
}

/// Formats a size in a fitting unit: `1.5 MiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = UNITS.iter();
    let mut unit = units.next().unwrap_or(&"");
    while value >= 1023.95
        && let Some(next) = units.next()
    {
        (value, unit) = (value / 1024.0, next);
    }
    format!("{} {unit}", three_digits(value))
}

/// Formats a count with thousands separators: `1,234,567`.
pub(crate) fn count(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun: `1 key`, `2,000 keys`.
pub(crate) fn plural(number: u64, one: &str, many: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{} {many}", count(number)) }
}

/// Formats a share as a percentage: `1.23 %`. A nonzero share is never shown as 0 %, an incomplete one never as 100 %.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        0.0 => "0 %".to_owned(),
        100.0 => "100 %".to_owned(),
        small if small < 0.01 => "<0.01 %".to_owned(),
        most if most > 99.99 => ">99.99 %".to_owned(),
        some if (10.0..=99.9).contains(&some) => format!("{some:.1} %"),
        some => format!("{some:.2} %"),
    }
}

fn three_digits(value: f64) -> String {
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A unit of a wait time.
struct WaitUnit {
    name: &'static str,
    suffix: &'static str,
    millis: u64,
}

const SECOND: WaitUnit = WaitUnit { name: "second", suffix: "s", millis: 1_000 };

/// Largest first.
const WAIT_UNITS: [WaitUnit; 5] = [
    WaitUnit { name: "day", suffix: "d", millis: 86_400_000 },
    WaitUnit { name: "hour", suffix: "h", millis: 3_600_000 },
    WaitUnit { name: "minute", suffix: "m", millis: 60_000 },
    SECOND,
    WaitUnit { name: "millisecond", suffix: "ms", millis: 1 },
];

/// Formats a wait time in words, rounded up: `54 seconds`, `5.4 seconds`, `1 minute 30 seconds`, `2 days 3 hours`.
pub(crate) fn wait_in_words(millis: u64) -> String {
    let word = |(number, unit): &(String, &WaitUnit)| {
        let plural = if number == "1" { "" } else { "s" };
        format!("{number} {}{plural}", unit.name)
    };
    wait_parts(millis).iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Formats a wait time briefly, rounded up: `54s`, `5.4s`, `1m30s`, `2d3h`.
pub(crate) fn short_wait(millis: u64) -> String {
    wait_parts(millis).iter().map(|(number, unit)| format!("{number}{}", unit.suffix)).collect()
}

/// Splits a wait time into at most two units, rounded up.
fn wait_parts(millis: u64) -> Vec<(String, &'static WaitUnit)> {
    let Some(at) = WAIT_UNITS.iter().position(|unit| millis >= unit.millis) else {
        return vec![("0".to_owned(), &SECOND)];
    };
    let unit = &WAIT_UNITS[at];
    // below ten seconds, tenths are shown
    if unit.millis == SECOND.millis {
        let tenths = if millis < 10_000 { millis.div_ceil(100) } else { 10 * millis.div_ceil(1_000) };
        if tenths < 600 {
            let number = match tenths % 10 {
                0 => (tenths / 10).to_string(),
                tenth => format!("{}.{tenth}", tenths / 10),
            };
            return vec![(number, unit)];
        }
        return wait_parts(60_000);
    }
    let Some(next) = WAIT_UNITS.get(at + 1) else {
        return vec![(millis.to_string(), unit)];
    };
    let up = millis.checked_next_multiple_of(next.millis).unwrap_or(millis);
    if WAIT_UNITS[..at].last().is_some_and(|larger| up >= larger.millis) {
        return wait_parts(up);
    }
    let mut parts = vec![((up / unit.millis).to_string(), unit)];
    if up % unit.millis > 0 {
        parts.push(((up % unit.millis / next.millis).to_string(), next));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_and_invisible_characters_are_escaped() {
        assert_eq!(printable("a\u{1b}[2J\u{7}\u{9b}\u{202e}\n"), r"a\u{1b}[2J\u{7}\u{9b}\u{202e}\n");
        let plain = r#"sg1:{30d13f94}:é "it's" \ …"#;
        assert_eq!(printable(plain), plain);
    }

    #[test]
    fn durations_sizes_and_counts_have_three_digits_and_a_unit() {
        let nanos =
            [0, 350, 85_000, 1_234, 1_000_000, 45_678_900, 999_999_999, 2_500_000_000, 123_456_789_000];
        let shown = ["0 ns", "350 ns", "85 us", "1.23 us", "1 ms", "45.7 ms", "1000 ms", "2.5 s", "123 s"];
        assert_eq!(nanos.map(|value| duration(Duration::from_nanos(value))), shown);
        let sizes = [0, 1023, 1024, 1_572_864, 1_048_575, u64::MAX];
        assert_eq!(sizes.map(bytes), ["0 B", "1023 B", "1 KiB", "1.5 MiB", "1 MiB", "16384 PiB"]);
        let counts = [0, 999, 1_000, 1_234_567, 100_000];
        assert_eq!(counts.map(count), ["0", "999", "1,000", "1,234,567", "100,000"]);
        assert_eq!([0, 1, 2].map(|number| plural(number, "key", "keys")), ["0 keys", "1 key", "2 keys"]);
    }

    #[test]
    fn percentages_are_rounded_but_never_to_none_or_all() {
        let shares = [
            (0.0, "0 %"),
            (0.000_001, "<0.01 %"),
            (0.0123, "1.23 %"),
            (0.5, "50.0 %"),
            (0.999_2, "99.92 %"),
            (0.999_999, ">99.99 %"),
            (1.0, "100 %"),
        ];
        for (share, text) in shares {
            assert_eq!(percent(share), text);
        }
    }

    #[test]
    fn coarse_durations_have_at_most_two_units() {
        let durations = [
            (0.0, "0s"),
            (0.5, "0.5s"),
            (59.0, "59s"),
            (60.0, "1m"),
            (7_500.0, "2h 5m"),
            (7_203.0, "2h"),
            (90_000.0, "1d 1h"),
        ];
        for (seconds, text) in durations {
            assert_eq!(coarse_duration(seconds), text);
        }
        assert_eq!(timestamp(Timestamp::from_second(1_794_804_868).unwrap()), "2026-11-16 04:54:28");
    }

    #[test]
    fn wait_times_are_rounded_up() {
        let table = [
            (0, "0 seconds", "0s"),
            (1, "1 millisecond", "1ms"),
            (999, "999 milliseconds", "999ms"),
            (1_000, "1 second", "1s"),
            (1_001, "1.1 seconds", "1.1s"),
            (5_400, "5.4 seconds", "5.4s"),
            (9_999, "10 seconds", "10s"),
            (53_001, "54 seconds", "54s"),
            (59_001, "1 minute", "1m"),
            (60_000, "1 minute", "1m"),
            (60_001, "1 minute 1 second", "1m1s"),
            (90_000, "1 minute 30 seconds", "1m30s"),
            (3_599_001, "1 hour", "1h"),
            (3_600_001, "1 hour 1 minute", "1h1m"),
            (86_399_999, "1 day", "1d"),
            (183_600_000, "2 days 3 hours", "2d3h"),
            (u64::MAX, "213503982334 days 14 hours", "213503982334d14h"),
        ];
        for (millis, words, short) in table {
            assert_eq!((&*wait_in_words(millis), &*short_wait(millis)), (words, short), "{millis}");
        }
    }
}
