//! Metrics and history of holds.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::time::Duration;

use sluicegate::{
    Cost, Labels, Limit, Limiter, ManualClock, MemoryStore, Rule, Timestamp,
    limiter::{HoldDecision, OnConcurrency, Request, SettleOutcome},
    store::HoldId,
};
use sluicegate_core::OnExpiry;
use sluicegate_server::{
    engine::{Engine, Excess, HoldAdjustment, Transport},
    observe::history::HoldsSecond,
};
use sluicegate_testkit::failing_store::FailingStore;

use crate::metrics::value;

const CALLER: Transport = Transport::Resp;

fn in_flight(amount: u64) -> Rule {
    Rule::new("in-flight", Limit::concurrency(amount).unwrap())
}

fn request(cost: u32) -> Request<'static> {
    Request::new(Labels::default(), Cost::from(cost))
}

async fn hold(engine: &Engine, id: &str) -> HoldDecision {
    engine.hold(CALLER, &request(2), HoldId::new(id).ok(), None).await.unwrap()
}

async fn adjust(engine: &Engine, id: &str, adjustment: HoldAdjustment) -> SettleOutcome {
    let token = engine.limiter().hold_token(&request(1), HoldId::new(id).unwrap()).unwrap();
    engine.adjust_hold(CALLER, token, adjustment, None).await.unwrap().outcome
}

fn settle() -> HoldAdjustment {
    HoldAdjustment::Settle { costs: Cost::ONE.into(), excess: Excess::Bounded }
}

/// The counts of holds that are not zero.
fn holds(text: &str) -> Vec<(&str, u64)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("sluicegate_holds_total{outcome=\""));
    let counts = lines.map(|line| line.split_once("\"} ").unwrap());
    counts.map(|(outcome, count)| (outcome, count.parse().unwrap())).filter(|(_, count)| *count > 0).collect()
}

fn releasing(text: &str) -> f64 {
    value(text, "sluicegate_releasing_holds_total")
}

fn requests(text: &str, operation: &str, outcome: &str) -> f64 {
    value(text, &format!("sluicegate_requests_total{{operation=\"{operation}\",outcome=\"{outcome}\"}}"))
}

fn decisions(text: &str, outcome: &str) -> f64 {
    value(text, &format!("sluicegate_decisions_total{{rule=\"in-flight\",outcome=\"{outcome}\"}}"))
}

#[tokio::test]
async fn holds_are_counted_by_outcome() {
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = MemoryStore::new().with_clock(clock.clone());
    let engine = Engine::new(Limiter::new(store, [in_flight(6)]).unwrap());
    for id in ["a", "b", "c"] {
        assert!(hold(&engine, id).await.decision.is_allowed());
    }
    assert_eq!(adjust(&engine, "a", settle()).await, SettleOutcome::Settled);
    assert_eq!(adjust(&engine, "a", settle()).await, SettleOutcome::Already);
    assert_eq!(adjust(&engine, "b", HoldAdjustment::Release).await, SettleOutcome::Released);
    assert_eq!(adjust(&engine, "x", settle()).await, SettleOutcome::Unknown);
    let hour = HoldAdjustment::Renew(Duration::from_secs(3_600));
    assert_eq!(adjust(&engine, "c", hour).await, SettleOutcome::Renewed);
    clock.advance(Duration::from_secs(3_601));
    assert!(hold(&engine, "d").await.decision.is_allowed());
    assert_eq!(adjust(&engine, "c", settle()).await, SettleOutcome::Late);
    let text = engine.metrics();
    let expected = [
        ("held", 4),
        ("settled", 1),
        ("released", 1),
        ("expired", 1),
        ("already", 1),
        ("late", 1),
        ("unknown", 1),
    ];
    assert_eq!(holds(&text), expected);
    assert_eq!(releasing(&text), 4.0);
    let operations = ["hold", "settle", "release", "renew"].map(|call| requests(&text, call, "allowed"));
    assert_eq!(operations, [4.0, 4.0, 1.0, 1.0]);
    assert_eq!(value(&text, "sluicegate_decision_duration_seconds_count{transport=\"resp\"}"), 10.0);
}

/// Expired holds are compared with the holds of the same counters.
#[tokio::test]
async fn expired_holds_and_those_made_are_counted_by_counter() {
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = MemoryStore::new().with_clock(clock.clone());
    let hour = Duration::from_secs(3_600);
    let charging = Limit::fixed_window(100, hour).unwrap();
    let releasing_hour = charging.with_on_expiry(OnExpiry::Release).unwrap();
    let rules = [in_flight(9), Rule::new("released", releasing_hour), Rule::new("charged", charging)];
    let engine = Engine::new(Limiter::new(store, rules).unwrap());
    assert!(hold(&engine, "a").await.decision.is_allowed());
    assert!(hold(&engine, "a").await.is_repeated);
    assert!(!engine.hold(CALLER, &request(10), None, None).await.unwrap().decision.is_allowed());
    assert_eq!(releasing(&engine.metrics()), 2.0);
    // within the window, so that the counters remain
    clock.advance(Duration::from_secs(61));
    assert!(hold(&engine, "b").await.decision.is_allowed());
    let text = engine.metrics();
    assert_eq!(holds(&text), [("held", 2), ("expired", 2)]);
    assert_eq!(releasing(&text), 4.0);
}

#[tokio::test]
async fn a_hold_counts_as_a_check_of_its_rules_once() {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), [in_flight(3)]).unwrap());
    assert!(!hold(&engine, "a").await.is_repeated);
    assert!(hold(&engine, "a").await.is_repeated);
    assert!(!hold(&engine, "b").await.decision.is_allowed());
    let id = HoldId::new("a").ok();
    engine.hold(CALLER, &request(1), id, None).await.unwrap_err();
    let text = engine.metrics();
    assert_eq!((decisions(&text, "allowed"), decisions(&text, "denied")), (1.0, 1.0));
    let outcomes = ["allowed", "denied", "invalid"].map(|outcome| requests(&text, "hold", outcome));
    assert_eq!(outcomes, [2.0, 1.0, 1.0]);
    assert_eq!(value(&text, "sluicegate_decision_sources_total{source=\"memory\"}"), 2.0);
    let cost = "sluicegate_decision_cost_total{rule=\"in-flight\",outcome=\"allowed\"}";
    assert_eq!(value(&text, cost), 2.0);
    assert_eq!(engine.observer().top(10).heaviest[0].count, 2);
}

#[tokio::test]
async fn a_settlement_is_not_another_request_in_the_history() {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), [in_flight(3)]).unwrap());
    hold(&engine, "a").await;
    adjust(&engine, "a", settle()).await;
    engine.observer().record_second(&engine.limiter().stats());
    let seconds = engine.observer().history().since(0);
    assert_eq!((seconds[0].allowed, seconds[0].errors), (1, 0));
    assert_eq!(seconds[0].holds, HoldsSecond { held: 1, ended: 1, ..HoldsSecond::default() });
}

#[tokio::test]
async fn skipped_rules_and_queued_settlements_are_counted() {
    let engine = Engine::new(Limiter::new(FailingStore::not_run(), [in_flight(3)]).unwrap());
    engine.decide(CALLER, &request(1).on_concurrency(OnConcurrency::Skip)).await.unwrap();
    assert_eq!(adjust(&engine, "a", settle()).await, SettleOutcome::Queued);
    let renewal = HoldAdjustment::Renew(Duration::from_secs(1));
    let token = engine.limiter().hold_token(&request(1), HoldId::new("a").unwrap()).unwrap();
    engine.adjust_hold(CALLER, token, renewal, None).await.unwrap_err();
    let text = engine.metrics();
    assert_eq!(value(&text, "sluicegate_skipped_concurrency_checks_total"), 1.0);
    assert_eq!(value(&text, "sluicegate_queued_settlements"), 1.0);
    assert_eq!(holds(&text), [("queued", 1)]);
    assert_eq!((requests(&text, "settle", "allowed"), requests(&text, "renew", "failed")), (1.0, 1.0));
}
