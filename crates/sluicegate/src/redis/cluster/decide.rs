//! Decides a batch of checks. If all counters are on one node, the batch is decided in one call. Otherwise, checks that
//! span several nodes are reserved level by level, with one call per node and level, and refunded if a later level
//! denies.

use std::{collections::BTreeMap, slice, sync::Arc, time::Duration};

use futures_util::future::join_all;
use sluicegate_core::{Algorithm, HoldOutcome, Operation, step::granted};
use tokio::time::Instant;

use super::{
    Cluster, REDIRECT_TIMEOUT,
    outcome::{Progress, reserves},
    ready_by,
    release::{Release, may_repeat},
    slots::slot_of,
    split::{Done, FollowUp, HoldDenial, Kind, Part, Reserved, split},
};
use crate::{
    check::{Check, LeaseCall},
    key::Key,
    redis::{
        bytes,
        connection::{CallFailure, RedisRequest},
        keys::counter_keys,
        number,
        script::{CallTimes, MAX_BATCH, decode, encode},
    },
    store::{CheckAnswer, StoreError, per_check},
};

/// How long a batch waits for the keys of a migrating slot before its checks are sent separately.
const BATCH_MIGRATION_WAIT: Duration = Duration::from_millis(20);
pub(super) type Each = Vec<Result<CheckAnswer, StoreError>>;

impl Cluster {
    /// Decides each check. Reservations are settled even if the caller is cancelled.
    pub(in crate::redis) async fn decide(
        self: &Arc<Self>,
        prefix: &str,
        checks: &[Check],
        times: CallTimes,
    ) -> Each {
        let decided = self.decide_batch(prefix, checks, times).await;
        self.recent_capacity.record(checks, &decided);
        decided
    }

    async fn decide_batch(self: &Arc<Self>, prefix: &str, checks: &[Check], times: CallTimes) -> Each {
        let tiers: usize = checks.iter().map(|check| check.tiers().len()).sum();
        if tiers > MAX_BATCH {
            return vec![Err(StoreError::TooLarge { tiers, max: MAX_BATCH }); checks.len()];
        }
        let split = split(checks);
        if let Some(slot) = only_slot(&split) {
            return self.call(slot, prefix, checks, times).await;
        }
        if let Some(node) = self.common_node(split.iter().flatten().map(|part| part.slot))
            && let Some(decided) = self.call_node(&node, prefix, checks, times).await
        {
            return decided;
        }
        let any_reserves = checks.iter().zip(&split).any(|(check, parts)| reserves(check, parts));
        let batch = Batch {
            cluster: Arc::clone(self),
            prefix: prefix.to_owned(),
            checks: checks.to_vec(),
            split,
            times,
        };
        if !any_reserves {
            return batch.decide().await;
        }
        let count = checks.len();
        let lost = |_| vec![Err(StoreError::Ambiguous("the runtime has shut down".to_owned())); count];
        tokio::spawn(async move { batch.decide().await }).await.unwrap_or_else(lost)
    }

    /// Decides checks that are all on one slot.
    pub(super) async fn call(
        self: &Arc<Self>,
        slot: u16,
        prefix: &str,
        checks: &[Check],
        times: CallTimes,
    ) -> Each {
        let is_divisible = checks.len() > 1 || checks.iter().any(|check| check.lease().is_some());
        let wait = if is_divisible { BATCH_MIGRATION_WAIT } else { REDIRECT_TIMEOUT };
        match self.call_within(wait, slot, prefix, checks, times).await {
            Err(SlotCallError::Failed(failure)) if is_divisible && failure.is("TRYAGAIN") => {
                // while a slot migrates, only calls with one key always succeed: leases are neither drawn nor ended
                let mut each_alone = Vec::with_capacity(checks.len());
                for check in checks {
                    if let Some(LeaseCall::End { .. }) = check.lease() {
                        each_alone.push(Err(StoreError::NotRun("the slot migrates".to_owned())));
                        continue;
                    }
                    let alone = check.clone().without_lease();
                    let alone = slice::from_ref(&alone);
                    let decided = self.call_within(REDIRECT_TIMEOUT, slot, prefix, alone, times).await;
                    each_alone.extend(per_check(decided.map_err(StoreError::from), 1));
                }
                each_alone
            }
            decided => per_check(decided.map_err(StoreError::from), checks.len()),
        }
    }

    async fn call_within(
        self: &Arc<Self>,
        wait: Duration,
        slot: u16,
        prefix: &str,
        checks: &[Check],
        times: CallTimes,
    ) -> Result<Each, SlotCallError> {
        let call = encode(prefix, checks, times)?;
        let reply = self.send_within(wait, slot, RedisRequest::Script(&call)).await?;
        Ok(decode(&bytes(reply)?, &call, checks)?)
    }

    /// Decides checks that are each on one slot, with one call per node where possible, all in parallel. Returns the outcome of each
    /// check with the value that came with it. A call without a reply by its deadline fails: a reservation on another node is then
    /// released.
    pub(super) async fn decide_by_slot<T>(
        self: &Arc<Self>,
        prefix: &str,
        by_slot: impl IntoIterator<Item = (u16, Vec<(T, Check)>)>,
        times: CallTimes,
    ) -> Vec<(T, Check, Result<CheckAnswer, StoreError>)> {
        let groups = self.group_by_node(by_slot).into_iter().map(async |group| {
            let call = self.call_group(&group, prefix, times);
            let answers = ready_by(times.process_deadline, call).await.unwrap_or_else(|| {
                let late = StoreError::Ambiguous("no reply by the deadline".to_owned());
                vec![Err(late); group.checks.len()]
            });
            group.tags.into_iter().zip(group.checks).zip(answers).map(|((tag, check), one)| (tag, check, one))
        });
        join_all(groups).await.into_iter().flatten().collect()
    }

    /// Removes counters and their leases, slot by slot, and returns how many existed.
    pub(in crate::redis) async fn reset(
        self: &Arc<Self>,
        prefix: &str,
        counters: &[(Key, Algorithm)],
    ) -> Result<u64, StoreError> {
        let mut by_slot: BTreeMap<u16, Vec<Vec<u8>>> = BTreeMap::new();
        for (key, algorithm) in counters {
            by_slot.entry(slot_of(key)).or_default().extend(counter_keys(prefix, key, *algorithm));
        }
        let requests = by_slot.iter().flat_map(|(slot, keys)| {
            keys.chunks(MAX_BATCH).map(|keys| (*slot, redis::cmd("UNLINK").arg(keys).take()))
        });
        let requests: Vec<(u16, redis::Cmd)> = requests.collect();
        let sent = requests.iter().map(|(slot, request)| self.send(*slot, RedisRequest::Command(request)));
        let mut removed = 0;
        let mut failed = None;
        for reply in join_all(sent).await {
            match reply.and_then(number) {
                Ok(count) => removed += count,
                Err(failure) => failed = Some(failure),
            }
        }
        let removed = removed.min(u64::try_from(counters.len()).unwrap_or(u64::MAX));
        match failed {
            None => Ok(removed),
            Some(failure) if removed == 0 => Err(failure.into()),
            Some(failure) => Err(StoreError::Ambiguous(format!(
                "only some counters were removed: {}",
                StoreError::from(failure)
            ))),
        }
    }
}

enum SlotCallError {
    Failed(CallFailure),
    Store(StoreError),
}

impl From<CallFailure> for SlotCallError {
    fn from(failure: CallFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<StoreError> for SlotCallError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<SlotCallError> for StoreError {
    fn from(error: SlotCallError) -> Self {
        match error {
            SlotCallError::Failed(failure) => failure.into(),
            SlotCallError::Store(error) => error,
        }
    }
}

/// Whether a hold is impossible regardless of the available units.
fn is_hold_error(outcome: HoldOutcome) -> bool {
    matches!(outcome, HoldOutcome::Conflict | HoldOutcome::Full)
}

/// Returns which parts of a hold are reverted. After a denial, this includes the parts that an earlier attempt made, unless the id belongs to
/// another hold. After an error, those parts stay: the earlier attempt may still succeed, and a later one completes the hold.
fn hold_denial(check: &Check, progress: &Progress) -> HoldDenial {
    let reserved = || progress.reserved.iter().flatten();
    let mut outcomes = reserved().flat_map(|part| &part.answers).map(|answer| answer.hold.outcome);
    let needs_new_id = check.hold().is_some_and(|hold| hold.operation.needs_new_id());
    let has_conflict = outcomes.any(|outcome| outcome == HoldOutcome::Conflict);
    let outcomes: &[HoldOutcome] = if needs_new_id || has_conflict || progress.error.is_some() {
        &[HoldOutcome::Held]
    } else {
        &[HoldOutcome::Held, HoldOutcome::Repeated]
    };
    let at = reserved().map(|part| part.at).max().filter(|_| progress.error.is_none());
    HoldDenial { outcomes, at }
}

fn only_slot(split: &[Vec<Part>]) -> Option<u16> {
    let mut slots = split.iter().flatten().map(|part| part.slot);
    let first = slots.next()?;
    slots.all(|slot| slot == first).then_some(first)
}

/// A batch in progress.
struct Batch {
    cluster: Arc<Cluster>,
    prefix: String,
    checks: Vec<Check>,
    split: Vec<Vec<Part>>,
    times: CallTimes,
}

/// The indexes of a check and one of its parts.
#[derive(Clone, Copy)]
struct PartIndex {
    check: usize,
    part: usize,
}

impl Batch {
    async fn decide(self) -> Each {
        let checks = self.checks.iter().zip(&self.split);
        let mut progress: Vec<Progress> = checks.map(|(check, parts)| Progress::new(check, parts)).collect();
        self.peek(&mut progress).await;
        let levels = self.split.iter().flatten().map(|part| part.level + 1).max().unwrap_or(0);
        for level in 0..levels {
            self.reserve(level, &mut progress).await;
        }
        self.settle(progress).await
    }

    /// Peeks all parts of checks over several slots whose counters had little capacity, so that most denials are found
    /// before anything is reserved.
    async fn peek(&self, progress: &mut [Progress]) {
        let has_capacity = self.cluster.recent_capacity.is_sufficient(&self.checks);
        let mut calls: BTreeMap<u16, Vec<(PartIndex, Check)>> = BTreeMap::new();
        for (check_index, (check, parts)) in self.checks.iter().zip(&self.split).enumerate() {
            // a peek would deny a hold that is repeated, and a check before expired holds are released
            if reserves(check, parts) && !has_capacity[check_index] && !check.uses_holds() {
                for (part_index, part) in parts.iter().enumerate() {
                    let index = PartIndex { check: check_index, part: part_index };
                    let peek = part.to_check(check, Operation::Peek, check.count());
                    calls.entry(part.slot).or_default().push((index, peek));
                }
            }
        }
        let mut peeked: BTreeMap<usize, BTreeMap<usize, Result<CheckAnswer, StoreError>>> = BTreeMap::new();
        for (index, _, answered) in self.cluster.decide_by_slot(&self.prefix, calls, self.times).await {
            peeked.entry(index.check).or_default().insert(index.part, answered);
        }
        for (check_index, peeked) in peeked {
            let (check, parts) = (&self.checks[check_index], &self.split[check_index]);
            progress[check_index].record_peeks(check, parts, peeked.into_values().collect());
        }
    }

    /// Sends the parts of this level and records the answers.
    async fn reserve(&self, level: usize, progress: &mut [Progress]) {
        let mut calls: BTreeMap<u16, Vec<(PartIndex, Check)>> = BTreeMap::new();
        for (check_index, (check, parts)) in self.checks.iter().zip(&self.split).enumerate() {
            let Progress { outcome, granted, error, .. } = &progress[check_index];
            let is_denied = check.operation() == Operation::Check && (*granted == 0 || error.is_some());
            let is_over = outcome.is_some() || is_denied;
            for (part_index, part) in parts.iter().enumerate().filter(|(_, part)| part.level == level) {
                if !is_over {
                    let count = if check.operation() == Operation::Check { *granted } else { check.count() };
                    let request = part.to_check(check, check.operation(), count);
                    let index = PartIndex { check: check_index, part: part_index };
                    calls.entry(part.slot).or_default().push((index, request));
                }
            }
        }
        for (index, request, answered) in self.cluster.decide_by_slot(&self.prefix, calls, self.times).await {
            let progress = &mut progress[index.check];
            match answered {
                Ok(CheckAnswer { at, answers }) => {
                    if request.operation() == Operation::Check {
                        let passes = request.tiers().iter().zip(&answers);
                        let passes = passes.map(|(tier, answer)| (&tier.terms, answer.passes));
                        progress.granted = granted(progress.granted, passes);
                        if answers.iter().any(|answer| is_hold_error(answer.hold.outcome)) {
                            progress.granted = 0;
                        }
                    }
                    progress.reserved[index.part] = Some(Reserved { at, count: request.count(), answers });
                }
                Err(error) => progress.fail(error),
            }
        }
    }

    /// Refunds reservations beyond the granted requests, and combines the answers of each check.
    async fn settle(&self, progress: Vec<Progress>) -> Each {
        let mut open: BTreeMap<u16, Vec<(PartIndex, FollowUp)>> = BTreeMap::new();
        for (check_index, (check, parts)) in self.checks.iter().zip(&self.split).enumerate() {
            let denial = hold_denial(check, &progress[check_index]);
            let Progress { outcome, peeked, reserved, granted, error } = &progress[check_index];
            if outcome.is_some() || !reserves(check, parts) {
                continue;
            }
            let granted = if error.is_some() { 0 } else { *granted };
            for (part_index, part) in parts.iter().enumerate() {
                let index = PartIndex { check: check_index, part: part_index };
                let reservation = reserved[part_index].as_ref();
                let mut follow_ups = match check.hold() {
                    None => part.follow_ups(check, reservation, granted),
                    Some(_) if granted == 0 => part.revert(check, reservation, &denial),
                    Some(_) => Vec::new(),
                };
                if reserved[part_index].is_none() && peeked.is_empty() {
                    follow_ups.push(part.late_peek(check));
                }
                // the answer to a check that failed is the error
                follow_ups.retain(|follow_up| error.is_none() || follow_up.kind == Kind::Refund);
                open.entry(part.slot).or_default().extend(follow_ups.into_iter().map(|one| (index, one)));
            }
        }
        let mut done = self.follow_up(open).await;

        let checks = self.checks.iter().zip(&self.split).zip(progress).enumerate();
        checks
            .map(|(check_index, ((check, parts), progress))| {
                let mut of_parts: Vec<Vec<Done>> = Vec::new();
                of_parts.resize_with(parts.len(), Vec::new);
                for (index, done) in done.extract_if(.., |(index, _)| index.check == check_index) {
                    of_parts[index.part].push(done);
                }
                progress.outcome(check, parts, &of_parts)
            })
            .collect()
    }

    /// Sends the follow-ups, refunds first. A refund that did not run is sent again in the background; one whose reply was lost is not.
    async fn follow_up(&self, mut open: BTreeMap<u16, Vec<(PartIndex, FollowUp)>>) -> Vec<(PartIndex, Done)> {
        let without_deadline = CallTimes { deadline: None, process_deadline: None, ..self.times };
        open.retain(|_, follow_ups| !follow_ups.is_empty());
        let by_slot = open.into_iter().map(|(slot, mut follow_ups)| {
            follow_ups.sort_by_key(|(_, follow_up)| follow_up.kind != Kind::Refund);
            let tagged = follow_ups.into_iter().map(|(index, follow_up)| {
                let check = follow_up.check.clone();
                ((slot, index, follow_up), check)
            });
            (slot, tagged.collect())
        });
        let answered = self.cluster.decide_by_slot(&self.prefix, by_slot, without_deadline).await;
        let mut done = Vec::new();
        let mut releases = Vec::new();
        for ((slot, index, follow_up), check, outcome) in answered {
            match &outcome {
                Err(error) if follow_up.kind == Kind::Refund && may_repeat(&check, error) => {
                    let until = Instant::now() + follow_up.usage_lasts;
                    releases.push(Release { slot, refund: check, until });
                }
                Err(_) if follow_up.kind == Kind::Refund => self.cluster.record_unreleased(1),
                _ => {}
            }
            let answers = outcome.ok().map(|answered| answered.answers);
            done.push((index, Done { follow_up, answers }));
        }
        if !releases.is_empty() {
            self.cluster.release_later(&self.prefix, without_deadline, releases);
        }
        done
    }
}
