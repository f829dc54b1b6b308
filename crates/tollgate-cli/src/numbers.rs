//! Numbers on the command line: what is none, or out of bounds, is told what would be right.

use std::ops::RangeInclusive;

/// Reads a whole number within these bounds; `example` is one.
pub(crate) fn whole<T>(
    bounds: RangeInclusive<u64>,
    example: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: TryFrom<u64> + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number| bounds.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| match (bounds.start(), bounds.end()) {
            (0, &u64::MAX) => format!("write a whole number, for example {example}"),
            (from, &u64::MAX) => format!("write a whole number from {from} on, for example {example}"),
            (from, to) => format!("write a whole number from {from} to {to}, for example {example}"),
        })
    }
}

/// Reads a number, whole or not, that is not below zero.
pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "write a number from 0 on, for example 1.0".to_owned())
}

/// Reads a part of all, from none (0) to all (1).
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a number from 0 to 1, for example 0.1 for a tenth".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_number_is_read_within_its_bounds() {
        let (few, any, some) =
            (whole::<u16>(1..=500, 16), whole::<u64>(0..=u64::MAX, 7), whole::<u64>(1..=u64::MAX, 9));
        assert_eq!((few("1"), few("500"), any("0"), some("1")), (Ok(1), Ok(500), Ok(0), Ok(1)));
        for wrong in ["", "0", "501", "-1", "1.5", "1e3", "many", "1_000", "99999999999999999999"] {
            assert_eq!(
                few(wrong),
                Err("write a whole number from 1 to 500, for example 16".to_owned()),
                "{wrong}"
            );
        }
        assert_eq!(any("-1"), Err("write a whole number, for example 7".to_owned()));
        assert_eq!(some("0"), Err("write a whole number from 1 on, for example 9".to_owned()));
        assert!(whole::<u8>(0..=1_000, 1)("256").is_err(), "what does not fit its type is refused, too");
    }

    #[test]
    fn a_share_is_from_none_to_all_and_other_numbers_from_none_on() {
        assert_eq!((not_negative("0"), not_negative("1.1")), (Ok(0.0), Ok(1.1)));
        for wrong in ["", "-0.1", "NaN", "inf", "steep"] {
            assert!(not_negative(wrong).is_err(), "{wrong}");
        }
        assert_eq!((share("0"), share("0.25"), share("1")), (Ok(0.0), Ok(0.25), Ok(1.0)));
        for wrong in ["", "-0.1", "1.1", "NaN", "inf", "10 %"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }
}
