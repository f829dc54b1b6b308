//! Envoy's rate limit service through a client, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{convert::Infallible, future::poll_fn, time::Duration};

use axum::body::Bytes;
use http::HeaderMap;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use prost::Message;
use rand::{Rng, SeedableRng, rngs::StdRng};
use sluicegate::{
    Cost, Decision, Labels, Limit, Limiter, OnStoreFailure, Options, Override, Rule, Source,
    label_policy::{HashSecret, LabelKind, LabelPolicy, LabelSettings},
    limiter::{LimitOverride, Operation, Request, Subject},
    rules::Pattern,
};
use sluicegate_server::grpc::{
    Closed, LARGE_MESSAGES, MAX_MESSAGE, Settings,
    messages::{
        Code, RateLimitDescriptor, RateLimitRequest, RateLimitUnit, Unit,
        rate_limit_descriptor::{Entry, RateLimitOverride},
        rate_limit_service_client::RateLimitServiceClient,
    },
    server::MAX_CONCURRENT_READS,
};
use sluicegate_testkit::gated_store::GatedStore;
use sluicegate_testkit::{
    failing_store::FailingStore,
    wait::{PATIENCE, until_async},
};
use sluicegate_tower::headers::Dialect;
use tonic::{codegen::Service, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

use crate::grpc_front::{
    Front, OnMemory, descriptor, hits, negative, on_memory, request, seconds, short, shorts,
};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(60 * 60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// One limit for each value of an entry, like a key without a value in envoyproxy/ratelimit.
fn per_value(domain: &str, key: &str, amount: u64, window: Duration) -> Rule {
    let limit = Limit::fixed_window(amount, window).unwrap();
    Rule::new(&format!("{domain}-{key}"), limit).when("domain", domain).per([key]).exact()
}

/// The configuration of the reference service's own integration test.
fn reference_rules() -> Vec<Rule> {
    let shared = Limit::fixed_window(10, HOUR).unwrap();
    vec![
        per_value("basic", "key1", 50, SECOND),
        per_value("basic", "one_per_minute", 1, MINUTE),
        per_value("another", "key2", 20, MINUTE),
        per_value("another", "key3", 10, HOUR),
        per_value("another", "key4", 20, DAY),
        Rule::new("shared", shared)
            .when("domain", "share-threshold-test")
            .when("files", Pattern::parse("files/*")),
        Rule::new("not-shared", shared)
            .when("domain", "share-threshold-test")
            .when("files_no_share", Pattern::parse("files_no_share/*"))
            .per(["files_no_share"]),
    ]
}

const NO_LIMIT: crate::grpc_front::Short = (Code::Ok, 0, None);

#[tokio::test]
async fn a_descriptor_without_a_matching_rule_is_allowed_without_a_limit() {
    let mut envoy = OnMemory::start(reference_rules()).await;
    let answer = envoy.call("foo", vec![descriptor([("hello", "world")])]).await;
    assert_eq!(shorts(&answer), (Code::Ok, vec![NO_LIMIT]));
    assert_eq!(answer.response_headers_to_add, []);
}

#[tokio::test]
async fn one_descriptor_is_allowed_up_to_its_limit_and_denied_beyond() {
    let mut envoy = OnMemory::start(reference_rules()).await;
    let answer = envoy.call("basic", vec![descriptor([("key1", "foo")])]).await;
    assert_eq!(shorts(&answer), (Code::Ok, vec![(Code::Ok, 49, Some((50, Unit::Second)))]));
    for call in 1..=25 {
        let answer = envoy.call("another", vec![descriptor([("key2", "r")])]).await;
        let code = if call <= 20 { Code::Ok } else { Code::OverLimit };
        let remaining = 20_u32.saturating_sub(call);
        assert_eq!(shorts(&answer), (code, vec![(code, remaining, Some((20, Unit::Minute)))]), "call {call}");
    }
    let other = envoy.call("another", vec![descriptor([("key2", "other")])]).await;
    assert_eq!(other.statuses[0].limit_remaining, 19, "each value has its own counter");
    let deeper = envoy.call("another", vec![descriptor([("key2", "r"), ("and", "more")])]).await;
    assert_eq!(shorts(&deeper), (Code::Ok, vec![NO_LIMIT]), "the rule is exact");
}

#[tokio::test]
async fn a_denial_by_one_descriptor_charges_none() {
    let mut envoy = OnMemory::start(reference_rules()).await;
    for call in 1..=15 {
        let both = vec![descriptor([("key2", "r")]), descriptor([("key3", "r")])];
        let answer = envoy.call("another", both).await;
        let limits = (Some((20, Unit::Minute)), Some((10, Unit::Hour)));
        let expected = if call <= 10 {
            (Code::Ok, vec![(Code::Ok, 20 - call, limits.0), (Code::Ok, 10 - call, limits.1)])
        } else {
            (Code::OverLimit, vec![(Code::Ok, 10, limits.0), (Code::OverLimit, 0, limits.1)])
        };
        assert_eq!(shorts(&answer), expected, "call {call}");
    }
}

#[tokio::test]
async fn the_time_until_reset_runs_down_and_is_rounded_up() {
    let mut envoy = OnMemory::start(reference_rules()).await;
    let reset = async |envoy: &mut OnMemory| {
        let answer = envoy.call("another", vec![descriptor([("key4", "d")])]).await;
        let reset = answer.statuses[0].duration_until_reset.unwrap();
        assert_eq!(reset.nanos, 0);
        reset.seconds
    };
    // the clock is at .799839 s, so .200161 s are left of the current second
    let since_midnight = i64::try_from(crate::grpc_front::NOW_US / 1_000_000 % 86_400).unwrap();
    assert_eq!(reset(&mut envoy).await, 86_400 - since_midnight);
    envoy.clock.advance(seconds(2));
    assert_eq!(reset(&mut envoy).await, 86_400 - since_midnight - 2);
}

#[tokio::test]
async fn values_of_a_pattern_share_a_counter_unless_the_rule_counts_per_value() {
    let mut envoy = OnMemory::start(reference_rules()).await;
    let domain = "share-threshold-test";
    for _ in 0..10 {
        assert_eq!(
            envoy.call(domain, vec![descriptor([("files", "files/a.pdf")])]).await.overall_code(),
            Code::Ok
        );
    }
    let denied = envoy.call(domain, vec![descriptor([("files", "files/b.csv")])]).await;
    assert_eq!(shorts(&denied).1, [(Code::OverLimit, 0, Some((10, Unit::Hour)))]);
    for file in 0..10 {
        let file = format!("files_no_share/{file}");
        let answer = envoy.call(domain, vec![descriptor([("files_no_share", &file)])]).await;
        assert_eq!(shorts(&answer).1, [(Code::Ok, 9, Some((10, Unit::Hour)))]);
    }
}

#[tokio::test]
async fn changed_rules_apply_to_the_next_call() {
    let mut envoy = OnMemory::start(reference_rules()).await;
    let block = || vec![descriptor([("block", "foo")])];
    assert_eq!(shorts(&envoy.call("reload", block()).await), (Code::Ok, vec![NO_LIMIT]));
    let blocked = per_value("reload", "block", 1, SECOND)
        .with_override(Override::when("block", Pattern::parse("*")).blocked());
    envoy.limiter.reconfigure([per_value("reload", "key1", 50, SECOND), blocked]).unwrap();
    let denied = envoy.call("reload", block()).await;
    assert_eq!(shorts(&denied), (Code::OverLimit, vec![(Code::OverLimit, 0, None)]));
    assert_eq!(denied.statuses[0].duration_until_reset, None, "waiting does not help");
    let counted = envoy.call("reload", vec![descriptor([("key1", "foo")])]).await;
    assert_eq!(shorts(&counted).1, [(Code::Ok, 49, Some((50, Unit::Second)))]);
    envoy.limiter.reconfigure([]).unwrap();
    assert_eq!(shorts(&envoy.call("reload", block()).await), (Code::Ok, vec![NO_LIMIT]));
}

/// Limit, previous count and hits of the reference service's counting test, with the expected response. The reference counts beyond
/// the limit; here a denial charges nothing, so the remaining units stay unchanged.
#[tokio::test]
async fn hits_are_counted_like_the_reference_except_for_denials() {
    let table = [
        (10, 4, 1, Code::Ok, 5),
        (15, 10, 1, Code::Ok, 4),
        (15, 12, 1, Code::Ok, 2),
        (15, 15, 1, Code::OverLimit, 0),
        (20, 2, 3, Code::Ok, 15),
        (8, 5, 2, Code::Ok, 1),
        (20, 16, 3, Code::Ok, 1),
        (20, 19, 3, Code::OverLimit, 1),
        (20, 15, 7, Code::OverLimit, 5),
        (10, 27, 3, Code::OverLimit, 0),
    ];
    for (limit, before, addend, code, remaining) in table {
        let case = (limit, before, addend);
        let mut envoy = OnMemory::start([per_value("d", "key", limit, MINUTE)]).await;
        let labels = Labels::new([("domain", "d"), ("key", "v")]).unwrap();
        envoy.limiter.charge(&labels, before).await.unwrap();
        let by_request = RateLimitRequest {
            hits_addend: u32::try_from(addend).unwrap(),
            ..request("d", vec![descriptor([("key", "v")])])
        };
        let answer = envoy.front.call(by_request).await.unwrap();
        assert_eq!(
            (answer.overall_code(), answer.statuses[0].limit_remaining),
            (code, remaining),
            "{case:?}"
        );
    }
}

#[tokio::test]
async fn a_descriptors_addend_overrides_the_requests_and_zero_only_peeks() {
    let mut envoy = OnMemory::start([per_value("d", "a", 5, MINUTE), per_value("d", "b", 5, MINUTE)]).await;
    let (a, b) = (|| descriptor([("a", "x")]), || descriptor([("b", "x")]));
    let limit = Some((5, Unit::Minute));
    let sent = RateLimitRequest {
        hits_addend: 2,
        ..request("d", vec![hits(3, a()), b(), hits(0, descriptor([("a", "y")]))])
    };
    let answer = envoy.front.call(sent).await.unwrap();
    assert_eq!(shorts(&answer).1, [(Code::Ok, 2, limit), (Code::Ok, 3, limit), (Code::Ok, 5, limit)]);
    envoy.call("d", vec![hits(2, a())]).await;
    for _ in 0..3 {
        let answer = envoy.call("d", vec![hits(0, a())]).await;
        assert_eq!(
            shorts(&answer).1,
            [(Code::Ok, 0, limit)],
            "a peek passes when the limit is exactly reached"
        );
    }
    envoy.limiter.charge(&Labels::new([("domain", "d"), ("a", "x")]).unwrap(), 1).await.unwrap();
    let answer = envoy.call("d", vec![hits(0, a()), b()]).await;
    assert_eq!(
        shorts(&answer),
        (Code::OverLimit, vec![(Code::OverLimit, 0, limit), (Code::Ok, 3, limit)]),
        "in debt"
    );
}

#[tokio::test]
async fn negative_hits_are_refunded_only_if_the_other_descriptors_are_allowed() {
    let mut envoy = OnMemory::start([per_value("d", "a", 5, MINUTE), per_value("d", "b", 1, MINUTE)]).await;
    let (a, b) = (|| descriptor([("a", "x")]), || descriptor([("b", "x")]));
    let limit = Some((5, Unit::Minute));
    assert_eq!(shorts(&envoy.call("d", vec![hits(4, a())]).await).1, [(Code::Ok, 1, limit)]);
    assert_eq!(shorts(&envoy.call("d", vec![negative(a())]).await), (Code::Ok, vec![(Code::Ok, 2, limit)]));
    let answer = envoy.call("d", vec![negative(hits(2, a())), b()]).await;
    assert_eq!(shorts(&answer).1, [(Code::Ok, 4, limit), (Code::Ok, 0, Some((1, Unit::Minute)))]);
    let denied = envoy.call("d", vec![negative(a()), b()]).await;
    assert_eq!(shorts(&denied).1, [NO_LIMIT, (Code::OverLimit, 0, Some((1, Unit::Minute)))]);
    assert_eq!(shorts(&envoy.call("d", vec![hits(0, a())]).await).1, [(Code::Ok, 4, limit)]);
    let most = envoy.call("d", vec![negative(hits(99, a()))]).await;
    assert_eq!(shorts(&most).1, [(Code::Ok, 5, limit)], "a refund never exceeds the usage");
}

#[tokio::test]
async fn a_counter_reached_twice_is_charged_once_with_the_largest_addend() {
    let wide = Rule::new("wide", Limit::fixed_window(10, MINUTE).unwrap());
    let mut envoy = OnMemory::start([wide]).await;
    let limit = Some((10, Unit::Minute));
    let several = || {
        vec![descriptor([("a", "x")]), hits(4, descriptor([("b", "y")])), hits(0, descriptor([("c", "z")]))]
    };
    assert_eq!(shorts(&envoy.call("d", several()).await).1, [(Code::Ok, 6, limit); 3]);
    assert_eq!(shorts(&envoy.call("d", several()).await).1, [(Code::Ok, 2, limit); 3]);
    assert_eq!(shorts(&envoy.call("d", several()).await).1, [(Code::OverLimit, 2, limit); 3]);
}

fn limited(
    requests_per_unit: u32,
    unit: RateLimitUnit,
    descriptor: RateLimitDescriptor,
) -> RateLimitDescriptor {
    RateLimitDescriptor {
        limit: Some(RateLimitOverride { requests_per_unit, unit: unit.into() }),
        ..descriptor
    }
}

#[tokio::test]
async fn a_limit_in_a_descriptor_overrides_the_matching_rules() {
    let bucket = Limit::token_bucket(10, SECOND).unwrap().with_burst(100).unwrap();
    let mut envoy = OnMemory::start([
        per_value("d", "a", 5, MINUTE),
        Rule::new("bucket", bucket).when("domain", "d").per(["a"]),
    ])
    .await;
    let a = || descriptor([("a", "x")]);
    assert_eq!(shorts(&envoy.call("d", vec![a()]).await).1, [(Code::Ok, 4, Some((5, Unit::Minute)))]);
    let raised = envoy.call("d", vec![limited(20, RateLimitUnit::Minute, a())]).await;
    assert_eq!(shorts(&raised).1, [(Code::Ok, 18, Some((20, Unit::Minute)))], "the usage is kept");
    let lowered = envoy.call("d", vec![limited(2, RateLimitUnit::Hour, a())]).await;
    assert_eq!(lowered.overall_code(), Code::OverLimit);
    let nothing = envoy.call("d", vec![limited(0, RateLimitUnit::Day, a())]).await;
    assert_eq!(shorts(&nothing).1, [(Code::OverLimit, 0, None)]);
    assert_eq!(
        envoy.call("d", vec![a()]).await.statuses[0].limit_remaining,
        2,
        "the rule has its own numbers again"
    );
}

#[tokio::test]
async fn a_limit_in_a_descriptor_without_matching_rules_applies_to_exactly_its_entries() {
    let mut envoy = OnMemory::start([]).await;
    let units = [
        (RateLimitUnit::Second, Unit::Second),
        (RateLimitUnit::Minute, Unit::Minute),
        (RateLimitUnit::Hour, Unit::Hour),
        (RateLimitUnit::Day, Unit::Day),
        (RateLimitUnit::Month, Unit::Month),
        (RateLimitUnit::Year, Unit::Year),
    ];
    for (unit, reported) in units {
        let entries =
            |value: &str| limited(2, unit, descriptor([("unit", unit.as_str_name()), ("a", value)]));
        for (code, remaining) in [(Code::Ok, 1), (Code::Ok, 0), (Code::OverLimit, 0)] {
            let answer = envoy.call("d", vec![entries("x")]).await;
            assert_eq!(shorts(&answer).1, [(code, remaining, Some((2, reported)))], "{unit:?}");
        }
        assert_eq!(envoy.call("d", vec![entries("y")]).await.overall_code(), Code::Ok);
        assert_eq!(envoy.call("other", vec![entries("x")]).await.overall_code(), Code::Ok);
    }
    let blocked = envoy.call("d", vec![limited(0, RateLimitUnit::Day, descriptor([("a", "x")]))]).await;
    assert_eq!(shorts(&blocked), (Code::OverLimit, vec![(Code::OverLimit, 0, None)]));
}

#[tokio::test]
async fn only_errors_in_envoys_configuration_are_grpc_errors() {
    let mut envoy = OnMemory::start([]).await;
    let table =
        [("", vec![descriptor([("a", "x")])], "domain is empty"), ("d", vec![], "descriptors is empty")];
    for (domain, descriptors, text) in table {
        let status = envoy.try_call(domain, descriptors).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{text}");
        assert!(status.message().contains(text), "{text}: {}", status.message());
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_decided_is_denied_and_charges_nothing() {
    let log = Rule::new("log", Limit::sliding_log(5, MINUTE).unwrap()).when("a", Pattern::parse("*"));
    let dear = Rule::new("dear", Limit::sliding_log(5, MINUTE).unwrap()).when("dear", "x").cost(Cost::MAX);
    let many = (0..33).map(|rule| {
        Rule::new(&format!("many-{rule}"), Limit::sliding_log(5, MINUTE).unwrap())
            .when("many", Pattern::parse("*"))
            .per(["many"])
    });
    let mut envoy = OnMemory::start([log, dear].into_iter().chain(many)).await;
    let labels = [LabelSettings { kind: LabelKind::Ip, ..LabelSettings::new("client") }];
    envoy.engine.set_label_policy(LabelPolicy::new(labels.into(), HashSecret::new("key")));
    let a = || descriptor([("a", "x")]);
    let mut wide = a();
    wide.entries.extend((0..64).map(|label| Entry { key: label.to_string(), value: Vec::new() }));
    let table = [
        ("more descriptors than are read", vec![a(); 65]),
        ("a key twice", vec![a(), descriptor([("a", "1"), ("a", "1")])]),
        ("the domain twice", vec![a(), descriptor([("domain", "d")])]),
        ("an empty key", vec![a(), descriptor([("", "x")])]),
        ("a long key", vec![a(), descriptor([(&*"k".repeat(129), "x")])]),
        ("more entries than labels", vec![wide]),
        ("no address where one is required", vec![a(), descriptor([("client", "nowhere")])]),
        (
            "more counters than a check has",
            vec![a(), descriptor([("many", "1")]), descriptor([("many", "2")])],
        ),
        ("a cost that cannot be counted", vec![a(), hits(2, descriptor([("dear", "x")]))]),
    ];
    for (what, descriptors) in table {
        let count = descriptors.len();
        let answer = envoy.try_call("d", descriptors).await.expect(what);
        let statuses = if count > 64 { 0 } else { count };
        assert_eq!(shorts(&answer), (Code::OverLimit, vec![(Code::OverLimit, 0, None); statuses]), "{what}");
    }
    assert_eq!(envoy.call("d", vec![a()]).await.statuses[0].limit_remaining, 4, "nothing was charged before");
}

#[tokio::test]
async fn numbers_beyond_their_range_are_clamped() {
    let log = Rule::new("log", Limit::sliding_log(5, MINUTE).unwrap()).when("a", Pattern::parse("*"));
    let mut envoy = OnMemory::start([log]).await;
    let a = || descriptor([("a", "x")]);
    for hits_addend in [(1 << 53) - 1, 1 << 53, u64::MAX] {
        let large = envoy.call("d", vec![hits(hits_addend, a())]).await;
        assert_eq!(shorts(&large).1, [(Code::OverLimit, 5, Some((5, Unit::Minute)))]);
        assert_eq!(large.statuses[0].duration_until_reset, None, "it can never be allowed");
    }
    let table = [(200_001, 200_000), (u32::MAX, 200_000)];
    for (place, (sent, reported)) in (1..).zip(table) {
        let raised = envoy.call("d", vec![limited(sent, RateLimitUnit::Day, a())]).await;
        assert_eq!(shorts(&raised).1, [(Code::Ok, reported - place, Some((reported, Unit::Day)))]);
    }
    let own = envoy.call("d", vec![limited(u32::MAX, RateLimitUnit::Day, descriptor([("b", "x")]))]).await;
    assert_eq!(shorts(&own).1, [(Code::Ok, 999_999_999, Some((1_000_000_000, Unit::Day)))]);
    for unit in [0, 7, -1] {
        let limit = Some(RateLimitOverride { requests_per_unit: 1, unit });
        let answer = envoy.call("d", vec![RateLimitDescriptor { limit, ..hits(0, a()) }]).await;
        assert_eq!(
            shorts(&answer).1,
            [(Code::Ok, 3, Some((5, Unit::Minute)))],
            "the rule's own numbers hold"
        );
    }
}

#[tokio::test]
async fn a_descriptor_without_entries_matches_the_rules_of_its_domain() {
    let all = Rule::new("all", Limit::sliding_log(1, MINUTE).unwrap()).when("domain", "d");
    let mut envoy = OnMemory::start([all, per_value("d", "a", 5, MINUTE)]).await;
    let limit = Some((1, Unit::Minute));
    for code in [Code::Ok, Code::OverLimit] {
        let answer = envoy.call("d", vec![descriptor([])]).await;
        assert_eq!(shorts(&answer), (code, vec![(code, 0, limit)]));
    }
}

#[tokio::test]
async fn a_long_value_matches_prefixes_and_has_its_own_counter() {
    let path = Rule::new("path", Limit::sliding_log(1, MINUTE).unwrap())
        .when("path", Pattern::parse("/login*"))
        .per(["path"]);
    let mut envoy = OnMemory::start([path]).await;
    for length in [1_025, 20_000, 60 << 10, 200_000] {
        let long = |last: char| format!("/login?{}{last}", "x".repeat(length));
        let mut call = async |last| {
            let padded = long(last);
            envoy.try_call("d", vec![descriptor([("path", &padded)])]).await.unwrap().overall_code()
        };
        assert_eq!(call('1').await, Code::Ok, "{length}");
        assert_eq!(call('2').await, Code::Ok, "another value");
        assert_eq!(call('1').await, Code::OverLimit, "{length}");
    }
    let odd = ["", "\0", "\u{1}\n\r", "{}", "\u{10ffff}"];
    for value in odd {
        let sent = vec![descriptor([("path", value), ("other", value)])];
        assert_eq!(envoy.try_call("d", sent).await.unwrap().overall_code(), Code::Ok, "{value:?}");
    }
}

#[tokio::test]
async fn a_value_that_is_not_utf8_is_counted_like_any_other() {
    let mut envoy = OnMemory::start([per_value("d", "key", 1, MINUTE)]).await;
    let entry = Entry { key: "key".to_owned(), value: vec![0xff, 0, b'{'] };
    let odd = || RateLimitDescriptor { entries: vec![entry.clone()], ..RateLimitDescriptor::default() };
    assert_eq!(envoy.call("d", vec![odd()]).await.overall_code(), Code::Ok);
    assert_eq!(envoy.call("d", vec![odd()]).await.overall_code(), Code::OverLimit);
}

#[tokio::test]
async fn numbers_at_the_ends_of_their_range_are_returned_unchanged() {
    let year = 365 * DAY;
    let table = [
        (Limit::fixed_window(1, Duration::from_millis(1)).unwrap(), (1, Unit::Unknown), 0),
        (Limit::fixed_window(1_000_000_000, 10 * year).unwrap(), (1_000_000_000, Unit::Unknown), 999_999_999),
        (Limit::token_bucket(1_000_000_000, year).unwrap(), (1_000_000_000, Unit::Year), 999_999_999),
        (Limit::sliding_counter(7, 7 * DAY).unwrap(), (7, Unit::Week), 6),
        (Limit::sliding_log(3, 10 * SECOND).unwrap(), (3, Unit::Unknown), 2),
    ];
    for (limit, reported, remaining) in table {
        let mut envoy = OnMemory::start([Rule::new("r", limit)]).await;
        let answer = envoy.call("d", vec![descriptor([("a", "x")])]).await;
        assert_eq!(short(&answer.statuses[0]), (Code::Ok, remaining, Some(reported)), "{limit:?}");
        assert_eq!(answer.statuses[0].current_limit.as_ref().unwrap().name, "r");
    }
}

#[tokio::test]
async fn the_response_headers_list_all_limits() {
    let (limiter, _) = on_memory([per_value("d", "a", 1, MINUTE), per_value("d", "b", 9, HOUR)]);
    let sent = || request("d", vec![descriptor([("a", "x")]), descriptor([("b", "x")])]);
    let fields = async |front: &mut Front| -> Vec<String> {
        let answer = front.call(sent()).await.unwrap();
        answer.response_headers_to_add.iter().map(|field| format!("{}: {}", field.key, field.value)).collect()
    };
    let mut front = Front::start(limiter.clone(), Settings::default()).await;
    let policy = r#"ratelimit-policy: "d-a";q=1;w=60, "d-b";q=9;w=3600"#;
    assert_eq!(fields(&mut front).await, [policy, r#"ratelimit: "d-a";r=0;t=39, "d-b";r=8;t=159"#]);
    assert_eq!(fields(&mut front).await, [policy, r#"ratelimit: "d-a";r=0;t=39"#, "retry-after: 39"]);
    let mut none = Front::start(limiter, Settings { headers: Dialect::None, ..Settings::default() }).await;
    assert_eq!(fields(&mut none).await, ["retry-after: 39"]);
}

#[tokio::test]
async fn a_rule_that_two_descriptors_match_is_listed_once_with_the_least_remaining() {
    let mut front = OnMemory::start([per_value("d", "a", 2, MINUTE)]).await.front;
    let mut fields = async |values: [&str; 2]| {
        let descriptors = values.map(|value| descriptor([("a", value)])).into();
        let answer = front.call(request("d", descriptors)).await.unwrap();
        let headers = answer.response_headers_to_add.into_iter();
        headers.map(|field| format!("{}: {}", field.key, field.value)).collect::<Vec<_>>()
    };
    let policy = r#"ratelimit-policy: "d-a";q=2;w=60"#;
    let left = |fields: Vec<String>| {
        assert_eq!(fields[0], policy);
        fields[1].split(';').nth(1).unwrap().to_owned()
    };
    assert_eq!(left(fields(["x", "y"]).await), "r=1");
    assert_eq!(left(fields(["y", "z"]).await), "r=0");
    let denied = fields(["x", "y"]).await;
    assert_eq!((left(denied.clone()), denied.len()), ("r=0".to_owned(), 3));
}

fn rule_for_each_policy() -> [Rule; 3] {
    [("open", OnStoreFailure::Open), ("closed", OnStoreFailure::Closed), ("local", OnStoreFailure::Local)]
        .map(|(name, policy)| per_value("d", name, 1, MINUTE).on_store_failure(policy))
}

#[tokio::test]
async fn without_the_store_each_rules_failure_policy_decides() {
    let limiter = Limiter::new(FailingStore::not_run(), rule_for_each_policy()).unwrap();
    let mut front = Front::start(limiter.clone(), Settings::default()).await;
    let of = |name: &str| descriptor([(name, "x")]);
    let call = async |front: &mut Front, names: &[&str]| {
        shorts(&front.call(request("d", names.iter().map(|name| of(name)).collect())).await.unwrap())
    };
    let limit = Some((1, Unit::Minute));
    assert_eq!(call(&mut front, &["open"]).await, (Code::Ok, vec![NO_LIMIT]));
    assert_eq!(call(&mut front, &["closed"]).await, (Code::OverLimit, vec![(Code::OverLimit, 0, limit)]));
    assert_eq!(call(&mut front, &["open", "local"]).await, (Code::Ok, vec![NO_LIMIT, (Code::Ok, 0, limit)]));
    let both = (Code::OverLimit, vec![(Code::OverLimit, 0, limit), NO_LIMIT]);
    assert_eq!(call(&mut front, &["local", "open"]).await, both);
    let all = (Code::OverLimit, vec![NO_LIMIT, NO_LIMIT, (Code::OverLimit, 0, limit)]);
    assert_eq!(call(&mut front, &["open", "local", "closed"]).await, all);
    let refunded = front.call(request("d", vec![negative(of("closed"))])).await.unwrap();
    assert_eq!(shorts(&refunded), (Code::Ok, vec![NO_LIMIT]), "a refund is not denied");

    let mut front =
        Front::start(limiter, Settings { closed: Closed::Unavailable, ..Settings::default() }).await;
    let status = front.call(request("d", vec![of("closed")])).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert_eq!(call(&mut front, &["local"]).await.0, Code::OverLimit, "this request was counted");
}

#[tokio::test(start_paused = true)]
async fn the_callers_timeout_shortens_the_deadline() {
    let options = Options::default().deadline(HOUR);
    let limiter = Limiter::builder()
        .store(GatedStore::closed())
        .rules(rule_for_each_policy())
        .options(options)
        .build()
        .unwrap();
    let mut front = Front::start(limiter, Settings::default()).await;
    for (timeout, took) in [(20, 15), (1_000, 995)] {
        let begun = tokio::time::Instant::now();
        let mut sent = tonic::Request::new(request("d", vec![descriptor([("closed", "x")])]));
        sent.metadata_mut().insert("grpc-timeout", format!("{timeout}m").parse().unwrap());
        let answer = front.client.should_rate_limit(sent).await.unwrap().into_inner();
        assert_eq!(answer.overall_code(), Code::OverLimit);
        let elapsed = begun.elapsed();
        let expected = Duration::from_millis(took);
        assert!(
            elapsed >= expected && elapsed <= expected + Duration::from_millis(2),
            "{timeout}: {elapsed:?}"
        );
    }
}

#[tokio::test]
async fn health_checks_and_reflection_are_served() {
    let front = OnMemory::start([]).await.front;
    let mut health = HealthClient::new(front.channel.clone());
    for service in ["", "envoy.service.ratelimit.v3.RateLimitService", "ratelimit"] {
        let sent = HealthCheckRequest { service: service.to_owned() };
        let status = health.check(sent).await.unwrap().into_inner().status();
        assert_eq!(status.as_str_name(), "SERVING", "{service}");
    }
    let unknown = HealthCheckRequest { service: "unknown".to_owned() };
    assert_eq!(health.check(unknown).await.unwrap_err().code(), tonic::Code::NotFound);

    let call = async |message: MessageRequest| {
        let sent = ServerReflectionRequest { host: String::new(), message_request: Some(message) };
        let answers = ServerReflectionClient::new(front.channel.clone())
            .server_reflection_info(tokio_stream::once(sent))
            .await;
        answers.unwrap().into_inner().message().await.unwrap().unwrap().message_response.unwrap()
    };
    let MessageResponse::ListServicesResponse(list) = call(MessageRequest::ListServices(String::new())).await
    else {
        panic!("no list");
    };
    let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    assert!(names.contains(&"envoy.service.ratelimit.v3.RateLimitService".to_owned()), "{names:?}");
    let message = "envoy.extensions.common.ratelimit.v3.RateLimitDescriptor".to_owned();
    let file = call(MessageRequest::FileContainingSymbol(message)).await;
    assert!(matches!(file, MessageResponse::FileDescriptorResponse(_)), "{file:?}");
}

#[tokio::test]
async fn a_message_over_the_size_limit_is_denied_without_being_read() {
    let mut envoy = OnMemory::start([]).await;
    let filled = |bytes: usize| vec![descriptor([("a", &"x".repeat(bytes))])];
    let fits = envoy.call("d", filled(MAX_MESSAGE - 100)).await;
    assert_eq!(shorts(&fits), (Code::Ok, vec![NO_LIMIT]));
    for bytes in [MAX_MESSAGE, 8 * MAX_MESSAGE] {
        let denied = envoy.call("d", filled(bytes)).await;
        assert_eq!(shorts(&denied), (Code::OverLimit, vec![]), "{bytes}");
    }
    assert_eq!(envoy.call("d", filled(1)).await.overall_code(), Code::Ok);
}

#[tokio::test]
async fn large_messages_over_the_memory_limit_are_denied_until_memory_is_free() {
    let front = OnMemory::start([]).await.front;
    let large = MAX_MESSAGE - 100;
    let message = request("d", vec![descriptor([("a", &"x".repeat(large))])]).encode_to_vec();
    let length = u32::try_from(message.len()).unwrap();
    let framed = [&[0][..], &length.to_be_bytes(), &message].concat();
    // incomplete calls hold their memory, on several connections
    let mut half = Vec::new();
    for _ in 0..LARGE_MESSAGES / MAX_MESSAGE / MAX_CONCURRENT_READS + 1 {
        let channel = Channel::from_shared(format!("http://{}", front.address)).unwrap().connect_lazy();
        for _ in 0..MAX_CONCURRENT_READS {
            let (send, body) = tokio::sync::mpsc::channel(1);
            send.try_send(Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(&framed[..1_000]))))
                .unwrap();
            let body = StreamBody::new(tokio_stream::wrappers::ReceiverStream::new(body));
            let mut channel = channel.clone();
            let call = tokio::spawn(async move { answer_of(&mut channel, body, "identity").await });
            half.push((send, call));
        }
    }
    let mut client = front.client.clone();
    let call = async |client: &mut RateLimitServiceClient<Channel>, bytes: usize| {
        let sent = request("d", vec![descriptor([("a", &"x".repeat(bytes))])]);
        client.should_rate_limit(sent).await.unwrap().into_inner().overall_code()
    };
    until_async("those that find no memory are denied", PATIENCE, async || {
        half.iter().any(|(_, call)| call.is_finished())
    })
    .await;
    assert_eq!(call(&mut client, large).await, Code::OverLimit);
    assert_eq!(call(&mut client, 1_000).await, Code::Ok, "a small message does not need the shared memory");
    for (send, call) in half {
        let _denied_already = send.send(Ok(Frame::data(Bytes::copy_from_slice(&framed[1_000..])))).await;
        drop(send);
        assert_eq!(call.await.unwrap().0, "0");
    }
    assert_eq!(call(&mut client, large).await, Code::Ok, "memory is available again");
}

/// Returns the status and message of the response to a call whose message arrives in these pieces.
async fn call_in(front: &mut Front, pieces: Vec<Frame<Bytes>>, encoding: &str) -> (String, Bytes) {
    let pieces = tokio_stream::iter(pieces.into_iter().map(Ok::<_, Infallible>));
    answer_of(&mut front.channel, StreamBody::new(pieces), encoding).await
}

async fn answer_of<B>(channel: &mut Channel, body: B, encoding: &str) -> (String, Bytes)
where
    B: hyper::body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let mut call = http::Request::post("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
        .header("content-type", "application/grpc");
    if !encoding.is_empty() {
        call = call.header("grpc-encoding", encoding);
    }
    let call = call.body(tonic::body::Body::new(body)).unwrap();
    poll_fn(|context| channel.poll_ready(context)).await.unwrap();
    let (head, body) = channel.call(call).await.unwrap().into_parts();
    let body = body.collect().await.unwrap();
    let trailers = body.trailers().cloned().unwrap_or_default();
    let status = trailers.get("grpc-status").or(head.headers.get("grpc-status")).unwrap();
    assert_eq!(head.headers["content-type"], "application/grpc");
    (status.to_str().unwrap().to_owned(), body.to_bytes())
}

#[tokio::test]
async fn a_message_may_arrive_in_any_pieces_and_a_malformed_one_is_an_error() {
    let mut front = OnMemory::start([per_value("d", "a", 5, MINUTE)]).await.front;
    let message = request("d", vec![hits(0, descriptor([("a", "x")]))]).encode_to_vec();
    let length = u32::try_from(message.len()).unwrap();
    let framed = |flag: u8, length: u32| [&[flag][..], &length.to_be_bytes(), &message].concat();
    let data = |bytes: &[u8]| Frame::data(Bytes::copy_from_slice(bytes));
    let whole = framed(0, length);
    let in_pieces_of = |size| whole.chunks(size).map(data).collect::<Vec<_>>();
    let (status, expected) = call_in(&mut front, in_pieces_of(whole.len()), "").await;
    assert_eq!(status, "0");
    assert_eq!(
        usize::try_from(u32::from_be_bytes(expected[1..5].try_into().unwrap())),
        Ok(expected.len() - 5)
    );
    let arrivals = [
        in_pieces_of(1),
        in_pieces_of(5),
        vec![data(&[]), data(&whole), data(&[]), data(&[])],
        vec![data(&whole), Frame::trailers(HeaderMap::from_iter([("x".parse().unwrap(), 1.into())]))],
    ];
    for pieces in arrivals {
        let shown = format!("{pieces:?}");
        let answer = call_in(&mut front, pieces, "identity").await;
        assert_eq!(answer, (status.clone(), expected.clone()), "{shown}");
    }
    let broken = [
        ("nothing", vec![], "identity", "13"),
        ("half a prefix", vec![data(&whole[..3])], "identity", "13"),
        ("cut off", vec![data(&whole[..whole.len() - 1])], "identity", "13"),
        ("compressed by nothing", vec![data(&framed(1, length))], "identity", "13"),
        ("no message of ours", vec![data(&[0, 0, 0, 0, 1, 0xff])], "identity", "13"),
        ("compressed", vec![data(&framed(1, length))], "gzip", "12"),
    ];
    for (what, pieces, encoding, status) in broken {
        assert_eq!(call_in(&mut front, pieces, encoding).await, (status.to_owned(), Bytes::new()), "{what}");
    }
}

/// The rules of random histories: every algorithm, and counters that several descriptors share.
fn random_rules() -> Vec<Rule> {
    vec![
        Rule::new("fixed", Limit::fixed_window(7, 10 * SECOND).unwrap()).per(["a"]),
        Rule::new("log", Limit::sliding_log(5, 7 * SECOND).unwrap()).per(["b"]),
        Rule::new("counter", Limit::sliding_counter(9, 5 * SECOND).unwrap()).when("a", "1"),
        Rule::new("bucket", Limit::token_bucket(3, SECOND).unwrap().with_burst(6).unwrap()).per(["domain"]),
    ]
}

#[tokio::test]
async fn grpc_and_the_library_make_the_same_decisions() {
    let seed = std::env::var("SLUICEGATE_SEED").map_or(1, |seed| seed.parse().unwrap());
    let mut random = StdRng::seed_from_u64(seed);
    let mut envoy = OnMemory::start(random_rules()).await;
    let (library, clock) = on_memory(random_rules());
    for step in 0..500 {
        let moved = Duration::from_millis(random.random_range(0..1_500));
        envoy.clock.advance(moved);
        clock.advance(moved);
        let (mut descriptors, mut requests) = (Vec::new(), Vec::new());
        for _ in 0..random.random_range(1..4) {
            let (a, b) = (random.random_range(0..3).to_string(), random.random_range(0..3).to_string());
            let entries = [("a", &*a), ("b", &*b)];
            let (entries, cost) = (&entries[..random.random_range(1..=2)], random.random_range(0..4_u32));
            let is_refund = random.random_bool(0.1);
            let entry = |&(key, value): &(&str, &str)| Entry { key: key.to_owned(), value: value.into() };
            let numbers = random.random_bool(0.1).then_some(4);
            descriptors.push(RateLimitDescriptor {
                entries: entries.iter().map(entry).collect(),
                hits_addend: Some(cost.into()),
                is_negative_hits: is_refund,
                limit: numbers.map(|requests_per_unit| RateLimitOverride {
                    requests_per_unit,
                    unit: RateLimitUnit::Second.into(),
                }),
            });
            let labels = Labels::new(entries.iter().copied().chain([("domain", "d")])).unwrap();
            let operation = if is_refund { Operation::Refund { at: None } } else { Operation::Check };
            let limit = numbers.map(|amount| LimitOverride { amount: amount.into(), window: SECOND });
            requests.push(Request::new(labels, Cost::from(cost)).operation(operation).limit(limit));
        }
        let answer = envoy.call("d", descriptors).await;
        let decided = library.check_group(&requests).await.unwrap();
        let code = |decision: &Decision| if decision.is_allowed() { Code::Ok } else { Code::OverLimit };
        assert_eq!(answer.overall_code(), code(&decided.overall), "step {step} of seed {seed}");
        assert_eq!(answer.statuses.len(), decided.each.len());
        for (status, decision) in answer.statuses.iter().zip(&decided.each) {
            let remaining = decision.remaining().unwrap_or(0);
            assert_eq!(status.code(), code(decision), "step {step} of seed {seed}");
            assert_eq!(u64::from(status.limit_remaining), remaining, "step {step} of seed {seed}");
            let rule = status.current_limit.as_ref().map(|limit| &*limit.name);
            assert_eq!(rule, decision.rule(), "step {step} of seed {seed}");
        }
        // one descriptor with a cost is a single check in the library
        if let ([one], Source::Memory) = (&*requests, decided.overall.source)
            && one.operation == Operation::Check
            && let Subject::Labels { labels, limit: None, .. } = &one.subject
        {
            let (before, plain) =
                (decided.overall.is_allowed(), library.peek(labels, Cost::ZERO).await.unwrap());
            assert_eq!(plain.tiers.len(), decided.overall.tiers.len());
            if before {
                let left = |decision: &Decision| {
                    decision.tiers.iter().map(|tier| tier.remaining).collect::<Vec<_>>()
                };
                assert_eq!(left(&plain), left(&decided.overall), "step {step} of seed {seed}");
            }
        }
    }
}
