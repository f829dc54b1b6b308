//! Compares imported rules with a model of envoyproxy/ratelimit's lookup, on random descriptor trees and requests.

use std::{collections::HashMap, fs, path::Path};

use sluicegate::{
    Cost,
    rules::{Effect, RuleSet},
};

use super::{
    convert::{DOMAIN, flattened, rules},
    envoy::{Descriptor, parse},
    toml::toml,
};
use crate::rules::load;

/// The keys of each level. Requests have their entries in the order of the levels.
const KEYS: [[&str; 2]; 3] = [["a", "b"], ["c", "d"], ["e", "f"]];

const TREES: u64 = 40;
const REQUESTS_PER_TREE: usize = 200;

/// envoyproxy/ratelimit's lookup: the amount of the matching limit, and the counter.
fn envoy_lookup(nodes: &[Descriptor], entries: &[(&str, &str)]) -> Option<(u64, String)> {
    let (mut nodes, mut counter) = (nodes, String::new());
    for (at, (key, value)) in entries.iter().enumerate() {
        let exact = nodes.iter().find(|node| flattened(node) == format!("{key}_{value}"));
        let wild = nodes.iter().find(|node| {
            let prefix = node.value().and_then(|pattern| pattern.strip_suffix('*'));
            node.key() == *key && prefix.is_some_and(|prefix| value.starts_with(prefix))
        });
        let rest = nodes.iter().find(|node| node.key() == *key && node.value().is_none());
        let node = exact.or(wild).or(rest)?;
        let counted = if node.is_shared() { node.value().unwrap() } else { value };
        counter.push_str(&format!("{key}={counted};"));
        if at + 1 == entries.len() {
            return node.rate_limit.as_ref().map(|limit| (limit.amount(), counter));
        }
        nodes = node.children();
    }
    None
}

/// A linear congruential generator.
fn next(seed: &mut u64, below: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize % below
}

/// Generates the nodes of one level as YAML. Each limit has a different amount.
fn random_level(seed: &mut u64, depth: usize, amount: &mut u64) -> String {
    let mut nodes = Vec::new();
    for key in KEYS[depth] {
        for value in ["", "x", "y", "xy", "x*", "xy*", "*"] {
            if next(seed, 5) > 1 {
                continue;
            }
            let mut node = format!("key: {key}, value: '{value}'");
            if next(seed, 4) > 0 {
                *amount += 1;
                node.push_str(&format!(", rate_limit: {{unit: day, requests_per_unit: {amount}}}"));
            }
            if value.contains('*') && next(seed, 2) == 0 {
                node.push_str(", share_threshold: true");
            }
            if depth < 2 && next(seed, 2) == 0 {
                node.push_str(&format!(", descriptors: {}", random_level(seed, depth + 1, amount)));
            }
            nodes.insert(next(seed, nodes.len() + 1), format!("{{{node}}}"));
        }
    }
    format!("[{}]", nodes.join(", "))
}

#[test]
fn imported_rules_match_and_count_requests_as_envoy_does() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("sluicegate.toml");
    let (mut matched, mut unmatched) = (0, 0);
    for round in 0..TREES {
        let mut seed = round;
        let yaml = format!("domain: d\ndescriptors: {}", random_level(&mut seed, 0, &mut 0));
        let domain = parse(Path::new("a.yaml"), &yaml).unwrap();
        let imported = rules(&[parse(Path::new("a.yaml"), &yaml).unwrap()]).unwrap();
        fs::write(&file, toml(&[], &imported)).unwrap();
        let config = load(&file).unwrap().unwrap();
        assert_eq!(config.rules.len(), imported.rules.len(), "{yaml}");
        let set = RuleSet::new(config.rules).unwrap();
        let (mut envoy_to_rule, mut rule_to_envoy) = (HashMap::new(), HashMap::new());
        for _ in 0..REQUESTS_PER_TREE {
            let depth = 1 + next(&mut seed, 3);
            let entries: Vec<(&str, &str)> = (0..depth)
                .map(|level| {
                    let key = KEYS[level][next(&mut seed, 2)];
                    (key, ["", "x", "y", "z", "xy", "xyz", "xz"][next(&mut seed, 7)])
                })
                .collect();
            let labels = config.labels.clean(entries.iter().copied().chain([(DOMAIN, "d")])).unwrap();
            let applied = set.matching(&labels, &Cost::ONE.into()).unwrap();
            let by_rules: Vec<_> = applied
                .iter()
                .map(|applied| match &applied.effect {
                    Effect::Limit { key, limit, .. } => (limit.amount(), key.to_string()),
                    effect => panic!("{effect:?}"),
                })
                .collect();
            let by_envoy = envoy_lookup(&domain.descriptors, &entries);
            let context = format!("round {round}: {entries:?} in {yaml}");
            let amounts =
                |limits: &[(u64, String)]| limits.iter().map(|(amount, _)| *amount).collect::<Vec<_>>();
            assert_eq!(amounts(&by_rules), amounts(by_envoy.as_slice()), "{context}");
            let (Some((_, key)), Some((_, counter))) = (by_rules.into_iter().next(), by_envoy) else {
                unmatched += 1;
                continue;
            };
            matched += 1;
            assert_eq!(
                *envoy_to_rule.entry(counter.clone()).or_insert_with(|| key.clone()),
                key,
                "{context}"
            );
            assert_eq!(*rule_to_envoy.entry(key).or_insert_with(|| counter.clone()), counter, "{context}");
        }
    }
    assert!(matched > 1000 && unmatched > 1000, "{matched} requests matched a limit, {unmatched} did not");
}
