//! Checks of one pipeline that a remote store decides: they share its calls.
//!
//! Checks of one key must be decided in the order in which the client sent them. Therefore checks of the same key or labels are in one
//! batch only if they are equal: equal checks are interchangeable, and their decisions are assigned in the order in which the store
//! made them. Every other command waits until the batch is answered. On the memory store every check is decided when it starts, and the
//! batch stays empty.

use std::mem;

use sluicegate::{Decision, Error, limiter::Progress};

use super::{error, request::CommandRequest, response::Replies};

/// The maximum number of checks of one connection that are decided concurrently.
pub const MAX_BATCH: usize = 64;

/// Checks that are started and not answered.
#[derive(Debug, Default)]
pub(super) struct Batch {
    checks: Vec<(CommandRequest<'static>, Result<Progress, Error>)>,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.checks.is_empty()
    }

    /// Whether a check can join.
    pub(super) fn accepts(&self, check: &CommandRequest<'_>) -> bool {
        let conflicts = |other: &CommandRequest<'_>| other.has_same_subject(check) && !other.is_equal(check);
        self.checks.len() < MAX_BATCH && !self.checks.iter().any(|(other, _)| conflicts(other))
    }

    /// Adds a check that the batch accepts.
    pub(super) fn push(&mut self, check: CommandRequest<'static>, progress: Result<Progress, Error>) {
        self.checks.push((check, progress));
    }

    /// Waits for all decisions and writes the replies in order.
    pub(super) async fn flush(&mut self, replies: &mut Replies) {
        if self.checks.is_empty() {
            return;
        }
        // the buffer is moved out, so that idle connections do not keep it
        let (checks, started): (Vec<_>, Vec<_>) = mem::take(&mut self.checks).into_iter().unzip();
        let mut decisions = Progress::all(started).await;
        order_equal(&checks, &mut decisions);
        for (check, decision) in checks.iter().zip(decisions) {
            match decision {
                Ok(decision) => check.reply(&decision, replies),
                Err(error) => replies.error(error::Error::from(error)),
            }
        }
    }
}

/// Assigns the decisions of equal checks in the order in which the store made them.
fn order_equal<E>(checks: &[CommandRequest<'_>], decisions: &mut [Result<Decision, E>]) {
    let order = |decision: &Result<Decision, E>| {
        let decision = decision.as_ref().ok()?;
        Some((decision.at?, !decision.is_allowed()))
    };
    for later in 1..decisions.len() {
        // an insertion sort among equal checks, which mostly are in order already
        let mut at = later;
        let equal = |&earlier: &usize| checks[earlier].is_equal(&checks[later]);
        for earlier in (0..later).rev().filter(equal) {
            match (order(&decisions[earlier]), order(&decisions[at])) {
                (Some(before), Some(after)) if before > after => decisions.swap(earlier, at),
                _ => break,
            }
            at = earlier;
        }
    }
}
