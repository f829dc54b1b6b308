//! How much of a rule's limit processes may charge in advance.

use std::{fmt, str::FromStr};

use sluicegate_core::limit::MAX_AMOUNT;

/// The denominator of a fraction.
const MILLIONTHS: u64 = 1_000_000;
/// The most decimal places of a fraction; a percentage has two fewer.
const FRACTION_PLACES: usize = 6;

/// How much of a rule's limit processes may charge in advance, over all processes: a part of the amount, or units.
///
/// ```
/// use sluicegate::rules::LeaseSize;
///
/// let lease: LeaseSize = "1%".parse()?;
/// assert_eq!(lease, LeaseSize::percent(1));
/// assert_eq!(lease.units_of(1_000), 10);
/// assert_eq!(LeaseSize::units(25).units_of(1_000), 25);
/// # Ok::<(), sluicegate::rules::LeaseSizeError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LeaseSize(Size);

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Size {
    Units(u64),
    Millionths(u32),
}

/// Why a text is not a [`LeaseSize`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not {EXPECTED}")]
pub struct LeaseSizeError(String);

/// The accepted forms; completes the message "… is not …".
const EXPECTED: &str =
    "a lease: use a percentage from 0% to 100%, for example \"1%\", a fraction such as 0.01, or whole units";

/// Returns the accepted forms, for messages.
#[cfg(feature = "toml")]
pub(crate) const fn lease_size_forms() -> &'static str {
    EXPECTED
}

impl LeaseSize {
    /// No lease: the store decides every request.
    pub const NONE: Self = Self(Size::Units(0));

    /// A percentage of the amount. More than 100 counts as 100.
    pub const fn percent(percent: u32) -> Self {
        Self(Size::Millionths(if percent > 100 { 1_000_000 } else { percent * 10_000 }))
    }

    /// This many units, whatever the amount.
    pub const fn units(units: u64) -> Self {
        Self(Size::Units(units))
    }

    /// Returns the units of a limit with this amount, rounded down.
    pub fn units_of(self, amount: u64) -> u64 {
        match self.0 {
            Size::Units(units) => units,
            Size::Millionths(part) => {
                let units = u128::from(amount) * u128::from(part) / u128::from(MILLIONTHS);
                u64::try_from(units).expect("at most the amount")
            }
        }
    }

    /// Whether there is no lease.
    pub fn is_none(self) -> bool {
        matches!(self.0, Size::Units(0) | Size::Millionths(0))
    }

    /// Parses a fraction of one, such as `0.01`.
    fn from_fraction(text: &str, places: usize) -> Option<Self> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
        let is_number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !is_number(whole) || !is_number(decimals) || decimals.len() > places {
            return None;
        }
        let digits = format!("{whole}{decimals:0<places$}");
        let millionths = digits.parse().ok().filter(|millionths| u64::from(*millionths) <= MILLIONTHS)?;
        Some(Self(Size::Millionths(millionths)))
    }
}

impl FromStr for LeaseSize {
    type Err = LeaseSizeError;

    fn from_str(text: &str) -> Result<Self, LeaseSizeError> {
        let size = match text.strip_suffix('%') {
            Some(percent) => Self::from_fraction(percent, FRACTION_PLACES - 2),
            None if text.contains('.') => Self::from_fraction(text, FRACTION_PLACES),
            None => text.parse().ok().filter(|units| *units <= MAX_AMOUNT).map(Self::units),
        };
        size.ok_or_else(|| LeaseSizeError(text.to_owned()))
    }
}

impl fmt::Display for LeaseSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Size::Units(units) => units.fmt(f),
            Size::Millionths(part) => {
                let decimals = format!("{:04}", part % 10_000);
                let decimals = decimals.trim_end_matches('0');
                let point = if decimals.is_empty() { "" } else { "." };
                write!(f, "{}{point}{decimals}%", part / 10_000)
            }
        }
    }
}

impl fmt::Debug for LeaseSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_fractions_and_units_are_parsed_and_shown() {
        for (text, shown, of_10_000) in [
            ("1%", "1%", 100),
            ("0.5%", "0.5%", 50),
            ("0.0001%", "0.0001%", 0),
            ("100%", "100%", 10_000),
            ("0.01", "1%", 100),
            ("1.0", "100%", 10_000),
            ("0.000001", "0.0001%", 0),
            ("250", "250", 250),
            ("0", "0", 0),
            ("0%", "0%", 0),
        ] {
            let size: LeaseSize = text.parse().unwrap();
            assert_eq!((size.to_string().as_str(), size.units_of(10_000)), (shown, of_10_000), "{text}");
        }
        for text in [
            "",
            "%",
            "1 %",
            "-1%",
            "101%",
            "1.1",
            "0.0000001",
            "0.00001%",
            ".5",
            "1e-2",
            "2000000000",
            "many",
        ] {
            assert!(text.parse::<LeaseSize>().is_err(), "{text}");
        }
        assert_eq!(LeaseSize::percent(3), "3%".parse().unwrap());
        assert!(
            LeaseSize::NONE.is_none() && LeaseSize::percent(0).is_none() && !LeaseSize::percent(1).is_none()
        );
    }
}
