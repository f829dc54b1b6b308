//! Holds whose id is in a label, on memory, Redis and a Cluster.

use std::time::Duration;

use futures_util::FutureExt;
use sluicegate::{
    Cost, Costs, Labels, Limit, Limiter, MemoryStore, OnStoreFailure, Options, RedisStore, Rule, Source,
    limiter::{GroupHoldDecision, OnConcurrency, Operation, Request, SettleOutcome},
    stats::HoldStats,
};
use sluicegate_core::OnExpiry;
use sluicegate_testkit::{
    cluster::Cluster,
    gated_store::GatedStore,
    server::{Flavor, Server},
    wait,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const LONG_DEADLINE: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::ZERO);

/// Rules of two descriptors, one of which contains an id.
fn rules() -> [Rule; 4] {
    let window = |amount| Limit::fixed_window(amount, DAY).unwrap();
    let releasing = Limit::sliding_log(50, DAY).unwrap().with_on_expiry(OnExpiry::Release).unwrap();
    [
        Rule::new("per-address", releasing).per(["address"]),
        Rule::new("requests", window(100)).per(["tenant"]),
        Rule::new("tokens", window(1_000)).per(["tenant"]).unit("tokens").hold("id"),
        Rule::new("in-flight", Limit::concurrency(2).unwrap()).per(["tenant"]).hold("id"),
    ]
}

fn labels<const N: usize>(labels: [(&str, &str); N]) -> Labels {
    Labels::new(labels).unwrap()
}

/// Holds a request of two descriptors with an estimate of tokens.
async fn hold(limiter: &Limiter, id: &str, estimate: u64) -> GroupHoldDecision {
    let held = labels([("tenant", "acme"), ("id", id)]);
    let hold = limiter.label_hold(&held).unwrap();
    let costs = hold.costs(Cost::new(estimate).unwrap()).unwrap();
    let address =
        Request::new(labels([("address", "203.0.113.9")]), Cost::ONE).on_concurrency(OnConcurrency::Skip);
    limiter.hold_group(&[address, Request::new(held, costs)], hold.id().clone()).await.unwrap()
}

async fn settle(limiter: &Limiter, id: &str, actual: u64) -> SettleOutcome {
    let labels = labels([("tenant", "acme"), ("id", id)]);
    limiter.settle_labels(&labels, Cost::new(actual).ok()).await.unwrap().outcome
}

/// Returns the remaining units of each rule.
async fn left(limiter: &Limiter) -> [u64; 4] {
    let labels = labels([("address", "203.0.113.9"), ("tenant", "acme")]);
    let decision = limiter.peek(&labels, Costs::from(Cost::ZERO)).await.unwrap();
    let left: Vec<u64> = decision.tiers.iter().map(|tier| tier.remaining).collect();
    left.try_into().unwrap()
}

async fn held_and_settled(limiter: Limiter) {
    let first = hold(&limiter, "r1", 400).await;
    assert!(first.is_held && first.group.overall.is_allowed());
    assert_eq!(left(&limiter).await, [49, 99, 600, 1]);

    let denied = hold(&limiter, "r2", 601).await;
    assert_eq!((denied.is_held, denied.group.overall.rule()), (false, Some("tokens")));
    assert_eq!(settle(&limiter, "r2", 1).await, SettleOutcome::Unknown);
    // with and without units for it
    for estimate in [400, 401, 601] {
        let again = hold(&limiter, "r1", estimate).await;
        assert_eq!((again.is_held, again.group.overall.rule()), (false, Some("in-flight")));
        assert!(again.group.each[0].is_allowed() && !again.group.each[1].is_allowed());
    }
    assert_eq!(left(&limiter).await, [49, 99, 600, 1]);

    assert_eq!(settle(&limiter, "r1", 120).await, SettleOutcome::Settled);
    assert_eq!(left(&limiter).await, [49, 99, 880, 2]);
    assert_eq!(settle(&limiter, "r1", 700).await, SettleOutcome::Already);
    assert_eq!(hold(&limiter, "r1", 1).await.group.overall.rule(), Some("in-flight"), "the id has ended");
    assert_eq!(left(&limiter).await, [49, 99, 880, 2]);

    // an end client may send an empty id: it is an id like any other
    assert!(hold(&limiter, "", 10).await.is_held);
    assert_eq!(hold(&limiter, "", 10).await.group.overall.rule(), Some("in-flight"));
    assert_eq!(left(&limiter).await, [48, 98, 870, 1]);
    assert_eq!(settle(&limiter, "", 10).await, SettleOutcome::Settled);
    assert_eq!(settle(&limiter, "!", 10).await, SettleOutcome::Unknown);
    assert_eq!(left(&limiter).await, [48, 98, 870, 2]);

    let [per_address, requests, tokens, _] = rules();
    limiter.reconfigure([per_address, requests, tokens]).unwrap();
    let charged = hold(&limiter, "r1", 80).await;
    assert!(charged.group.overall.is_allowed() && !charged.is_held);
    let labels = labels([("tenant", "acme")]);
    let tokens = limiter.peek(&labels, Cost::ZERO).await.unwrap().tiers[1].remaining;
    assert_eq!(tokens, 790, "charged like a check");
    assert_eq!(settle(&limiter, "r1", 0).await, SettleOutcome::Already);
}

#[tokio::test]
async fn an_id_in_a_label_holds_and_settles_in_memory() {
    held_and_settled(Limiter::new(MemoryStore::new(), rules()).unwrap()).await;
}

#[tokio::test]
async fn an_id_in_a_label_holds_and_settles_in_redis() {
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::builder().store(store).rules(rules()).options(LONG_DEADLINE).build().unwrap();
    held_and_settled(limiter).await;
}

#[tokio::test]
async fn an_id_in_a_label_holds_and_settles_over_several_cluster_nodes() {
    let cluster = Cluster::start(Flavor::Redis7);
    let url = cluster.urls()[0].replace("redis://", "redis-cluster://");
    let store = RedisStore::connect(&url).await.unwrap();
    let limiter = Limiter::builder().store(store).rules(rules()).options(LONG_DEADLINE).build().unwrap();
    held_and_settled(limiter).await;
}

fn on_gated_store(
    rules: impl IntoIterator<Item = Rule>,
    deadline: Duration,
) -> (Limiter, std::sync::Arc<GatedStore>) {
    let store = GatedStore::closed();
    let options = Options::new().deadline(deadline);
    (Limiter::builder().store(store.clone()).rules(rules).options(options).build().unwrap(), store)
}

/// Envoy sends no call at the end of a stream that ended before the first one was answered.
#[tokio::test]
async fn a_hold_whose_caller_is_dropped_while_the_store_decides_is_released() {
    let (limiter, store) = on_gated_store(rules(), Duration::from_secs(60));
    let caller = limiter.clone();
    let caller = tokio::spawn(async move { hold(&caller, "r", 400).await });
    store.received().await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    store.permit(1_000);
    wait::until_async("the hold is released", wait::PATIENCE, async || limiter.stats().holds.released == 1)
        .await;
    assert_eq!(left(&limiter).await[2..], [1_000, 2]);
}

/// The refunds of a group follow its hold.
#[tokio::test]
async fn a_hold_whose_caller_is_dropped_while_the_store_refunds_is_released() {
    let (limiter, store) = on_gated_store(rules(), Duration::from_secs(60));
    let caller = limiter.clone();
    let caller = tokio::spawn(async move {
        let held = labels([("tenant", "acme"), ("id", "r")]);
        let hold = caller.label_hold(&held).unwrap();
        let costs = hold.costs(Cost::from(400)).unwrap();
        let refund = Request::new(labels([("address", "203.0.113.9")]), Cost::ONE);
        let refund = refund.operation(Operation::Refund { at: None });
        caller.hold_group(&[Request::new(held, costs), refund], hold.id().clone()).await
    });
    store.received().await;
    store.permit(1);
    store.received().await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    store.permit(1_000);
    wait::until_async("the hold is released", wait::PATIENCE, async || limiter.stats().holds.released == 1)
        .await;
    assert_eq!(left(&limiter).await[2..], [1_000, 2]);
}

/// The id may be that of another hold in the store.
#[tokio::test(start_paused = true)]
async fn a_hold_of_an_untrusted_id_that_a_failure_policy_made_is_not_released_in_the_store() {
    let local = rules().map(|rule| rule.on_store_failure(OnStoreFailure::Local));
    let (limiter, store) = on_gated_store(local, Duration::from_millis(100));
    let caller = limiter.clone();
    let caller = tokio::spawn(async move { hold(&caller, "r", 400).await });
    store.received().await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    assert_eq!(limiter.flush_settlements(Duration::from_secs(5)).await, 0);
    let HoldStats { held, released, .. } = limiter.stats().holds;
    assert_eq!((held, released), (1, 0), "the hold is only in this process");
    assert!(store.received().now_or_never().is_none(), "nothing was sent besides the hold");
}

/// Otherwise the estimate would be refunded when the hold expires, because nothing settles it.
#[tokio::test]
async fn during_an_outage_a_counter_without_the_label_keeps_its_charge_after_the_ttl() {
    const TTL: Duration = Duration::from_millis(50);
    let [_, requests, tokens, in_flight] =
        rules().map(|rule| rule.on_store_failure(OnStoreFailure::Local).ttl(TTL));
    let two = Limit::sliding_log(2, DAY).unwrap().with_on_expiry(OnExpiry::Release).unwrap();
    let per_address = Rule::new("per-address", two).per(["address"]).on_store_failure(OnStoreFailure::Local);
    let (limiter, _store) =
        on_gated_store([per_address, requests, tokens, in_flight], Duration::from_millis(20));
    for id in ["r1", "r2"] {
        assert!(hold(&limiter, id, 10).await.group.overall.is_allowed());
    }
    tokio::time::sleep(2 * TTL).await;
    let denied = hold(&limiter, "r3", 10).await.group.overall;
    assert_eq!((denied.source, denied.rule()), (Source::Fallback, Some("per-address")));
}

/// The second call for a repeated id has less time. A client that repeats an id must gain nothing by that.
#[tokio::test]
async fn a_repeated_id_is_denied_if_the_store_has_no_time_to_decide_even_with_the_policy_open() {
    let [per_address, requests, tokens, _] = rules();
    let (limiter, store) = on_gated_store([per_address, requests, tokens], Duration::from_millis(100));
    store.permit(2);
    assert!(hold(&limiter, "r", 10).await.is_held);
    assert_eq!(
        limiter.flush_settlements(wait::PATIENCE).await,
        0,
        "the counter without the label is settled"
    );
    store.permit(1);
    let repeated = hold(&limiter, "r", 10).await.group.overall;
    assert_eq!((repeated.is_allowed(), repeated.source), (false, Source::Closed));
    let first = hold(&limiter, "another", 10).await.group.overall;
    assert_eq!((first.is_allowed(), first.source), (true, Source::Open));
}

/// A second attempt would conflict with the first one, and be denied.
#[tokio::test]
async fn a_hold_of_an_untrusted_id_is_sent_once() {
    let closed = rules().map(|rule| rule.on_store_failure(OnStoreFailure::Open));
    let (limiter, store) = on_gated_store(closed, Duration::from_millis(100));
    let unanswered = hold(&limiter, "r", 400).await;
    assert_eq!(unanswered.group.overall.source, Source::Open);
    assert!(!unanswered.is_held, "the store may have another hold of this id");
    store.received().now_or_never().expect("the hold was sent");
    assert!(store.received().now_or_never().is_none(), "only once");
}

#[tokio::test]
async fn without_a_matching_rule_that_names_the_label_there_is_no_hold() {
    let limiter = Limiter::new(MemoryStore::new(), rules()).unwrap();
    for other in
        [labels([("tenant", "acme")]), labels([("id", "r")]), labels([("address", "a"), ("id", "r")])]
    {
        assert_eq!(limiter.label_hold(&other), None, "{other:?}");
        let settled = limiter.settle_labels(&other, None).await.unwrap();
        assert_eq!((settled.outcome, settled.tiers.len()), (SettleOutcome::Unknown, 0));
    }
}

#[tokio::test]
async fn a_single_number_is_the_cost_in_the_units_of_the_rules_that_name_the_label() {
    let rule =
        |name: &str, unit: &str| Rule::new(name, Limit::fixed_window(10, DAY).unwrap()).unit(unit).hold("id");
    let in_flight = || Rule::new("in-flight", Limit::concurrency(2).unwrap()).hold("id");
    let number = Cost::from(7);
    for (rules, expected) in [
        (vec![in_flight()], vec![("requests", 7)]),
        (vec![in_flight(), rule("tokens", "tokens")], vec![("requests", 1), ("tokens", 7)]),
        (
            vec![rule("a", "tokens"), rule("b", "tokens"), rule("c", "cents")],
            vec![("requests", 1), ("tokens", 7), ("cents", 7)],
        ),
        (vec![rule("plain", "requests"), rule("tokens", "tokens")], vec![("requests", 1), ("tokens", 7)]),
        (vec![rule("plain", "requests")], vec![("requests", 7)]),
    ] {
        let limiter = Limiter::new(MemoryStore::new(), rules).unwrap();
        let hold = limiter.label_hold(&labels([("id", "r")])).unwrap();
        let costs = hold.costs(number).unwrap();
        let costs: Vec<_> = costs.iter().map(|(unit, cost)| (unit, cost.units())).collect();
        assert_eq!(costs, expected);
    }
}
