//! A real Prometheus scrapes the server; alerts and dashboard use existing metrics.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;
use sluicegate::{Cost, Labels, Limit, Limiter, MemoryStore, Rule, limiter::Request};
use sluicegate_server::http::HttpService;
use sluicegate_server::{
    engine::{Engine, Transport},
    http,
    net::acceptor::AcceptConfig,
};
use sluicegate_testkit::wait;
use tempfile::TempDir;

/// Maximum number of attempts to find a free port.
const MAX_STARTS: u32 = 10;

fn deploy(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(path)
}

fn promtool(arguments: &[&str]) {
    let output = Command::new("promtool")
        .args(arguments)
        .current_dir(deploy("prometheus"))
        .output()
        .expect("promtool is missing: scripts/servers installs it");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn promtool_accepts_the_configuration_and_the_alerts() {
    promtool(&["check", "config", "prometheus.yml"]);
    promtool(&["check", "rules", "--lint-fatal", "alerts.yml"]);
}

#[test]
fn each_alert_is_tested_as_firing_and_as_silent() {
    promtool(&["test", "rules", "alerts_test.yml"]);
    let tests = fs::read_to_string(deploy("prometheus/alerts_test.yml")).unwrap();
    for alert in alerts() {
        let (calm, troubled) = (format!("alertname: {alert} }}"), format!("alertname=\"{alert}\""));
        assert!(tests.contains(&calm) && tests.contains(&troubled), "{alert} is not tested");
    }
}

#[test]
fn each_alert_has_first_steps_in_the_guide() {
    let guide = fs::read_to_string(deploy("../docs/operating.md")).unwrap();
    for alert in alerts() {
        let is_in_table =
            guide.lines().any(|line| line.starts_with("| `") && line.contains(&format!("`{alert}`")));
        assert!(is_in_table, "{alert} is missing in \"When an alert fires\"");
    }
}

/// The names of the alerts.
fn alerts() -> Vec<String> {
    let text = fs::read_to_string(deploy("prometheus/alerts.yml")).unwrap();
    let names: Vec<_> =
        text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect();
    assert!(names.len() > 10);
    names
}

/// A Prometheus process that scrapes one server; stopped on drop.
struct Prometheus {
    process: Child,
    address: SocketAddr,
    dir: TempDir,
}

impl Prometheus {
    /// Starts it with the configuration in `deploy/`, but another target and a shorter interval.
    fn start(target: SocketAddr) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = fs::read_to_string(deploy("prometheus/prometheus.yml")).unwrap();
        let config = config.replace("127.0.0.1:8080", &target.to_string()).replace("15s", "200ms");
        fs::write(dir.path().join("prometheus.yml"), config).unwrap();
        fs::copy(deploy("prometheus/alerts.yml"), dir.path().join("alerts.yml")).unwrap();
        let mut prometheus = Self::launch(dir);
        for _ in 0..MAX_STARTS {
            if prometheus.is_ready() {
                return prometheus;
            }
            // another process took the port
            let dir = std::mem::replace(&mut prometheus.dir, tempfile::tempdir().unwrap());
            prometheus = Self::launch(dir);
        }
        panic!("Prometheus did not start on any of {MAX_STARTS} ports");
    }

    fn launch(dir: TempDir) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let process = Command::new("prometheus")
            .arg(format!("--config.file={}", dir.path().join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("prometheus is missing: scripts/servers installs it");
        Self { process, address, dir }
    }

    /// Whether it is ready; false if it exited because its port was taken.
    fn is_ready(&mut self) -> bool {
        let (process, address) = (&mut self.process, self.address);
        wait::for_some("Prometheus is ready or has ended", wait::PATIENCE, || {
            if process.try_wait().unwrap().is_some() {
                return Some(false);
            }
            let answer = http_get(address, "/-/ready")?;
            answer.contains("Ready").then_some(true)
        })
    }

    /// Calls its API.
    fn get(&self, path: &str) -> Value {
        let body = http_get(self.address, path).unwrap();
        let answer: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("{path}: {body}"));
        assert_eq!(answer["status"], "success", "{path}: {body}");
        answer["data"].clone()
    }

    fn query(&self, expression: &str) -> Vec<Value> {
        let data = self.get(&format!("/api/v1/query?query={}", escaped(expression)));
        data["result"].as_array().unwrap().clone()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ended_already = self.process.kill();
        let _ended = self.process.wait();
    }
}

/// Returns the body of an HTTP/1.0 response.
fn http_get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: prometheus\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// Every PromQL expression of the dashboard, with variables replaced.
fn dashboard_expressions() -> Vec<String> {
    let dashboard: Value =
        serde_json::from_str(&fs::read_to_string(deploy("grafana/sluicegate.json")).unwrap()).unwrap();
    let targets =
        dashboard["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array());
    let expressions: Vec<_> = targets
        .flatten()
        .map(|target| {
            let expression = target["expr"].as_str().unwrap();
            let variables =
                [("$job", "sluicegate"), ("$instance", ".*"), ("$rule", ".*"), ("$__rate_interval", "1m")];
            variables.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value))
        })
        .collect();
    assert!(expressions.len() > 20 && expressions.iter().all(|expression| !expression.contains('$')));
    expressions
}

/// The names of the metrics in a text.
fn metric_names(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    words.filter(|word| word.starts_with("sluicegate_")).map(str::to_owned).collect()
}

async fn serve() -> (SocketAddr, Engine) {
    let limit = Limit::sliding_log(2, Duration::from_secs(60)).unwrap();
    let engine =
        Engine::new(Limiter::new(MemoryStore::new(), [Rule::new("login \"per\\ip\"", limit)]).unwrap());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = HttpService::new(engine.clone(), http::Settings::default());
    tokio::spawn(http::server::run(listener, service, AcceptConfig::default()));
    (address, engine)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_scrapes_every_metric_that_alerts_and_dashboard_use() {
    let (address, engine) = serve().await;
    for _ in 0..3 {
        engine.decide(Transport::Http, &Request::new(Labels::default(), Cost::ONE)).await.unwrap();
    }
    let prometheus = Prometheus::start(address);
    wait::until("the server was scraped", wait::PATIENCE, || {
        !prometheus.query("sluicegate_build_info").is_empty()
    });

    let read: BTreeSet<String> = prometheus
        .get("/api/v1/label/__name__/values")
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect();
    let rules = prometheus.get("/api/v1/rules")["groups"][0]["rules"].clone();
    let rules = rules.as_array().unwrap();
    assert_eq!(rules.len(), alerts().len());
    let alerts: Vec<_> = rules.iter().map(|rule| rule["query"].as_str().unwrap()).collect();
    let expressions = dashboard_expressions();
    for name in metric_names(&alerts.join(" ")).into_iter().chain(metric_names(&expressions.join(" "))) {
        assert!(read.contains(&name), "{name} is queried but not exported");
    }
    // conversely, the dashboard uses every metric
    let shown = metric_names(&expressions.join(" "));
    let part = |name: &str| {
        ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end).map(str::to_owned))
    };
    let shown: BTreeSet<_> = shown.iter().map(|name| part(name).unwrap_or_else(|| name.clone())).collect();
    for name in read.iter().filter(|name| name.starts_with("sluicegate_")) {
        assert!(
            shown.contains(&part(name).unwrap_or_else(|| name.clone())),
            "{name} is not on the dashboard"
        );
    }
    for expression in &expressions {
        prometheus.query(expression);
    }

    let denied = prometheus.query(r#"sluicegate_decisions_total{outcome="denied",rule="login \"per\\ip\""}"#);
    assert_eq!(denied.len(), 1);
    assert_eq!(denied[0]["value"][1], "1");
    let types = prometheus.get("/api/v1/metadata?metric=sluicegate_decisions");
    assert_eq!(types["sluicegate_decisions"][0]["type"], "counter", "{types}");
    wait::until("each alert has been evaluated", wait::PATIENCE, || {
        let rules = prometheus.get("/api/v1/rules");
        rules["groups"][0]["rules"].as_array().unwrap().iter().all(|rule| rule["health"] == "ok")
    });
}
