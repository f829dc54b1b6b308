//! What a decision means for the request, and for each rule, in one word: the `outcome` of the metrics.

use tollgate::{Decision, Error, Mode, Source, TierDecision};

use super::Verdict;

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestOutcome {
    /// It passed, or was done.
    Allowed,
    /// It was refused.
    Denied,
    /// No rule counted it: it passed.
    Unmatched,
    /// It could not be asked about.
    Invalid,
    /// Its caller may not ask.
    Unauthorized,
    /// The store did not do it.
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

/// What a check was for one rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleOutcome {
    /// It had room, and the request passed and was charged.
    Allowed,
    /// It refused.
    Denied,
    /// It had room, but another rule refused: nothing was charged.
    Overruled,
    /// It would have refused, but is a shadow.
    ShadowDenied,
    /// The store did not answer, and this process's share had room.
    FallbackAllowed,
    /// The store did not answer, and this process's share was used up.
    FallbackDenied,
    /// The store did not answer: let through uncounted.
    FailedOpen,
    /// The store did not answer: refused.
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
        Error::Store(_) => RequestOutcome::Failed,
        _ => RequestOutcome::Invalid,
    }
}

pub(super) fn of_tier(verdict: Verdict<'_>, tier: &TierDecision) -> RuleOutcome {
    let source = verdict.decision.source;
    if tier.outcome.is_allowed() {
        match source {
            _ if !verdict.passed => RuleOutcome::Overruled,
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
