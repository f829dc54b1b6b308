//! The holds of each rule: live ones, expired ones that are not released or settled yet, and those that cannot be settled.

use std::{
    collections::{BTreeMap, HashSet},
    time::Duration,
};

use serde::Serialize;
use sluicegate::{
    StoreError,
    redis::inspect::{CounterHolds, InspectedServer},
};
use tokio::time::sleep;

use super::finding::{Finding, see};
use crate::format;

/// The maximum number of counters whose holds are read.
const MAX_COUNTERS: usize = 20_000;
/// The number of counters that are read between two pauses.
const BATCH: usize = 50;
const PAUSE: Duration = Duration::from_millis(5);
/// The number of rules named in a finding.
const MAX_RULES: usize = 5;

/// The findings about holds.
pub(crate) const HOLD_FINDINGS: [&str; 5] =
    ["holds", "expired-holds", "unsettled-holds", "lost-hold-records", "hold-units"];

/// The indexes of holds that a scan found.
#[derive(Default)]
pub(crate) struct HoldIndexes {
    /// By rule, as shown: server and key.
    by_rule: BTreeMap<String, HashSet<(usize, Vec<u8>)>>,
    count: usize,
    /// Whether there are more than [`MAX_COUNTERS`].
    is_partial: bool,
}

/// The holds of all counters.
#[derive(Default)]
pub(crate) struct HoldScan {
    pub(crate) rules: Vec<RuleHolds>,
    /// Counters to repair: server and key.
    pub(crate) repairable: Vec<(usize, Vec<u8>)>,
    is_partial: bool,
    error: Option<StoreError>,
}

/// The holds of one rule's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct RuleHolds {
    pub(crate) rule: String,
    /// Counters with holds.
    pub(crate) counters: u64,
    pub(crate) live: u64,
    pub(crate) units: u64,
    /// The age of the oldest live hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) oldest_ms: Option<u64>,
    /// Holds that have expired and not been released, and their units.
    pub(crate) expired: u64,
    pub(crate) expired_units: u64,
    /// How long ago the first of them expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) expired_for_ms: Option<u64>,
    /// Holds that expired in the last minute without being settled, and whose estimate stays charged; and their units.
    pub(crate) unsettled: u64,
    pub(crate) unsettled_units: u64,
    /// Live holds whose records were lost.
    pub(crate) without_record: u64,
    /// The time until the last of them has expired.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) without_record_for_ms: Option<u64>,
    /// Counters whose units are not those of their holds.
    pub(crate) unequal: u64,
    /// Whether a counter has more holds than were read.
    pub(crate) partial: bool,
}

impl HoldIndexes {
    /// Adds the key of an index, once.
    pub(crate) fn add(&mut self, rule: &str, server: usize, name: &[u8]) {
        if self.count == MAX_COUNTERS {
            self.is_partial = true;
            return;
        }
        let indexes = self.by_rule.entry(rule.to_owned()).or_default();
        // a scan may return a key twice
        if indexes.insert((server, name.to_vec())) {
            self.count += 1;
        }
    }
}

impl HoldScan {
    /// Reads the holds of all counters that a scan found.
    pub(crate) async fn run(indexes: &HoldIndexes, servers: &[InspectedServer]) -> Self {
        let mut scan = Self { is_partial: indexes.is_partial, ..Self::default() };
        for (rule, found) in &indexes.by_rule {
            let mut holds = RuleHolds { rule: format::printable(rule), ..RuleHolds::default() };
            if let Err(error) = scan.read(found, servers, &mut holds).await {
                scan.error = Some(error);
                break;
            }
            scan.rules.push(holds);
        }
        scan
    }

    async fn read(
        &mut self,
        found: &HashSet<(usize, Vec<u8>)>,
        servers: &[InspectedServer],
        holds: &mut RuleHolds,
    ) -> Result<(), StoreError> {
        for (place, server) in servers.iter().enumerate() {
            let names = found.iter().filter(|(of, _)| *of == place).map(|(_, name)| name.clone());
            let names: Vec<Vec<u8>> = names.collect();
            for names in names.chunks(BATCH) {
                let (now, all) = server.holds(names).await?;
                for (name, of_counter) in names.iter().zip(all) {
                    holds.add(&of_counter, now.as_micros());
                    let is_wrong = of_counter.expired.count > 0 || of_counter.unequal_units.is_some();
                    if is_wrong && of_counter.is_concurrency {
                        self.repairable.push((place, name.clone()));
                    }
                }
                sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    /// Returns the findings; none if there are no holds.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Some(error) = &self.error {
            let finding = Finding::unknown("holds", format!("holds not read: {error}"));
            findings.push(
                finding.remedy("run the doctor as a user with +zrange +zscore +exists", see::DOCTORS_USER),
            );
        } else if !self.rules.is_empty() {
            findings.push(Finding::fine("holds", self.summary()));
        }
        findings.extend(self.expired());
        findings.extend(self.unsettled());
        findings.extend(self.without_record());
        findings.extend(self.unequal());
        findings
    }

    fn summary(&self) -> String {
        let sum = |of: fn(&RuleHolds) -> u64| self.rules.iter().map(of).sum::<u64>();
        let is_partial = self.is_partial || self.rules.iter().any(|holds| holds.partial);
        let at_least = if is_partial { "at least " } else { "" };
        let live = format::plural(sum(|holds| holds.live), "live hold", "live holds");
        let units = format::plural(sum(|holds| holds.units), "unit", "units");
        let counters = format::plural(sum(|holds| holds.counters), "counter", "counters");
        let oldest = self.rules.iter().filter_map(|holds| holds.oldest_ms).max();
        let oldest = oldest.map(|age| format!(", the oldest made {} ago", format::short_wait(age)));
        format!("{at_least}{live} of {units} in {counters}{}", oldest.unwrap_or_default())
    }

    /// Lists the rules for which `describe` returns a text, the first ones.
    fn list(&self, describe: impl Fn(&RuleHolds) -> Option<String>) -> Option<String> {
        let described = |holds: &RuleHolds| Some(format!("rule {:?}: {}", holds.rule, describe(holds)?));
        let listed: Vec<String> = self.rules.iter().filter_map(described).collect();
        let more = if listed.len() > MAX_RULES { "; …" } else { "" };
        let shown = listed.iter().take(MAX_RULES).cloned().collect::<Vec<_>>().join("; ");
        (!listed.is_empty()).then(|| shown + more)
    }

    fn expired(&self) -> Option<Finding> {
        let what = self.list(|holds| {
            let ago = format::short_wait(holds.expired_for_ms?);
            let count = format::plural(holds.expired, "hold", "holds");
            let units = format::plural(holds.expired_units, "unit", "units");
            Some(format!("{count} of {units} expired, the first {ago} ago, and not released yet"))
        })?;
        Some(
            Finding::advice("expired-holds", what)
                .why("their units still count; clients crash, or do not settle or release their holds")
                .remedy(
                    "each check of a counter releases 16 of them; sluicegate doctor --fix releases those of concurrency rules, \
                     and sluicegate reset those of one counter. Settle or release every hold, or set a shorter ttl",
                    see::HOLDS,
                ),
        )
    }

    fn unsettled(&self) -> Option<Finding> {
        let what = self.list(|holds| {
            let count = format::plural(holds.unsettled, "hold", "holds");
            let units = format::plural(holds.unsettled_units, "unit", "units");
            (holds.unsettled > 0).then(|| format!("{count} of {units} expired without being settled"))
        })?;
        Some(
            Finding::advice("unsettled-holds", what)
                .why("their estimates stay charged; clients crash, do not settle their holds, or take longer than the ttl")
                .remedy(
                    "settle or release every hold, renew the holds of long requests, or set a longer ttl; on_expiry = \"release\" \
                     refunds the estimates of expired holds",
                    see::HOLDS,
                ),
        )
    }

    fn without_record(&self) -> Option<Finding> {
        let what = self.list(|holds| {
            let last = format::short_wait(holds.without_record_for_ms?);
            let count = format::plural(holds.without_record, "live hold", "live holds");
            Some(format!("{count} without a record, the last one for {last} more"))
        })?;
        Some(
            Finding::problem("lost-hold-records", what)
                .why("they cannot be settled, released or renewed, and count until they expire; Redis evicted their records, or \
                      another program deleted them")
                .remedy(
                    "wait until they expire, or run sluicegate reset for their counters; set maxmemory-policy noeviction",
                    see::HOLDS,
                ),
        )
    }

    fn unequal(&self) -> Option<Finding> {
        let what = self.list(|holds| {
            let count = format::plural(holds.unequal, "counter", "counters");
            (holds.unequal > 0).then(|| format!("{count} whose units differ from the sum of the holds"))
        })?;
        Some(
            Finding::problem("hold-units", what)
                .why("the counter admits too few or too many requests; another program changed it")
                .remedy("sluicegate doctor --fix corrects the units; or run sluicegate reset", see::HOLDS),
        )
    }
}

impl RuleHolds {
    fn add(&mut self, of_counter: &CounterHolds, now_us: u64) {
        let CounterHolds { live, expired, unsettled, unequal_units, .. } = of_counter;
        let CounterHolds { without_record, without_record_until_us, .. } = of_counter;
        let later = |longest: Option<u64>, micros: u64| longest.max(Some(micros / 1_000));
        self.counters += 1;
        self.live += live.count;
        self.units = self.units.saturating_add(live.units);
        if live.count > 0 {
            self.oldest_ms = later(self.oldest_ms, now_us.saturating_sub(live.oldest_us));
        }
        self.expired += expired.count;
        self.expired_units = self.expired_units.saturating_add(expired.units);
        if expired.count > 0 {
            self.expired_for_ms = later(self.expired_for_ms, now_us.saturating_sub(expired.first_us));
        }
        self.unsettled += unsettled.count;
        self.unsettled_units = self.unsettled_units.saturating_add(unsettled.units);
        self.without_record += without_record;
        if *without_record > 0 {
            let rest = without_record_until_us.saturating_sub(now_us);
            self.without_record_for_ms = later(self.without_record_for_ms, rest);
        }
        self.unequal += u64::from(unequal_units.is_some());
        self.partial |= of_counter.is_partial;
    }
}
