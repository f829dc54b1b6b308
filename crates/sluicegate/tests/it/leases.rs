//! Leases on real Redis servers: which checks are decided in this process, what the store counts, and what is returned.

use std::time::Duration;

use sluicegate::{
    Cost, Decision, Labels, Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule, Source,
    limiter::RuleSelection,
    rules::LeaseSize,
    store::{Key, encoded_rule},
};
use sluicegate_testkit::{
    cluster::Cluster,
    sentinel::{NAME, Sentinels},
    server::{Flavor, Server},
    wait::until_async,
};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
/// Long, because other tests verify deadlines.
const OPTIONS: Options = Options::new().deadline(Duration::from_secs(5));

async fn limiter(server: &Server, rules: impl IntoIterator<Item = Rule>) -> Limiter {
    let store = RedisStore::connect(&server.url()).await.unwrap();
    Limiter::builder().store(store).rules(rules).options(OPTIONS).build().unwrap()
}

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, MINUTE).unwrap()
}

fn per_user(limit: Limit, lease: LeaseSize) -> Rule {
    Rule::new("per-user", limit).per(["user"]).lease(lease)
}

fn user(name: &str) -> Labels {
    Labels::new([("user", name)]).unwrap()
}

async fn check(limiter: &Limiter, labels: &Labels) -> Decision {
    limiter.check(labels, Cost::ONE).await.unwrap()
}

/// Checks until a lease decides, and returns that decision and how many requests were admitted.
async fn check_until_leased(limiter: &Limiter, labels: &Labels) -> (Decision, u64) {
    for admitted in 1..10_000 {
        let decision = check(limiter, labels).await;
        assert!(decision.is_allowed(), "{decision:?}");
        if decision.source == Source::Lease {
            return (decision, admitted);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("no lease was drawn");
}

/// Returns the units that the store counts for a key, and how many of them are leased.
async fn used(limiter: &Limiter, limit: Limit, labels: &Labels) -> (u64, u64) {
    let peek = limiter.peek(labels, Cost::ZERO).await.unwrap();
    let leased_limit = limit.with_lease(1, SECOND).unwrap();
    let key = Key::of_rule(&encoded_rule("per-user"), &[labels.get("user")], None);
    let snapshot = limiter.inspect(&[(key, leased_limit)]).await.unwrap().remove(0).unwrap();
    (limit.capacity() - peek.remaining().unwrap(), snapshot.leased)
}

#[tokio::test]
async fn a_hot_key_is_decided_by_leased_units_that_the_store_has_counted() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server, [per_user(log(10_000), LeaseSize::percent(10))]).await;
    let labels = user("hot");
    let (decision, admitted) = check_until_leased(&limiter, &labels).await;
    assert!(decision.at.is_some() && decision.remaining().unwrap() < 1_000, "{decision:?}");
    let (counted, leased) = used(&limiter, log(10_000), &labels).await;
    assert!(counted > admitted, "units are charged before they are spent: {counted} of {admitted}");
    assert!((1..=1_000).contains(&leased), "{leased}");
    for _ in 0..500 {
        assert!(check(&limiter, &labels).await.is_allowed());
    }
    limiter.return_leases().await;
    let (counted, leased) = used(&limiter, log(10_000), &labels).await;
    assert_eq!((counted, leased), (admitted + 500, 0), "unspent units were returned");
    let stats = limiter.stats().leases;
    assert_eq!(stats.drawn, stats.spent + stats.returned, "{stats:?}");
    assert_eq!(stats.lost, 0);
}

#[tokio::test]
async fn cold_keys_draw_nothing() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server, [per_user(log(1_000), LeaseSize::percent(10))]).await;
    for round in 0..3 {
        for number in 0..200 {
            let decision = check(&limiter, &user(&number.to_string())).await;
            assert_eq!((decision.source, decision.remaining()), (Source::Store, Some(999 - round)));
        }
    }
    assert_eq!(limiter.stats().leases.drawn, 0);
}

#[tokio::test]
async fn with_leases_exactly_the_limit_is_admitted() {
    let server = Server::start(Flavor::Redis7);
    for limit in [log(2_000), Limit::fixed_window(2_000, 60 * MINUTE).unwrap()] {
        let limiters = [
            limiter(&server, [per_user(limit, LeaseSize::percent(5))]).await,
            limiter(&server, [per_user(limit, LeaseSize::percent(5))]).await,
        ];
        let labels = user(limit.algorithm().name());
        let (mut admitted, mut from_leases) = (0, 0);
        let mut denied = 0;
        while denied < limiters.len() {
            denied = 0;
            for limiter in &limiters {
                let decision = check(limiter, &labels).await;
                admitted += u64::from(decision.is_allowed());
                from_leases += u64::from(decision.source == Source::Lease);
                denied += usize::from(!decision.is_allowed());
            }
        }
        assert!(from_leases > 0, "{limit:?}");
        assert_eq!(admitted, 2_000, "{limit:?}");
    }
}

#[tokio::test]
async fn all_tiers_are_charged_or_none_with_leases_on_both() {
    let server = Server::start(Flavor::Redis7);
    let total =
        Rule::new("total", Limit::fixed_window(100_000, 60 * MINUTE).unwrap()).lease(LeaseSize::percent(1));
    let limiter = limiter(&server, [per_user(log(3_000), LeaseSize::percent(10)), total]).await;
    let labels = user("both");
    let (_, mut admitted) = check_until_leased(&limiter, &labels).await;
    while check(&limiter, &labels).await.is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 3_000);
    limiter.return_leases().await;
    let peek = limiter.peek(&labels, Cost::ZERO).await.unwrap();
    let remaining: Vec<u64> = peek.tiers.iter().map(|tier| tier.remaining).collect();
    assert_eq!(remaining, [0, 97_000]);
}

#[tokio::test]
async fn a_check_with_a_tier_without_a_lease_goes_to_the_store() {
    let server = Server::start(Flavor::Redis7);
    let exact = Rule::new("exact", log(1_000));
    let limiter = limiter(&server, [per_user(log(1_000), LeaseSize::percent(10)), exact]).await;
    for number in 1..=100 {
        let decision = check(&limiter, &user("mixed")).await;
        let remaining: Vec<u64> = decision.tiers.iter().map(|tier| tier.remaining).collect();
        assert_eq!((decision.source, remaining), (Source::Store, vec![1_000 - number; 2]));
    }
    assert_eq!(limiter.stats().leases.drawn, 0);
}

#[tokio::test]
async fn costs_above_the_lease_go_to_the_store_and_smaller_ones_share_it() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server, [per_user(log(10_000), LeaseSize::units(100))]).await;
    let labels = user("costs");
    let (_, admitted) = check_until_leased(&limiter, &labels).await;
    let large = limiter.check(&labels, Cost::new(200).unwrap()).await.unwrap();
    assert_eq!((large.is_allowed(), large.source), (true, Source::Store));
    until_async("a check of two units is leased", MINUTE, async || {
        check_until_leased(&limiter, &labels).await;
        limiter.check(&labels, Cost::new(2).unwrap()).await.unwrap().source == Source::Lease
    })
    .await;
    limiter.return_leases().await;
    let stats = limiter.stats().leases;
    assert_eq!(stats.drawn, stats.spent + stats.returned, "{stats:?} after {admitted}");
}

#[tokio::test]
async fn a_shadow_tier_with_a_lease_never_denies() {
    let server = Server::start(Flavor::Redis7);
    let shadow = Rule::new("shadow", log(50)).lease(LeaseSize::percent(20)).shadow();
    let limiter = limiter(&server, [per_user(log(500), LeaseSize::percent(20)), shadow]).await;
    let labels = user("shadow");
    let mut admitted = 0;
    while check(&limiter, &labels).await.is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 500);
    limiter.return_leases().await;
    let peek = limiter.peek(&labels, Cost::ZERO).await.unwrap();
    assert_eq!(peek.tiers[1].remaining, 0, "the shadow tier counted what it would have admitted");
}

#[tokio::test]
async fn the_charge_of_a_leased_decision_is_refunded_exactly_by_its_time() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server, [per_user(log(10_000), LeaseSize::percent(10))]).await;
    let labels = user("refund");
    let (decision, admitted) = check_until_leased(&limiter, &labels).await;
    limiter.refund(&labels, Cost::ONE).at(decision.at).await.unwrap();
    limiter.charge(&labels, Cost::new(7).unwrap()).await.unwrap();
    limiter.return_leases().await;
    assert_eq!(used(&limiter, log(10_000), &labels).await, (admitted + 6, 0));
}

#[tokio::test]
async fn a_reset_ends_the_leases_of_this_process() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server, [per_user(log(10_000), LeaseSize::percent(10))]).await;
    let labels = user("reset");
    check_until_leased(&limiter, &labels).await;
    limiter.reset(&labels, &RuleSelection::All).await.unwrap();
    let decision = check(&limiter, &labels).await;
    assert_eq!(decision.source, Source::Store);
    limiter.return_leases().await;
    assert_eq!(used(&limiter, log(10_000), &labels).await.0, 1, "no lease from before is refunded");
}

#[tokio::test]
async fn a_reset_by_another_process_acts_when_the_leases_end_and_nothing_is_refunded_twice() {
    let server = Server::start(Flavor::Redis7);
    let rule = || per_user(log(10_000), LeaseSize::percent(10)).lease_for(Duration::from_millis(300));
    let (one, other) = (limiter(&server, [rule()]).await, limiter(&server, [rule()]).await);
    let labels = user("reset elsewhere");
    check_until_leased(&one, &labels).await;
    other.reset(&labels, &RuleSelection::All).await.unwrap();
    for _ in 0..3 {
        check(&other, &labels).await;
    }
    assert_eq!(check(&one, &labels).await.source, Source::Lease, "the lease is still spent");
    tokio::time::sleep(Duration::from_millis(400)).await;
    until_async("the lease has ended", MINUTE, async || one.stats().leases.spent > 0).await;
    one.return_leases().await;
    assert_eq!(used(&other, log(10_000), &labels).await, (3, 0), "the charges of the other process stay");
}

#[tokio::test]
async fn changed_rules_return_leases_and_the_new_limit_applies() {
    let server = Server::start(Flavor::Redis7);
    let limiter = limiter(&server, [per_user(log(10_000), LeaseSize::percent(10))]).await;
    let labels = user("changed");
    let (_, admitted) = check_until_leased(&limiter, &labels).await;
    limiter.reconfigure([per_user(log(5_000), LeaseSize::NONE)]).unwrap();
    let decision = check(&limiter, &labels).await;
    assert_eq!((decision.source, decision.limit()), (Source::Store, Some(5_000)));
    until_async("all leases are returned", MINUTE, async || {
        used(&limiter, log(5_000), &labels).await == (admitted + 1, 0)
    })
    .await;
}

#[tokio::test]
async fn an_expired_lease_is_returned_in_the_background() {
    let server = Server::start(Flavor::Redis7);
    let lease = per_user(log(10_000), LeaseSize::percent(10)).lease_for(Duration::from_millis(200));
    let limiter = limiter(&server, [lease]).await;
    let labels = user("idle");
    let (_, admitted) = check_until_leased(&limiter, &labels).await;
    until_async("what is left is returned", MINUTE, async || {
        used(&limiter, log(10_000), &labels).await == (admitted, 0)
    })
    .await;
}

#[tokio::test]
async fn while_the_store_is_down_leased_units_are_spent_and_then_the_failure_policy_decides() {
    let mut server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let rule = per_user(log(100_000), LeaseSize::percent(10))
        .lease_for(MINUTE)
        .on_store_failure(OnStoreFailure::Closed);
    let limiter = Limiter::builder().store(store).rules([rule]).build().unwrap();
    let labels = user("outage");
    check_until_leased(&limiter, &labels).await;
    for _ in 0..200 {
        check(&limiter, &labels).await;
    }
    server.kill();
    let mut leased = 0;
    loop {
        let decision = check(&limiter, &labels).await;
        if decision.source == Source::Closed {
            break;
        }
        assert_eq!((decision.source, decision.is_degraded()), (Source::Lease, false));
        leased += 1;
    }
    assert!(leased > 10, "{leased} requests were allowed by leases");
}

#[tokio::test]
async fn a_denial_is_cached_only_while_no_process_holds_leased_units() {
    let server = Server::start(Flavor::Redis7);
    let limit = Limit::fixed_window(1_000, 60 * MINUTE).unwrap();
    let rule = || per_user(limit, LeaseSize::percent(20)).lease_for(10 * SECOND);
    let (holder, other) = (limiter(&server, [rule()]).await, limiter(&server, [rule()]).await);
    let labels = user("denied");
    check_until_leased(&holder, &labels).await;
    let rest = other.peek(&labels, Cost::ZERO).await.unwrap().remaining().unwrap();
    assert!(other.check(&labels, Cost::new(rest).unwrap()).await.unwrap().is_allowed());
    for _ in 0..5 {
        let denied = check(&other, &labels).await;
        assert_eq!(
            (denied.is_allowed(), denied.source),
            (false, Source::Store),
            "the holder may return units"
        );
    }
    holder.return_leases().await;
    assert!(check(&other, &labels).await.is_allowed(), "returned units can be used");
    let left = other.peek(&labels, Cost::ZERO).await.unwrap().remaining().unwrap();
    other.check(&labels, Cost::new(left).unwrap()).await.unwrap();
    other.return_leases().await;
    until_async("the denial is cached", MINUTE, async || {
        check(&other, &labels).await.source == Source::Cache
    })
    .await;
}

/// The request that would renew a lease is denied by the store, and spends the lease instead.
#[tokio::test]
async fn a_process_spends_its_leased_units_although_the_store_denies() {
    let server = Server::start(Flavor::Redis7);
    let limit = Limit::fixed_window(1_000, 60 * MINUTE).unwrap();
    let rule = || per_user(limit, LeaseSize::percent(20)).lease_for(10 * SECOND);
    let (holder, other) = (limiter(&server, [rule()]).await, limiter(&server, [rule()]).await);
    let labels = user("exhausted");
    let (_, mut admitted) = check_until_leased(&holder, &labels).await;
    for _ in 0..100 {
        assert!(check(&holder, &labels).await.is_allowed());
        admitted += 1;
    }
    let (_, leased) = used(&other, limit, &labels).await;
    let rest = other.peek(&labels, Cost::ZERO).await.unwrap().remaining().unwrap();
    assert!(other.check(&labels, Cost::new(rest).unwrap()).await.unwrap().is_allowed());
    assert!(leased > 0);
    while check(&holder, &labels).await.is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted + rest, 1_000, "all units were used");
}

#[tokio::test]
async fn the_units_of_a_crashed_process_count_and_stop_to_limit_leases_later() {
    let server = Server::start(Flavor::Redis7);
    let rule = || per_user(log(10_000), LeaseSize::units(40)).lease_for(Duration::from_millis(500));
    let labels = user("crash");
    let crashed = limiter(&server, [rule()]).await;
    check_until_leased(&crashed, &labels).await;
    for _ in 0..300 {
        check(&crashed, &labels).await;
    }
    let (counted, leased) = used(&crashed, log(10_000), &labels).await;
    assert!((1..=40).contains(&leased), "{leased}");
    // a process that is killed returns nothing
    std::mem::forget(crashed);
    let other = limiter(&server, [rule()]).await;
    let (_, admitted) = check_until_leased(&other, &labels).await;
    other.return_leases().await;
    assert!(used(&other, log(10_000), &labels).await.0 >= counted + admitted - leased);
}

#[tokio::test]
async fn processes_together_never_hold_more_than_the_lease() {
    let server = Server::start(Flavor::Redis7);
    let rule = || per_user(log(100_000), LeaseSize::units(64)).lease_for(5 * SECOND);
    let labels = user("many");
    let mut limiters = Vec::new();
    for _ in 0..4 {
        limiters.push(limiter(&server, [rule()]).await);
    }
    for round in 0..400 {
        for limiter in &limiters {
            assert!(check(limiter, &labels).await.is_allowed());
        }
        let (_, leased) = used(&limiters[0], log(100_000), &labels).await;
        assert!(leased <= 64, "round {round}: {leased} units are leased");
    }
    for limiter in &limiters {
        limiter.return_leases().await;
    }
    assert_eq!(used(&limiters[0], log(100_000), &labels).await, (1_600, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_drawn_from_the_new_primary_after_a_failover() {
    let sentinels = Sentinels::start(Flavor::Redis7);
    let addresses: Vec<String> =
        sentinels.sentinels().iter().map(|server| server.addr().to_string()).collect();
    let url = format!("redis-sentinel://{}/{NAME}", addresses.join(","));
    let store = RedisStore::connect(&url).await.unwrap();
    let rule = per_user(log(10_000), LeaseSize::percent(5)).lease_for(Duration::from_millis(300));
    let limiter = Limiter::builder().store(store).rules([rule]).options(OPTIONS).build().unwrap();
    let labels = user("failover");
    check_until_leased(&limiter, &labels).await;
    let new = tokio::task::block_in_place(|| sentinels.failover());
    let has_lease = || {
        let mut connection = sentinels.nodes()[new].connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg("*:lease:*").query(&mut connection).unwrap();
        sentinels.nodes()[new].is_primary() && !keys.is_empty()
    };
    let mut leased = 0;
    until_async("the new primary has drawn leases", MINUTE, async || {
        for _ in 0..50 {
            leased += u64::from(check(&limiter, &labels).await.source == Source::Lease);
        }
        leased > 500 && tokio::task::block_in_place(has_lease)
    })
    .await;
    limiter.return_leases().await;
}

#[tokio::test]
async fn hot_keys_are_leased_on_every_node_of_a_cluster() {
    let cluster = Cluster::start(Flavor::Redis7);
    let nodes: Vec<String> = cluster.nodes().iter().map(|node| node.addr().to_string()).collect();
    let store = RedisStore::connect(&format!("redis-cluster://{}", nodes.join(","))).await.unwrap();
    let limiter = Limiter::builder()
        .store(store)
        .rules([per_user(log(10_000), LeaseSize::percent(10))])
        .options(OPTIONS)
        .build()
        .unwrap();
    for number in 0..12 {
        let labels = user(&number.to_string());
        let (_, admitted) = check_until_leased(&limiter, &labels).await;
        for _ in 0..100 {
            assert!(check(&limiter, &labels).await.is_allowed());
        }
        limiter.return_leases().await;
        assert_eq!(used(&limiter, log(10_000), &labels).await, (admitted + 100, 0));
    }
}
