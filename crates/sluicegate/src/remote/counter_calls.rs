//! Resets and inspections of counters. If a server is down, only the calls for its counters fail.

use std::{slice, time::Duration};

use futures_util::future::join_all;
use sluicegate_core::{Algorithm, Limit};

use super::{Remote, with_deadline};
use crate::{
    key::Key,
    store::{CounterSnapshot, StoreError},
};

/// The time that `inspect` may take. It is used interactively, and no request waits for it.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The most counters that an error names.
const MAX_NAMED_COUNTERS: usize = 5;

/// The counters of one server, each with its index in the call.
struct ServerCounters {
    server: u64,
    indexes: Vec<usize>,
    counters: Vec<(Key, Limit)>,
}

impl Remote {
    pub(crate) async fn inspect(
        &self,
        counters: &[(Key, Limit)],
        deadline: Option<Duration>,
    ) -> Result<Vec<Option<CounterSnapshot>>, StoreError> {
        let deadline = deadline.map_or(INSPECT_TIMEOUT, |deadline| deadline.min(INSPECT_TIMEOUT));
        let groups = self.by_server(counters);
        let mut outcomes = self.inspect_each(&groups, deadline).await;
        if let [_] = outcomes[..] {
            return outcomes.remove(0);
        }
        if let Some(failed) = failed_counters(&groups, &outcomes) {
            return Err(StoreError::NotRun(format!("no state of {failed}")));
        }
        let mut snapshots = vec![None; counters.len()];
        for (group, found) in groups.iter().zip(outcomes.into_iter().flatten()) {
            for (index, snapshot) in group.indexes.iter().zip(found) {
                snapshots[*index] = snapshot;
            }
        }
        Ok(snapshots)
    }

    /// Deletes a counter, which ends its cached denials, and returns whether it existed.
    pub(crate) async fn reset(
        &self,
        counter: &(Key, Algorithm),
        deadline: Option<Duration>,
    ) -> Result<bool, StoreError> {
        let deadline = self.shared.options.deadline_within(deadline);
        let counters = slice::from_ref(counter);
        let upstream = self.upstreams.for_server(self.shared.store.server(&counter.0));
        let outcome = match upstream.open_breaker() {
            Some(breaker) => Err(breaker.error()),
            None => with_deadline(deadline, self.shared.store.reset(counters)).await,
        };
        self.shared.denials.record_change([&counter.0]);
        self.shared.leases.forget(&counter.0);
        if outcome.is_ok() {
            self.shared.fallback.reset(counters);
        }
        outcome.map(|deleted| deleted > 0)
    }

    fn by_server(&self, counters: &[(Key, Limit)]) -> Vec<ServerCounters> {
        let mut groups: Vec<ServerCounters> = Vec::new();
        for (index, (key, limit)) in counters.iter().enumerate() {
            let server = self.shared.store.server(key);
            let place = groups.iter().position(|group| group.server == server).unwrap_or_else(|| {
                groups.push(ServerCounters { server, indexes: Vec::new(), counters: Vec::new() });
                groups.len() - 1
            });
            groups[place].indexes.push(index);
            groups[place].counters.push((key.clone(), *limit));
        }
        groups
    }

    /// Calls all servers in parallel, except those with an open circuit breaker.
    async fn inspect_each(
        &self,
        groups: &[ServerCounters],
        deadline: Duration,
    ) -> Vec<Result<Vec<Option<CounterSnapshot>>, StoreError>> {
        let calls = groups.iter().map(async |group| {
            let upstream = self.upstreams.for_server(group.server);
            match upstream.open_breaker() {
                Some(breaker) => Err(breaker.error()),
                None => with_deadline(deadline, self.shared.store.inspect(&group.counters)).await,
            }
        });
        join_all(calls).await
    }
}

/// Describes the counters without a result, if there are any.
fn failed_counters<R>(groups: &[ServerCounters], outcomes: &[Result<R, StoreError>]) -> Option<String> {
    let failed = || {
        let outcomes = groups.iter().zip(outcomes);
        outcomes.filter_map(|(group, outcome)| Some((group, outcome.as_ref().err()?)))
    };
    let (_, error) = failed().next()?;
    let keys: Vec<String> = failed()
        .flat_map(|(group, _)| &group.counters)
        .take(MAX_NAMED_COUNTERS)
        .map(|(key, _)| key.to_string())
        .collect();
    let count: usize = failed().map(|(group, _)| group.counters.len()).sum();
    let all: usize = groups.iter().map(|group| group.counters.len()).sum();
    let more = if count > keys.len() { ", …" } else { "" };
    Some(format!("{count} of {all} counters ({}{more}): {error}", keys.join(", ")))
}
