//! How long to wait, as people say it: never less than it is.

/// The units, largest first, in milliseconds.
const UNITS: [(&str, &str, u64); 5] = [
    ("day", "d", 86_400_000),
    ("hour", "h", 3_600_000),
    ("minute", "m", 60_000),
    ("second", "s", 1_000),
    ("millisecond", "ms", 1),
];

/// In words: `54 seconds`, `5.4 seconds`, `1 minute 30 seconds`, `2 days 3 hours`.
pub(crate) fn in_words(millis: u64) -> String {
    let parts = parts(millis);
    let word = |(number, (name, _)): &(String, (&str, &str))| {
        let plural = if number == "1" { "" } else { "s" };
        format!("{number} {name}{plural}")
    };
    parts.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// In short: `54s`, `5.4s`, `1m30s`, `2d3h`.
pub(crate) fn in_short(millis: u64) -> String {
    parts(millis).iter().map(|(number, (_, letter))| format!("{number}{letter}")).collect()
}

/// Numbers and their units: two at most, since nobody waits for a day and 3 ms.
fn parts(millis: u64) -> Vec<(String, (&'static str, &'static str))> {
    let Some(at) = UNITS.iter().position(|(_, _, unit)| millis >= *unit) else {
        return vec![("0".to_owned(), (UNITS[3].0, UNITS[3].1))];
    };
    let (name, letter, unit) = UNITS[at];
    // seconds have tenths below ten of them
    if unit == 1_000 {
        let tenths = if millis < 10_000 { millis.div_ceil(100) } else { 10 * millis.div_ceil(1_000) };
        if tenths < 600 {
            let number = match tenths % 10 {
                0 => (tenths / 10).to_string(),
                tenth => format!("{}.{tenth}", tenths / 10),
            };
            return vec![(number, (name, letter))];
        }
        return parts(60_000);
    }
    let Some((next_name, next_letter, next)) = UNITS.get(at + 1).copied() else {
        return vec![(millis.to_string(), (name, letter))];
    };
    let up = millis.checked_next_multiple_of(next).unwrap_or(millis);
    if UNITS[..at].last().is_some_and(|(_, _, larger)| up >= *larger) {
        return parts(up);
    }
    let mut parts = vec![((up / unit).to_string(), (name, letter))];
    if up % unit > 0 {
        parts.push(((up % unit / next).to_string(), (next_name, next_letter)));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_rounded_up_to_what_people_say() {
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
            assert_eq!((&*in_words(millis), &*in_short(millis)), (words, short), "{millis}");
        }
    }
}
