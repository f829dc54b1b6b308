//! clap value parsers for numbers, with error messages that state the accepted range.

use std::ops::RangeInclusive;

/// Returns a parser of whole numbers within `bounds`; error messages quote `example`.
pub(crate) fn whole_number<T>(
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
            (0, &u64::MAX) => format!("use a whole number, for example {example}"),
            (from, &u64::MAX) => format!("use a whole number of at least {from}, for example {example}"),
            (from, to) => format!("use a whole number from {from} to {to}, for example {example}"),
        })
    }
}

/// Parses a finite number of at least 0.
pub(crate) fn non_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "use a number of at least 0, for example 1.0".to_owned())
}

/// Parses a share from 0 to 1.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "use a number from 0 to 1, for example 0.1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers_are_accepted_within_their_bounds() {
        let (few, any, some) = (
            whole_number::<u16>(1..=500, 16),
            whole_number::<u64>(0..=u64::MAX, 7),
            whole_number::<u64>(1..=u64::MAX, 9),
        );
        assert_eq!((few("1"), few("500"), any("0"), some("1")), (Ok(1), Ok(500), Ok(0), Ok(1)));
        for wrong in ["", "0", "501", "-1", "1.5", "1e3", "many", "1_000", "99999999999999999999"] {
            assert_eq!(
                few(wrong),
                Err("use a whole number from 1 to 500, for example 16".to_owned()),
                "{wrong}"
            );
        }
        assert_eq!(any("-1"), Err("use a whole number, for example 7".to_owned()));
        assert_eq!(some("0"), Err("use a whole number of at least 1, for example 9".to_owned()));
        assert!(
            whole_number::<u8>(0..=1_000, 1)("256").is_err(),
            "a number that does not fit the type is rejected"
        );
    }

    #[test]
    fn shares_are_between_zero_and_one_and_other_numbers_not_negative() {
        assert_eq!((non_negative("0"), non_negative("1.1")), (Ok(0.0), Ok(1.1)));
        for wrong in ["", "-0.1", "NaN", "inf", "steep"] {
            assert!(non_negative(wrong).is_err(), "{wrong}");
        }
        assert_eq!((share("0"), share("0.25"), share("1")), (Ok(0.0), Ok(0.25), Ok(1.0)));
        for wrong in ["", "-0.1", "1.1", "NaN", "inf", "10 %"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }
}
