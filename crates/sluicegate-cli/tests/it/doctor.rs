//! The doctor on real servers: each problem is created and found, and a well-configured server has none.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

mod holds;

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    net::{SocketAddr, TcpListener},
    ops::Range,
    path::Path,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;
use sluicegate::{Algorithm, Cost, Labels, Limit, Limiter, RedisStore, Rule};
use sluicegate_testkit::{
    cluster,
    hammer::SkewedClock,
    sentinel::{self, NAME},
    server::{Flavor, Server, Setup},
    tls::ClientCertificates,
    wait,
};
use tempfile::TempDir;

const REDIS_PAGE: &str = include_str!("../../../../docs/redis.md");
const DOCTOR_PAGE: &str = include_str!("../../../../docs/doctor.md");

/// A counter of a rule that no configuration of these tests has.
const ORPHAN: &str = "sg1:{30d13f94}:token-bucket:gone:a";
/// A counter of the rule `login`.
const COUNTER: &str = "sg1:{30d13f94}:sliding-log:login:a";

const RULES: &str =
    "[[rule]]\nname = \"login\"\nper = [\"ip\"]\nalgorithm = \"sliding-log\"\namount = 10\nwindow = \"1m\"\n";

/// The recommended settings.
const RECOMMENDED_ARGS: [&str; 10] = [
    "--appendonly",
    "yes",
    "--maxmemory",
    "256mb",
    "--maxmemory-policy",
    "noeviction",
    "--min-replicas-to-write",
    "1",
    "--min-replicas-max-lag",
    "10",
];

fn doctor(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
    command.arg("doctor").args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SLUICEGATE_") {
            command.env_remove(name);
        }
    }
    // a directory without a configuration
    command.current_dir(env!("CARGO_TARGET_TMPDIR"));
    command
}

/// The JSON report and the exit code.
struct Diagnosis {
    code: i32,
    report: Value,
}

impl Diagnosis {
    fn of(command: &mut Command) -> Self {
        let output = command.arg("--json").output().unwrap();
        let text = String::from_utf8(output.stdout.clone()).unwrap();
        let report = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        Self { code: output.status.code().unwrap(), report }
    }

    fn findings(&self) -> &[Value] {
        self.report["findings"].as_array().unwrap()
    }

    /// Returns the ids of the findings with this severity.
    fn ids(&self, severity: &str) -> BTreeSet<&str> {
        let found = self.findings().iter().filter(|finding| finding["severity"] == severity);
        found.map(|finding| finding["id"].as_str().unwrap()).collect()
    }

    fn finding(&self, id: &str) -> &Value {
        let found = self.findings().iter().find(|finding| finding["id"] == id);
        found.unwrap_or_else(|| panic!("no {id} in {:#}", self.report))
    }

    /// Asserts a complete finding of severity problem, and exit code 1.
    fn assert_problem(&self, id: &str) {
        let finding = self.finding(id);
        assert_eq!(finding["severity"], "problem", "{finding:#}");
        for field in ["what", "why", "do", "see"] {
            assert!(finding[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {finding:#}");
        }
        assert_eq!(self.code, 1);
    }

    fn assert_none(&self, severity: &str) {
        assert_eq!(self.ids(severity), BTreeSet::new(), "{:#}", self.report);
    }
}

fn diagnose(server: &Server, arguments: &[&str]) -> Diagnosis {
    let url = server.url();
    Diagnosis::of(doctor(&["--store", &url]).args(arguments))
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8(output.stderr.clone()).unwrap()
}

fn set(server: &Server, key: &str, seconds: Option<u64>) {
    let mut command = redis::cmd("SET");
    command.arg(key).arg("x");
    if let Some(seconds) = seconds {
        command.arg("EX").arg(seconds);
    }
    command.exec(&mut server.connection()).unwrap();
}

fn ttl(server: &Server, key: &str) -> i64 {
    redis::cmd("TTL").arg(key).query(&mut server.connection()).unwrap()
}

fn config_dir(configuration: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("sluicegate.toml"), configuration).unwrap();
    dir
}

/// A configuration with [`RULES`] and this store.
fn rules_of(server: &Server) -> String {
    format!("[store]\nurl = \"{}\"\n{RULES}", server.url())
}

/// Creates a user as documented; returns its URL.
fn documented_user(server: &Server, page: &str, name: &str) -> String {
    let line = page.lines().find_map(|line| line.strip_prefix(&format!("user {name} "))).unwrap();
    server.set_user(name, &line.split(' ').collect::<Vec<_>>());
    let password = line.split_once('>').unwrap().1.split(' ').next().unwrap();
    format!("redis://{name}:{password}@{}", server.addr())
}

#[test]
fn the_recommended_setup_has_no_problems_and_the_doctors_user_can_check_everything() {
    for flavor in Flavor::ALL {
        let primary = Server::start_with(flavor, &RECOMMENDED_ARGS);
        let replica = Server::start(flavor);
        replica.replicate(&primary);
        wait::until("the replica is in sync", wait::PATIENCE, || {
            primary.info("min_slaves_good_slaves") == "1"
        });
        // only Valkey 9.1.2 has no known flaws by its version number
        let outdated: BTreeSet<&str> =
            if flavor == Flavor::Valkey9 { BTreeSet::new() } else { BTreeSet::from(["version"]) };

        let own = documented_user(&primary, REDIS_PAGE, "sluicegate");
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &own]));
        assert_eq!(
            (diagnosis.code, diagnosis.ids("advice")),
            (0, outdated.clone()),
            "{flavor}: {:#}",
            diagnosis.report
        );
        diagnosis.assert_none("problem");
        assert_eq!(diagnosis.finding("permissions")["severity"], "fine");
        assert_eq!(diagnosis.finding("excess-permissions")["severity"], "fine");
        assert_eq!(diagnosis.ids("unknown"), BTreeSet::from(["keys", "no-ttl", "settings"]));

        let doctors = documented_user(&primary, DOCTOR_PAGE, "sluicegate-doctor");
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &doctors, "--user", "sluicegate"]));
        assert_eq!(
            (diagnosis.code, diagnosis.ids("advice")),
            (0, outdated),
            "{flavor}: {:#}",
            diagnosis.report
        );
        diagnosis.assert_none("problem");
        match flavor {
            Flavor::Redis6 => assert_eq!(diagnosis.ids("unknown"), BTreeSet::from(["permissions"])),
            Flavor::Redis7 | Flavor::Valkey9 => diagnosis.assert_none("unknown"),
        }
        assert_eq!(diagnosis.report["servers"][0]["replicas"], 1);
        assert!(diagnosis.report["bound"].as_array().unwrap().iter().any(|row| {
            row["situation"] == "Redis restarts" && row["most"].as_str().unwrap().contains("last second")
        }));
    }
}

/// Windows that end during a test.
const SHORT_WINDOW: Duration = Duration::from_millis(500);

/// Charges counters of the rule `gone` by this limit, and sets a long TTL on them; returns their number.
async fn charge_orphans(server: &Server, limit: Limit, users: Range<u32>) -> usize {
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::new(store, [Rule::new("gone", limit).per(["user"])]).unwrap();
    for user in users.clone() {
        let labels = Labels::new([("user", user.to_string())]).unwrap();
        limiter.charge(&labels, 1).await.unwrap();
    }
    let expire = "for _, key in ipairs(redis.call('KEYS', '*:gone:*')) do redis.call('EXPIRE', key, 600) end";
    redis::cmd("EVAL").arg(expire).arg(0).exec(&mut server.connection()).unwrap();
    users.len()
}

fn size(server: &Server) -> usize {
    redis::cmd("DBSIZE").query(&mut server.connection()).unwrap()
}

#[test]
fn keys_without_ttl_are_fixed_and_foreign_keys_are_unchanged() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        set(&server, COUNTER, None);
        set(&server, "sg1:session:7", None);
        let dir = config_dir(&rules_of(&server));
        let config = dir.path().join("sluicegate.toml");
        let with_rules = ["--config", config.to_str().unwrap()];

        let diagnosis = diagnose(&server, &with_rules);
        diagnosis.assert_problem("no-ttl");
        assert!(diagnosis.finding("no-ttl")["what"].as_str().unwrap().contains(COUNTER));
        assert_eq!(diagnosis.finding("foreign-keys")["severity"], "advice");
        assert_eq!(ttl(&server, COUNTER), -1, "nothing is written without --fix");

        // stdin is not a terminal, so the fix is not confirmed
        let url = server.url();
        let unconfirmed = doctor(&["--store", &url, "--fix"]).args(with_rules).output().unwrap();
        assert!(text(&unconfirmed).contains("--yes"), "{}", text(&unconfirmed));
        assert_eq!(ttl(&server, COUNTER), -1);

        let diagnosis = diagnose(&server, &["--fix", "--yes", with_rules[0], with_rules[1]]);
        assert_eq!(diagnosis.finding("no-ttl")["severity"], "fine");
        assert_eq!(diagnosis.report["repaired"]["expiring"], 1);
        assert!((100..=130).contains(&ttl(&server, COUNTER)), "two windows and ten seconds");
        assert_eq!(ttl(&server, "sg1:session:7"), -1, "foreign key");
        assert_eq!(diagnose(&server, &with_rules).finding("no-ttl")["severity"], "fine");
        redis::cmd("DEL").arg("sg1:session:7").exec(&mut server.connection()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_counters_are_named_and_readable_ones_are_not() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let limiter = Limiter::new(RedisStore::connect(&server.url()).await.unwrap(), []).unwrap();
        for algorithm in Algorithm::WINDOWED {
            let limit = Limit::new(algorithm, 10, Duration::from_secs(600)).unwrap();
            limiter.check_key("readable", &limit, Cost::ONE).await.unwrap();
        }
        assert!(!diagnose(&server, &[]).ids("problem").contains("unreadable"));
        for algorithm in Algorithm::WINDOWED {
            let bad = |name: &str| format!("sg1:{{30d13f94}}:{algorithm}:!key:{name}");
            set(&server, &bad("text"), Some(600));
            let mut list = redis::pipe();
            list.rpush(bad("list"), "x").expire(bad("list"), 600);
            let () = list.query(&mut server.connection()).unwrap();
            let diagnosis = diagnose(&server, &["--fix", "--yes"]);
            diagnosis.assert_problem("unreadable");
            let what = diagnosis.finding("unreadable")["what"].as_str().unwrap();
            assert!(what.starts_with("2 counters cannot be read"), "{what}");
            assert!(what.contains(&bad("list")) && what.contains(&bad("text")), "{what}");
            let removed: u64 =
                redis::cmd("DEL").arg(bad("list")).arg(bad("text")).query(&mut server.connection()).unwrap();
            assert_eq!(removed, 2, "an unreadable counter is never removed by --fix");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_orphaned_counters_that_no_longer_count_are_removed() {
    let server = Server::start(Flavor::Redis7);
    let without_rule = "sg1:{30d13f94}:token-bucket:!key:a";
    // the value of ORPHAN is not a state of sluicegate
    for key in [ORPHAN, COUNTER, without_rule, "sg1:{instances}"] {
        set(&server, key, Some(600));
    }
    for number in 0..1_000 {
        set(&server, &format!("other:{number}"), Some(600));
    }
    let without = diagnose(&server, &[]);
    assert!(
        without.findings().iter().all(|finding| finding["id"] != "orphans"),
        "without rules, there are no orphans"
    );
    for algorithm in Algorithm::WINDOWED {
        let hour = Limit::new(algorithm, 100, Duration::from_secs(3_600)).unwrap();
        charge_orphans(&server, hour, 0..5).await;
        let short = Limit::new(algorithm, 100, SHORT_WINDOW).unwrap();
        charge_orphans(&server, short, 5..55).await;
    }
    tokio::time::sleep(2 * SHORT_WINDOW).await;

    let dir = config_dir(&rules_of(&server));
    let config = dir.path().join("sluicegate.toml");
    let config = config.to_str().unwrap();
    let diagnosis = diagnose(&server, &["--config", config]);
    assert_eq!(diagnosis.finding("orphans")["severity"], "advice");
    assert_eq!(diagnosis.report["keys"]["orphans"], 221);
    let memory = diagnosis.report["rules"].as_array().unwrap();
    let gone = memory.iter().find(|of_rule| of_rule["rule"] == "gone").unwrap();
    assert_eq!((&gone["keys"], &gone["sampled"]), (&221.into(), &20.into()));
    assert!(gone["bytes"].as_u64().unwrap() > 50 * 221, "{gone}");

    let diagnosis = diagnose(&server, &["--config", config, "--fix", "--yes"]);
    assert_eq!(diagnosis.report["repaired"]["removed"], 200);
    let finding = diagnosis.finding("orphans");
    assert_eq!(finding["severity"], "fine");
    let what = finding["what"].as_str().unwrap();
    assert!(what.ends_with("removed 200 orphaned counters; 21 are kept until they expire"), "{what}");
    assert_eq!(size(&server), 1_000 + 21 + 3, "foreign keys, orphans that count, and three own keys");
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_are_removed_only_by_the_given_configuration_of_their_store() {
    let (server, other) = (Server::start(Flavor::Redis7), Server::start(Flavor::Redis7));
    let short = Limit::token_bucket(100, SHORT_WINDOW).unwrap();
    let count = charge_orphans(&server, short, 0..10).await;
    tokio::time::sleep(SHORT_WINDOW).await;
    let url = server.url();
    let own = config_dir(&rules_of(&server));
    for unrelated in [RULES.to_owned(), rules_of(&other)] {
        let dir = config_dir(&unrelated);
        let file = dir.path().join("sluicegate.toml");
        for arguments in [&[][..], &["--config", file.to_str().unwrap()]] {
            let mut command = doctor(&["--store", &url, "--fix", "--yes"]);
            let diagnosis = Diagnosis::of(command.args(arguments).current_dir(dir.path()));
            assert_eq!(diagnosis.finding("orphans")["severity"], "unknown");
            assert_eq!((&diagnosis.report["keys"]["orphans"], size(&server)), (&0.into(), count));
        }
    }
    // found by default, but not given
    let diagnosis = Diagnosis::of(doctor(&["--fix", "--yes"]).current_dir(own.path()));
    assert_eq!((&diagnosis.finding("orphans")["severity"], size(&server)), (&"advice".into(), count));
    let file = own.path().join("sluicegate.toml");
    let diagnosis = Diagnosis::of(&mut doctor(&["--config", file.to_str().unwrap(), "--fix", "--yes"]));
    assert_eq!((&diagnosis.report["repaired"]["removed"], size(&server)), (&count.into(), 0));
}

#[test]
fn control_characters_in_key_names_are_escaped() {
    let server = Server::start(Flavor::Redis7);
    let clear = "\u{1b}[2J\u{9b}31m\u{7}";
    set(&server, &format!("sg1:{{30d13f94}}:token-bucket:{clear}gone:a"), None);
    set(&server, &format!("sg1:{clear}"), Some(600));
    let dir = config_dir(&rules_of(&server));
    let file = dir.path().join("sluicegate.toml");
    for extra in [&[][..], &["--json"], &["--fix", "--yes"]] {
        let mut command = doctor(&["--config", file.to_str().unwrap()]);
        let report = text(&command.args(extra).output().unwrap());
        assert!(report.chars().all(|c| c == '\n' || !c.is_control()), "{report:?}");
        assert!(report.contains("u{1b}[2J"), "{report}");
    }
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
}

#[test]
fn a_scan_stops_at_max_keys_and_reports_it() {
    let server = Server::start(Flavor::Redis7);
    for number in 0..2_000 {
        set(&server, &format!("other:{number}"), Some(600));
    }
    let diagnosis = diagnose(&server, &["--max-keys", "500"]);
    assert_eq!(diagnosis.finding("keys")["severity"], "unknown");
    assert_eq!(diagnosis.report["keys"]["complete"], false);
    assert_eq!(diagnose(&server, &[]).report["keys"]["complete"], true);
}

#[test]
fn eviction_is_found_before_and_after_keys_are_evicted() {
    let server = Server::start_with(Flavor::Redis7, &["--maxmemory-policy", "allkeys-lru"]);
    diagnose(&server, &[]).assert_problem("eviction-policy");
    server.config_set("maxmemory", "2mb");
    let mut connection = server.connection();
    for number in 0..2_000 {
        let mut command = redis::cmd("SET");
        command
            .arg(format!("sg1:{{{number:08x}}}:token-bucket:!key:a"))
            .arg("x".repeat(1_000))
            .arg("EX")
            .arg(600);
        command.exec(&mut connection).unwrap();
    }
    let diagnosis = diagnose(&server, &[]);
    diagnosis.assert_problem("evicted-keys");
    assert!(diagnosis.report["servers"][0]["evicted_keys"].as_u64().unwrap() > 0);
    let bound = diagnosis.report["bound"].to_string();
    assert!(bound.contains("one more quota for each evicted counter"), "{bound}");
}

#[test]
fn a_full_server_and_missing_replicas_are_reported_as_failing_decisions() {
    let server = Server::start(Flavor::Redis7);
    server.config_set("maxmemory", 1);
    let diagnosis = diagnose(&server, &[]);
    diagnosis.assert_problem("decisions");
    diagnosis.assert_problem("memory");
    assert!(diagnosis.finding("decisions")["what"].as_str().unwrap().contains("OOM"));
    server.config_set("maxmemory", 0);

    server.config_set("min-replicas-to-write", 1);
    let diagnosis = diagnose(&server, &[]);
    diagnosis.assert_problem("replicas");
    assert!(diagnosis.finding("decisions")["what"].as_str().unwrap().contains("NOREPLICAS"));
    server.config_set("min-replicas-to-write", 0);
}

#[test]
fn a_clock_that_is_ahead_or_behind_is_found() {
    let server = Server::start(Flavor::Redis7);
    assert_eq!(diagnose(&server, &[]).finding("clock")["severity"], "fine");
    for (offset_seconds, word) in [(3_600, "behind"), (-3_600, "ahead")] {
        let url = server.url();
        let mut command = doctor(&["--store", &url]);
        SkewedClock { offset_seconds, seconds_in_ten: 10 }.apply_to(&mut command);
        let diagnosis = Diagnosis::of(&mut command);
        diagnosis.assert_problem("clock");
        let what = diagnosis.finding("clock")["what"].as_str().unwrap();
        assert!(what.contains("3600 s") && what.contains(word), "{what}");
    }
}

#[test]
fn missing_and_excess_permissions_are_found() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let address = server.addr();
        let default_user = diagnose(&server, &[]);
        default_user.assert_problem("excess-permissions");
        default_user.assert_problem("no-password");

        server.set_user("powerful", &["on", ">pw", "~*", "+@all"]);
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &format!("redis://powerful:pw@{address}")]));
        diagnosis.assert_problem("excess-permissions");
        assert!(diagnosis.findings().iter().all(|finding| finding["id"] != "no-password"));

        let own = documented_user(&server, REDIS_PAGE, "sluicegate");
        server.set_user("sluicegate", &["+config|set"]);
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &own]));
        diagnosis.assert_problem("excess-permissions");
        assert!(
            diagnosis.finding("excess-permissions")["what"].as_str().unwrap().contains("config|set"),
            "{flavor}"
        );
        server.set_user("sluicegate", &["-config", "allkeys"]);
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &own]));
        assert_eq!(diagnosis.finding("excess-permissions")["severity"], "advice", "{flavor}");

        server.set_user("sluicegate", &["resetkeys", "~sg1:*", "-setrange", "-zadd"]);
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &own]));
        diagnosis.assert_problem("permissions");
        assert_eq!(diagnosis.finding("permissions")["do"], "ACL SETUSER NAME +setrange +zadd", "{flavor}");
        if flavor != Flavor::Redis6 {
            let diagnosis = diagnose(&server, &["--user", "sluicegate"]);
            diagnosis.assert_problem("permissions");
            assert_eq!(diagnosis.finding("permissions")["do"], "ACL SETUSER sluicegate +setrange +zadd");
            assert_eq!(diagnosis.finding("excess-permissions")["severity"], "fine");
        }
    }
}

#[test]
fn a_replica_is_not_accepted_as_a_store() {
    let (primary, replica) = (Server::start(Flavor::Redis7), Server::start(Flavor::Redis7));
    replica.replicate(&primary);
    diagnose(&replica, &[]).assert_problem("role");
    diagnose(&replica, &[]).assert_problem("decisions");
}

#[test]
fn sentinels_lead_to_the_primary_and_a_missing_replica_is_a_problem() {
    let args = ["--min-replicas-to-write", "1", "--maxmemory", "256mb"];
    let mut deployment = sentinel::Setup::new(Flavor::Redis7).args(&args).start();
    let addresses: Vec<String> =
        deployment.sentinels().iter().map(|sentinel| sentinel.addr().to_string()).collect();
    let url = format!("redis-sentinel://{}/{NAME}", addresses.join(","));
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
    assert_eq!(diagnosis.report["shape"], "sentinel");
    assert_eq!(diagnosis.finding("replicas")["severity"], "fine");
    // the sentinels of tests have a short timeout
    assert_eq!(diagnosis.finding("down-after")["severity"], "advice");
    assert!(diagnosis.findings().iter().all(|finding| finding["id"] != "min-replicas"));

    deployment.node_mut(1).kill();
    let primary = &deployment.nodes()[0];
    wait::until("the replica is disconnected", wait::PATIENCE, || primary.info("connected_slaves") == "0");
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
    diagnosis.assert_problem("replicas");

    let unknown_name = url.replace(NAME, "unknown");
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &unknown_name]));
    diagnosis.assert_problem("reachable");
    assert_eq!(diagnosis.finding("reachable")["see"], "docs/redis.md#sentinel");
}

#[test]
fn every_cluster_primary_is_checked_and_fixed_and_a_dead_one_is_reported() {
    let mut cluster = cluster::Setup::new(Flavor::Redis7).replicas(0).start();
    let url = format!("redis-cluster://{}", cluster.nodes()[0].addr());
    for node in 0..3 {
        let (tag, mut key) = (0_u32.., String::new());
        for number in tag {
            key = format!("sg1:{{{number:08x}}}:token-bucket:!key:a");
            if cluster.primary_of(cluster.slot_of(&key)) == Some(node) {
                break;
            }
        }
        set(&cluster.nodes()[node], &key, None);
    }
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
    assert_eq!(diagnosis.report["servers"].as_array().unwrap().len(), 3);
    assert_eq!(diagnosis.report["keys"]["without_ttl"], 3);
    diagnosis.assert_problem("no-ttl");
    diagnosis.assert_problem("replicas");
    assert_eq!(diagnosis.finding("permissions")["severity"], "fine");
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url, "--fix", "--yes"]));
    assert_eq!(diagnosis.report["repaired"]["expiring"], 3);

    let single = diagnose(&cluster.nodes()[0], &[]);
    single.assert_problem("cluster-as-one-server");

    cluster.node_mut(2).kill();
    let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
    diagnosis.assert_problem("reachable");
    assert_eq!(diagnosis.report["servers"].as_array().unwrap().len(), 2);
}

#[test]
fn an_unreachable_store_is_a_problem_with_a_remedy_and_without_a_password() {
    let server = Setup::new(Flavor::Redis7).password("right").start();
    let encrypted = Setup::new(Flavor::Redis7).tls(ClientCertificates::Ignored).start();
    let address = server.addr();
    for (url, see) in [
        ("redis://:s3cret@127.0.0.1:1".to_owned(), "docs/redis.md#troubleshooting"),
        (format!("redis://:s3cret@{address}"), "docs/redis.md#acl-user"),
        (format!("redis://{address}"), "docs/redis.md#acl-user"),
        (format!("redis-cluster://:right@{address}"), "docs/redis.md#cluster"),
        (format!("redis-sentinel://127.0.0.1:1/{NAME}"), "docs/redis.md#sentinel"),
        (format!("rediss://:s3cret@{address}"), "docs/redis.md#store-url"),
        (format!("redis://:s3cret@{}", encrypted.addr()), "docs/redis.md#store-url"),
        (format!("rediss://{}", encrypted.addr()), "docs/redis.md#store-url"),
        (format!("redis://:right@{address}/99"), "docs/redis.md#store-url"),
        (format!("redis://:s3cret@{}", start_non_redis_server()), "docs/redis.md#store-url"),
    ] {
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
        diagnosis.assert_problem("reachable");
        assert_eq!(diagnosis.finding("reachable")["see"], see, "{url}: {:#}", diagnosis.report);
        let shown = doctor(&["--store", &url]).output().unwrap();
        assert!(
            !text(&shown).contains("s3cret") && !diagnosis.report.to_string().contains("s3cret"),
            "{}",
            text(&shown)
        );
    }
    let positional = doctor(&["redis://:s3cret@127.0.0.1:1"]).output().unwrap();
    assert_eq!(positional.status.code(), Some(2));
    assert!(
        text(&positional).contains("--store URL") && !text(&positional).contains("s3cret"),
        "{}",
        text(&positional)
    );
    for wrong in ["http://:s3cret@h", "redis://:s3cret@h:port"] {
        let output = doctor(&["--store", wrong]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(
            text(&output).contains("redis-sentinel://") && !text(&output).contains("s3cret"),
            "{}",
            text(&output)
        );
    }
}

/// Starts a server that does not use the Redis protocol.
fn start_non_redis_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            // fails if the client has already closed the connection
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    address
}

#[test]
fn a_wrong_database_and_a_wrong_port_have_their_own_remedies() {
    let server = Server::start(Flavor::Redis7);
    for (url, what, remedy) in [
        (
            format!("{}/99", server.url()),
            "DB index is out of range",
            "the database number in the URL does not exist",
        ),
        (
            format!("redis://{}", start_non_redis_server()),
            "the server does not speak the Redis protocol",
            "correct host and port",
        ),
    ] {
        let diagnosis = Diagnosis::of(&mut doctor(&["--store", &url]));
        let finding = diagnosis.finding("reachable");
        let found = finding["what"].as_str().unwrap();
        assert!(found.contains(what) && found.lines().count() == 1, "{finding:#}");
        assert!(finding["do"].as_str().unwrap().contains(remedy), "{finding:#}");
    }
}

#[test]
fn a_tls_server_is_checked_with_the_configured_authority() {
    let server = Setup::new(Flavor::Redis7).tls(ClientCertificates::Ignored).start();
    let authority = server.tls().authority.display();
    let dir = config_dir(&format!("[store]\nurl = \"{}\"\nca = \"{authority}\"\n{RULES}", server.url()));
    let diagnosis = Diagnosis::of(doctor(&[]).current_dir(dir.path()));
    assert_eq!(diagnosis.report["servers"].as_array().unwrap().len(), 1);
    assert_eq!(diagnosis.finding("orphans")["severity"], "fine");
}

#[test]
fn a_memory_store_needs_no_diagnosis() {
    let output = doctor(&["--store", "memory:"]).output().unwrap();
    assert!(output.status.success() && text(&output).contains("no store to examine"), "{}", text(&output));
    assert_eq!(Diagnosis::of(&mut doctor(&[])).finding("store")["severity"], "fine");
    let unconfirmable = doctor(&["--fix", "--json"]).output().unwrap();
    assert_eq!(unconfirmable.status.code(), Some(2));
}

#[test]
fn text_output_states_finding_reason_and_remedy() {
    let server = Server::start(Flavor::Redis7);
    set(&server, COUNTER, Some(600));
    let url = server.url();
    let output = doctor(&["--store", &url]).output().unwrap();
    let report = text(&output);
    for part in [
        "problem  the user \"default\" has all commands and all keys [excess-permissions]",
        "why a leaked password",
        "see docs/redis.md#acl-user",
        "50 round trips",
        "Memory by rule",
        "Maximum admitted in any window",
        "3 problems, ",
    ] {
        assert!(report.contains(part), "{part:?} is not in\n{report}");
    }
    assert!(!report.contains('\u{1b}'), "colours are for terminals");
    let is_empty = |line: &str| matches!(line.trim(), "why" | "do" | "see");
    assert!(!report.lines().any(is_empty), "a finding without details takes one line:\n{report}");
}

#[test]
fn the_page_documents_every_finding_and_every_link_resolves() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/doctor");
    let mut text = String::new();
    for directory in [sources.clone(), sources.join("checks")] {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                text += fs::read_to_string(path).unwrap().split("#[cfg(test)]").next().unwrap();
            }
        }
    }
    let compact: String = text.split_whitespace().collect();
    let mut ids = BTreeSet::new();
    for call in ["problem(\"", "advice(\"", "unknown(\"", "fine(\"", "finding(\""] {
        ids.extend(compact.split(call).skip(1).map(|rest| rest.split('"').next().unwrap()));
    }
    assert!(ids.len() > 25, "{ids:?}");
    for id in ids {
        assert!(DOCTOR_PAGE.contains(&format!("`{id}`")), "docs/doctor.md does not explain {id}");
    }
    let anchor = |heading: &str| {
        let kept = heading.to_lowercase().replace(' ', "-");
        kept.chars().filter(|c| c.is_alphanumeric() || *c == '-' || *c == '_').collect::<String>()
    };
    for (name, page) in [("redis", REDIS_PAGE), ("doctor", DOCTOR_PAGE)] {
        let headings: BTreeSet<String> = page
            .lines()
            .filter(|line| line.starts_with('#'))
            .map(|line| anchor(line.trim_start_matches(['#', ' '])))
            .collect();
        let prefix = format!("\"docs/{name}.md#");
        for link in text.split(&prefix).skip(1).map(|rest| rest.split('"').next().unwrap()) {
            assert!(headings.contains(link), "docs/{name}.md has no {link}: {headings:?}");
        }
    }
}
