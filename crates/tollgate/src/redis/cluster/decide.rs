//! Decides a batch of checks. One whose counters are all on one node is decided in one call. Otherwise, checks that span
//! several nodes are reserved level by level, one call per node and level, and taken back where a later level denies.

use std::{collections::BTreeMap, slice, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::sleep;
use tollgate_core::{Algorithm, Operation, step::granted};

use super::{
    Cluster, REDIRECT_TIMEOUT,
    outcome::{Progress, reserves},
    slots::slot_of,
    split::{Done, FollowUp, Kind, Part, Reserved, split},
};
use crate::{
    check::Check,
    key::Key,
    redis::{
        bytes,
        connection::{CallFailure, RedisRequest},
        keys::redis_key,
        number,
        script::{CallTimes, MAX_BATCH, decode, encode},
    },
    store::{Answered, Decided, StoreError, each},
};

/// How long several checks wait together for the keys of their slot, before each goes by itself.
const BATCH_MIGRATION_WAIT: Duration = Duration::from_millis(20);
/// How often a take-back that did not run is tried, and how long to wait in between.
const REFUND_ATTEMPTS: usize = 3;
const REFUND_PAUSE: Duration = Duration::from_millis(20);

pub(super) type Each = Vec<Result<Answered, StoreError>>;

impl Cluster {
    /// Decides each check. What is reserved for one whose caller goes away meanwhile is still settled.
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
        let lost = |_| vec![Err(StoreError::Ambiguous("the runtime has ended".to_owned())); count];
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
        let wait = if checks.len() > 1 { BATCH_MIGRATION_WAIT } else { REDIRECT_TIMEOUT };
        match self.call_within(wait, slot, prefix, checks, times).await {
            Err(CallError::Failed(failure)) if checks.len() > 1 && failure.is("TRYAGAIN") => {
                // while a slot moves, only calls of one key are sure to find it
                let mut each_alone = Vec::with_capacity(checks.len());
                for check in checks {
                    let alone = slice::from_ref(check);
                    let decided = self.call_within(REDIRECT_TIMEOUT, slot, prefix, alone, times).await;
                    each_alone.extend(each(decided.map_err(StoreError::from), 1));
                }
                each_alone
            }
            decided => each(decided.map_err(StoreError::from), checks.len()),
        }
    }

    async fn call_within(
        self: &Arc<Self>,
        wait: Duration,
        slot: u16,
        prefix: &str,
        checks: &[Check],
        times: CallTimes,
    ) -> Result<Decided, CallError> {
        let call = encode(prefix, checks, times)?;
        let reply = self.send_within(wait, slot, RedisRequest::Script(&call)).await?;
        Ok(decode(&bytes(reply)?, &call, checks)?)
    }

    /// Forgets counters, slot by slot; how many were there.
    pub(in crate::redis) async fn reset(
        self: &Arc<Self>,
        prefix: &str,
        counters: &[(Key, Algorithm)],
    ) -> Result<u64, StoreError> {
        let mut by_slot: BTreeMap<u16, Vec<Vec<u8>>> = BTreeMap::new();
        for (key, algorithm) in counters {
            by_slot.entry(slot_of(key)).or_default().push(redis_key(prefix, key, *algorithm));
        }
        let requests = by_slot.iter().flat_map(|(slot, keys)| {
            keys.chunks(MAX_BATCH).map(|keys| (*slot, redis::cmd("UNLINK").arg(keys).take()))
        });
        let requests: Vec<(u16, redis::Cmd)> = requests.collect();
        let sent = requests.iter().map(|(slot, request)| self.send(*slot, RedisRequest::Command(request)));
        let mut forgotten = 0;
        let mut failed = None;
        for reply in join_all(sent).await {
            match reply.and_then(number) {
                Ok(count) => forgotten += count,
                Err(failure) => failed = Some(failure),
            }
        }
        match failed {
            None => Ok(forgotten),
            Some(failure) if forgotten == 0 => Err(failure.into()),
            Some(failure) => {
                Err(StoreError::Ambiguous(format!("part was forgotten: {}", StoreError::from(failure))))
            }
        }
    }
}

enum CallError {
    Failed(CallFailure),
    Store(StoreError),
}

impl From<CallFailure> for CallError {
    fn from(failure: CallFailure) -> Self {
        Self::Failed(failure)
    }
}

impl From<StoreError> for CallError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Failed(failure) => failure.into(),
            CallError::Store(error) => error,
        }
    }
}

fn only_slot(split: &[Vec<Part>]) -> Option<u16> {
    let mut slots = split.iter().flatten().map(|part| part.slot);
    let first = slots.next()?;
    slots.all(|slot| slot == first).then_some(first)
}

/// A batch on its way.
struct Batch {
    cluster: Arc<Cluster>,
    prefix: String,
    checks: Vec<Check>,
    split: Vec<Vec<Part>>,
    times: CallTimes,
}

/// A part of a check, by their places.
#[derive(Clone, Copy)]
struct Place {
    check: usize,
    part: usize,
}

impl Batch {
    async fn decide(self) -> Each {
        let checks = self.checks.iter().zip(&self.split);
        let mut progress: Vec<Progress> = checks.map(|(check, parts)| Progress::new(check, parts)).collect();
        self.look(&mut progress).await;
        let levels = self.split.iter().flatten().map(|part| part.level + 1).max().unwrap_or(0);
        for level in 0..levels {
            self.reserve(level, &mut progress).await;
        }
        self.settle(progress).await
    }

    /// Peeks at all parts of the checks over several slots that did not have room lately, so that most denials are known
    /// before anything is reserved.
    async fn look(&self, progress: &mut [Progress]) {
        let has_room = self.cluster.recent_capacity.is_sufficient(&self.checks);
        let mut calls: BTreeMap<u16, Vec<(Place, Check)>> = BTreeMap::new();
        for (check_place, (check, parts)) in self.checks.iter().zip(&self.split).enumerate() {
            if reserves(check, parts) && !has_room[check_place] {
                for (part_place, part) in parts.iter().enumerate() {
                    let place = Place { check: check_place, part: part_place };
                    let look = part.ask(check, Operation::Peek, check.count());
                    calls.entry(part.slot).or_default().push((place, look));
                }
            }
        }
        let mut peeked: BTreeMap<usize, BTreeMap<usize, Result<Answered, StoreError>>> = BTreeMap::new();
        for (place, _, answered) in self.send(calls, self.times).await {
            peeked.entry(place.check).or_default().insert(place.part, answered);
        }
        for (check_place, peeked) in peeked {
            let (check, parts) = (&self.checks[check_place], &self.split[check_place]);
            progress[check_place].record_peeks(check, parts, peeked.into_values().collect());
        }
    }

    /// Sends what is on this level and records the answers.
    async fn reserve(&self, level: usize, progress: &mut [Progress]) {
        let mut calls: BTreeMap<u16, Vec<(Place, Check)>> = BTreeMap::new();
        for (check_place, (check, parts)) in self.checks.iter().zip(&self.split).enumerate() {
            let Progress { outcome, granted, error, .. } = &progress[check_place];
            let is_in_vain = check.operation() == Operation::Check && (*granted == 0 || error.is_some());
            let is_over = outcome.is_some() || is_in_vain;
            for (part_place, part) in parts.iter().enumerate().filter(|(_, part)| part.level == level) {
                if !is_over {
                    let count = if check.operation() == Operation::Check { *granted } else { check.count() };
                    let ask = part.ask(check, check.operation(), count);
                    let place = Place { check: check_place, part: part_place };
                    calls.entry(part.slot).or_default().push((place, ask));
                }
            }
        }
        for (place, ask, answered) in self.send(calls, self.times).await {
            let progress = &mut progress[place.check];
            match answered {
                Ok(Answered { at, answers }) => {
                    if ask.operation() == Operation::Check {
                        let passes = ask.tiers().iter().zip(&answers);
                        let passes = passes.map(|(tier, answer)| (&tier.terms, answer.passes));
                        progress.granted = granted(progress.granted, passes);
                    }
                    progress.reserved[place.part] = Some(Reserved { at, count: ask.count(), answers });
                }
                Err(error) => progress.fail(error),
            }
        }
    }

    /// Takes back what was reserved beyond what passes, and combines the answers of each check.
    async fn settle(&self, progress: Vec<Progress>) -> Each {
        let mut open: BTreeMap<u16, Vec<(Place, FollowUp)>> = BTreeMap::new();
        for (check_place, (check, parts)) in self.checks.iter().zip(&self.split).enumerate() {
            let Progress { outcome, peeked, reserved, granted, error } = &progress[check_place];
            if outcome.is_some() || !reserves(check, parts) {
                continue;
            }
            let granted = if error.is_some() { 0 } else { *granted };
            for (part_place, part) in parts.iter().enumerate() {
                let place = Place { check: check_place, part: part_place };
                let mut follow_ups = part.follow_ups(check, reserved[part_place].as_ref(), granted);
                if reserved[part_place].is_none() && peeked.is_empty() {
                    follow_ups.push(part.late_peek(check));
                }
                // the answer to a check that failed is the error
                follow_ups.retain(|follow_up| error.is_none() || follow_up.kind == Kind::Refund);
                open.entry(part.slot).or_default().extend(follow_ups.into_iter().map(|one| (place, one)));
            }
        }
        let mut done = self.follow_up(open).await;

        let checks = self.checks.iter().zip(&self.split).zip(progress).enumerate();
        checks
            .map(|(check_place, ((check, parts), progress))| {
                let mut of_parts: Vec<Vec<Done>> = Vec::new();
                of_parts.resize_with(parts.len(), Vec::new);
                for (place, done) in done.extract_if(.., |(place, _)| place.check == check_place) {
                    of_parts[place.part].push(done);
                }
                progress.outcome(check, parts, &of_parts)
            })
            .collect()
    }

    /// Sends the follow-ups, take-backs first. A take-back that did not run is sent again; one that was lost is not.
    async fn follow_up(&self, mut open: BTreeMap<u16, Vec<(Place, FollowUp)>>) -> Vec<(Place, Done)> {
        let without_deadline = CallTimes { deadline: None, by: None, ..self.times };
        let mut done = Vec::new();
        open.retain(|_, follow_ups| !follow_ups.is_empty());
        for attempt in 1..=REFUND_ATTEMPTS {
            let by_slot = std::mem::take(&mut open).into_iter().map(|(slot, mut follow_ups)| {
                follow_ups.sort_by_key(|(_, follow_up)| follow_up.kind != Kind::Refund);
                let tagged = follow_ups.into_iter().map(|(place, follow_up)| {
                    let check = follow_up.check.clone();
                    ((slot, place, follow_up), check)
                });
                (slot, tagged.collect())
            });
            let mut failed: BTreeMap<u16, Vec<(Place, FollowUp)>> = BTreeMap::new();
            for ((slot, place, follow_up), _, answered) in self.send(by_slot, without_deadline).await {
                match answered {
                    Err(StoreError::NotRun(_))
                        if follow_up.kind == Kind::Refund && attempt < REFUND_ATTEMPTS =>
                    {
                        failed.entry(slot).or_default().push((place, follow_up));
                    }
                    answered => {
                        let answers = answered.ok().map(|answered| answered.answers);
                        done.push((place, Done { follow_up, answers }));
                    }
                }
            }
            if failed.is_empty() {
                break;
            }
            open = failed;
            sleep(REFUND_PAUSE).await;
        }
        done
    }

    /// Sends checks that are each on one slot, one call per node where possible, all at once. Returns the answer of each
    /// check with the value that came with it.
    async fn send<T>(
        &self,
        by_slot: impl IntoIterator<Item = (u16, Vec<(T, Check)>)>,
        times: CallTimes,
    ) -> Vec<(T, Check, Result<Answered, StoreError>)> {
        let groups = self.cluster.group_by_node(by_slot).into_iter().map(async |group| {
            let answers = self.cluster.call_group(&group, &self.prefix, times).await;
            group.tags.into_iter().zip(group.checks).zip(answers).map(|((tag, check), one)| (tag, check, one))
        });
        join_all(groups).await.into_iter().flatten().collect()
    }
}
