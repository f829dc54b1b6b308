//! The metrics as OpenMetrics text.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use sluicegate::{
    Cost, Decision, Limit, Limiter, MemoryStore, OnStoreFailure, Override, Rule,
    limiter::{Operation, Progress, Request, RuleSelection},
};
use sluicegate_server::{
    engine::{Engine, Transport},
    observe::metrics::MAX_COUNTED_RULES,
};
use sluicegate_testkit::failing_store::FailingStore;
use sluicegate_testkit::gated_store::GatedStore;

const CALLER: Transport = Transport::Http;
const DOCS: &str = include_str!("../../../../docs/metrics.md");

fn minute(amount: u64) -> Limit {
    Limit::sliding_log(amount, Duration::from_secs(60)).unwrap()
}

/// A limit with the smallest counter.
fn bucket(amount: u64) -> Limit {
    Limit::token_bucket(amount, Duration::from_secs(60 * 60)).unwrap()
}

fn engine(rules: impl IntoIterator<Item = Rule>) -> Engine {
    Engine::new(Limiter::new(MemoryStore::new(), rules).unwrap())
}

fn request(labels: &[(&str, &str)], cost: u64) -> Request<'static> {
    let labels = sluicegate::Labels::new(labels.iter().copied()).unwrap();
    Request::new(labels, Cost::new(cost).unwrap())
}

fn decided(engine: &Engine, request: &Request<'_>) -> Decision {
    let Progress::Decided(decision) = engine.start(CALLER, request).unwrap() else {
        panic!("memory never waits")
    };
    decision
}

async fn check(engine: &Engine, labels: &[(&str, &str)], cost: u64) -> bool {
    engine.decide(CALLER, &request(labels, cost)).await.unwrap().is_allowed()
}

/// The value of a series, given its name and labels as in the text.
pub(crate) fn value(text: &str, series: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{text}")).parse().unwrap()
}

fn decisions(text: &str, rule: &str, outcome: &str) -> f64 {
    value(text, &format!("sluicegate_decisions_total{{rule=\"{rule}\",outcome=\"{outcome}\"}}"))
}

fn cost(text: &str, rule: &str, outcome: &str) -> f64 {
    value(text, &format!("sluicegate_decision_cost_total{{rule=\"{rule}\",outcome=\"{outcome}\"}}"))
}

fn requests(text: &str, operation: &str, outcome: &str) -> f64 {
    value(text, &format!("sluicegate_requests_total{{operation=\"{operation}\",outcome=\"{outcome}\"}}"))
}

/// Each series, without its value.
fn series(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
}

#[tokio::test]
async fn every_series_exists_from_the_start_and_traffic_adds_none() {
    let engine = engine([Rule::new("per-ip", minute(1)).per(["ip"])]);
    let before = engine.metrics();
    assert!(before.ends_with("# EOF\n"));
    assert_eq!(decisions(&before, "per-ip", "denied"), 0.0);
    check(&engine, &[("ip", "a")], 1).await;
    check(&engine, &[("ip", "a")], 1).await;
    check(&engine, &[], 1).await;
    assert_eq!(series(&before), series(&engine.metrics()));
}

#[tokio::test]
async fn each_rule_counts_a_request_by_its_own_outcome() {
    let engine = engine([
        Rule::new("narrow", minute(3)).per(["user"]),
        Rule::new("wide", minute(100)),
        Rule::new("shadow", minute(2)).shadow(),
    ]);
    assert!(check(&engine, &[("user", "a")], 2).await);
    assert!(!check(&engine, &[("user", "a")], 2).await);
    assert!(check(&engine, &[], 5).await);
    let text = engine.metrics();
    assert_eq!((decisions(&text, "narrow", "allowed"), cost(&text, "narrow", "allowed")), (1.0, 2.0));
    assert_eq!((decisions(&text, "narrow", "denied"), cost(&text, "narrow", "denied")), (1.0, 2.0));
    assert_eq!((decisions(&text, "wide", "allowed"), cost(&text, "wide", "allowed")), (2.0, 7.0));
    assert_eq!((decisions(&text, "wide", "overruled"), cost(&text, "wide", "overruled")), (1.0, 2.0));
    assert_eq!((decisions(&text, "shadow", "allowed"), decisions(&text, "shadow", "denied")), (1.0, 0.0));
    assert_eq!(decisions(&text, "shadow", "shadow_denied"), 2.0);
    assert_eq!((requests(&text, "check", "allowed"), requests(&text, "check", "denied")), (2.0, 1.0));
    assert_eq!(value(&text, "sluicegate_decision_duration_seconds_count{transport=\"http\"}"), 3.0);
    assert_eq!(value(&text, "sluicegate_inflight_requests{transport=\"http\"}"), 0.0);
}

#[test]
fn costs_of_several_threads_wrap_at_64_bits() {
    const TIMES: u64 = 1_100;
    let engine = engine([Rule::new("narrow", minute(1))]);
    let request = request(&[], Cost::MAX.units());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..TIMES {
                    assert!(!decided(&engine, &request).is_allowed());
                }
            });
        }
    });
    let total = (2 * TIMES).wrapping_mul(Cost::MAX.units());
    assert!(u128::from(total) < u128::from(2 * TIMES) * u128::from(Cost::MAX.units()));
    for scrape in 1..=2 {
        let text = engine.metrics();
        assert_eq!(decisions(&text, "narrow", "denied"), 2_200.0, "scrape {scrape}");
        assert_eq!(cost(&text, "narrow", "denied"), total as f64, "scrape {scrape}");
    }
}

#[tokio::test]
async fn a_group_counts_as_one_request_by_its_overall_outcome() {
    let engine = engine([
        Rule::new("per-user", minute(9)).per(["user"]),
        Rule::new("per-ip", minute(1)).per(["ip"]),
        Rule::new("per-job", minute(9)).per(["job"]),
    ]);
    let request = |label: &str, operation| request(&[(label, "a")], 2).operation(operation);
    let refund = Operation::Refund { at: None };
    let both = [request("user", Operation::Check), request("job", refund)];
    assert!(engine.decide_group(CALLER, &both, None).await.unwrap().overall.is_allowed());
    let all = [request("user", Operation::Check), request("ip", Operation::Check), request("job", refund)];
    assert!(!engine.decide_group(CALLER, &all, None).await.unwrap().overall.is_allowed());
    let text = engine.metrics();
    assert_eq!((requests(&text, "check", "allowed"), requests(&text, "check", "denied")), (1.0, 1.0));
    assert_eq!(
        (decisions(&text, "per-user", "allowed"), decisions(&text, "per-user", "overruled")),
        (1.0, 1.0)
    );
    assert_eq!((decisions(&text, "per-ip", "denied"), cost(&text, "per-ip", "denied")), (1.0, 2.0));
    assert_eq!((cost(&text, "per-job", "refunded"), requests(&text, "refund", "allowed")), (2.0, 0.0));
}

#[tokio::test]
async fn other_operations_count_as_requests_and_by_cost_only() {
    let engine = engine([Rule::new("per-ip", minute(10)).per(["ip"])]);
    let request = request(&[("ip", "a")], 4);
    for operation in [Operation::Peek, Operation::Charge, Operation::Refund { at: None }] {
        engine.decide(CALLER, &request.clone().operation(operation)).await.unwrap();
    }
    assert_eq!(engine.reset(CALLER, &request).await.unwrap().deleted.len(), 1);
    let unknown =
        request.operation(Operation::Charge).rules(RuleSelection::Named(vec!["unknown".to_owned()]));
    engine.decide(CALLER, &unknown).await.unwrap_err();
    let key = Request::for_key(&b"user:42"[..], minute(1), Cost::ONE);
    engine.decide(CALLER, &key).await.unwrap();
    engine.decide(CALLER, &key).await.unwrap();
    check(&engine, &[("other", "a")], 1).await;

    let text = engine.metrics();
    assert_eq!((requests(&text, "peek", "allowed"), requests(&text, "charge", "allowed")), (1.0, 1.0));
    assert_eq!((requests(&text, "refund", "allowed"), requests(&text, "reset", "allowed")), (1.0, 1.0));
    assert_eq!((requests(&text, "charge", "invalid"), requests(&text, "check", "unmatched")), (1.0, 1.0));
    assert_eq!((cost(&text, "per-ip", "charged"), cost(&text, "per-ip", "refunded")), (4.0, 4.0));
    assert_eq!((decisions(&text, "!key", "allowed"), decisions(&text, "!key", "denied")), (1.0, 1.0));
    let of_rule = text.lines().filter(|line| line.starts_with("sluicegate_decisions_total{rule=\"per-ip\""));
    assert!(of_rule.clone().count() > 0 && of_rule.into_iter().all(|line| line.ends_with(" 0")), "{text}");
}

#[tokio::test]
async fn without_the_store_each_rule_counts_by_its_failure_policy() {
    let rule = |name, route| Rule::new(name, minute(1)).when("route", route);
    let rules = [
        rule("open", "*"),
        rule("closed", "pay").on_store_failure(OnStoreFailure::Closed),
        rule("local", "login").on_store_failure(OnStoreFailure::Local),
    ];
    let engine = Engine::new(Limiter::new(FailingStore::ambiguous(), rules).unwrap());
    assert!(check(&engine, &[("route", "home")], 1).await);
    assert!(!check(&engine, &[("route", "pay")], 1).await);
    assert!(check(&engine, &[("route", "login")], 1).await);
    assert!(!check(&engine, &[("route", "login")], 1).await);
    let key = Request::for_key(&b"user:42"[..], minute(1), Cost::ONE);
    assert!(engine.decide(CALLER, &key).await.unwrap().is_allowed());
    engine.decide(CALLER, &key.clone().operation(Operation::Charge)).await.unwrap_err();
    engine.reset(CALLER, &key).await.unwrap_err();

    let text = engine.metrics();
    assert_eq!((decisions(&text, "open", "failed_open"), decisions(&text, "open", "overruled")), (2.0, 2.0));
    assert_eq!(
        (decisions(&text, "closed", "failed_closed"), cost(&text, "closed", "failed_closed")),
        (1.0, 1.0)
    );
    assert_eq!(decisions(&text, "local", "fallback_allowed"), 1.0);
    assert_eq!(decisions(&text, "local", "fallback_denied"), 1.0);
    assert_eq!(decisions(&text, "!key", "failed_open"), 1.0);
    assert_eq!((requests(&text, "charge", "failed"), requests(&text, "reset", "failed")), (1.0, 1.0));
    let degraded = |policy| value(&text, &format!("sluicegate_store_degraded_total{{policy=\"{policy}\"}}"));
    assert_eq!((degraded("open"), degraded("closed"), degraded("fallback")), (2.0, 1.0, 2.0));
    assert!(value(&text, "sluicegate_store_errors_total{kind=\"lost\"}") > 0.0);
}

#[tokio::test]
async fn a_rule_keeps_its_counters_when_other_rules_change() {
    let engine = engine([Rule::new("stays", minute(9)), Rule::new("goes", minute(9))]);
    check(&engine, &[], 1).await;
    engine
        .limiter()
        .reconfigure([Rule::new("comes", minute(9)), Rule::new("stays", minute(5)).per(["ip"])])
        .unwrap();
    check(&engine, &[("ip", "a")], 1).await;
    let text = engine.metrics();
    assert_eq!((decisions(&text, "stays", "allowed"), decisions(&text, "comes", "allowed")), (2.0, 1.0));
    assert!(!text.contains("\"goes\""), "a removed rule is not listed");
    assert_eq!(decisions(&text, "!other", "allowed"), 0.0);
    assert_eq!(value(&text, "sluicegate_rules"), 2.0);
}

#[tokio::test]
async fn the_output_does_not_grow_with_the_number_of_keys() {
    const KEYS: u32 = 1_000_000;
    /// Maximum growth of a value, in digits.
    const DIGITS: usize = 20;
    let engine = engine([Rule::new("per-ip", bucket(1)).per(["ip"])]);
    let before = engine.metrics();
    for n in 0..KEYS {
        let labels = sluicegate::Labels::new([("ip", n.to_be_bytes())]).unwrap();
        assert!(decided(&engine, &Request::new(labels, Cost::ONE)).is_allowed());
    }
    let text = engine.metrics();
    assert_eq!(series(&text), series(&before));
    assert!(text.len() <= before.len() + DIGITS * series(&before).len(), "{} bytes", text.len());
    assert_eq!(decisions(&text, "per-ip", "allowed"), f64::from(KEYS));
    assert_eq!(value(&text, "sluicegate_store_keys"), f64::from(KEYS));
    assert!(value(&text, "sluicegate_store_bytes") > 0.0);
}

#[tokio::test]
async fn rules_beyond_the_limit_are_counted_together() {
    let rule = |n: usize| Rule::new(&format!("rule {n} \"quoted\""), minute(1));
    let count = MAX_COUNTED_RULES + 20;
    let engine = engine((0..count).map(|n| rule(n).when("n", n.to_string().as_str())));
    for n in [0, MAX_COUNTED_RULES - 1, MAX_COUNTED_RULES, count - 1] {
        check(&engine, &[("n", &n.to_string())], 1).await;
    }
    let text = engine.metrics();
    let named = |n: usize| format!("rule {n} \\\"quoted\\\"");
    assert_eq!(decisions(&text, &named(0), "allowed"), 1.0);
    assert_eq!(decisions(&text, &named(MAX_COUNTED_RULES - 1), "allowed"), 1.0);
    assert_eq!(decisions(&text, "!other", "allowed"), 2.0);
    assert!(!text.contains(&named(MAX_COUNTED_RULES)));
}

#[tokio::test]
async fn reloads_are_counted_by_result() {
    let engine = engine([]);
    let stale = |text: &str| value(text, "sluicegate_config_last_reload_successful");
    assert_eq!((stale(&engine.metrics()), engine.observer().reloads().is_stale()), (1.0, false));
    engine.observer().reloads().succeeded();
    engine.observer().reloads().failed();
    let text = engine.metrics();
    assert_eq!((stale(&text), engine.observer().reloads().is_stale()), (0.0, true));
    assert!(value(&text, "sluicegate_config_last_reload_success_timestamp_seconds") > 1.7e9);
    let reloads = |result| value(&text, &format!("sluicegate_config_reloads_total{{result=\"{result}\"}}"));
    assert_eq!((reloads("success"), reloads("failure")), (1.0, 1.0));
    engine.observer().reloads().succeeded();
    assert_eq!(stale(&engine.metrics()), 1.0);
}

#[tokio::test]
async fn a_request_of_a_disconnected_caller_is_not_in_flight() {
    let limiter = Limiter::new(MemoryStore::new(), []).unwrap();
    let engine = Arc::new(Engine::new(limiter));
    let pending = engine.observer().begin(Transport::Resp);
    let under_way = || value(&engine.metrics(), "sluicegate_inflight_requests{transport=\"resp\"}");
    assert_eq!(under_way(), 1.0);
    drop(pending);
    assert_eq!(under_way(), 0.0);
}

#[tokio::test]
async fn a_pending_check_is_counted_once_when_it_is_decided() {
    let store = GatedStore::open();
    let engine = Engine::new(Limiter::new(store, [Rule::new("r", minute(1))]).unwrap());
    let Progress::Pending(pending) = engine.start(CALLER, &request(&[], 1)).unwrap() else {
        panic!("a remote store decides")
    };
    let count = "sluicegate_decision_duration_seconds_count{transport=\"http\"}";
    assert_eq!(value(&engine.metrics(), count), 0.0);
    assert!(pending.await.unwrap().is_allowed());
    let text = engine.metrics();
    assert_eq!(value(&text, count), 1.0);
    assert_eq!((decisions(&text, "r", "allowed"), requests(&text, "check", "allowed")), (1.0, 1.0));
}

/// Name and labels of each metric, and its type.
fn listed(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let mut metrics = BTreeMap::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            let suffix = if kind == "counter" { "_total" } else { "" };
            metrics.insert(format!("{name}{suffix}"), (kind.to_owned(), BTreeSet::new()));
        } else if let Some((name, rest)) = line.split_once('{') {
            let labels =
                rest.rsplit_once('}').unwrap().0.split("\",").filter_map(|pair| pair.split_once("=\""));
            let labels = labels.map(|(label, _)| label.to_owned()).filter(|label| label != "le");
            let name =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            metrics.get_mut(name).unwrap().1.extend(labels);
        }
    }
    metrics
}

#[tokio::test]
async fn the_documentation_lists_every_metric_with_its_type_and_labels() {
    let engine = engine([Rule::new("per-ip", minute(1)).per(["ip"]).with_override(Override::when("a", "b"))]);
    let mut documented = BTreeMap::new();
    for line in DOCS.lines().filter(|line| line.starts_with("| `sluicegate_")) {
        let cells: Vec<_> = line.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let labels = cells[3].split(", ").filter(|label| !label.is_empty()).map(str::to_owned).collect();
        documented.insert(cells[1].clone(), (cells[2].clone(), labels));
    }
    assert_eq!(documented, listed(&engine.metrics()));
    for outcome in ["overruled", "shadow_denied", "fallback_allowed", "failed_open", "charged", "unmatched"] {
        assert!(DOCS.contains(&format!("`{outcome}`")), "{outcome} is explained");
    }
}
