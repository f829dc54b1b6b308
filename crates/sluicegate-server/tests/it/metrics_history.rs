//! The history of decisions per second, with manually recorded seconds.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{sync::Arc, time::Duration};

use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, limiter::Request};
use sluicegate_server::{
    engine::{Engine, Transport},
    observe::history::{MAX_RULES, RuleSecond, SECONDS, Second},
};

use crate::metrics::value;

fn engine(rules: impl IntoIterator<Item = Rule>) -> Engine {
    Engine::new(Limiter::new(MemoryStore::new(), rules).unwrap())
}

fn rule(name: &str, amount: u64) -> Rule {
    Rule::new(name, Limit::sliding_log(amount, Duration::from_secs(60)).unwrap())
}

async fn check(engine: &Engine, labels: &[(&str, &str)]) {
    let labels = Labels::new(labels.iter().copied()).unwrap();
    engine.decide(Transport::Http, &Request::new(labels, Cost::ONE)).await.unwrap();
}

fn keep(engine: &Engine) -> Arc<Second> {
    engine.observer().record_second(&engine.limiter().stats());
    engine.observer().history().since(0).pop().unwrap()
}

#[tokio::test]
async fn a_second_has_its_decisions_in_total_and_by_rule() {
    let engine =
        engine([rule("login", 1).when("route", "login"), rule("shadow", 1).when("route", "*").shadow()]);
    for route in ["login", "login", "home"] {
        check(&engine, &[("route", route)]).await;
    }
    check(&engine, &[]).await;
    let of = |rule: &str, allowed, denied, shadow_denied| RuleSecond {
        rule: rule.into(),
        allowed,
        denied,
        shadow_denied,
    };
    let first = keep(&engine);
    assert_eq!((first.number, first.allowed, first.denied, first.unmatched), (1, 2, 1, 1));
    assert_eq!(first.rules, [of("shadow", 1, 0, 2), of("login", 1, 1, 0)]);
    let second = keep(&engine);
    let Second { at_ms, store_bytes, .. } = *second;
    assert_eq!(*second, Second { number: 2, at_ms, store_bytes, ..Second::default() });
    assert!(second.at_ms >= first.at_ms && first.at_ms > 0);
    check(&engine, &[("route", "login")]).await;
    let third = keep(&engine);
    assert_eq!((third.allowed, third.denied, third.degraded, third.store_errors), (0, 1, 0, 0));
    assert_eq!(third.rules[0].denied, 1);
    let numbers: Vec<_> = engine.observer().history().since(1).iter().map(|second| second.number).collect();
    assert_eq!(numbers, [2, 3]);
}

#[tokio::test]
async fn an_hour_is_kept_with_the_busiest_rules_of_each_second() {
    let count = MAX_RULES + 3;
    let engine =
        engine((0..count).map(|n| rule(&format!("rule-{n}"), 100).when("n", n.to_string().as_str())));
    for n in 0..count {
        for _ in 0..=usize::from(n == 1) {
            check(&engine, &[("n", &n.to_string())]).await;
        }
    }
    let second = keep(&engine);
    assert_eq!(
        (second.rules.len(), &*second.rules[0].rule, second.rules[0].allowed),
        (MAX_RULES + 1, "rule-1", 2)
    );
    let others = second.rules.last().unwrap();
    assert_eq!((&*others.rule, others.allowed), ("!other", 3));
    for _ in 0..SECONDS {
        keep(&engine);
    }
    let kept = engine.observer().history().since(0);
    assert_eq!((kept.len(), kept[0].number), (SECONDS, 2));
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_receives_each_second() {
    let engine = engine([rule("login", 1)]);
    let mut updates = engine.observer().history().subscribe();
    let recording = engine.clone();
    let recorder = tokio::spawn(async move { recording.record_history().await });
    updates.wait_for(|number| *number >= 2).await.unwrap();
    check(&engine, &[]).await;
    let last = *updates.wait_for(|number| *number >= 4).await.unwrap();
    let seconds = engine.observer().history().since(2);
    assert_eq!((last, seconds.len(), seconds[0].allowed), (4, 2, 1));
    recorder.abort();
}

#[tokio::test(start_paused = true)]
async fn the_rate_gauge_is_the_mean_of_the_last_ten_seconds() {
    let engine = engine([rule("login", 2)]);
    let rate = |outcome: &str| {
        let series = format!("sluicegate_decision_rate{{rule=\"login\",outcome=\"{outcome}\"}}");
        value(&engine.metrics(), &series)
    };
    assert_eq!((rate("allowed"), rate("denied")), (0.0, 0.0));
    let second = async || {
        keep(&engine);
        tokio::time::advance(Duration::from_secs(1)).await;
    };
    second().await;
    for _ in 0..6 {
        check(&engine, &[]).await;
    }
    second().await;
    assert_eq!((rate("allowed"), rate("denied")), (2.0, 4.0));
    for _ in 0..9 {
        second().await;
    }
    assert_eq!((rate("allowed"), rate("denied")), (0.2, 0.4));
    second().await;
    assert_eq!((rate("allowed"), rate("denied")), (0.0, 0.0));
    let unknown = "sluicegate_decision_rate{rule=\"!key\",outcome=\"allowed\"}";
    assert_eq!(value(&engine.metrics(), unknown), 0.0);
}
