//! Resets and inspections of counters, with one call per server. A server that is down fails only the calls for its own counters.

use std::time::Duration;

use futures_util::future::join_all;
use sluicegate_core::{Algorithm, Limit};

use super::{Remote, with_deadline};
use crate::{
    key::Key,
    store::{BoxFuture, CounterSnapshot, StoreError},
};

/// The time that `inspect` may take. It is used interactively, and no request waits for it.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The most counters that an error names.
const MAX_NAMED_COUNTERS: usize = 5;

/// The counters of one server, each with its index in the call.
struct ServerCounters<T> {
    server: u64,
    indexes: Vec<usize>,
    counters: Vec<(Key, T)>,
}

/// Why some of the counters of a call have no result.
struct FailedCounters {
    message: String,
    /// Whether a call without a reply may have taken effect.
    is_ambiguous: bool,
}

impl Remote {
    pub(crate) async fn inspect(
        &self,
        counters: &[(Key, Limit)],
        deadline: Option<Duration>,
    ) -> Result<Vec<Option<CounterSnapshot>>, StoreError> {
        let deadline = deadline.map_or(INSPECT_TIMEOUT, |deadline| deadline.min(INSPECT_TIMEOUT));
        let groups = self.by_server(counters);
        let call = |counters| self.shared.store.inspect(counters);
        let mut outcomes = self.call_each(&groups, deadline, call).await;
        if let [_] = outcomes[..] {
            return outcomes.remove(0);
        }
        if let Some(failed) = FailedCounters::find(&groups, &outcomes) {
            return Err(StoreError::NotRun(format!("no state of {}", failed.message)));
        }
        let mut snapshots = vec![None; counters.len()];
        for (group, found) in groups.iter().zip(outcomes.into_iter().flatten()) {
            for (index, snapshot) in group.indexes.iter().zip(found) {
                snapshots[*index] = snapshot;
            }
        }
        Ok(snapshots)
    }

    /// Deletes counters, which ends their cached denials.
    pub(crate) async fn reset(
        &self,
        counters: &[(Key, Algorithm)],
        deadline: Option<Duration>,
    ) -> Result<u64, StoreError> {
        let deadline = self.shared.options.deadline_within(deadline);
        let groups = self.by_server(counters);
        let call = |counters| self.shared.store.reset(counters);
        let mut outcomes = self.call_each(&groups, deadline, call).await;
        self.shared.denials.record_change(counters.iter().map(|(key, _)| key));
        for (group, _) in groups.iter().zip(&outcomes).filter(|(_, outcome)| outcome.is_ok()) {
            self.shared.fallback.reset(&group.counters);
        }
        if let [_] = outcomes[..] {
            return outcomes.remove(0);
        }
        let failed = FailedCounters::find(&groups, &outcomes);
        let is_reset = outcomes.iter().any(Result::is_ok);
        let deleted = outcomes.into_iter().flatten().sum();
        match failed {
            None => Ok(deleted),
            Some(failed) => {
                let message = format!("not reset: {}", failed.message);
                Err(if is_reset || failed.is_ambiguous {
                    StoreError::Ambiguous(message)
                } else {
                    StoreError::NotRun(message)
                })
            }
        }
    }

    fn by_server<T: Copy>(&self, counters: &[(Key, T)]) -> Vec<ServerCounters<T>> {
        let mut groups: Vec<ServerCounters<T>> = Vec::new();
        for (index, (key, value)) in counters.iter().enumerate() {
            let server = self.shared.store.server(key);
            let place = groups.iter().position(|group| group.server == server).unwrap_or_else(|| {
                groups.push(ServerCounters { server, indexes: Vec::new(), counters: Vec::new() });
                groups.len() - 1
            });
            groups[place].indexes.push(index);
            groups[place].counters.push((key.clone(), *value));
        }
        groups
    }

    /// Calls all servers at once, except those with an open circuit breaker.
    async fn call_each<'a, T, R>(
        &self,
        groups: &'a [ServerCounters<T>],
        deadline: Duration,
        call: impl Fn(&'a [(Key, T)]) -> BoxFuture<'a, Result<R, StoreError>>,
    ) -> Vec<Result<R, StoreError>> {
        let calls = groups.iter().map(async |group| {
            let upstream = self.upstreams.for_server(group.server);
            match upstream.open_breaker() {
                Some(breaker) => Err(breaker.error()),
                None => with_deadline(deadline, call(&group.counters)).await,
            }
        });
        join_all(calls).await
    }
}

impl FailedCounters {
    fn find<T, R>(groups: &[ServerCounters<T>], outcomes: &[Result<R, StoreError>]) -> Option<Self> {
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
        Some(Self {
            message: format!("{count} of {all} counters ({}{more}): {error}", keys.join(", ")),
            is_ambiguous: failed().any(|(_, error)| matches!(error, StoreError::Ambiguous(_))),
        })
    }
}
