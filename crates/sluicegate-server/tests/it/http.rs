//! The JSON API, bytes in and bytes out, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes, HttpBody, to_bytes},
    http::{Request, StatusCode, header},
};
use hyper::body::Frame;
use sluicegate::{
    Algorithm, Limit, Limiter, ManualClock, MemoryStore, OnStoreFailure, Rule, Timestamp, store::Store,
};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    demo,
    engine::Engine,
    http::{BODY_TIMEOUT, HttpService, MAX_BATCH_BODY, MAX_BODY, Settings},
};
use sluicegate_testkit::failing_store::FailingStore;
use sluicegate_testkit::gated_store::GatedStore;
use tokio::time::Instant;

const MINUTE: Duration = Duration::from_secs(60);
const NOW_US: u64 = 1_794_765_441_799_839;
const LOGIN: &str = r#"{"labels":{"route":"login","ip":"203.0.113.9"}}"#;
const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4711);
const CALLS: [&str; 5] = ["/v1/check", "/v1/peek", "/v1/charge", "/v1/refund", "/v1/reset"];

struct Api {
    service: HttpService,
    clock: ManualClock,
}

struct Reply {
    status: StatusCode,
    content_type: String,
    allow: Option<String>,
    body: String,
}

fn service(limiter: Limiter) -> HttpService {
    HttpService::new(Engine::new(limiter), Settings::default())
}

impl Api {
    fn new(rules: impl IntoIterator<Item = Rule>) -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(NOW_US));
        let store = MemoryStore::new().with_clock(clock.clone());
        Self { service: service(Limiter::new(store, rules).unwrap()), clock }
    }

    /// Two logins per minute and address.
    fn with_login_rule() -> Self {
        let limit = Limit::sliding_log(2, MINUTE).unwrap();
        Self::new([Rule::new("login-per-ip", limit).when("route", "login").per(["ip"])])
    }

    async fn send(&self, request: Request<Body>) -> Reply {
        let response = self.service.respond(PEER, request).await;
        let text = |name| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
        let (content_type, allow) = (text(header::CONTENT_TYPE).unwrap(), text(header::ALLOW));
        let status = response.status();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        Reply { status, content_type, allow, body: String::from_utf8(body.into()).unwrap() }
    }

    async fn post(&self, path: &str, body: impl Into<Body>) -> Reply {
        self.send(Request::post(path).body(body.into()).unwrap()).await
    }

    /// The body of a 200.
    async fn post_ok(&self, path: &str, body: &str) -> String {
        let reply = self.post(path, body.to_owned()).await;
        assert_eq!(
            (reply.status, &*reply.content_type),
            (StatusCode::OK, "application/json"),
            "{}",
            reply.body
        );
        reply.body
    }

    /// One field of the body of a 200.
    async fn field(&self, field: &str, path: &str, body: &str) -> serde_json::Value {
        let answer: serde_json::Value = serde_json::from_str(&self.post_ok(path, body).await).unwrap();
        answer[field].clone()
    }

    /// Returns the detail of a problem and asserts that the problem is well formed.
    async fn problem(&self, status: StatusCode, path: &str, body: impl Into<Body>) -> String {
        self.post(path, body).await.into_detail(status)
    }
}

impl Reply {
    fn into_detail(self, status: StatusCode) -> String {
        assert_eq!((self.status, &*self.content_type), (status, "application/problem+json"), "{}", self.body);
        let problem: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        assert_eq!(problem["type"], "about:blank");
        assert_eq!(problem["title"], status.canonical_reason().unwrap());
        assert_eq!(problem["status"], status.as_u16());
        assert_eq!(problem.as_object().unwrap().len(), 4);
        problem["detail"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn an_allowed_and_a_denied_response() {
    let api = Api::with_login_rule();
    assert_eq!(
        api.post_ok("/v1/check", LOGIN).await,
        r#"{"allowed":true,"rule":"login-per-ip","limit":2,"remaining":1,"retry_after_ms":null,"reset_after_ms":60000,"never":false,"degraded":false,"source":"memory","at_us":1794765441799839,"tiers":[{"allowed":true,"rule":"login-per-ip","limit":2,"remaining":1,"retry_after_ms":null,"reset_after_ms":60000,"never":false,"unit":"requests","shadow":false}]}"#
    );
    api.clock.advance(Duration::from_secs(20));
    api.post_ok("/v1/check", LOGIN).await;
    // a microsecond short of a whole number of milliseconds: both waits are rounded up
    api.clock.advance(Duration::from_micros(1));
    assert_eq!(
        api.post_ok("/v1/check", LOGIN).await,
        r#"{"allowed":false,"rule":"login-per-ip","limit":2,"remaining":0,"retry_after_ms":40000,"reset_after_ms":60000,"never":false,"degraded":false,"source":"memory","at_us":1794765461799840,"tiers":[{"allowed":false,"rule":"login-per-ip","limit":2,"remaining":0,"retry_after_ms":40000,"reset_after_ms":60000,"never":false,"unit":"requests","shadow":false}]}"#
    );
}

#[tokio::test]
async fn no_rule_matches() {
    let unmatched = r#"{"allowed":true,"rule":null,"limit":null,"remaining":null,"retry_after_ms":null,"reset_after_ms":null,"never":false,"degraded":false,"source":"unmatched","at_us":null,"tiers":[]}"#;
    let api = Api::with_login_rule();
    for call in &CALLS[..4] {
        assert_eq!(api.post_ok(call, r#"{"labels":{"route":"search"}}"#).await, unmatched, "{call}");
    }
    let none = r#"{"reset":0,"counters":[],"kept":[],"selected":0,"unmatched":[],"denial_cache_ms":0}"#;
    assert_eq!(api.post_ok("/v1/reset", r#"{"labels":{}}"#).await, none);
    let needs = r#""unmatched":[{"rule":"login-per-ip","needs":["route=login"]}]"#;
    let expected = none.replace(r#""unmatched":[]"#, needs);
    assert_eq!(api.post_ok("/v1/reset", r#"{"labels":{"ip":"203.0.113.9"}}"#).await, expected);
    let matching = r#"{"labels":{"route":"login","ip":"203.0.113.9"}}"#;
    assert_eq!(api.post_ok("/v1/reset", matching).await, none.replace(r#""selected":0"#, r#""selected":1"#));
}

#[tokio::test]
async fn a_key_with_its_own_limit() {
    let api = Api::new([]);
    let log = r#"{"key":"user:42","limit":{"algorithm":"sliding-log","amount":1,"window":"1m"},"cost":1}"#;
    assert_eq!(
        api.post_ok("/v1/check", log).await,
        r#"{"allowed":true,"rule":null,"limit":1,"remaining":0,"retry_after_ms":null,"reset_after_ms":60000,"never":false,"degraded":false,"source":"memory","at_us":1794765441799839,"tiers":[{"allowed":true,"rule":null,"limit":1,"remaining":0,"retry_after_ms":null,"reset_after_ms":60000,"never":false,"unit":"requests","shadow":false}]}"#
    );
    assert_eq!(api.field("allowed", "/v1/check", log).await, false);
    assert_eq!(
        api.post_ok("/v1/reset", &log.replace(r#","cost":1"#, "")).await,
        r#"{"reset":1,"counters":[{"rule":null,"key":"!key:user%3a42"}],"kept":[],"selected":1,"unmatched":[],"denial_cache_ms":0}"#
    );
    assert_eq!(api.field("allowed", "/v1/check", log).await, true);
}

/// The clock shows 2026-11-15 17:57:21.799839 UTC.
#[tokio::test]
async fn a_key_with_a_calendar_window() {
    let api = Api::new([]);
    let body = |limit: &str| {
        format!(r#"{{"key":"user:42","limit":{{"algorithm":"fixed-window","amount":3,{limit}}}}}"#)
    };
    let until_ms = |seconds: u64| (seconds * 1_000_000 - NOW_US).div_ceil(1_000);
    let table = [
        // 2026-12-01 00:00 UTC, also for Berlin: the units charged in UTC count until then; 2026-12-15 00:00 in Tokyo
        (r#""window":"1 month""#, 1_796_083_200, 2),
        (r#""window":"1 month","zone":"Europe/Berlin""#, 1_796_083_200, 1),
        (r#""window":"1 month","zone":"Asia/Tokyo","anchor":15"#, 1_797_260_400, 0),
    ];
    for (limit, until, remaining) in table {
        let reply: serde_json::Value =
            serde_json::from_str(&api.post_ok("/v1/check", &body(limit)).await).unwrap();
        assert_eq!(
            (&reply["allowed"], &reply["remaining"]),
            (&true.into(), &remaining.into()),
            "{limit}: {reply}"
        );
        assert_eq!(reply["reset_after_ms"], until_ms(until), "{limit}: {reply}");
    }
    let denied = api.post_ok("/v1/check", &body(r#""window":"1 month""#)).await;
    assert!(denied.contains(r#""allowed":false"#), "{denied}: the usage is kept under another zone");
    let explained = api.post_ok("/v1/explain", &body(r#""window":"1 week","anchor":"sunday""#)).await;
    assert!(explained.contains(r#""window":"1 week","zone":"UTC","anchor":"sunday""#), "{explained}");
}

#[tokio::test]
async fn an_invalid_calendar_window_is_rejected_with_a_fix() {
    let api = Api::new([]);
    let body = |limit: &str| format!(r#"{{"key":"k","limit":{{"amount":3,{limit}}}}}"#);
    let fixed = |limit: &str| body(&format!(r#""algorithm":"fixed-window",{limit}"#));
    let table = [
        (body(r#""window":"1 month""#), "limit: token-bucket has no calendar windows: use fixed-window"),
        (fixed(r#""window":"3 months""#), r#"limit: "3 months" is not a calendar window: use "1 day""#),
        (fixed(r#""window":"1 month","zone":"Mars/Base""#), r#"limit: zone "Mars/Base" is unknown"#),
        (
            fixed(r#""window":"1 month","anchor":0"#),
            r#"limit.anchor: anchor "0" is unknown: use a day of the month, 1 to 31"#,
        ),
        (fixed(r#""window":"1 week","anchor":7"#), r#"limit: anchor 7 does not fit "1 week""#),
        (
            fixed(r#""window":"1 month","anchor":"15""#),
            r#"limit.anchor: invalid value: string "15", expected a day"#,
        ),
        (fixed(r#""window":"1 month","anchor":null"#), "limit.anchor: invalid type: null"),
        (fixed(r#""window":"1 month","anchor":1.5"#), "expected a day of the month, 1 to 31, or a weekday"),
        (
            fixed(r#""window":"1d","zone":"UTC""#),
            r#"limit: zone needs a calendar window: use "1 day", "1 week""#,
        ),
    ];
    for (body, part) in table {
        let problem = api.problem(StatusCode::BAD_REQUEST, "/v1/check", body.clone()).await;
        assert!(problem.contains(part), "{body}: {problem}");
    }
}

#[tokio::test]
async fn a_limit_is_a_token_bucket_by_default() {
    let api = Api::new([]);
    let bucket = r#"{"key":"a","limit":{"amount":10,"window":"1s","burst":3},"cost":3}"#;
    assert_eq!(api.field("limit", "/v1/check", bucket).await, 3);
    assert_eq!(api.field("retry_after_ms", "/v1/check", bucket).await, 300);
}

#[tokio::test]
async fn a_cost_above_the_capacity_never_passes() {
    let api = Api::with_login_rule();
    let three = LOGIN.replace("}}", r#"},"cost":3}"#);
    assert_eq!(api.field("never", "/v1/check", &three).await, true);
    assert_eq!(api.field("retry_after_ms", "/v1/check", &three).await, serde_json::Value::Null);
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 2);
}

#[tokio::test]
async fn each_unit_has_its_tier_and_a_shadow_does_not_decide() {
    let rules = [
        Rule::new("requests", Limit::fixed_window(10, MINUTE).unwrap()),
        Rule::new("tokens", Limit::fixed_window(1000, MINUTE).unwrap()).unit("tokens"),
        Rule::new("stricter", Limit::fixed_window(500, MINUTE).unwrap()).unit("tokens").shadow(),
    ];
    let api = Api::new(rules);
    let body = r#"{"labels":{},"cost":{"requests":1,"tokens":850}}"#;
    assert_eq!(api.field("rule", "/v1/check", body).await, "requests");
    let tiers = api.field("tiers", "/v1/peek", body).await;
    let explained = |index: usize| {
        let tier = &tiers[index];
        [&tier["rule"], &tier["unit"], &tier["shadow"], &tier["allowed"], &tier["remaining"]]
            .map(ToString::to_string)
    };
    assert_eq!(explained(0), [r#""requests""#, r#""requests""#, "false", "true", "9"]);
    assert_eq!(explained(1), [r#""tokens""#, r#""tokens""#, "false", "false", "150"]);
    // a shadow rule that would have denied is not charged
    assert_eq!(explained(2), [r#""stricter""#, r#""tokens""#, "true", "false", "500"]);
}

#[tokio::test]
async fn a_peek_charges_nothing_and_a_charge_may_leave_a_debt() {
    let api = Api::with_login_rule();
    for _ in 0..3 {
        assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 2);
    }
    api.post_ok("/v1/charge", &LOGIN.replace("}}", r#"},"cost":5}"#)).await;
    assert_eq!(api.field("allowed", "/v1/check", LOGIN).await, false);
}

#[tokio::test]
async fn a_refund_reverts_the_charge_it_names() {
    let api = Api::with_login_rule();
    let first = api.field("at_us", "/v1/check", LOGIN).await;
    api.clock.advance(Duration::from_secs(1));
    api.post_ok("/v1/check", LOGIN).await;
    api.post_ok("/v1/refund", &LOGIN.replace("}}", &format!(r#"}},"at_us":{first}}}"#))).await;
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 1);
    // the second charge remains and counts for the whole minute
    assert_eq!(api.field("reset_after_ms", "/v1/peek", LOGIN).await, 60_000);
    api.post_ok("/v1/refund", LOGIN).await;
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 2);
}

#[tokio::test]
async fn charge_refund_and_reset_can_name_rules() {
    let limit = Limit::sliding_log(10, MINUTE).unwrap();
    let api = Api::new([Rule::new("one", limit), Rule::new("two", limit)]);
    let left = async || {
        let tiers = api.field("tiers", "/v1/peek", r#"{"labels":{}}"#).await;
        (tiers[0]["remaining"].as_u64().unwrap(), tiers[1]["remaining"].as_u64().unwrap())
    };
    api.post_ok("/v1/charge", r#"{"labels":{},"cost":4,"rules":["one"]}"#).await;
    assert_eq!(left().await, (6, 10));
    api.post_ok("/v1/charge", r#"{"labels":{},"cost":4}"#).await;
    api.post_ok("/v1/refund", r#"{"labels":{},"cost":3,"rules":["two"]}"#).await;
    assert_eq!(left().await, (2, 9));
    assert_eq!(
        api.post_ok("/v1/reset", r#"{"labels":{},"rules":["two"]}"#).await,
        r#"{"reset":1,"counters":[{"rule":"two","key":"two:*"}],"kept":["one"],"selected":1,"unmatched":[],"denial_cache_ms":0}"#
    );
    assert_eq!(left().await, (2, 10));
    let detail =
        api.problem(StatusCode::BAD_REQUEST, "/v1/charge", r#"{"labels":{},"rules":["three"]}"#).await;
    assert!(detail.contains(r#"no rule "three""#), "{detail}");
}

#[tokio::test]
async fn a_reset_keeps_shared_counters_unless_all_rules_are_selected() {
    let limit = Limit::sliding_log(10, MINUTE).unwrap();
    let api = Api::new([Rule::new("per-ip", limit).per(["ip"]), Rule::new("total", limit)]);
    let body = |rest: &str| format!(r#"{{"labels":{{"ip":"203.0.113.9"}}{rest}}}"#);
    api.post_ok("/v1/check", &body("")).await;
    let keyed = r#"{"reset":1,"counters":[{"rule":"per-ip","key":"per-ip:203.0.113.9"}],"kept":["total"],"selected":1,"unmatched":[],"denial_cache_ms":0}"#;
    assert_eq!(api.post_ok("/v1/reset", &body("")).await, keyed);
    api.post_ok("/v1/check", &body("")).await;
    assert_eq!(api.post_ok("/v1/reset", &body(r#","all":false"#)).await, keyed);
    assert_eq!(
        api.post_ok("/v1/reset", &body(r#","all":true"#)).await,
        r#"{"reset":1,"counters":[{"rule":"total","key":"total:*"}],"kept":[],"selected":2,"unmatched":[],"denial_cache_ms":0}"#
    );
    for (call, rest, problem) in [
        ("/v1/reset", r#","all":true,"rules":["total"]"#, "exclude each other"),
        ("/v1/reset", r#","rules":[]"#, r#""rules" is empty"#),
        ("/v1/charge", r#","all":true"#, r#""all" is not allowed in this call"#),
    ] {
        let detail = api.problem(StatusCode::BAD_REQUEST, call, body(rest)).await;
        assert!(detail.contains(problem), "{detail}");
    }
    let key = r#"{"key":"a","limit":{"amount":1,"window":"1s"},"all":true}"#;
    let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/reset", key).await;
    assert!(detail.contains(r#""rules" and "all" do not apply to "key""#), "{detail}");
}

#[tokio::test]
async fn a_number_that_is_not_whole_and_exact_is_rejected_and_nothing_is_charged() {
    let numbers = [
        "1.0",
        "1e3",
        "1E0",
        "0.5",
        r#""1""#,
        "-1",
        "-0",
        "NaN",
        "Infinity",
        "9007199254740992",
        "18446744073709551616",
        "1e400",
        "null",
        "true",
        "[1]",
        "0x1",
        "01",
        "+1",
        "",
    ];
    let rule = |cost: &str| LOGIN.replace("}}", &format!(r#"}},"cost":{cost}}}"#));
    let key = |amount: &str, burst: &str, cost: &str| {
        let limit = format!(r#"{{"amount":{amount},"window":"1m","burst":{burst}}}"#);
        format!(r#"{{"key":"a","limit":{limit},"cost":{cost}}}"#)
    };
    let api = Api::with_login_rule();
    for number in numbers {
        let bodies = [
            rule(number),
            rule(&format!(r#"{{"requests":{number}}}"#)),
            rule(&format!(r#"{{"requests":1,"tokens":{number}}}"#)),
            key(number, "2", "1"),
            key("2", number, "1"),
            key("2", "2", number),
        ];
        for body in bodies {
            for call in CALLS {
                api.problem(StatusCode::BAD_REQUEST, call, body.clone()).await;
            }
        }
        let at = LOGIN.replace("}}", &format!(r#"}},"at_us":{number}}}"#));
        api.problem(StatusCode::BAD_REQUEST, "/v1/refund", at).await;
    }
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 2);
    assert_eq!(api.field("remaining", "/v1/peek", &key("2", "2", "1")).await, 2);
    // the adjacent numbers are valid
    assert_eq!(api.field("never", "/v1/check", &rule("9007199254740991")).await, true);
    assert_eq!(api.field("remaining", "/v1/check", &rule("0")).await, 2);

    let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/check", key("1.0", "2", "1")).await;
    assert!(detail.starts_with("limit.amount: "), "{detail}");
    assert!(detail.contains("`1.0`, expected a whole number from 0 to 9007199254740991"), "{detail}");
}

#[tokio::test]
async fn an_invalid_body_is_rejected_with_a_fix() {
    let key = |members: &str| format!(r#"{{"key":"a",{members}}}"#);
    let limit = r#""limit":{"amount":2,"window":"1m"}"#;
    let table = [
        ("/v1/check", String::new(), r#"send one object, for example {"labels""#),
        ("/v1/check", "{".into(), "is not valid JSON"),
        ("/v1/check", format!("{LOGIN} {LOGIN}"), "trailing characters"),
        ("/v1/check", "[]".into(), "expected an object"),
        ("/v1/check", r#"[{"route":"login","ip":"203.0.113.9"}]"#.into(), "expected an object"),
        ("/v1/check", "{}".into(), r#"send "labels" to check by rules, or "key" and "limit""#),
        (
            "/v1/check",
            LOGIN.replace("}}", r#"},"cots":2}"#),
            "unknown field `cots`, expected one of `labels`",
        ),
        ("/v1/check", LOGIN.replace("}}", r#"},"cost":1,"cost":1}"#), "duplicate field `cost`"),
        ("/v1/check", LOGIN.replace("}}", r#"},"key":"a"}"#), "neither of the two valid forms"),
        ("/v1/check", LOGIN.replace("}}", &format!("}},{limit}}}")), "neither of the two valid forms"),
        (
            "/v1/check",
            LOGIN.replace("}}", &format!(r#"}},"key":"a",{limit}}}"#)),
            "neither of the two valid forms",
        ),
        ("/v1/check", LOGIN.replace("}}", r#"},"rules":["login-per-ip"]}"#), r#""rules" is not allowed"#),
        ("/v1/charge", LOGIN.replace("}}", r#"},"at_us":1}"#), r#""at_us" is not allowed"#),
        ("/v1/reset", LOGIN.replace("}}", r#"},"cost":1}"#), r#""cost" is not allowed"#),
        ("/v1/charge", LOGIN.replace("}}", r#"},"rules":[]}"#), "name at least one rule"),
        ("/v1/charge", LOGIN.replace("}}", r#"},"rules":null}"#), "rules: invalid type: null"),
        ("/v1/check", LOGIN.replace("}}", r#"},"cost":{"a b":1}}"#), r#"unit "a b" is invalid"#),
        (
            "/v1/check",
            LOGIN.replace("}}", r#"},"cost":{"a":1,"a":1}}"#),
            r#"unit "a" is named more than once"#,
        ),
        (
            "/v1/check",
            LOGIN.replace("}}", r#","user":42}}"#),
            "labels.user: invalid type: integer `42`, expected a string",
        ),
        (
            "/v1/check",
            LOGIN.replace("}}", r#","ip":"203.0.113.9"}}"#),
            r#"label "ip" is given more than once"#,
        ),
        ("/v1/check", key(r#""cost":1"#), "neither of the two valid forms"),
        ("/v1/check", format!(r#"{{"key":"",{limit}}}"#), "key is empty"),
        ("/v1/check", format!(r#"{{"key":"{}",{limit}}}"#, "k".repeat(1025)), "key has 1025 bytes"),
        ("/v1/check", key(&format!(r#"{limit},"cost":{{"requests":1}}"#)), "has no units"),
        ("/v1/charge", key(&format!(r#"{limit},"rules":["login-per-ip"]"#)), "which no rule counts"),
        ("/v1/check", key(r#""limit":[null,2,"1m"]"#), "limit: invalid type: sequence, expected an object"),
        ("/v1/check", key(r#""limit":{"amount":2}"#), "limit: missing field `window`"),
        ("/v1/check", key(r#""limit":{"amount":2,"window":60}"#), "limit.window: invalid type: integer `60`"),
        ("/v1/check", key(r#""limit":{"amount":2,"window":"60"}"#), r#"limit: "60" is not a duration: use "#),
        ("/v1/check", key(r#""limit":{"amount":2,"window":"0s"}"#), "limit: window 0ns is out of range"),
        ("/v1/check", key(r#""limit":{"amount":0,"window":"1m"}"#), "limit: amount 0 is out of range"),
        ("/v1/check", key(r#""limit":{"amount":2,"window":"1m","brust":2}"#), "unknown field `brust`"),
        (
            "/v1/check",
            key(r#""limit":{"algorithm":"leaky","amount":2,"window":"1m"}"#),
            r#"unknown algorithm "leaky""#,
        ),
        (
            "/v1/check",
            key(r#""limit":{"algorithm":"sliding-log","amount":2,"window":"1m","burst":2}"#),
            "or use token-bucket",
        ),
    ];
    let api = Api::with_login_rule();
    for (call, body, remedy) in table {
        let detail = api.problem(StatusCode::BAD_REQUEST, call, body.clone()).await;
        assert!(detail.contains(remedy), "{body}: {detail}");
    }
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 2);
    assert_eq!(api.field("remaining", "/v1/peek", &key(limit)).await, 2);
}

#[tokio::test]
async fn a_problem_quotes_only_the_beginning_of_the_input() {
    let api = Api::new([]);
    let body = format!(r#"{{"{}":1}}"#, "ü".repeat(20_000));
    let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/check", body).await;
    assert_eq!(detail.chars().count(), 513);
}

#[tokio::test]
async fn the_size_of_a_body_is_limited() {
    let api = Api::with_login_rule();
    let padded = |size: usize| format!("{LOGIN}{}", " ".repeat(size - LOGIN.len()));
    assert_eq!(api.field("remaining", "/v1/check", &padded(MAX_BODY)).await, 1);
    let detail = api.problem(StatusCode::PAYLOAD_TOO_LARGE, "/v1/check", padded(MAX_BODY + 1)).await;
    assert_eq!(detail, "the body is too large: send at most 65536 bytes");
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 1);
}

/// A body that never arrives.
struct Silence;

impl HttpBody for Silence {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_times_out() {
    let detail = Api::new([]).problem(StatusCode::REQUEST_TIMEOUT, "/v1/check", Body::new(Silence)).await;
    assert_eq!(detail, format!("the body did not arrive within {BODY_TIMEOUT:?}: send it with the request"));
}

#[tokio::test]
async fn an_unknown_path_and_a_wrong_method_are_rejected_with_the_alternatives() {
    let api = Api::new([]);
    let detail = api.problem(StatusCode::NOT_FOUND, "/v1/chekc", LOGIN).await;
    assert_eq!(
        detail,
        "there is no /v1/chekc: use /v1/check, /v1/peek, /v1/hold, /v1/settle, /v1/release, /v1/renew, /v1/charge, /v1/refund, /v1/reset, /v1/explain, /v1/auth, /v1/rules, /v1/top, /v1/live, /healthz, /readyz, /metrics, /openapi.json or, in a browser, /"
    );
    for call in CALLS {
        let reply = api.send(Request::get(call).body(Body::empty()).unwrap()).await;
        assert_eq!(reply.allow.as_deref(), Some("POST"));
        let detail = reply.into_detail(StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(detail, format!("{call} does not accept GET: use the method that the Allow header names"));
    }
}

#[tokio::test]
async fn it_is_alive() {
    let reply = Api::new([]).send(Request::get("/healthz").body(Body::empty()).unwrap()).await;
    assert_eq!((reply.status, &*reply.body), (StatusCode::OK, "ok"));
}

#[tokio::test]
async fn the_demo_denies_logins_over_the_limit() {
    let api = Api::new(demo::rules());
    for _ in 0..demo::LOGINS_PER_MINUTE {
        assert_eq!(api.field("allowed", "/v1/check", demo::LOGIN).await, true);
    }
    assert_eq!(api.field("allowed", "/v1/check", demo::LOGIN).await, false);
    assert_eq!(api.field("limit", "/v1/check", r#"{"labels":{"user":"ada"}}"#).await, 20);
}

#[tokio::test]
async fn without_the_store_failure_policies_decide_and_a_reset_is_an_error() {
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let open = Rule::new("open", limit).when("route", "open");
    let closed = Rule::new("closed", limit).when("route", "closed").on_store_failure(OnStoreFailure::Closed);
    let clock = ManualClock::new(Timestamp::from_micros(NOW_US));
    let api = Api { service: service(Limiter::new(FailingStore::not_run(), [open, closed]).unwrap()), clock };
    assert_eq!(
        api.post_ok("/v1/check", r#"{"labels":{"route":"open"}}"#).await,
        r#"{"allowed":true,"rule":null,"limit":null,"remaining":null,"retry_after_ms":null,"reset_after_ms":null,"never":false,"degraded":true,"source":"open","at_us":null,"tiers":[]}"#
    );
    assert_eq!(
        api.post_ok("/v1/check", r#"{"labels":{"route":"closed"}}"#).await,
        r#"{"allowed":false,"rule":"closed","limit":2,"remaining":0,"retry_after_ms":1000,"reset_after_ms":0,"never":false,"degraded":true,"source":"closed","at_us":null,"tiers":[{"allowed":false,"rule":"closed","limit":2,"remaining":0,"retry_after_ms":1000,"reset_after_ms":0,"never":false,"unit":"requests","shadow":false}]}"#
    );
    let detail = api
        .problem(StatusCode::SERVICE_UNAVAILABLE, "/v1/reset", r#"{"labels":{"route":"open"},"all":true}"#)
        .await;
    assert!(detail.ends_with("nothing changed: away"), "{detail}");
}

#[tokio::test]
async fn checks_of_a_batch_are_decided_in_order_and_independently() {
    let api = Api::with_login_rule();
    let checks = format!(
        r#"{{"deadline_ms":1000,"checks":[{LOGIN},{LOGIN},{LOGIN},{{"labels":{{"route":"search"}}}},
            {{"key":"k","limit":{{"amount":5,"window":"1s"}},"cost":2}}]}}"#
    );
    let results = api.field("results", "/v1/check", &checks).await;
    let allowed: Vec<_> = results.as_array().unwrap().iter().map(|result| &result["allowed"]).collect();
    assert_eq!(allowed, [true, true, false, true, true]);
    assert_eq!(results[4]["remaining"], 3);
    assert_eq!(api.post_ok("/v1/check", r#"{"checks":[]}"#).await, r#"{"results":[]}"#);

    let (most, denied) = (1000, StatusCode::BAD_REQUEST);
    let many = |count: usize| format!(r#"{{"checks":[{}]}}"#, vec![LOGIN; count].join(","));
    assert_eq!(api.field("results", "/v1/check", &many(most)).await.as_array().unwrap().len(), most);
    let detail = api.problem(denied, "/v1/check", many(most + 1)).await;
    assert_eq!(detail, "1001 checks are too many: send at most 1000");
}

#[tokio::test]
async fn a_response_has_rate_limit_headers_if_requested() {
    let api = Api::with_login_rule();
    let with_headers = |wanted| LOGIN.replace("}}", &format!(r#"}},"headers":{wanted}}}"#));
    let policy = r#""login-per-ip";q=2;w=60"#;
    let headers = async |path| api.field("headers", path, &with_headers(true)).await;
    let allowed = serde_json::json!({"ratelimit-policy": policy, "ratelimit": r#""login-per-ip";r=1;t=60"#});
    assert_eq!(headers("/v1/check").await, allowed);
    assert_eq!(headers("/v1/peek").await, allowed);
    assert!(!api.post_ok("/v1/check", &with_headers(false)).await.contains("headers"));

    let batch = format!(r#"{{"checks":[{},{LOGIN}]}}"#, with_headers(true));
    let results = api.field("results", "/v1/check", &batch).await;
    let denied = r#""login-per-ip";r=0;t=60"#;
    let denied = serde_json::json!({"ratelimit-policy": policy, "ratelimit": denied, "retry-after": "60"});
    assert_eq!(results[0]["headers"], denied);
    assert_eq!(results[1].get("headers"), None);
    for path in ["/v1/charge", "/v1/refund", "/v1/reset", "/v1/explain"] {
        let detail = api.problem(StatusCode::BAD_REQUEST, path, with_headers(true)).await;
        assert!(detail.starts_with("\"headers\" is not allowed in this call"), "{detail}");
    }
}

#[tokio::test]
async fn no_check_of_a_batch_is_decided_if_one_is_invalid() {
    let api = Api::with_login_rule();
    for (second, wrong) in [
        (r#"{"labels":{},"cost":-1}"#, "checks[1].cost: "),
        (r#"{"cost":1}"#, "checks[1]: the body has neither of the two valid forms"),
        (r#"{"labels":{},"deadline_ms":5}"#, "checks[1]: \"deadline_ms\" applies to all checks"),
        (r#"{"checks":[]}"#, "checks[1]: \"checks\" cannot be nested"),
        (r#"["labels"]"#, "checks[1]: invalid type: sequence, expected an object"),
        (r#"{"key":"","limit":{"amount":5,"window":"1s"}}"#, "checks[1]: key is empty"),
    ] {
        let body = format!(r#"{{"checks":[{LOGIN},{second}]}}"#);
        let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/check", body).await;
        assert!(detail.starts_with(wrong), "{detail}");
    }
    let both = r#"{"checks":[],"labels":{}}"#;
    let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/check", both).await;
    assert!(detail.contains("can only be combined with \"deadline_ms\""), "{detail}");
    for call in &CALLS[1..] {
        let detail = api.problem(StatusCode::BAD_REQUEST, call, r#"{"checks":[]}"#).await;
        assert!(detail.contains("\"checks\" is not allowed in this call"), "{call}: {detail}");
    }
    assert_eq!(api.field("remaining", "/v1/peek", LOGIN).await, 2);
}

#[tokio::test]
async fn a_check_that_is_invalid_for_a_rule_does_not_affect_the_others() {
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let tenfold = Rule::new("tenfold", limit).when("big", "*").cost(sluicegate::Cost::new(10).unwrap());
    let api = Api::new([tenfold, Rule::new("all", limit)]);
    let huge = r#"{"labels":{"big":""},"cost":9007199254740991}"#;
    let results =
        api.field("results", "/v1/check", &format!(r#"{{"checks":[{huge},{{"labels":{{}}}}]}}"#)).await;
    assert_eq!((&results[0]["status"], &results[1]["allowed"]), (&400.into(), &true.into()));
    assert!(results[0]["detail"].as_str().unwrap().contains("too large for rule \"tenfold\""));
}

#[tokio::test]
async fn a_deadline_of_zero_is_rejected() {
    let api = Api::with_login_rule();
    for (given, wrong) in [("0", "is 0: use at least 1"), ("-1", "invalid type"), ("1.5", "invalid type")] {
        let body = format!(r#"{{"labels":{{}},"deadline_ms":{given}}}"#);
        let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/check", body).await;
        assert!(detail.contains(wrong), "{detail}");
    }
}

#[tokio::test]
async fn a_check_is_guarded_by_method_site_token_and_size() {
    let requests = || {
        let post = |body: &'static str| Request::post("/v1/check").body(Body::from(body)).unwrap();
        let with = |name: &'static str, value: &'static str| {
            Request::post("/v1/check").header(name, value).body(Body::from(LOGIN)).unwrap()
        };
        [
            with("authorization", "Bearer app"),
            with("authorization", "Bearer app"),
            with("authorization", "Bearer app"),
            with("authorization", "Bearer other"),
            with("origin", "https://elsewhere.example"),
            post(LOGIN),
            post("{"),
            Request::get("/v1/check").body(Body::empty()).unwrap(),
            Request::post("/v1/check/").body(Body::from(LOGIN)).unwrap(),
            Request::post("/v1/check?now=1")
                .header("authorization", "Bearer app")
                .body(Body::from(format!(r#"{{"checks":[{LOGIN},{LOGIN}]}}"#)))
                .unwrap(),
            Request::post("/v1/check")
                .header("authorization", "Bearer app")
                .body(Body::from(vec![b' '; MAX_BATCH_BODY + 1]))
                .unwrap(),
        ]
    };
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let limiter =
        Limiter::new(MemoryStore::new(), [Rule::new("login", limit).when("route", "login")]).unwrap();
    let may_check = Scopes { check: true, adjust: false, admin: false };
    let access = Access::new(vec![Token::new("app", b"app", may_check)]);
    let service = HttpService::new(Engine::new(limiter), Settings { access, ..Settings::default() });
    let mut statuses = Vec::new();
    for request in requests() {
        statuses.push(service.respond(PEER, request).await.status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 403, 403, 401, 401, 405, 404, 200, 413]);
}

#[tokio::test]
async fn rules_that_do_not_apply_are_explained_only_to_administrators() {
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let rules =
        [Rule::new("login", limit).when("route", "login"), Rule::new("pay", limit).when("route", "pay")];
    let may_check = Scopes { check: true, adjust: false, admin: false };
    let tokens = vec![Token::new("app", b"app", may_check), Token::new("ops", b"ops", Scopes::ALL)];
    let settings = Settings { access: Access::new(tokens), ..Settings::default() };
    let engine = Engine::new(Limiter::new(MemoryStore::new(), rules).unwrap());
    let service = HttpService::new(engine, settings);
    let api = Api { service, clock: ManualClock::new(Timestamp::from_micros(NOW_US)) };
    let unmet = serde_json::json!([{"rule": "pay", "because": "label route does not match pay"}]);
    for (secret, others, more) in [("app", serde_json::json!([]), 1), ("ops", unmet, 0)] {
        let question = Request::post("/v1/explain").header("authorization", format!("Bearer {secret}"));
        let reply = api.send(question.body(LOGIN.into()).unwrap()).await;
        let explained: serde_json::Value = serde_json::from_str(&reply.body).unwrap();
        assert_eq!((&explained["others"], &explained["more_others"]), (&others, &more.into()), "{secret}");
        let applying = &explained["applies"][0];
        assert_eq!(
            (&applying["rule"], &applying["snapshot"]["kind"]),
            (&"login".into(), &"sliding-log".into())
        );
    }
}

#[tokio::test(start_paused = true)]
async fn snapshots_are_read_within_the_callers_deadline_and_not_without_the_store() {
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let explain = async |store: Store| {
        let service = service(Limiter::new(store, [Rule::new("r", limit)]).unwrap());
        let api = Api { service, clock: ManualClock::new(Timestamp::from_micros(NOW_US)) };
        let begun = Instant::now();
        let applies = api.field("applies", "/v1/explain", r#"{"labels":{},"deadline_ms":50}"#).await;
        assert_eq!((&applies[0]["rule"], &applies[0]["snapshot"]), (&"r".into(), &serde_json::Value::Null));
        begun.elapsed().as_millis()
    };
    let store = GatedStore::open();
    let took_ms = explain(Arc::clone(&store).into()).await;
    // timers fire on whole milliseconds
    assert!((50..=51).contains(&took_ms) && store.inspections() == 1, "{took_ms} ms");
    assert!(explain(FailingStore::not_run().into()).await <= 1);
}

#[tokio::test]
async fn an_explanation_of_a_counter_in_debt_has_its_whole_usage() {
    let api = Api::new([]);
    for algorithm in Algorithm::WINDOWED {
        let request = |cost| {
            format!(
                r#"{{"key":"k","limit":{{"algorithm":"{algorithm}","amount":10,"window":"10m"}},"cost":{cost}}}"#
            )
        };
        api.post_ok("/v1/charge", &request(48)).await;
        let explained = api.field("applies", "/v1/explain", &request(1)).await;
        let arithmetic = explained[0]["arithmetic"].as_str().unwrap();
        assert!(
            arithmetic.starts_with("48 used + 1 requested = 49 of 10: fits in"),
            "{algorithm}: {arithmetic}"
        );
        assert_eq!(
            (&explained[0]["state"]["used"], &explained[0]["state"]["remaining"]),
            (&48.into(), &0.into())
        );
    }
}

#[tokio::test]
async fn an_explanation_lists_rules_keys_and_the_arithmetic() {
    let limit = Limit::sliding_log(2, MINUTE).unwrap();
    let api = Api::new([
        Rule::new("login-per-ip", limit).when("route", "login").per(["ip"]),
        Rule::new("search", limit).when("route", "search"),
        Rule::new("tokens", limit).unit("tokens").shadow(),
    ]);
    api.post_ok("/v1/check", LOGIN).await;
    api.clock.advance(Duration::from_secs(15));
    let asked = r#"{"labels":{"route":"login","ip":"203.0.113.9"},"cost":2}"#;
    for _ in 0..2 {
        let explained: serde_json::Value =
            serde_json::from_str(&api.post_ok("/v1/explain", asked).await).unwrap();
        assert_eq!(
            explained["applies"][0],
            serde_json::json!({
                "rule": "login-per-ip", "key": "login-per-ip:203.0.113.9", "cost": 2,
                "limit": {"algorithm": "sliding-log", "amount": 2, "window": "1m", "capacity": 2, "shadow": false},
                "state": {"used": 1, "leased": 0, "remaining": 1, "reset_after_ms": 45000},
                "arithmetic": "1 used + 2 requested = 3 of 2: fits in 45s",
                "snapshot": {
                    "at_us": NOW_US + 15_000_000, "kind": "sliding-log", "older_units": 0,
                    "charges": [{"from_us": NOW_US, "until_us": NOW_US + 60_000_000, "units": 1}],
                },
            })
        );
        assert_eq!(
            explained["applies"][1]["arithmetic"],
            "0 used + 0 requested = 0 of 2: fits (the request has no cost in \"tokens\")"
        );
        assert_eq!(
            explained["others"],
            serde_json::json!([{"rule": "search", "because": "label route does not match search"}])
        );
        assert_eq!(
            (&explained["decision"]["allowed"], &explained["more_others"]),
            (&false.into(), &0.into())
        );
    }
    let key = r#"{"key":"k","limit":{"amount":3,"window":"1s"},"cost":4}"#;
    let explained = api.field("applies", "/v1/explain", key).await;
    assert_eq!(explained[0]["arithmetic"], "4 requested exceeds the capacity of 3: waiting does not help");
    assert_eq!(explained[0]["key"], "!key:k");
    let half_full = key.replace("\"cost\":4", "\"cost\":2");
    api.post_ok("/v1/check", &half_full).await;
    api.clock.advance(Duration::from_millis(100));
    let explained = api.field("applies", "/v1/explain", &half_full).await;
    let now = NOW_US + 15_100_000;
    let snapshot =
        serde_json::json!({"at_us": now, "kind": "token-bucket", "level": 1.7, "drains_per_second": 3.0});
    assert_eq!(explained[0]["snapshot"], snapshot);
}
