//! What is noticed of servers beside their answers: that one is not the one it was, and that keys were evicted.
//!
//! A counter that is lost admits its quota once more. Redis does not say so by itself; what it says about itself when
//! asked shows it, every now and then and whenever a connection is made.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{FromRedisValue, aio::ConnectionLike};
use tokio::time::{Instant, sleep, timeout};
use tollgate_core::Timestamp;

use super::{
    link::{Link, Live},
    url::Node,
};
use crate::{
    clock::wall_clock,
    stats::{Skew, StoreStats},
};

/// How often a server is asked about itself.
const PERIOD: Duration = Duration::from_secs(10);
/// How long it may take to tell.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// What all links of a store count together.
#[derive(Default)]
pub(super) struct Notes {
    pub(super) connections: AtomicU64,
    pub(super) script_reloads: AtomicU64,
    pub(super) generation_changes: AtomicU64,
    pub(super) evicted_keys: AtomicU64,
}

impl Notes {
    /// What was noted, and how far the clocks are off now to which these links lead.
    pub(super) fn stats(&self, links: &[Arc<Link>]) -> StoreStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (moment, here) = (Instant::now(), wall_clock());
        let skew = |there: Timestamp| {
            let (there, here) = (there.as_micros(), here.as_micros());
            let size = Duration::from_micros(there.abs_diff(here));
            if there > here { Skew::Ahead(size) } else { Skew::Behind(size) }
        };
        let skews = links.iter().filter_map(|link| link.on_server(moment)).map(skew);
        StoreStats {
            connections: read(&self.connections),
            script_reloads: read(&self.script_reloads),
            generation_changes: read(&self.generation_changes),
            evicted_keys: read(&self.evicted_keys),
            clock_skew: skews.max_by_key(|skew| skew.size()),
            ..StoreStats::default()
        }
    }

    pub(super) fn add(count: &AtomicU64, more: u64) {
        count.fetch_add(more, Ordering::Relaxed);
    }
}

/// What a server said about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct About {
    run_id: String,
    evicted_keys: u64,
    evicts_any_key: bool,
}

impl About {
    /// Reads the reply of `INFO`.
    fn read(info: &str) -> Option<Self> {
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

    /// Notes what has changed since the server was last asked, and says it in the log.
    pub(super) fn note(self, before: Option<Self>, node: &Node, notes: &Notes) -> Self {
        match &before {
            Some(before) if before.run_id != self.run_id => {
                Notes::add(&notes.generation_changes, 1);
                tracing::warn!(%node, "Redis restarted or is another server now: counters may be lost");
            }
            Some(before) if before.evicted_keys < self.evicted_keys => {
                let evicted = self.evicted_keys - before.evicted_keys;
                Notes::add(&notes.evicted_keys, evicted);
                tracing::warn!(%node, evicted, "Redis evicted keys: counters are lost, give it more memory");
            }
            _ => {}
        }
        if self.evicts_any_key && before.is_none_or(|before| !before.evicts_any_key) {
            tracing::warn!(%node, "Redis may evict counters: set its maxmemory-policy to noeviction");
        }
        self
    }
}

/// Asks a server about itself for as long as this connection is the link's.
pub(super) async fn watch(link: Weak<Link>, mut live: Live) {
    let info = redis::cmd("INFO");
    loop {
        let reply = timeout(ANSWER_TIMEOUT, live.connection.req_packed_command(&info)).await;
        let Some(link) = link.upgrade().filter(|link| link.is_current(&live)) else { return };
        // a user who may not ask, or a server that does not answer now, tells nothing
        let about = reply.ok().and_then(Result::ok).and_then(|reply| String::from_redis_value(reply).ok());
        if let Some(about) = about.as_deref().and_then(About::read) {
            link.learn(&live, about);
        }
        drop(link);
        sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(run_id: &str, evicted_keys: u64) -> About {
        let info = format!(
            "# Server\r\nrun_id:{run_id}\r\n# Memory\r\nmaxmemory:1\r\nmaxmemory_policy:allkeys-lru\r\n\
             # Stats\r\nevicted_keys:{evicted_keys}\r\n"
        );
        About::read(&info).unwrap()
    }

    #[test]
    fn another_server_and_evicted_keys_are_noted() {
        let (notes, node) = (Notes::default(), Node { host: "h".to_owned(), port: 1 });
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let mut last = about("a", 7).note(None, &node, &notes);
        assert!(last.evicts_any_key);
        for (run_id, evicted, changes, keys) in
            [("a", 7, 0, 0), ("a", 9, 0, 2), ("b", 3, 1, 2), ("b", 4, 1, 3)]
        {
            last = about(run_id, evicted).note(Some(last), &node, &notes);
            assert_eq!((read(&notes.generation_changes), read(&notes.evicted_keys)), (changes, keys));
        }
        assert_eq!(About::read("NOPERM"), None);
    }
}
