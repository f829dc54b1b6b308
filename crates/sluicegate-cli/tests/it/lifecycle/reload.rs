//! Configuration reloads, also under load.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use sluicegate_server::grpc::messages::{
    Code, RateLimitDescriptor, RateLimitRequest, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use sluicegate_testkit::wait::{self, PATIENCE};
use tonic::transport::Endpoint;

use crate::server_process::{ANY_PORTS, ConfigDir, ServerProcess};

/// The number of reloads under load.
const CHANGES: u64 = 1_000;
/// The number of reloads that the server detects itself; the others are triggered by a signal.
const DETECTED: u64 = 10;
const NO_LABELS: &str = r#"{"labels":{}}"#;

fn rules(amount: u64) -> String {
    format!(
        "{ANY_PORTS}[[rule]]\nname = \"all\"\nper = []\nalgorithm = \"fixed-window\"\namount = {amount}\nwindow = \"3650d\"\n"
    )
}

/// Sends one check and asserts its response.
pub(crate) type Checker = Box<dyn FnMut()>;

pub(crate) fn by_http(program: &ServerProcess) -> Checker {
    let mut client = program.client();
    Box::new(move || {
        let response = client.post("/v1/check", NO_LABELS).unwrap();
        assert_eq!(response.status, 200, "{}", response.body);
        let response = response.json();
        assert_eq!(
            (&response["allowed"], &response["degraded"]),
            (&true.into(), &false.into()),
            "{response}"
        );
    })
}

fn by_forward_auth(program: &ServerProcess) -> Checker {
    let mut client = program.client();
    Box::new(move || {
        let response = client.get("/v1/auth").unwrap();
        assert_eq!(response.status, 200, "{}", response.body);
    })
}

pub(crate) fn by_resp(program: &ServerProcess) -> Checker {
    let client = redis::Client::open(format!("redis://{}", program.resp)).unwrap();
    let mut connection = client.get_connection_with_timeout(PATIENCE).unwrap();
    Box::new(move || {
        let response: Vec<redis::Value> =
            redis::cmd("SG.CHECK").arg(&["1", "a", "b"]).query(&mut connection).unwrap();
        let (allowed, degraded) = (&response[0], &response[6]);
        assert_eq!((allowed, degraded), (&redis::Value::Int(1), &redis::Value::Int(0)), "{response:?}");
    })
}

pub(crate) fn by_grpc(program: &ServerProcess) -> Checker {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let endpoint = Endpoint::from_shared(format!("http://{}", program.grpc)).unwrap().timeout(PATIENCE);
    let mut client = RateLimitServiceClient::new(runtime.block_on(endpoint.connect()).unwrap());
    Box::new(move || {
        let entry = Entry { key: "a".to_owned(), value: b"b".to_vec() };
        let descriptors =
            vec![RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() }];
        let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
        let response = runtime.block_on(client.should_rate_limit(request)).unwrap().into_inner();
        assert_eq!(response.overall_code(), Code::Ok, "{response:?}");
    })
}

fn limit(program: &ServerProcess) -> u64 {
    let response = program.client().post("/v1/peek", NO_LABELS).unwrap();
    response.json()["limit"].as_u64().unwrap()
}

fn wait_for_limit(program: &ServerProcess, amount: u64) {
    wait::until(format_args!("the limit is {amount}"), PATIENCE, || limit(program) == amount);
}

#[test]
fn a_thousand_reloads_under_load_fail_no_call_and_lose_no_count() {
    let home = ConfigDir::new(&rules(900_000));
    let program = home.start();
    let (is_over, charged) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for check in [by_http, by_forward_auth, by_resp, by_grpc] {
            let (program, is_over, charged) = (&program, &is_over, &charged);
            scope.spawn(move || {
                let mut check = check(program);
                while !is_over.load(Ordering::Relaxed) {
                    check();
                    charged.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for change in 1..=CHANGES {
                let amount = 900_000 + change;
                home.write("sluicegate.toml", rules(amount));
                if change % (CHANGES / DETECTED) != 0 {
                    program.signal("-HUP");
                }
                wait_for_limit(&program, amount);
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        changed.unwrap();
    });
    let charged = charged.into_inner();
    let response = program.client().post("/v1/peek", NO_LABELS).unwrap().json();
    assert!(charged > CHANGES, "{charged}");
    assert_eq!(response["remaining"].as_u64(), Some(900_000 + CHANGES - charged));
    assert_eq!(program.metric("sluicegate_config_last_reload_successful"), "1");
}

#[test]
fn an_invalid_file_is_rejected_and_reported_until_it_is_fixed() {
    let home = ConfigDir::new(&rules(10));
    let program = home.start();
    assert_eq!(program.get("/readyz"), (200, r#"{"ready":true,"store":"ok","rules":"ok"}"#.to_owned()));
    home.write("sluicegate.toml", rules(20).replace("3650d", "1w"));
    let stale = (200, r#"{"ready":true,"store":"ok","rules":"stale"}"#.to_owned());
    wait::until("the server reports stale rules", PATIENCE, || program.get("/readyz") == stale);
    assert_eq!(limit(&program), 10);
    assert_eq!(program.metric("sluicegate_config_last_reload_successful"), "0");
    assert_eq!(program.metric("sluicegate_config_reloads_total{result=\"failure\"}"), "1");
    let log = program.log();
    assert!(log.contains("sluicegate.toml:10:10") && log.contains("\"1w\" is not a duration"), "{log}");
    assert!(log.contains("action=\"reload\"") && log.contains("result=\"rejected\""), "{log}");

    home.write("sluicegate.toml", rules(20));
    wait_for_limit(&program, 20);
    assert_eq!(program.get("/readyz").1, r#"{"ready":true,"store":"ok","rules":"ok"}"#);
    assert!(program.log().contains("action=\"reload\" subject=\"the configuration\" result=\"done\""));
}

#[test]
fn settings_that_need_a_restart_are_logged_and_the_others_take_effect() {
    let home = ConfigDir::new(&rules(10));
    let program = home.start();
    let moved = rules(20).replace("http = \"127.0.0.1:0\"", "http = \"127.0.0.1:1\"");
    home.write("sluicegate.toml", moved + "[store]\ndeadline = \"20ms\"\n");
    program.signal("-HUP");
    wait_for_limit(&program, 20);
    for setting in ["server.http", "store.deadline"] {
        program.wait_for_log(&format!("takes effect at the next restart setting=\"{setting}\""));
    }
}

#[test]
fn a_reload_does_not_remove_the_tokens_of_a_public_listener() {
    let with_token =
        rules(10).replace("127.0.0.1:0", "0.0.0.0:0") + "[[server.token]]\nname = \"app\"\nfile = \"app\"\n";
    let home = ConfigDir::new("");
    home.write("app", "s3cret-of-app\n");
    home.write("sluicegate.toml", &with_token);
    let program = home.start();
    // the new file is valid, but the server keeps its public listener until a restart
    home.write("sluicegate.toml", rules(20));
    program.signal("-HUP");
    program.wait_for_log("would accept requests without a token");
    let port = program.http.rsplit(':').next().unwrap();
    let mut client = crate::http_client::Client::connect(&format!("127.0.0.1:{port}")).unwrap();
    assert_eq!(client.post("/v1/check", NO_LABELS).unwrap().status, 401);
    assert!(client.get("/readyz").unwrap().body.contains("stale"));
}

#[test]
fn a_reload_removes_all_rules_only_if_the_file_sets_an_empty_list() {
    let home = ConfigDir::new(&rules(10));
    let program = home.start();
    let stale = r#"{"ready":true,"store":"ok","rules":"stale"}"#;
    for (failures, text) in (1..).zip(["", ANY_PORTS, "# rules follow\n"]) {
        home.write("sluicegate.toml", text);
        program.signal("-HUP");
        wait::until("the reload is rejected", PATIENCE, || {
            let failed = program.metric("sluicegate_config_reloads_total{result=\"failure\"}");
            failed.parse::<u64>().unwrap() >= failures
        });
        assert_eq!((limit(&program), program.get("/readyz").1), (10, stale.to_owned()), "{text:?}");
    }
    program.wait_for_line("configuration rejected, keeping the previous one", "write rule = [] at the top");

    home.write("sluicegate.toml", format!("rule = []\n{ANY_PORTS}"));
    wait::until("the rules are removed", PATIENCE, || {
        let response = program.client().post("/v1/check", NO_LABELS).unwrap().json();
        response["tiers"].as_array().is_some_and(Vec::is_empty)
    });
    assert_eq!(program.get("/readyz").1, r#"{"ready":true,"store":"ok","rules":"ok"}"#);
}

#[test]
fn a_reload_removes_all_tokens_only_if_the_file_sets_an_empty_list() {
    let token = "[[server.token]]\nname = \"app\"\nfile = \"app\"\n";
    let home = ConfigDir::new("");
    home.write("app", "s3cret-of-app\n");
    home.write("sluicegate.toml", rules(10) + token);
    let program = home.start();
    let status = || program.client().post("/v1/check", NO_LABELS).unwrap().status;
    assert_eq!(status(), 401);
    home.write("sluicegate.toml", rules(20));
    program
        .wait_for_line("configuration rejected, keeping the previous one", "write token = [] under [server]");
    assert_eq!(status(), 401);
    assert!(program.get("/readyz").1.contains("\"rules\":\"stale\""));

    home.write("sluicegate.toml", rules(20).replace("[server]\n", "[server]\ntoken = []\n"));
    wait::until("the tokens are removed", PATIENCE, || status() == 200);
    assert!(program.get("/readyz").1.contains("\"rules\":\"ok\""));
}
