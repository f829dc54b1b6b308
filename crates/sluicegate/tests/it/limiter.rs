//! The public API of the limiter: rules, reconfiguration, and an unavailable store.

use std::{process::Command, time::Duration};

use sluicegate::{
    Cost, Costs, Decision, Error, Labels, Limit, Limiter, ManualClock, MemoryStore, OnStoreFailure, Options,
    Override, RedisStore, Retry, Rule, Source, Timestamp,
    calendar::{CalendarUnit, Zone},
    limiter::{Reset, RuleSelection},
    rules::Absent,
    store::Store,
};
use sluicegate_testkit::server::{Flavor, Server};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const LONG_DEADLINE: Options = Options::new().deadline(Duration::from_secs(5)).denial_cache(SECOND);

fn labels(pairs: &[(&str, &str)]) -> Labels {
    Labels::new(pairs.iter().copied()).unwrap()
}

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, MINUTE).unwrap()
}

fn memory(rules: impl IntoIterator<Item = Rule>) -> Limiter {
    Limiter::new(MemoryStore::new(), rules).unwrap()
}

#[tokio::test]
async fn changed_rules_apply_to_the_next_decision_and_keep_the_usage() {
    let server = Server::start(Flavor::Redis7);
    let redis = RedisStore::connect(&server.url()).await.unwrap();
    let rules = |amount| [Rule::new("r", log(amount)).per(["user"])];
    changed_rules(
        Limiter::builder().store(MemoryStore::new()).rules(rules(2)).options(LONG_DEADLINE).build().unwrap(),
        rules,
    )
    .await;
    changed_rules(
        Limiter::builder().store(redis).rules(rules(2)).options(LONG_DEADLINE).build().unwrap(),
        rules,
    )
    .await;
}

async fn changed_rules(limiter: Limiter, rules: impl Fn(u64) -> [Rule; 1]) {
    let alice = labels(&[("user", "alice")]);
    limiter.check(&alice, 2).await.unwrap();
    assert!(!limiter.check(&alice, 1).await.unwrap().is_allowed());
    limiter.reconfigure(rules(5)).unwrap();
    assert_eq!(limiter.check(&alice, 1).await.unwrap().remaining(), Some(2));
    let twice = [rules(9), rules(9)].concat();
    assert!(limiter.reconfigure(twice).is_err());
    assert_eq!(limiter.peek(&alice, 1).await.unwrap().limit(), Some(5), "invalid rules change nothing");
}

#[tokio::test]
async fn all_matching_rules_decide_and_the_longest_retry_after_is_returned() {
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let rules = [
        Rule::new("short", Limit::sliding_log(1, 2 * SECOND).unwrap()).per(["user"]),
        Rule::new("long", log(1)).per(["user"]),
        Rule::new("wide", log(9)),
    ];
    let limiter = Limiter::builder().store(store).rules(rules).options(LONG_DEADLINE).build().unwrap();
    let alice = labels(&[("user", "alice")]);
    assert!(limiter.check(&alice, 1).await.unwrap().is_allowed());
    for source in [Source::Store, Source::Cache] {
        let denied = limiter.check(&alice, 1).await.unwrap();
        assert_eq!((denied.source, denied.rule()), (source, Some("long")));
        assert!(denied.retry_after().unwrap() > 50 * SECOND);
    }
    assert_eq!(limiter.peek(&labels(&[]), 1).await.unwrap().remaining(), Some(8), "denials charge nothing");
}

#[tokio::test]
async fn costs_apply_by_unit_and_an_absent_label_follows_the_rules_setting() {
    let rules = [
        Rule::new("tokens", log(1_000)).unit("tokens").per(["user"]),
        Rule::new("login", log(5)).when("route", "login").per(["ip"]).absent(Absent::Deny),
    ];
    let limiter = memory(rules);
    let costs = Costs::new([("requests", Cost::ONE), ("tokens", Cost::from(850))]).unwrap();
    let alice = labels(&[("user", "alice")]);
    assert_eq!(limiter.check(&alice, costs.clone()).await.unwrap().remaining(), Some(150));
    assert!(!limiter.check(&alice, costs).await.unwrap().is_allowed());
    let denied = limiter.check(&labels(&[("route", "login")]), 1).await.unwrap();
    assert_eq!((denied.is_allowed(), denied.rule(), denied.retry_after()), (false, Some("login"), None));
}

#[tokio::test]
async fn blocked_and_unlimited_requests_are_decided_without_the_store() {
    let rule = Rule::new("r", log(1))
        .with_override(Override::when("tenant", "bad").blocked())
        .with_override(Override::when("tenant", "good").unlimited());
    let limiter = memory([rule]);
    for _ in 0..3 {
        assert!(limiter.check(&labels(&[("tenant", "good")]), 1).await.unwrap().is_allowed());
        let blocked = limiter.check(&labels(&[("tenant", "bad")]), 1).await.unwrap();
        assert_eq!((blocked.outcome, blocked.source), (denied_permanently(), Source::Rule));
    }
}

fn denied_permanently() -> sluicegate::Outcome {
    sluicegate::Outcome::Denied { retry: Retry::Never }
}

#[tokio::test]
async fn a_charge_or_refund_can_name_one_rule_and_an_unknown_rule_is_an_error() {
    let limiter = memory([Rule::new("a", log(10)), Rule::new("b", log(10))]);
    let no_labels = labels(&[]);
    limiter.charge(&no_labels, 12).rules(["a"]).await.unwrap();
    let peeked = limiter.peek(&no_labels, 1).await.unwrap();
    assert_eq!(peeked.tiers.iter().map(|tier| tier.remaining).collect::<Vec<_>>(), [0, 10]);
    let checked = limiter.refund(&no_labels, 5).rules(["a"]).await.unwrap();
    assert_eq!(checked.remaining(), Some(3));
    let unknown = limiter.charge(&no_labels, 1).rules(["c"]).await.unwrap_err().to_string();
    assert_eq!(unknown, "there is no rule \"c\": use a, b");
    let named = RuleSelection::Named(vec!["a".to_owned()]);
    assert_eq!(limiter.reset(&no_labels, &named).await.unwrap().deleted.len(), 1);
    assert_eq!(limiter.peek(&no_labels, 1).await.unwrap().remaining(), Some(10));
}

/// Counters that unrelated requests share are deleted only if their rules are selected, on every store.
#[tokio::test]
async fn a_reset_deletes_only_counters_of_the_given_labels_unless_rules_are_selected() {
    let server = Server::start(Flavor::Redis7);
    let redis = Store::from(RedisStore::connect(&server.url()).await.unwrap());
    for store in [Store::from(MemoryStore::new()), redis] {
        let rules = [
            Rule::new("total", log(10)),
            Rule::new("per-ip", log(10)).per(["ip"]),
            Rule::new("per-ip-and-user", log(10)).per(["ip", "user"]).absent(Absent::Shared),
        ];
        let limiter = Limiter::builder().store(store).rules(rules).options(LONG_DEADLINE).build().unwrap();
        let given = labels(&[("ip", "203.0.113.9")]);
        let used = async || {
            let tiers = limiter.peek(&given, 1).await.unwrap().tiers;
            tiers.iter().map(|tier| 10 - tier.remaining).collect::<Vec<_>>()
        };
        let reset = async |selection: RuleSelection| {
            let Reset { deleted, kept, .. } = limiter.reset(&given, &selection).await.unwrap();
            let deleted: Vec<_> = deleted.iter().map(|counter| counter.key.to_string()).collect();
            (deleted.join(" "), kept.join(" "))
        };
        limiter.check(&given, 3).await.unwrap();
        let kept = "total per-ip-and-user".to_owned();
        assert_eq!(reset(RuleSelection::Keyed).await, ("per-ip:203.0.113.9".to_owned(), kept.clone()));
        assert_eq!(used().await, [3, 0, 3]);
        assert_eq!(reset(RuleSelection::Keyed).await, (String::new(), kept), "deleted already");
        let named = RuleSelection::Named(vec!["total".to_owned()]);
        assert_eq!(reset(named).await, ("total:*".to_owned(), "per-ip per-ip-and-user".to_owned()));
        assert_eq!(used().await, [0, 0, 3]);
        limiter.check(&given, 2).await.unwrap();
        let all = "total:* per-ip:203.0.113.9 per-ip-and-user:203.0.113.9,!".to_owned();
        assert_eq!(reset(RuleSelection::All).await, (all, String::new()));
        assert_eq!(used().await, [0, 0, 0]);
    }
}

/// Sends a signal to a process.
fn signal(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

#[tokio::test]
async fn when_redis_is_silent_each_rule_applies_its_failure_policy_and_reports_the_error() {
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let rules = [
        Rule::new("open", log(5)).when("route", "open"),
        Rule::new("closed", log(5)).when("route", "closed").on_store_failure(OnStoreFailure::Closed),
        Rule::new("shadow", log(5)).shadow().on_store_failure(OnStoreFailure::Closed),
    ];
    let deadline = Duration::from_millis(50);
    let limiter = Limiter::builder()
        .store(store)
        .rules(rules)
        .options(LONG_DEADLINE.deadline(deadline))
        .build()
        .unwrap();
    let (open, closed) = (labels(&[("route", "open")]), labels(&[("route", "closed")]));
    signal("-STOP", server.pid());
    let (passed, denied) = (limiter.check(&open, 1).await.unwrap(), limiter.check(&closed, 1).await.unwrap());
    let charged = limiter.charge(&open, 1).await;
    let reset = limiter.reset(&open, &RuleSelection::All).await;
    signal("-CONT", server.pid());
    assert_eq!((passed.is_allowed(), passed.source, passed.is_degraded()), (true, Source::Open, true));
    assert_eq!((denied.is_allowed(), denied.source, denied.rule()), (false, Source::Closed, Some("closed")));
    assert!(denied.retry_after().is_some() && passed.failure.is_some() && denied.failure.is_some());
    assert!(matches!(charged, Err(Error::Store(_))), "a charge that may be lost is an error: {charged:?}");
    assert!(matches!(reset, Err(Error::Store(_))), "{reset:?}");
}

#[tokio::test]
async fn a_manual_clock_also_expires_cached_denials() {
    let server = Server::start(Flavor::Redis7);
    let clock = ManualClock::new(Timestamp::from_micros(1_794_765_441_799_839));
    let store = RedisStore::connect(&server.url()).await.unwrap().with_clock(clock.clone());
    let limiter = Limiter::builder().store(store).rules([]).options(LONG_DEADLINE).build().unwrap();
    for _ in 0..3 {
        assert!(limiter.check_key("k", &log(1), Cost::ONE).await.unwrap().is_allowed());
        assert!(!limiter.check_key("k", &log(1), Cost::ONE).await.unwrap().is_allowed());
        clock.advance(MINUTE);
    }
}

/// Checks that a decision waits for the end of the calendar year, within a second.
fn assert_waits_for_the_year_to_end(decision: &Decision, limit: &Limit, now: Timestamp) {
    let end = limit.calendar().unwrap().edges_at(now).end_us;
    let wait = decision.retry_after().expect("the decision is a denial that ends");
    let until = now.plus(wait).as_micros();
    assert!(until.abs_diff(end) < 1_000_000, "{until} instead of {end}: {decision:?}");
}

#[tokio::test]
async fn denials_of_a_calendar_window_are_cached_and_continue_when_redis_is_down() {
    let server = Server::start(Flavor::Redis7);
    let year = Zone::named("Europe/Berlin").unwrap().calendar(CalendarUnit::Year, None).unwrap();
    let limit = Limit::fixed_window(4, year).unwrap();
    let rule = Rule::new("year", limit).per(["user"]).on_store_failure(OnStoreFailure::Local);
    let options = Options::new().deadline(Duration::from_millis(300)).denial_cache(SECOND);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::builder().store(store).rules([rule]).options(options).build().unwrap();
    let alice = labels(&[("user", "alice")]);
    let check = async |cost: u32| limiter.check(&alice, cost).await.unwrap();

    let first = check(4).await;
    assert_eq!((first.is_allowed(), first.remaining()), (true, Some(0)));
    let now = first.at.unwrap();
    for source in [Source::Store, Source::Cache] {
        let denied = check(1).await;
        assert_eq!((denied.is_allowed(), denied.source), (false, source));
        assert_waits_for_the_year_to_end(&denied, &limit, now);
    }
    server.suspend();
    let denied = check(2).await;
    assert_eq!(
        (denied.is_allowed(), denied.source),
        (false, Source::Fallback),
        "the usage is known: {denied:?}"
    );
    assert_waits_for_the_year_to_end(&denied, &limit, now);
    let bob = labels(&[("user", "bob")]);
    let allowed = limiter.check(&bob, 4).await.unwrap();
    assert_eq!((allowed.is_allowed(), allowed.source), (true, Source::Fallback));
    let denied = limiter.check(&bob, 1).await.unwrap();
    assert_waits_for_the_year_to_end(&denied, &limit, now);
    server.resume();
}

/// Concurrent checks of equal calendar limits, some built separately, are decided exactly.
#[tokio::test]
async fn concurrent_checks_of_a_calendar_window_admit_exactly_the_amount() {
    let server = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::builder().store(store).options(LONG_DEADLINE).build().unwrap();
    let checks = (0..200).map(|number| {
        let zone = Zone::named(["Asia/Tokyo", "asia/tokyo"][number % 2]).unwrap();
        let limit = Limit::fixed_window(50, zone.calendar(CalendarUnit::Quarter, None).unwrap()).unwrap();
        let limiter = &limiter;
        async move { limiter.check_key("k", &limit, Cost::ONE).await.unwrap().is_allowed() }
    });
    let allowed = futures_util::future::join_all(checks).await;
    assert_eq!(allowed.into_iter().filter(|allowed| *allowed).count(), 50);
}
