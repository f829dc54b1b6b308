//! Retries, in the background, releases of reservations that did not run.
//!
//! A refund is retried only if its last attempt is known not to have run: it was not sent, or Redis replied with an
//! error. If the reply was lost, it is abandoned, and the units may count until their window ends. Reverting a hold has an effect only
//! once, so it is always retried.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};

use super::Cluster;
use crate::{
    check::Check,
    redis::{health::HealthCounters, script::CallTimes},
    store::StoreError,
};

/// The maximum number of releases that are retried at a time; further ones are abandoned.
const MAX_PENDING: usize = 1024;
/// The maximum number of retries of a release, over about a minute.
const MAX_ATTEMPTS: u32 = 36;
/// The pause before the first retry. It doubles after each one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two retries.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Admits [`MAX_PENDING`] releases.
pub(super) struct PendingReleases(Arc<Semaphore>);

impl Default for PendingReleases {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_PENDING)))
    }
}

/// A refund of reserved units on one slot, or the reversal of a hold that another slot denied.
pub(super) struct Release {
    pub(super) slot: u16,
    pub(super) refund: Check,
    /// When the counters have no usage left.
    pub(super) until: Instant,
}

/// Whether a release can be sent again after an error: it changed nothing, or has an effect only once.
pub(super) fn may_repeat(release: &Check, error: &StoreError) -> bool {
    release.hold().is_some() || matches!(error, StoreError::NotRun(_) | StoreError::Rejected { .. })
}

impl Cluster {
    /// Retries releases in the background while their counters have usage, within the bounds of this module.
    pub(super) fn release_later(self: &Arc<Self>, prefix: &str, times: CallTimes, releases: Vec<Release>) {
        let count = u32::try_from(releases.len()).unwrap_or(u32::MAX);
        let Ok(permit) = Arc::clone(&self.pending_releases.0).try_acquire_many_owned(count) else {
            self.record_unreleased(releases.len());
            return;
        };
        let (cluster, prefix) = (Arc::clone(self), prefix.to_owned());
        tokio::spawn(async move {
            let given_up = cluster.release(&prefix, times, releases).await;
            cluster.record_unreleased(given_up);
            drop(permit);
        });
    }

    /// Returns how many releases were abandoned.
    async fn release(self: &Arc<Self>, prefix: &str, times: CallTimes, mut pending: Vec<Release>) -> usize {
        let mut given_up = 0;
        let mut pause = FIRST_PAUSE;
        for _ in 0..MAX_ATTEMPTS {
            sleep(pause).await;
            pause = LONGEST_PAUSE.min(pause * 2);
            let now = Instant::now();
            given_up += pending.extract_if(.., |release| now >= release.until).count();
            let mut by_slot: BTreeMap<u16, Vec<(Release, Check)>> = BTreeMap::new();
            for release in pending.drain(..) {
                let refund = release.refund.clone();
                by_slot.entry(release.slot).or_default().push((release, refund));
            }
            for (release, _, outcome) in self.decide_by_slot(prefix, by_slot, times).await {
                match outcome {
                    Ok(_) => {}
                    Err(error) if may_repeat(&release.refund, &error) => pending.push(release),
                    Err(_) => given_up += 1,
                }
            }
            if pending.is_empty() {
                break;
            }
        }
        given_up + pending.len()
    }

    pub(super) fn record_unreleased(&self, count: usize) {
        let count = u64::try_from(count).unwrap_or(u64::MAX);
        HealthCounters::add(&self.connector.health().unreleased_reservations, count);
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_core::{Cost, Limit, Operation, Terms};

    use super::*;
    use crate::{
        RedisStore,
        check::Tier,
        key::Key,
        redis::{Backend, cluster::slots::slot_of},
        store::RemoteStore,
    };

    #[tokio::test(start_paused = true)]
    async fn pending_releases_are_bounded_in_number_and_time() {
        let store = RedisStore::connect_later("redis-cluster://127.0.0.1:1").unwrap();
        let Backend::Cluster(cluster) = &store.backend else { panic!("a Cluster has been configured") };
        let limit = Limit::sliding_log(10, Duration::from_secs(3_600)).unwrap();
        let key = Key::without_rule("k").unwrap();
        let tier = Tier { key: key.clone(), terms: Terms::new(limit, Cost::ONE) };
        let refund = Check::new(Operation::Refund { at: None }, vec![tier]).unwrap();
        let releases = |count: usize, lasting: Duration| {
            let until = Instant::now() + lasting;
            (0..count).map(|_| Release { slot: slot_of(&key), refund: refund.clone(), until }).collect()
        };
        let release = |count, lasting| {
            cluster.release_later(&store.prefix, CallTimes::default(), releases(count, lasting));
        };
        let given_up = || usize::try_from(store.stats().unreleased_reservations).unwrap();
        let hour = Duration::from_secs(3_600);

        release(MAX_PENDING - 1, hour);
        release(2, hour);
        assert_eq!(given_up(), 2, "too many are pending");
        release(1, Duration::from_secs(1));
        sleep(Duration::from_secs(5)).await;
        assert_eq!(given_up(), 3, "its usage has expired");
        sleep(Duration::from_secs(600)).await;
        assert_eq!(given_up(), MAX_PENDING + 2, "no attempts are left");
        release(MAX_PENDING, hour);
        assert_eq!(given_up(), MAX_PENDING + 2, "none is pending any more");
    }
}
