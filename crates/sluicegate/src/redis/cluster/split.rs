//! Splits a batch of checks by slot, and combines the answers.
//!
//! The tiers of a check that are on one slot are decided by one call, all or none. A check whose tiers are on several nodes is reserved
//! slot by slot, in ascending order. If a later slot admits fewer requests, the excess of the earlier ones is refunded exactly, by the
//! store time of the reservation. Unless all tiers had available units recently, they are peeked first, so that most denials write
//! nothing.

use std::{collections::HashMap, time::Duration};

use sluicegate_core::{Answer, HoldAnswer, HoldOutcome, Operation, State, Terms, Timestamp};

use super::slots::slot_of;
use crate::check::{Check, HoldCall, HoldOperation, Tier};

/// The tiers of one check that are on one slot.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) slot: u16,
    /// Their indexes in the check.
    pub(super) tiers: Vec<usize>,
    /// Parts of one level are sent together. A slot receives checks in order: a check's part is never on a lower level
    /// than that of an earlier check on the same slot.
    pub(super) level: usize,
}

/// The parts of each check, in the order in which they are reserved.
pub(super) fn split(checks: &[Check]) -> Vec<Vec<Part>> {
    let mut level_of_slot: HashMap<u16, usize> = HashMap::new();
    checks.iter().map(|check| parts(check, &mut level_of_slot)).collect()
}

fn parts(check: &Check, level_of_slot: &mut HashMap<u16, usize>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (place, tier) in check.tiers().iter().enumerate() {
        let slot = slot_of(&tier.key);
        match parts.iter_mut().find(|part| part.slot == slot) {
            Some(part) => part.tiers.push(place),
            None => parts.push(Part { slot, tiers: vec![place], level: 0 }),
        }
    }
    parts.sort_by_key(|part| part.slot);
    let mut next = 0;
    for part in &mut parts {
        let level = level_of_slot.entry(part.slot).or_default();
        *level = next.max(*level);
        part.level = *level;
        // only a reservation depends on the previous one
        next = if check.operation() == Operation::Check { *level + 1 } else { 0 };
    }
    parts
}

impl Part {
    /// Returns the check of this part for `count` of the requests.
    pub(super) fn to_check(&self, check: &Check, operation: Operation, count: u32) -> Check {
        part_of(check, operation, &self.tiers).times(count)
    }
}

/// An operation on some tiers of a check.
fn part_of(check: &Check, operation: Operation, places: &[usize]) -> Check {
    let tiers: Vec<Tier> = places.iter().map(|place| check.tiers()[*place].clone()).collect();
    let is_whole = tiers.len() == check.tiers().len() && operation == check.operation();
    let part = Check::new(operation, tiers).expect("some tiers of a check are a check");
    let hold = check.hold().filter(|_| operation == check.operation());
    if let Some(HoldCall { id, operation: of_hold }) = hold {
        return part.with_hold(id.clone(), of_hold.for_tiers(places));
    }
    match check.lease() {
        // a lease over several nodes is not drawn: its units would have to be reserved and refunded
        Some(lease) if is_whole => part.with_lease(lease),
        _ => part,
    }
}

/// Why a hold is reverted.
pub(super) struct HoldDenial {
    /// The outcomes of parts that are reverted.
    pub(super) outcomes: &'static [HoldOutcome],
    /// The time of the denial; `None` after an error.
    pub(super) at: Option<Timestamp>,
}

/// The answer of a part to a reservation.
#[derive(Clone, Debug)]
pub(super) struct Reserved {
    pub(super) at: Timestamp,
    /// Number of requests of the reservation.
    pub(super) count: u32,
    pub(super) answers: Vec<Answer>,
}

/// The remaining work of a part once the number of granted requests is known.
#[derive(Debug)]
pub(super) struct FollowUp {
    /// Indexes of the tiers within the part.
    pub(super) places: Vec<usize>,
    pub(super) kind: Kind,
    pub(super) check: Check,
    /// How long the counters have usage, as of the reservation; zero without one.
    pub(super) usage_lasts: Duration,
}

/// A follow-up and its answers; absent if the reply was lost.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) follow_up: FollowUp,
    pub(super) answers: Option<Vec<Answer>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Refund what was reserved beyond the granted requests, or revert a hold.
    Refund,
    /// Peek for the retry time of the next request: this part admitted exactly the granted requests.
    PeekNext,
    /// Peek because the answer needs this part: an earlier part denied, and there was no peek before.
    LatePeek,
}

impl Part {
    /// Returns the follow-ups if `granted` requests of the check pass.
    pub(super) fn follow_ups(
        &self,
        check: &Check,
        reserved: Option<&Reserved>,
        granted: u32,
    ) -> Vec<FollowUp> {
        let Some(reserved) = reserved else { return Vec::new() };
        let usage_us = reserved.answers.iter().map(|answer| answer.reset_after_us).max().unwrap_or(0);
        let usage_lasts = Duration::from_micros(usage_us);
        let follow_up = |places: Vec<usize>, kind, operation, count| {
            let tiers: Vec<usize> = places.iter().map(|place| self.tiers[*place]).collect();
            FollowUp { places, kind, check: part_of(check, operation, &tiers).times(count), usage_lasts }
        };
        // shadow tiers may have been charged for fewer
        let mut beyond: Vec<(u32, Vec<usize>)> = Vec::new();
        let mut tied = Vec::new();
        for (place, answer) in reserved.answers.iter().enumerate() {
            let excess = answer.charged.saturating_sub(granted);
            match beyond.iter_mut().find(|(count, _)| *count == excess) {
                _ if excess == 0 => {}
                Some((_, places)) => places.push(place),
                None => beyond.push((excess, vec![place])),
            }
            let passes = reserved.passes(self.terms(check, place), answer, check.count());
            if passes < check.count() && granted.min(passes) == passes && answer.retry.is_none() {
                tied.push(place);
            }
        }
        let refund = Operation::Refund { at: Some(reserved.at) };
        let mut follow_ups: Vec<FollowUp> = beyond
            .into_iter()
            .map(|(count, places)| follow_up(places, Kind::Refund, refund, count))
            .collect();
        if !tied.is_empty() {
            follow_ups.push(follow_up(tied, Kind::PeekNext, Operation::Peek, 1));
        }
        follow_ups
    }

    /// Returns the operation that reverts a hold which another part denied, on tiers with one of these outcomes. A part without a
    /// reservation may have the hold from an earlier attempt.
    pub(super) fn revert(
        &self,
        check: &Check,
        reserved: Option<&Reserved>,
        denial: &HoldDenial,
    ) -> Vec<FollowUp> {
        let Some(hold) = check.hold() else { return Vec::new() };
        let is_made = |place: &usize| match reserved {
            Some(reserved) => denial.outcomes.contains(&reserved.answers[*place].hold.outcome),
            None => denial.outcomes.contains(&HoldOutcome::Repeated),
        };
        let places: Vec<usize> = (0..self.tiers.len()).filter(is_made).collect();
        let until = reserved.map_or(denial.at, |reserved| Some(reserved.at));
        let (Some(ttl), [_, ..], Some(until)) = (hold.operation.new_ttl(), &*places, until) else {
            return Vec::new();
        };
        let tiers: Vec<usize> = places.iter().map(|place| self.tiers[*place]).collect();
        let tiers = tiers.iter().map(|place| check.tiers()[*place].clone()).collect();
        let held = Check::new(Operation::Charge, tiers).expect("some tiers of a check are a check");
        let check = held.with_hold(hold.id.clone(), HoldOperation::Revert { until });
        vec![FollowUp { places, kind: Kind::Refund, check, usage_lasts: ttl }]
    }

    /// Returns a peek at a part without a reservation.
    pub(super) fn late_peek(&self, check: &Check) -> FollowUp {
        FollowUp {
            places: (0..self.tiers.len()).collect(),
            kind: Kind::LatePeek,
            check: self.to_check(check, Operation::Peek, check.count()),
            usage_lasts: Duration::ZERO,
        }
    }

    /// Returns the answers of this part's tiers if `granted` requests pass, as if the whole check had been decided in one step. Without a
    /// reservation, they are the answers to the peek.
    pub(super) fn settled(
        &self,
        check: &Check,
        peeked: impl FnOnce() -> Vec<Answer>,
        reserved: Option<&Reserved>,
        granted: u32,
        done: &[Done],
    ) -> Vec<Answer> {
        let Some(reserved) = reserved else { return peeked() };
        let answer_of = |kind: Kind, place: usize| {
            done.iter().filter(|done| done.follow_up.kind == kind).find_map(|done| {
                let index = done.follow_up.places.iter().position(|known| *known == place)?;
                done.answers.as_ref()?.get(index)
            })
        };
        let answer = |(place, first): (usize, &Answer)| {
            let passes = reserved.passes(self.terms(check, place), first, check.count());
            let charged = granted.min(passes);
            // a refund without an answer leaves the reservation
            let last = answer_of(Kind::Refund, place).unwrap_or(first);
            let ahead = answer_of(Kind::PeekNext, place).and_then(|answer| answer.retry);
            let retry = first.retry.or(ahead).filter(|_| passes < check.count() && charged == passes);
            let is_reverted = answer_of(Kind::Refund, place).is_some();
            let hold = if is_reverted {
                HoldAnswer { released: first.hold.released, ..HoldAnswer::NONE }
            } else {
                first.hold
            };
            Answer { passes, charged, retry, hold, ..*last }
        };
        reserved.answers.iter().enumerate().map(answer).collect()
    }

    /// Returns the answers of tiers without information, if others deny.
    pub(super) fn unknown(&self, check: &Check, at: Timestamp) -> Vec<Answer> {
        let fresh = |place| {
            let terms: &Terms = self.terms(check, place);
            let mut state = State::fresh(terms.limit.algorithm());
            let passes = terms.passes(&state, check.count(), at);
            terms.settle(&mut state, passes, 0, check.count(), at)
        };
        (0..self.tiers.len()).map(fresh).collect()
    }

    fn terms<'a>(&self, check: &'a Check, place: usize) -> &'a Terms {
        &check.tiers()[self.tiers[place]].terms
    }
}

impl Reserved {
    /// Returns how many of `count` requests this tier alone admits, if the reservation was for fewer.
    fn passes(&self, terms: &Terms, answer: &Answer, count: u32) -> u32 {
        if answer.passes < self.count || count == self.count {
            return answer.passes;
        }
        let units = i64::try_from(u64::from(answer.charged).saturating_mul(terms.cost.units()));
        let before = answer.available.saturating_add(units.unwrap_or(i64::MAX));
        let capacity = i64::try_from(terms.limit.capacity()).unwrap_or(i64::MAX);
        let used = u64::try_from(capacity.saturating_sub(before)).unwrap_or(0);
        let mut state = State::fresh(terms.limit.algorithm());
        if used > 0 {
            state.charge(&terms.limit, self.at, used);
        }
        terms.passes(&state, count, self.at)
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_core::{Cost, Limit};

    use super::*;
    use crate::key::Key;

    fn check(operation: Operation, keys: &[&str]) -> Check {
        let limit = Limit::sliding_log(10, Duration::from_secs(60)).unwrap();
        let tier =
            |key: &&str| Tier { key: Key::without_rule(*key).unwrap(), terms: Terms::new(limit, Cost::ONE) };
        Check::new(operation, keys.iter().map(tier).collect()).unwrap()
    }

    #[test]
    fn every_slot_sees_the_checks_in_their_order_and_every_check_its_slots_in_ascending_order() {
        let checks = [
            check(Operation::Check, &["a", "b", "c"]),
            check(Operation::Check, &["c"]),
            check(Operation::Peek, &["b", "a"]),
            check(Operation::Check, &["d", "a"]),
            check(Operation::Check, &["e"]),
        ];
        let split = split(&checks);
        let mut last: HashMap<u16, usize> = HashMap::new();
        for (check, parts) in checks.iter().zip(&split) {
            let mut tiers: Vec<usize> = parts.iter().flat_map(|part| part.tiers.clone()).collect();
            tiers.sort_unstable();
            assert_eq!(tiers, (0..check.tiers().len()).collect::<Vec<_>>());
            assert!(parts.is_sorted_by(|one, other| one.slot < other.slot));
            if check.operation() == Operation::Check {
                assert!(parts.is_sorted_by(|one, other| one.level < other.level));
            }
            for part in parts {
                assert!(part.level >= last.insert(part.slot, part.level).unwrap_or(0));
            }
        }
        assert_eq!(split[4][0].level, 0, "a check without shared slots does not wait");
    }
}
