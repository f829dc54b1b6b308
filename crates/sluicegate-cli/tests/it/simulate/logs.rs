//! Log formats, unreadable lines, merging and order of logs.

use std::io::Write;

use serde_json::{Value, json};

use super::{Hit, START, TestDir, combined, rule, traffic};

const RULES: &str = r#"
    [[rule]]
    name = "login"
    when = { path = "/login" }
    per = ["ip"]
    algorithm = "sliding-log"
    amount = 3
    window = "10s"
"#;

/// The results that do not depend on the log format.
fn comparable(report: &Value) -> Value {
    let login = rule(&report["rules"], "login");
    json!([
        report["requests"],
        report["from"],
        report["to"],
        login["matched"],
        login["denied"],
        login["worst"]
    ])
}

fn lines(hits: &[Hit], line: impl Fn(&Hit) -> String) -> String {
    hits.iter().map(|hit| line(hit) + "\n").collect()
}

#[test]
fn the_result_is_the_same_in_every_format() {
    let hits = traffic(1, 2_000);
    let dir = TestDir::new();
    dir.write("rules.toml", RULES).write("combined", combined(&hits));
    let expected = comparable(&dir.json(&["--config", "rules.toml", "--log", "combined"]));
    assert_eq!(expected[0], 2_000);
    assert!(expected[4].as_u64().unwrap() > 50, "{expected}");

    let common = lines(&hits, |hit| {
        format!(
            "{} - - [{}] \"GET {} HTTP/1.1\" 200 -",
            hit.ip,
            hit.time("%d/%b/%Y:%H:%M:%S +0000"),
            hit.path
        )
    });
    let nginx = lines(&hits, |hit| {
        let request = format!("GET {}?a=b HTTP/2.0", hit.path);
        json!({"time_iso8601": hit.time("%Y-%m-%dT%H:%M:%S+00:00"), "remote_addr": hit.ip, "request": request}).to_string()
    });
    let caddy = lines(&hits, |hit| {
        let request = json!({"remote_ip": hit.ip, "method": "GET", "uri": format!("{}?a=b", hit.path)});
        json!({"level": "info", "ts": (START + hit.second) as f64 + 0.0, "request": request, "status": 200})
            .to_string()
    });
    let csv = lines(&hits, |hit| format!("{},\"{}\",{},x", (START + hit.second) * 1_000, hit.ip, hit.path));
    let csv = format!("timestamp,client_ip,url,\"other\"\r\n{}", csv.replace('\n', "\r\n"));
    let odd = lines(&hits, |hit| format!("{};{};{}", hit.time("%Y%m%d %H%M%S"), hit.ip, hit.path));
    let odd = format!("when;who;what\n{odd}");
    for (name, log, flags) in [
        ("common", common, &[][..]),
        ("nginx.json", nginx, &[]),
        ("caddy.json", caddy, &[]),
        ("csv", csv, &[]),
        (
            "odd.csv",
            odd,
            &[
                "--time",
                "when",
                "--time-format",
                "%Y%m%d %H%M%S",
                "--field",
                "ip=who",
                "--field",
                "path=what",
            ],
        ),
    ] {
        dir.write(name, &log);
        let arguments: Vec<_> =
            ["--config", "rules.toml", "--log", name].iter().chain(flags).copied().collect();
        assert_eq!(comparable(&dir.json(&arguments)), expected, "{name}");
        let arguments: Vec<_> =
            ["--config", "rules.toml", "--log", "-"].iter().chain(flags).copied().collect();
        assert_eq!(
            comparable(&dir.json_from_stdin(&arguments, log.as_bytes())),
            expected,
            "{name} by standard input"
        );
    }
}

#[test]
fn a_gzip_log_is_decompressed() {
    let hits = traffic(1, 500);
    let dir = TestDir::new();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(combined(&hits).as_bytes()).unwrap();
    dir.write("rules.toml", RULES).write("log", combined(&hits)).write("log.gz", packed.finish().unwrap());
    let of = |log| comparable(&dir.json(&["--config", "rules.toml", "--log", log]));
    assert_eq!(of("log.gz"), of("log"));
}

#[test]
fn several_logs_are_merged_by_time() {
    let hits = traffic(2, 2_000);
    let dir = TestDir::new();
    let every_third =
        |first: usize| combined(&hits.iter().skip(first).step_by(3).cloned().collect::<Vec<_>>());
    dir.write("rules.toml", RULES).write("log", combined(&hits));
    dir.write("a", every_third(0)).write("b", every_third(1)).write("c", every_third(2));
    let whole = dir.json(&["--config", "rules.toml", "--log", "log"]);
    let merged = dir.json(&["--config", "rules.toml", "--log", "c", "a", "b"]);
    assert_eq!(merged["lines"]["out_of_order"], 0);
    // among keys with equal counts, the first one is the worst hit
    assert_eq!(comparable(&merged).as_array().unwrap()[..5], comparable(&whole).as_array().unwrap()[..5]);
}

#[test]
fn unreadable_lines_are_counted_and_the_first_are_shown() {
    let good = Hit::new(0, "203.0.113.9", "/login").combined();
    let mut log = String::new();
    for number in 1..=20 {
        log += if number % 2 == 1 { &good } else { "\u{1b}[31mnonsense\n" };
    }
    log += "\n\n203.0.113.9 - - [32/Nov/2026:04:54:28 +0000] \"GET / HTTP/1.1\" 200 1";
    let dir = TestDir::new();
    dir.write("rules.toml", RULES).write("access.log", &log);
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
    assert_eq!((&report["lines"]["read"], &report["lines"]["unreadable"]), (&json!(10), &json!(11)));
    let first = report["lines"]["unreadable_first"].as_array().unwrap();
    assert_eq!(first.len(), 5);
    assert_eq!((&first[0]["log"], &first[0]["line"]), (&json!("access.log"), &json!(2)));
    assert!(first[0]["problem"].as_str().unwrap().contains("ADDRESS - USER [TIME]"), "{first:?}");
    let text = dir.text(&["--config", "rules.toml", "--log", "access.log"]);
    assert!(
        text.contains("11 lines (52.4 %) could not be read:\n  access.log:2: expected ADDRESS"),
        "{text}"
    );
    assert!(!text.contains('\u{1b}'), "what a log holds does not reach the terminal: {text:?}");

    dir.write("late.log", format!("{good}{}", log.lines().last().unwrap()));
    let report = dir.json(&["--config", "rules.toml", "--log", "late.log"]);
    let problem = report["lines"]["unreadable_first"][0]["problem"].as_str().unwrap();
    assert!(problem.contains("a time such as 16/Nov/2026:04:54:28 +0000"), "{problem}");
}

#[test]
fn control_characters_of_a_log_are_replaced() {
    let dir = TestDir::new();
    let line = r#"{"ts":1,"path":"/login","ip":"\u001b[31mred"}"#;
    dir.write("rules.toml", RULES).write("log.jsonl", format!("{line}\n").repeat(5));
    let text = dir.text(&["--config", "rules.toml", "--log", "log.jsonl"]);
    assert!(text.contains("ip=\u{fffd}[31mred (2)"), "{text:?}");
}

#[test]
fn an_endless_line_is_one_unreadable_line() {
    let good = Hit::new(0, "203.0.113.9", "/login").combined();
    let log = [good.as_bytes(), &vec![b'x'; 1 << 20], b"\n", good.as_bytes()].concat();
    let dir = TestDir::new();
    dir.write("rules.toml", RULES).write("access.log", log);
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
    assert_eq!((&report["lines"]["read"], &report["lines"]["unreadable"]), (&json!(2), &json!(1)));
}

#[test]
fn the_clock_never_runs_backwards() {
    // the third line is late: at the time of the second, it is the fourth in ten seconds and denied
    let seconds = [0, 1, 1, 9, 2, 10, 11];
    let hits: Vec<_> = seconds.iter().map(|&second| Hit::new(second, "203.0.113.9", "/login")).collect();
    let dir = TestDir::new();
    dir.write("rules.toml", RULES).write("access.log", combined(&hits));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
    assert_eq!(report["lines"]["out_of_order"], 1);
    assert_eq!(report["lines"]["furthest_back_seconds"], 7.0);
    // 0, 1, 1 are allowed; 9 and the late one (at 9) are denied; 10 and 11 are allowed, because 0 and 1 have expired
    assert_eq!(report["rules"]["denied"], 2);
    let text = dir.text(&["--config", "rules.toml", "--log", "access.log"]);
    assert!(
        text.contains("1 line out of order, by up to 7s: decided at the time of the latest line\n"),
        "{text}"
    );
}

#[test]
fn labels_are_normalized_as_on_the_server() {
    let rules = r#"
        [labels]
        ip = { kind = "ip", ipv6_prefix = 48 }
        api_key = { header = "x-api-key", secret = true }
        [store]
        hash_secret_file = "not/on/this/machine"
        [[server.token]]
        name = "deploy"
        file = "secrets/neither"
        may = ["check"]
        [[rule]]
        name = "per-ip"
        per = ["ip"]
        algorithm = "sliding-log"
        amount = 1
        window = "1m"
        [[rule]]
        name = "per-key"
        per = ["api_key"]
        algorithm = "sliding-log"
        amount = 1
        window = "1m"
    "#;
    let log = r#"{"ts":1,"ip":"2001:db8:1:1::1"}
{"ts":2,"ip":"2001:db8:1:2::2"}
{"ts":3,"ip":"::ffff:192.0.2.1"}
{"ts":4,"ip":"192.0.2.1"}
{"ts":5,"ip":"localhost"}
{"ts":6,"api_key":"s3cret"}
{"ts":7,"api_key":"s3cret"}
"#;
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("log.jsonl", log);
    let report = dir.json(&["--config", "rules.toml", "--log", "log.jsonl"]);
    let per_ip = rule(&report["rules"], "per-ip");
    assert_eq!(per_ip["worst"][0]["key"], json!({"ip": "2001:db8:1::"}));
    assert_eq!(per_ip["worst"][1]["key"], json!({"ip": "192.0.2.1"}));
    assert_eq!(rule(&report["rules"], "per-key")["denied"], 1);
    assert!(!report.to_string().contains("s3cret"));
    assert_eq!(report["lines"]["unreadable"], 1, "not an address");
}

#[test]
fn a_path_that_is_too_long_is_truncated_and_still_counted() {
    let hit = |end: &str| Hit::new(0, "192.0.2.1", &format!("/login{}", end.repeat(2_000)));
    let dir = TestDir::new();
    let rules = RULES.replace("/login", "/login*");
    dir.write("rules.toml", rules).write("access.log", combined(&["a", "b", "a", "b", "a"].map(hit)));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
    let login = rule(&report["rules"], "login");
    assert_eq!((&login["matched"], &login["denied"]), (&5.into(), &2.into()), "{report}");
}

#[test]
fn flags_add_labels_and_the_first_match_counts() {
    let rules = r#"
        [[rule]]
        name = "login"
        when = { route = "login", env = "test" }
        per = ["ip"]
        algorithm = "sliding-log"
        amount = 1
        window = "1h"
        [[rule]]
        name = "other"
        when = { route = "other" }
        amount = 1000
        window = "1h"
    "#;
    let hits = ["/login", "/login/again", "/x", "/login"].map(|path| Hit::new(0, "192.0.2.1", path));
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("access.log", combined(&hits));
    let run = ["--config", "rules.toml", "--log", "access.log"];
    let flags = [
        "--label",
        "env=test",
        "--label",
        "route=login when path=/login* method=GET ip=192.0.2.0/24",
        "--label",
        "route=other when path=*",
    ];
    let report = dir.json(&[&run[..], &flags[..]].concat());
    assert_eq!(rule(&report["rules"], "login")["matched"], 3);
    assert_eq!(rule(&report["rules"], "login")["denied"], 2);
    assert_eq!(rule(&report["rules"], "other")["matched"], 1);

    let text = dir.text(&run);
    assert!(text.contains("login never applies: no line has the labels env, route: set its field"), "{text}");
    assert!(dir.error(&[&run[..], &["--label", "route"]].concat()).contains("use label=value"));
}

#[test]
fn expired_counters_are_removed() {
    let rules = "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\namount = 2\nwindow = \"1s\"\n";
    let hit = |n: u64| Hit::new(n / 100, &format!("10.{}.{}.{}", n >> 16, n >> 8 & 255, n & 255), "/");
    let hits: Vec<_> = (0..200_000).map(hit).collect();
    let dir = TestDir::new();
    dir.write("rules.toml", rules).write("access.log", combined(&hits));
    let report = dir.json(&["--config", "rules.toml", "--log", "access.log"]);
    assert_eq!((&report["requests"], &report["rules"]["denied"]), (&json!(200_000), &json!(0)));
    // 200,000 keys, 200 of which are in use at any time
    let most = report["rules"]["most_counters"].as_u64().unwrap();
    assert!(most < 10_000, "{most}");
}

#[test]
fn errors_state_the_fix() {
    let dir = TestDir::new();
    dir.write("rules.toml", RULES).write("prose", "once upon a time\nthere was a log\n").write("empty", "");
    dir.write("odd.csv", "when,w\u{1b}ho\n1,2\n")
        .write("odd.jsonl", "{\"when\":1}\n")
        .write("header.csv", "time,ip\n\n");
    dir.write("list.json", "[{\"time\":1}]").write("long-list.json", "[\n  {\"time\":1}\n]\n");
    dir.write("log.zst", b"\x28\xb5\x2f\xfd\x04")
        .write("log.xz", b"\xfd7zXZ\0\0")
        .write("log.bz2", "BZh91AY");
    dir.write("timeless.csv", "ip,path\n1.2.3.4,/\n").write("broken.toml", "[[rule]]\nnme = 1\n");
    let error = |log: &str| dir.error(&["--config", "rules.toml", "--log", log]);
    for (log, remedy) in [
        ("absent", "cannot read log \"absent\": No such file or directory (os error 2): correct its path"),
        (".", "use the files in it, for example with *.log"),
        ("prose", "not an access log, a JSON object or a CSV header; set --format"),
        ("timeless.csv", "found ip, path): set it with --time COLUMN"),
        ("empty", "no requests in \"empty\": use another log"),
        ("header.csv", "no requests in \"header.csv\""),
        ("odd.csv", "unknown columns (when, w\\u{1b}ho): set the column of the time with --time COLUMN"),
        ("list.json", "jq -c '.[]' list.json | sluicegate simulate --log -"),
        ("long-list.json", "expected one object per line"),
        (
            "log.zst",
            "is compressed with zstd, only gzip is supported: zstdcat log.zst | sluicegate simulate --log -",
        ),
        ("log.xz", "xzcat"),
        ("log.bz2", "bzcat"),
    ] {
        let message = error(log);
        assert!(message.contains(remedy) && message.lines().count() == 1, "{message}");
    }
    for (log, expected) in [
        ("odd.csv", "(expected wenn, found when, w\\u{1b}ho): set it with --time COLUMN"),
        ("odd.jsonl", "expected a time in the field wenn of --time"),
    ] {
        let message = dir.error(&["--config", "rules.toml", "--log", log, "--time", "wenn"]);
        assert!(message.contains(expected), "{message}");
    }
    dir.write("cut.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03\x33");
    assert!(
        error("cut.gz").contains(": the file is truncated or corrupt, check it with gzip -t"),
        "{}",
        error("cut.gz")
    );
    let wrong_format = dir.error(&["--log", "prose", "--format", "json"]);
    assert!(wrong_format.ends_with("; omit --format to detect it\n"), "{wrong_format}");
    let against = dir.error(&["--config", "rules.toml", "--log", "prose", "--against", "absent.toml"]);
    assert!(against.starts_with("sluicegate: --against: cannot read absent.toml"), "{against}");
    let against = dir.error(&["--config", "rules.toml", "--log", "prose", "--against", "broken.toml"]);
    assert!(against.starts_with("sluicegate: broken.toml:1:1: "), "{against}");
    let stray = dir.error(&["--config", "rules.toml", "--log", "prose", "--time", "when", "access.log"]);
    assert!(stray.contains("pass logs as --log access.log"), "{stray}");
    let unwritable = ["--log", "good.jsonl", "--html", "nowhere/report.html"];
    dir.write("good.jsonl", "{\"ts\":1}\n");
    assert!(dir.error(&unwritable).contains("use a path in an existing, writable directory"));
    let two = dir.error(&["--config", "rules.toml", "--log", "empty", "header.csv"]);
    assert!(two.contains("no requests in \"empty\", \"header.csv\""), "{two}");
    assert!(dir.error(&["--config", "broken.toml", "--log", "prose"]).contains("nme"));
}

#[test]
fn singular_and_plural_are_distinguished() {
    let dir = TestDir::new();
    dir.write("log.jsonl", "{\"ts\":1,\"ip\":\"192.0.2.1\"}\nnonsense\n");
    let text = dir.text(&["--log", "log.jsonl", "--html", "report.html"]);
    assert!(text.starts_with("1 request from 1970-01-01 00:00:01"), "{text}");
    assert!(text.contains("\n1 line (50.0 %) could not be read:\n"), "{text}");
    assert!(text.contains("\ndemo rules denied 0 (0 %) of 1\n"), "{text}");
    let page = std::fs::read_to_string(dir.path("report.html")).unwrap();
    let idle = dir.run(&["--log", "log.jsonl", "--cost", "tokens=total"]);
    let noted = String::from_utf8(idle.stderr).unwrap();
    assert_eq!(noted, "no rule counts tokens: --cost tokens=total has no effect\n");
    assert!(page.contains("of 1 request (") && page.contains(">1 line could not be read:"), "{page}");
}
