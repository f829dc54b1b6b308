//! The rules against what they were made of: random trees and requests, looked up as the original does and matched here.

use std::{collections::HashMap, fs, path::Path};

use tollgate::{Cost, RuleSet, rules::Effect};

use super::{
    envoy::{Descriptor, parse},
    tree::{DOMAIN, flattened, rules},
    write::toml,
};
use crate::rules::load;

/// The keys of each level: requests have theirs in the order of the levels.
const KEYS: [[&str; 2]; 3] = [["a", "b"], ["c", "d"], ["e", "f"]];

/// How many trees are tried, and how many requests of each.
const ROUNDS: u64 = 40;
const REQUESTS: usize = 200;

/// What the original does with the entries of a request: the limit it meets, and the counter.
fn looked_up(nodes: &[Descriptor], entries: &[(&str, &str)]) -> Option<(u64, String)> {
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
        nodes = node.below();
    }
    None
}

/// The next of a row of numbers that look random.
fn next(seed: &mut u64, below: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize % below
}

/// The nodes of one level, as YAML. Each limit has an amount of its own.
fn grown(seed: &mut u64, depth: usize, amount: &mut u64) -> String {
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
                node.push_str(&format!(", descriptors: {}", grown(seed, depth + 1, amount)));
            }
            nodes.insert(next(seed, nodes.len() + 1), format!("{{{node}}}"));
        }
    }
    format!("[{}]", nodes.join(", "))
}

#[test]
fn requests_meet_the_rule_of_the_node_that_they_meet_there_and_are_counted_as_there() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("tollgate.toml");
    let (mut met, mut missed) = (0, 0);
    for round in 0..ROUNDS {
        let mut seed = round;
        let yaml = format!("domain: d\ndescriptors: {}", grown(&mut seed, 0, &mut 0));
        let domain = parse(Path::new("a.yaml"), &yaml).unwrap();
        let imported = rules(&[parse(Path::new("a.yaml"), &yaml).unwrap()]).unwrap();
        fs::write(&file, toml(&[], &imported)).unwrap();
        let config = load(&file).unwrap().unwrap();
        assert_eq!(config.rules.len(), imported.rules.len(), "{yaml}");
        let set = RuleSet::new(config.rules).unwrap();
        let (mut there_to_here, mut here_to_there) = (HashMap::new(), HashMap::new());
        for _ in 0..REQUESTS {
            let depth = 1 + next(&mut seed, 3);
            let entries: Vec<(&str, &str)> = (0..depth)
                .map(|level| {
                    let key = KEYS[level][next(&mut seed, 2)];
                    (key, ["", "x", "y", "z", "xy", "xyz", "xz"][next(&mut seed, 7)])
                })
                .collect();
            let labels = config.labels.clean(entries.iter().copied().chain([(DOMAIN, "d")])).unwrap();
            let applied = set.matching(&labels, &Cost::ONE.into()).unwrap();
            let here: Vec<_> = applied
                .iter()
                .map(|applied| match &applied.effect {
                    Effect::Limit { key, limit, .. } => (limit.amount(), key.to_string()),
                    effect => panic!("{effect:?}"),
                })
                .collect();
            let there = looked_up(&domain.descriptors, &entries);
            let context = format!("round {round}: {entries:?} in {yaml}");
            let amounts = |met: &[(u64, String)]| met.iter().map(|(amount, _)| *amount).collect::<Vec<_>>();
            assert_eq!(amounts(&here), amounts(there.as_slice()), "{context}");
            let (Some((_, here)), Some((_, there))) = (here.into_iter().next(), there) else {
                missed += 1;
                continue;
            };
            met += 1;
            assert_eq!(
                *there_to_here.entry(there.clone()).or_insert_with(|| here.clone()),
                here,
                "{context}"
            );
            assert_eq!(*here_to_there.entry(here).or_insert_with(|| there.clone()), there, "{context}");
        }
    }
    assert!(met > 1000 && missed > 1000, "{met} met a limit, {missed} none: too few of one to say anything");
}
