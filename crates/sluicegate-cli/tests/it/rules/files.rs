use std::fs;

use serde_json::{Value, json};

use crate::{
    command::{run, sluicegate},
    server_process::ConfigDir,
};

const GOOD: &str = r#"
[[rule]]
name = "login-per-ip"
when = { route = "login" }
per = ["ip"]
algorithm = "sliding-log"
amount = 5
window = "1m"

[[rule.override]]
when = { ip = "10.0.0.0/8" }
unlimited = true

[[rule]]
name = "api-per-user"
per = ["user"]
amount = 10
window = "1s"
burst = 20

[[rule.override]]
when = { user = "mallory" }
blocked = true
"#;

fn file(home: &ConfigDir) -> String {
    home.path().join("sluicegate.toml").to_str().unwrap().to_owned()
}

#[test]
fn a_valid_file_is_ok() {
    let home = ConfigDir::new(GOOD);
    let checked = run(&mut sluicegate(&["rules", "check", &file(&home)]));
    assert_eq!(checked.code, Some(0), "{checked:?}");
    assert!(checked.out.starts_with(&format!("OK  {}: 2 rules  fingerprint ", file(&home))), "{checked:?}");
    let (code, report) = run(&mut sluicegate(&["--json", "rules", "check", &file(&home)])).json();
    assert_eq!((code, &report["errors"], &report["warnings"]), (Some(0), &json!([]), &json!([])));
    assert_eq!(report["rules"], 2);
}

#[test]
fn without_a_file_the_one_in_the_working_directory_is_checked() {
    let home = ConfigDir::new(GOOD);
    let checked = run(sluicegate(&["rules", "check"]).current_dir(home.path()));
    assert!(
        checked.code == Some(0) && checked.out.starts_with("OK  sluicegate.toml: 2 rules"),
        "{checked:?}"
    );
    fs::remove_file(file(&home)).unwrap();
    let checked = run(sluicegate(&["rules", "check"]).current_dir(home.path()));
    let error =
        "sluicegate: there is no ./sluicegate.toml: pass the file, as in sluicegate rules check FILE\n";
    assert_eq!((checked.code, &*checked.err), (Some(2), error));
}

#[test]
fn rules_that_fail_open_without_setting_a_policy_are_reported_with_a_remote_store() {
    let remote = format!("[store]\nurl = \"redis://127.0.0.1\"\n{GOOD}");
    let home = ConfigDir::new(&remote);
    let checked = run(&mut sluicegate(&["rules", "check", &file(&home)]));
    assert_eq!(checked.code, Some(1), "{checked:?}");
    let start = "warning: rules without on_store_failure allow every request while the store is unavailable or late: \
                 \"login-per-ip\", \"api-per-user\"; set ";
    assert!(checked.out.starts_with(start), "{checked:?}");
    home.write("sluicegate.toml", remote + "\n[defaults]\non_store_failure = \"open\"\n");
    assert_eq!(run(&mut sluicegate(&["rules", "check", &file(&home)])).code, Some(0));
}

#[test]
fn errors_are_shown_with_their_location() {
    let home = ConfigDir::new("[[rule]]\nname = \"a\"\namuont = 5\namount = 5\nwindow = \"1x\"\n");
    let checked = run(&mut sluicegate(&["rules", "check", &file(&home)]));
    assert_eq!((checked.code, &*checked.err), (Some(1), ""), "{checked:?}");
    for part in [
        "unknown key `amuont`",
        ":3:1\n",
        "did you mean `amount`?",
        "\"1x\" is not a duration",
        ":5:10\n",
        "5 | window = \"1x\"",
    ] {
        assert!(checked.out.contains(part), "{part}: {}", checked.out);
    }
    let (code, report) = run(&mut sluicegate(&["rules", "check", "--json", &file(&home)])).json();
    assert_eq!(code, Some(1));
    let places: Vec<_> = report["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|error| (error["line"].as_u64(), error["column"].as_u64()))
        .collect();
    assert_eq!(places, [(Some(3), Some(1)), (Some(5), Some(10))]);
}

#[test]
fn probably_unintended_rules_are_reported() {
    let home = ConfigDir::new(
        "[labels]\napikey = { secret = true }\n[[rule]]\nname = \"a\"\nwhen = { route = \"login\" }\nunless = { route = \"log*\" }\n\
         amount = 5\nwindow = \"1m\"\n",
    );
    let checked = run(&mut sluicegate(&["rules", "check", &file(&home)]));
    assert_eq!(checked.code, Some(1), "{checked:?}");
    let lines = checked.lines();
    assert!(lines[0].starts_with("warning: store.hash_secret_file is not set"), "{checked:?}");
    let place = format!("warning: {}:3: rule \"a\": never applies", file(&home));
    assert!(lines[1].starts_with(&place), "{checked:?}");
    assert!(
        lines[2].starts_with("warning: labels.apikey is configured, but no rule uses apikey"),
        "{checked:?}"
    );
    assert!(lines[3].starts_with("3 warnings  "), "{checked:?}");
    let (_, report) = run(&mut sluicegate(&["rules", "check", "--json", &file(&home)])).json();
    let places: Vec<_> =
        report["warnings"].as_array().unwrap().iter().map(|warning| warning["line"].as_u64()).collect();
    assert_eq!(places, [None, Some(3), None]);
}

#[test]
fn several_files_are_checked_separately() {
    let home = ConfigDir::new(GOOD);
    let other = home.write("other.toml", "[[rule]]\nname = \"a\"\namount = 1\n");
    let files = [&*file(&home), other.to_str().unwrap()];
    let checked = run(sluicegate(&["rules", "check"]).args(files));
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(checked.out.starts_with(&format!("OK  {}: 2 rules", files[0])), "{checked:?}");
    assert!(checked.out.contains("rule \"a\" has no window"), "{checked:?}");
    let checked = run(sluicegate(&["rules", "check", "--json"]).args(files));
    let named: Vec<Value> = checked
        .lines()
        .iter()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["file"].clone())
        .collect();
    assert_eq!(named, files);
    let failed = run(sluicegate(&["rules", "check", "nowhere.toml"]).args(files));
    assert_eq!((failed.code, &*failed.out), (Some(2), ""), "{failed:?}");
}

#[test]
fn rules_are_read_from_the_standard_input() {
    let home = ConfigDir::new(GOOD);
    home.write("tenants.csv", "user,amount\nann,5\n");
    let with_file = GOOD.replace("burst = 20", "burst = 20\noverrides_file = \"tenants.csv\"");
    let of_input = |words: &[&str], text: &str| {
        let path = home.write("piped.toml", text);
        run(sluicegate(words).current_dir(home.path()).stdin(fs::File::open(path).unwrap()))
    };
    let checked = of_input(&["rules", "check", "-"], &with_file);
    assert_eq!(checked.code, Some(0), "{checked:?}");
    assert!(checked.out.starts_with("OK  -: 2 rules  "), "{checked:?}");
    let checked = of_input(&["rules", "check", "-"], "[[rule]]\nname = 5\n");
    assert!(checked.code == Some(1) && checked.out.contains("/dev/stdin:2:8\n"), "{checked:?}");
    let explained = of_input(&["rules", "explain", "-", "user=42"], GOOD);
    assert_eq!((explained.code, explained.lines()[0]), (Some(0), "1 of 2 rules applies"), "{explained:?}");
}

#[test]
fn common_syntax_errors_have_a_hint() {
    let quotes = "invalid TOML: write strings in quotes and numbers as digits, for example \"1m\" or 5";
    for (text, message, help) in [
        ("[[rule]]\nname = \"a\"\namount = five\n", quotes, ":3:10\n"),
        ("[[rule]]\nname = login\n", quotes, ":2:8\n"),
        ("[[rule]]\nwindow = 1m\n", quotes, ":2:10\n"),
        ("[[rule]]\nper = [ip]\n", quotes, ":2:8\n"),
        ("[[rule]]\nwhen = { route = login }\n", quotes, ":2:18\n"),
        ("[[rule]]\nshadow = True\n", "write true or false, in lower case", ":2:10\n"),
        ("[[rule]]\nname = “a”\n", "write straight quotes", ":2:8\n"),
        ("[[rule]]\namount = 10,000\n", "one setting per line, and numbers without commas", ":2:12\n"),
        ("[[rule]]\nname = \"a\" amount = 5\n", "one setting per line", ":2:12\n"),
        ("[[rule]]\nname: a\n", "write = between a key and its value", ":2:5\n"),
        ("[[rule]]\nlimit = 5\n", "unknown key `limit`", "did you mean `amount`?"),
        ("[[rule]]\nperiod = \"1m\"\n", "unknown key `period`", "did you mean `window`?"),
        ("[[rule]]\nper = \"ip\"\n", "is not a list", "write it in [ ], as in [\"a\", \"b\"]"),
        ("{\"rule\": []}", "the file is JSON: write it in TOML", "[[rule]]"),
        ("[\n{\"name\": \"a\"}]", "the file is JSON: write it in TOML", "name = \"login-per-ip\""),
        ("# rules\nrule:\n  - name: a\n", "the file is YAML: write it in TOML", "[[rule]]"),
        ("---\nrule: []\n", "the file is YAML: write it in TOML", "[[rule]]"),
        ("domain: edge\ndescriptors:\n", "the file is YAML", "sluicegate rules import envoy"),
        ("[[rule]\nname = \"a\"\n", "invalid TOML: ", ":1:"),
    ] {
        let home = ConfigDir::new(text);
        let checked = run(&mut sluicegate(&["rules", "check", &file(&home)]));
        assert_eq!(checked.code, Some(1), "{checked:?}");
        assert!(checked.out.contains(message) && checked.out.contains(help), "{text}\n{}", checked.out);
        assert!(checked.out.matches("invalid TOML").count() <= 1, "once is enough: {}", checked.out);
        let simulated = run(&mut sluicegate(&["simulate", "--log", "x", "--config", &file(&home)]));
        assert!(simulated.code == Some(2) && simulated.err.lines().count() == 1, "{simulated:?}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_an_error() {
    for words in [&["rules", "check", "nowhere.toml"][..], &["rules", "explain", "nowhere.toml", "a=1"]] {
        let failed = run(&mut sluicegate(words));
        assert_eq!((failed.code, &*failed.out), (Some(2), ""), "{failed:?}");
        assert!(failed.err.starts_with("sluicegate: cannot read nowhere.toml: No such file"), "{failed:?}");
        assert!(failed.err.ends_with(": correct its path\n"), "{failed:?}");
    }
    let forgotten = run(&mut sluicegate(&["rules", "explain", "route=login", "ip=192.0.2.1"]));
    assert!(
        forgotten.err.contains("the first argument must be a configuration file, found label route=login"),
        "{forgotten:?}"
    );
    let directory = run(&mut sluicegate(&["rules", "check", "."]));
    assert!(directory.err.ends_with(": name a file in it\n"), "{directory:?}");
    let home = ConfigDir::new("[[rule]]\nname = \"a\"\n");
    let failed = run(&mut sluicegate(&["rules", "explain", &file(&home), "a=1"]));
    assert_eq!(failed.code, Some(2), "{failed:?}");
    assert!(failed.err.contains("rule \"a\" has no amount"), "{failed:?}");
}

#[test]
fn explain_lists_applying_rules_and_reasons_for_the_others() {
    let home = ConfigDir::new(GOOD);
    let explain =
        |labels: &[&str]| run(&mut sluicegate(&[&["rules", "explain", &file(&home)][..], labels].concat()));
    let explained = explain(&["route=login", "ip=::ffff:203.0.113.9", "--cost", "2"]);
    assert_eq!(explained.code, Some(0), "{explained:?}");
    assert_eq!(
        explained.lines(),
        [
            "1 of 2 rules applies",
            "",
            "Rules that apply",
            "  login-per-ip: 5 per 1m (sliding-log)",
            "    cost 2 (requests)  counter login-per-ip:203.0.113.9",
            "",
            "Rules that do not apply",
            "  api-per-user  per label user is missing",
        ]
    );
    let explained = explain(&["route=login", "ip=10.1.2.3", "user=mallory"]);
    assert_eq!(
        explained.lines(),
        [
            "1 of 2 rules applies",
            "",
            "Rules that apply",
            "  api-per-user: denies: an override blocks this request",
            "",
            "Rules that do not apply",
            "  login-per-ip  an override makes it unlimited",
        ]
    );
    let (_, report) = explain(&["user=42", "--cost", "requests=3", "--json"]).json();
    let limit =
        json!({"algorithm": "token-bucket", "amount": 10, "window": "1s", "capacity": 20, "shadow": false});
    let holds = json!({"required": false, "on_expiry": "charge", "max_excess": 20});
    let applies = json!([{"rule": "api-per-user", "key": "api-per-user:42", "limit": limit, "unit": "requests", "cost": 3, "denies": null, "holds": holds}]);
    assert_eq!(report["applies"], applies);
    assert_eq!(report["others"][0]["because"], "label route is missing, required login");
}

#[test]
fn explain_shows_what_happens_to_holds() {
    let home = ConfigDir::new(
        "[[rule]]\nname = \"in-flight\"\nalgorithm = \"concurrency\"\namount = 10\nhold = \"id\"\n\
         [[rule]]\nname = \"tokens\"\namount = 5\nwindow = \"1m\"\nttl = \"30s\"\non_expiry = \"release\"\nmax_excess = 2\n\
         [[rule]]\nname = \"plain\"\namount = 5\nwindow = \"1m\"\n",
    );
    let explained = run(&mut sluicegate(&["rules", "explain", &file(&home), "id=7"]));
    assert_eq!(
        explained.lines()[3..],
        [
            "  in-flight: 10 at one time (concurrency)",
            "    cost 1 (requests)  counter in-flight:*",
            "    requires a hold, which expires after 1m, or the ttl of another rule, and is then released; id in label id",
            "  tokens: 5 per 1m (token-bucket)",
            "    cost 1 (requests)  counter tokens:*",
            "    a hold expires after 30s and is then released; settling charges up to 2 more than the estimate",
            "  plain: 5 per 1m (token-bucket)",
            "    cost 1 (requests)  counter plain:*",
        ],
        "{explained:?}"
    );
    let (_, report) = run(&mut sluicegate(&["rules", "explain", &file(&home), "id=7", "--json"])).json();
    let in_flight = json!({"required": true, "on_expiry": "release", "label": "id"});
    assert_eq!(report["applies"][0]["holds"], in_flight);
    assert_eq!(report["applies"][0]["limit"].get("window"), None);
}

#[test]
fn a_rule_that_proxies_skip_is_a_warning() {
    let rule = "[[rule]]\nname = \"in-flight\"\nalgorithm = \"concurrency\"\namount = 10\n";
    let home = ConfigDir::new(rule);
    let checked = run(&mut sluicegate(&["rules", "check", &file(&home)]));
    let warning =
        "rule \"in-flight\": forward-auth and Envoy calls without the id of a hold skip this rule: set hold";
    assert!(checked.code == Some(1) && checked.out.contains(warning), "{checked:?}");
    home.write("sluicegate.toml", format!("{rule}hold = \"request_id\"\n"));
    assert_eq!(run(&mut sluicegate(&["rules", "check", &file(&home)])).code, Some(0));
}

#[test]
fn the_schema_is_printed() {
    for words in [&["rules", "schema"][..], &["--json", "rules", "schema"]] {
        let printed = run(&mut sluicegate(words));
        assert_eq!(printed.code, Some(0));
        let schema: Value = serde_json::from_str(&printed.out).unwrap();
        assert_eq!(schema["title"], "sluicegate.toml");
        assert!(schema["properties"]["rule"].is_object(), "{schema}");
    }
}
