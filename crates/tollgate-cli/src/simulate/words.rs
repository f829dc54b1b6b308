//! Shares and times as people read them.

use std::fmt::Write;

use jiff::Timestamp;

/// `1.23 %`: three digits that say something, and never 0 % for something or 100 % for not all.
pub(super) fn percent(share: f64) -> String {
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

/// `2h 5m`: the two largest units.
pub(super) fn duration(seconds: f64) -> String {
    if seconds < 10.0 && seconds.fract() > 0.0 {
        return format!("{seconds:.1}s");
    }
    let mut rest = seconds.round() as u64;
    let mut text = String::new();
    let mut units = 0;
    for (unit, length) in [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)] {
        if (rest >= length || unit == "s" && text.is_empty()) && units < 2 {
            let space = if text.is_empty() { "" } else { " " };
            write!(text, "{space}{}{unit}", rest / length).expect("a string takes everything");
            units += 1;
        } else if units > 0 {
            units += 1;
        }
        rest %= length;
    }
    text
}

/// `2026-11-16 04:54:28`, in UTC.
pub(super) fn time(at: Timestamp) -> String {
    at.strftime("%Y-%m-%d %H:%M:%S").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_times_read_well() {
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
            assert_eq!(duration(seconds), text);
        }
        assert_eq!(time(Timestamp::from_second(1_794_804_868).unwrap()), "2026-11-16 04:54:28");
    }
}
