//! What `/openapi.json` says is what the server does: its routes, its examples, its bounds, and whatever Schemathesis makes of it.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails as the test does")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use axum::{
    body::{Body, to_bytes},
    http::{Method, Request, StatusCode, header},
};
use serde_json::{Value, json};
use sluicegate::{Limit, Limiter, MemoryStore, Rule, key, labels, rules};
use sluicegate_core::snapshot;
use sluicegate_server::http::HttpService;
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    demo,
    engine::Engine,
    forward_auth,
    http::{self, MAX_CHECKS, openapi::DOCUMENT, server},
    net::acceptor::AcceptConfig,
};
use tokio::{net::TcpListener, task::spawn_blocking};

const MINUTE: Duration = Duration::from_secs(60);
const TOKEN: &str = "s3cret";

/// The methods that OpenAPI knows.
const METHODS: [Method; 8] = [
    Method::GET,
    Method::PUT,
    Method::POST,
    Method::DELETE,
    Method::OPTIONS,
    Method::HEAD,
    Method::PATCH,
    Method::TRACE,
];

/// How many requests Schemathesis makes up for each operation, besides those at the edges of what is described.
const MAX_EXAMPLES: &str = "30";

/// What Schemathesis looks at in every answer.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,\
                      response_schema_conformance,negative_data_rejection,ignored_auth";

fn document() -> Value {
    serde_json::from_str(DOCUMENT).unwrap()
}

/// The whole server, with rules of all kinds, of which some soon refuse.
fn service() -> HttpService {
    let per_minute = |amount| Limit::sliding_counter(amount, MINUTE).unwrap();
    let more = [
        Rule::new("clients", per_minute(100)).per(["ip"]).when("method", "*"),
        Rule::new("tokens", per_minute(1_000)).unit("tokens").cost(sluicegate::Cost::new(10).unwrap()),
        Rule::new("watched", per_minute(10)).shadow(),
    ];
    let rules = demo::rules().into_iter().chain(more);
    let engine = Engine::new(Limiter::new(MemoryStore::new(), rules).unwrap());
    let access = Access::new(vec![Token::new("test", TOKEN.as_bytes(), Scopes::ALL)]);
    HttpService::new(engine, http::Settings { access, ..http::Settings::default() })
}

async fn send(service: &HttpService, method: Method, path: &str, body: String) -> (StatusCode, Vec<u8>) {
    let request = Request::builder().method(method).uri(path);
    let peer = SocketAddr::from(([127, 0, 0, 1], 4711));
    let request = request.header(header::AUTHORIZATION, format!("Bearer {TOKEN}"));
    let response = service.respond(peer, request.body(Body::from(body)).unwrap()).await;
    let status = response.status();
    if response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "text/event-stream") {
        return (status, Vec::new()); // it has no end
    }
    (status, to_bytes(response.into_body(), 1 << 20).await.unwrap().into())
}

/// The path and the methods of everything that is described.
fn described(document: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let methods: BTreeSet<_> = METHODS.iter().map(|method| method.as_str().to_lowercase()).collect();
    let paths = document["paths"].as_object().unwrap().iter();
    paths
        .map(|(path, item)| {
            let taken = item.as_object().unwrap().keys().filter(|key| methods.contains(*key));
            (path.clone(), taken.cloned().collect())
        })
        .collect()
}

#[test]
fn what_is_routed_is_described_and_the_other_way_round() {
    let sources = [include_str!("../../src/http/routes.rs")];
    let routed: BTreeSet<_> = sources
        .iter()
        .flat_map(|source| source.split(".route(\"").skip(1))
        .map(|rest| rest.split('"').next().unwrap().to_owned())
        .chain(["/v1/check".to_owned(), forward_auth::PATH.to_owned()])
        .collect();
    assert_eq!(described(&document()).into_keys().collect::<BTreeSet<_>>(), routed);
}

#[tokio::test]
async fn exactly_the_described_methods_are_taken() {
    let service = service();
    for (path, described) in described(&document()) {
        for method in METHODS {
            let (status, _) = send(&service, method.clone(), &path, String::new()).await;
            assert_ne!(status, StatusCode::NOT_FOUND, "{path}");
            let name = method.as_str().to_lowercase();
            // what can be got can be asked for without its body
            let is_taken = described.contains(&name) || (name == "head" && described.contains("get"));
            assert_eq!(status != StatusCode::METHOD_NOT_ALLOWED, is_taken, "{method} {path}: {status}");
        }
    }
}

#[tokio::test]
async fn it_is_served_to_everybody() {
    let open = HttpService::new(
        Engine::new(Limiter::new(MemoryStore::new(), []).unwrap()),
        http::Settings {
            access: Access::new(vec![Token::new("test", b"other", Scopes::ALL)]),
            ..http::Settings::default()
        },
    );
    let request = Request::get("/openapi.json").body(Body::empty()).unwrap();
    let response = open.respond(SocketAddr::from(([127, 0, 0, 1], 4711)), request).await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
    assert_eq!(to_bytes(response.into_body(), 1 << 20).await.unwrap(), DOCUMENT.as_bytes());
}

/// The part of a document that stands somewhere, or where it refers to.
fn resolved<'a>(document: &'a Value, part: &'a Value) -> &'a Value {
    match part["$ref"].as_str() {
        Some(reference) => document.pointer(reference.strip_prefix('#').unwrap()).unwrap(),
        None => part,
    }
}

fn validate(document: &Value, schema: &Value, value: &Value) {
    let mut schema = schema.clone();
    schema["components"] = document["components"].clone();
    jsonschema::draft202012::validate(&schema, value).unwrap_or_else(|error| panic!("{value}: {error}"));
}

#[tokio::test]
async fn the_examples_are_as_described_and_are_accepted_and_so_are_the_answers() {
    let (document, service) = (document(), service());
    let mut count = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let Some(body) = item["post"].get("requestBody") else { continue };
        let json = &resolved(&document, body)["content"]["application/json"];
        for (name, example) in json["examples"].as_object().unwrap() {
            let example = &example["value"];
            validate(&document, &json["schema"], example);
            let (status, answer) = send(&service, Method::POST, path, example.to_string()).await;
            let answer: Value = serde_json::from_slice(&answer).unwrap();
            assert_eq!(status, StatusCode::OK, "{path} {name}: {answer}");
            let answers = resolved(&document, &item["post"]["responses"]["200"]);
            validate(&document, &answers["content"]["application/json"]["schema"], &answer);
            count += 1;
        }
    }
    assert_eq!(count, 14);
}

#[test]
fn the_bounds_are_those_of_the_code() {
    let document = document();
    let schemas = &document["components"]["schemas"];
    for (place, bound) in [
        ("/Whole/maximum", sluicegate::Cost::MAX.units()),
        ("/Labels/maxProperties", labels::MAX_LABELS as u64),
        ("/Labels/propertyNames/maxLength", labels::MAX_LABEL_NAME as u64),
        ("/Labels/additionalProperties/maxLength", labels::MAX_LABEL_VALUE as u64),
        ("/Cost/anyOf/1/maxProperties", rules::MAX_UNITS as u64),
        ("/Key/maxLength", key::MAX_KEY as u64),
        ("/AskSeveral/properties/checks/maxItems", MAX_CHECKS as u64),
        ("/Answers/properties/results/maxItems", MAX_CHECKS as u64),
        ("/Snapshot/oneOf/1/properties/charges/maxItems", snapshot::MAX_CHARGES as u64),
    ] {
        assert_eq!(schemas.pointer(place), Some(&json!(bound)), "{place}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemathesis_finds_no_answer_that_is_not_described() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let running = tokio::spawn(server::run(listener, service(), AcceptConfig::default()));
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.servers/schemathesis");
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new("python3");
    command.args(["-m", "schemathesis.cli", "run", "--no-color", "--seed", "1"]);
    command.args(["--max-examples", MAX_EXAMPLES, "--phases", "examples,coverage,fuzzing"]);
    command.args(["--suppress-health-check", "all", "--checks", CHECKS]);
    // an answer without an end: see `live.rs`
    command.args(["--exclude-path", "/v1/live"]);
    command.args(["--header", &format!("Authorization: Bearer {TOKEN}")]);
    command.arg(format!("http://{address}/openapi.json"));
    let hooks = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients");
    let modules = std::env::join_paths([installed, hooks]).unwrap();
    command.env("PYTHONPATH", modules).env("PYTHONDONTWRITEBYTECODE", "1");
    command.env("SCHEMATHESIS_HOOKS", "schemathesis_hooks");
    // what it notes is for its next run, and here each begins anew
    command.current_dir(directory.path()).stdin(Stdio::null());
    let output = spawn_blocking(move || command.output()).await.unwrap();
    let output = output.unwrap_or_else(|error| panic!("python3: {error}; run scripts/servers"));
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "is it installed by scripts/servers? {said}");
    running.abort();
}
