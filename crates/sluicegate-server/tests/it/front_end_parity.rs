//! The same requests through every front end: the same decisions, and the same numbers rejected.
//!
//! Each front end has its own store and clock; all clocks advance together. Every front end must return the decision of the library,
//! in its own format and with its own rounding.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::net::{IpAddr, Ipv4Addr};
use std::{net::SocketAddr, time::Duration};

use crate::grpc_front::{Front, descriptor, hits, on_memory, request};
use axum::{
    body::{Body, to_bytes},
    http::{Request, StatusCode},
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use sluicegate::{Cost, Decision, Labels, Limit, Limiter, ManualClock, Rule, limiter::RuleSelection};
use sluicegate_core::decision::{whole_millis_up, whole_seconds_up};
use sluicegate_server::http::{HttpService, response::ResetBody};
use sluicegate_server::{
    auth::Access,
    config::live,
    engine::Engine,
    forward_auth, grpc,
    grpc::messages::{Code, RateLimitResponse},
    http,
    resp::Endpoint,
};
use sluicegate_tower::headers::Dialect;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tonic::Status;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

/// The number of histories, and the steps of each.
pub(crate) const HISTORIES: u64 = 8;
pub(crate) const STEPS: usize = 250;
const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9)), 4711);

/// More bytes than any reply.
const PIPE: usize = 64 << 10;

/// All front ends, each with its own counters.
pub(crate) struct Fronts {
    clocks: Vec<ManualClock>,
    pub(crate) library: Limiter,
    engines: Engines,
    http: HttpService,
    auth: HttpService,
    resp: DuplexStream,
    grpc: Front,
}

/// The engine of each front end.
struct Engines {
    http: Engine,
    auth: Engine,
    resp: Engine,
    grpc: Engine,
}

/// The input of one check.
#[derive(Clone, Copy, Debug)]
struct CheckInput {
    route: &'static str,
    user: &'static str,
    cost: u64,
}

impl Fronts {
    pub(crate) async fn start(rules: &[Rule]) -> Self {
        let mut clocks = Vec::new();
        let mut limiter = || {
            let (limiter, clock) = on_memory(rules.iter().cloned());
            clocks.push(clock);
            limiter
        };
        let library = limiter();
        let mut engine = || Engine::new(limiter());
        let engines = Engines { http: engine(), auth: engine(), resp: engine(), grpc: engine() };
        let http = HttpService::new(engines.http.clone(), http::Settings::default());
        let settings = forward_auth::Settings { dialect: Dialect::XRateLimit, ..Default::default() };
        let settings = http::Settings { forward_auth: live(settings), ..http::Settings::default() };
        let auth = HttpService::new(engines.auth.clone(), settings);
        let endpoint = Endpoint::new(engines.resp.clone(), Access::default());
        let grpc = Front::of(engines.grpc.clone(), grpc::Settings::default()).await;
        let (resp, served) = duplex(PIPE);
        tokio::spawn(async move { endpoint.serve(served).await });
        Self { clocks, library, engines, http, auth, resp, grpc }
    }

    pub(crate) fn advance(&self, time: Duration) {
        for clock in &self.clocks {
            clock.advance(time);
        }
    }

    async fn by_library(&self, input: CheckInput) -> Decision {
        let labels = Labels::new([("route", input.route), ("user", input.user)]).unwrap();
        self.library.check(&labels, Cost::new(input.cost).unwrap()).await.unwrap()
    }

    async fn by_http(&self, input: CheckInput) -> Value {
        let labels = json!({"route": input.route, "user": input.user});
        let (status, body) =
            self.post("/v1/check", json!({"labels": labels, "cost": input.cost}).to_string()).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        body
    }

    pub(crate) async fn post(&self, path: &str, body: String) -> (StatusCode, Value) {
        let request = Request::post(path).body(Body::from(body)).unwrap();
        let response = self.http.respond(PEER, request).await;
        let status = response.status();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap())
    }

    async fn by_auth(&self, input: CheckInput) -> (StatusCode, [Option<u64>; 3]) {
        let CheckInput { route, user, cost } = input;
        self.get(&format!("?route={route}&user={user}&cost={cost}")).await
    }

    /// Returns the status, the limit, the remaining units, and the wait in seconds.
    async fn get(&self, query: &str) -> (StatusCode, [Option<u64>; 3]) {
        let request = Request::get(format!("/v1/auth{query}")).body(Body::empty()).unwrap();
        let response = self.auth.respond(PEER, request).await;
        let field = |name: &str| Some(response.headers().get(name)?.to_str().unwrap().parse().unwrap());
        let fields = [field("x-ratelimit-limit"), field("x-ratelimit-remaining"), field("retry-after")];
        (response.status(), fields)
    }

    async fn by_resp(&mut self, input: CheckInput) -> Vec<String> {
        let CheckInput { route, user, cost } = input;
        self.command(&["SG.CHECK", &cost.to_string(), "route", route, "user", user]).await
    }

    /// The lines of a reply: an error, or an array of integers and texts. A text takes two, its length and itself.
    pub(crate) async fn command(&mut self, words: &[&str]) -> Vec<String> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend_from_slice(format!("${}\r\n{word}\r\n", word.len()).as_bytes());
        }
        self.resp.write_all(&bytes).await.unwrap();
        let first = self.value().await;
        let Some(count) = first.strip_prefix('*') else { return vec![first] };
        let mut values = Vec::new();
        for _ in 0..count.parse().unwrap() {
            values.push(self.value().await);
        }
        values
    }

    /// Returns the text of a bulk string, or the line of another value.
    async fn value(&mut self) -> String {
        let line = self.line().await;
        let has_text = line.starts_with('$') && line != "$-1";
        if has_text { self.line().await } else { line }
    }

    async fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            line.push(self.resp.read_u8().await.unwrap());
        }
        String::from_utf8(line).unwrap().trim_end().to_owned()
    }

    async fn by_grpc(&mut self, input: CheckInput) -> RateLimitResponse {
        let CheckInput { route, user, cost } = input;
        self.descriptor(hits(cost, descriptor([("route", route), ("user", user)]))).await.unwrap()
    }

    async fn descriptor(
        &mut self,
        descriptor: grpc::messages::RateLimitDescriptor,
    ) -> Result<RateLimitResponse, Status> {
        self.grpc.call(request("test", vec![descriptor])).await
    }
}

/// All algorithms, limits that meet on one request, a factor, an overdraft and a shadow.
fn rules() -> Vec<Rule> {
    let log = Limit::sliding_log(5, 10 * SECOND).unwrap();
    let counter = Limit::sliding_counter(20, MINUTE).unwrap();
    let bucket = Limit::token_bucket(3, SECOND).unwrap().with_burst(7).unwrap();
    let window = Limit::fixed_window(40, MINUTE).unwrap();
    let slow = Limit::token_bucket(7, 11 * SECOND).unwrap();
    vec![
        Rule::new("log", log).when("route", "a").per(["user"]),
        Rule::new("counter", counter).per(["user"]).unless("route", "free"),
        Rule::new("bucket", bucket).when("route", "b").per(["user"]),
        Rule::new("window", window).unless("route", "free"),
        Rule::new("double", slow).when("route", "c").cost(Cost::new(2).unwrap()),
        Rule::new("debt", log).when("route", "d").overdraft(),
        Rule::new("watched", Limit::sliding_log(1, SECOND).unwrap()).per(["user"]).shadow(),
    ]
}

pub(crate) fn any<T: Copy>(random: &mut impl Rng, values: &[T]) -> T {
    values[random.random_range(0..values.len())]
}

#[tokio::test]
async fn the_same_history_has_the_same_decisions_on_every_front_end() {
    let only = std::env::var("SLUICEGATE_SEED").ok().map(|seed| seed.parse().unwrap());
    for seed in only.map_or(0..HISTORIES, |seed: u64| seed..seed + 1) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut fronts = Fronts::start(&rules()).await;
        let mut denied = 0;
        for step in 0..STEPS {
            let micros = any(&mut random, &[0, 0, 1, 999, 1_000, 333_333, 1_000_000, 1_571_429, 10_000_000]);
            fronts.advance(Duration::from_micros(micros));
            let input = CheckInput {
                route: any(&mut random, &["a", "b", "c", "d", "free"]),
                user: any(&mut random, &["1", "2", "other"]),
                cost: any(&mut random, &[0, 1, 1, 1, 2, 3, 6, 50]),
            };
            let decision = fronts.by_library(input).await;
            denied += usize::from(!decision.is_allowed());
            let context = format!("seed {seed} step {step}: {input:?} {decision:?}");
            assert_eq!(fronts.by_http(input).await, as_http(&decision), "{context}");
            assert_eq!(fronts.by_resp(input).await, as_resp(&decision), "{context}");
            assert_eq!(fronts.by_auth(input).await, as_auth(&decision), "{context}");
            assert_grpc(&fronts.by_grpc(input).await, &decision, &context);
        }
        assert!((STEPS / 10..STEPS * 9 / 10).contains(&denied), "seed {seed} denies {denied} of {STEPS}");
    }
}

/// HTTP and the Redis protocol support all operations.
#[tokio::test]
async fn all_operations_agree_over_http_resp_and_in_the_library() {
    for seed in 0..HISTORIES {
        let mut random = StdRng::seed_from_u64(seed);
        let mut fronts = Fronts::start(&rules()).await;
        for step in 0..STEPS {
            fronts.advance(Duration::from_micros(any(&mut random, &[0, 0, 1, 1_000, 333_333, 1_571_429])));
            let (route, user) =
                (any(&mut random, &["a", "b", "c", "d", "free"]), any(&mut random, &["1", "2"]));
            let labels = Labels::new([("route", route), ("user", user)]).unwrap();
            let (sent, named) = (json!({"route": route, "user": user}), ["route", route, "user", user]);
            if random.random_ratio(1, 40) {
                let is_all = random.random();
                let selection = if is_all { RuleSelection::All } else { RuleSelection::Keyed };
                let reset = fronts.library.reset(&labels, &selection).await.unwrap();
                let body = json!({"labels": sent, "all": is_all}).to_string();
                let expected = serde_json::to_value(ResetBody::from(reset.clone())).unwrap();
                assert_eq!(fronts.post("/v1/reset", body).await, (StatusCode::OK, expected));
                let command: &[&str] = if is_all { &["SG.RESET", "all"] } else { &["SG.RESET"] };
                let reply = fronts.command(&[command, &named[..]].concat()).await;
                let counters = reset.deleted.iter().flat_map(|counter| {
                    [counter.rule.as_deref().unwrap_or_default().to_owned(), counter.key.to_string()]
                });
                let count = format!(":{}", reset.deleted.len());
                assert_eq!(reply, [count].into_iter().chain(counters).collect::<Vec<_>>());
                continue;
            }
            let call = any(&mut random, &["check", "check", "check", "peek", "charge", "refund"]);
            // a peek over the Redis protocol has no cost argument
            let units = if call == "peek" { 1 } else { any(&mut random, &[0, 1, 1, 2, 3, 6]) };
            let cost = Cost::new(units).unwrap();
            let decision = match call {
                "peek" => fronts.library.peek(&labels, cost).await,
                "charge" => fronts.library.charge(&labels, cost).await,
                "refund" => fronts.library.refund(&labels, cost).await,
                _ => fronts.library.check(&labels, cost).await,
            }
            .unwrap();
            let context = format!("seed {seed} step {step}: {call} {units} of {named:?}: {decision:?}");
            let body = json!({"labels": sent, "cost": units}).to_string();
            let answer = fronts.post(&format!("/v1/{call}"), body).await;
            assert_eq!(answer, (StatusCode::OK, as_http(&decision)), "{context}");
            let (command, units) = (format!("SG.{}", call.to_uppercase()), units.to_string());
            let cost = if call == "peek" { &[][..] } else { &[&*units] };
            let reply = fronts.command(&[&[&*command], cost, &named].concat()).await;
            assert_eq!(reply, as_resp(&decision), "{context}");
        }
    }
}

/// With a limit in the request, like redis-cell.
#[tokio::test]
async fn checks_of_a_key_agree_over_http_resp_and_in_the_library() {
    let (max_burst, count, period) = (4, 3, 10);
    let limit = Limit::token_bucket(count, period * SECOND).unwrap().with_burst(max_burst + 1).unwrap();
    let sent = json!({"amount": count, "window": format!("{period}s"), "burst": max_burst + 1});
    for seed in 0..HISTORIES {
        let mut random = StdRng::seed_from_u64(seed);
        let mut fronts = Fronts::start(&[]).await;
        for step in 0..STEPS {
            fronts.advance(Duration::from_micros(any(&mut random, &[0, 1, 999_999, 1_000_000, 3_333_334])));
            let (key, cost) = (any(&mut random, &["a", "b{c}"]), any(&mut random, &[0, 1, 1, 2, 5, 6]));
            let decision = fronts.library.check_key(key, &limit, Cost::new(cost).unwrap()).await.unwrap();
            let context = format!("seed {seed} step {step}: {key} {cost} {decision:?}");
            let body = json!({"key": key, "limit": sent, "cost": cost}).to_string();
            assert_eq!(fronts.post("/v1/check", body).await.1, as_http(&decision), "{context}");
            let numbers = [max_burst, count, u64::from(period), cost].map(|number| number.to_string());
            let words: Vec<_> =
                ["CL.THROTTLE", key].into_iter().chain(numbers.iter().map(|text| &**text)).collect();
            assert_eq!(fronts.command(&words).await, as_cell(&decision), "{context}");
        }
    }
}

/// Limited, limit, remaining, retry-after and reset-after in seconds.
fn as_cell(decision: &Decision) -> Vec<String> {
    let number = |value: Option<u64>| value.map_or(":-1".to_owned(), |value| format!(":{value}"));
    vec![
        number(Some((!decision.is_allowed()).into())),
        number(decision.limit()),
        number(decision.remaining()),
        number(decision.retry_after().map(whole_seconds_up)),
        number(decision.reset_after().map(whole_seconds_up)),
    ]
}

/// All fields of a decision, with waits in milliseconds.
pub(crate) fn as_http(decision: &Decision) -> Value {
    let tier = |tier: &sluicegate::TierDecision| {
        let retry = match tier.outcome {
            sluicegate::Outcome::Denied { retry: sluicegate::Retry::After(wait) } => {
                Some(whole_millis_up(wait))
            }
            _ => None,
        };
        json!({
            "allowed": tier.outcome.is_allowed(), "rule": tier.rule.as_deref(), "limit": tier.limit,
            "remaining": tier.remaining, "retry_after_ms": retry, "reset_after_ms": whole_millis_up(tier.reset_after),
            "never": is_never(tier.outcome), "unit": &*tier.unit, "shadow": tier.mode == sluicegate::decision::Mode::Shadow,
        })
    };
    json!({
        "allowed": decision.is_allowed(), "rule": decision.rule(), "limit": decision.limit(),
        "remaining": decision.remaining(), "retry_after_ms": decision.retry_after().map(whole_millis_up),
        "reset_after_ms": decision.reset_after().map(whole_millis_up), "never": is_never(decision.outcome),
        "degraded": false, "source": decision.source.name(), "at_us": decision.at.map(|at| at.as_micros()),
        "tiers": decision.tiers.iter().map(tier).collect::<Vec<_>>(),
    })
}

fn is_never(outcome: sluicegate::Outcome) -> bool {
    outcome == sluicegate::Outcome::Denied { retry: sluicegate::Retry::Never }
}

/// The same in a line, without the tiers.
pub(crate) fn as_resp(decision: &Decision) -> Vec<String> {
    let number = |value: Option<u64>| value.map_or(":-1".to_owned(), |value| format!(":{value}"));
    vec![
        number(Some(decision.is_allowed().into())),
        number(decision.limit()),
        number(decision.remaining()),
        number(decision.retry_after().map(whole_millis_up)),
        number(decision.reset_after().map(whole_millis_up)),
        decision.rule().unwrap_or("$-1").to_owned(),
        number(Some(0)),
        number(decision.at.map(|at| at.as_micros())),
    ]
}

/// The status, and three headers; the wait in seconds.
fn as_auth(decision: &Decision) -> (StatusCode, [Option<u64>; 3]) {
    let status = if decision.is_allowed() { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    let wait = decision.retry_after().map(whole_seconds_up);
    (status, [decision.limit(), decision.remaining(), wait])
}

/// Asserts the amount, the remaining units, and retry-after or reset-after in seconds.
fn assert_grpc(response: &RateLimitResponse, decision: &Decision, context: &str) {
    let code = if decision.is_allowed() { Code::Ok } else { Code::OverLimit };
    assert_eq!(response.overall_code(), code, "{context}");
    let [status] = &*response.statuses else { panic!("{} statuses, {context}", response.statuses.len()) };
    assert_eq!(status.code(), code, "{context}");
    let shown =
        status.current_limit.as_ref().map(|limit| (limit.name.as_str(), limit.requests_per_unit.into()));
    let amount = decision.deciding().map(|tier| tier.policy.unwrap().amount());
    assert_eq!(shown, decision.rule().zip(amount), "{context}");
    assert_eq!(u64::from(status.limit_remaining), decision.remaining().unwrap_or(0), "{context}");
    let wait = if decision.is_allowed() { decision.reset_after() } else { decision.retry_after() };
    let shown = status.duration_until_reset.map(|wait| (u64::try_from(wait.seconds).unwrap(), wait.nanos));
    assert_eq!(shown, wait.map(|wait| (whole_seconds_up(wait), 0)), "{context}");
}

/// Returns the number of invalid requests in the metrics.
fn invalid(engine: &Engine) -> u64 {
    let metrics = engine.metrics();
    let of_invalid = |line: &str| Some(line.split_once("outcome=\"invalid\"} ")?.1.parse::<u64>().unwrap());
    metrics.lines().filter(|line| line.starts_with("sluicegate_requests_total")).filter_map(of_invalid).sum()
}

/// Invalid costs, as text.
const NO_COSTS: [&str; 14] = [
    "-1",
    "1.5",
    "9007199254740993",     // 2^53 + 1
    "18446744073709551616", // 2^64
    "1e400",
    "NaN",
    "0x10",
    "",
    " 1",
    "1 ",
    "+1",
    "1e3",
    "Infinity",
    "١",
];

#[tokio::test]
async fn an_invalid_cost_is_rejected_on_every_front_end_and_nothing_is_charged() {
    const AMOUNT: u64 = 9;
    let mut fronts = Fronts::start(&[Rule::new("all", Limit::sliding_log(AMOUNT, MINUTE).unwrap())]).await;
    let (mut by_http, mut by_auth, mut by_resp) = (0, 0, 0);
    for number in NO_COSTS {
        // JSON allows spaces around a number
        let raw = (number.trim() == number).then(|| number.to_owned());
        for cost in [Some(json!(number).to_string()), raw].into_iter().flatten() {
            for call in ["/v1/check", "/v1/peek", "/v1/charge", "/v1/refund", "/v1/explain"] {
                for cost in [cost.clone(), format!(r#"{{"requests":{cost}}}"#)] {
                    let (status, problem) =
                        fronts.post(call, format!(r#"{{"labels":{{}},"cost":{cost}}}"#)).await;
                    assert_eq!(status, StatusCode::BAD_REQUEST, "{call} {cost}: {problem}");
                    by_http += 1;
                }
            }
        }
        let query: String =
            form_urlencoded::Serializer::for_suffix("?".to_owned(), 1).append_pair("cost", number).finish();
        assert_eq!(fronts.get(&query).await.0, StatusCode::BAD_REQUEST, "{query}");
        by_auth += 1;
        for command in ["SG.CHECK", "SG.CHARGE", "SG.REFUND"] {
            for cost in [number.to_owned(), format!("requests={number}")] {
                let reply = fronts.command(&[command, &cost, "route", "a"]).await;
                assert!(reply[0].starts_with("-ERR "), "{command} {cost:?}: {reply:?}");
                by_resp += 1;
            }
        }
        let reply = fronts.command(&["CL.THROTTLE", "user", "8", "1", "60", number]).await;
        assert!(reply[0].starts_with('-'), "CL.THROTTLE {number:?}: {reply:?}");
        by_resp += 1;
    }
    // the other values cannot be represented in a protobuf message or in the library; Envoy would allow the request on
    // an error, so the largest cost is used
    for hits_addend in [u64::MAX, (1 << 53) + 1] {
        let denied = fronts.descriptor(hits(hits_addend, descriptor([("route", "a")]))).await.unwrap();
        assert_eq!(denied.overall_code(), Code::OverLimit, "{hits_addend}");
        assert!(Cost::new(hits_addend).is_err());
    }

    let Engines { http, auth, resp, grpc } = &fronts.engines;
    assert_eq!([http, auth, resp, grpc].map(invalid), [by_http, by_auth, by_resp, 0]);

    let free = CheckInput { route: "a", user: "1", cost: 0 };
    let remaining = u32::try_from(AMOUNT).unwrap();
    assert_eq!(fronts.by_http(free).await["remaining"], AMOUNT);
    assert_eq!(fronts.by_auth(free).await.1[1], Some(AMOUNT));
    assert_eq!(fronts.by_resp(free).await[2], format!(":{AMOUNT}"));
    assert_eq!(fronts.command(&["CL.THROTTLE", "user", "8", "1", "60", "0"]).await[2], format!(":{AMOUNT}"));
    assert_eq!(fronts.by_grpc(free).await.statuses[0].limit_remaining, remaining);
}
