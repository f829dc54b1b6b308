//! `sluicegate bench` on real stores and a real server: counts add up, the limit holds, and a violation is detected.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;
use sluicegate_testkit::{
    server::{Flavor, Server},
    wait,
};

fn sluicegate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLUICEGATE_") {
            command.env_remove(name);
        }
    }
    // a directory without a configuration
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    // avoids degraded decisions on a busy machine
    command.env("SLUICEGATE_STORE_DEADLINE", "1s");
    command
}

fn bench(arguments: &[&str]) -> Command {
    let mut command = sluicegate(&["bench"]);
    command.args(arguments);
    command
}

/// Runs with --json; returns the exit code and the report.
fn run_json(command: &mut Command) -> (i32, Value) {
    let output = command.arg("--json").output().unwrap();
    parse(&output)
}

fn parse(output: &Output) -> (i32, Value) {
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code().unwrap(), report)
}

fn count(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} in {report:#}"))
}

fn assert_within_limit(report: &Value) {
    let verdict = &report["verdict"];
    assert_eq!(verdict["kept"], true, "{report:#}");
    assert!(verdict["admitted"].as_u64() <= verdict["allowed"].as_u64(), "{report:#}");
    let parts = ["allowed", "denied", "degraded"].map(|part| count(report, part));
    assert_eq!(parts.iter().sum::<u64>(), count(report, "decisions"), "{report:#}");
    let latency =
        ["p50", "p90", "p99", "p99.9", "max"].map(|part| report["latency_us"][part].as_f64().unwrap());
    assert!(latency.is_sorted() && latency[0] > 0.0, "{latency:?}");
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn the_memory_store_is_the_default_target() {
    let (code, report) = run_json(&mut bench(&["--requests", "20000", "--concurrency", "4", "--keys", "7"]));
    assert_eq!((code, &report["target"]), (0, &"memory:".into()));
    assert_within_limit(&report);
    assert_eq!(count(&report, "decisions"), 20_000);
    assert_eq!(report["verdict"]["keys"], 7);
    assert!(count(&report, "allowed") >= 700 && count(&report, "denied") > 0, "{report:#}");

    let output = bench(&["--duration", "300ms"]).output().unwrap();
    let shown = text(&output);
    for part in [
        "memory:",
        "16 callers, one key, 100 per 1s (token-bucket)",
        "per second",
        "p99.9",
        "the limit held on 1 key",
    ] {
        assert!(shown.contains(part), "{part:?} is not in\n{shown}");
    }
    assert!(output.status.success() && !shown.contains('\u{1b}'), "{shown}");
}

#[test]
fn every_algorithm_holds_in_redis_and_only_expiring_keys_remain() {
    let server = Server::start(Flavor::Redis7);
    for algorithm in ["token-bucket", "sliding-log", "sliding-counter", "fixed-window"] {
        let url = server.url();
        let arguments =
            ["--store", &url, "--algorithm", algorithm, "--limit", "50 per 500ms", "--duration", "1500ms"];
        let (code, report) = run_json(bench(&arguments).args(["--keys", "20", "--zipf", "1.1"]));
        assert_eq!(code, 0, "{report:#}");
        assert_within_limit(&report);
        assert!(count(&report, "allowed") > 50, "{report:#}");
    }
    let keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut server.connection()).unwrap();
    assert!(!keys.is_empty() && keys.iter().all(|key| key.contains(":!key:sluicegate-bench")), "{keys:?}");
}

#[test]
fn a_store_that_loses_counters_is_detected() {
    let server = Server::start(Flavor::Redis7);
    let url = server.url();
    let arguments =
        ["--store", &url, "--algorithm", "sliding-log", "--limit", "200/1m", "--duration", "4s", "--json"];
    let load = bench(&arguments).stdout(Stdio::piped()).spawn().unwrap();
    wait::until("the limit is reached", wait::PATIENCE, || {
        redis::cmd("DBSIZE").query::<u64>(&mut server.connection()).unwrap() > 0
    });
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    let (code, report) = parse(&load.wait_with_output().unwrap());
    assert_eq!((code, &report["verdict"]["kept"]), (1, &false.into()), "{report:#}");
    assert!(report["verdict"]["admitted"].as_u64() > Some(200), "{report:#}");
}

/// A server process that is killed at the end of the test.
struct ServerProcess(Child, String);

impl ServerProcess {
    fn start() -> Self {
        let mut command =
            sluicegate(&["serve", "--json", "--http", "127.0.0.1:0", "--grpc", "off", "--resp", "off"]);
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        Self(process, format!("http://{}", started["http"].as_str().unwrap()))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_is_measured_over_persistent_connections() {
    let server = ServerProcess::start();
    let (code, report) = run_json(&mut bench(&[
        "--server",
        &server.1,
        "--requests",
        "2000",
        "--concurrency",
        "8",
        "--limit",
        "100 per 1m",
        "--burst",
        "10",
    ]));
    assert_eq!(code, 0, "{report:#}");
    assert_within_limit(&report);
    assert_eq!((count(&report, "decisions"), count(&report, "errors")), (2_000, 0));
    // the burst, and one more every 600 ms
    let allowed = count(&report, "allowed");
    assert!((10..=110).contains(&allowed), "{allowed}");
}

#[test]
fn the_server_of_the_environment_is_used_unless_a_flag_is_set() {
    let server = ServerProcess::start();
    let arguments = ["--requests", "100", "--limit", "100 per minute"];
    let asked = |more: &[&str]| run_json(bench(&arguments).args(more).env("SLUICEGATE_SERVER", &server.1)).1;
    assert_eq!(asked(&[])["target"], *server.1);
    for (more, target) in [(["--store", "memory:"], "memory:"), (["--server", &*server.1], &*server.1)] {
        assert_eq!(asked(&more)["target"], *target);
    }
    let output = bench(&["--ca", "ca.pem"]).output().unwrap();
    assert!(text(&output).contains("set --server or SLUICEGATE_SERVER"), "{}", text(&output));
}

#[test]
fn unusable_targets_and_flags_are_errors_with_a_remedy() {
    for (arguments, remedy) in [
        (&["--store", "redis://:s3cret@127.0.0.1:1"][..], "check that the server is running"),
        (&["--store", "redis://:s3cret@127.0.0.1:1"], "sluicegate doctor"),
        (&["--server", "http://127.0.0.1:1"], "sluicegate serve"),
        (&["--server", "redis://h"], "http://127.0.0.1:8080"),
        (&["--limit", "0 per 1s"], "amount 0 is out of range"),
        (&["--limit", "many"], "100 per 1m"),
        (&["--duration", "0s"], "above zero"),
        (&["--keys", "10", "--zipf", "-1"], "use a number of at least 0"),
        (&["--cost", "0"], "use a whole number of at least 1"),
        (&["--cost", "1.5"], "use a whole number of at least 1"),
        (&["--concurrency", "501"], "use a whole number from 1 to 500"),
        (&["--keys", "-1"], "use a whole number from 1 to 100000"),
        (&["--algorithm", "sliding-log", "--burst", "3"], "or use token-bucket"),
    ] {
        let output = bench(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output).contains(remedy), "{arguments:?}: {}", text(&output));
        assert!(!text(&output).contains("s3cret"), "{}", text(&output));
    }
}
