//! The results of the periodic [scan](crate::key_scan) of the keys in Redis.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The keys that a scan has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCounts {
    /// Keys of sluicegate.
    pub keys: u64,
    /// Those of them without a TTL, which never expire.
    pub without_ttl: u64,
}

/// The result of the last scan.
#[derive(Debug, Default)]
pub struct KeyScans {
    keys: AtomicU64,
    without_ttl: AtomicU64,
    is_failed: AtomicBool,
}

impl KeyScans {
    /// Records a scan.
    pub fn succeeded(&self, counts: KeyCounts) {
        self.keys.store(counts.keys, Relaxed);
        self.without_ttl.store(counts.without_ttl, Relaxed);
        self.is_failed.store(false, Relaxed);
    }

    /// Records a scan that did not examine all servers; the counts of the previous one stay.
    pub fn failed(&self) {
        self.is_failed.store(true, Relaxed);
    }

    /// The counts of the last successful scan; 0 before the first.
    pub fn counts(&self) -> KeyCounts {
        KeyCounts { keys: self.keys.load(Relaxed), without_ttl: self.without_ttl.load(Relaxed) }
    }

    /// Whether the last scan failed.
    pub fn is_failed(&self) -> bool {
        self.is_failed.load(Relaxed)
    }
}
