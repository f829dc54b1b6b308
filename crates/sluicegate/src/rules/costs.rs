//! The cost of one request in each unit.

use std::{fmt, ops::Deref, sync::Arc};

use sluicegate_core::Cost;

/// The default unit of rules and costs.
pub const DEFAULT_UNIT: &str = "requests";
/// The largest number of units of one request.
pub const MAX_UNITS: usize = 16;
/// The longest name of a unit, in bytes.
pub const MAX_UNIT_NAME: usize = 64;

/// The name of a counted unit.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Unit(
    /// Absent for [`DEFAULT_UNIT`], whose reference count would be shared by all threads.
    Option<Arc<str>>,
);

impl From<&str> for Unit {
    fn from(name: &str) -> Self {
        Self((name != DEFAULT_UNIT).then(|| name.into()))
    }
}

impl Deref for Unit {
    type Target = str;

    fn deref(&self) -> &str {
        self.0.as_deref().unwrap_or(DEFAULT_UNIT)
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// The cost of a request in each unit that it names, and zero in others.
///
/// ```
/// use sluicegate::{Cost, Costs};
///
/// let costs = Costs::new([("requests", Cost::ONE), ("tokens", Cost::new(850)?)])?;
/// assert_eq!(costs.of("tokens").units(), 850);
/// assert_eq!(costs.of("bytes"), Cost::ZERO);
/// let requests: Costs = Cost::ONE.into(); // a single cost is in requests
/// assert_eq!(requests.of("requests"), Cost::ONE);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Costs(CostKind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum CostKind {
    Requests(Cost),
    Several(Box<[(Box<str>, Cost)]>),
}

/// Why costs are invalid. Each message names the fix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CostsError {
    /// There are too many units.
    #[error("the cost names more than {MAX_UNITS} units: name at most {MAX_UNITS}")]
    TooMany,
    /// A unit occurs twice.
    #[error("unit {0:?} is named more than once: give each unit one cost")]
    Repeated(String),
    /// The name of a unit is invalid.
    #[error(transparent)]
    Unit(#[from] UnitError),
}

/// An invalid unit name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unit {0:?} is invalid: use 1 to {MAX_UNIT_NAME} letters, digits, '-', '_' or '.'")]
pub struct UnitError(pub String);

impl Costs {
    /// Creates a cost in several units.
    ///
    /// # Errors
    /// If there are too many units, or one is repeated or has an invalid name.
    pub fn new<N: AsRef<str>>(costs: impl IntoIterator<Item = (N, Cost)>) -> Result<Self, CostsError> {
        let mut several: Vec<(Box<str>, Cost)> = Vec::new();
        for (unit, cost) in costs {
            let unit = unit.as_ref();
            if several.len() == MAX_UNITS {
                return Err(CostsError::TooMany);
            }
            check_unit(unit)?;
            if several.iter().any(|(name, _)| **name == *unit) {
                return Err(CostsError::Repeated(unit.to_owned()));
            }
            several.push((unit.into(), cost));
        }
        Ok(match &*several {
            [(unit, cost)] if **unit == *DEFAULT_UNIT => Self::from(*cost),
            _ => Self(CostKind::Several(several.into())),
        })
    }

    /// Returns the cost in this unit.
    pub fn of(&self, unit: &str) -> Cost {
        self.iter().find(|(name, _)| *name == unit).map_or(Cost::ZERO, |(_, cost)| cost)
    }

    /// Returns each named unit with its cost.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Cost)> {
        let (one, several) = match &self.0 {
            CostKind::Requests(cost) => (Some((DEFAULT_UNIT, *cost)), &[][..]),
            CostKind::Several(several) => (None, &**several),
        };
        one.into_iter().chain(several.iter().map(|(unit, cost)| (&**unit, *cost)))
    }
}

impl From<u32> for Costs {
    fn from(requests: u32) -> Self {
        Cost::from(requests).into()
    }
}

impl From<Cost> for Costs {
    /// A cost in `requests`.
    fn from(cost: Cost) -> Self {
        Self(CostKind::Requests(cost))
    }
}

/// Validates the name of a unit. The Redis protocol writes `requests=1,tokens=850`.
pub(super) fn check_unit(unit: &str) -> Result<(), UnitError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if unit.is_empty() || unit.len() > MAX_UNIT_NAME || !unit.bytes().all(fits) {
        let shown = unit.chars().take(MAX_UNIT_NAME).collect();
        return Err(UnitError(shown));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_cost_is_in_requests_and_other_units_cost_nothing() {
        let costs = Costs::from(Cost::from(3));
        assert_eq!((costs.of("requests"), costs.of("tokens")), (Cost::from(3), Cost::ZERO));
        assert_eq!(costs, Costs::new([("requests", Cost::from(3))]).unwrap());
    }

    #[test]
    fn several_units_each_have_their_cost_and_others_none() {
        let costs = Costs::new([("tokens", Cost::from(850)), ("images", Cost::ONE)]).unwrap();
        assert_eq!(costs.of("tokens"), Cost::from(850));
        assert_eq!(costs.of("requests"), Cost::ZERO);
        assert_eq!(costs.iter().collect::<Vec<_>>(), [("tokens", Cost::from(850)), ("images", Cost::ONE)]);
    }

    #[test]
    fn repeated_invalid_and_too_many_units_are_rejected() {
        let twice = Costs::new([("a", Cost::ONE), ("a", Cost::ONE)]);
        assert_eq!(twice, Err(CostsError::Repeated("a".into())));
        for unit in ["", "a b", "a=b", "a,b", "é", &"u".repeat(MAX_UNIT_NAME + 1)] {
            assert!(matches!(Costs::new([(unit, Cost::ONE)]), Err(CostsError::Unit(_))), "{unit}");
        }
        let many = |count: usize| Costs::new((0..count).map(|n| (format!("u{n}"), Cost::ONE)));
        assert!(many(MAX_UNITS).is_ok());
        assert_eq!(many(MAX_UNITS + 1), Err(CostsError::TooMany));
    }
}
