//! Which limits a request meets: rules, matched against its labels.
//!
//! | file | has |
//! |---|---|
//! | `pattern` | what one label's value must look like |
//! | `condition` | several such pairs: `when` and `unless` |
//! | `rule` | a rule and its overrides, as written |
//! | `check` | what makes rules impossible, and the sentence that says so |
//! | `costs` | what a request takes, in each unit |
//! | `index` | from labels to the few conditions that may match |
//! | `set` | the rules in force: from labels and costs to keys, limits and costs |
//! | `explain` | why a rule does or does not apply |
//!
//! Nothing here knows a file format, a store or the time.

mod condition;
mod costs;
mod explain;
mod index;
mod pattern;
mod rule;
mod set;
mod validate;

#[cfg(test)]
mod reference_matcher;
#[cfg(test)]
mod tests;

pub use condition::{Condition, ConditionError, MAX_PAIRS};
pub use costs::{Costs, CostsError, DEFAULT_UNIT, MAX_UNIT_NAME, MAX_UNITS, Unit, UnitError};
pub use explain::{Explained, NotApplicable};
pub use pattern::{Alternatives, MAX_ALTERNATIVES, Network, Pattern, PatternError};
pub use rule::{Absent, OnStoreFailure, Override, Rule};
pub use set::{Applied, DenialReason, Effect, MatchError, RuleSet, staggered_phase};
pub use validate::{
    LabelListError, MAX_OVERRIDES, MAX_PER, MAX_RULE_NAME, MAX_RULES, OverrideError, RuleError, RulesError,
};
