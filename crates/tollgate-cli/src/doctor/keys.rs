//! The keys of ours that servers hold: how many of which rule, how large, and those that should not be there.
//!
//! Servers are at work: they are asked for a page at a time, with a pause after each, and for no more keys than was said.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use serde::Serialize;
use tokio::time::sleep;
use tollgate::{
    Rule, StoreError,
    key::encoded_rule,
    redis::inspect::{FoundKey, InspectedServer, KeyKind, PAGE},
};

use super::finding::{Finding, Severity, see};
use crate::output::{self, Form, Progress};

/// The pause after each page: a server is asked for at most fifty thousand keys a second.
const PAUSE: Duration = Duration::from_millis(5);
/// How many keys of each rule are measured on each server. Pages come in the order of a hash: the first are as good as any.
const SAMPLE: usize = 20;
/// How many rules are told apart.
const MAX_RULES: usize = 1_000;
/// How many keys that should not be there are remembered, of each kind.
const MAX_LEFTOVERS: usize = 100_000;
/// How many of them are named.
const EXAMPLES: usize = 3;
/// How long a key without an end may live whose rule, and so its window, is not known.
const UNKNOWN_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// What a key lives longer than two windows.
const SLACK: Duration = Duration::from_secs(10);

/// The rules of a configuration, by how they stand in keys.
pub(crate) struct Known(HashMap<String, KnownRule>);

struct KnownRule {
    name: String,
    lifetime: Duration,
}

impl Known {
    pub(crate) fn of(rules: &[Rule]) -> Self {
        let known = |rule: &Rule| {
            let windows = rule.overrides.iter().filter_map(|other| other.window);
            let longest = windows.chain([rule.limit.window()]).max().unwrap_or_default();
            let lifetime = longest * 2 + SLACK;
            (encoded_rule(&rule.name).to_string(), KnownRule { name: rule.name.to_string(), lifetime })
        };
        Self(rules.iter().map(known).collect())
    }
}

/// What was found.
#[derive(Default)]
pub(crate) struct Keys {
    /// About how many keys of any kind were looked at.
    pub(crate) looked_at: u64,
    pub(crate) ours: u64,
    /// Whether all of them were looked at.
    pub(crate) is_complete: bool,
    /// By how the rule stands in keys.
    rules: BTreeMap<String, OfRule>,
    pub(crate) immortal: Leftovers,
    pub(crate) orphans: Leftovers,
    foreign: Leftovers,
    /// Why there is no more.
    pub(crate) trouble: Option<StoreError>,
}

#[derive(Default)]
struct OfRule {
    keys: u64,
    /// Some of them, by server.
    sample: Vec<(usize, Vec<u8>)>,
    sampled: u64,
    bytes: u64,
}

/// Keys that should not be there, or not so.
#[derive(Default)]
pub(crate) struct Leftovers {
    pub(crate) count: u64,
    pub(crate) keys: HashSet<Leftover>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Leftover {
    /// Which server has it.
    pub(crate) server: usize,
    pub(crate) name: Vec<u8>,
    /// How long it may live.
    pub(crate) lifetime: Duration,
}

/// What one rule's counters take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RuleMemory {
    pub(crate) rule: String,
    pub(crate) keys: u64,
    pub(crate) sampled: u64,
    pub(crate) bytes_each: u64,
    pub(crate) bytes: u64,
}

impl Leftovers {
    fn add(&mut self, leftover: Leftover) {
        let has_room = self.keys.len() < MAX_LEFTOVERS;
        if !has_room || self.keys.insert(leftover) {
            self.count += 1;
        }
    }

    pub(crate) fn examples(&self) -> String {
        let mut names: Vec<String> =
            self.keys.iter().map(|key| String::from_utf8_lossy(&key.name).into_owned()).collect();
        names.sort_unstable();
        let more = if self.count > EXAMPLES as u64 { ", …" } else { "" };
        names.truncate(EXAMPLES);
        format!("{}{more}", names.join(", "))
    }
}

impl Keys {
    /// Looks at all keys, or at most `max` of them.
    pub(crate) async fn of(servers: &[InspectedServer], known: Option<&Known>, max: u64, form: Form) -> Self {
        let mut keys = Self { is_complete: true, ..Self::default() };
        let mut total = 0;
        for server in servers {
            // who may not ask for the size may still ask for the keys
            total += server.size().await.unwrap_or(0);
        }
        let progress = Progress::new(form, "keys", total.min(max));
        for (place, server) in servers.iter().enumerate() {
            if let Err(error) = keys.look(place, server, known, max, &progress).await {
                keys.is_complete = false;
                keys.trouble = Some(error);
                break;
            }
        }
        drop(progress);
        keys.looked_at = keys.looked_at.min(total.max(keys.ours));
        if let Err(error) = keys.measure(servers).await {
            keys.trouble.get_or_insert(error);
        }
        keys
    }

    async fn look(
        &mut self,
        place: usize,
        server: &InspectedServer,
        known: Option<&Known>,
        max: u64,
        progress: &Progress,
    ) -> Result<(), StoreError> {
        let mut cursor = Some(0);
        while let Some(at) = cursor {
            if self.looked_at >= max {
                self.is_complete = false;
                return Ok(());
            }
            let page = server.page(at).await?;
            self.looked_at += u64::from(PAGE);
            for key in page.keys {
                self.add(place, key, known);
            }
            progress.is_at(self.looked_at, format!("{} of ours", output::count(self.ours)));
            cursor = page.next;
            sleep(PAUSE).await;
        }
        Ok(())
    }

    fn add(&mut self, server: usize, key: FoundKey, known: Option<&Known>) {
        let FoundKey { name, has_no_ttl, meaning } = key;
        let leftover = |lifetime| Leftover { server, name: name.clone(), lifetime };
        let rule = match meaning {
            None => return self.foreign.add(leftover(Duration::ZERO)),
            Some(KeyKind::Instances) => None,
            Some(KeyKind::Counter { rule, .. }) => Some(rule),
        };
        self.ours += 1;
        let of_config = rule.as_ref().and_then(|rule| known?.0.get(rule));
        if has_no_ttl {
            let lifetime = of_config.map_or(UNKNOWN_LIFETIME, |rule| rule.lifetime);
            self.immortal.add(leftover(lifetime));
        }
        let Some(rule) = rule else { return };
        // those that begin with a mark belong to no rule
        if known.is_some() && of_config.is_none() && !rule.starts_with('!') {
            self.orphans.add(leftover(Duration::ZERO));
        }
        let shown = of_config.map_or(rule, |rule| rule.name.clone());
        let is_known = self.rules.contains_key(&shown) || self.rules.len() < MAX_RULES;
        let of_rule = self.rules.entry(if is_known { shown } else { "others".to_owned() }).or_default();
        of_rule.keys += 1;
        let of_server = of_rule.sample.iter().filter(|(place, _)| *place == server).count();
        if of_server < SAMPLE {
            of_rule.sample.push((server, name));
        }
    }

    /// Asks for the size of the sample.
    async fn measure(&mut self, servers: &[InspectedServer]) -> Result<(), StoreError> {
        for of_rule in self.rules.values_mut() {
            for (place, server) in servers.iter().enumerate() {
                let names = of_rule.sample.iter().filter(|(of, _)| *of == place);
                let names: Vec<Vec<u8>> = names.map(|(_, name)| name.clone()).collect();
                let sizes = server.bytes(&names).await?;
                of_rule.sampled += sizes.len() as u64;
                of_rule.bytes += sizes.iter().sum::<u64>();
                sleep(PAUSE).await;
            }
        }
        Ok(())
    }

    /// What each rule's counters take, the most first.
    pub(crate) fn memory(&self) -> Vec<RuleMemory> {
        let memory = |(rule, of_rule): (&String, &OfRule)| {
            let bytes_each = of_rule.bytes.checked_div(of_rule.sampled).unwrap_or(0);
            RuleMemory {
                rule: rule.clone(),
                keys: of_rule.keys,
                sampled: of_rule.sampled,
                bytes_each,
                bytes: bytes_each * of_rule.keys,
            }
        };
        let mut all: Vec<RuleMemory> = self.rules.iter().map(memory).collect();
        all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.rule.cmp(&b.rule)));
        all
    }

    /// What is to be said of them.
    pub(crate) fn findings(&self, known: Option<&Known>) -> Vec<Finding> {
        let mut findings = Vec::new();
        if let Some(error) = &self.trouble {
            let finding = Finding::unseen("keys", format!("its keys, or not all of them: {error}"));
            findings.push(finding.remedy(
                "run the doctor as a user with +scan +dbsize +pttl +memory|usage",
                see::DOCTORS_USER,
            ));
        } else if !self.is_complete {
            let what = format!("keys beyond the first {}", output::count(self.looked_at));
            findings.push(Finding::unseen("keys", what).remedy("raise --max-keys", see::KEYS));
        } else {
            findings.push(Finding::fine(
                "keys",
                format!("{} of ours", output::several(self.ours, "key", "keys")),
            ));
        }
        findings.push(self.about_immortals());
        findings.extend(self.about_orphans(known));
        if self.foreign.count > 0 {
            let count = output::several(self.foreign.count, "key", "keys");
            let are = if self.foreign.count == 1 { "is" } else { "are" };
            let what = format!("{count} with our prefix that {are} not ours: {}", self.foreign.examples());
            findings.push(
                Finding::advice("foreign-keys", what)
                    .why("somebody else writes where tollgate does; the two may meet one day")
                    .remedy("set store.prefix to one that nobody else has", see::KEYS),
            );
        }
        findings
    }

    fn about_immortals(&self) -> Finding {
        let count = self.immortal.count;
        if count == 0 {
            let severity =
                if self.trouble.is_some() && self.ours == 0 { Severity::Unseen } else { Severity::Fine };
            return Finding::new(severity, "no-ttl", "no key of ours without an end was seen");
        }
        let what = format!(
            "{} of ours without an end: {}",
            output::several(count, "key", "keys"),
            self.immortal.examples()
        );
        Finding::problem("no-ttl", what)
            .why("tollgate gives every key an end; one that lost it (PERSIST, RESTORE, a copy) takes memory for ever")
            .remedy("tollgate doctor --fix gives each an end, and leaves what it counts", see::KEYS)
    }

    fn about_orphans(&self, known: Option<&Known>) -> Option<Finding> {
        known?;
        let count = self.orphans.count;
        if count == 0 {
            return Some(Finding::fine("orphans", "every counter has its rule"));
        }
        let what = format!(
            "{} of rules that the configuration does not have: {}",
            output::several(count, "counter", "counters"),
            self.orphans.examples()
        );
        Some(
            Finding::advice("orphans", what)
                .why("they take memory until they expire, if no other deployment with other rules uses them")
                .remedy("wait until they expire, or tollgate doctor --fix removes them", see::KEYS),
        )
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{Algorithm, Limit, Override};

    use super::*;

    fn counter(name: &str, rule: &str, has_no_ttl: bool) -> FoundKey {
        let meaning = KeyKind::Counter { rule: rule.to_owned(), algorithm: Algorithm::TokenBucket };
        FoundKey { name: name.into(), has_no_ttl, meaning: Some(meaning) }
    }

    fn known() -> Known {
        let limit = Limit::token_bucket(5, Duration::from_secs(60)).unwrap();
        let longer = Override::default().window(Duration::from_secs(3_600));
        Known::of(&[Rule::new("log in", limit).with_override(longer)])
    }

    #[test]
    fn keys_are_told_apart_by_rule_end_and_owner() {
        let (mut keys, known) = (Keys { is_complete: true, ..Keys::default() }, known());
        keys.add(0, counter("a", "log%20in", false), Some(&known));
        keys.add(0, counter("b", "log%20in", true), Some(&known));
        keys.add(0, counter("c", "gone", false), Some(&known));
        // a page may repeat what another had
        keys.add(0, counter("c", "gone", false), Some(&known));
        keys.add(1, counter("d", "!key", true), Some(&known));
        keys.add(1, FoundKey { name: b"e".to_vec(), has_no_ttl: true, meaning: None }, Some(&known));
        keys.add(
            1,
            FoundKey { name: b"f".to_vec(), has_no_ttl: false, meaning: Some(KeyKind::Instances) },
            None,
        );
        let found = |id: &str| {
            let finding = keys.findings(Some(&known)).into_iter().find(|finding| finding.id == id);
            finding.map(|finding| (finding.severity, finding.what))
        };
        let what = |id: &str| found(id).unwrap().1;
        assert_eq!(what("no-ttl"), "2 keys of ours without an end: b, d");
        assert_eq!(what("orphans"), "1 counter of rules that the configuration does not have: c");
        assert_eq!(what("foreign-keys"), "1 key with our prefix that is not ours: e");
        let lifetimes: HashMap<_, _> =
            keys.immortal.keys.iter().map(|key| (key.name.clone(), key.lifetime)).collect();
        assert_eq!(lifetimes[&b"b".to_vec()], Duration::from_secs(7_210), "two of the longest windows");
        assert_eq!(lifetimes[&b"d".to_vec()], UNKNOWN_LIFETIME);
        let rules: Vec<_> = keys.memory().into_iter().map(|of_rule| (of_rule.rule, of_rule.keys)).collect();
        let expected = [("!key", 1), ("gone", 2), ("log in", 2)].map(|(rule, keys)| (rule.to_owned(), keys));
        assert_eq!(rules, expected);
    }

    #[test]
    fn without_a_configuration_nobody_is_an_orphan() {
        let mut keys = Keys { is_complete: true, ..Keys::default() };
        keys.add(0, counter("a", "gone", false), None);
        assert!(keys.findings(None).iter().all(|finding| finding.severity == Severity::Fine));
    }
}
