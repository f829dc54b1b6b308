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

mod check;
mod condition;
mod costs;
mod explain;
mod index;
mod pattern;
mod rule;
mod set;

#[cfg(test)]
mod against_naive;
#[cfg(test)]
mod tests;

pub use check::{
    LabelListError, MAX_OVERRIDES, MAX_PER, MAX_RULE_NAME, MAX_RULES, OverrideError, RuleError, RulesError,
};
pub use condition::{Condition, ConditionError, MAX_PAIRS};
pub use costs::{Costs, CostsError, DEFAULT_UNIT, MAX_UNIT_NAME, MAX_UNITS, Unit, UnitError};
pub use explain::{Explained, Unmet};
pub use pattern::{Alternatives, MAX_ALTERNATIVES, Network, Pattern, PatternError};
pub use rule::{Absent, OnStoreFailure, Override, Rule};
pub use set::{Applied, Effect, MatchError, Refusal, RuleSet, staggered_phase};
