//! The keys with the most checks and the most denials.
//!
//! A separate binary: only the first threads of a process count separately, and these tests assert exact
//! counts.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::HashMap, sync::Arc, thread, time::Duration};

use sluicegate::{
    Cost, Labels, Limit, Limiter, MemoryStore, Rule,
    limiter::{Operation, Request},
};
use sluicegate_server::{
    engine::{Engine, Transport},
    observe::heavy_hitters::{
        ERROR_SHARE, EXACT, HeavyHitter, HeavyHitterSnapshot, HeavyHitters, KeyOutcome, KeyedRule, MAX_KEYS,
        SAMPLED, WINDOW,
    },
};

fn rule() -> Arc<KeyedRule> {
    Arc::new(KeyedRule::new("per-ip".into(), &["ip".into()]))
}

fn ip(address: &str) -> Labels {
    Labels::new([("ip", address)]).unwrap()
}

fn key(rule: &str, key: &str, count: u64, denied: u64) -> HeavyHitter {
    HeavyHitter { rule: rule.into(), key: key.into(), count, denied }
}

/// A deterministic random number generator.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// Returns a few numbers often and many rarely.
    fn skewed(&mut self) -> u64 {
        (1 << 40) / (self.next() % (1 << 20) * (1 << 12) + 1 + self.next() % (1 << 12))
    }
}

/// Exact counts, without a sketch.
#[derive(Default)]
struct Truth(HashMap<String, (u64, u64)>);

impl Truth {
    fn add(&mut self, key: String, outcome: KeyOutcome) {
        let (count, denied) = self.0.entry(key).or_default();
        *count += 1;
        *denied += u64::from(outcome == KeyOutcome::Denied);
    }

    /// Checks that every listed count is within the error and `slack`, and that no heavy key is missing.
    fn agrees_with(&self, snapshot: &HeavyHitterSnapshot, slack: impl Fn(u64) -> u64) {
        let is_near = |shown: u64, error: u64, truth: u64| {
            shown <= truth + slack(truth) && shown + error + slack(truth) >= truth
        };
        for shown in &snapshot.heaviest {
            let (count, denied) = self.0[&*shown.key];
            assert!(is_near(shown.count, snapshot.error, count), "{shown:?}, in truth {count}");
            assert!(is_near(shown.denied, snapshot.denied_error, denied), "{shown:?}, in truth {denied}");
        }
        let is_shown = |keys: &[HeavyHitter], key: &str| keys.iter().any(|shown| *shown.key == *key);
        let least = snapshot.heaviest.last().unwrap().count + snapshot.error;
        let least_denied = snapshot.most_denied.last().unwrap().denied + snapshot.denied_error;
        for (key, (count, denied)) in &self.0 {
            let is_heavy = *count > least + slack(*count);
            assert!(!is_heavy || is_shown(&snapshot.heaviest, key), "{key} has {count} checks");
            let is_denied = *denied > least_denied + slack(*denied);
            assert!(!is_denied || is_shown(&snapshot.most_denied, key), "{key} was denied {denied} times");
        }
    }
}

/// Records `each` checks on each of several threads.
fn recorded_by_threads(top: &HeavyHitters, each: u64) -> Truth {
    const THREADS: u64 = 4;
    let rule = rule();
    let seen: Vec<Vec<(u64, KeyOutcome)>> = thread::scope(|scope| {
        let note = |seed| {
            let (rule, mut numbers) = (&rule, Numbers(seed));
            scope.spawn(move || {
                let numbers = (0..each).map(|_| numbers.skewed());
                let seen =
                    numbers.map(|n| (n, if n % 3 == 0 { KeyOutcome::Denied } else { KeyOutcome::Allowed }));
                seen.inspect(|(n, outcome)| {
                    top.record_rule(rule, &ip(&n.to_string()), *outcome, Duration::ZERO)
                })
                .collect()
            })
        };
        let threads: Vec<_> = (0..THREADS).map(note).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut truth = Truth::default();
    for (n, outcome) in seen.into_iter().flatten() {
        truth.add(format!("ip={n}"), outcome);
    }
    truth
}

#[test]
fn counts_are_within_the_error_and_no_heavy_key_is_missing() {
    let top = HeavyHitters::default();
    let truth = recorded_by_threads(&top, EXACT);
    let total: u64 = truth.0.values().map(|(count, _)| count).sum();
    assert!(truth.0.len() > 5_000, "{} keys are too few for a test", truth.0.len());
    let snapshot = top.snapshot(MAX_KEYS, Duration::ZERO);
    assert_eq!((snapshot.count, snapshot.heaviest.len()), (total, MAX_KEYS));
    assert!(snapshot.error > 0 && snapshot.error as f64 <= ERROR_SHARE * total as f64, "{}", snapshot.error);
    truth.agrees_with(&snapshot, |_| 0);
}

#[test]
fn sampled_counts_are_close_to_the_exact_counts() {
    let top = HeavyHitters::default();
    let truth = recorded_by_threads(&top, 20 * EXACT);
    let total: u64 = truth.0.values().map(|(count, _)| count).sum();
    // seven standard deviations: practically impossible
    let slack = |count: u64| (7.0 * ((SAMPLED * count) as f64).sqrt()) as u64 + 7 * SAMPLED;
    let snapshot = top.snapshot(MAX_KEYS, Duration::ZERO);
    assert!(snapshot.count.abs_diff(total) <= slack(total), "{} of {total}", snapshot.count);
    truth.agrees_with(&snapshot, slack);
}

#[test]
fn old_checks_expire_even_without_new_ones() {
    let (top, rule) = (HeavyHitters::default(), rule());
    let keys = |at: Duration| -> Vec<(String, u64)> {
        let HeavyHitterSnapshot { heaviest, .. } = top.snapshot(10, at);
        heaviest.into_iter().map(|key| (key.key.into(), key.count)).collect()
    };
    let key = |name: &str, count| (format!("ip={name}"), count);
    let second = Duration::from_secs(1);
    top.record_rule(&rule, &ip("old"), KeyOutcome::Allowed, Duration::ZERO);
    top.record_rule(&rule, &ip("old"), KeyOutcome::Allowed, second);
    top.record_rule(&rule, &ip("new"), KeyOutcome::Allowed, WINDOW + second);
    assert_eq!(keys(WINDOW + second), [key("old", 2), key("new", 1)]);
    assert_eq!(top.snapshot(1, WINDOW + second).seconds, WINDOW.as_secs() + 1);
    assert_eq!(keys(2 * WINDOW + 2 * second), [key("new", 1)]);
    assert_eq!(keys(4 * WINDOW + 3 * second), []);
}

#[tokio::test]
async fn the_engine_records_checks_and_denials_by_rule_and_key() {
    let minute = |amount| Limit::sliding_log(amount, Duration::from_secs(60)).unwrap();
    let rules = [
        Rule::new("per-user", minute(3)).per(["tenant", "user"]),
        Rule::new("all", minute(1_000)),
        Rule::new("shadow", minute(1)).shadow(),
    ];
    let engine = Engine::new(Limiter::new(MemoryStore::new(), rules).unwrap());
    let send = async |operation, tenant: &str, user: &str| {
        let labels = Labels::new([("user", user), ("tenant", tenant)]).unwrap();
        let request = Request::new(labels, Cost::ONE).operation(operation);
        engine.decide(Transport::Http, &request).await.unwrap();
    };
    for _ in 0..5 {
        send(Operation::Check, "acme", "eve").await;
    }
    send(Operation::Check, "acme", "bob").await;
    send(Operation::Peek, "acme", "peeks only").await;
    let request = Request::for_key(&b"user:42"[..], minute(5), Cost::ONE);
    engine.decide(Transport::Http, &request).await.unwrap();

    let snapshot = engine.observer().top(10);
    let eve = key("per-user", "tenant=acme user=eve", 5, 2);
    assert_eq!((snapshot.error, snapshot.denied_error), (0, 0));
    assert_eq!(snapshot.most_denied, std::slice::from_ref(&eve));
    // the last denial came from the denial cache and lists only the denying rule
    let mut heaviest = snapshot.heaviest;
    heaviest.retain(|key| &*key.rule != "all");
    assert_eq!(heaviest.len(), 3, "{heaviest:?}");
    for key in [eve, key("per-user", "tenant=acme user=bob", 1, 0), key("!key", "user:42", 1, 0)] {
        assert!(heaviest.contains(&key), "{key:?}");
    }
    assert_eq!(engine.observer().top(1).heaviest.len(), 1);
}

#[test]
fn a_long_key_is_truncated_and_keeps_its_own_count() {
    let (top, rule) = (HeavyHitters::default(), rule());
    let long = |end: &str| ip(&("ü".repeat(400) + end));
    top.record_rule(&rule, &long("a"), KeyOutcome::Allowed, Duration::ZERO);
    top.record_rule(&rule, &long("b"), KeyOutcome::Denied, Duration::ZERO);
    let heaviest = top.snapshot(10, Duration::ZERO).heaviest;
    assert_eq!(
        heaviest.iter().map(|key| (key.count, key.key.chars().count())).collect::<Vec<_>>(),
        [(1, 129); 2]
    );
    assert!(heaviest.iter().all(|key| key.key.ends_with("ü…")));
}
