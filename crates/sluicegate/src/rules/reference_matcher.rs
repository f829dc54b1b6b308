//! Compares the indexed matcher with a reference implementation on random rules and requests.

use std::time::Duration;

use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use sluicegate_core::{Algorithm, Cost, Limit};

use super::*;
use crate::{
    key::{Key, encoded_rule},
    labels::Labels,
};

const NAMES: [&str; 5] = ["route", "ip", "tenant", "plan", "x"];
const VALUES: [&str; 16] = [
    "",
    "a",
    "ab",
    "abc",
    "abd",
    "b",
    "ba",
    "b,a",
    "{a}",
    "10.0.0.1",
    "10.0.1.1",
    "10.1.0.1",
    "192.0.2.1",
    "::ffff:10.0.0.1",
    "2001:db8::1",
    "2001:db8:1::1",
];
const NETWORKS: [&str; 8] = [
    "10.0.0.0/8",
    "10.0.0.0/24",
    "10.0.1.0/24",
    "0.0.0.0/0",
    "::/0",
    "2001:db8::/32",
    "2001:db8:1::/48",
    "192.0.2.1",
];

fn pattern(random: &mut StdRng, may_nest: bool) -> Pattern {
    let value = *VALUES.choose(random).unwrap();
    match random.random_range(0..if may_nest { 12 } else { 10 }) {
        0..5 => Pattern::Exact(value.as_bytes().into()),
        5..7 => Pattern::Prefix(value.as_bytes()[..random.random_range(0..=value.len())].into()),
        7 => Pattern::Present,
        8..10 => Pattern::network(NETWORKS.choose(random).unwrap()).unwrap(),
        _ => {
            let count = random.random_range(1..6);
            Pattern::any_of((0..count).map(|_| pattern(random, false))).unwrap()
        }
    }
}

fn condition(random: &mut StdRng, most: usize) -> Condition {
    let count = random.random_range(0..=most);
    (0..count).fold(Condition::new(), |condition, _| {
        condition.and(NAMES.choose(random).unwrap(), pattern(random, true))
    })
}

fn some_names(random: &mut StdRng, most: usize) -> Vec<Box<str>> {
    let count = random.random_range(0..=most);
    NAMES.choose_multiple(random, count).map(|name| (*name).into()).collect()
}

fn maybe<T>(random: &mut StdRng, value: impl FnOnce(&mut StdRng) -> T) -> Option<T> {
    random.random_bool(0.3).then(|| value(random))
}

fn policy(random: &mut StdRng) -> OnStoreFailure {
    *[OnStoreFailure::Open, OnStoreFailure::Closed].choose(random).unwrap()
}

fn an_override(random: &mut StdRng, algorithm: Algorithm) -> Override {
    let flag =
        |random: &mut StdRng| maybe(random, |random| random.random_bool(0.5)).filter(|_| random.random());
    let (unlimited, blocked) = (flag(random), flag(random));
    Override {
        when: condition(random, 2),
        amount: maybe(random, |random| random.random_range(1..1000)),
        window: maybe(random, |random| Duration::from_secs(random.random_range(1..100))),
        burst: maybe(random, |random| random.random_range(1..1000))
            .filter(|_| algorithm == Algorithm::TokenBucket),
        cost: maybe(random, |random| Cost::from(random.random_range(0..4))),
        unlimited,
        blocked: if unlimited == Some(true) { None } else { blocked },
        on_store_failure: maybe(random, policy),
        shadow: maybe(random, |random| random.random()),
        lease: None,
        lease_for: None,
        calendar: CalendarOverride::default(),
    }
}

fn a_rule(random: &mut StdRng, name: usize, overrides: usize) -> Rule {
    let algorithm = *Algorithm::WINDOWED.choose(random).unwrap();
    let amount = random.random_range(1..1000);
    let mut rule =
        Rule::new(&format!("r{name}"), Limit::new(algorithm, amount, Duration::from_secs(60)).unwrap());
    rule.when = condition(random, 3);
    rule.unless = if random.random_bool(0.3) { condition(random, 2) } else { Condition::new() };
    rule.per = some_names(random, 2);
    rule.burst =
        maybe(random, |random| random.random_range(1..1000)).filter(|_| algorithm == Algorithm::TokenBucket);
    rule.unit = (*["requests", "tokens"].choose(random).unwrap()).into();
    rule.cost = Cost::from(random.random_range(0..4));
    rule.shadow = random.random_bool(0.2);
    rule.overdraft = random.random_bool(0.2);
    rule.absent = *[Absent::Skip, Absent::Shared, Absent::Deny].choose(random).unwrap();
    rule.exact = random.random_bool(0.2);
    rule.hold = maybe(random, |random| (*NAMES.choose(random).unwrap()).into());
    rule.tag = maybe(random, |random| rule.per[..random.random_range(0..=rule.per.len())].to_vec());
    rule.stagger = algorithm == Algorithm::FixedWindow && random.random();
    rule.on_store_failure = policy(random);
    rule.overrides = (0..overrides).map(|_| an_override(random, algorithm)).collect();
    rule
}

fn request(random: &mut StdRng) -> Labels {
    let count = random.random_range(0..=NAMES.len());
    let names: Vec<_> = NAMES.choose_multiple(random, count).collect();
    Labels::new(names.into_iter().map(|name| (name, VALUES.choose(random).unwrap()))).unwrap()
}

/// Tries every pair of every rule and override in order; the last one that sets a field wins.
fn reference(rules: &[Rule], labels: &Labels, costs: &Costs) -> Vec<(String, Effect)> {
    rules
        .iter()
        .filter_map(|rule| Some((rule.name.to_string(), reference_effect(rule, labels, costs)?)))
        .collect()
}

fn reference_effect(rule: &Rule, labels: &Labels, costs: &Costs) -> Option<Effect> {
    let holds = |(name, pattern): (&str, &Pattern)| {
        labels.iter().any(|(label, value)| label == name && pattern.matches(value))
    };
    let lacking = rule.per.iter().any(|name| labels.get(name).is_none());
    let further = labels
        .iter()
        .filter(|(name, _)| rule.hold.as_deref() != Some(*name))
        .any(|(name, _)| !rule.when.pairs().any(|pair| pair.0 == name) && !rule.per.contains(&name.into()));
    if !rule.when.pairs().all(holds) || rule.unless.pairs().any(holds) {
        return None;
    }
    if (rule.exact && further) || (lacking && rule.absent == Absent::Skip) {
        return None;
    }
    let matching: Vec<&Override> =
        rule.overrides.iter().filter(|other| other.when.pairs().all(holds)).collect();
    let shadow = last(&matching, |other| other.shadow).unwrap_or(rule.shadow);
    let last_true = |field: fn(&Override) -> Option<bool>| {
        let at = matching.iter().rposition(|other| field(other).is_some());
        at.filter(|at| field(matching[*at]) == Some(true))
    };
    match (last_true(|other| other.unlimited), last_true(|other| other.blocked)) {
        (Some(unlimited), Some(blocked)) if blocked < unlimited => return None,
        (_, Some(_)) => return Some(Effect::Deny { reason: DenialReason::Blocked, shadow }),
        (Some(_), None) => return None,
        (None, None) => {}
    }
    if lacking && rule.absent == Absent::Deny {
        return Some(Effect::Deny { reason: DenialReason::Absent, shadow });
    }
    let values = |names: &[Box<str>]| names.iter().map(|name| labels.get(name)).collect::<Vec<_>>();
    let tag = rule.tag.as_deref().map(values);
    let key = Key::of_rule(&encoded_rule(&rule.name), &values(&rule.per), tag.as_deref());
    let amount = last(&matching, |other| other.amount).unwrap_or(rule.limit.amount());
    let window = last(&matching, |other| other.window).unwrap_or(rule.limit.window());
    assert!(rule.limit.calendar().is_none(), "calendar windows are tested by themselves");
    let mut limit = Limit::new(rule.limit.algorithm(), amount, window).unwrap();
    if let Some(burst) = last(&matching, |other| other.burst).or(rule.burst) {
        limit = limit.with_burst(burst).unwrap();
    }
    if rule.stagger {
        let hash = u128::from(crc32fast::hash(key.identity().as_bytes()));
        let phase = hash * window.as_micros() / (1 << 32);
        limit = limit.with_phase(Duration::from_micros(phase as u64)).unwrap();
    }
    let factor = last(&matching, |other| other.cost).unwrap_or(rule.cost);
    let cost = Cost::new(costs.of(&rule.unit).units() * factor.units()).unwrap();
    let on_store_failure = last(&matching, |other| other.on_store_failure).unwrap_or(rule.on_store_failure);
    Some(Effect::Limit { key, limit, cost, shadow, overdraft: rule.overdraft, on_store_failure, factor })
}

fn last<T>(matching: &[&Override], field: impl Fn(&Override) -> Option<T>) -> Option<T> {
    matching.iter().rev().find_map(|other| field(other))
}

fn compare(rules: &[Rule], requests: usize, random: &mut StdRng, seed: u64) -> usize {
    let set = RuleSet::new(rules.to_vec()).unwrap();
    let costs = Costs::new([("requests", Cost::from(2)), ("tokens", Cost::from(5))]).unwrap();
    let mut applied = 0;
    for _ in 0..requests {
        let labels = request(random);
        let found = set.matching(&labels, &costs).unwrap();
        let found: Vec<_> = found.into_iter().map(|one| (one.rule.name.to_string(), one.effect)).collect();
        assert_eq!(found, reference(rules, &labels, &costs), "seed {seed}: {labels:?}");
        applied += found.len();
    }
    applied
}

#[test]
fn random_rules_and_overrides_match_like_the_reference() {
    let mut applied = 0;
    for seed in 0..150 {
        let mut random = StdRng::seed_from_u64(seed);
        let count = random.random_range(1..40);
        let rules: Vec<_> = (0..count)
            .map(|name| {
                let overrides = random.random_range(0..12);
                a_rule(&mut random, name, overrides)
            })
            .collect();
        applied += compare(&rules, 60, &mut random, seed);
    }
    assert!(applied > 10_000, "only {applied} rules applied: the requests miss the rules");
}

#[test]
fn a_hundred_thousand_overrides_match_like_the_reference() {
    let seed = 1;
    let mut random = StdRng::seed_from_u64(seed);
    let mut rule = Rule::new("r", Limit::token_bucket(10, Duration::from_secs(60)).unwrap());
    rule.absent = Absent::Shared;
    rule.per = vec!["tenant".into()];
    for index in 0..100_000 {
        // mostly one tenant each, as in a file of customers; some match many
        let mut other = an_override(&mut random, Algorithm::TokenBucket);
        if index % 500 != 0 {
            other.when = Condition::new().and("tenant", &*format!("t{index}"));
        }
        rule.overrides.push(other);
    }
    let rules = [rule];
    assert!(compare(&rules, 15, &mut random, seed) > 0);
    let set = RuleSet::new(rules.to_vec()).unwrap();
    for index in [1, 777, 50_001, 99_999] {
        let labels = Labels::new([("tenant", format!("t{index}"))]).unwrap();
        let found = set.matching(&labels, &Costs::from(Cost::ONE)).unwrap();
        let found: Vec<_> = found.into_iter().map(|one| (one.rule.name.to_string(), one.effect)).collect();
        assert_eq!(found, reference(&rules, &labels, &Costs::from(Cost::ONE)), "t{index}");
    }
}
