//! Rules, and the limits that apply to the labels of a request.
//!
//! | module | contents |
//! |---|---|
//! | `pattern` | a pattern for the value of one label |
//! | `condition` | pairs of label and pattern: `when` and `unless` |
//! | `rule` | a rule and its overrides, as written |
//! | `calendar_override` | overrides of calendar windows |
//! | `validate` | validation of rules |
//! | `costs` | the cost of a request in each unit |
//! | `lease` | how much of a limit processes may charge in advance |
//! | `index` | from labels to the few conditions that may match |
//! | `set` | a validated set of rules: from labels and costs to keys, limits and costs |
//! | `explain` | why a rule applies or does not |
//!
//! The rules are independent of file formats, stores and time.

#[cfg(feature = "calendar")]
mod calendar_override;
mod condition;
mod costs;
mod explain;
mod index;
mod lease;
mod pattern;
mod rule;
mod set;
mod validate;

#[cfg(test)]
mod reference_matcher;
#[cfg(test)]
mod tests;

#[cfg(feature = "calendar")]
pub use calendar_override::{CalendarOverride, CalendarOverrideError};
pub use condition::{Condition, ConditionError, MAX_PAIRS};
pub use costs::{Costs, CostsError, DEFAULT_UNIT, MAX_UNIT_NAME, MAX_UNITS, Unit, UnitError};
pub use explain::{Explained, NotApplicable};
#[cfg(feature = "toml")]
pub(crate) use lease::lease_size_forms;
pub use lease::{LeaseSize, LeaseSizeError};
pub use pattern::{Alternatives, MAX_ALTERNATIVES, Network, Pattern, PatternError};
pub use rule::{Absent, OnStoreFailure, Override, Rule};
pub use set::{Applied, DenialReason, Effect, MatchError, RuleSet, staggered_phase};
pub use validate::{
    LabelListError, MAX_OVERRIDES, MAX_PER, MAX_RULE_NAME, MAX_RULES, OverrideError, RuleError, RulesError,
};
