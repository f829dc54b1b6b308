//! Holds over the JSON API, bytes in and bytes out, on a manual clock.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use axum::{
    body::{Body, to_bytes},
    http::{Method, Request, StatusCode, header},
};
use serde_json::{Value, json};
use sluicegate::{Cost, Limit, Limiter, ManualClock, MemoryStore, Rule, Timestamp};
use sluicegate_server::{
    auth::Access,
    config::{Scope, Scopes, Token},
    engine::Engine,
    http::{HttpService, Settings},
};

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
