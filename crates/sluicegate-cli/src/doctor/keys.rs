//! Scan of sluicegate's keys: number and size per rule, keys without a TTL, unreadable, orphaned and foreign keys.
//!
//! The scan is gentle on production servers: one page at a time, with pauses, up to a maximum number of keys.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use serde::Serialize;
use sluicegate::{
    Override, Rule, StoreError,
    calendar::CalendarUnit,
    redis::inspect::{FoundKey, InspectedServer, KeyKind, PAGE},
    store::encoded_rule,
};
use sluicegate_core::hold::{HOLD_RETENTION, MAX_HOLD_TTL};
use tokio::time::sleep;

use super::{
    finding::{Finding, Severity, see},
    holds::HoldIndexes,
};
use crate::{
    format,
    output::{OutputFormat, Progress},
};

/// The pause after the keys of a rule are measured.
const PAUSE: Duration = Duration::from_millis(5);
/// The number of keys measured per rule and server. Pages are in hash order, so the first keys are a random sample.
const SAMPLE: usize = 20;
/// The maximum number of rules reported separately.
const MAX_RULES: usize = 1_000;
/// The maximum number of stray keys kept, of each kind.
const MAX_STRAY_KEYS: usize = 100_000;
/// The number of example keys in a finding.
const EXAMPLES: usize = 3;
/// The TTL set on a key whose rule, and so its window, is unknown.
const UNKNOWN_RULE_TTL: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// The TTL of a key beyond two windows.
const TTL_SLACK: Duration = Duration::from_secs(10);

/// The TTL set on a key with holds: no hold expires later, and its id is known for a while.
const HOLDS_TTL: Duration = MAX_HOLD_TTL.saturating_add(HOLD_RETENTION).saturating_add(TTL_SLACK);

/// The rules of a configuration, by their encoded names.
pub(crate) struct ConfiguredRules(HashMap<String, ConfiguredRule>);

struct ConfiguredRule {
    name: String,
    ttl: Duration,
}

impl ConfiguredRules {
    pub(crate) fn new(rules: &[Rule]) -> Self {
        let configured = |rule: &Rule| {
            let of_calendar = |other: &Override| other.calendar.unit.map(CalendarUnit::longest);
            let windows = rule.overrides.iter().filter_map(|other| other.window.or(of_calendar(other)));
            let longest = windows.chain([rule.limit.window()]).max().unwrap_or_default();
            let is_windowed = rule.limit.algorithm().properties().has_window;
            let ttl = if is_windowed { longest * 2 + TTL_SLACK } else { HOLDS_TTL };
            (encoded_rule(&rule.name).to_string(), ConfiguredRule { name: rule.name.to_string(), ttl })
        };
        Self(rules.iter().map(configured).collect())
    }
}

/// The result of a scan.
#[derive(Default)]
pub(crate) struct KeyScan {
    /// The approximate number of scanned keys of any kind.
    pub(crate) scanned: u64,
    /// The number of sluicegate's keys.
    pub(crate) own: u64,
    /// Whether all keys were scanned.
    pub(crate) is_complete: bool,
    /// By rule name, encoded if the rule is not configured.
    rules: BTreeMap<String, RuleKeys>,
    /// The indexes of holds.
    pub(crate) holds: HoldIndexes,
    pub(crate) without_ttl: StrayKeys,
    unreadable: StrayKeys,
    pub(crate) orphans: StrayKeys,
    foreign: StrayKeys,
    /// Why the scan is incomplete.
    pub(crate) error: Option<StoreError>,
}

#[derive(Default)]
struct RuleKeys {
    keys: u64,
    /// Sampled keys and their servers.
    sample: Vec<(usize, Vec<u8>)>,
    sampled: u64,
    bytes: u64,
}

/// Keys without a TTL, unreadable, orphaned or foreign keys.
#[derive(Default)]
pub(crate) struct StrayKeys {
    pub(crate) count: u64,
    pub(crate) keys: HashSet<StrayKey>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct StrayKey {
    /// The index of its server.
    pub(crate) server: usize,
    pub(crate) name: Vec<u8>,
    /// The TTL to set.
    pub(crate) ttl: Duration,
}

/// The memory of one rule's counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RuleMemory {
    pub(crate) rule: String,
    pub(crate) keys: u64,
    pub(crate) sampled: u64,
    pub(crate) bytes_each: u64,
    pub(crate) bytes: u64,
}

impl StrayKeys {
    fn add(&mut self, stray: StrayKey) {
        let has_room = self.keys.len() < MAX_STRAY_KEYS;
        if !has_room || self.keys.insert(stray) {
            self.count += 1;
        }
    }

    pub(crate) fn examples(&self) -> String {
        let mut names: Vec<String> =
            self.keys.iter().map(|key| format::printable(&String::from_utf8_lossy(&key.name))).collect();
        names.sort_unstable();
        let more = if self.count > EXAMPLES as u64 { ", …" } else { "" };
        names.truncate(EXAMPLES);
        format!("{}{more}", names.join(", "))
    }
}

/// The name of a rule; encoded if it is not configured.
fn shown_rule(rule: &str, known: Option<&ConfiguredRules>) -> String {
    let configured = known.and_then(|known| known.0.get(rule));
    configured.map_or_else(|| rule.to_owned(), |rule| rule.name.clone())
}

impl KeyScan {
    /// Scans at most `max` keys.
    pub(crate) async fn run(
        servers: &[InspectedServer],
        known: Option<&ConfiguredRules>,
        max: u64,
        format: OutputFormat,
    ) -> Self {
        let mut keys = Self { is_complete: true, ..Self::default() };
        let mut total = 0;
        for server in servers {
            // DBSIZE may not be permitted where SCAN is
            total += server.size().await.unwrap_or(0);
        }
        let progress = Progress::new(format, "keys", total.min(max));
        for (place, server) in servers.iter().enumerate() {
            if let Err(error) = keys.scan_server(place, server, known, max, &progress).await {
                keys.is_complete = false;
                keys.error = Some(error);
                break;
            }
        }
        drop(progress);
        keys.scanned = keys.scanned.min(total.max(keys.own));
        if let Err(error) = keys.measure(servers).await {
            keys.error.get_or_insert(error);
        }
        keys
    }

    async fn scan_server(
        &mut self,
        place: usize,
        server: &InspectedServer,
        known: Option<&ConfiguredRules>,
        max: u64,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let mut pages = server.key_pages();
        while self.scanned < max
            && let Some(keys) = pages.next().await?
        {
            self.scanned += u64::from(PAGE);
            for key in keys {
                self.add(place, key, known);
            }
            progress.update(self.scanned, format!("{} of sluicegate", format::count(self.own)));
        }
        self.is_complete &= pages.is_complete();
        Ok(())
    }

    fn add(&mut self, server: usize, key: FoundKey, known: Option<&ConfiguredRules>) {
        let FoundKey { name, has_no_ttl, is_unreadable, meaning } = key;
        let stray = |ttl| StrayKey { server, name: name.clone(), ttl };
        let rule = match meaning {
            None => return self.foreign.add(stray(Duration::ZERO)),
            Some(KeyKind::Instances | KeyKind::Lease { .. }) => None,
            Some(KeyKind::Holds { rule } | KeyKind::Hold { rule }) if has_no_ttl => {
                self.own += 1;
                let longest =
                    known.and_then(|known| known.0.get(&rule)).map_or(Duration::ZERO, |rule| rule.ttl);
                return self.without_ttl.add(stray(longest.max(HOLDS_TTL)));
            }
            Some(KeyKind::Holds { rule }) => {
                self.own += 1;
                let shown = shown_rule(&rule, known);
                self.holds.add(&shown, server, &name);
                return self.count(&format!("{shown} (holds)"), server, name);
            }
            Some(KeyKind::Hold { rule }) => {
                self.own += 1;
                return self.count(&format!("{} (holds)", shown_rule(&rule, known)), server, name);
            }
            Some(KeyKind::Counter { rule, algorithm }) => {
                if !algorithm.properties().has_window && !is_unreadable {
                    self.holds.add(&shown_rule(&rule, known), server, &name);
                }
                Some(rule)
            }
        };
        self.own += 1;
        let configured = rule.as_ref().and_then(|rule| known?.0.get(rule));
        if has_no_ttl {
            let ttl = configured.map_or(UNKNOWN_RULE_TTL, |rule| rule.ttl);
            self.without_ttl.add(stray(ttl));
        }
        if is_unreadable {
            self.unreadable.add(stray(Duration::ZERO));
        }
        let Some(rule) = rule else { return };
        // names that begin with ! belong to no rule
        if known.is_some() && configured.is_none() && !rule.starts_with('!') {
            self.orphans.add(stray(Duration::ZERO));
        }
        self.count(&shown_rule(&rule, known), server, name);
    }

    /// Counts a key, and keeps it as a sample.
    fn count(&mut self, shown: &str, server: usize, name: Vec<u8>) {
        let is_known = self.rules.contains_key(shown) || self.rules.len() < MAX_RULES;
        let rule_keys = self.rules.entry(if is_known { shown } else { "others" }.to_owned()).or_default();
        rule_keys.keys += 1;
        let of_server = rule_keys.sample.iter().filter(|(place, _)| *place == server).count();
        if of_server < SAMPLE {
            rule_keys.sample.push((server, name));
        }
    }

    /// Measures the memory of the sampled keys.
    async fn measure(&mut self, servers: &[InspectedServer]) -> Result<(), StoreError> {
        for rule_keys in self.rules.values_mut() {
            for (place, server) in servers.iter().enumerate() {
                let names = rule_keys.sample.iter().filter(|(of, _)| *of == place);
                let names: Vec<Vec<u8>> = names.map(|(_, name)| name.clone()).collect();
                let sizes = server.bytes(&names).await?;
                rule_keys.sampled += sizes.len() as u64;
                rule_keys.bytes += sizes.iter().sum::<u64>();
                sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    /// The memory of each rule's counters, largest first.
    pub(crate) fn memory(&self) -> Vec<RuleMemory> {
        let memory = |(rule, rule_keys): (&String, &RuleKeys)| {
            let bytes_each = rule_keys.bytes.checked_div(rule_keys.sampled).unwrap_or(0);
            RuleMemory {
                rule: format::printable(rule),
                keys: rule_keys.keys,
                sampled: rule_keys.sampled,
                bytes_each,
                bytes: bytes_each * rule_keys.keys,
            }
        };
        let mut all: Vec<RuleMemory> = self.rules.iter().map(memory).collect();
        all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.rule.cmp(&b.rule)));
        all
    }

    /// Returns the findings of the scan.
    pub(crate) fn findings(&self, known: Option<&ConfiguredRules>) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Some(error) = &self.error {
            let finding = Finding::unknown("keys", format!("keys not scanned completely: {error}"));
            findings.push(finding.remedy(
                "run the doctor as a user with +scan +dbsize +pttl +getrange +memory|usage",
                see::DOCTORS_USER,
            ));
        } else if !self.is_complete {
            let what = format!("keys beyond the first {} not scanned", format::count(self.scanned));
            findings.push(Finding::unknown("keys", what).remedy("raise --max-keys", see::KEYS));
        } else {
            findings
                .push(Finding::fine("keys", format::plural(self.own, "sluicegate key", "sluicegate keys")));
        }
        findings.push(self.ttl_finding());
        findings.extend(self.unreadable_finding());
        findings.extend(self.orphan_finding(known));
        if self.foreign.count > 0 {
            let count = format::plural(self.foreign.count, "key", "keys");
            let what =
                format!("{count} with sluicegate's prefix but another format: {}", self.foreign.examples());
            findings.push(
                Finding::advice("foreign-keys", what)
                    .why("another application writes keys with sluicegate's prefix; they may collide")
                    .remedy("set store.prefix to a prefix that no other application uses", see::KEYS),
            );
        }
        findings
    }

    fn ttl_finding(&self) -> Finding {
        let count = self.without_ttl.count;
        if count == 0 {
            let severity =
                if self.error.is_some() && self.own == 0 { Severity::Unknown } else { Severity::Fine };
            return Finding::new(severity, "no-ttl", "no sluicegate key without a TTL found");
        }
        let what = format!(
            "{} without a TTL: {}",
            format::plural(count, "sluicegate key", "sluicegate keys"),
            self.without_ttl.examples()
        );
        Finding::problem("no-ttl", what)
            .why("sluicegate sets a TTL on every key; one that lost it (PERSIST, RESTORE, a copy) uses memory forever")
            .remedy("sluicegate doctor --fix sets a TTL and keeps the counts", see::KEYS)
    }

    fn unreadable_finding(&self) -> Option<Finding> {
        let count = self.unreadable.count;
        if count == 0 {
            return None;
        }
        let what = format!(
            "{} cannot be read: {}",
            format::plural(count, "counter", "counters"),
            self.unreadable.examples()
        );
        Some(
            Finding::problem("unreadable", what)
                .why("something other than sluicegate wrote these keys; the failure policies of their rules decide, and the keys are never changed")
                .remedy("delete them (UNLINK), and set store.prefix to a prefix that no other application uses", see::KEYS),
        )
    }

    fn orphan_finding(&self, configured: Option<&ConfiguredRules>) -> Option<Finding> {
        configured?;
        let count = self.orphans.count;
        if count == 0 {
            return Some(Finding::fine("orphans", "every counter belongs to a configured rule"));
        }
        let what = format!(
            "{} of rules that are not configured: {}",
            format::plural(count, "counter", "counters"),
            self.orphans.examples()
        );
        Some(
            Finding::advice("orphans", what)
                .why("unless another deployment with other rules uses them, they waste memory until they expire")
                .remedy(
                    "wait until they expire; sluicegate doctor --config FILE --fix removes those that no longer count",
                    see::KEYS,
                ),
        )
    }
}

#[cfg(test)]
mod tests {
    use sluicegate::{Algorithm, Limit, Override};

    use super::*;

    fn counter(name: &str, rule: &str, has_no_ttl: bool) -> FoundKey {
        let meaning = KeyKind::Counter { rule: rule.to_owned(), algorithm: Algorithm::TokenBucket };
        FoundKey { name: name.into(), has_no_ttl, is_unreadable: false, meaning: Some(meaning) }
    }

    fn known() -> ConfiguredRules {
        let limit = Limit::token_bucket(5, Duration::from_secs(60)).unwrap();
        let longer = Override::default().window(Duration::from_secs(3_600));
        ConfiguredRules::new(&[Rule::new("log in", limit).with_override(longer)])
    }

    #[test]
    fn keys_are_classified_by_rule_ttl_and_owner() {
        let (mut keys, known) = (KeyScan { is_complete: true, ..KeyScan::default() }, known());
        keys.add(0, counter("a", "log%20in", false), Some(&known));
        keys.add(0, counter("b", "log%20in", true), Some(&known));
        keys.add(0, counter("c", "gone", false), Some(&known));
        // SCAN may return a key twice
        keys.add(0, counter("c", "gone", false), Some(&known));
        keys.add(1, counter("d", "!key", true), Some(&known));
        let other = |name: &[u8], has_no_ttl, meaning| FoundKey {
            name: name.to_vec(),
            has_no_ttl,
            is_unreadable: false,
            meaning,
        };
        keys.add(1, other(b"e", true, None), Some(&known));
        keys.add(1, other(b"f", false, Some(KeyKind::Instances)), None);
        let found = |id: &str| {
            let finding = keys.findings(Some(&known)).into_iter().find(|finding| finding.id == id);
            finding.map(|finding| (finding.severity, finding.what))
        };
        let what = |id: &str| found(id).unwrap().1;
        assert_eq!(what("no-ttl"), "2 sluicegate keys without a TTL: b, d");
        assert_eq!(what("orphans"), "1 counter of rules that are not configured: c");
        assert_eq!(what("foreign-keys"), "1 key with sluicegate's prefix but another format: e");
        let ttls: HashMap<_, _> =
            keys.without_ttl.keys.iter().map(|key| (key.name.clone(), key.ttl)).collect();
        assert_eq!(ttls[&b"b".to_vec()], Duration::from_secs(7_210), "two of the longest windows");
        assert_eq!(ttls[&b"d".to_vec()], UNKNOWN_RULE_TTL);
        let rules: Vec<_> =
            keys.memory().into_iter().map(|rule_keys| (rule_keys.rule, rule_keys.keys)).collect();
        let expected = [("!key", 1), ("gone", 2), ("log in", 2)].map(|(rule, keys)| (rule.to_owned(), keys));
        assert_eq!(rules, expected);
    }

    #[test]
    fn without_a_configuration_no_counter_is_orphaned() {
        let mut keys = KeyScan { is_complete: true, ..KeyScan::default() };
        keys.add(0, counter("a", "gone", false), None);
        assert!(keys.findings(None).iter().all(|finding| finding.severity == Severity::Fine));
    }
}
