//! Numbers as people read them.

use std::time::Duration;

/// A duration in the unit that suits it, with three digits: `85 us`, `1.23 ms`, `2.5 s`.
pub(crate) fn duration(duration: Duration) -> String {
    let (value, unit) = match duration.as_nanos() {
        nanos @ ..1_000 => return format!("{nanos} ns"),
        1_000..1_000_000 => (duration.as_secs_f64() * 1e6, "us"),
        1_000_000..1_000_000_000 => (duration.as_secs_f64() * 1e3, "ms"),
        _ => (duration.as_secs_f64(), "s"),
    };
    format!("{} {unit}", three_digits(value))
}

/// A size in the unit that suits it: `1.5 MiB`.
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

/// A count with its thousands apart: `1,234,567`.
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

/// A count with what is counted: `1 key`, `2,000 keys`.
pub(crate) fn several(number: u64, one: &str, many: &str) -> String {
    if number == 1 { format!("1 {one}") } else { format!("{} {many}", count(number)) }
}

fn three_digits(value: f64) -> String {
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_have_their_unit() {
        let nanos =
            [0, 350, 85_000, 1_234, 1_000_000, 45_678_900, 999_999_999, 2_500_000_000, 123_456_789_000];
        let shown = ["0 ns", "350 ns", "85 us", "1.23 us", "1 ms", "45.7 ms", "1000 ms", "2.5 s", "123 s"];
        assert_eq!(nanos.map(|value| duration(Duration::from_nanos(value))), shown);
        let sizes = [0, 1023, 1024, 1_572_864, 1_048_575, u64::MAX];
        assert_eq!(sizes.map(bytes), ["0 B", "1023 B", "1 KiB", "1.5 MiB", "1 MiB", "16384 PiB"]);
        let counts = [0, 999, 1_000, 1_234_567, 100_000];
        assert_eq!(counts.map(count), ["0", "999", "1,000", "1,234,567", "100,000"]);
        assert_eq!([0, 1, 2].map(|number| several(number, "key", "keys")), ["0 keys", "1 key", "2 keys"]);
    }
}
