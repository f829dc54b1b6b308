//! A real Envoy with the configurations of `deploy/envoy`, between clients and an application.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use axum::{Router, routing::get};
use sluicegate::{Limit, Limiter, MemoryStore, OnStoreFailure, Options, RedisStore, Rule, Source};
use sluicegate_server::grpc::Settings;
use sluicegate_testkit::{
    server::{Flavor, Server as Redis},
    wait,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use crate::grpc_front::Front;

const HOUR: Duration = Duration::from_secs(60 * 60);

/// Envoy in front of sluicegate and an application.
pub(crate) struct Envoy {
    process: Child,
    pub(crate) address: SocketAddr,
    admin: SocketAddr,
    _directory: TempDir,
    _sluicegate: Front,
    _application: JoinHandle<()>,
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _ended = self.process.wait();
    }
}

struct Answer {
    status: u16,
    head: String,
}

impl Answer {
    /// Returns the value of a header that occurs once.
    fn field(&self, name: &str) -> Option<&str> {
        let named = |line: &str| line.split_once(": ").is_some_and(|(other, _)| other == name);
        let mut lines = self.head.lines().filter(|line| named(line));
        let line = lines.next()?;
        assert_eq!(lines.next(), None, "{name} is there twice: {}", self.head);
        line.split_once(": ").map(|(_, value)| value)
    }
}

impl Envoy {
    /// Starts Envoy with the deployed configuration in front of an application that answers `hello`.
    async fn start(sluicegate: Front, changes: &[(&str, &str)]) -> Self {
        let hello = Router::new().fallback(get(|| async { "hello" }));
        Self::start_with("envoy.yaml", hello, sluicegate, changes).await
    }

    /// Starts Envoy with a deployed configuration, other addresses, and the changes of a test.
    pub(crate) async fn start_with(
        file: &str,
        service: Router,
        sluicegate: Front,
        changes: &[(&str, &str)],
    ) -> Self {
        let application = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let ports = [
            ("port_value: 9901", "port_value: 0".to_owned()),
            ("port_value: 10000", "port_value: 0".to_owned()),
            ("port_value: 3000", format!("port_value: {}", application.local_addr().unwrap().port())),
            ("port_value: 8081", format!("port_value: {}", sluicegate.address.port())),
        ];
        let mut config = fs::read_to_string(repository().join("deploy/envoy").join(file)).unwrap();
        let changes = changes.iter().map(|(old, new)| (*old, (*new).to_owned()));
        for (old, new) in ports.into_iter().chain(changes) {
            assert_eq!(config.matches(old).count(), 1, "{old}");
            config = config.replace(old, &new);
        }
        let directory = tempfile::tempdir().unwrap();
        let (file, admin) = (directory.path().join("envoy.yaml"), directory.path().join("admin"));
        fs::write(&file, config).unwrap();
        let program = repository().join(".servers/envoy-1.40/envoy");
        assert!(program.exists(), "{} is missing: scripts/servers installs it", program.display());
        let process = Command::new(program)
            .arg("-c")
            .arg(file)
            .arg("--admin-address-path")
            .arg(&admin)
            .args(["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let application = tokio::spawn(async move { axum::serve(application, service).await.unwrap() });
        let admin = admin_address(&admin).await;
        let mut envoy = Self {
            process,
            address: admin,
            admin,
            _directory: directory,
            _sluicegate: sluicegate,
            _application: application,
        };
        wait::until_async("Envoy is ready", wait::PATIENCE, async || {
            get_from(envoy.admin, "/ready", b"").await.status == 200
        })
        .await;
        let listeners = get_from(envoy.admin, "/listeners", b"").await;
        let address = listeners.head.lines().find_map(|line| line.strip_prefix("edge::"));
        envoy.address = address.unwrap().parse().unwrap();
        envoy
    }

    async fn get(&self, path: &str, fields: impl AsRef<[u8]>) -> Answer {
        get_from(self.address, path, fields.as_ref()).await
    }

    /// Returns a counter of Envoy's rate limit filter.
    pub(crate) async fn count(&self, what: &str) -> u64 {
        self.statistic(&format!("cluster.app.ratelimit.{what}")).await
    }

    /// Returns the number of requests that Envoy has received and not answered in full.
    pub(crate) async fn active_requests(&self) -> u64 {
        self.statistic("http.edge.downstream_rq_active").await
    }

    /// Returns a counter or gauge of Envoy, which is zero until it is first used.
    async fn statistic(&self, name: &str) -> u64 {
        let stats = get_from(self.admin, &format!("/stats?filter={name}"), b"").await;
        let line = stats.head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.map_or(0, |number| number.parse().unwrap())
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

async fn admin_address(file: &Path) -> SocketAddr {
    let read = || fs::read_to_string(file).ok()?.parse().ok();
    wait::until_async("Envoy writes its admin address", wait::PATIENCE, async || read().is_some()).await;
    read().unwrap()
}

/// Sends one request on its own connection. The lines of the response include those of its body.
async fn get_from(address: SocketAddr, path: &str, fields: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n");
    stream.write_all(&[head.as_bytes(), fields, b"\r\n"].concat()).await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    let head = String::from_utf8_lossy(&bytes).into_owned();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head }
}

fn log(amount: u64) -> Limit {
    Limit::sliding_log(amount, HOUR).unwrap()
}

/// A front end with the memory store, behind an Envoy with a long timeout.
async fn on_memory(rules: impl IntoIterator<Item = Rule>) -> Envoy {
    let limiter = Limiter::new(MemoryStore::new(), rules).unwrap();
    let front = Front::start(limiter, Settings::default()).await;
    Envoy::start(front, &[("timeout: 0.02s", "timeout: 5s")]).await
}

/// One client has at least 2^64 IPv6 addresses. The addresses are those of a trusted proxy's `X-Forwarded-For`.
#[tokio::test(flavor = "multi_thread")]
async fn addresses_of_one_ipv6_network_share_a_counter() {
    let header = "- request_headers: { header_name: x-api-key, descriptor_key: api_key }";
    for (label, action) in [
        ("remote_address", header),
        ("masked_remote_address", "- masked_remote_address: { v6_prefix_mask_len: 128 }"),
    ] {
        let limiter =
            Limiter::new(MemoryStore::new(), [Rule::new("per-client", log(3)).per([label])]).unwrap();
        let front = Front::start(limiter, Settings::default()).await;
        let trusting = ("xff_num_trusted_hops: 0", "xff_num_trusted_hops: 1");
        let envoy =
            Envoy::start(front, &[("timeout: 0.02s", "timeout: 5s"), trusting, (header, action)]).await;
        let status = async |address: &str| {
            let answer = envoy.get("/", &format!("x-forwarded-for: {address}\r\n")).await;
            answer.status
        };
        for host in 1..=3 {
            assert_eq!(status(&format!("2001:db8:0:1::{host}")).await, 200, "{label}");
        }
        assert_eq!(status("2001:db8:0:1:ffff::4").await, 429, "{label}: the same network");
        assert_eq!(status("2001:db8:0:2::1").await, 200, "{label}: another network");
        for _ in 0..3 {
            assert_eq!(status("203.0.113.9").await, 200, "{label}");
        }
        assert_eq!(status("203.0.113.9").await, 429, "{label}");
        assert_eq!(status("203.0.113.10").await, 200, "{label}: another address");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_limit_is_admitted_and_other_requests_get_a_retry_after() {
    let limit = Limit::fixed_window(5, 24 * HOUR).unwrap();
    let envoy = on_memory([Rule::new("per-ip", limit).when("domain", "edge").per(["remote_address"])]).await;
    for left in (0..5).rev() {
        let answer = envoy.get("/", "").await;
        assert_eq!((answer.status, answer.head.ends_with("hello")), (200, true), "{}", answer.head);
        assert_eq!(answer.field("x-ratelimit-limit"), Some(r#"5, 5;w=86400;name="per-ip""#));
        assert_eq!(answer.field("x-ratelimit-remaining"), Some(&*left.to_string()));
        assert_eq!(answer.field("ratelimit-policy"), Some(r#""per-ip";q=5;w=86400"#));
        assert!(answer.field("ratelimit").unwrap().starts_with(&format!(r#""per-ip";r={left};t="#)));
    }
    for forged in ["", "x-forwarded-for: 192.0.2.1\r\n", "x-forwarded-for: 192.0.2.2, 10.0.0.1\r\n"] {
        let answer = envoy.get("/", forged).await;
        assert_eq!(answer.status, 429, "{}", answer.head);
        let wait: u64 = answer.field("retry-after").unwrap().parse().unwrap();
        assert!((1..=86_400).contains(&wait), "{wait}");
        assert_eq!(answer.field("x-ratelimit-remaining"), Some("0"));
        assert_eq!(answer.field("x-envoy-ratelimited"), Some("true"));
    }
    let counts = (envoy.count("ok").await, envoy.count("over_limit").await, envoy.count("error").await);
    assert_eq!(counts, (5, 3, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_has_its_own_limit_besides_the_global_one_and_a_denial_charges_neither() {
    let envoy = on_memory([
        Rule::new("all", log(4)).when("domain", "edge").per(["remote_address"]).exact(),
        Rule::new("login", log(1)).when("route", "login").per(["remote_address"]),
    ])
    .await;
    assert_eq!(envoy.get("/login", "").await.status, 200);
    for _ in 0..3 {
        assert_eq!(envoy.get("/login", "").await.status, 429);
    }
    for left in ["2", "1", "0"] {
        let answer = envoy.get("/elsewhere", "").await;
        assert_eq!((answer.status, answer.field("x-ratelimit-remaining")), (200, Some(left)));
    }
    assert_eq!(envoy.get("/elsewhere", "").await.status, 429);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_is_not_utf8_does_not_bypass_its_limit() {
    let envoy = on_memory([Rule::new("key", log(1)).per(["api_key"])]).await;
    let odd = b"x-api-key: \xff\xfe\r\n";
    assert_eq!(envoy.get("/", odd).await.status, 200);
    assert_eq!(envoy.get("/", odd).await.status, 429);
    assert_eq!(envoy.count("error").await, 0);
}

/// Envoy accepts more than 60 KiB of headers only if configured.
const LARGE_HEADERS: (&str, &str) =
    ("xff_num_trusted_hops: 0", "xff_num_trusted_hops: 0\n          max_request_headers_kb: 8192");

#[tokio::test(flavor = "multi_thread")]
async fn a_padded_path_or_header_does_not_bypass_its_limit() {
    let limiter =
        Limiter::new(MemoryStore::new(), [Rule::new("all", log(1)).per(["remote_address"])]).unwrap();
    let front = Front::start(limiter, Settings::default()).await;
    let path_entry = (
        "- request_headers: { header_name: x-api-key, descriptor_key: api_key }",
        "- request_headers: { header_name: x-api-key, descriptor_key: api_key }\n              \
         - actions:\n                - request_headers: { header_name: \":path\", descriptor_key: path }",
    );
    let changes = [("timeout: 0.02s", "timeout: 5s"), LARGE_HEADERS, path_entry];
    let envoy = Envoy::start(front, &changes).await;
    assert_eq!(envoy.get("/", "").await.status, 200);
    assert_eq!(envoy.get("/", "").await.status, 429);
    for length in [2_000, 30_000, 60_000, 500_000, 3_000_000] {
        let padding = "x".repeat(length);
        let by_path = envoy.get(&format!("/{padding}"), "").await;
        assert_eq!(by_path.status, 429, "a path of {length}");
        let by_header = envoy.get("/", format!("x-api-key: {padding}\r\n")).await;
        assert_eq!(by_header.status, 429, "a header of {length}");
        let by_both = envoy.get(&format!("/{padding}"), format!("x-api-key: {padding}\r\n")).await;
        assert_eq!(by_both.status, 429, "both of {length}");
    }
    assert_eq!((envoy.count("over_limit").await, envoy.count("error").await), (16, 0));
}

/// The outcome of requests through Envoy while Redis is suspended.
#[derive(Debug, PartialEq, Eq)]
struct Outage {
    /// Of five requests each, how many were allowed by the failure policies open, closed and local.
    passed: [usize; 3],
    retry_after: Option<String>,
    /// Envoy's counters.
    over_limit: u64,
    errors: u64,
    allowed_by_envoy: u64,
}

/// The outcome that the failure policies require.
fn expected_outage() -> Outage {
    Outage {
        passed: [5, 0, 3],
        retry_after: Some("1".to_owned()),
        over_limit: 8,
        errors: 0,
        allowed_by_envoy: 0,
    }
}

/// Suspends Redis while requests are sent through an Envoy with the deployed configuration and these replacements.
async fn outage(options: Options, replaced: &[(&str, &str)]) -> Outage {
    let redis = Redis::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let rule = |name: &str, policy| {
        Rule::new(name, log(3)).when("api_key", name).per(["api_key"]).on_store_failure(policy)
    };
    let rules = [
        rule("open", OnStoreFailure::Open),
        rule("closed", OnStoreFailure::Closed),
        rule("local", OnStoreFailure::Local),
    ];
    let limiter = Limiter::builder().store(store).rules(rules).options(options).build().unwrap();
    let front = Front::start(limiter.clone(), Settings::default()).await;
    let envoy = Envoy::start(front, replaced).await;
    redis.suspend();
    let mut passed = [0; 3];
    for (passed, name) in passed.iter_mut().zip(["open", "closed", "local"]) {
        for _ in 0..5 {
            let answer = envoy.get("/", format!("x-api-key: {name}\r\n")).await;
            assert!([200, 429].contains(&answer.status), "{}", answer.head);
            *passed += usize::from(answer.status == 200);
        }
    }
    let denied = envoy.get("/", "x-api-key: closed\r\n").await;
    let retry_after = denied.field("retry-after").map(str::to_owned);

    redis.resume();
    let labels = sluicegate::Labels::new([("api_key", "open")]).unwrap();
    wait::until_async("the store decides again", wait::PATIENCE, async || {
        limiter.peek(&labels, 1).await.unwrap().source == Source::Store
    })
    .await;
    Outage {
        passed,
        retry_after,
        over_limit: envoy.count("over_limit").await,
        errors: envoy.count("error").await,
        allowed_by_envoy: envoy.count("failure_mode_allowed").await,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_redis_each_failure_policy_applies_and_envoy_sees_no_error() {
    // longer than the default: on a busy machine two processes sometimes wait more than 20 ms for each other
    let options = Options::default().deadline(Duration::from_millis(50));
    assert_eq!(outage(options, &[("timeout: 0.02s", "timeout: 0.5s")]).await, expected_outage());
}

/// Runs alone and with retries, as configured in `.config/nextest.toml`.
#[tokio::test(flavor = "multi_thread")]
async fn without_redis_the_default_deadline_fits_into_envoys_timeout() {
    const TRIES: usize = 8;
    let mut seen = Vec::new();
    while seen.len() < TRIES && seen.last() != Some(&expected_outage()) {
        seen.push(outage(Options::default(), &[]).await);
    }
    assert_eq!(seen.last(), Some(&expected_outage()), "{seen:?}");
}
