//! What can be mended without harm: our keys that never expire get an end, counters of rules that are gone go.
//!
//! Only keys that have the form of ours are ever touched.

use std::{collections::BTreeMap, time::Duration};

use serde::Serialize;
use tokio::time::sleep;
use tollgate::{StoreError, redis::inspect::InspectedServer};

use super::keys::{Keys, Leftovers};
use crate::output;

/// How many keys are mended at once.
const BATCH: usize = 100;
/// The pause after each batch.
const PAUSE: Duration = Duration::from_millis(5);

/// What was mended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Repaired {
    /// Keys that have an end now.
    pub(crate) expiring: u64,
    /// Counters that are gone now.
    pub(crate) removed: u64,
}

/// What would be done, one line each; nothing if nothing is to be.
pub(crate) fn plan(keys: &Keys) -> Vec<String> {
    let mut lines = Vec::new();
    if !keys.immortal.keys.is_empty() {
        let count = output::count(keys.immortal.keys.len() as u64);
        lines
            .push(format!("give an end to {count} of our keys that have none: {}", keys.immortal.examples()));
    }
    if !keys.orphans.keys.is_empty() {
        let count = output::several(keys.orphans.keys.len() as u64, "counter", "counters");
        lines.push(format!("remove {count} of rules that are gone: {}", keys.orphans.examples()));
    }
    lines
}

/// Does it.
pub(crate) async fn repair(servers: &[InspectedServer], keys: &Keys) -> Result<Repaired, StoreError> {
    let mut repaired = Repaired::default();
    // first what is removed: it needs no end
    for ((server, _), names) in grouped(&keys.orphans) {
        for names in names.chunks(BATCH) {
            repaired.removed += servers[server].remove(names).await?;
            sleep(PAUSE).await;
        }
    }
    for ((server, lifetime), names) in grouped(&keys.immortal) {
        for names in names.chunks(BATCH) {
            repaired.expiring += servers[server].set_ttl(names, lifetime).await?;
            sleep(PAUSE).await;
        }
    }
    Ok(repaired)
}

/// By server, and by how long they may live.
fn grouped(leftovers: &Leftovers) -> BTreeMap<(usize, Duration), Vec<Vec<u8>>> {
    let mut groups: BTreeMap<(usize, Duration), Vec<Vec<u8>>> = BTreeMap::new();
    for key in &leftovers.keys {
        groups.entry((key.server, key.lifetime)).or_default().push(key.name.clone());
    }
    groups
}
