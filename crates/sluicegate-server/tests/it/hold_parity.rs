//! The same holds over HTTP, the Redis protocol and in the library: the same decisions and outcomes.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{collections::HashMap, time::Duration};

use axum::http::StatusCode;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use sluicegate::{
    Cost, Costs, Error, Labels, Limit, Rule,
    limiter::{HoldDecision, HoldToken, Request, RuleSelection, Settlement},
    store::HoldId,
};
use sluicegate_core::OnExpiry;

use crate::front_end_parity::{Fronts, HISTORIES, SECOND, STEPS, any, as_http, as_resp};

/// A concurrency rule, and rules whose estimates stay charged or are refunded on expiry, one with a cost factor and one shadow rule.
fn rules() -> Vec<Rule> {
    let window = Limit::fixed_window(300, 60 * SECOND).unwrap();
    let log = Limit::sliding_log(60, 20 * SECOND).unwrap().with_on_expiry(OnExpiry::Release).unwrap();
    let bucket = Limit::token_bucket(9, SECOND).unwrap().with_burst(40).unwrap();
    vec![
        Rule::new("in-flight", Limit::concurrency(3).unwrap()).per(["user"]).ttl(5 * SECOND),
        Rule::new("tokens", window).unit("tokens").cost(Cost::from(2)).max_excess(20),
        Rule::new("log", log).when("route", "a").per(["user"]).unit("tokens"),
        Rule::new("bucket", bucket).when("route", "b").ttl(2 * SECOND),
        Rule::new("watched", Limit::concurrency(1).unwrap()).shadow(),
    ]
}

/// A request that is held, by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Subject {
    route: &'static str,
    user: &'static str,
    id: &'static str,
}

impl Subject {
    fn labels(self) -> Labels {
        Labels::new([("route", self.route), ("user", self.user)]).unwrap()
    }

    fn body(self) -> Value {
        json!({"labels": {"route": self.route, "user": self.user}, "id": self.id})
    }

    fn named(self) -> [&'static str; 4] {
        ["route", self.route, "user", self.user]
    }
}

/// Costs of requests and tokens.
#[derive(Clone, Copy, Debug)]
struct Amounts {
    requests: u32,
    tokens: u32,
}

impl Amounts {
    fn any(random: &mut impl Rng) -> Self {
        Self { requests: any(random, &[0, 1, 1, 2]), tokens: any(random, &[0, 1, 7, 30, 200]) }
    }

    fn costs(self) -> Costs {
        Costs::new([("requests", Cost::from(self.requests)), ("tokens", Cost::from(self.tokens))]).unwrap()
    }

    fn body(self) -> Value {
        json!({"requests": self.requests, "tokens": self.tokens})
    }

    fn argument(self) -> String {
        format!("requests={},tokens={}", self.requests, self.tokens)
    }
}

/// The tokens of holds, in the library and over HTTP.
type Tokens = HashMap<Subject, (HoldToken, String)>;

fn with(body: Value, fields: Value) -> Value {
    let Value::Object(mut body) = body else { panic!("{body} is not an object") };
    body.extend(fields.as_object().unwrap().clone());
    body.into()
}

fn token_text(answer: &Value) -> Option<String> {
    answer["token"].as_str().map(str::to_owned)
}

/// Makes a hold on every front end, and stores the tokens.
async fn hold(fronts: &mut Fronts, subject: Subject, random: &mut StdRng, tokens: &mut Tokens) -> String {
    let (amounts, ttl_ms) = (Amounts::any(random), any(random, &[0, 0, 1, 500, 2_000, 30_000]));
    let labels = subject.labels();
    let mut request = fronts.library.hold(&labels, amounts.costs()).id(HoldId::new(subject.id).unwrap());
    if ttl_ms > 0 {
        request = request.ttl(Duration::from_millis(ttl_ms));
    }
    let held = request.decide().await;
    let context = format!("hold {subject:?} {amounts:?} {ttl_ms} ms: {held:?}");
    let body = with(subject.body(), json!({"cost": amounts.body()}));
    let body = if ttl_ms > 0 { with(body, json!({"ttl_ms": ttl_ms})) } else { body };
    let (status, answer) = fronts.post("/v1/hold", body.to_string()).await;
    let (ttl, cost) = (ttl_ms.to_string(), amounts.argument());
    let command = [&["SG.HOLD", subject.id, &ttl, &cost], &subject.named()[..]].concat();
    let reply = fronts.command(&command).await;
    match held {
        Ok(held) => {
            assert_eq!(status, StatusCode::OK, "{context}: {answer}");
            assert_eq!(answer, hold_as_http(&held, subject.id, &answer), "{context}");
            assert_eq!(reply, hold_as_resp(&held), "{context}");
            if let (Some(token), Some(text)) = (held.token, token_text(&answer)) {
                assert_eq!(token.to_string(), text, "{context}");
                tokens.insert(subject, (token, text));
            }
        }
        Err(error @ Error::HoldConflict(_)) => {
            assert_eq!(
                (status, answer["detail"].as_str()),
                (StatusCode::CONFLICT, Some(&*error.to_string()))
            );
            assert_eq!(reply, [format!("-CONFLICT {error}")], "{context}");
        }
        Err(error) => panic!("{context}: {error}"),
    }
    context
}

/// The answer of a check with the fields of the hold. The token is compared by the caller.
fn hold_as_http(held: &HoldDecision, id: &str, answer: &Value) -> Value {
    let mut expected = with(as_http(&held.decision), json!({"id": id, "repeated": held.is_repeated}));
    if let Some(at) = held.expires_at {
        expected["expires_at_us"] = at.as_micros().into();
    }
    if held.token.is_some() {
        expected["token"] = answer["token"].as_str().unwrap().into();
    }
    expected
}

fn hold_as_resp(held: &HoldDecision) -> Vec<String> {
    let expires = held.expires_at.map_or(0, |at| at.as_micros());
    as_resp(&held.decision).into_iter().chain([format!(":{expires}")]).collect()
}

fn settlement_as_http(settlement: &Settlement) -> Value {
    let tiers = settlement.tiers.iter().map(|tier| {
        json!({
            "rule": tier.rule.as_deref(), "unit": &*tier.unit, "outcome": tier.outcome.name(), "charged": tier.charged,
            "remaining": tier.remaining, "expires_at_us": tier.expires_at.map(|at| at.as_micros()),
        })
    });
    json!({"outcome": settlement.outcome.name(), "tiers": tiers.collect::<Vec<_>>()})
}

/// Settles, releases or renews on every front end, by the token or by the labels.
async fn adjust(fronts: &mut Fronts, subject: Subject, random: &mut StdRng, tokens: &Tokens) -> &'static str {
    let request = Request::new(subject.labels(), Cost::ONE);
    let by_labels = fronts.library.hold_token(&request, HoldId::new(subject.id).unwrap()).unwrap();
    let (token, body) = match tokens.get(&subject) {
        // a token names only the rules that hold
        Some((token, text)) if *token == by_labels && random.random() => {
            (token.clone(), json!({"token": text}))
        }
        _ => (by_labels, subject.body()),
    };
    let call = any(random, &["settle", "settle", "release", "renew"]);
    let (amounts, ttl_ms) = (Amounts::any(random), any(random, &[1, 1_000, 10_000]));
    let (settlement, fields, argument) = match call {
        "settle" => {
            let settled = fronts.library.settle(&token, amounts.costs()).await;
            (settled, json!({"cost": amounts.body()}), Some(amounts.argument()))
        }
        "release" => (fronts.library.release(&token).await, json!({}), None),
        _ => {
            let renewed = fronts.library.renew(&token, Duration::from_millis(ttl_ms)).await;
            (renewed, json!({"ttl_ms": ttl_ms}), Some(ttl_ms.to_string()))
        }
    };
    let settlement = settlement.unwrap();
    let context = format!("{call} {subject:?} {amounts:?} {ttl_ms} ms: {settlement:?}");
    let (status, answer) = fronts.post(&format!("/v1/{call}"), with(body, fields).to_string()).await;
    assert_eq!((status, answer), (StatusCode::OK, settlement_as_http(&settlement)), "{context}");
    let name = format!("SG.{}", call.to_uppercase());
    let command = [&name, subject.id].into_iter().chain(argument.as_deref()).chain(subject.named());
    let reply = fronts.command(&command.collect::<Vec<_>>()).await;
    let outcome = settlement.outcome.name();
    assert_eq!(reply, [outcome], "{context}");
    outcome
}

#[tokio::test]
async fn the_same_holds_have_the_same_answers_over_http_resp_and_in_the_library() {
    let only = std::env::var("SLUICEGATE_SEED").ok().map(|seed| seed.parse().unwrap());
    let mut outcomes = HashMap::new();
    for seed in only.map_or(0..HISTORIES, |seed: u64| seed..seed + 1) {
        let mut random = StdRng::seed_from_u64(seed);
        let mut fronts = Fronts::start(&rules()).await;
        let mut tokens = Tokens::new();
        for step in 0..STEPS {
            let micros = any(&mut random, &[0, 0, 1, 1_000, 333_333, 1_571_429, 10_000_000, 61_000_000]);
            fronts.advance(Duration::from_micros(micros));
            let subject = Subject {
                route: any(&mut random, &["a", "b"]),
                user: any(&mut random, &["1", "2"]),
                id: any(&mut random, &["one", "two: 2", "three", "four"]),
            };
            let labels = subject.labels();
            let context = match random.random_range(0..20) {
                0 => {
                    let reset = fronts.library.reset(&labels, &RuleSelection::All).await.unwrap();
                    let body = json!({"labels": subject.body()["labels"], "all": true}).to_string();
                    assert_eq!(fronts.post("/v1/reset", body).await.1["reset"], reset.deleted.len());
                    fronts.command(&[&["SG.RESET", "ALL"], &subject.named()[..]].concat()).await;
                    "reset".to_owned()
                }
                1..10 => hold(&mut fronts, subject, &mut random, &mut tokens).await,
                _ => {
                    let outcome = adjust(&mut fronts, subject, &mut random, &tokens).await;
                    *outcomes.entry(outcome).or_insert(0) += 1;
                    outcome.to_owned()
                }
            };
            let decision = fronts.library.peek(&labels, Cost::ONE).await.unwrap();
            let context = format!("seed {seed} step {step}: {context}, then {decision:?}");
            let body = json!({"labels": subject.body()["labels"]}).to_string();
            assert_eq!(fronts.post("/v1/peek", body).await.1, as_http(&decision), "{context}");
            let peek = [&["SG.PEEK"], &subject.named()[..]].concat();
            assert_eq!(fronts.command(&peek).await, as_resp(&decision), "{context}");
        }
    }
    if only.is_none() {
        for outcome in ["settled", "released", "renewed", "already", "late", "unknown"] {
            assert!(outcomes.get(outcome).is_some_and(|count| *count > 20), "{outcome}: {outcomes:?}");
        }
    }
}
