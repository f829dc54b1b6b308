//! The outcome of a check whose tiers are on several slots, combined from their answers.

use sluicegate_core::{Answer, HoldOutcome, Operation, Timestamp, step::granted};

use super::split::{Done, Kind, Part, Reserved};
use crate::{
    check::Check,
    store::{CheckAnswer, StoreError},
};

/// The progress of a check.
pub(super) struct Progress {
    /// The outcome, once known.
    pub(super) outcome: Option<Result<CheckAnswer, StoreError>>,
    /// The answers of each part to the peek before reservations; empty without a peek.
    pub(super) peeked: Vec<Vec<Answer>>,
    /// The reservation of each part, if there was one.
    pub(super) reserved: Vec<Option<Reserved>>,
    /// Number of requests that pass all parts so far.
    pub(super) granted: u32,
    pub(super) error: Option<StoreError>,
}

/// Returns whether requests must be reserved on one slot after the other.
pub(super) fn reserves(check: &Check, parts: &[Part]) -> bool {
    check.operation() == Operation::Check && parts.len() > 1
}

impl Progress {
    pub(super) fn new(check: &Check, parts: &[Part]) -> Self {
        Self {
            outcome: None,
            peeked: Vec::new(),
            reserved: vec![None; parts.len()],
            granted: check.count(),
            error: None,
        }
    }

    /// Records the answers to the peek. If one part denies, that is the outcome. If one part failed, nothing is reserved.
    pub(super) fn record_peeks(
        &mut self,
        check: &Check,
        parts: &[Part],
        peeked: Vec<Result<CheckAnswer, StoreError>>,
    ) {
        let mut at = Timestamp::default();
        let mut failed = None;
        for (part, peeked) in parts.iter().zip(peeked) {
            match peeked {
                Ok(answered) => {
                    at = at.max(answered.at);
                    let terms = part.tiers.iter().map(|place| &check.tiers()[*place].terms);
                    let passes = terms.zip(&answered.answers).map(|(terms, answer)| (terms, answer.passes));
                    self.granted = granted(self.granted, passes);
                    self.peeked.push(answered.answers);
                }
                Err(error) => {
                    self.peeked.push(part.unknown(check, at));
                    failed = Some(error);
                }
            }
        }
        self.outcome = match failed {
            _ if self.granted == 0 => {
                Some(Ok(CheckAnswer { at, answers: in_order(check, parts, self.peeked.clone()) }))
            }
            // a peek changes nothing, even if its reply was lost
            Some(StoreError::Ambiguous(reason)) => Some(Err(StoreError::NotRun(reason))),
            Some(error) => Some(Err(error)),
            None => None,
        };
    }

    /// Records the failure of a part. An ambiguous failure takes precedence.
    pub(super) fn fail(&mut self, error: StoreError) {
        if !matches!(self.error, Some(StoreError::Ambiguous(_))) {
            self.error = Some(error);
        }
    }

    /// Returns the outcome of a check. After a lost refund, the reserved units count until their window ends: less is admitted, never
    /// more.
    pub(super) fn outcome(
        self,
        check: &Check,
        parts: &[Part],
        done: &[Vec<Done>],
    ) -> Result<CheckAnswer, StoreError> {
        if let Some(outcome) = self.outcome {
            return outcome;
        }
        let is_check = check.operation() == Operation::Check;
        if let Some(error) = self.error {
            let others_ran = self
                .reserved
                .iter()
                .flatten()
                .any(|part| !is_check || part.answers.iter().any(|answer| answer.charged > 0));
            // what an earlier attempt made stays
            let mut answers = self.reserved.iter().flatten().flat_map(|part| &part.answers);
            let has_earlier = answers.any(|answer| answer.hold.outcome == HoldOutcome::Repeated);
            let all_refunded = !has_earlier && done.iter().flatten().all(|done| done.answers.is_some());
            return Err(match error {
                StoreError::Ambiguous(_) => error,
                error if !others_ran || check.operation() == Operation::Peek => error,
                error if is_check && all_refunded => error,
                error => StoreError::Ambiguous(format!("only some tiers were charged: {error}")),
            });
        }
        let at = self.reserved.iter().flatten().map(|reserved| reserved.at).max().unwrap_or_default();
        let answers = parts.iter().enumerate().map(|(place, part)| match &self.reserved[place] {
            Some(reserved) if !reserves(check, parts) => reserved.answers.clone(),
            reserved => {
                let peeked = || match self.peeked.get(place) {
                    Some(peeked) => peeked.clone(),
                    None => late_peek(&done[place]).unwrap_or_else(|| part.unknown(check, at)),
                };
                part.settled(check, peeked, reserved.as_ref(), self.granted, &done[place])
            }
        });
        Ok(CheckAnswer { at, answers: in_order(check, parts, answers.collect()) })
    }
}

/// Returns the answers of a part that was peeked at after another one had denied.
fn late_peek(done: &[Done]) -> Option<Vec<Answer>> {
    done.iter().find(|done| done.follow_up.kind == Kind::LatePeek)?.answers.clone()
}

/// Returns the answers of the tiers in the order of the check.
fn in_order(check: &Check, parts: &[Part], answers: Vec<Vec<Answer>>) -> Vec<Answer> {
    let mut places: Vec<(usize, Answer)> = Vec::with_capacity(check.tiers().len());
    for (part, answers) in parts.iter().zip(answers) {
        places.extend(part.tiers.iter().copied().zip(answers));
    }
    places.sort_by_key(|(place, _)| *place);
    places.into_iter().map(|(_, answer)| answer).collect()
}
