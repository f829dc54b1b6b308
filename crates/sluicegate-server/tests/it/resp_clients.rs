//! Common clients over real sockets: redis-cli, the Rust crate `redis`, redis-py and ioredis.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use redis::{FromRedisValue, Value, aio::MultiplexedConnection};
use sluicegate::{Limiter, MemoryStore};
use sluicegate_server::{
    auth::Access,
    config::{Scopes, Token},
    demo,
    engine::Engine,
    net::acceptor::AcceptConfig,
    resp::{self, Endpoint},
};
use tokio::{net::TcpListener, task::spawn_blocking};

/// Starts a server with the demo rules and one user, and returns its port.
async fn start() -> u16 {
    let engine = Engine::new(Limiter::new(MemoryStore::new(), demo::rules()).unwrap());
    let access = Access::new(vec![Token::new("app", b"s3cret", Scopes::ALL)]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(resp::server::run(listener, Endpoint::new(engine, access), AcceptConfig::default()));
    port
}

fn installed(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.servers").join(path)
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}

async fn output(mut command: Command, input: &'static str) -> String {
    let output = spawn_blocking(move || {
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            piped.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}; run scripts/servers"));
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    });
    let Output { status, stdout, stderr } = output.await.unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{status}, is everything installed that scripts/servers installs? {stderr}");
    String::from_utf8(stdout).unwrap() + &stderr
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_cli() {
    let port = start().await.to_string();
    for version in ["-2", "-3"] {
        let cli = |arguments: &[&str]| {
            let mut command = Command::new("redis-cli");
            command.args(["-p", &port, version, "--user", "app", "--pass", "s3cret", "--no-auth-warning"]);
            command.args(arguments);
            command
        };
        let key = format!("cli{version}");
        assert_eq!(output(cli(&["CL.THROTTLE", &key, "15", "30", "60"]), "").await, "0\n16\n15\n-1\n2\n");
        assert_eq!(output(cli(&["ping"]), "").await, "PONG\n");
        let login = ["route", "login", "ip", &*key];
        let hold = |command: &[&str]| output(cli(&[command, &login].concat()), "");
        let held = hold(&["SG.HOLD", &key, "1000", "1"]).await;
        let held: Vec<_> = held.lines().collect();
        assert_eq!((held.len(), held[0], held[2], held[5]), (9, "1", "4", "login-per-ip"));
        assert!(held[8].parse::<u64>().unwrap() > held[7].parse().unwrap(), "{held:?}");
        assert_eq!(hold(&["SG.RENEW", &key, "2000"]).await, "renewed\n");
        assert_eq!(hold(&["SG.SETTLE", &key, "2"]).await, "settled\n");
        assert_eq!(hold(&["SG.RELEASE", &key]).await, "already\n");
        let lines = "HELLO\nSG.PEEK route other\nCOMMAND COUNT\nCOMMAND DOCS ping\nnope\n\"a b\"\nQUIT\n";
        let printed = output(cli(&["--no-raw"]), lines).await;
        assert!(
            printed.contains("sluicegate") && printed.contains("(nil)") && printed.contains("(integer) 20"),
            "{printed}"
        );
        assert!(printed.contains("Returns PONG") && printed.contains("unknown command 'a b'"), "{printed}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rust_client_in_both_versions() {
    let port = start().await;
    for version in ["resp2", "resp3"] {
        let url = format!("redis://app:s3cret@127.0.0.1:{port}/?protocol={version}");
        let client = redis::Client::open(url).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let reply: Vec<i64> =
            run(&mut connection, &["CL.THROTTLE", version, "1", "1", "3600"]).await.unwrap();
        assert_eq!(reply, [0, 2, 1, -1, 3600]);
        let (allowed, rule): (bool, Option<String>) = {
            let reply: Vec<Value> =
                run(&mut connection, &["SG.CHECK", "1", "route", "login", "ip", version]).await.unwrap();
            assert_eq!(reply.len(), 8);
            (
                redis::from_redis_value(reply[0].clone()).unwrap(),
                redis::from_redis_value(reply[5].clone()).unwrap(),
            )
        };
        assert_eq!((allowed, rule.as_deref()), (true, Some("login-per-ip")));
        let mut pipeline = redis::pipe();
        for _ in 0..6 {
            pipeline.cmd("SG.CHECK").arg(&["1", "route", "login", "ip", version]);
        }
        let replies: Vec<Vec<Value>> = pipeline.query_async(&mut connection).await.unwrap();
        let allowed: Vec<_> = replies.iter().map(|reply| reply[0] == Value::Int(1)).collect();
        assert_eq!(allowed, [true, true, true, true, false, false]);
        let error = run::<Value>(&mut connection, &["SG.CHECK", "1e400", "a", "b"]).await.unwrap_err();
        assert!(error.to_string().contains("cost '1e400' is not a whole number"), "{error}");
    }
    let wrong = redis::Client::open(format!("redis://app:wrong@127.0.0.1:{port}/")).unwrap();
    assert!(wrong.get_multiplexed_async_connection().await.is_err());
}

async fn run<T: FromRedisValue>(
    connection: &mut MultiplexedConnection,
    words: &[&str],
) -> redis::RedisResult<T> {
    redis::cmd(words[0]).arg(&words[1..]).query_async(connection).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_py() {
    let port = start().await;
    let mut command = Command::new("python3");
    command.arg(script("redis_py.py")).arg(port.to_string()).env("PYTHONPATH", installed("redis-py"));
    assert_eq!(output(command, "").await, "ok\n");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ioredis() {
    let port = start().await;
    let mut command = Command::new("node");
    command.arg(script("ioredis.cjs")).arg(port.to_string());
    command.env("NODE_PATH", installed("ioredis/node_modules"));
    assert_eq!(output(command, "").await, "ok\n");
}
