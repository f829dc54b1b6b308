//! Holds over the JSON API, bytes in and bytes out, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use axum::{
    body::{Body, to_bytes},
    http::{Method, Request, StatusCode, header},
};
use serde_json::{Value, json};
use sluicegate::{Labels, Limit, Limiter, ManualClock, MemoryStore, Rule, Timestamp, limiter, store::HoldId};
use sluicegate_core::OnExpiry;
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    engine::Engine,
    http::{HttpService, Settings},
    resp::Endpoint,
};
use sluicegate_testkit::{failing_store::FailingStore, gated_store::GatedStore};
use tokio::time::{sleep, timeout};

use crate::resp_holds::replies;

const HOUR: Duration = Duration::from_secs(3_600);
const NOW_US: u64 = 1_794_765_441_799_839;
const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4711);

struct Api {
    service: HttpService,
    clock: ManualClock,
}

impl Api {
    fn new(rules: impl IntoIterator<Item = Rule>) -> Self {
        Self::with_access(rules, Access::default())
    }

    fn with_access(rules: impl IntoIterator<Item = Rule>, access: Access) -> Self {
        let clock = ManualClock::new(Timestamp::from_micros(NOW_US));
        let store = MemoryStore::new().with_clock(clock.clone());
        let engine = Engine::new(Limiter::new(store, rules).unwrap());
        Self { service: HttpService::new(engine, Settings { access, ..Settings::default() }), clock }
    }

    /// A thousand tokens per hour and two requests in flight, for each tenant.
    fn with_budget() -> Self {
        Self::new(budget())
    }

    async fn send(&self, request: Request<Body>) -> (StatusCode, String) {
        let response = self.service.respond(PEER, request).await;
        let status = response.status();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(body.into()).unwrap())
    }

    async fn post(&self, path: &str, body: &Value) -> (StatusCode, String) {
        self.send(Request::post(path).body(body.to_string().into()).unwrap()).await
    }

    /// The body of a 200.
    async fn ok(&self, path: &str, body: Value) -> Value {
        let (status, text) = self.post(path, &body).await;
        assert_eq!(status, StatusCode::OK, "{path} {body}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    /// The detail of a problem.
    async fn problem(&self, status: StatusCode, path: &str, body: Value) -> String {
        let (answered, text) = self.post(path, &body).await;
        assert_eq!(answered, status, "{path} {body}: {text}");
        let problem: Value = serde_json::from_str(&text).unwrap();
        problem["detail"].as_str().unwrap().to_owned()
    }
}

fn budget() -> [Rule; 2] {
    let tokens = Limit::fixed_window(1_000, HOUR).unwrap();
    [
        Rule::new("tokens", tokens).per(["tenant"]).unit("tokens").max_excess(100),
        Rule::new("in-flight", Limit::concurrency(2).unwrap()).per(["tenant"]),
    ]
}

/// A hold of one request and 500 tokens.
fn hold(id: &str) -> Value {
    json!({"labels": {"tenant": "acme"}, "cost": {"requests": 1, "tokens": 500}, "id": id})
}

#[tokio::test]
async fn a_hold_is_settled_with_its_token() {
    let api = Api::with_budget();
    let (_, text) = api.post("/v1/hold", &hold("request 1")).await;
    let held: Value = serde_json::from_str(&text).unwrap();
    let token = held["token"].as_str().unwrap();
    let expected = format!(
        r#"{{"allowed":true,"rule":"in-flight","limit":2,"remaining":1,"retry_after_ms":null,"reset_after_ms":60000,"never":false,"degraded":false,"source":"memory","at_us":1794765441799839,"tiers":[{{"allowed":true,"rule":"tokens","limit":1000,"remaining":500,"retry_after_ms":null,"reset_after_ms":158201,"never":false,"unit":"tokens","shadow":false}},{{"allowed":true,"rule":"in-flight","limit":2,"remaining":1,"retry_after_ms":null,"reset_after_ms":60000,"never":false,"unit":"requests","shadow":false}}],"id":"request 1","token":"{token}","expires_at_us":1794765501799839,"repeated":false}}"#
    );
    assert_eq!(text, expected);
    let settled = json!({"token": token, "cost": {"tokens": 120}});
    let (_, text) = api.post("/v1/settle", &settled).await;
    assert_eq!(
        text,
        r#"{"outcome":"settled","tiers":[{"rule":"tokens","unit":"tokens","outcome":"settled","charged":120,"remaining":880,"expires_at_us":1794765501799839},{"rule":"in-flight","unit":"requests","outcome":"settled","charged":1,"remaining":2,"expires_at_us":1794765501799839}]}"#
    );
    let again = api.ok("/v1/settle", settled).await;
    assert_eq!(again["outcome"], "already");
    assert_eq!((&again["tiers"][0]["charged"], &again["tiers"][0]["remaining"]), (&json!(120), &json!(null)));
}

#[tokio::test]
async fn a_denied_hold_charges_nothing_and_has_no_token() {
    let api = Api::with_budget();
    for id in ["a", "b"] {
        assert_eq!(api.ok("/v1/hold", hold(id)).await["allowed"], true);
    }
    let denied = api.ok("/v1/hold", hold("c")).await;
    assert_eq!(
        (&denied["allowed"], &denied["id"], &denied["repeated"]),
        (&json!(false), &json!("c"), &json!(false))
    );
    assert_eq!((denied.get("token"), denied.get("expires_at_us")), (None, None));
    assert_eq!(denied["retry_after_ms"], 158_201);
    api.ok("/v1/release", hold_of("a")).await;
    assert_eq!(api.ok("/v1/hold", hold("c")).await["allowed"], true);
}

/// A hold of the tenant, by its id.
fn hold_of(id: &str) -> Value {
    json!({"labels": {"tenant": "acme"}, "id": id})
}

fn with(body: Value, fields: Value) -> Value {
    let Value::Object(mut body) = body else { panic!("{body} is not an object") };
    body.extend(fields.as_object().unwrap().clone());
    body.into()
}

#[tokio::test]
async fn a_repeated_hold_gets_the_first_response() {
    let api = Api::with_budget();
    let first = api.ok("/v1/hold", hold("a")).await;
    api.clock.advance(Duration::from_secs(1));
    let again = api.ok("/v1/hold", hold("a")).await;
    assert_eq!(again, with(first, json!({"repeated": true})));
    let peek = json!({"labels": {"tenant": "acme"}, "cost": {"tokens": 500}});
    assert_eq!(api.ok("/v1/peek", peek).await["allowed"], true);
    let other = with(hold("a"), json!({"cost": {"tokens": 1}}));
    let detail = api.problem(StatusCode::CONFLICT, "/v1/hold", other).await;
    assert_eq!(
        detail,
        r#"id "a" belongs to a hold with another cost, or to one that has ended: use another id"#
    );
    api.ok("/v1/release", hold_of("a")).await;
    api.problem(StatusCode::CONFLICT, "/v1/hold", hold("a")).await;
}

#[tokio::test]
async fn a_hold_without_an_id_gets_one() {
    let api = Api::with_budget();
    let anonymous = json!({"labels": {"tenant": "acme"}});
    let (first, other) = (api.ok("/v1/hold", anonymous.clone()).await, api.ok("/v1/hold", anonymous).await);
    assert_ne!(first["id"], other["id"]);
    let released = api.ok("/v1/release", hold_of(first["id"].as_str().unwrap())).await;
    assert_eq!(released["outcome"], "released");
}

#[tokio::test]
async fn a_hold_is_settled_by_its_labels_and_id() {
    let api = Api::with_budget();
    api.ok("/v1/hold", hold("a")).await;
    let settled = api.ok("/v1/settle", with(hold_of("a"), json!({"cost": {"tokens": 120}}))).await;
    assert_eq!((&settled["outcome"], &settled["tiers"][0]["remaining"]), (&json!("settled"), &json!(880)));
    let unknown = api.ok("/v1/settle", hold_of("b")).await;
    let tier = |rule: &str, unit: &str| json!({"rule": rule, "unit": unit, "outcome": "unknown", "charged": null, "remaining": null, "expires_at_us": null});
    let tiers = [tier("tokens", "tokens"), tier("in-flight", "requests")];
    assert_eq!(unknown, json!({"outcome": "unknown", "tiers": tiers}));
}

#[tokio::test]
async fn a_hold_without_rules_is_settled_by_its_key() {
    let api = Api::new([]);
    let limit = json!({"algorithm": "fixed-window", "amount": 100, "window": "1h"});
    let key = json!({"key": "user:42", "limit": limit, "id": "a"});
    let held = api.ok("/v1/hold", with(key.clone(), json!({"cost": 10}))).await;
    assert_eq!(held["remaining"], 90);
    let settled = api.ok("/v1/settle", with(key, json!({"cost": 3}))).await;
    let tier = json!({"rule": null, "unit": "requests", "outcome": "settled", "charged": 3, "remaining": 97,
                      "expires_at_us": NOW_US + 60_000_000});
    assert_eq!(settled, json!({"outcome": "settled", "tiers": [tier]}));
}

#[tokio::test]
async fn a_settlement_without_a_cost_keeps_the_estimate() {
    let api = Api::with_budget();
    api.ok("/v1/hold", hold("a")).await;
    let settled = api.ok("/v1/settle", hold_of("a")).await;
    let charged: Vec<_> = settled["tiers"].as_array().unwrap().iter().map(|tier| &tier["charged"]).collect();
    assert_eq!((settled["outcome"].as_str(), charged), (Some("settled"), vec![&json!(500), &json!(1)]));
}

#[tokio::test]
async fn a_hold_is_renewed_until_it_expires() {
    let api = Api::with_budget();
    let held = api.ok("/v1/hold", with(hold("a"), json!({"ttl_ms": 1_000}))).await;
    assert_eq!(held["expires_at_us"], NOW_US + 1_000_000);
    let renewal = json!({"token": held["token"], "ttl_ms": 2_000});
    let renewed = api.ok("/v1/renew", renewal.clone()).await;
    assert_eq!(
        (&renewed["outcome"], &renewed["tiers"][0]["expires_at_us"]),
        (&json!("renewed"), &json!(NOW_US + 2_000_000))
    );
    api.clock.advance(Duration::from_millis(2_001));
    assert_eq!(api.ok("/v1/renew", renewal).await["outcome"], "late");
    let late = api.ok("/v1/settle", with(hold_of("a"), json!({"cost": {"tokens": 120}}))).await;
    assert_eq!((&late["outcome"], &late["tiers"][0]["charged"]), (&json!("late"), &json!(120)));
}

#[tokio::test]
async fn a_check_that_needs_a_hold_is_rejected_and_forward_auth_skips_the_rule() {
    let api = Api::with_budget();
    let check = json!({"labels": {"tenant": "acme"}, "cost": {"tokens": 1}});
    let remedy =
        r#"rule "in-flight" counts requests in flight: use hold, and settle or release it at the end"#;
    assert_eq!(api.problem(StatusCode::BAD_REQUEST, "/v1/check", check.clone()).await, remedy);
    let batch = api.ok("/v1/check", json!({"checks": [check]})).await;
    assert_eq!(
        (&batch["results"][0]["status"], &batch["results"][0]["detail"]),
        (&json!(400), &json!(remedy))
    );
    let key = json!({"key": "user:42", "limit": {"algorithm": "concurrency", "amount": 1}});
    let detail = api.problem(StatusCode::BAD_REQUEST, "/v1/check", key).await;
    assert!(detail.contains("use hold"), "{detail}");
    for _ in 0..3 {
        let (status, _) = api.send(Request::get("/v1/auth?tenant=acme").body(Body::empty()).unwrap()).await;
        assert_eq!(status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_check_skips_a_shadow_concurrency_rule() {
    let api = Api::new([Rule::new("in-flight", Limit::concurrency(1).unwrap()).per(["tenant"]).shadow()]);
    for _ in 0..2 {
        let checked = api.ok("/v1/check", json!({"labels": {"tenant": "acme"}})).await;
        assert_eq!((&checked["allowed"], &checked["source"]), (&json!(true), &json!("unmatched")));
    }
    let held = api.ok("/v1/hold", hold_of("job 1: \"x\"")).await;
    assert_eq!((&held["tiers"][0]["rule"], &held["tiers"][0]["remaining"]), (&json!("in-flight"), &json!(0)));
    let conflict = with(hold_of("job 1: \"x\""), json!({"cost": 2}));
    let detail = api.problem(StatusCode::CONFLICT, "/v1/hold", conflict).await;
    assert!(detail.starts_with(r#"id "job 1: \"x\"" belongs"#), "{detail}");
}

#[tokio::test]
async fn an_invalid_body_gets_a_problem_that_names_the_fix() {
    let (api, labels) = (Api::with_budget(), json!({"tenant": "acme"}));
    let token = api.ok("/v1/hold", hold("a")).await["token"].clone();
    let limit = json!({"amount": 2, "window": "1m"});
    let concurrency = |fields: Value| with(json!({"algorithm": "concurrency", "amount": 2}), fields);
    let table = [
        ("/v1/hold", json!({"labels": labels, "id": ""}), "id is empty: use one that is unique"),
        ("/v1/hold", json!({"labels": labels, "id": "i".repeat(129)}), "id has 129 bytes: use at most 128"),
        ("/v1/hold", json!({"labels": labels, "id": 1}), "id: invalid type: integer `1`, expected a string"),
        ("/v1/hold", json!({"labels": labels, "ttl_ms": 0}), "ttl 0ns is out of range: use 1ms to 86400s"),
        ("/v1/hold", json!({"labels": labels, "ttl_ms": 86_400_001}), "renew the hold for longer work"),
        ("/v1/hold", json!({"labels": labels, "token": token}), "only an existing hold has one"),
        ("/v1/hold", json!({"labels": labels, "rules": ["tokens"]}), "all rules that match decide together"),
        ("/v1/hold", json!({"checks": []}), "only a check may be sent in batches"),
        ("/v1/hold", json!({"id": "b"}), "neither of the two valid forms"),
        ("/v1/settle", json!({}), "the hold is missing"),
        ("/v1/settle", json!({"labels": labels}), "the hold is missing"),
        ("/v1/settle", json!({"id": "a"}), "neither of the two valid forms"),
        ("/v1/settle", json!({"token": "MTph!"}), "invalid token: use the token from the answer to the hold"),
        ("/v1/settle", json!({"token": token, "id": "a"}), r#""token" and "id" exclude each other"#),
        ("/v1/settle", json!({"token": token, "labels": labels}), r#""labels" is not allowed with "token""#),
        ("/v1/settle", json!({"token": token, "key": "k"}), r#""key" is not allowed with "token""#),
        ("/v1/settle", json!({"token": token, "limit": limit}), r#""limit" is not allowed with "token""#),
        ("/v1/settle", json!({"token": token, "headers": true}), "decide about a response"),
        ("/v1/settle", json!({"token": token, "ttl_ms": 5}), "only a hold and a renewal set an expiry"),
        ("/v1/settle", json!({"token": token, "cost": -1}), "cost: invalid type"),
        ("/v1/settle", json!({"key": "k", "limit": limit, "id": "a", "cost": {"tokens": 1}}), "has no units"),
        ("/v1/release", json!({"token": token, "cost": 1}), "a release refunds the whole estimate"),
        ("/v1/renew", json!({"token": token}), r#""ttl_ms" is missing"#),
        ("/v1/renew", json!({"token": token, "ttl_ms": 0}), "ttl 0ns is out of range"),
        ("/v1/renew", json!({"token": token, "ttl_ms": 5, "cost": 1}), "a renewal charges nothing"),
        ("/v1/check", json!({"labels": labels, "id": "a"}), "only holds have one"),
        ("/v1/check", json!({"labels": labels, "ttl_ms": 5}), "only a hold and a renewal set an expiry"),
        (
            "/v1/hold",
            json!({"key": "k", "limit": concurrency(json!({"window": "1m"}))}),
            "window has no effect with concurrency",
        ),
        (
            "/v1/hold",
            json!({"key": "k", "limit": concurrency(json!({"on_expiry": "charge"}))}),
            "on_expiry has no effect",
        ),
        (
            "/v1/hold",
            json!({"key": "k", "limit": with(limit.clone(), json!({"on_expiry": "keep"}))}),
            "expected `charge` or `release`",
        ),
        (
            "/v1/hold",
            json!({"key": "k", "limit": with(limit.clone(), json!({"max_excess": 1_000_000_001}))}),
            "max_excess 1000000001 is out of range",
        ),
    ];
    for (call, body, remedy) in table {
        let detail = api.problem(StatusCode::BAD_REQUEST, call, body.clone()).await;
        assert!(detail.contains(remedy), "{call} {body}: {detail}");
    }
    assert_eq!(api.ok("/v1/settle", json!({"token": token})).await["outcome"], "settled");
}

#[tokio::test]
async fn a_limit_of_a_request_sets_what_happens_on_expiry_and_the_excess() {
    let api = Api::new([]);
    let limit = json!({"algorithm": "fixed-window", "amount": 100, "window": "1h", "on_expiry": "release"});
    let key = json!({"key": "user:42", "limit": limit});
    api.ok("/v1/hold", with(key.clone(), json!({"cost": 60, "ttl_ms": 1_000}))).await;
    api.clock.advance(Duration::from_secs(2));
    assert_eq!(api.ok("/v1/hold", with(key, json!({"cost": 60}))).await["allowed"], true);
}

fn tokens_of(scopes: &[(&str, Scopes)]) -> Access {
    Access::new(scopes.iter().map(|(name, may)| Token::new(name, name.as_bytes(), *may)).collect())
}

#[tokio::test]
async fn without_the_scope_adjust_a_settlement_charges_at_most_the_excess_of_the_rule() {
    let check = Scopes { check: true, ..Scopes::default() };
    let access = tokens_of(&[("app", check), ("billing", Scopes { adjust: true, ..check })]);
    let api = Api::with_access(budget(), access);
    let call = async |token: Option<&str>, path: &str, body: Value| {
        let mut request = Request::builder().method(Method::POST).uri(path);
        if let Some(token) = token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let (status, text) = api.send(request.body(body.to_string().into()).unwrap()).await;
        (status, serde_json::from_str::<Value>(&text).unwrap())
    };
    // 500 tokens are held, and the rule allows 100 more
    for (id, token, charged) in [("a", "app", 600), ("b", "billing", 900)] {
        let held = call(Some("app"), "/v1/hold", with(hold(id), json!({"labels": {"tenant": id}}))).await.1;
        let actual = json!({"token": held["token"], "cost": {"tokens": 900}});
        let (_, settled) = call(Some(token), "/v1/settle", actual).await;
        let answer = (&settled["outcome"], &settled["tiers"][0]["charged"]);
        assert_eq!(answer, (&json!("settled"), &json!(charged)), "{id}");
    }
    for path in ["/v1/hold", "/v1/settle", "/v1/release", "/v1/renew"] {
        assert_eq!(call(None, path, hold_of("a")).await.0, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(call(Some("other"), path, hold_of("a")).await.0, StatusCode::FORBIDDEN, "{path}");
    }
}

#[tokio::test]
async fn a_counter_without_room_for_another_hold_is_unavailable() {
    let store = MemoryStore::new().with_max_memory(1 << 20).unwrap();
    let rule = Rule::new("in-flight", Limit::concurrency(1_000_000).unwrap());
    let service = HttpService::new(Engine::new(Limiter::new(store, [rule]).unwrap()), Settings::default());
    for count in 0.. {
        assert!(count < 10_000, "memory is never full");
        let (status, body) = service.post("/v1/hold", br#"{"labels":{}}"#.to_vec()).await;
        if status != StatusCode::OK {
            let problem: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{problem}");
            let detail = problem["detail"].as_str().unwrap();
            assert!(
                detail.starts_with(r#"rule "in-flight" has 100000 live holds, or memory is full"#),
                "{detail}"
            );
            return;
        }
    }
}

#[tokio::test]
async fn while_the_store_is_down_a_settlement_is_queued_and_a_renewal_is_unavailable() {
    let rule = Rule::new("in-flight", Limit::concurrency(2).unwrap()).per(["tenant"]);
    let limiter = Limiter::new(FailingStore::not_run(), [rule]).unwrap();
    let service = HttpService::new(Engine::new(limiter), Settings::default());
    let post = async |path: &str, body: Value| {
        let (status, body) = service.post(path, body.to_string().into()).await;
        (status, serde_json::from_slice::<Value>(&body).unwrap())
    };
    let (_, held) = post("/v1/hold", hold("a")).await;
    assert_eq!((&held["allowed"], &held["source"]), (&json!(true), &json!("open")));
    for path in ["/v1/settle", "/v1/release"] {
        let (status, settled) = post(path, hold_of("a")).await;
        assert_eq!((status, &settled["outcome"]), (StatusCode::OK, &json!("queued")), "{path}");
    }
    let (status, _) = post("/v1/renew", with(hold_of("a"), json!({"ttl_ms": 1_000}))).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn while_the_store_is_down_and_the_queue_is_full_a_settlement_is_unavailable() {
    let rule = Rule::new("in-flight", Limit::concurrency(2).unwrap()).per(["tenant"]);
    let limiter = Limiter::new(FailingStore::not_run(), [rule]).unwrap();
    let engine = Engine::new(limiter.clone());
    let service = HttpService::new(engine.clone(), Settings::default());
    let request = limiter::Request::new(Labels::new([("tenant", "acme")]).unwrap(), 1);
    let hold = limiter.hold_token(&request, HoldId::new("a").unwrap()).unwrap();
    let mut queued = 0;
    while limiter.release(&hold).await.is_ok() {
        queued += 1;
        assert!(queued < 100_000, "the queue is never full");
    }
    for path in ["/v1/settle", "/v1/release"] {
        let (status, body) = service.post(path, hold_of("a").to_string().into()).await;
        let problem = String::from_utf8_lossy(&body);
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{path}: {problem}");
    }
    let endpoint = Endpoint::new(engine, Access::default());
    let reply = replies(&endpoint, &["SG.RELEASE a tenant acme"]).await;
    assert!(reply.starts_with("-UNAVAILABLE "), "{reply}");
}

#[tokio::test(start_paused = true)]
async fn a_settlement_is_queued_although_its_client_disconnected() {
    let rule = Rule::new("in-flight", Limit::concurrency(1).unwrap()).per(["tenant"]);
    let store = GatedStore::closed();
    let engine = Engine::new(Limiter::new(Arc::clone(&store), [rule]).unwrap());
    let service = HttpService::new(engine.clone(), Settings::default());
    let body = hold_of("a").to_string().into_bytes();
    let release = tokio::spawn(async move { service.post("/v1/release", body).await });
    store.received().await;
    release.abort();
    assert!(release.await.unwrap_err().is_cancelled());
    let queued = async {
        while engine.limiter().stats().holds.queued == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(10), queued).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hold_with_a_generated_id_is_released_if_its_client_disconnects() {
    let rule = Rule::new("in-flight", Limit::concurrency(1).unwrap()).per(["tenant"]);
    let store = GatedStore::closed();
    let engine = Engine::new(Limiter::new(Arc::clone(&store), [rule]).unwrap());
    let service = HttpService::new(engine.clone(), Settings::default());
    let body = json!({"labels": {"tenant": "acme"}}).to_string().into_bytes();
    let hold = tokio::spawn(async move { service.post("/v1/hold", body).await });
    store.received().await;
    hold.abort();
    assert!(hold.await.unwrap_err().is_cancelled());
    store.permit(10);
    let released = async {
        while engine.limiter().stats().holds.released == 0 {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(10), released).await.unwrap();
    assert_eq!(engine.limiter().stats().holds.held, 1);
}

#[tokio::test]
async fn an_explanation_has_the_live_holds_of_each_counter() {
    let api = Api::with_budget();
    let explain = async || {
        let explained = api.ok("/v1/explain", json!({"labels": {"tenant": "acme"}})).await;
        let applies = explained["applies"].as_array().unwrap().clone();
        (applies.iter().map(|rule| rule["state"]["holds"].clone()).collect::<Vec<_>>(), applies)
    };
    assert_eq!(explain().await.0, [Value::Null, Value::Null]);
    api.ok("/v1/hold", hold("a")).await;
    api.clock.advance(Duration::from_secs(1));
    api.ok("/v1/hold", with(hold("b"), json!({"cost": {"requests": 1, "tokens": 100}, "ttl_ms": 5_000})))
        .await;
    let (holds, applies) = explain().await;
    let live = |units: u64| json!({"count": 2, "units": units, "oldest_us": NOW_US});
    assert_eq!(holds, [live(600), live(2)]);
    assert_eq!(
        applies[1]["limit"],
        json!({"algorithm": "concurrency", "amount": 2, "capacity": 2, "shadow": false})
    );
    let first_and_last = json!({"from_us": NOW_US + 6_000_000, "until_us": NOW_US + 60_000_000, "units": 2});
    let snapshot = json!({"at_us": NOW_US + 1_000_000, "kind": "concurrency", "live": first_and_last});
    assert_eq!(applies[1]["snapshot"], snapshot);
    assert_eq!(applies[1]["arithmetic"], "2 used + 1 requested = 3 of 2: fits in 5s at the latest");
    api.ok("/v1/release", hold_of("a")).await;
    assert_eq!(explain().await.0[1], json!({"count": 1, "units": 1, "oldest_us": NOW_US + 1_000_000}));
}

#[tokio::test]
async fn the_rules_show_what_applies_to_holds() {
    let hour = Limit::fixed_window(1_000, HOUR).unwrap();
    let released = hour.with_on_expiry(OnExpiry::Release).unwrap();
    let rules = [
        Rule::new("plain", hour),
        Rule::new("held", released).ttl(Duration::from_secs(90)).hold("request_id").max_excess(50),
        Rule::new("capacity", hour).max_excess(1_000),
        Rule::new("in-flight", Limit::concurrency(2).unwrap()),
    ];
    let shown = async |rules: &[Rule]| {
        let api = Api::new(rules.iter().cloned());
        let (_, text) = api.send(Request::get("/v1/rules").body(Body::empty()).unwrap()).await;
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let all = shown(&rules).await;
    let fields = ["window", "ttl", "on_expiry", "max_excess", "hold"];
    let of = |rule: usize| fields.map(|field| all["rules"][rule][field].clone());
    let null = Value::Null;
    assert_eq!(of(0), [json!("1h"), null.clone(), null.clone(), null.clone(), null.clone()]);
    assert_eq!(of(1), [json!("1h"), json!("1m30s"), json!("release"), json!(50), json!("request_id")]);
    assert_eq!(of(2), [json!("1h"), null.clone(), null.clone(), json!(1_000), null.clone()]);
    assert_eq!(of(3), [null.clone(), null.clone(), null.clone(), null.clone(), null]);
    let mut fingerprints = BTreeSet::from([all["fingerprint"].to_string()]);
    let mut charged = rules[1].clone();
    charged.limit = charged.limit.with_on_expiry(OnExpiry::Charge).unwrap();
    let changed = [
        rules[1].clone().ttl(HOUR),
        rules[1].clone().hold("x_request_id"),
        rules[1].clone().max_excess(51),
        charged,
    ];
    for rule in changed {
        let mut rules = rules.clone();
        rules[1] = rule;
        fingerprints.insert(shown(&rules).await["fingerprint"].to_string());
    }
    assert_eq!(fingerprints.len(), 5);
}
