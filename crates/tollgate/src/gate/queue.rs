//! Who waits for the next batch, and who sends it.
//!
//! Equal checks wait as one group and become "up to n", handed out first come, first served. A call under
//! way belongs to no single caller: one who goes away while waiting is neither charged nor missed.

use std::{collections::VecDeque, hash::BuildHasher, slice, sync::Arc, time::Duration};

use hashbrown::HashTable;
use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::oneshot};
use tollgate_core::{Answer, Operation, Timestamp, step::granted};

use super::{Handout, Lane, Place, Verdict, no_answer_within};
use crate::{
    check::Check,
    hashing::Keyed,
    store::{Store, StoreError},
};

/// How many calls are under way at once: one that Redis works on while the next is on its way.
const MAX_CALLS: usize = 2;
/// How many tiers one call decides over, so that nobody else on that Redis waits long: about 0.3 ms of it.
const MAX_CALL_TIERS: usize = 64;
/// How many callers may wait. More than that is no queue but a store that is down.
const MAX_WAITING: usize = 16_384;

#[derive(Default)]
pub(super) struct Queue {
    waiting: Mutex<Waiting>,
    hasher: Keyed,
}

#[derive(Default)]
struct Waiting {
    /// In the order of arrival; the first has the number `taken`.
    groups: VecDeque<Group>,
    taken: usize,
    /// The numbers of the groups that further equal checks may join, by their hash.
    open: HashTable<(u64, usize)>,
    callers: usize,
    calls: usize,
}

struct Group {
    check: Check,
    hash: u64,
    callers: Vec<Caller>,
}

/// Where a caller waits for the answer.
type Caller = oneshot::Sender<Result<Handed, StoreError>>;

/// The answer to a group, and which of its callers this one is.
struct Handed {
    answers: Arc<[Answer]>,
    at: Timestamp,
    place: Place,
}

/// Asks the store, together with others if calls are under way. The caller waits for as long as `patience`.
pub(super) async fn ask<S: Store>(
    lane: &Arc<Lane<S>>,
    check: &Check,
    patience: Duration,
) -> Result<Verdict, StoreError> {
    match lane.queue.join(check)? {
        Joined::Idle => ask_alone(lane, check, patience).await,
        Joined::Waits(answer) => receive(check, answer).await,
        Joined::Sends(answer) => {
            tokio::spawn(send_until_empty(Call::under_way(lane)));
            receive(check, answer).await
        }
    }
}

async fn receive(
    check: &Check,
    answer: oneshot::Receiver<Result<Handed, StoreError>>,
) -> Result<Verdict, StoreError> {
    let handed = answer.await.map_err(|_| StoreError::Ambiguous("the call was given up".to_owned()))??;
    Ok(Verdict::of(check, &handed.answers, handed.place, handed.at))
}

/// Nobody else is there: asks in the caller's own task. Who has come in the meantime is served next.
async fn ask_alone<S: Store>(
    lane: &Arc<Lane<S>>,
    check: &Check,
    patience: Duration,
) -> Result<Verdict, StoreError> {
    let turn = Turn(lane);
    let answers = lane.call(slice::from_ref(check), patience).await;
    drop(turn);
    let (answers, at) = answers.into_iter().next().expect("one check has one outcome")?;
    Ok(Verdict::of(check, &answers, Place::ALONE, at))
}

/// The call of a caller who asks alone. It is handed on to those who wait, also when the caller goes away.
struct Turn<'a, S: Store>(&'a Arc<Lane<S>>);

impl<S: Store> Drop for Turn<'_, S> {
    fn drop(&mut self) {
        if self.0.queue.end_call_if_empty() {
            return;
        }
        let call = Call::under_way(self.0);
        // outside of a runtime nobody can be served: the call ends, and the next caller starts anew
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(send_until_empty(call));
        }
    }
}

/// One of the calls that may be under way. It ends with its holder, also if that panics or is never run.
struct Call<S: Store> {
    lane: Arc<Lane<S>>,
    has_ended: bool,
}

impl<S: Store> Call<S> {
    fn under_way(lane: &Arc<Lane<S>>) -> Self {
        Self { lane: Arc::clone(lane), has_ended: false }
    }
}

impl<S: Store> Drop for Call<S> {
    fn drop(&mut self) {
        if !self.has_ended {
            self.lane.queue.end_call();
        }
    }
}

/// Sends batch after batch until nobody waits.
async fn send_until_empty<S: Store>(mut call: Call<S>) {
    let lane = Arc::clone(&call.lane);
    loop {
        let batch = lane.queue.take_batch();
        if batch.is_empty() {
            if lane.queue.end_call_if_empty() {
                call.has_ended = true;
                return;
            }
            continue;
        }
        let (checks, callers): (Vec<Check>, Vec<_>) = batch.into_iter().unzip();
        let patience = lane.shared.options.deadline;
        let Ok(outcomes) = tokio::time::timeout(patience, lane.call(&checks, patience)).await else {
            for caller in callers.into_iter().flatten() {
                let _ = caller.send(Err(no_answer_within(patience)));
            }
            continue;
        };
        for ((check, callers), outcome) in checks.iter().zip(callers).zip(outcomes) {
            hand_out(check, callers, outcome);
        }
    }
}

/// Tells everybody who asked a check what became of it. Who has gone away in the meantime has nothing to hear.
fn hand_out(check: &Check, callers: Vec<Caller>, outcome: Result<Handout, StoreError>) {
    match outcome {
        Ok((answers, at)) => {
            let passes = answers.iter().map(|answer| answer.passes);
            let terms = check.tiers().iter().map(|tier| &tier.terms);
            let granted = granted(check.count(), terms.zip(passes));
            for (index, caller) in (0..).zip(callers) {
                let answers = Arc::clone(&answers);
                let _ = caller.send(Ok(Handed { answers, at, place: Place { index, granted } }));
            }
        }
        Err(error) => {
            for caller in callers {
                let _ = caller.send(Err(error.clone()));
            }
        }
    }
}

enum Joined {
    /// Nothing is under way: the caller may ask at once, and has the turn.
    Idle,
    /// The caller waits for a batch.
    Waits(oneshot::Receiver<Result<Handed, StoreError>>),
    /// The caller waits for a batch, and a further call may be sent.
    Sends(oneshot::Receiver<Result<Handed, StoreError>>),
}

impl Queue {
    fn join(&self, check: &Check) -> Result<Joined, StoreError> {
        let hash = self.hasher.hash_one(check);
        let mut waiting = self.waiting.lock();
        if waiting.calls == 0 && waiting.groups.is_empty() {
            waiting.calls = 1;
            return Ok(Joined::Idle);
        }
        if waiting.callers >= MAX_WAITING {
            return Err(StoreError::NotRun(format!("{MAX_WAITING} callers wait for the store already")));
        }
        let (caller, answer) = oneshot::channel();
        waiting.callers += 1;
        waiting.add(check, hash, caller);
        if waiting.calls < MAX_CALLS {
            waiting.calls += 1;
            return Ok(Joined::Sends(answer));
        }
        Ok(Joined::Waits(answer))
    }

    /// The next batch: each check with how many ask, and who they are. Nobody who has gone away is among them.
    fn take_batch(&self) -> Vec<(Check, Vec<Caller>)> {
        let mut waiting = self.waiting.lock();
        let (mut batch, mut tiers) = (Vec::new(), 0);
        while let Some(group) = waiting.groups.front()
            && (tiers == 0 || tiers + group.check.tiers().len() <= MAX_CALL_TIERS)
        {
            let mut group = waiting.take_first();
            group.callers.retain(|caller| !caller.is_closed());
            if group.callers.is_empty() {
                continue;
            }
            tiers += group.check.tiers().len();
            let count = u32::try_from(group.callers.len()).expect("fewer than MAX_WAITING wait");
            batch.push((group.check.times(count), group.callers));
        }
        batch
    }

    /// Ends a call unless somebody waits for the next one.
    fn end_call_if_empty(&self) -> bool {
        let mut waiting = self.waiting.lock();
        let empty = waiting.groups.is_empty();
        if empty {
            waiting.calls -= 1;
        }
        empty
    }

    /// How many wait now.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.lock().callers
    }

    fn end_call(&self) {
        self.waiting.lock().calls -= 1;
    }
}

impl Waiting {
    fn add(&mut self, check: &Check, hash: u64, caller: Caller) {
        let is_equal = |&(other, number): &(u64, usize)| {
            other == hash && self.groups[number - self.taken].check == *check
        };
        if let Some(&(_, number)) = self.open.find(hash, is_equal) {
            self.groups[number - self.taken].callers.push(caller);
            return;
        }
        if check.operation() == Operation::Check {
            let number = self.taken + self.groups.len();
            self.open.insert_unique(hash, (hash, number), |&(hash, _)| hash);
        }
        self.groups.push_back(Group { check: check.clone(), hash, callers: vec![caller] });
    }

    fn take_first(&mut self) -> Group {
        let group = self.groups.pop_front().expect("the caller has seen a first group");
        let number = self.taken;
        self.taken += 1;
        if let Ok(open) = self.open.find_entry(group.hash, |&(_, other)| other == number) {
            open.remove();
        }
        self.callers -= group.callers.len();
        group
    }
}
