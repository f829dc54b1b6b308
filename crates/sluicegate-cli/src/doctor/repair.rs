//! Safe fixes: sets a TTL on keys without one, releases expired holds of concurrency counters, removes orphaned counters that no longer
//! count.
//!
//! Only keys in sluicegate's format are changed.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use sluicegate::{StoreError, redis::inspect::InspectedServer};
use tokio::time::sleep;

use super::keys::StrayKeys;
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
    /// Orphaned counters that no longer counted and were removed.
    pub(crate) removed: u64,
    /// Expired holds that were released.
    pub(crate) released: u64,
    /// Concurrency counters whose units were made those of their holds.
    pub(crate) corrected: u64,
}

/// The keys to fix.
pub(crate) struct Repair<'a> {
    pub(crate) without_ttl: &'a StrayKeys,
    /// `None` if orphaned counters must not be removed.
    pub(crate) orphans: Option<&'a StrayKeys>,
    /// Concurrency counters with expired holds, or whose units differ from the sum of their holds: server and key.
    pub(crate) holds: &'a [(usize, Vec<u8>)],
}

impl Repair<'_> {
    /// Describes the planned fixes, one line each.
    pub(crate) fn plan(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.without_ttl.keys.is_empty() {
            let count = format::plural(self.without_ttl.keys.len() as u64, "key", "keys");
            lines.push(format!("set a TTL on {count}: {}", self.without_ttl.examples()));
        }
        if !self.holds.is_empty() {
            let count = format::plural(self.holds.len() as u64, "counter", "counters");
            lines.push(format!("release the expired holds of {count}, and correct wrong units"));
        }
        if let Some(orphans) = self.orphans.filter(|orphans| !orphans.keys.is_empty()) {
            let count = format::plural(orphans.keys.len() as u64, "orphaned counter", "orphaned counters");
            lines.push(format!("of {count}, remove those that no longer count: {}", orphans.examples()));
        }
        lines
    }

    /// Applies the fixes.
    pub(crate) async fn apply(&self, servers: &[InspectedServer]) -> Result<Repaired, StoreError> {
        let mut repaired = Repaired::default();
        // removed keys need no TTL
        for ((server, _), names) in self.orphans.map(grouped).unwrap_or_default() {
            for names in names.chunks(BATCH) {
                repaired.removed += servers[server].remove_expired(names).await?;
                sleep(PAUSE).await;
            }
        }
        for (place, server) in servers.iter().enumerate() {
            let names = self.holds.iter().filter(|(of, _)| *of == place).map(|(_, name)| name.clone());
            let names: Vec<Vec<u8>> = names.collect();
            for names in names.chunks(BATCH) {
                let (released, corrected) = server.repair_holds(names).await?;
                repaired.released += released;
                repaired.corrected += corrected;
                sleep(PAUSE).await;
            }
        }
        for ((server, ttl), names) in grouped(self.without_ttl) {
            for names in names.chunks(BATCH) {
                repaired.expiring += servers[server].set_ttl(names, ttl).await?;
                sleep(PAUSE).await;
            }
        }
        Ok(repaired)
    }
}

/// Groups keys by server and TTL.
fn grouped(strays: &StrayKeys) -> BTreeMap<(usize, Duration), Vec<Vec<u8>>> {
    let mut groups: BTreeMap<(usize, Duration), Vec<Vec<u8>>> = BTreeMap::new();
    for key in &strays.keys {
        groups.entry((key.server, key.ttl)).or_default().push(key.name.clone());
    }
    groups
}
