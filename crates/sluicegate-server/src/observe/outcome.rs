//! The `outcome` label of metrics, for a request and for each rule.

use sluicegate::{Decision, Error, Source, TierDecision, decision::Mode};

use super::ObservedDecision;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestOutcome {
    /// Allowed, or completed.
    Allowed,
    /// Denied.
    Denied,
    /// Allowed because no rule matched.
    Unmatched,
    /// The request was invalid.
    Invalid,
    /// The caller was not authorized.
    Unauthorized,
    /// The store failed, or a counter has too many holds.
    Failed,
}

impl RequestOutcome {
    pub(super) const ALL: [Self; 6] =
        [Self::Allowed, Self::Denied, Self::Unmatched, Self::Invalid, Self::Unauthorized, Self::Failed];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Unmatched => "unmatched",
            Self::Invalid => "invalid",
            Self::Unauthorized => "unauthorized",
            Self::Failed => "failed",
        }
    }
}

/// The outcome of a check for one rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleOutcome {
    /// The rule allowed the request, which was charged.
    Allowed,
    /// The rule denied.
    Denied,
    /// The rule would have allowed, but another rule denied: nothing was charged.
    Overruled,
    /// The shadow rule would have denied.
    ShadowDenied,
    /// The store did not answer, and this process's share of the limit allowed.
    FallbackAllowed,
    /// The store did not answer, and this process's share of the limit was exhausted.
    FallbackDenied,
    /// The store did not answer: allowed without counting.
    FailedOpen,
    /// The store did not answer: denied.
    FailedClosed,
}

impl RuleOutcome {
    pub(super) const ALL: [Self; 8] = [
        Self::Allowed,
        Self::Denied,
        Self::Overruled,
        Self::ShadowDenied,
        Self::FallbackAllowed,
        Self::FallbackDenied,
        Self::FailedOpen,
        Self::FailedClosed,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Overruled => "overruled",
            Self::ShadowDenied => "shadow_denied",
            Self::FallbackAllowed => "fallback_allowed",
            Self::FallbackDenied => "fallback_denied",
            Self::FailedOpen => "failed_open",
            Self::FailedClosed => "failed_closed",
        }
    }
}

pub(super) fn of_request(decision: &Decision) -> RequestOutcome {
    match decision.is_allowed() {
        true if decision.tiers.is_empty() && !decision.is_degraded() => RequestOutcome::Unmatched,
        true => RequestOutcome::Allowed,
        false => RequestOutcome::Denied,
    }
}

pub(super) fn of_error(error: &Error) -> RequestOutcome {
    match error {
        Error::Store(_) | Error::PartialReset { .. } | Error::TooManyHolds { .. } => RequestOutcome::Failed,
        _ => RequestOutcome::Invalid,
    }
}

pub(super) fn of_tier(observed: ObservedDecision<'_>, tier: &TierDecision) -> RuleOutcome {
    let source = observed.decision.source;
    if tier.outcome.is_allowed() {
        match source {
            _ if !observed.is_allowed => RuleOutcome::Overruled,
            Source::Fallback => RuleOutcome::FallbackAllowed,
            _ => RuleOutcome::Allowed,
        }
    } else {
        match source {
            _ if tier.mode == Mode::Shadow => RuleOutcome::ShadowDenied,
            Source::Fallback => RuleOutcome::FallbackDenied,
            Source::Closed => RuleOutcome::FailedClosed,
            _ => RuleOutcome::Denied,
        }
    }
}
