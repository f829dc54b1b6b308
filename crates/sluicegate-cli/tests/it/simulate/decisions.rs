//! Decisions equal those of the server: computed by hand, and by the independent model.

use std::time::Duration;

use serde_json::{Value, json};
use sluicegate::{
    Algorithm, Cost, Limit, Timestamp,
    decision::Mode,
    limiter::Operation,
    store::{Admission, Check, Key, Terms, Tier, encoded_rule},
};
use sluicegate_testkit::model::Model;

use super::{Hit, START, TestDir, combined, rule, traffic};

#[test]
fn a_log_counted_by_hand_has_the_expected_report() {
    let rules = r#"
        [[rule]]
        name = "per-ip"
        per = ["ip"]
        algorithm = "fixed-window"
        amount = 3
        window = "1m"
    "#;
    let of = |ip: &str, seconds: &[u64]| -> Vec<Hit> {
        seconds.iter().map(|&second| Hit::new(second, ip, "/")).collect()
    };
    // three are allowed in each minute; 10.0.0.1 is denied at 30, 40, 50, then at 100; 10.0.0.2 at 59
    let mut hits = of("10.0.0.1", &[0, 10, 20, 30, 40, 50, 60, 70, 80, 100]);
    hits.extend(of("10.0.0.2", &[56, 57, 58, 59, 61]));
    hits.sort_by_key(|hit| hit.second);
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("access.log", combined(&hits));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);

    assert_eq!((&report["requests"], &report["rules"]["denied"]), (&json!(15), &json!(5)));
    assert_eq!(report["from"], "2026-11-16T04:54:00Z");
    assert_eq!(report["to"], "2026-11-16T04:55:40Z");
    let rule = rule(&report["rules"], "per-ip");
    assert_eq!((&rule["matched"], &rule["denied"]), (&json!(15), &json!(5)));
    assert_eq!(rule["denied_keys"], 2);
    assert_eq!(
        rule["worst"],
        json!([{"key": {"ip": "10.0.0.1"}, "requests": 4}, {"key": {"ip": "10.0.0.2"}, "requests": 1}])
    );
    let lockout = &rule["longest_lockout"];
    assert_eq!(lockout["key"], json!({"ip": "10.0.0.1"}));
    assert_eq!((&lockout["from"], &lockout["seconds"]), (&json!("2026-11-16T04:54:30Z"), &json!(20.0)));
    let denied: Vec<u64> = serde_json::from_value(report["timeline"]["denied"].clone()).unwrap();
    let at: Vec<usize> = (0..denied.len()).filter(|&second| denied[second] > 0).collect();
    assert_eq!(at, [30, 40, 50, 59, 100]);

    let text = dir.text(&["--config", "rules.toml", "--log", "access.log"]);
    assert!(text.contains("rules.toml denied 5 (33.3 %) of 15"), "{text}");
    assert!(text.contains("ip=10.0.0.1 (4)"), "{text}");
}

#[test]
fn concurrency_rules_are_skipped_and_listed() {
    let in_flight = "[[rule]]\nname = \"in-flight\"\nalgorithm = \"concurrency\"\namount = 1\n";
    let rate = "[[rule]]\nname = \"rate\"\nalgorithm = \"fixed-window\"\namount = 2\nwindow = \"1h\"\n";
    let hits = [0, 1, 2].map(|second| Hit::new(second, "10.0.0.1", "/"));
    let dir = TestDir::new();
    dir.write("access.log", combined(&hits)).write("rules.toml", format!("{in_flight}{rate}"));
    let arguments = ["--config", "rules.toml", "--log", "access.log", "--curve", "--html", "report.html"];
    let report = dir.json(&arguments);
    assert_eq!(
        (&report["rules"]["denied"], &report["rules"]["not_simulated"]),
        (&json!(1), &json!(["in-flight"]))
    );
    let note = "not simulated, because a log does not contain the times at which requests end: in-flight (concurrency)";
    let html = std::fs::read_to_string(dir.path("report.html")).unwrap();
    assert!(dir.text(&arguments).contains(note) && html.contains(note));
    dir.write("rules.toml", rate);
    assert!(dir.json(&arguments)["rules"].get("not_simulated").is_none());
    dir.write("rules.toml", in_flight);
    let error = dir.error(&arguments);
    assert!(error.contains("rules.toml has only concurrency rules: a log does not contain when"), "{error}");
}

#[test]
fn calendar_windows_end_at_midnight_of_their_zone() {
    let rules = |zone: &str| {
        format!(
            r#"
            [[rule]]
            name = "daily"
            algorithm = "fixed-window"
            amount = 2
            window = "1 day"
            zone = "{zone}"
            [[rule.override]]
            when = {{ ip = "10.0.0.2" }}
            amount = 1
            "#
        )
    };
    // the log starts at 04:54:00 UTC; it is midnight in New York six minutes later
    let mut hits: Vec<Hit> =
        [0, 1, 2, 359, 360, 361, 362].map(|second| Hit::new(second, "10.0.0.1", "/")).into();
    hits.push(Hit::new(363, "10.0.0.2", "/"));
    let dir = TestDir::new();
    dir.write("access.log", combined(&hits));
    for (zone, denied) in [("America/New_York", json!(4)), ("UTC", json!(6))] {
        dir.write("rules.toml", rules(zone));
        let report = dir.json(&["--config", "rules.toml", "--log", "access.log", "--curve"]);
        assert_eq!(report["rules"]["denied"], denied, "{zone}: {report}");
        let text = dir.text(&["--config", "rules.toml", "--log", "access.log"]);
        assert!(text.contains(&format!("2 per 1 day in {zone} (fixed-window)")), "{text}");
    }
}

/// The decisions of the model: the number of denials of each rule, including shadow rules, and the result of each hit.
struct ModelResult {
    by_rule: Vec<u64>,
    allowed: Vec<bool>,
}

/// Rules for the model: the `per` values and terms of a request, or none if the rule does not apply.
type Rules<'a> = &'a [(&'a str, &'a dyn Fn(&Hit) -> Option<(Vec<String>, Terms)>)];

fn run_model(rules: Rules<'_>, hits: &[Hit]) -> ModelResult {
    let mut model = Model::default();
    let mut expected = ModelResult { by_rule: vec![0; rules.len()], allowed: Vec::new() };
    for hit in hits {
        let mut places = Vec::new();
        let mut tiers = Vec::new();
        for (place, (name, applies)) in rules.iter().enumerate() {
            if let Some((values, terms)) = applies(hit) {
                let values: Vec<_> = values.iter().map(|value| Some(value.as_bytes())).collect();
                tiers.push(Tier { key: Key::of_rule(&encoded_rule(name), &values, None), terms });
                places.push(place);
            }
        }
        let now = Timestamp::from_micros((START + hit.second) * 1_000_000);
        let decision = &model.decide(&Check::new(Operation::Check, tiers).unwrap(), now)[0];
        for (place, share) in places.into_iter().zip(&decision.shares) {
            expected.by_rule[place] += u64::from(!share.passes);
        }
        expected.allowed.push(decision.granted);
    }
    expected
}

fn terms(algorithm: Algorithm, amount: u64, seconds: u64) -> Terms {
    Terms::new(Limit::new(algorithm, amount, Duration::from_secs(seconds)).unwrap(), Cost::ONE)
}

fn denied(allowed: &[bool]) -> u64 {
    allowed.iter().filter(|allowed| !**allowed).count() as u64
}

fn assert_matches_model(file: &Value, rules: Rules<'_>, expected: &ModelResult) {
    assert_eq!(file["denied"], denied(&expected.allowed));
    for ((name, _), denied) in rules.iter().zip(&expected.by_rule) {
        let report = rule(file, name);
        let reported = report["denied"].as_u64().unwrap() + report["shadow_denied"].as_u64().unwrap();
        assert_eq!(reported, *denied, "{name}");
    }
    assert!(expected.by_rule.iter().all(|denied| *denied > 0), "each rule should deny some requests");
}

/// All algorithms, overrides, factors, shadow and overdraft, all or none.
#[test]
fn random_traffic_is_decided_as_by_the_model() {
    let rules = r#"
        [[rule]]
        name = "login-log"
        when = { path = "/login" }
        per = ["ip"]
        algorithm = "sliding-log"
        amount = 4
        window = "10s"
        [[rule.override]]
        when = { ip = "203.0.113.1" }
        amount = 7

        [[rule]]
        name = "everything-counter"
        unless = { path = "/static/*" }
        algorithm = "sliding-counter"
        amount = 60
        window = "20s"
        cost = 2

        [[rule]]
        name = "static-window"
        when = { path = "/static/*" }
        per = ["ip", "path"]
        algorithm = "fixed-window"
        amount = 3
        window = "7s"
        [[rule.override]]
        when = { ip = "203.0.113.2" }
        unlimited = true

        [[rule]]
        name = "bucket"
        per = ["ip"]
        amount = 20
        window = "10s"
        burst = 5
        shadow = true

        [[rule]]
        name = "overdraft"
        when = { path = ["/search", "/login"] }
        per = ["path"]
        amount = 70
        window = "30s"
        burst = 10
        cost = 3
        overdraft = true
    "#;
    let log = |hit: &Hit| {
        let amount = if hit.ip == "203.0.113.1" { 7 } else { 4 };
        (hit.path == "/login").then(|| (vec![hit.ip.clone()], terms(Algorithm::SlidingLog, amount, 10)))
    };
    let counter = |hit: &Hit| {
        let terms = Terms { cost: Cost::from(2), ..terms(Algorithm::SlidingCounter, 60, 20) };
        (!hit.path.starts_with("/static/")).then_some((vec![], terms))
    };
    let window = |hit: &Hit| {
        let applies = hit.path.starts_with("/static/") && hit.ip != "203.0.113.2";
        let key = vec![hit.ip.clone(), hit.path.clone()];
        applies.then(|| (key, terms(Algorithm::FixedWindow, 3, 7)))
    };
    let bucket = |hit: &Hit| {
        let limit = Limit::token_bucket(20, Duration::from_secs(10)).unwrap().with_burst(5).unwrap();
        Some((vec![hit.ip.clone()], Terms { mode: Mode::Shadow, ..Terms::new(limit, Cost::ONE) }))
    };
    let overdraft = |hit: &Hit| {
        let limit = Limit::token_bucket(70, Duration::from_secs(30)).unwrap().with_burst(10).unwrap();
        let terms = Terms { admission: Admission::Overdraft, ..Terms::new(limit, Cost::from(3)) };
        (!hit.path.starts_with("/static/")).then(|| (vec![hit.path.clone()], terms))
    };
    let modelled: Rules<'_> = &[
        ("login-log", &log),
        ("everything-counter", &counter),
        ("static-window", &window),
        ("bucket", &bucket),
        ("overdraft", &overdraft),
    ];
    let dir = TestDir::new();
    dir.write("rules.toml", rules);
    for seed in 1..=2 {
        let hits = traffic(seed, 2_000);
        dir.write("access.log", combined(&hits));
        let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
        assert_matches_model(&report["rules"], modelled, &run_model(modelled, &hits));
    }
}

#[test]
fn differences_between_two_rule_files_are_counted_exactly() {
    let file = |algorithm: Algorithm, amount: u64| {
        format!(
            "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\nalgorithm = \"{algorithm}\"\namount = {amount}\nwindow = \"10s\"\n"
        )
    };
    let hits = traffic(4, 3_000);
    let expected = |algorithm, amount| {
        let applies = move |hit: &Hit| Some((vec![hit.ip.clone()], terms(algorithm, amount, 10)));
        run_model(&[("per-ip", &applies)], &hits)
    };
    let (now, before) = ((Algorithm::SlidingLog, 5), (Algorithm::FixedWindow, 4));
    let (new, old) = (expected(now.0, now.1), expected(before.0, before.1));
    let count = |new_allows: bool, old_allows: bool| {
        let pairs = new.allowed.iter().zip(&old.allowed);
        pairs.filter(|&(new, old)| (*new, *old) == (new_allows, old_allows)).count() as u64
    };
    let dir = TestDir::new();
    dir.write("new.toml", file(now.0, now.1))
        .write("old.toml", file(before.0, before.1))
        .write("access.log", combined(&hits));
    let report = dir.json(&["--config", "new.toml", "--against", "old.toml", "--log", "access.log"]);

    assert_eq!(report["rules"]["denied"], denied(&new.allowed));
    assert_eq!(report["against"]["denied"], denied(&old.allowed));
    let difference = &report["difference"];
    assert_eq!(difference["newly_denied"], count(false, true));
    assert_eq!(difference["no_longer_denied"], count(true, false));
    assert_eq!(difference["denied_by_both"], count(false, false));
    assert!(count(false, true) > 0 && count(true, false) > 0 && count(false, false) > 0);
    assert_eq!(difference["newly_by_rule"][0]["rule"], "per-ip");
    assert_eq!(difference["newly_by_rule"][0]["requests"], count(false, true));
    assert_eq!(difference["no_longer_by_rule"][0]["requests"], count(true, false));

    let text = dir.text(&["--config", "new.toml", "--against", "old.toml", "--log", "access.log"]);
    assert!(text.contains("new.toml against old.toml"), "{text}");
    assert!(text.contains("newly denied"), "{text}");
}

#[test]
fn units_are_read_from_the_log() {
    let rules = r#"
        [[rule]]
        name = "tokens"
        per = ["user"]
        unit = "tokens"
        algorithm = "sliding-log"
        amount = 1000
        window = "1m"
    "#;
    let lines = r#"{"ts":10,"user":"ann","usage":{"total":600}}
{"ts":11,"user":"ann","usage":{"total":600}}
{"ts":12,"user":"ann","usage":{"total":400}}
{"ts":13,"user":"ann"}
{"ts":14,"user":"ann","usage":{"total":1}}
{"ts":15,"user":"ben","usage":{"total":1001}}
{"ts":16,"user":"ben","usage":{"total":"many"}}
"#;
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("log.jsonl", lines);
    let report = dir.json(&["--config", "rules.toml", "--log", "log.jsonl", "--cost", "tokens=usage.total"]);
    let tokens = rule(&report["rules"], "tokens");
    assert_eq!((&tokens["matched"], &tokens["denied"]), (&json!(6), &json!(3)));
    assert_eq!(tokens["worst"][0], json!({"key": {"user": "ann"}, "requests": 2}));
    assert_eq!(report["lines"]["unreadable"], 1);
    let problem = report["lines"]["unreadable_first"][0]["problem"].as_str().unwrap();
    assert_eq!(problem, "expected a whole number of tokens in \"usage.total\"");
    let text = dir.text(&["--config", "rules.toml", "--log", "log.jsonl"]);
    assert!(text.contains("but no field is configured: set it with --cost tokens=FIELD"), "{text}");
}

#[test]
fn blocked_and_absent_requests_are_denied_and_charge_no_rule() {
    let rules = r#"
        [[rule]]
        name = "per-user"
        per = ["user"]
        absent = "deny"
        amount = 100
        window = "1m"
        [[rule.override]]
        when = { user = "eve" }
        blocked = true

        [[rule]]
        name = "all"
        algorithm = "fixed-window"
        amount = 2
        window = "1m"
    "#;
    let users = ["ann", "eve", "", "eve", "ann", "ann"];
    let lines: String = users.iter().map(|user| format!("60,{user}\n")).collect();
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("log.csv", format!("ts,user\n{lines}"));
    let report = dir.json(&["--config", "rules.toml", "--log", "log.csv"]);
    assert_eq!(report["rules"]["denied"], 4);
    assert_eq!(rule(&report["rules"], "per-user")["denied"], 3);
    assert_eq!(rule(&report["rules"], "per-user")["worst"][0]["key"], json!({"user": "eve"}));
    assert_eq!(rule(&report["rules"], "all")["denied"], 1);
}

#[test]
fn staggered_windows_start_as_on_the_server() {
    let rules = "[[rule]]\nname = \"w\"\nper = [\"ip\"]\nalgorithm = \"fixed-window\"\namount = 3\nwindow = \"10s\"\nstagger = true\n";
    let hits = traffic(5, 2_000);
    let applies = |hit: &Hit| {
        let key = Key::of_rule(&encoded_rule("w"), &[Some(hit.ip.as_bytes())], None);
        let phase = sluicegate::rules::staggered_phase(&key, 10_000_000);
        let limit = Limit::fixed_window(3, Duration::from_secs(10)).unwrap().with_phase(phase).unwrap();
        Some((vec![hit.ip.clone()], Terms::new(limit, Cost::ONE)))
    };
    let modelled: Rules<'_> = &[("w", &applies)];
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("access.log", combined(&hits));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log", "--curve=3"]);
    assert_matches_model(&report["rules"], modelled, &run_model(modelled, &hits));
    let w = rule(&report["rules"], "w");
    assert_eq!(w["curve"]["points"][0]["denied"], w["denied"]);
}

/// More overrides than are matched sequentially, and more paths than are cached.
#[test]
fn many_overrides_and_many_paths_are_distinguished() {
    let mut rules = String::from(
        "[[rule]]\nname = \"per-ip\"\nwhen = { path = \"/a*\" }\nper = [\"ip\"]\nalgorithm = \"fixed-window\"\namount = 1\nwindow = \"1h\"\n",
    );
    for n in 0..100 {
        rules += &format!("[[rule.override]]\nwhen = {{ ip = \"10.0.0.{n}\" }}\namount = {}\n", n + 2);
    }
    let mut hits = Vec::new();
    for n in 0..120 {
        hits.extend((0..110).map(|turn| Hit::new(0, &format!("10.0.0.{n}"), &format!("/a/{turn}"))));
        hits.push(Hit::new(0, &format!("10.0.0.{n}"), &format!("/b/{n}")));
    }
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("access.log", combined(&hits));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
    let admitted: u64 = (0..100).map(|n| n + 2).sum::<u64>() + 20;
    assert_eq!(rule(&report["rules"], "per-ip")["matched"], 120 * 110);
    assert_eq!(rule(&report["rules"], "per-ip")["denied"], 120 * 110 - admitted);
    assert_eq!(report["rules"]["unmatched"], 120);
}
