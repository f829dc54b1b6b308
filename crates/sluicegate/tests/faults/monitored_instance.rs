//! Instances that check the same counter repeatedly, and a record of their decisions.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sluicegate::{
    Decision, Labels, Limit, Limiter, OnStoreFailure, RedisStore, Rule, Source, redis::RedisSettings,
};
use sluicegate_testkit::{
    oracle::{Admitted, window_violation},
    wait,
};
use tokio::{task::JoinSet, time::Instant};

use crate::{
    machine_pauses,
    scenario::{LONGEST_CALL, OPTIONS, admitted},
};

/// Limit of all instances together per window.
pub(crate) const AMOUNT: u64 = 50;
pub(crate) const WINDOW: Duration = Duration::from_secs(2);
/// Number of callers of an instance.
const CALLERS: usize = 3;
const PAUSE: Duration = Duration::from_millis(4);

/// The decisions of one instance; all times since the origin.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) admitted: Vec<Admitted>,
    /// Times of decisions by the store.
    pub(crate) decided: Vec<Duration>,
    /// Times and errors of other decisions.
    pub(crate) failed: Vec<(Duration, String)>,
    pub(crate) longest: Duration,
}

/// An instance with a record of its decisions.
#[derive(Clone)]
pub(crate) struct MonitoredInstance {
    origin: Instant,
    /// Total machine pauses at the start.
    total_pause: Duration,
    record: Arc<Mutex<Record>>,
    stop: Arc<AtomicBool>,
}

impl MonitoredInstance {
    pub(crate) fn new(origin: Instant) -> Self {
        Self {
            origin,
            total_pause: machine_pauses::total_pause(),
            record: Arc::default(),
            stop: Arc::default(),
        }
    }

    /// Checks until it is stopped. The failure policy is `closed`, so everything that is admitted was charged.
    pub(crate) async fn run(&self, url: &str, settings: &RedisSettings) {
        let store = RedisStore::connect_with(url, settings).await.unwrap();
        let limit = Limit::sliding_log(AMOUNT, WINDOW).unwrap();
        let rule = Rule::new("shared", limit).on_store_failure(OnStoreFailure::Closed);
        let limiter = Limiter::builder().store(store).rules([rule]).options(OPTIONS).build().unwrap();
        let mut callers = JoinSet::new();
        for _ in 0..CALLERS {
            let (watched, limiter) = (self.clone(), limiter.clone());
            callers.spawn(async move { watched.call(&limiter).await });
        }
        callers.join_all().await;
    }

    async fn call(&self, limiter: &Limiter) {
        let labels = Labels::new([("any", "body")]).unwrap();
        while !self.stop.load(Ordering::Relaxed) {
            let sent = Instant::now();
            let decision = limiter.check(&labels, 1).await.unwrap();
            self.note(admitted(self.origin, sent), decision);
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn note(&self, call: Admitted, decision: Decision) {
        let mut record = self.record();
        record.longest = record.longest.max(call.received - call.sent);
        match decision.source {
            Source::Store => {
                record.decided.push(call.received);
                if decision.is_allowed() {
                    record.admitted.push(call);
                }
            }
            // A cached denial.
            Source::Cache => assert!(!decision.is_allowed()),
            source => {
                assert_eq!((source, decision.is_allowed()), (Source::Closed, false));
                record.failed.push((call.received, decision.failure.unwrap().to_string()));
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until the first decision by the store after this time, and returns when it was.
    pub(crate) fn wait_until_decided_since(&self, moment: Duration) -> Duration {
        wait::for_some("the store decides", wait::PATIENCE, || {
            self.record().decided.iter().copied().find(|decided| *decided > moment)
        })
    }
}

/// Asserts that all instances together admitted at most `most` in any window, that no call took too long, and that no
/// call failed because of a replica.
pub(crate) fn assert_bound(instances: &[&MonitoredInstance], most: u64) {
    let mut all = Vec::new();
    for instance in instances {
        let record = instance.record();
        all.extend_from_slice(&record.admitted);
        let longest = LONGEST_CALL + (machine_pauses::total_pause() - instance.total_pause);
        assert!(record.longest <= longest, "a call took {:?}", record.longest);
        let replica = record.failed.iter().find(|(_, reason)| reason.contains("READONLY"));
        assert_eq!(replica, None);
    }
    assert!(all.len() as u64 > AMOUNT, "only {} were admitted", all.len());
    if let Some(violation) = window_violation(&all, most, WINDOW) {
        panic!("{violation}");
    }
}
