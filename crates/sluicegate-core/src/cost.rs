//! The cost of one request.

use crate::time::MAX_EXACT;

/// A whole number of units, from 0 (a read) to 2^53 - 1.
///
/// ```
/// use sluicegate_core::Cost;
///
/// assert_eq!(Cost::new(850)?.units(), 850);
/// assert_eq!(Cost::from(2_u32), Cost::new(2)?);
/// assert!(Cost::new(u64::MAX).is_err());
/// # Ok::<(), sluicegate_core::CostError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(u64);

/// A cost that no store can represent exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cost {0} is too large: use a whole number from 0 to {MAX_EXACT}")]
pub struct CostError(pub u64);

impl Cost {
    /// No units: a read, which is denied only by a counter in debt.
    pub const ZERO: Self = Self(0);
    /// One unit.
    pub const ONE: Self = Self(1);
    /// The largest cost.
    pub const MAX: Self = Self(MAX_EXACT);

    /// Creates a cost of `units`.
    ///
    /// # Errors
    /// If `units` is above 2^53 - 1.
    pub const fn new(units: u64) -> Result<Self, CostError> {
        if units > MAX_EXACT { Err(CostError(units)) } else { Ok(Self(units)) }
    }

    /// Returns the number of units.
    pub const fn units(self) -> u64 {
        self.0
    }
}

impl From<u32> for Cost {
    fn from(units: u32) -> Self {
        Self(units.into())
    }
}
