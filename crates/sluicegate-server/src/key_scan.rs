//! A periodic scan of the keys in Redis for keys without a TTL, which would use memory forever.
//!
//! sluicegate sets a TTL on every key; another program may remove it (`PERSIST`, `RESTORE`, a copy). The scan is off unless
//! `store.key_scan_interval` is set. It does not interfere with decisions: it has its own connections, reads one page at a time with a
//! pause in between, and ends after [`MAX_KEYS`].

use std::{convert::Infallible, time::Duration};

use sluicegate::{
    StoreError, random,
    redis::{
        RedisSettings, RedisSetupError,
        inspect::{FoundKey, Inspection, PAGE},
    },
};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::{
    config::StoreSettings,
    observe::key_scans::{KeyCounts, KeyScans},
    store::StoreUrl,
};

/// The most keys of any kind that one scan examines, over all servers. Pages are in hash order, so the first keys are a random sample.
pub const MAX_KEYS: u64 = 1_000_000;

/// The first scan starts within this part of the interval, so that instances that start together do not scan at the same time.
const FIRST_SCAN_SHARE: u32 = 10;

/// Scans the keys of one store.
pub struct KeyScanner {
    url: String,
    redis: RedisSettings,
    prefix: String,
    interval: Duration,
}

/// Why a scan failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyScanError {
    /// No server is reachable.
    #[error(transparent)]
    Connect(#[from] RedisSetupError),
    /// A server of a Cluster is not reachable.
    #[error("{address} is unreachable: {reason}")]
    Unreachable {
        /// Its address.
        address: String,
        /// The error.
        reason: String,
    },
    /// The user of sluicegate may not scan.
    #[error("{0}; grant the Redis user +scan +pttl, or remove store.key_scan_interval")]
    Permission(StoreError),
    /// A command failed.
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for KeyScanError {
    fn from(error: StoreError) -> Self {
        match &error {
            StoreError::Rejected { code, .. } if code == "NOPERM" => Self::Permission(error),
            _ => Self::Store(error),
        }
    }
}

impl KeyScanner {
    /// Creates the scanner of these settings, if they enable it.
    pub fn new(settings: &StoreSettings) -> Option<Self> {
        let StoreSettings { url: StoreUrl::Redis(url), key_scan_interval: Some(interval), .. } = settings
        else {
            return None;
        };
        let (redis, prefix) = (settings.redis.clone(), settings.prefix.clone());
        Some(Self { url: url.clone(), redis, prefix, interval: *interval })
    }

    /// Scans periodically until the future is dropped.
    pub async fn run(&self, scans: &KeyScans) -> Infallible {
        sleep(self.interval.mul_f64(random() as f64 / u64::MAX as f64) / FIRST_SCAN_SHARE).await;
        let mut interval = interval(self.interval);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.scan(scans).await;
        }
    }

    /// Scans once, and records and logs the result.
    pub async fn scan(&self, scans: &KeyScans) {
        let before = scans.counts().without_ttl;
        match self.count_keys(MAX_KEYS).await {
            Ok(counts) => {
                scans.succeeded(counts);
                match counts.without_ttl {
                    0 if before > 0 => tracing::info!("every scanned key in Redis has a TTL again"),
                    count @ 1.. if before == 0 => tracing::warn!(
                        "keys in Redis without a TTL, which never expire: {count}; run sluicegate doctor --fix to set one"
                    ),
                    _ => {}
                }
            }
            Err(error) => {
                scans.failed();
                tracing::warn!("key scan failed: {error}");
            }
        }
    }

    /// Examines at most `max_keys` keys, the same number on each server.
    ///
    /// # Errors
    /// If a server is unreachable or rejects a command.
    pub async fn count_keys(&self, max_keys: u64) -> Result<KeyCounts, KeyScanError> {
        let Inspection { servers, away, .. } = Inspection::of(&self.url, &self.redis, &self.prefix).await?;
        if let Some((address, reason)) = away.into_iter().next() {
            return Err(KeyScanError::Unreachable { address, reason });
        }
        let max_keys_per_server = max_keys / (servers.len() as u64).max(1);
        let mut counts = KeyCounts::default();
        for server in &servers {
            let (mut pages, mut scanned) = (server.key_pages(), 0);
            while scanned < max_keys_per_server
                && let Some(keys) = pages.next().await?
            {
                scanned += u64::from(PAGE);
                counts.add(&keys);
            }
        }
        Ok(counts)
    }
}

impl KeyCounts {
    /// Adds the keys of sluicegate; others with the same prefix are ignored.
    fn add(&mut self, keys: &[FoundKey]) {
        for key in keys.iter().filter(|key| key.meaning.is_some()) {
            self.keys += 1;
            self.without_ttl += u64::from(key.has_no_ttl);
        }
    }
}
