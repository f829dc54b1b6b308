//! A full memory store is visible in metrics, history and log.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{sync::Arc, time::Duration};

use sluicegate::{
    Cost, Labels, Limit, Limiter, ManualClock, MemoryStore, Rule, Timestamp,
    limiter::{Progress, Request},
    memory::MIN_MAX_MEMORY,
};
use sluicegate_server::{
    engine::{Engine, Transport},
    observe::{history::Second, logs::Settings, overflow::QUIET_SECONDS},
};

use crate::{log_lines::logged, metrics::value};

const WINDOW: Duration = Duration::from_secs(60);

/// More keys than fit into the smallest store.
const FLOOD: u32 = 30_000;

struct SmallServer {
    engine: Engine,
    clock: ManualClock,
}

impl SmallServer {
    fn new() -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
        let store = MemoryStore::new().with_max_memory(MIN_MAX_MEMORY).unwrap().with_clock(clock.clone());
        let rule = Rule::new("per-ip", Limit::sliding_log(3, WINDOW).unwrap()).per(["ip"]);
        Self { engine: Engine::new(Limiter::new(store, [rule]).unwrap()), clock }
    }

    /// Checks keys that were not checked before in this round.
    fn check_new_keys(&self, round: u32, count: u32) {
        for key in 0..count {
            let labels = Labels::new([("ip", format!("{round}:{key}"))]).unwrap();
            let progress = self.engine.start(Transport::Http, &Request::new(labels, Cost::ONE)).unwrap();
            assert!(matches!(progress, Progress::Decided(_)));
        }
    }

    fn record_seconds(&self, count: u32) -> Arc<Second> {
        for _ in 0..count {
            self.engine.observer().record_second(&self.engine.limiter().stats());
        }
        self.engine.observer().history().since(0).pop().unwrap()
    }

    fn metric(&self, name: &str) -> f64 {
        value(&self.engine.metrics(), name)
    }
}

#[test]
fn metrics_and_history_show_how_full_the_store_is_and_which_decisions_are_affected() {
    let server = SmallServer::new();
    server.check_new_keys(0, 10);
    let second = server.record_seconds(1);
    let (max_bytes, bytes) =
        (server.metric("sluicegate_store_max_bytes"), server.metric("sluicegate_store_bytes"));
    assert!(bytes > 0.0 && bytes < max_bytes && max_bytes < MIN_MAX_MEMORY as f64);
    assert_eq!((second.overflow_decisions, second.store_bytes as f64), (0, bytes));
    assert_eq!(server.metric("sluicegate_store_full"), 0.0);
    assert_eq!(server.metric("sluicegate_store_overflow_decisions_total"), 0.0);

    server.check_new_keys(1, FLOOD);
    let second = server.record_seconds(1);
    let stored = server.metric("sluicegate_store_keys");
    assert_eq!(server.metric("sluicegate_store_overflow_decisions_total"), f64::from(FLOOD) + 10.0 - stored);
    assert_eq!(second.overflow_decisions as f64, f64::from(FLOOD) + 10.0 - stored);
    assert!(server.metric("sluicegate_store_bytes") > 0.95 * max_bytes);
    assert_eq!(server.metric("sluicegate_store_full"), 1.0);

    server.clock.advance(2 * WINDOW);
    server.check_new_keys(2, 10);
    assert_eq!(server.record_seconds(QUIET_SECONDS - 1).overflow_decisions, 0);
    assert_eq!(server.metric("sluicegate_store_full"), 1.0);
    server.record_seconds(1);
    assert_eq!(server.metric("sluicegate_store_full"), 0.0);
}

#[test]
fn the_log_has_one_line_at_the_start_and_one_at_the_end_of_each_full_period() {
    let server = SmallServer::new();
    let lines = logged(&Settings::default(), || {
        for round in 0..2 {
            // the store alternates between full and not
            for step in 0..4 {
                server.check_new_keys(10 * round + step, FLOOD);
                server.record_seconds(QUIET_SECONDS - 1);
                server.clock.advance(2 * WINDOW);
            }
            server.record_seconds(QUIET_SECONDS);
        }
    });
    let text = lines.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    for pair in lines.chunks(2) {
        assert!(pair[0].contains("WARN") && pair[0].contains("memory store full"), "{text}");
        assert!(pair[0].contains("raise store.max_memory"), "{text}");
        assert!(pair[1].contains("INFO") && pair[1].contains("no overflow counter used for 60 s"), "{text}");
    }
}
