//! Several requests decided as a group, on memory, Redis and a Cluster.

use std::time::Duration;

use sluicegate::{
    Cost, Decision, Error, Labels, Limit, Limiter, MemoryStore, Options, Override, RedisStore, Rule, Source,
    Timestamp,
    decision::Mode,
    limiter::{LimitOverride, Operation, Request},
};
use sluicegate_testkit::{
    cluster::Cluster,
    server::{Flavor, Server},
};

const MINUTE: Duration = Duration::from_secs(60);
const LONG_DEADLINE: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(Duration::ZERO);

fn charge(cost: u32, labels: &[(&str, &str)]) -> Request<'static> {
    Request::new(Labels::new(labels.iter().copied()).unwrap(), Cost::from(cost))
}

fn refund(cost: u32, labels: &[(&str, &str)]) -> Request<'static> {
    charge(cost, labels).operation(Operation::Refund { at: None })
}

fn with_limit(amount: u64, window: Duration, request: Request<'static>) -> Request<'static> {
    request.limit(Some(LimitOverride { amount, window }))
}

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, MINUTE).unwrap()
}

fn rules() -> [Rule; 3] {
    [
        Rule::new("per-a", log(3)).per(["a"]),
        Rule::new("per-b", Limit::token_bucket(10, MINUTE).unwrap()).per(["b"]),
        Rule::new("all", Limit::fixed_window(20, 24 * 60 * MINUTE).unwrap()),
    ]
}

/// Returns whether the group passes, and the outcome, rule and remaining units of each request.
async fn check_group(limiter: &Limiter, requests: &[Request<'_>]) -> (bool, Vec<(bool, String, u64)>) {
    let answer = limiter.check_group(requests).await.unwrap();
    let outcomes = |decision: &Decision| {
        let rule = decision.rule().unwrap_or_default().to_owned();
        (decision.is_allowed(), rule, decision.remaining().unwrap_or(0))
    };
    (answer.overall.is_allowed(), answer.each.iter().map(outcomes).collect())
}

fn outcomes<const N: usize>(each: [(bool, &str, u64); N]) -> Vec<(bool, String, u64)> {
    each.map(|(allowed, rule, remaining)| (allowed, rule.to_owned(), remaining)).into()
}

async fn all_or_none(limiter: Limiter) {
    let both = [charge(2, &[("a", "x")]), charge(4, &[("b", "x")])];
    assert_eq!(
        check_group(&limiter, &both).await,
        (true, outcomes([(true, "per-a", 1), (true, "per-b", 6)]))
    );
    let denied = (false, outcomes([(false, "per-a", 1), (true, "per-b", 6)]));
    assert_eq!(check_group(&limiter, &both).await, denied);
    assert_eq!(check_group(&limiter, &both).await, denied, "a denial charges nothing");
    let all = limiter.peek(&Labels::default(), 1).await.unwrap();
    assert_eq!(all.remaining(), Some(16), "the shared rule was charged once, with the larger cost");
    let back = [refund(2, &[("a", "x")]), refund(1, &[("a", "x")]), charge(1, &[("b", "x")])];
    let given = outcomes([(true, "per-a", 3), (true, "per-a", 3), (true, "per-b", 5)]);
    assert_eq!(
        check_group(&limiter, &back).await,
        (true, given),
        "a refund of both requests is applied once"
    );
}

#[tokio::test]
async fn a_group_is_charged_all_or_none_in_memory() {
    all_or_none(Limiter::new(MemoryStore::new(), rules()).unwrap()).await;
}

#[tokio::test]
async fn a_group_is_charged_all_or_none_in_redis() {
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    all_or_none(Limiter::builder().store(store).rules(rules()).options(LONG_DEADLINE).build().unwrap()).await;
}

#[tokio::test]
async fn a_group_is_charged_all_or_none_over_several_cluster_nodes() {
    let cluster = Cluster::start(Flavor::Redis7);
    let url = cluster.urls()[0].replace("redis://", "redis-cluster://");
    let store = RedisStore::connect(&url).await.unwrap();
    all_or_none(Limiter::builder().store(store).rules(rules()).options(LONG_DEADLINE).build().unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_groups_pass_exactly_as_often_as_the_smallest_limit_allows() {
    let limiter = Limiter::new(MemoryStore::new(), rules()).unwrap();
    let callers = (0..64).map(|caller| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let own = caller.to_string();
            let both = [charge(1, &[("a", &own)]), charge(1, &[("b", "x")])];
            limiter.check_group(&both).await.unwrap().overall.is_allowed()
        })
    });
    let mut passed = 0;
    for caller in callers.collect::<Vec<_>>() {
        passed += u64::from(caller.await.unwrap());
    }
    assert_eq!(passed, 10);
    let all = limiter.peek(&Labels::default(), 1).await.unwrap();
    assert_eq!(all.remaining(), Some(10), "denied groups charge nothing");
}

#[tokio::test]
async fn the_stricter_limit_applies_when_requests_of_a_group_disagree() {
    let mut enforced = Override::when("plan", "free").amount(4);
    enforced.shadow = Some(false);
    let rule = Rule::new("r", log(10)).per(["a"]).shadow().with_override(enforced);
    let limiter = Limiter::new(MemoryStore::new(), [rule]).unwrap();
    for order in [[0, 1], [1, 0]] {
        let requests = [charge(1, &[("a", "x")]), charge(1, &[("a", "x"), ("plan", "free")])];
        let requests = order.map(|place| requests[place].clone());
        let answer = limiter.check_group(&requests).await.unwrap();
        let [tier] = &*answer.overall.tiers else { panic!("{:?}", answer.overall) };
        assert_eq!((tier.limit, tier.mode), (4, Mode::Enforced));
        assert_eq!(answer.each[0].tiers, answer.each[1].tiers);
    }
}

#[tokio::test]
async fn a_limit_override_replaces_the_limits_of_matching_rules_or_applies_alone() {
    let limiter = Limiter::new(MemoryStore::new(), rules()).unwrap();
    let a = || charge(2, &[("a", "x")]);
    let raised = limiter.check_group(&[with_limit(8, MINUTE, a())]).await.unwrap();
    let limits: Vec<_> = raised.overall.tiers.iter().map(|tier| (tier.limit, tier.remaining)).collect();
    assert_eq!(limits, [(8, 6), (8, 6)], "every matching rule");
    let denied = limiter.check_group(&[with_limit(0, MINUTE, a())]).await.unwrap();
    assert_eq!((denied.overall.is_allowed(), denied.overall.source), (false, Source::Rule));
    let error = limiter.check_group(&[with_limit(8, Duration::ZERO, a())]).await.unwrap_err();
    assert!(matches!(error, Error::Limit(_)), "{error}");
    let most = limiter.check_group(&[with_limit(u64::MAX, MINUTE, a())]).await.unwrap();
    let limits: Vec<_> = most.overall.tiers.iter().map(|tier| tier.limit).collect();
    assert_eq!(limits, [200_000, 1_000_000_000], "the maximum of each algorithm");

    let without_rules = Limiter::new(MemoryStore::new(), []).unwrap();
    for allowed in [true, false] {
        let own = with_limit(3, MINUTE, a());
        let answer = without_rules.check_group(&[own, charge(1, &[("b", "x")])]).await.unwrap();
        assert_eq!((answer.overall.is_allowed(), answer.overall.limit()), (allowed, Some(3)));
        assert!(answer.each[1].is_allowed() && answer.each[1].tiers.is_empty());
    }
}

#[tokio::test]
async fn a_group_with_too_many_counters_is_an_error() {
    let limiter = Limiter::new(MemoryStore::new(), rules()).unwrap();
    let many = |count: usize| -> Vec<_> {
        (0..count).map(|place| charge(1, &[("a", &place.to_string())])).collect()
    };
    assert!(limiter.check_group(&many(63)).await.unwrap().overall.is_allowed());
    assert!(matches!(limiter.check_group(&many(64)).await, Err(Error::Check(_))));
    assert!(limiter.check_group(&[]).await.unwrap().overall.is_allowed());
}

#[tokio::test]
async fn a_group_takes_checks_and_refunds_without_a_time_only() {
    let limiter = Limiter::new(MemoryStore::new(), rules()).unwrap();
    let request = || Request::new(Labels::new([("a", "x")]).unwrap(), Cost::ONE);
    for operation in
        [Operation::Peek, Operation::Charge, Operation::Refund { at: Some(Timestamp::default()) }]
    {
        let group = [request(), request().operation(operation)];
        let error = limiter.check_group(&group).await.unwrap_err();
        assert_eq!(error, Error::GroupOperation(operation));
    }
    assert_eq!(
        limiter.peek(&Labels::new([("a", "x")]).unwrap(), Cost::ONE).await.unwrap().remaining(),
        Some(3)
    );
}
