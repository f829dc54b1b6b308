use sluicegate_testkit::server::{Flavor, Server};

use super::{RULES, server};
use crate::{
    command::{run, sluicegate},
    server_process::{self, ConfigDir},
};

#[test]
fn five_logins_are_allowed_and_the_sixth_has_a_retry_time() {
    let (_home, server) = server();
    for left in ["4", "3", "2", "1", "0"] {
        let output = server.run(&["check", "route=login", "ip=203.0.113.9"]);
        assert_eq!(output.code, Some(0), "{output:?}");
        let lines = output.lines();
        assert_eq!(lines[0], format!("ALLOWED  {left} of 5 remaining (login-per-ip)"));
        assert_eq!(lines[2], "rule          decision  remaining  limit  unit      retry after  reset after");
        assert!(
            lines[3].starts_with(&format!(
                "login-per-ip  allowed           {left}      5  requests            -  "
            )),
            "{output:?}"
        );
        assert!(
            lines[5].starts_with("to refund exactly this, use sluicegate refund with --at 1"),
            "{output:?}"
        );
    }
    let output = server.run(&["check", "route=login", "ip=203.0.113.9"]);
    assert_eq!((output.code, &*output.err), (Some(1), ""), "{output:?}");
    assert!(output.out.starts_with("DENIED  by login-per-ip: retry in "), "{output:?}");
    assert!(
        output.lines()[0].ends_with(" seconds") || output.lines()[0].ends_with(" 1 minute"),
        "{output:?}"
    );
}

#[test]
fn a_cost_above_the_limit_is_never_allowed() {
    let (_home, server) = server();
    let output = server.run(&["check", "route=login", "ip=203.0.113.9", "--cost", "6"]);
    assert_eq!(
        (output.code, output.lines()[0]),
        (Some(1), "DENIED  by login-per-ip: never allowed, retrying does not help")
    );
    assert!(output.lines()[3].ends_with("  never            -"), "{output:?}");
}

#[test]
fn a_cost_in_a_unit_that_no_rule_counts_is_reported() {
    let (_home, server) = server();
    let login = ["route=login", "ip=203.0.113.9", "--cost"];
    let nowhere =
        "NOT COUNTED  tokens: the rules that apply count requests; correct --cost or the unit of a rule";
    for (command, first) in [
        ("check", "ALLOWED  5 of 5 remaining (login-per-ip)"),
        ("peek", "ALLOWED  5 of 5 remaining (login-per-ip)"),
        ("explain", "ALLOWED  5 of 5 remaining (login-per-ip)"),
        ("charge", "NOTHING CHARGED  5 of 5 remaining (login-per-ip)"),
        ("refund", "NOTHING REFUNDED  5 of 5 remaining (login-per-ip)"),
    ] {
        let output = server.run(&[&[command], &login[..], &["tokens=5"]].concat());
        assert_eq!((output.code, &output.lines()[..2]), (Some(0), &[first, nowhere][..]), "{command}");
        assert!(!output.out.contains("--at"), "there is nothing to refund: {output:?}");
    }
    let output = server.run(&[&["check"], &login[..], &["requests=1,tokens=5"]].concat());
    assert_eq!(output.lines()[..2], ["ALLOWED  4 of 5 remaining (login-per-ip)", nowhere]);
    assert!(output.out.contains("refund with --at"), "{output:?}");
    for free in ["0", "requests=0,tokens=0"] {
        let output = server.run(&[&["check"], &login[..], &[free]].concat());
        assert_eq!(output.lines().len(), 4, "decision and table only: {output:?}");
    }
}

#[test]
fn a_refund_does_not_claim_that_units_were_refunded() {
    let (_home, server) = server();
    let login = ["route=login", "ip=203.0.113.9"];
    let checked = server.run(&[&["check"], &login[..]].concat());
    let at = checked.out.split("--at ").nth(1).unwrap().split_whitespace().next().unwrap();
    for _ in ["what was counted", "nothing any more"] {
        let output = server.run(&[&["refund"], &login[..], &["--at", at]].concat());
        assert_eq!(
            output.lines()[0],
            "REFUNDED  as far as it still counted: 5 of 5 remaining (login-per-ip)"
        );
    }
    // seconds instead of microseconds
    for long_ago in ["5", &at[..10]] {
        let output = server.run(&[&["refund"], &login[..], &["--at", long_ago]].concat());
        assert_eq!(output.code, Some(0), "{output:?}");
        let first = format!("NOTHING REFUNDED  {long_ago} is older than every window");
        assert!(output.out.starts_with(&first) && output.lines()[0].contains("at_us"), "{output:?}");
    }
}

#[test]
fn a_rule_that_denies_without_counting_is_distinguished_from_an_unchecked_one() {
    let blocked = "[[rule.override]]\nwhen = { user = \"mallory\" }\nblocked = true\n";
    let home = ConfigDir::new(&format!("{RULES}{blocked}"));
    let config = home.path().join("sluicegate.toml");
    let ask = |command: &str, store: &[&str]| {
        let labels = [command, "route=login", "ip=203.0.113.9", "user=mallory"];
        run(sluicegate(&labels).arg("--config").arg(&config).args(store))
    };
    let denied = ask("check", &[]);
    assert_eq!(denied.code, Some(1), "{denied:?}");
    assert_eq!(
        denied.lines()[..2],
        [
            "DENIED  by tokens-per-user: never allowed, retrying does not help",
            "the rule denies without counting; run sluicegate explain for the reason"
        ]
    );
    let explained = ask("explain", &[]);
    assert!(explained.out.contains("\n    not read: another rule denies\n"), "{explained:?}");
    assert!(explained.out.contains("\n    an override blocks this request\n"), "{explained:?}");
    assert!(!explained.out.contains("sluicegate explain"), "it does not recommend itself: {explained:?}");
    let away = ["explain", "route=login", "ip=203.0.113.9", "--store", "redis://127.0.0.1:1"];
    let away = run(sluicegate(&away).arg("--config").arg(&config));
    assert!(away.out.contains("\n    store unavailable: the counter was not read\n"), "{away:?}");
}

#[test]
fn a_peek_and_an_explanation_count_nothing() {
    let (_home, server) = server();
    for _ in 0..3 {
        let output = server.run(&["peek", "route=login", "ip=203.0.113.9"]);
        assert_eq!((output.code, output.lines()[0]), (Some(0), "ALLOWED  5 of 5 remaining (login-per-ip)"));
        let output = server.run(&["explain", "route=login", "ip=203.0.113.9", "--cost", "2"]);
        assert_eq!(
            output.lines(),
            [
                "ALLOWED  5 of 5 remaining (login-per-ip)",
                "",
                "Rules that apply",
                "  login-per-ip: 5 per 1m (sliding-log)",
                "    0 used + 2 requested = 2 of 5: fits",
                "    counter login-per-ip:203.0.113.9",
                "",
                "Rules that do not apply",
                "  tokens-per-user  per label user is missing",
            ]
        );
    }
    let output = server.run(&["peek", "other=1"]);
    let why = "run sluicegate explain with the same arguments for the reason";
    assert_eq!((output.code, output.lines()), (Some(0), vec!["ALLOWED  no rule applies", why]));
    let output = server.run(&["peek", "route=login,ip=203.0.113.9"]);
    let one = "\"route=login,ip=203.0.113.9\" is one label: separate labels by spaces";
    assert!(output.lines()[1].starts_with(one), "{output:?}");
}

#[test]
fn a_charge_may_create_a_debt_and_can_be_refunded_exactly() {
    let (_home, server) = server();
    let charged = server.run(&["charge", "user=42", "--cost", "tokens=1200"]);
    assert_eq!(charged.code, Some(0), "{charged:?}");
    assert_eq!(charged.lines()[0], "CHARGED  0 of 1000 remaining (tokens-per-user)");
    let at = charged.out.split("--at ").nth(1).unwrap().split_whitespace().next().unwrap();
    let output = server.run(&["check", "user=42", "--cost", "tokens=1"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    let output =
        server.run(&["refund", "user=42", "--cost", "tokens=1200", "--at", at, "--rules", "tokens-per-user"]);
    assert_eq!(
        (output.code, output.lines()[0]),
        (Some(0), "REFUNDED  as far as it still counted: 1000 of 1000 remaining (tokens-per-user)")
    );
    let output = server.run(&["check", "user=42", "--cost", "requests=1,tokens=850"]);
    assert_eq!(
        (output.code, output.lines()[0]),
        (Some(0), "ALLOWED  150 of 1000 remaining (tokens-per-user)")
    );
    let output = server.run(&["reset", "user=42"]);
    let deleted = "RESET  1 counter reset\n\nrule             counter\ntokens-per-user  tokens-per-user:42\n";
    assert_eq!((output.code, &*output.out), (Some(0), deleted));
    for (command, done) in [("charge", "NOTHING CHARGED"), ("refund", "NOTHING REFUNDED")] {
        let output = server.run(&[command, "unused=label"]);
        assert_eq!((output.code, output.lines()[0]), (Some(0), &*format!("{done}  no rule applies")));
    }
    let output = server.run(&["reset", "user=42", "--json"]);
    assert_eq!(output.code, Some(0));
    assert!(output.out.starts_with("{\"reset\":0,\"counters\":[],\"kept\":[],\"selected\":1"), "{output:?}");
}

#[test]
fn a_reset_that_no_rule_matches_lists_the_labels_that_are_missing() {
    let rules = "[[rule]]\nname = \"login-per-ip\"\nwhen = { route = \"login\" }\nper = [\"ip\", \"user\"]\namount = 5\n\
                 window = \"1m\"\n\n[[rule]]\nname = \"per-tenant\"\nper = [\"tenant\"]\namount = 5\nwindow = \"1m\"\n";
    let home = ConfigDir::new(&format!("{}{rules}", server_process::ANY_PORTS));
    let server = home.start();
    let output = server.run(&["reset", "ip=203.0.113.9"]);
    let expected = ["NOTHING RESET  no rule counts by these labels", "login-per-ip needs route=login user=…"];
    assert_eq!((output.code, &*output.lines()), (Some(1), &expected[..]));
    assert_eq!(server.run(&["reset", "ip=203.0.113.9", "--json"]).code, Some(1));
    let output = server.run(&["reset", "tenant=acme"]);
    assert_eq!((output.code, &*output.lines()), (Some(0), &["RESET  no counters found"][..]));
}

#[test]
fn a_reset_on_redis_warns_about_cached_denials_of_other_instances() {
    let redis = Server::start(Flavor::Redis7);
    let rule = "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\namount = 5\nwindow = \"1m\"\n";
    let store = format!("[store]\nurl = \"{}\"\ndeadline = \"2s\"\ndenial_cache = \"250ms\"\n", redis.url());
    let home = ConfigDir::new(&format!("{}{store}{rule}", server_process::ANY_PORTS));
    let server = home.start();
    let warning = "other instances may repeat a cached denial for up to 250ms (store.denial_cache)";
    assert_eq!(server.run(&["reset", "ip=203.0.113.9"]).lines(), ["RESET  no counters found"]);
    server.run(&["check", "ip=203.0.113.9"]);
    let output = server.run(&["reset", "ip=203.0.113.9"]);
    assert_eq!((output.code, output.lines().last()), (Some(0), Some(&warning)), "{output:?}");
}

#[test]
fn a_reset_lists_its_counters_and_keeps_shared_ones() {
    let rules = "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\namount = 5\nwindow = \"1m\"\n\n\
                 [[rule]]\nname = \"total\"\namount = 100\nwindow = \"1m\"\n";
    let home = ConfigDir::new(&format!("{}{rules}", server_process::ANY_PORTS));
    let server = home.start();
    server.run(&["check", "route=api", "ip=203.0.113.9"]);
    let output = server.run(&["reset", "route=api", "ip=203.0.113.9"]);
    assert_eq!(
        output.lines(),
        [
            "RESET  1 counter reset",
            "",
            "rule    counter",
            "per-ip  per-ip:203.0.113.9",
            "",
            "rules not reset: total; select them with --rules or --all",
        ]
    );
    assert_eq!(server.run(&["reset", "ip=203.0.113.9", "--rules", "total"]).lines()[3], "total  total:*");
    server.run(&["check", "ip=203.0.113.9"]);
    let output = server.run(&["reset", "ip=203.0.113.9", "--all", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!((&json["reset"], &json["counters"][1]["rule"]), (&2.into(), &"total".into()), "{json}");
}

#[test]
fn a_key_is_checked_in_a_calendar_window() {
    let (_home, server) = server();
    let key = [
        "--key",
        "user:42",
        "--limit",
        "2 per 1 year",
        "--algorithm",
        "fixed-window",
        "--zone",
        "Asia/Tokyo",
    ];
    let explain = |anchor: &str| {
        let output = server.run(&[&["explain"], &key[..], &["--anchor", anchor]].concat());
        assert!(output.out.contains("2 per 1 year in Asia/Tokyo"), "{output:?}");
        output.out
    };
    assert!(explain("15").contains("1 year in Asia/Tokyo from day 15 (fixed-window)"));
    assert!(explain("1").contains("1 year in Asia/Tokyo (fixed-window)"));
    let output = server.run(&[&["check"], &key[..]].concat());
    assert!(output.out.starts_with("ALLOWED  1 of 2 remaining"), "{output:?}");
}

#[test]
fn a_key_is_checked_without_rules() {
    let (_home, server) = server();
    let key = ["--key", "user:42", "--limit", "2 per 1m", "--algorithm", "sliding-log"];
    for (code, first) in
        [(0, "ALLOWED  1 of 2 remaining"), (0, "ALLOWED  0 of 2 remaining"), (1, "DENIED  retry in ")]
    {
        let output = server.run(&[&["check"], &key[..]].concat());
        assert!(output.code == Some(code) && output.out.starts_with(first), "{output:?}");
    }
    let deleted = "RESET  1 counter reset\n\nrule      counter\nthis key  !key:user%3a42\n";
    assert_eq!(server.run(&[&["reset"], &key[..]].concat()).out, deleted);
    for limit in ["10/1s", "10 per second", "10 per s"] {
        let output = server.run(&["peek", "--key", "user:42", "--limit", limit, "--burst", "30"]);
        assert_eq!(output.lines()[0], "ALLOWED  30 of 30 remaining");
    }
}

#[test]
fn colours_are_used_only_on_terminals_and_if_not_disabled() {
    let check = ["check", "--store", "memory:", "route=login", "ip=1.1.1.1"];
    let piped = run(&mut sluicegate(&check));
    let unwanted = run(sluicegate(&check).env("NO_COLOR", "1").env("CLICOLOR_FORCE", "0"));
    for output in [piped, unwanted] {
        assert!(!output.out.contains('\x1b') && !output.err.contains('\x1b'), "{output:?}");
    }
    let forced = run(sluicegate(&check).env("CLICOLOR_FORCE", "1"));
    assert!(forced.out.starts_with("\x1b[1m\x1b[32mALLOWED\x1b[0m  "), "{forced:?}");
}
