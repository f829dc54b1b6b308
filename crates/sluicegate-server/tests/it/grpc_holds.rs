//! Holds over Envoy's rate limit service: the call before a request makes the hold, and the call at the end of the stream settles it.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{sync::Arc, time::Duration};

use sluicegate::{Cost, Costs, Labels, Limit, Limiter, OnStoreFailure, Options, Rule, Source};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    engine::Engine,
    grpc::{
        Settings,
        messages::{Code, RateLimitDescriptor, RateLimitResponse},
    },
};

use prost_types::value::Kind;
use sluicegate_core::OnExpiry;
use sluicegate_testkit::{gated_store::GatedStore, wait};
use tokio::time::{sleep, timeout};

use crate::grpc_front::{Front, OnMemory, descriptor, hits, negative, on_memory, request, seconds};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn window(amount: u64) -> Limit {
    Limit::fixed_window(amount, DAY).unwrap()
}

/// Requests, tokens and requests in flight of each tenant.
fn budget() -> [Rule; 3] {
    [
        Rule::new("requests", window(100)).per(["tenant"]),
        Rule::new("tokens", window(1_000))
            .per(["tenant"])
            .unit("tokens")
            .hold("request_id")
            .ttl(seconds(600)),
        in_flight(2),
    ]
}

fn in_flight(amount: u64) -> Rule {
    Rule::new("in-flight", Limit::concurrency(amount).unwrap())
        .per(["tenant"])
        .hold("request_id")
        .ttl(seconds(600))
}

/// The descriptor of the request-phase call.
fn start(id: &str, estimate: u64) -> RateLimitDescriptor {
    hits(estimate, descriptor([("tenant", "acme"), ("request_id", id)]))
}

/// The descriptor of the call at the end of the stream.
fn end(id: &str, actual: u64) -> RateLimitDescriptor {
    hits(actual, end_without_cost(id))
}

fn end_without_cost(id: &str) -> RateLimitDescriptor {
    descriptor([("tenant", "acme"), ("request_id", id), ("sluicegate", "settle")])
}

impl OnMemory {
    async fn code(&mut self, descriptors: Vec<RateLimitDescriptor>) -> Code {
        self.call("edge", descriptors).await.overall_code()
    }

    /// Sends the call at the end of a stream, which is always answered OK.
    async fn settle(&mut self, descriptors: Vec<RateLimitDescriptor>) {
        let count = descriptors.len();
        let answer = self.call("edge", descriptors).await;
        assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok; count]));
    }

    /// Returns the remaining units of each rule that matches the tenant.
    async fn left(&self) -> Vec<(String, u64)> {
        left(&self.limiter).await
    }
}

async fn left(limiter: &Limiter) -> Vec<(String, u64)> {
    let labels = Labels::new([("tenant", "acme"), ("domain", "edge")]).unwrap();
    let decision = limiter.peek(&labels, Cost::ZERO).await.unwrap();
    let left = |tier: &sluicegate::TierDecision| {
        // a debt is not reported as remaining units
        (tier.rule.as_deref().unwrap().to_owned(), tier.remaining)
    };
    decision.tiers.iter().map(left).collect()
}

fn expect<const N: usize>(left: [(&str, u64); N]) -> Vec<(String, u64)> {
    left.map(|(rule, units)| (rule.to_owned(), units)).into()
}

/// Whether the response has the settle entry as dynamic metadata.
fn is_marked(answer: &RateLimitResponse) -> bool {
    let Some(metadata) = &answer.dynamic_metadata else { return false };
    let entries: Vec<_> = metadata.fields.iter().map(|(key, value)| (&**key, value.kind.clone())).collect();
    assert_eq!(entries, [("sluicegate", Some(Kind::StringValue("settle".to_owned())))]);
    true
}

fn codes(answer: &RateLimitResponse) -> (Code, Vec<Code>) {
    (answer.overall_code(), answer.statuses.iter().map(|status| status.code()).collect())
}

#[tokio::test]
async fn a_request_is_held_with_its_estimate_and_settled_with_the_addend_of_the_second_call() {
    let mut envoy = OnMemory::start(budget()).await;
    let answer = envoy.call("edge", vec![start("r1", 400)]).await;
    assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok]));
    let held = expect([("requests", 99), ("tokens", 600), ("in-flight", 1)]);
    assert_eq!(envoy.left().await, held);
    assert_eq!(envoy.code(vec![start("r2", 601)]).await, Code::OverLimit, "the estimate counts");
    assert_eq!(envoy.left().await, held, "a denied request holds nothing");

    envoy.settle(vec![end("r1", 7)]).await;
    let settled = expect([("requests", 99), ("tokens", 993), ("in-flight", 2)]);
    assert_eq!(envoy.left().await, settled);
    envoy.settle(vec![end("r1", 500)]).await;
    assert_eq!(envoy.left().await, settled, "only once");
    let stats = envoy.limiter.stats();
    assert_eq!((stats.holds.held, stats.holds.settled, stats.holds.already), (1, 1, 1));
    assert_eq!(stats.skipped_concurrency, 0);
}

#[tokio::test]
async fn the_excess_is_charged_and_a_settlement_without_an_addend_keeps_the_estimate() {
    let mut envoy = OnMemory::start(budget()).await;
    assert_eq!(envoy.code(vec![start("low", 0)]).await, Code::Ok);
    assert_eq!(envoy.left().await, expect([("requests", 99), ("tokens", 1_000), ("in-flight", 1)]));
    envoy.settle(vec![end("low", 300)]).await;
    assert_eq!(envoy.left().await, expect([("requests", 99), ("tokens", 700), ("in-flight", 2)]));

    assert_eq!(envoy.code(vec![start("kept", 50)]).await, Code::Ok);
    envoy.settle(vec![end_without_cost("kept")]).await;
    assert_eq!(envoy.left().await, expect([("requests", 98), ("tokens", 650), ("in-flight", 2)]));

    let of_all = |addend, descriptors| {
        let request = request("edge", descriptors);
        sluicegate_server::grpc::messages::RateLimitRequest { hits_addend: addend, ..request }
    };
    let plain = descriptor([("tenant", "acme"), ("request_id", "of-all")]);
    envoy.front.call(of_all(20, vec![plain])).await.unwrap();
    envoy.front.call(of_all(30, vec![end_without_cost("of-all")])).await.unwrap();
    assert_eq!(envoy.left().await, expect([("requests", 97), ("tokens", 620), ("in-flight", 2)]));
}

#[tokio::test]
async fn of_two_settle_descriptors_the_one_with_an_addend_is_used() {
    let mut envoy = OnMemory::start(budget()).await;
    for (id, ends) in [
        ("a", vec![end("a", 7), end_without_cost("a")]),
        ("b", vec![end_without_cost("b"), end("b", 7)]),
        ("c", vec![end("c", 5), end("c", 7), end("c", 6)]),
        ("d", vec![end_without_cost("d"), end("d", 0)]),
    ] {
        assert_eq!(envoy.code(vec![start(id, 100)]).await, Code::Ok);
        envoy.settle(ends).await;
    }
    assert_eq!(envoy.left().await, expect([("requests", 96), ("tokens", 979), ("in-flight", 2)]));
    assert_eq!(envoy.limiter.stats().holds.settled, 4);
}

/// Envoy copies the settle entry from the metadata into the call at the end of a stream, so only requests that are held have such a call.
#[tokio::test]
async fn only_the_response_to_a_held_request_has_the_settle_entry() {
    let [requests, tokens, in_flight] = budget();
    let mut envoy = OnMemory::start([requests, tokens, in_flight.shadow()]).await;
    for (descriptor, is_held) in [
        (start("r", 10), true),
        (start("r", 10), false),
        (end("r", 10), false),
        (start("r", 10), false),
        (start("denied", 5_000), false),
        (descriptor([("tenant", "acme")]), false),
        (start("s", 0), true),
    ] {
        let answer = envoy.call("edge", vec![descriptor.clone()]).await;
        assert_eq!(is_marked(&answer), is_held, "{descriptor:?}");
    }
}

#[tokio::test]
async fn a_settlement_without_a_hold_changes_nothing() {
    let mut envoy = OnMemory::start(budget()).await;
    let full = expect([("requests", 100), ("tokens", 1_000), ("in-flight", 2)]);
    envoy.settle(vec![end("unknown", 100)]).await;
    let without_id = hits(9, descriptor([("tenant", "acme"), ("sluicegate", "settle")]));
    envoy.settle(vec![without_id, hits(9, descriptor([("sluicegate", "settle")]))]).await;
    assert_eq!(envoy.left().await, full);
    // a denied request has an end too
    assert_eq!(envoy.code(vec![start("denied", 5_000)]).await, Code::OverLimit);
    envoy.settle(vec![end("denied", 5_000)]).await;
    assert_eq!(envoy.left().await, full);
    // the end of an earlier request may arrive before the start of the next
    assert_eq!(envoy.code(vec![start("r", 10)]).await, Code::Ok);
    envoy.settle(vec![end("other", 100)]).await;
    assert_eq!(envoy.left().await, expect([("requests", 99), ("tokens", 990), ("in-flight", 1)]));
}

#[tokio::test]
async fn without_an_id_concurrency_rules_are_skipped_and_counted() {
    let mut envoy = OnMemory::start(budget()).await;
    for _ in 0..5 {
        assert_eq!(envoy.code(vec![descriptor([("tenant", "acme")])]).await, Code::Ok);
    }
    let both = vec![descriptor([("tenant", "acme")]), descriptor([("other", "x")])];
    assert_eq!(envoy.code(both).await, Code::Ok);
    assert_eq!(envoy.left().await, expect([("requests", 94), ("tokens", 1_000), ("in-flight", 2)]));
    assert_eq!(envoy.limiter.stats().skipped_concurrency, 6);
}

#[tokio::test]
async fn a_repeated_live_id_is_denied_by_a_concurrency_rule_and_charges_nothing() {
    let mut envoy = OnMemory::start(budget()).await;
    assert_eq!(envoy.code(vec![start("r", 10)]).await, Code::Ok);
    let held = expect([("requests", 99), ("tokens", 990), ("in-flight", 1)]);
    for estimate in [10, 11] {
        let again = envoy.call("edge", vec![start("r", estimate)]).await;
        assert_eq!(codes(&again), (Code::OverLimit, vec![Code::OverLimit]));
        let limit = again.statuses[0].current_limit.as_ref().unwrap();
        assert_eq!((&*limit.name, limit.requests_per_unit), ("in-flight", 2));
        assert_eq!(again.statuses[0].duration_until_reset, None, "waiting does not help");
        assert_eq!(envoy.left().await, held);
    }
    // also an id that has ended
    envoy.settle(vec![end("r", 10)]).await;
    assert_eq!(envoy.code(vec![start("r", 10)]).await, Code::OverLimit);
    assert_eq!(envoy.left().await, expect([("requests", 99), ("tokens", 990), ("in-flight", 2)]));
}

#[tokio::test]
async fn a_repeated_live_id_is_charged_like_a_check_without_concurrency_rules() {
    let [requests, tokens, _] = budget();
    let shadow = in_flight(2).shadow();
    let mut envoy = OnMemory::start([requests, tokens, shadow]).await;
    for (left, in_flight) in [(990, 1), (980, 1), (970, 1)] {
        assert_eq!(envoy.code(vec![start("r", 10)]).await, Code::Ok);
        let requests = 100 - (1_000 - left) / 10;
        let expected = expect([("requests", requests), ("tokens", left), ("in-flight", in_flight)]);
        assert_eq!(envoy.left().await, expected);
    }
    assert_eq!(envoy.code(vec![start("r", 971)]).await, Code::OverLimit);
    // the end settles the first one
    envoy.settle(vec![end("r", 4)]).await;
    assert_eq!(envoy.left().await, expect([("requests", 97), ("tokens", 976), ("in-flight", 2)]));
}

#[tokio::test]
async fn ids_may_be_long_empty_or_any_bytes() {
    let mut envoy = OnMemory::start([in_flight(10)]).await;
    let long = "x".repeat(3_000);
    let other = format!("{long}y");
    let ids: [&[u8]; 6] = [b"", b" ", b"\xff\xfe", b"a/b:c", long.as_bytes(), other.as_bytes()];
    let with_id = |id: &[u8], descriptor: RateLimitDescriptor| {
        let mut descriptor = descriptor;
        descriptor.entries[1].value = id.to_vec();
        descriptor
    };
    for (held, id) in (1..).zip(ids) {
        assert_eq!(envoy.code(vec![with_id(id, start("", 1))]).await, Code::Ok, "{id:?}");
        assert_eq!(envoy.left().await, expect([("in-flight", 10 - held)]));
        assert_eq!(envoy.code(vec![with_id(id, start("", 1))]).await, Code::OverLimit, "{id:?}");
    }
    for id in ids {
        envoy.settle(vec![with_id(id, end("", 1))]).await;
    }
    assert_eq!(envoy.left().await, expect([("in-flight", 10)]));
}

#[tokio::test]
async fn the_descriptors_of_a_request_are_held_together_or_not_at_all() {
    let per_address = Rule::new("per-address", window(3)).per(["address"]).max_excess(0);
    let [requests, tokens, in_flight] = budget();
    let mut envoy = OnMemory::start([requests, tokens, in_flight, per_address.clone()]).await;
    let address = || descriptor([("address", "203.0.113.9")]);
    for id in ["a", "b"] {
        assert_eq!(envoy.code(vec![address(), start(id, 100)]).await, Code::Ok);
    }
    let third = envoy.call("edge", vec![address(), start("c", 100)]).await;
    assert_eq!(codes(&third), (Code::OverLimit, vec![Code::Ok, Code::OverLimit]));
    assert_eq!(third.statuses[0].limit_remaining, 1, "the other descriptor is not charged");
    envoy.settle(vec![end("a", 1)]).await;
    envoy.settle(vec![end("b", 1)]).await;
    assert_eq!(envoy.code(vec![address(), start("d", 100)]).await, Code::Ok);
    let fifth = envoy.call("edge", vec![address(), start("e", 100)]).await;
    assert_eq!(codes(&fifth), (Code::OverLimit, vec![Code::OverLimit, Code::Ok]));
    assert_eq!(envoy.left().await, expect([("requests", 97), ("tokens", 898), ("in-flight", 1)]));
}

/// Charges of descriptors without an id, and of rules without `hold`, are not corrected, regardless of `on_expiry`.
#[tokio::test]
async fn a_rule_without_hold_keeps_its_charge_when_the_request_ends_or_expires() {
    let releasing = |rule: &str, label: &str| {
        Rule::new(rule, window(10).with_on_expiry(OnExpiry::Release).unwrap()).per([label])
    };
    let rules = [releasing("own", "tenant"), releasing("other", "address"), in_flight(5)];
    let mut envoy = OnMemory::start(rules).await;
    let address = || descriptor([("address", "203.0.113.9")]);
    assert_eq!(envoy.code(vec![address(), start("settled", 2)]).await, Code::Ok);
    envoy.settle(vec![end("settled", 1)]).await;
    assert_eq!(envoy.code(vec![address(), start("expired", 2)]).await, Code::Ok);
    envoy.clock.advance(seconds(601));
    let code = envoy.code(vec![address(), start("next", 2)]).await;
    assert_eq!(code, Code::Ok);
    // the hold that expired is released where the rule is part of it, and kept where it is not
    let labels = Labels::new([("address", "203.0.113.9"), ("tenant", "acme")]).unwrap();
    let decision = envoy.limiter.peek(&labels, Cost::ZERO).await.unwrap();
    let left: Vec<(&str, u64)> =
        decision.tiers.iter().map(|tier| (tier.rule.as_deref().unwrap(), tier.remaining)).collect();
    assert_eq!(left, [("own", 6), ("other", 7), ("in-flight", 4)]);
}

#[tokio::test]
async fn the_addend_is_in_the_units_of_the_rules_with_hold_other_than_requests() {
    let held =
        |rule: &str, unit: &str| Rule::new(rule, window(1_000)).per(["tenant"]).unit(unit).hold("request_id");
    let mut envoy = OnMemory::start([
        held("requests", "requests"),
        held("tokens", "tokens"),
        held("double", "tokens").cost(Cost::from(2)),
        held("cents", "cents"),
        in_flight(3),
    ])
    .await;
    let left = |requests, tokens, double, cents, in_flight| {
        expect([
            ("requests", requests),
            ("tokens", tokens),
            ("double", double),
            ("cents", cents),
            ("in-flight", in_flight),
        ])
    };
    assert_eq!(envoy.code(vec![start("r", 100)]).await, Code::Ok);
    assert_eq!(envoy.left().await, left(999, 900, 800, 900, 2));
    envoy.settle(vec![end("r", 10)]).await;
    assert_eq!(envoy.left().await, left(999, 990, 980, 990, 3));
}

#[tokio::test]
async fn without_another_unit_the_addend_is_a_number_of_requests_but_one_request_in_flight() {
    let held = Rule::new("held", window(1_000)).per(["tenant"]).hold("request_id");
    let plain = Rule::new("plain", window(1_000)).per(["tenant"]);
    let mut envoy = OnMemory::start([held, plain, in_flight(3)]).await;
    let left = |held, plain, in_flight| expect([("held", held), ("plain", plain), ("in-flight", in_flight)]);
    assert_eq!(envoy.code(vec![start("r", 100)]).await, Code::Ok);
    assert_eq!(envoy.left().await, left(900, 900, 2));
    envoy.settle(vec![end("r", 10)]).await;
    assert_eq!(envoy.left().await, left(990, 900, 3));
}

#[tokio::test]
async fn a_concurrency_rule_may_have_a_cost_factor() {
    let mut envoy = OnMemory::start([in_flight(10).cost(Cost::from(4))]).await;
    assert_eq!(envoy.code(vec![start("a", 7)]).await, Code::Ok);
    assert_eq!(envoy.code(vec![start("b", 0)]).await, Code::Ok);
    assert_eq!(envoy.code(vec![start("c", 1)]).await, Code::OverLimit);
    envoy.settle(vec![end("a", 1)]).await;
    assert_eq!(envoy.left().await, expect([("in-flight", 6)]));
}

#[tokio::test]
async fn a_hold_expires_if_the_end_of_its_stream_is_not_reported() {
    let mut envoy = OnMemory::start(budget()).await;
    for id in ["a", "b"] {
        assert_eq!(envoy.code(vec![start(id, 100)]).await, Code::Ok);
    }
    assert_eq!(envoy.code(vec![start("c", 100)]).await, Code::OverLimit);
    envoy.clock.advance(seconds(601));
    assert_eq!(envoy.code(vec![start("c", 100)]).await, Code::Ok);
    // the estimate of an expired hold stays charged until its end is known
    assert_eq!(envoy.left().await[1], ("tokens".to_owned(), 700));
    envoy.settle(vec![end("a", 1)]).await;
    assert_eq!(envoy.left().await[1..], expect([("tokens", 799), ("in-flight", 1)]));
}

#[tokio::test]
async fn the_end_of_a_stream_never_holds_and_decides_its_other_descriptors_as_before() {
    let per_address = Rule::new("per-address", window(1)).per(["address"]);
    let [requests, tokens, in_flight] = budget();
    let mut envoy = OnMemory::start([requests, tokens, in_flight, per_address]).await;
    assert_eq!(envoy.code(vec![start("r", 10)]).await, Code::Ok);
    let address = || descriptor([("address", "203.0.113.9")]);
    // "new" is not held: the call has a mark
    let mixed = vec![address(), end("r", 20), start("new", 1), end("unknown", 1)];
    let answer = envoy.call("edge", mixed.clone()).await;
    assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok; 4]));
    assert_eq!(answer.statuses[0].current_limit.as_ref().unwrap().name, "per-address");
    assert_eq!(answer.statuses[1].current_limit, None);
    assert_eq!(answer.statuses[2].current_limit.as_ref().unwrap().name, "requests");
    assert_eq!(envoy.left().await, expect([("requests", 98), ("tokens", 980), ("in-flight", 2)]));
    let answer = envoy.call("edge", mixed).await;
    assert_eq!(codes(&answer), (Code::OverLimit, vec![Code::OverLimit, Code::Ok, Code::Ok, Code::Ok]));
    // a descriptor with a repeated key settles nothing and prevents nothing
    assert_eq!(envoy.code(vec![start("s", 10)]).await, Code::Ok);
    let invalid = descriptor([("a", "1"), ("a", "2"), ("sluicegate", "settle")]);
    envoy.settle(vec![invalid, end("s", 0)]).await;
    assert_eq!(envoy.left().await, expect([("requests", 97), ("tokens", 980), ("in-flight", 2)]));
}

#[tokio::test]
async fn only_the_whole_entry_marks_the_end_of_a_stream() {
    let mut envoy = OnMemory::start([in_flight(10)]).await;
    let entries = [("sluicegate", "Settle"), ("sluicegate", ""), ("Sluicegate", "settle"), ("x", "settle")];
    for (held, (key, value)) in (1..).zip(entries) {
        let unmarked = descriptor([("tenant", "acme"), ("request_id", &format!("r{held}")), (key, value)]);
        assert_eq!(envoy.code(vec![unmarked]).await, Code::Ok, "{key}={value}");
        assert_eq!(envoy.left().await, expect([("in-flight", 10 - held)]), "{key}={value}");
    }
}

#[tokio::test]
async fn descriptors_with_different_ids_are_denied() {
    let mut envoy = OnMemory::start(budget()).await;
    let answer = envoy.call("edge", vec![start("a", 1), start("b", 1)]).await;
    assert_eq!(codes(&answer), (Code::OverLimit, vec![Code::OverLimit; 2]));
    assert_eq!(envoy.left().await, expect([("requests", 100), ("tokens", 1_000), ("in-flight", 2)]));
    // the ends of several requests may arrive in one call
    for id in ["a", "b"] {
        assert_eq!(envoy.code(vec![start(id, 1)]).await, Code::Ok);
    }
    envoy.settle(vec![end("a", 10), end("b", 20)]).await;
    assert_eq!(envoy.left().await, expect([("requests", 98), ("tokens", 970), ("in-flight", 2)]));
}

#[tokio::test]
async fn refunds_of_a_held_request_are_made_if_it_is_allowed() {
    let [requests, tokens, in_flight] = budget();
    let per_address = Rule::new("per-address", window(10)).per(["address"]);
    let mut envoy = OnMemory::start([requests, tokens, in_flight, per_address]).await;
    let refund = || negative(hits(2, descriptor([("address", "a")])));
    assert_eq!(envoy.code(vec![hits(5, descriptor([("address", "a")]))]).await, Code::Ok);
    assert_eq!(envoy.code(vec![start("a", 10), refund()]).await, Code::Ok);
    assert_eq!(envoy.code(vec![start("a", 10), refund()]).await, Code::OverLimit);
    let labels = Labels::new([("address", "a")]).unwrap();
    let left = envoy.limiter.peek(&labels, Costs::from(Cost::ZERO)).await.unwrap().remaining();
    assert_eq!(left, Some(7));
    assert_eq!(envoy.left().await, expect([("requests", 99), ("tokens", 990), ("in-flight", 1)]));
}

/// Envoy sends no end of a stream whose client disconnected before the first call was answered.
#[tokio::test]
async fn a_call_that_is_cancelled_while_the_store_decides_leaves_no_hold() {
    for with_refund in [false, true] {
        let store = GatedStore::closed();
        let options = Options::new().deadline(seconds(10));
        let limiter = Limiter::builder().store(Arc::clone(&store)).rules(budget()).options(options);
        let limiter = limiter.build().unwrap();
        let mut front = Front::start(limiter.clone(), Settings::default()).await;
        let refund = with_refund.then(|| negative(hits(2, descriptor([("tenant", "other")]))));
        let descriptors = [start("r", 10)].into_iter().chain(refund).collect();
        let call = tokio::spawn(async move { front.call(request("edge", descriptors)).await.map(drop) });
        store.received().await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        sleep(Duration::from_millis(100)).await;
        store.permit(1_000);
        let released = async {
            while limiter.stats().holds.released == 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        assert!(timeout(seconds(5), released).await.is_ok(), "with a refund: {with_refund}");
        assert_eq!(left(&limiter).await, expect([("requests", 100), ("tokens", 1_000), ("in-flight", 2)]));
    }
}

/// A front end on a store that can be down, whose rules have a failure policy.
struct OnGate {
    store: Arc<GatedStore>,
    limiter: Limiter,
    front: Front,
}

impl OnGate {
    async fn start(rules: impl IntoIterator<Item = Rule>, policy: OnStoreFailure) -> Self {
        let store = GatedStore::open();
        let rules = rules.into_iter().map(|rule| rule.on_store_failure(policy));
        let limiter = Limiter::new(Arc::clone(&store), rules).unwrap();
        let front = Front::start(limiter.clone(), Settings::default()).await;
        Self { store, limiter, front }
    }

    async fn call(&mut self, descriptor: RateLimitDescriptor) -> RateLimitResponse {
        self.front.call(request("edge", vec![descriptor])).await.unwrap()
    }

    /// Waits until the store decides again.
    async fn until_recovered(&self) {
        let labels = Labels::new([("tenant", "acme"), ("domain", "edge")]).unwrap();
        wait::until_async("the store decides", wait::PATIENCE, async || {
            self.limiter.peek(&labels, Cost::ZERO).await.unwrap().source == Source::Store
        })
        .await;
    }
}

#[tokio::test]
async fn a_stream_that_ends_during_an_outage_is_settled_after_it() {
    for policy in [OnStoreFailure::Open, OnStoreFailure::Closed, OnStoreFailure::Local] {
        let mut envoy = OnGate::start(budget(), policy).await;
        assert!(is_marked(&envoy.call(start("r", 400)).await));
        let held = expect([("requests", 99), ("tokens", 600), ("in-flight", 1)]);
        assert_eq!(left(&envoy.limiter).await, held, "{policy:?}");
        envoy.store.set_down(true);
        let answer = envoy.call(end("r", 7)).await;
        assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok]), "{policy:?}");
        assert_eq!(envoy.limiter.stats().holds.waiting, 1, "{policy:?}");
        envoy.store.set_down(false);
        wait::until_async("the queued settlement is sent", wait::PATIENCE, async || {
            envoy.limiter.stats().holds.waiting == 0
        })
        .await;
        envoy.until_recovered().await;
        let settled = expect([("requests", 99), ("tokens", 993), ("in-flight", 2)]);
        assert_eq!(left(&envoy.limiter).await, settled, "{policy:?}");
    }
}

/// In the store, the id may be that of another request, so Envoy gets no settle entry.
#[tokio::test]
async fn during_an_outage_the_policy_local_counts_a_request_as_in_flight_until_its_ttl() {
    let mut envoy = OnGate::start([in_flight(2)], OnStoreFailure::Local).await;
    envoy.store.set_down(true);
    for id in ["a", "b"] {
        let answer = envoy.call(start(id, 1)).await;
        assert_eq!((answer.overall_code(), is_marked(&answer)), (Code::Ok, false), "{id}");
    }
    assert_eq!(envoy.call(start("c", 1)).await.overall_code(), Code::OverLimit);
    // with a constant settle entry, Envoy makes the second call nevertheless
    assert_eq!(envoy.call(end("a", 1)).await.overall_code(), Code::Ok);
    assert_eq!(envoy.call(start("d", 1)).await.overall_code(), Code::Ok);
    assert_eq!(envoy.call(start("e", 1)).await.overall_code(), Code::OverLimit);
    envoy.store.set_down(false);
    envoy.until_recovered().await;
    assert_eq!(left(&envoy.limiter).await, expect([("in-flight", 2)]), "the store has no hold");

    let short = in_flight(2).ttl(Duration::from_millis(200));
    let mut envoy = OnGate::start([short], OnStoreFailure::Local).await;
    envoy.store.set_down(true);
    for id in ["a", "b"] {
        assert_eq!(envoy.call(start(id, 1)).await.overall_code(), Code::Ok, "{id}");
    }
    let mut ids = (0..).map(|number| number.to_string());
    wait::until_async("a slot is free after the ttl", wait::PATIENCE, async || {
        envoy.call(start(&ids.next().unwrap(), 1)).await.overall_code() == Code::Ok
    })
    .await;
}

#[tokio::test]
async fn numbers_beyond_their_range_settle_with_the_largest_cost() {
    let mut envoy = OnMemory::start(budget()).await;
    assert_eq!(envoy.code(vec![start("r", 10)]).await, Code::Ok);
    envoy.settle(vec![end("r", u64::MAX)]).await;
    assert_eq!(envoy.left().await, expect([("requests", 99), ("tokens", 0), ("in-flight", 2)]));
    assert_eq!(envoy.code(vec![start("s", 1)]).await, Code::OverLimit);
    assert_eq!(envoy.code(vec![start("t", u64::MAX)]).await, Code::OverLimit);
}

#[tokio::test]
async fn without_the_scope_adjust_the_excess_is_bounded() {
    for (may_adjust, tokens_left) in [(false, 940), (true, 0)] {
        let [requests, tokens, in_flight] = budget();
        let (limiter, _clock) = on_memory([requests, tokens.max_excess(50), in_flight]);
        let scopes = Scopes { check: true, adjust: may_adjust, admin: false };
        let access = Access::new(vec![Token::new("envoy", b"secret", scopes)]);
        let engine = Engine::new(limiter.clone());
        let mut front = Front::with_access(engine, Settings::default(), access).await;
        for descriptor in [start("r", 10), end("r", 5_000)] {
            let mut call = tonic::Request::new(request("edge", vec![descriptor]));
            call.metadata_mut().insert("authorization", "Bearer secret".parse().unwrap());
            let answer = front.client.should_rate_limit(call).await.unwrap().into_inner();
            assert_eq!(answer.overall_code(), Code::Ok);
        }
        let settled = expect([("requests", 99), ("tokens", tokens_left), ("in-flight", 2)]);
        assert_eq!(self::left(&limiter).await, settled, "may adjust: {may_adjust}");
    }
}
