//! The decision of one request: allowed or denied, the deciding rule, and the source.

use std::{sync::Arc, time::Duration};

use sluicegate_core::{Limit, Outcome, Retry, Timestamp};

pub use sluicegate_core::step::Mode;

use crate::{rules::Unit, store::StoreError};

/// The decision of one request.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// use std::time::Duration;
/// use sluicegate::{Cost, Limit, Limiter, MemoryStore, Outcome, Retry, Source};
///
/// let limiter = Limiter::new(MemoryStore::new(), [])?;
/// let limit = Limit::sliding_log(1, Duration::from_secs(60))?;
/// limiter.check_key("user:42", &limit, Cost::ONE).await?;
/// let decision = limiter.check_key("user:42", &limit, Cost::ONE).await?;
/// match decision.outcome {
///     Outcome::Allowed => unreachable!("the limit is one per minute, and this is the second"),
///     Outcome::Denied { retry: Retry::After(wait) } => assert!(wait <= Duration::from_secs(60)),
///     Outcome::Denied { retry: Retry::Never } => unreachable!("the cost is within the limit"),
/// }
/// assert_eq!((decision.limit(), decision.remaining()), (Some(1), Some(0)));
/// assert_eq!(decision.source, Source::Memory); // the memory store decided, not a failure policy
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whether the request is allowed.
    pub outcome: Outcome,
    /// The decision of each tier: those with a counter in the order of their rules, then rules that deny without counting.
    pub tiers: Vec<TierDecision>,
    /// The store's time of the decision, with which a refund reverts exactly this charge. `None` if no store decided.
    pub at: Option<Timestamp>,
    /// Where the decision was made.
    pub source: Source,
    /// The error of the store, if a failure policy decided.
    pub failure: Option<StoreError>,
    deciding: Option<usize>,
}

/// The decision of one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TierDecision {
    /// The rule; `None` in a check without rules.
    pub rule: Option<Arc<str>>,
    /// The unit that is counted.
    pub unit: Unit,
    /// Whether the rule is enforced or only observed.
    pub mode: Mode,
    /// Whether this tier alone would allow the request.
    pub outcome: Outcome,
    /// The limit that was applied; in a fallback this process's share of it. `None` if the rule denies without counting.
    pub policy: Option<Limit>,
    /// The maximum number of units admitted at one time.
    pub limit: u64,
    /// Whole units available now.
    pub remaining: u64,
    /// Units charged beyond the limit; 0 unless the counter is in debt.
    pub debt: u64,
    /// The time until the counter is empty.
    pub reset_after: Duration,
}

/// Where a decision came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The remote store.
    Store,
    /// The memory store of this process.
    Memory,
    /// The denial cache of this process: the store is certain to deny the request.
    Cache,
    /// Units that this process had charged in advance: see [`Limit::with_lease`].
    Lease,
    /// A rule that denies without counting: an override blocks the request, or a label is absent.
    Rule,
    /// No rule counts the request.
    Unmatched,
    /// The store did not answer, and this process decided by its share of the limits whose failure policy is `local`.
    Fallback,
    /// The store did not answer, and the failure policy `open` allowed the request.
    Open,
    /// The store did not answer, and the failure policy `closed` denied the request.
    Closed,
}

impl Source {
    /// All sources.
    pub const ALL: [Self; 9] = [
        Self::Store,
        Self::Memory,
        Self::Cache,
        Self::Lease,
        Self::Rule,
        Self::Unmatched,
        Self::Fallback,
        Self::Open,
        Self::Closed,
    ];

    /// The name in responses, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Memory => "memory",
            Self::Cache => "cache",
            Self::Lease => "lease",
            Self::Rule => "rule",
            Self::Unmatched => "unmatched",
            Self::Fallback => "fallback",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

impl Decision {
    /// Combines the decisions of tiers: denied if an enforced tier denies.
    pub(crate) fn from_tiers(tiers: Vec<TierDecision>, at: Option<Timestamp>, source: Source) -> Self {
        let enforced = || tiers.iter().enumerate().filter(|(_, tier)| tier.mode == Mode::Enforced);
        let denying = enforced().filter_map(|(index, tier)| match tier.outcome {
            Outcome::Denied { retry } => Some((retry, index)),
            Outcome::Allowed => None,
        });
        // if waits are equal, the first rule decides
        let longest = denying.min_by_key(|(retry, index)| (std::cmp::Reverse(*retry), *index));
        let (outcome, deciding) = match longest {
            Some((retry, index)) => (Outcome::Denied { retry }, Some(index)),
            None => {
                (Outcome::Allowed, enforced().min_by_key(|(_, tier)| tier.remaining).map(|(index, _)| index))
            }
        };
        Self { outcome, tiers, at, source, failure: None, deciding }
    }

    /// Whether the request is allowed.
    pub fn is_allowed(&self) -> bool {
        self.outcome.is_allowed()
    }

    /// The deciding tier: if the request is denied, the denying tier with the longest wait, otherwise the tier with the least
    /// remaining. `None` if no enforced rule matched, or if the store did not answer.
    pub fn deciding(&self) -> Option<&TierDecision> {
        self.tiers.get(self.deciding?)
    }

    /// The deciding rule.
    pub fn rule(&self) -> Option<&str> {
        self.deciding().and_then(|tier| tier.rule.as_deref())
    }

    /// The capacity of the deciding limit.
    pub fn limit(&self) -> Option<u64> {
        self.deciding().map(|tier| tier.limit)
    }

    /// Whole units that the deciding limit has available now.
    pub fn remaining(&self) -> Option<u64> {
        self.deciding().map(|tier| tier.remaining)
    }

    /// The time after which the same request would be allowed. `None` if it is allowed, or if waiting does not help:
    /// see [`Self::is_allowed`].
    pub fn retry_after(&self) -> Option<Duration> {
        match self.outcome {
            Outcome::Denied { retry: Retry::After(wait) } => Some(wait),
            Outcome::Denied { retry: Retry::Never } | Outcome::Allowed => None,
        }
    }

    /// The time until the deciding limit's counter is empty.
    pub fn reset_after(&self) -> Option<Duration> {
        self.deciding().map(|tier| tier.reset_after)
    }

    /// Whether failure policies decided because the store did not answer.
    pub fn is_degraded(&self) -> bool {
        matches!(self.source, Source::Fallback | Source::Open | Source::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(rule: &str, mode: Mode, outcome: Outcome, remaining: u64) -> TierDecision {
        let (rule, unit) = (Some(Arc::from(rule)), Unit::default());
        let policy = Limit::sliding_log(10, Duration::from_secs(60)).ok();
        let (debt, reset_after) = (0, Duration::ZERO);
        TierDecision { rule, unit, mode, outcome, policy, limit: 10, remaining, debt, reset_after }
    }

    fn denied(seconds: u64) -> Outcome {
        Outcome::Denied { retry: Retry::After(Duration::from_secs(seconds)) }
    }

    fn decide(tiers: Vec<TierDecision>) -> Decision {
        Decision::from_tiers(tiers, None, Source::Store)
    }

    #[test]
    fn the_longest_denial_decides() {
        let decision = decide(vec![
            tier("short", Mode::Enforced, denied(1), 0),
            tier("long", Mode::Enforced, denied(5), 0),
            tier("equal", Mode::Enforced, denied(5), 0),
            tier("shadow", Mode::Shadow, denied(9), 0),
        ]);
        assert_eq!((decision.rule(), decision.retry_after()), (Some("long"), Some(Duration::from_secs(5))));
    }

    #[test]
    fn a_permanent_denial_is_the_longest() {
        let never = Outcome::Denied { retry: Retry::Never };
        let decision =
            decide(vec![tier("never", Mode::Enforced, never, 0), tier("long", Mode::Enforced, denied(5), 0)]);
        assert_eq!((decision.rule(), decision.retry_after()), (Some("never"), None));
    }

    #[test]
    fn when_all_tiers_allow_the_least_remaining_decides_and_a_shadow_rule_never_does() {
        let decision = decide(vec![
            tier("more", Mode::Enforced, Outcome::Allowed, 5),
            tier("less", Mode::Enforced, Outcome::Allowed, 3),
            tier("shadow", Mode::Shadow, denied(9), 0),
        ]);
        assert!(decision.is_allowed());
        assert_eq!((decision.rule(), decision.remaining()), (Some("less"), Some(3)));
        assert_eq!(decide(vec![tier("shadow", Mode::Shadow, denied(9), 0)]).rule(), None);
    }
}
