//! Questions of one pipeline that are asked at the same time, where a store is far away: they share its round trips.
//!
//! Only checks are, and of those about the same key or labels only equal ones; whatever else comes waits until they are
//! answered. Equal checks are interchangeable, so that who asked first gets what the store decided first: a client sees
//! its checks of one key decided in order.

use futures_util::future::join_all;
use tollgate::{Decision, Operation, Store};

use super::{CALLER, error::Error, question::Question, reply::Replies};
use crate::desk::Desk;

/// How many questions of one client are asked at the same time.
pub const MAX_TOGETHER: usize = 64;

/// Checks that are to be asked at the same time.
#[derive(Debug, Default)]
pub(super) struct Together {
    questions: Vec<Question>,
}

impl Together {
    /// Whether a check can be asked before those that wait are answered.
    pub(super) fn has_room_for(&self, check: &Question) -> bool {
        let interferes = |other: &Question| other.is_about_the_same(check) && !other.is_equal(check);
        self.questions.len() < MAX_TOGETHER && !self.questions.iter().any(interferes)
    }

    /// Adds a check for which there is room.
    pub(super) fn add(&mut self, question: Question) {
        self.questions.push(question);
    }

    /// Asks them all, and writes the answers in their order.
    pub(super) async fn answer<S: Store>(&mut self, desk: &Desk<S>, replies: &mut Replies) {
        if self.questions.is_empty() {
            return;
        }
        let asked = self.questions.iter();
        let asked = asked.map(|question| desk.decide(CALLER, Operation::Check, &question.subject));
        let mut decisions = join_all(asked).await;
        self.first_come_first_served(&mut decisions);
        for (question, decision) in self.questions.drain(..).zip(decisions) {
            match decision {
                Ok(decision) => question.answer(&decision, replies),
                Err(error) => replies.error(Error::from(error)),
            }
        }
    }

    /// Hands the decisions over equal questions out in the order in which the store made them.
    fn first_come_first_served<E>(&self, decisions: &mut [Result<Decision, E>]) {
        let order = |decision: &Result<Decision, E>| {
            let decision = decision.as_ref().ok()?;
            Some((decision.at?, !decision.is_allowed()))
        };
        for later in 1..decisions.len() {
            // an insertion sort among equal questions, which mostly are in order already
            let mut at = later;
            let equal = |&earlier: &usize| self.questions[earlier].is_equal(&self.questions[later]);
            for earlier in (0..later).rev().filter(equal) {
                match (order(&decisions[earlier]), order(&decisions[at])) {
                    (Some(before), Some(after)) if before > after => decisions.swap(earlier, at),
                    _ => break,
                }
                at = earlier;
            }
        }
    }
}
