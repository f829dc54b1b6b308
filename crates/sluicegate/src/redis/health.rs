//! The health of the servers: restarts, failovers and evicted keys, which all lose counters.
//!
//! If a counter is lost, its limit is admitted again. Redis does not report such losses, so the output of `INFO` is
//! compared periodically and after every connect.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{FromRedisValue, aio::ConnectionLike};
use sluicegate_core::Timestamp;
use tokio::time::{Instant, sleep, timeout};

use super::{
    connection::{Established, ServerConnection},
    url::Node,
};
use crate::{
    clock::wall_clock,
    stats::{Skew, StoreStats},
};

/// How often `INFO` is sent.
const PERIOD: Duration = Duration::from_secs(10);
/// How long the reply may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Health counters of all connections of a store.
#[derive(Default)]
pub(super) struct HealthCounters {
    pub(super) connections: AtomicU64,
    pub(super) script_reloads: AtomicU64,
    pub(super) generation_changes: AtomicU64,
    pub(super) evicted_keys: AtomicU64,
    pub(super) unreleased_reservations: AtomicU64,
}

impl HealthCounters {
    /// Returns the counters and the largest clock skew of the connected servers.
    pub(super) fn stats(&self, connections: &[Arc<ServerConnection>]) -> StoreStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (moment, here) = (Instant::now(), wall_clock());
        let skew = |there: Timestamp| {
            let (there, here) = (there.as_micros(), here.as_micros());
            let size = Duration::from_micros(there.abs_diff(here));
            if there > here { Skew::Ahead(size) } else { Skew::Behind(size) }
        };
        let skews = connections.iter().filter_map(|connection| connection.server_time(moment)).map(skew);
        StoreStats {
            connections: read(&self.connections),
            script_reloads: read(&self.script_reloads),
            generation_changes: read(&self.generation_changes),
            evicted_keys: read(&self.evicted_keys),
            unreleased_reservations: read(&self.unreleased_reservations),
            clock_skew: skews.max_by_key(|skew| skew.size()),
            ..StoreStats::default()
        }
    }

    pub(super) fn add(count: &AtomicU64, more: u64) {
        count.fetch_add(more, Ordering::Relaxed);
    }
}

/// The part of `INFO` that shows lost counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ServerInfo {
    run_id: String,
    evicted_keys: u64,
    evicts_any_key: bool,
}

impl ServerInfo {
    /// Parses the reply of `INFO`.
    fn parse(info: &str) -> Option<Self> {
        let field = |name: &str| {
            info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim_end)
        };
        Some(Self {
            run_id: field("run_id")?.to_owned(),
            evicted_keys: field("evicted_keys").and_then(|count| count.parse().ok()).unwrap_or(0),
            evicts_any_key: field("maxmemory_policy").is_some_and(|policy| policy != "noeviction")
                && field("maxmemory").is_some_and(|bytes| bytes != "0"),
        })
    }

    /// Counts and logs the changes since the previous information.
    pub(super) fn record(self, before: Option<Self>, node: &Node, counters: &HealthCounters) -> Self {
        match &before {
            Some(before) if before.run_id != self.run_id => {
                HealthCounters::add(&counters.generation_changes, 1);
                tracing::warn!(%node, "Redis restarted or failed over; counters may be lost");
            }
            Some(before) if before.evicted_keys < self.evicted_keys => {
                let evicted = self.evicted_keys - before.evicted_keys;
                HealthCounters::add(&counters.evicted_keys, evicted);
                tracing::warn!(%node, evicted, "Redis evicted keys and lost counters; increase its maxmemory");
            }
            _ => {}
        }
        if self.evicts_any_key && before.is_none_or(|before| !before.evicts_any_key) {
            tracing::warn!(%node, "Redis may evict counters; set maxmemory-policy to noeviction");
        }
        self
    }
}

/// Sends `INFO` periodically as long as this connection is the current one.
pub(super) async fn watch(connection: Weak<ServerConnection>, established: Arc<Established>) {
    let mut requests = established.connection.clone();
    let info = redis::cmd("INFO");
    loop {
        let reply = timeout(ANSWER_TIMEOUT, requests.req_packed_command(&info)).await;
        let Some(connection) = connection.upgrade().filter(|connection| connection.is_current(&established))
        else {
            return;
        };
        // no information if the user lacks the permission or the server does not answer now
        let info = reply.ok().and_then(Result::ok).and_then(|reply| String::from_redis_value(reply).ok());
        if let Some(info) = info.as_deref().and_then(ServerInfo::parse) {
            connection.record_info(&established, info);
        }
        drop(connection);
        sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(run_id: &str, evicted_keys: u64) -> ServerInfo {
        let info = format!(
            "# Server\r\nrun_id:{run_id}\r\n# Memory\r\nmaxmemory:1\r\nmaxmemory_policy:allkeys-lru\r\n\
             # Stats\r\nevicted_keys:{evicted_keys}\r\n"
        );
        ServerInfo::parse(&info).unwrap()
    }

    #[test]
    fn another_server_and_evicted_keys_are_counted() {
        let (counters, node) = (HealthCounters::default(), Node { host: "h".to_owned(), port: 1 });
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let mut last = info("a", 7).record(None, &node, &counters);
        assert!(last.evicts_any_key);
        for (run_id, evicted, changes, keys) in
            [("a", 7, 0, 0), ("a", 9, 0, 2), ("b", 3, 1, 2), ("b", 4, 1, 3)]
        {
            last = info(run_id, evicted).record(Some(last), &node, &counters);
            assert_eq!((read(&counters.generation_changes), read(&counters.evicted_keys)), (changes, keys));
        }
        assert_eq!(ServerInfo::parse("NOPERM"), None);
    }
}
