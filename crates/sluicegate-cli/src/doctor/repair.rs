//! Safe fixes: sets a TTL on keys without one, removes orphaned counters.
//!
//! Only keys in sluicegate's format are changed.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use sluicegate::{StoreError, redis::inspect::InspectedServer};
use tokio::time::sleep;

use super::keys::{KeyScan, StrayKeys};
use crate::format;

/// The number of keys fixed per command.
const BATCH: usize = 100;
/// The pause after each batch.
const PAUSE: Duration = Duration::from_millis(5);

/// The counts of fixed keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Repaired {
    /// Keys on which a TTL was set.
    pub(crate) expiring: u64,
    /// Removed counters.
    pub(crate) removed: u64,
}

/// Describes the planned fixes, one line each.
pub(crate) fn plan(keys: &KeyScan) -> Vec<String> {
    let mut lines = Vec::new();
    if !keys.without_ttl.keys.is_empty() {
        let count = format::plural(keys.without_ttl.keys.len() as u64, "key", "keys");
        lines.push(format!("set a TTL on {count}: {}", keys.without_ttl.examples()));
    }
    if !keys.orphans.keys.is_empty() {
        let count = format::plural(keys.orphans.keys.len() as u64, "orphaned counter", "orphaned counters");
        lines.push(format!("remove {count}: {}", keys.orphans.examples()));
    }
    lines
}

/// Applies the fixes.
pub(crate) async fn repair(servers: &[InspectedServer], keys: &KeyScan) -> Result<Repaired, StoreError> {
    let mut repaired = Repaired::default();
    // removed keys need no TTL
    for ((server, _), names) in grouped(&keys.orphans) {
        for names in names.chunks(BATCH) {
            repaired.removed += servers[server].remove(names).await?;
            sleep(PAUSE).await;
        }
    }
    for ((server, ttl), names) in grouped(&keys.without_ttl) {
        for names in names.chunks(BATCH) {
            repaired.expiring += servers[server].set_ttl(names, ttl).await?;
            sleep(PAUSE).await;
        }
    }
    Ok(repaired)
}

/// Groups keys by server and TTL.
fn grouped(strays: &StrayKeys) -> BTreeMap<(usize, Duration), Vec<Vec<u8>>> {
    let mut groups: BTreeMap<(usize, Duration), Vec<Vec<u8>>> = BTreeMap::new();
    for key in &strays.keys {
        groups.entry((key.server, key.ttl)).or_default().push(key.name.clone());
    }
    groups
}
