//! Returns what is left of leases: in the background when they expire or are idle, and all of it when the rules change or the process
//! shuts down.
//!
//! A return that may have run is not repeated: its units are lost, and count until their window ends. The store accepts a return for
//! some time after a lease has expired.

use std::{
    cmp::Ordering as Order,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until, timeout},
};

use super::{CheckLeases, Lease, Leases};
use crate::{
    check::{Check, Tier},
    remote::Shared,
    store::{Deadline, StoreError},
};

/// The most returns of one call, one for each counter.
const MAX_RETURNS: usize = 64;
/// How long a return that did not run is retried.
const RETRY_TIME: Duration = Duration::from_millis(500);
/// The pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause of the background task: a lease with a shorter lifetime may be drawn meanwhile.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// The shortest pause of the background task.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);

/// When the background task has to look at an entry. Each entry has one. The greatest is the earliest.
#[derive(PartialEq, Eq)]
pub(super) struct Due {
    pub(super) at: Instant,
    pub(super) hash: u64,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Order {
        other.at.cmp(&self.at).then(self.hash.cmp(&other.hash))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl Leases {
    /// Ends the leases that have expired or are idle, and returns the calls for that.
    pub(super) fn end_due(&self, now: Instant) -> Vec<Check> {
        let mut calls = Vec::new();
        loop {
            let mut due = self.due.lock();
            if due.peek().is_none_or(|next| next.at > now) {
                return calls;
            }
            let Some(Due { hash, .. }) = due.pop() else { return calls };
            drop(due);
            self.end_due_of(hash, now, &mut calls);
        }
    }

    fn end_due_of(&self, hash: u64, now: Instant, calls: &mut Vec<Check>) {
        let mut shard = self.shard(hash).lock();
        let mut next: Option<Instant> = None;
        for entry in shard.table.iter_hash_mut(hash).filter(|entry| entry.hash == hash) {
            let is_idle = now.duration_since(entry.last_spent) >= entry.idle_time();
            let tiers = &entry.tiers;
            entry.leases.retain(|lease| {
                let ends = is_idle || now >= lease.expires;
                if ends {
                    calls.extend(self.end(lease, tiers));
                }
                !ends
            });
            if entry.is_active(now) {
                let due = entry.due_at(now).max(now + SHORTEST_PAUSE);
                next = Some(next.map_or(due, |other| other.min(due)));
            }
        }
        let is_over = |entry: &CheckLeases| entry.hash == hash && !entry.is_active(now);
        while let Ok(entry) = shard.table.find_entry(hash, is_over) {
            entry.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        drop(shard);
        self.due.lock().extend(next.map(|at| Due { at, hash }));
    }

    pub(super) fn push_due(&self, due: Due) {
        let mut all = self.due.lock();
        let was_empty = all.is_empty();
        all.push(due);
        drop(all);
        if was_empty {
            self.returner_wakes.notify_one();
        }
    }

    /// Ends all leases, and returns the calls for that.
    fn end_all(&self) -> Vec<Check> {
        let mut calls = Vec::new();
        for shard in &self.shards {
            for entry in shard.lock().table.iter_mut() {
                for lease in std::mem::take(&mut entry.leases) {
                    calls.extend(self.end(&lease, &entry.tiers));
                }
            }
        }
        calls
    }

    fn end(&self, lease: &Lease, tiers: &[Tier]) -> Vec<Check> {
        self.counters.count_spent(lease);
        lease.end_calls(tiers, |tier| (tier.unreported, tier.left))
    }
}

impl Shared {
    /// Starts the background task, unless it is running.
    pub(in crate::remote) fn start_returner(self: &Arc<Self>) {
        let has_returner = &self.leases.has_returner;
        if !has_returner.load(Ordering::Acquire)
            && let Ok(runtime) = Handle::try_current()
            && !has_returner.swap(true, Ordering::AcqRel)
        {
            runtime.spawn(Returner(Arc::downgrade(self)).run());
        }
    }

    /// Ends all leases and returns what is left of them. Retries for a short time.
    pub(in crate::remote) async fn return_all_leases(&self) {
        let calls = self.leases.end_all();
        self.return_leases(calls).await;
    }

    /// Sends returns. Those that did not run are retried for a short time.
    async fn return_leases(&self, mut calls: Vec<Check>) {
        let give_up = Instant::now() + RETRY_TIME;
        while !calls.is_empty() {
            let mut again = Vec::new();
            for batch in calls.chunks(MAX_RETURNS) {
                again.extend(self.send_returns(batch).await);
            }
            let retry = Instant::now() + RETRY_PAUSE;
            if retry > give_up {
                again.iter().for_each(|call| self.leases.counters.count_unspent(call, None));
                return;
            }
            if !again.is_empty() {
                sleep_until(retry).await;
            }
            calls = again;
        }
    }

    /// Sends returns in one call, and returns those that did not run.
    async fn send_returns(&self, calls: &[Check]) -> Vec<Check> {
        let longest = self.options.deadline_within(None);
        let reply = self.store.decide(calls, Some(Deadline::Process(Instant::now() + longest)));
        let outcomes = timeout(longest, reply).await.unwrap_or_else(|_| {
            let lost = StoreError::Ambiguous("no reply to the return of leases".to_owned());
            vec![Err(lost); calls.len()]
        });
        let mut again = Vec::new();
        for (call, outcome) in calls.iter().zip(outcomes) {
            match outcome {
                Ok(answer) => {
                    self.leases.counters.count_unspent(call, Some(&answer));
                    self.denials.record_change(call.keys());
                }
                Err(StoreError::NotRun(_) | StoreError::Rejected { .. } | StoreError::Late(_)) => {
                    again.push(call.clone());
                }
                Err(_) => self.leases.counters.count_unspent(call, None),
            }
        }
        again
    }
}

/// Returns leases in the background, for as long as the limiter exists.
struct Returner(Weak<Shared>);

impl Returner {
    async fn run(self) {
        loop {
            let Some(shared) = self.0.upgrade() else { return };
            let calls = shared.leases.end_due(Instant::now());
            shared.return_leases(calls).await;
            let next = shared.leases.due.lock().peek().map(|due| due.at);
            let wakes = Arc::clone(&shared.leases.returner_wakes);
            drop(shared);
            match next {
                Some(next) => sleep_until(next.min(Instant::now() + LONGEST_PAUSE)).await,
                None => wakes.notified().await,
            }
        }
    }
}

impl Drop for Returner {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            // the runtime has stopped: a task on another one may take over
            shared.leases.has_returner.store(false, Ordering::Release);
        }
    }
}
