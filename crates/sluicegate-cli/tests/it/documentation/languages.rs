//! The Lua script in other languages: the programs of `docs/examples` and the server make the same decisions with shared
//! counters.

mod holds;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use serde_json::{Value, json};
use sluicegate_testkit::{
    server::{Flavor, Server},
    wait::PATIENCE,
};
use tempfile::TempDir;

use super::markdown::root;

const ALGORITHMS: [&str; 4] = ["fixed-window", "sliding-counter", "token-bucket", "sliding-log"];
/// 300 days: nothing expires or refills during a test, and a window rarely ends.
const WINDOW_MS: u64 = 300 * 86_400_000;
const AMOUNT: u64 = 12;
/// Key values that need different encodings.
const VALUES: [&str; 3] = ["user:42", "a,b c{d}*!#é", ""];

/// A process that is killed at the end of the test.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(command: &mut Command) -> Self {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}; run scripts/servers"));
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}; run scripts/servers"))
    }

    fn send(&mut self, request: &Value) -> Value {
        writeln!(self.input, "{request}").unwrap();
        self.line()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server and an example program with one Redis.
struct Deployment {
    _server: Process,
    address: String,
    program: Process,
    _redis: Server,
    _home: TempDir,
}

/// The subject of a request: one counter, or all four algorithms.
#[derive(Clone, Copy)]
enum Subject<'a> {
    Key { algorithm: &'a str, key: &'a str },
    Rule { algorithm: &'a str, user: &'a str },
    AllRules { user: &'a str },
}

impl Deployment {
    fn start(example: &str, program: &str) -> Self {
        let redis = Server::start(Flavor::Redis7);
        let home = tempfile::tempdir().unwrap();
        let mut rules = format!(
            "[server]\nhttp = \"127.0.0.1:0\"\ngrpc = \"off\"\nresp = \"off\"\n\
             [store]\nurl = \"{}\"\ndenial_cache = \"0s\"\ndeadline = \"5s\"\n",
            redis.url()
        );
        for algorithm in ALGORITHMS {
            rules += &format!(
                "[[rule]]\nname = \"{algorithm} of user\"\nwhen = {{ about = [\"{algorithm}\", \"all\", \"everything\"] }}\n\
                 per = [\"user\"]\nalgorithm = \"{algorithm}\"\namount = {AMOUNT}\nwindow = \"{WINDOW_MS}ms\"\n"
            );
        }
        rules += &format!(
            "[[rule]]\nname = \"concurrency of user\"\nwhen = {{ about = [\"concurrency\", \"everything\"] }}\n\
             per = [\"user\"]\nalgorithm = \"concurrency\"\namount = {AMOUNT}\n"
        );
        fs::write(home.path().join("sluicegate.toml"), rules).unwrap();
        let mut serve = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
        let mut server =
            Process::start(serve.args(["serve", "--json"]).current_dir(home.path()).stderr(Stdio::null()));
        let address = server.line()["http"].as_str().unwrap().to_owned();

        let script = home.path().join("sluicegate.lua");
        fs::write(&script, sluicegate::redis::SCRIPT).unwrap();
        let installed = |path: &str| root().join(".servers").join(path).canonicalize().unwrap();
        let copy = home.path().join(example);
        fs::copy(root().join("docs/examples").join(example), &copy).unwrap();
        std::os::unix::fs::symlink(installed("ioredis/node_modules"), home.path().join("node_modules"))
            .unwrap();
        let mut command = Command::new(program);
        command.arg(&copy).arg(redis.url()).arg(&script).env("PYTHONPATH", installed("redis-py"));
        let program = Process::start(&mut command);
        Self { _server: server, address, program, _redis: redis, _home: home }
    }

    fn call_server(&self, operation: &str, subject: Subject<'_>, cost: u64) -> ComparableDecision {
        let request = match subject {
            Subject::Key { algorithm, key } => {
                let limit =
                    json!({"algorithm": algorithm, "amount": AMOUNT, "window": format!("{WINDOW_MS}ms")});
                json!({"key": key, "limit": limit, "cost": cost})
            }
            Subject::Rule { algorithm, user } => {
                json!({"labels": {"about": algorithm, "user": user}, "cost": cost})
            }
            Subject::AllRules { user } => json!({"labels": {"about": "all", "user": user}, "cost": cost}),
        };
        let decision = self.post(operation, &request);
        assert_eq!(decision["source"], "store", "{decision}");
        ComparableDecision::new(&decision, "_ms", 1000)
    }

    /// Sends a request to the server, and returns the body of the response.
    fn post(&self, operation: &str, request: &Value) -> Value {
        let body = request.to_string();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let length = body.len();
        let head = format!("POST /v1/{operation} HTTP/1.1\r\nhost: {}\r\n", self.address);
        write!(stream, "{head}connection: close\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        let body = response.split_once("\r\n\r\n").unwrap().1;
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {response}"))
    }

    fn call_program(&mut self, operation: &str, subject: Subject<'_>, cost: u64) -> ComparableDecision {
        let tier = |algorithm: &str, rule: Option<String>, value: &str| {
            json!({"rule": rule, "values": [value], "algorithm": algorithm, "amount": AMOUNT, "window_ms": WINDOW_MS,
                   "cost": cost})
        };
        let of_rule =
            |algorithm: &str, user: &str| tier(algorithm, Some(format!("{algorithm} of user")), user);
        let tiers = match subject {
            Subject::Key { algorithm, key } => vec![tier(algorithm, None, key)],
            Subject::Rule { algorithm, user } => vec![of_rule(algorithm, user)],
            Subject::AllRules { user } => ALGORITHMS.map(|algorithm| of_rule(algorithm, user)).to_vec(),
        };
        let decision = self.program.send(&json!({"operation": operation, "tiers": tiers}));
        ComparableDecision::new(&decision, "_us", 1)
    }
}

/// The fields of a decision that are comparable between decisions made at different times: points in time instead of waits.
#[derive(Debug)]
struct ComparableDecision {
    allowed: bool,
    at_us: u64,
    tiers: Vec<ComparableTier>,
}

#[derive(Debug)]
struct ComparableTier {
    rule: Option<String>,
    allowed: bool,
    limit: u64,
    remaining: u64,
    retry_at_us: Option<u64>,
    reset_at_us: u64,
}

impl ComparableDecision {
    fn new(decision: &Value, unit: &str, micros: u64) -> Self {
        let at_us = decision["at_us"].as_f64().unwrap() as u64;
        let time = |tier: &Value, name: &str| {
            tier[format!("{name}{unit}")].as_f64().map(|wait| at_us + wait as u64 * micros)
        };
        let tiers = decision["tiers"].as_array().unwrap_or_else(|| panic!("{decision}"));
        let tier = |tier: &Value| ComparableTier {
            rule: tier["rule"].as_str().map(str::to_owned),
            allowed: tier["allowed"].as_bool().unwrap(),
            limit: tier["limit"].as_u64().unwrap(),
            remaining: tier["remaining"].as_f64().unwrap() as u64,
            retry_at_us: time(tier, "retry_after"),
            reset_at_us: time(tier, "reset_after").unwrap(),
        };
        Self {
            allowed: decision["allowed"].as_bool().unwrap(),
            at_us,
            tiers: tiers.iter().map(tier).collect(),
        }
    }

    /// Asserts that both decisions are equal. Times may be rounded up to a millisecond, and the reset time of an unused
    /// counter is the time of the request.
    fn assert_same(&self, other: &Self, context: &str) {
        let same_time = |one: u64, another: u64| one.abs_diff(another) <= 1_000;
        assert_eq!((self.allowed, self.tiers.len()), (other.allowed, other.tiers.len()), "{context}");
        for (one, another) in self.tiers.iter().zip(&other.tiers) {
            let context = format!("{context}\n{one:?}\n{another:?}");
            assert_eq!(one.rule, another.rule, "{context}");
            assert_eq!((one.allowed, one.limit), (another.allowed, another.limit), "{context}");
            assert_eq!(one.remaining, another.remaining, "{context}");
            match (one.retry_at_us, another.retry_at_us) {
                (Some(one), Some(another)) => assert!(same_time(one, another), "{context}"),
                (one, another) => assert_eq!(one, another, "{context}"),
            }
            let is_unused = one.reset_at_us == self.at_us && another.reset_at_us == other.at_us;
            assert!(is_unused || same_time(one.reset_at_us, another.reset_at_us), "{context}");
        }
    }
}

/// Alternates between both and compares them before and after each step.
fn assert_equal_decisions(example: &str, program: &str) {
    let mut deployment = Deployment::start(example, program);
    let long = "x".repeat(200);
    let mut subjects: Vec<Subject<'_>> = Vec::new();
    for algorithm in ALGORITHMS {
        let keys = [VALUES[0], VALUES[1], &*long];
        subjects.extend(keys.map(|key| Subject::Key { algorithm, key }));
        subjects.extend(VALUES.map(|user| Subject::Rule { algorithm, user }));
    }
    subjects.push(Subject::AllRules { user: "everything" });
    subjects.push(Subject::AllRules { user: VALUES[0] }); // some of its tiers are exhausted by now

    let steps = [
        ("check", 1),
        ("check", 3),
        ("charge", 2),
        ("check", 5),
        ("refund", 2),
        ("check", 4),
        ("check", 1),
        ("check", 13),
    ];
    for (number, subject) in subjects.into_iter().enumerate() {
        for (step, (operation, cost)) in steps.into_iter().enumerate() {
            let server_peek = deployment.call_server("peek", subject, cost);
            let program_peek = deployment.call_program("peek", subject, cost);
            let context = format!("subject {number}, step {step}: {operation} {cost}");
            server_peek.assert_same(&program_peek, &format!("{context}, peek"));
            let done = match (number + step) % 2 {
                0 => deployment.call_server(operation, subject, cost),
                _ => deployment.call_program(operation, subject, cost),
            };
            if operation == "check" {
                assert_eq!(done.allowed, server_peek.allowed, "{context}");
            }
            let (server, program) =
                (deployment.call_server("peek", subject, 0), deployment.call_program("peek", subject, 0));
            server.assert_same(&program, &format!("{context}, afterwards"));
            let remaining: Vec<_> = server.tiers.iter().map(|tier| tier.remaining).collect();
            let reported: Vec<_> = done.tiers.iter().map(|tier| tier.remaining).collect();
            assert_eq!(remaining, reported, "{context}: {done:?}");
            for (tier, after) in done.tiers.iter().zip(&server.tiers) {
                let is_unused = after.reset_at_us == server.at_us;
                assert!(
                    is_unused || tier.reset_at_us.abs_diff(after.reset_at_us) <= 1_000,
                    "{context}: {done:?} {server:?}"
                );
            }
        }
    }
}

#[test]
fn python_and_the_server_decide_alike_with_shared_counters() {
    assert_equal_decisions("sluicegate.py", "python3");
}

#[test]
fn node_and_the_server_decide_alike_with_shared_counters() {
    assert_equal_decisions("sluicegate.mjs", "node");
}

#[test]
fn the_examples_build_the_documented_keys() {
    // as asserted in `sluicegate/src/redis/keys.rs`
    let expected = "sg1:{30d13f94}:token-bucket:!key:user%3a42";
    let tier = r#"{"values": ["user:42"], "algorithm": "token-bucket"}"#;
    let examples = root().join("docs/examples").canonicalize().unwrap();
    let python = format!("import sluicegate; print(sluicegate.key_of({tier}))");
    assert_eq!(stdout(Command::new("python3").args(["-B", "-c", &python]).current_dir(&examples)), expected);
    let page = fs::read_to_string(root().join("docs/lua.md")).unwrap();
    assert!(page.contains(expected), "docs/lua.md shows a different key");
}

fn stdout(command: &mut Command) -> String {
    let redis_py = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.servers/redis-py");
    let output = command.env("PYTHONPATH", redis_py).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}
