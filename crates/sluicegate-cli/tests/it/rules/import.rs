//! envoyproxy/ratelimit's own test scenarios, run against a real server with the imported rules.

use std::time::{Duration, SystemTime};

use sluicegate_server::grpc::messages::{
    Code, RateLimitDescriptor, RateLimitRequest, RateLimitResponse, Unit, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use sluicegate_testkit::wait::{PATIENCE, until};
use tonic::transport::{Channel, Endpoint};

use crate::{
    command::{CommandOutput, run, sluicegate},
    server_process::{ANY_PORTS, ConfigDir, ServerProcess},
};

const BASIC: &str = "
domain: basic
descriptors:
  - key: key1
    rate_limit: { unit: second, requests_per_unit: 50 }
  - key: one_per_minute
    rate_limit: { unit: minute, requests_per_unit: 1 }
";

const ANOTHER: &str = "
domain: another
descriptors:
  - key: key2
    rate_limit: { unit: minute, requests_per_unit: 20 }
  - key: key3
    rate_limit: { unit: hour, requests_per_unit: 10 }
  - key: key4
    rate_limit: { unit: day, requests_per_unit: 20 }
";

const SHARED: &str = "
domain: share-threshold-test
descriptors:
  - key: files
    value: files/*
    share_threshold: true
    rate_limit: { unit: hour, requests_per_unit: 10 }
  - key: files_no_share
    value: files_no_share/*
    rate_limit: { unit: hour, requests_per_unit: 10 }
";

const RELOADED: &str = "
domain: reload
descriptors:
  - key: key1
    rate_limit: { unit: second, requests_per_unit: 50 }
  - key: block
    rate_limit: { unit: second, requests_per_unit: 0 }
  - key: one_per_minute
    rate_limit: { unit: minute, requests_per_unit: 1 }
";

/// Limits of every size that the counting vectors need, and other valid content.
const VECTORS: &str = "
domain: vectors
descriptors:
  - key: of8
    rate_limit: { unit: year, requests_per_unit: 8 }
  - key: of10
    rate_limit: { unit: year, requests_per_unit: 10 }
  - key: of15
    rate_limit: { unit: month, requests_per_unit: 15 }
  - key: of20
    rate_limit: { unit: week, requests_per_unit: 20 }
  - key: plan
    value: free
    descriptors:
      - key: user
        rate_limit: { unit: day, requests_per_unit: 2, name: free-per-user }
      - key: user
        value: admin
        rate_limit: { unlimited: true }
  - key: plan
    rate_limit: { unit: day, requests_per_unit: 3 }
  - key: tried
    shadow_mode: true
    rate_limit: { unit: day, requests_per_unit: 1 }
";

/// A server with the imported rules of these files.
struct Imported {
    home: ConfigDir,
    server: ServerProcess,
    client: RateLimitServiceClient<Channel>,
}

/// A status: code, remaining units, limit.
type StatusSummary = (Code, u32, Option<(u32, Unit)>);

fn import(home: &ConfigDir, files: &[(&str, &str)]) -> CommandOutput {
    let paths = files.iter().map(|(name, yaml)| home.write(name, yaml));
    run(sluicegate(&["rules", "import", "envoy"]).args(paths))
}

/// Returns the imported rules; asserts that only ambiguous keys are reported.
fn toml(home: &ConfigDir, files: &[(&str, &str)]) -> String {
    let CommandOutput { code, out, err } = import(home, files);
    assert!(code.is_some_and(|code| code < 2) && err.lines().all(|line| line.ends_with(NOT_JOINED)), "{err}");
    format!("{out}\n{ANY_PORTS}")
}

const NOT_JOINED: &str = "sluicegate does not join keys and values";

impl Imported {
    async fn start(files: &[(&str, &str)]) -> Self {
        let home = ConfigDir::new("");
        home.write("sluicegate.toml", toml(&home, files));
        let server = home.start();
        let endpoint = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap();
        let client = RateLimitServiceClient::new(endpoint.connect().await.unwrap());
        Self { home, server, client }
    }

    async fn send(&mut self, domain: &str, descriptors: &[&[(&str, &str)]], hits: u32) -> RateLimitResponse {
        let entry =
            |(key, value): &(&str, &str)| Entry { key: (*key).to_owned(), value: value.as_bytes().to_vec() };
        let descriptor = |entries: &&[(&str, &str)]| RateLimitDescriptor {
            entries: entries.iter().map(entry).collect(),
            ..RateLimitDescriptor::default()
        };
        let descriptors = descriptors.iter().map(descriptor).collect();
        let request = RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: hits };
        self.client.should_rate_limit(request).await.unwrap().into_inner()
    }

    /// Returns the overall code and each status.
    async fn summaries(
        &mut self,
        domain: &str,
        descriptors: &[&[(&str, &str)]],
    ) -> (Code, Vec<StatusSummary>) {
        let response = self.send(domain, descriptors, 0).await;
        let short = |status: &sluicegate_server::grpc::messages::DescriptorStatus| {
            let limit = status.current_limit.as_ref().map(|limit| (limit.requests_per_unit, limit.unit()));
            (status.code(), status.limit_remaining, limit)
        };
        (response.overall_code(), response.statuses.iter().map(short).collect())
    }
}

/// Waits until enough of the current minute is left, because the end of a window resets its counters.
async fn wait_for_enough_of_a_minute() {
    const ENOUGH: u64 = 20;
    let second = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() % 60;
    if second > 60 - ENOUGH {
        tokio::time::sleep(Duration::from_secs(61 - second)).await;
    }
}

#[tokio::test]
async fn the_scenarios_of_the_original_have_the_same_results() {
    wait_for_enough_of_a_minute().await;
    let mut imported =
        Imported::start(&[("basic.yaml", BASIC), ("another.yaml", ANOTHER), ("shared.yaml", SHARED)]).await;
    let ok = Code::Ok;
    let over = Code::OverLimit;

    // an unknown domain
    assert_eq!(imported.summaries("foo", &[&[("hello", "world")]]).await, (ok, vec![(ok, 0, None)]));
    // one request
    assert_eq!(
        imported.summaries("basic", &[&[("key1", "foo")]]).await,
        (ok, vec![(ok, 49, Some((50, Unit::Second)))])
    );
    // an exhausted limit
    let limit = Some((20, Unit::Minute));
    for call in 0..25_u32 {
        let expected =
            if call < 20 { (ok, vec![(ok, 19 - call, limit)]) } else { (over, vec![(over, 0, limit)]) };
        assert_eq!(imported.summaries("another", &[&[("key2", "first")]]).await, expected, "call {call}");
    }
    // two descriptors: all or none, so that the first keeps its ten units
    let hour = Some((10, Unit::Hour));
    for call in 0..15_u32 {
        let expected = match call {
            0..10 => (ok, vec![(ok, 19 - call, limit), (ok, 9 - call, hour)]),
            _ => (over, vec![(ok, 10, limit), (over, 0, hour)]),
        };
        let both: [&[_]; 2] = [&[("key2", "second")], &[("key3", "second")]];
        assert_eq!(imported.summaries("another", &both).await, expected, "call {call}");
    }
    // a descriptor with more or fewer entries than its rule has no limit
    for entries in [&[("key2", "second"), ("key3", "second")][..], &[("unknown", "x")]] {
        assert_eq!(imported.summaries("another", &[entries]).await, (ok, vec![(ok, 0, None)]));
    }
    // one counter for all files, or one for each
    for _ in 0..10 {
        assert_eq!(imported.summaries("share-threshold-test", &[&[("files", "files/a.pdf")]]).await.0, ok);
    }
    let last = imported.summaries("share-threshold-test", &[&[("files", "files/b.csv")]]).await;
    assert_eq!(last, (over, vec![(over, 0, hour)]));
    for number in 0..10 {
        let name = format!("files_no_share/{number}");
        let each = imported.summaries("share-threshold-test", &[&[("files_no_share", &name)]]).await;
        assert_eq!(each, (ok, vec![(ok, 9, hour)]));
    }
    assert_eq!(
        imported.summaries("share-threshold-test", &[&[("files", "other/a")]]).await,
        (ok, vec![(ok, 0, None)])
    );
}

#[tokio::test]
async fn a_window_ends_after_its_duration() {
    let mut imported = Imported::start(&[("another.yaml", ANOTHER)]).await;
    let mut until_reset = async || {
        let response = imported.send("another", &[&[("key4", "d")]], 0).await;
        response.statuses[0].duration_until_reset.unwrap().seconds
    };
    let (first, day) = (until_reset().await, 86_400);
    let left = day - i64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs()).unwrap() % day;
    assert!((left - first).abs() <= 5, "{first} s are left of a day that ends in {left} s");
}

#[tokio::test]
async fn adding_and_removing_a_file_adds_and_removes_its_limits() {
    let mut imported = Imported::start(&[("basic.yaml", BASIC)]).await;
    let (ok, none) = (Code::Ok, vec![(Code::Ok, 0, None)]);
    let block: &[_] = &[("block", "foo")];
    assert_eq!(imported.summaries("reload", &[block]).await, (ok, none.clone()));
    let loaded = |server: &ServerProcess| {
        server.metric("sluicegate_config_reloads_total{result=\"success\"}").parse::<u64>().unwrap()
    };
    let before = loaded(&imported.server);

    let both = toml(&imported.home, &[("basic.yaml", BASIC), ("reload.yaml", RELOADED)]);
    imported.home.write("sluicegate.toml", both);
    until("the new rules are active", PATIENCE, || loaded(&imported.server) > before);
    let key1 = imported.summaries("reload", &[&[("key1", "foo")]]).await;
    assert_eq!(key1, (ok, vec![(ok, 49, Some((50, Unit::Second)))]));
    assert_eq!(imported.summaries("reload", &[block]).await.0, Code::OverLimit);

    let before = loaded(&imported.server);
    let one = toml(&imported.home, &[("basic.yaml", BASIC)]);
    imported.home.write("sluicegate.toml", one);
    until("the old rules are active", PATIENCE, || loaded(&imported.server) > before);
    assert_eq!(imported.summaries("reload", &[block]).await, (ok, none));
}

#[tokio::test]
async fn the_counting_vectors_of_the_original_have_the_same_results() {
    let mut imported = Imported::start(&[("vectors.yaml", VECTORS)]).await;
    // limit, count before, hits, whether they are allowed, remaining units in the original. One vector is omitted: it
    // starts with a count above its limit, which is only possible if denied hits are counted.
    let vectors = [
        (10, 4, 1, true, 5),
        (15, 10, 1, true, 4),
        (15, 12, 1, true, 2),
        (15, 15, 1, false, 0),
        (20, 2, 3, true, 15),
        (8, 5, 2, true, 1),
        (20, 16, 3, true, 1),
        (20, 19, 3, false, 0),
        (20, 15, 7, false, 0),
    ];
    for (limit, before, hits, passes, remains) in vectors {
        let (key, value) = (format!("of{limit}"), format!("{before}+{hits}"));
        let entries: &[_] = &[(key.as_str(), value.as_str())];
        assert_eq!(imported.send("vectors", &[entries], before).await.overall_code(), Code::Ok);
        let response = imported.send("vectors", &[entries], hits).await;
        let status = &response.statuses[0];
        let code = if passes { Code::Ok } else { Code::OverLimit };
        assert_eq!((response.overall_code(), status.code()), (code, code), "{limit}, {before}, {hits}");
        // a denied hit is not counted here
        let remains = if passes { remains } else { limit - before };
        assert_eq!(status.limit_remaining, remains, "{limit}, {before}, {hits}");
    }
}

#[tokio::test]
async fn values_with_their_own_node_are_not_counted_by_another() {
    let mut imported = Imported::start(&[("vectors.yaml", VECTORS)]).await;
    let (ok, over) = (Code::Ok, Code::OverLimit);
    let day = |amount| Some((amount, Unit::Day));
    let free = |user| [("plan", "free"), ("user", user)];
    for expected in [(ok, 1), (ok, 0), (over, 0)] {
        let ann = imported.summaries("vectors", &[&free("ann")]).await;
        assert_eq!(ann, (expected.0, vec![(expected.0, expected.1, day(2))]));
        assert_eq!(imported.summaries("vectors", &[&free("admin")]).await, (ok, vec![(ok, 0, None)]));
        // a plan with its own node has no limit; the others have one each
        assert_eq!(imported.summaries("vectors", &[&[("plan", "free")]]).await, (ok, vec![(ok, 0, None)]));
    }
    let response = imported.send("vectors", &[&free("bob")], 0).await;
    assert_eq!(response.statuses[0].current_limit.as_ref().unwrap().name, "free-per-user");
    for (plan, remains) in [("gold", 2), ("silver", 2), ("gold", 1)] {
        assert_eq!(
            imported.summaries("vectors", &[&[("plan", plan)]]).await,
            (ok, vec![(ok, remains, day(3))])
        );
    }
    for _ in 0..3 {
        assert_eq!(imported.summaries("vectors", &[&[("tried", "x")]]).await.0, ok);
    }
}

#[test]
fn differences_are_reported_and_written_as_comments() {
    let home = ConfigDir::new("");
    let yaml = "
domain: d
descriptors:
  - key: path
    value: '*/admin'
    rate_limit: { unit: minute, requests_per_unit: 1 }
  - key: \"odd \\\"key\\\"\\n[[rule]]\"
    value: \"a\\nname = 1\"
    quota_mode: true
    rate_limit: { unit: minute, requests_per_unit: 5 }
  - key: ip
    rate_limit: { unit: minute, requests_per_unit: 5 }
";
    let imported = import(&home, &[("d.yaml", yaml)]);
    assert_eq!(imported.code, Some(1), "{imported:?}");
    assert_eq!(imported.err.lines().count(), 2, "{}", imported.err);
    assert!(
        imported.err.starts_with(
            "difference: d/path=*/admin: skipped: only a \"*\" at the end of a value is supported"
        ),
        "{imported:?}"
    );
    assert!(
        imported.out.contains("# Differences from envoyproxy/ratelimit:\n# d/path=*/admin: skipped: only"),
        "{}",
        imported.out
    );
    assert!(imported.out.contains("# IPv6 addresses in ip are counted by /64 network"), "{}", imported.out);
    // the generated file is read back with the same meaning
    let path = home.write("sluicegate.toml", &imported.out);
    let checked = run(sluicegate(&["rules", "check", "--json"]).arg(&path)).json();
    assert_eq!((checked.0, checked.1["rules"].as_u64()), (Some(0), Some(2)), "{}", imported.out);
    let explained = run(sluicegate(&["rules", "explain"])
        .arg(&path)
        .args(["domain=d", "odd \"key\"\n[[rule]]=a\nname = 1"]));
    assert!(explained.out.starts_with("1 of 2 rules applies"), "{explained:?}");

    let (code, report) =
        run(sluicegate(&["--json", "rules", "import", "envoy"]).arg(home.path().join("d.yaml"))).json();
    assert_eq!(
        (code, report["rules"].as_u64(), report["remarks"].as_array().unwrap().len()),
        (Some(1), Some(2), 2)
    );
    assert_eq!(report["toml"], imported.out);
}

#[test]
fn files_that_envoy_rejects_are_rejected() {
    let home = ConfigDir::new("");
    let table = [
        (vec![("a.yaml", "domain: ''")], "a.yaml: config file cannot have empty domain"),
        (vec![("a.yaml", "domain: a\nfoo: 1")], "a.yaml:2:1: unknown field `foo`"),
        (vec![("a.yaml", BASIC), ("b.yaml", BASIC)], "b.yaml: duplicate domain \"basic\" in config file"),
    ];
    for (files, part) in table {
        let failed = import(&home, &files);
        assert_eq!((failed.code, &*failed.out), (Some(2), ""), "{failed:?}");
        assert!(failed.err.starts_with("sluicegate: ") && failed.err.contains(part), "{failed:?}");
    }
    let missing = run(&mut sluicegate(&["rules", "import", "envoy", "nowhere.yaml"]));
    assert!(
        missing.code == Some(2) && missing.err.contains("cannot read nowhere.yaml: No such file"),
        "{missing:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn imported_addresses_are_counted_by_network_unless_rules_match_single_ones() {
    let yaml = "
domain: edge
descriptors:
  - key: remote_address
    rate_limit: { unit: day, requests_per_unit: 1 }
  - key: ip
    rate_limit: { unit: day, requests_per_unit: 1 }
  - key: ip
    value: 2001:db8::1
    rate_limit: { unlimited: true }
";
    let mut imported = Imported::start(&[("edge.yaml", yaml)]).await;
    let mut codes = async |key: &str| {
        let mut codes = Vec::new();
        for address in ["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1"] {
            codes.push(imported.send("edge", &[&[(key, address)]], 1).await.overall_code());
        }
        codes
    };
    assert_eq!(codes("remote_address").await, [Code::Ok, Code::OverLimit, Code::OverLimit, Code::Ok]);
    assert_eq!(codes("ip").await, [Code::Ok; 4], "one is unlimited, the others are counted as text");
    let toml = imported.home.path().join("sluicegate.toml");
    let toml = std::fs::read_to_string(toml).unwrap();
    assert!(toml.contains("# IPv6 addresses in remote_address are counted by /64 network"), "{toml}");
    assert!(toml.contains("[labels]\nip = { kind = \"text\" }\n"), "{toml}");
}
