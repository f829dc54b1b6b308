use serde_json::{Value, json};
use sluicegate_testkit::server::{Flavor, Server};

use crate::{
    command::{CommandOutput, run, sluicegate},
    server_process::{ANY_PORTS, ConfigDir, ServerProcess},
};

/// Two requests in flight for each tenant, and 1,000 tokens a day.
const RULES: &str = r#"
[[rule]]
name = "in-flight"
per = ["tenant"]
algorithm = "concurrency"
amount = 2
ttl = "10m"

[[rule]]
name = "tokens"
per = ["tenant"]
algorithm = "fixed-window"
amount = 1000
window = "1 year"
unit = "tokens"
"#;

const HOLD: [&str; 4] = ["hold", "tenant=acme", "--cost", "requests=1,tokens=400"];

fn server() -> (ConfigDir, ServerProcess) {
    let home = ConfigDir::new(&format!("{ANY_PORTS}{RULES}"));
    let server = home.start();
    (home, server)
}

fn with<'a>(words: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [words, more].concat()
}

/// The cells of a row of a table.
fn cells(output: &CommandOutput, line: usize) -> Vec<String> {
    output.lines()[line].split_whitespace().map(str::to_owned).collect()
}

/// The units that a rule has charged for a hold.
fn charged(answer: &Value, rule: &str) -> Value {
    let tiers = answer["tiers"].as_array().unwrap();
    tiers.iter().find(|tier| tier["rule"] == rule).unwrap_or_else(|| panic!("{answer}"))["charged"].clone()
}

#[test]
fn a_hold_is_settled_by_its_token_and_frees_its_slot() {
    let (_home, server) = server();
    let held = server.run(&with(&HOLD, &["--id", "job-1"]));
    assert_eq!(held.code, Some(0), "{held:?}");
    let lines = held.lines();
    assert_eq!(lines[0], "HELD  1 of 2 remaining (in-flight)");
    assert_eq!(&cells(&held, 3)[..5], ["in-flight", "allowed", "1", "2", "requests"]);
    assert_eq!(&cells(&held, 4)[..5], ["tokens", "allowed", "600", "1000", "tokens"]);
    assert_eq!(lines[6], "id       job-1");
    assert!(lines[7].starts_with("expires  20"), "{held:?}");
    let token = lines[8].strip_prefix("token    ").unwrap();

    let settled = server.run(&["settle", "--token", token, "--cost", "tokens=120"]);
    assert_eq!((settled.code, settled.lines()[0]), (Some(0), "SETTLED"), "{settled:?}");
    assert_eq!(&cells(&settled, 3)[..5], ["in-flight", "settled", "1", "2", "requests"]);
    assert_eq!(&cells(&settled, 4)[..5], ["tokens", "settled", "120", "880", "tokens"]);

    let again = server.run(&["settle", "--token", token, "--cost", "tokens=999"]);
    let already = "ALREADY  the hold was settled or released before: nothing changed";
    assert_eq!((again.code, again.lines()[0]), (Some(0), already), "{again:?}");
    assert_eq!(cells(&again, 4)[2], "120");
}

#[test]
fn a_hold_beyond_the_in_flight_limit_is_denied_until_another_one_is_released() {
    let (_home, server) = server();
    for id in ["a", "b"] {
        assert_eq!(server.run(&with(&HOLD, &["--id", id])).code, Some(0));
    }
    let denied = server.run(&["hold", "tenant=acme", "--id", "c", "--json"]);
    let (code, answer) = denied.json();
    assert_eq!(
        (code, &answer["rule"], answer.get("token")),
        (Some(1), &json!("in-flight"), None),
        "{answer}"
    );
    let text = server.run(&["hold", "tenant=acme", "--id", "c"]);
    assert!(
        text.out.starts_with("DENIED  by in-flight: retry in ") && !text.out.contains("token "),
        "{text:?}"
    );

    let released = server.run(&["release", "--id", "a", "tenant=acme"]);
    assert_eq!((released.code, released.lines()[0]), (Some(0), "RELEASED"), "{released:?}");
    assert_eq!(&cells(&released, 4)[..4], ["tokens", "released", "0", "600"]);
    assert_eq!(server.run(&["hold", "tenant=acme", "--id", "c"]).code, Some(0));
}

#[test]
fn the_same_id_gets_the_first_answer_and_another_cost_is_an_error() {
    let (_home, server) = server();
    let hold = with(&HOLD, &["--id", "job-1", "--json"]);
    let first: Value = server.run(&hold).json().1;
    let second: Value = server.run(&hold).json().1;
    assert_eq!((&first["repeated"], &second["repeated"]), (&json!(false), &json!(true)));
    assert_eq!((&first["token"], &first["tiers"]), (&second["token"], &second["tiers"]));
    let text = server.run(&with(&HOLD, &["--id", "job-1"]));
    assert!(text.lines()[1].starts_with("a hold with this id exists"), "{text:?}");
    let conflict = server.run(&["hold", "tenant=acme", "--cost", "tokens=1", "--id", "job-1"]);
    assert_eq!(conflict.code, Some(2), "{conflict:?}");
    assert!(conflict.err.contains("job-1"), "{conflict:?}");
}

#[test]
fn renewing_moves_the_expiry_and_unknown_holds_are_reported() {
    let (_home, server) = server();
    let held: Value = server.run(&with(&HOLD, &["--id", "job-1", "--ttl", "1m", "--json"])).json().1;
    let expires = |answer: &Value| answer["expires_at_us"].as_u64().unwrap();
    let minute = 60_000_000;
    assert_eq!(expires(&held) - held["at_us"].as_u64().unwrap(), minute);
    let renewed = server.run(&["renew", "--id", "job-1", "tenant=acme", "--ttl", "1h", "--json"]).json();
    assert_eq!((renewed.0, &renewed.1["outcome"]), (Some(0), &json!("renewed")));
    assert!(expires(&renewed.1["tiers"][0]) >= expires(&held) + 58 * minute, "{renewed:?}");

    for call in [&["settle", "--cost", "tokens=1"][..], &["release"], &["renew", "--ttl", "1m"]] {
        let unknown = server.run(&with(call, &["--id", "job-2", "tenant=acme"]));
        let message = "UNKNOWN  there is no such hold: it has ended and was forgotten, was reset, or its id or labels differ";
        assert_eq!((unknown.code, unknown.lines()[0]), (Some(1), message), "{unknown:?}");
    }
    assert_eq!(server.run(&["release", "--id", "job-1", "tenant=acme"]).code, Some(0));
    let ended = server.run(&["renew", "--id", "job-1", "tenant=acme", "--ttl", "1h"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
}

#[test]
fn a_hold_that_was_made_directly_is_settled_through_a_server_and_the_other_way_round() {
    let redis = Server::start(Flavor::Redis7);
    let home =
        ConfigDir::new(&format!("{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"5s\"\n{RULES}", redis.url()));
    let server = home.start();
    let config = home.path().join("sluicegate.toml");
    let direct = |words: &[&str]| run(sluicegate(words).arg("--config").arg(&config).arg("--json")).json();
    let (code, held) = direct(&with(&HOLD, &["--id", "job-1"]));
    assert_eq!((code, &held["source"]), (Some(0), &json!("store")), "{held}");
    let token = held["token"].as_str().unwrap();
    let settled = server.run(&["settle", "--token", token, "--cost", "tokens=120", "--json"]).json().1;
    assert_eq!((&settled["outcome"], charged(&settled, "tokens")), (&json!("settled"), json!(120)));
    assert_eq!(direct(&["settle", "--token", token, "--cost", "tokens=5"]).1["outcome"], "already");

    assert_eq!(server.run(&with(&HOLD, &["--id", "job-2"])).code, Some(0));
    let released = direct(&["release", "--id", "job-2", "tenant=acme"]);
    assert_eq!((released.0, &released.1["outcome"]), (Some(0), &json!("released")));
    redis.assert_every_key_expires();
}

#[test]
fn a_direct_settlement_that_the_store_does_not_answer_is_an_error() {
    let settle = ["release", "--id", "job-1", "user=1", "--store", "redis://127.0.0.1:1"];
    let failed = run(&mut sluicegate(&settle));
    assert_eq!((failed.code, &*failed.out), (Some(2), ""), "{failed:?}");
    assert!(failed.err.contains("run the command again"), "{failed:?}");
}

#[test]
fn a_direct_hold_that_no_store_recorded_is_not_shown_as_held() {
    let home = ConfigDir::new(&format!("[defaults]\non_store_failure = \"local\"\n{RULES}"));
    let config = home.path().join("sluicegate.toml");
    let hold = with(&HOLD, &["--id", "job-1", "--store", "redis://127.0.0.1:1"]);
    let held = run(sluicegate(&hold).arg("--config").arg(&config));
    let lines = held.lines();
    assert_eq!((held.code, lines[0]), (Some(0), "ALLOWED  1 of 2 remaining (in-flight)"), "{held:?}");
    assert!(lines[1].starts_with("DEGRADED") && lines.contains(&"expires  -"), "{held:?}");
}

#[test]
fn an_explanation_shows_the_live_holds_of_each_counter() {
    let (_home, server) = server();
    let explained = server.run(&["explain", "tenant=acme"]);
    assert!(!explained.out.contains("live hold"), "{explained:?}");
    for id in ["a", "b"] {
        assert_eq!(server.run(&with(&HOLD, &["--id", id])).code, Some(0));
    }
    let explained = server.run(&["explain", "tenant=acme"]);
    for line in [
        "\n    2 live holds of 2 units, the oldest made ",
        "\n    2 live holds of 800 units, the oldest made ",
    ] {
        assert!(explained.out.contains(line), "{line}: {explained:?}");
    }
}

#[test]
fn the_units_and_the_oldest_of_many_live_holds_are_marked_as_minimums() {
    let redis = Server::start(Flavor::Redis7);
    let rules = RULES.replace("amount = 2\n", "amount = 5000\n");
    let home =
        ConfigDir::new(&format!("{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"5s\"\n{rules}", redis.url()));
    let server = home.start();
    assert_eq!(server.run(&with(&HOLD, &["--id", "first"])).code, Some(0));
    let explain = ["explain", "tenant=acme", "--json"];
    let holds = |rule: usize| server.run(&explain).json().1["applies"][rule]["state"]["holds"].clone();
    assert_eq!((&holds(0)["count"], holds(0).get("partial")), (&json!(1), None));
    // copies of the first hold
    let fill = "local last = redis.call('ZREVRANGE', KEYS[1], '0', '0', 'WITHSCORES')
        for number = 2, 1201 do
          redis.call('ZADD', KEYS[1], last[2], string.sub(last[1], 1, 17) .. number)
        end
        return redis.call('ZADD', KEYS[1], 'XX', '-1202', '')";
    for pattern in ["sg1:*}:concurrency:*", "sg1:*}:holds:*"] {
        let mut connection = redis.connection();
        let keys: Vec<String> = redis::cmd("KEYS").arg(pattern).query(&mut connection).unwrap();
        redis::cmd("EVAL").arg(fill).arg(1).arg(&keys[0]).exec(&mut connection).unwrap();
    }
    for (rule, units) in [(0, 1_201), (1, 1_001 * 400)] {
        let holds = holds(rule);
        let found = (&holds["count"], &holds["units"], &holds["partial"]);
        assert_eq!(found, (&json!(1_201), &json!(units), &json!(true)), "{holds}");
    }
    let explained = server.run(&explain[..2]);
    for line in [
        "\n    1,201 live holds of at least 1,201 units, the oldest made at least ",
        "\n    1,201 live holds of at least 400,400 units, the oldest made at least ",
    ] {
        assert!(explained.out.contains(line), "{line}: {explained:?}");
    }
}

#[test]
fn a_settlement_in_a_unit_that_no_rule_counts_is_reported() {
    let (_home, server) = server();
    let warning = "NOT COUNTED  token: the rules that apply count requests, tokens; correct --cost or the unit of a rule";
    for (id, cost, is_reported) in [("a", "token=120", true), ("b", "tokens=120", false)] {
        assert_eq!(server.run(&with(&HOLD, &["--id", id])).code, Some(0));
        let settled = server.run(&["settle", "--id", id, "tenant=acme", "--cost", cost]);
        assert_eq!((settled.code, settled.lines()[0]), (Some(0), "SETTLED"), "{settled:?}");
        assert_eq!(settled.out.contains(warning), is_reported, "{settled:?}");
    }
}

#[test]
fn a_key_is_held_without_rules() {
    let (_home, server) = server();
    let key = ["--key", "job", "--limit", "1", "--algorithm", "concurrency"];
    let held = server.run(&with(&["hold", "--id", "a"], &key));
    assert_eq!((held.code, held.lines()[0]), (Some(0), "HELD  0 of 1 remaining"), "{held:?}");
    assert_eq!(server.run(&with(&["hold", "--id", "b"], &key)).code, Some(1));
    assert_eq!(server.run(&with(&["release", "--id", "a"], &key)).lines()[0], "RELEASED");
    let checked = server.run(&with(&["check"], &key));
    assert!(checked.code == Some(2) && checked.err.contains("hold"), "{checked:?}");
}

#[test]
fn arguments_that_do_not_name_a_hold_are_rejected() {
    for (words, part) in [
        (&["hold"][..], "<LABEL=VALUE|--key <KEY>>"),
        (&["hold", "a=1", "--ttl", "60"], "use whole numbers with d, h, m, s or ms"),
        (&["settle", "a=1"], "--token <TOKEN>|--id <ID>"),
        (&["settle", "--id", "x"], "<LABEL=VALUE|--key <KEY>>"),
        (&["settle", "--token", "x", "--id", "y", "a=1"], "cannot be used with"),
        (&["release", "--token", "x", "a=1"], "cannot be used with"),
        (&["renew", "--token", "x"], "--ttl <DURATION>"),
    ] {
        let failed = run(&mut sluicegate(words));
        assert!(failed.code == Some(2) && failed.err.contains(part), "{words:?}: {failed:?}");
    }
    let (_home, server) = server();
    let invalid = server.run(&["settle", "--token", "x", "--cost", "1"]);
    assert!(invalid.code == Some(2) && invalid.err.contains("invalid token: use the token"), "{invalid:?}");
}
