use super::{RULES, server};
use crate::{
    command::{said, tollgate},
    program::Home,
};

#[test]
fn five_logins_pass_and_the_sixth_is_told_when_to_come_back() {
    let (_home, server) = server();
    for left in ["4", "3", "2", "1", "0"] {
        let said = server.ask(&["check", "route=login", "ip=203.0.113.9"]);
        assert_eq!(said.code, Some(0), "{said:?}");
        let lines = said.lines();
        assert_eq!(lines[0], format!("ALLOWED  {left} of 5 left by login-per-ip"));
        assert_eq!(lines[2], "rule          says     left  of  unit      wait  all free in");
        assert!(
            lines[3].starts_with(&format!("login-per-ip  allowed     {left}   5  requests     -  ")),
            "{said:?}"
        );
        assert!(lines[5].starts_with("tollgate refund with --at 1"), "{said:?}");
    }
    let said = server.ask(&["check", "route=login", "ip=203.0.113.9"]);
    assert_eq!((said.code, &*said.err), (Some(1), ""), "{said:?}");
    assert!(said.out.starts_with("DENIED  by login-per-ip: try again in "), "{said:?}");
    assert!(said.lines()[0].ends_with(" seconds") || said.lines()[0].ends_with(" 1 minute"), "{said:?}");
}

#[test]
fn a_cost_that_never_fits_says_that_waiting_does_not_help() {
    let (_home, server) = server();
    let said = server.ask(&["check", "route=login", "ip=203.0.113.9", "--cost", "6"]);
    assert_eq!((said.code, said.lines()[0]), (Some(1), "DENIED  by login-per-ip: waiting does not help"));
    assert!(said.lines()[3].ends_with("  never            -"), "{said:?}");
}

#[test]
fn a_cost_in_a_unit_that_no_rule_counts_is_said_to_count_nowhere() {
    let (_home, server) = server();
    let login = ["route=login", "ip=203.0.113.9", "--cost"];
    let nowhere =
        "NOT COUNTED  tokens: the rules that apply count requests; correct --cost, or a rule's unit";
    for (command, first) in [
        ("check", "ALLOWED  5 of 5 left by login-per-ip"),
        ("peek", "ALLOWED  5 of 5 left by login-per-ip"),
        ("explain", "ALLOWED  5 of 5 left by login-per-ip"),
        ("charge", "NOTHING CHARGED  5 of 5 left by login-per-ip"),
        ("refund", "NOTHING REFUNDED  5 of 5 left by login-per-ip"),
    ] {
        let said = server.ask(&[&[command], &login[..], &["tokens=5"]].concat());
        assert_eq!((said.code, &said.lines()[..2]), (Some(0), &[first, nowhere][..]), "{command}");
        assert!(!said.out.contains("--at"), "nothing is there to be taken back: {said:?}");
    }
    let said = server.ask(&[&["check"], &login[..], &["requests=1,tokens=5"]].concat());
    assert_eq!(said.lines()[..2], ["ALLOWED  4 of 5 left by login-per-ip", nowhere]);
    assert!(said.out.contains("refund with --at"), "{said:?}");
    for free in ["0", "requests=0,tokens=0"] {
        let said = server.ask(&[&["check"], &login[..], &[free]].concat());
        assert_eq!(said.lines().len(), 4, "a look, and nothing else: {said:?}");
    }
}

#[test]
fn a_refund_does_not_claim_that_there_was_something_to_take_back() {
    let (_home, server) = server();
    let login = ["route=login", "ip=203.0.113.9"];
    let checked = server.ask(&[&["check"], &login[..]].concat());
    let at = checked.out.split("--at ").nth(1).unwrap().split(' ').next().unwrap();
    for _ in ["what was counted", "nothing any more"] {
        let said = server.ask(&[&["refund"], &login[..], &["--at", at]].concat());
        assert_eq!(said.lines()[0], "REFUNDED  as far as it still counted: 5 of 5 left by login-per-ip");
    }
    // seconds in the place of microseconds
    for long_ago in ["5", &at[..10]] {
        let said = server.ask(&[&["refund"], &login[..], &["--at", long_ago]].concat());
        assert_eq!(said.code, Some(0), "{said:?}");
        let first = format!("NOTHING REFUNDED  {long_ago} is too long ago");
        assert!(said.out.starts_with(&first) && said.lines()[0].contains("at_us"), "{said:?}");
    }
}

#[test]
fn a_rule_that_refuses_outright_is_told_from_one_that_is_not_looked_at() {
    let blocked = "[[rule.override]]\nwhen = { user = \"mallory\" }\nblocked = true\n";
    let home = Home::with(&format!("{RULES}{blocked}"));
    let config = home.path().join("tollgate.toml");
    let ask = |command: &str, store: &[&str]| {
        let labels = [command, "route=login", "ip=203.0.113.9", "user=mallory"];
        said(tollgate(&labels).arg("--config").arg(&config).args(store))
    };
    let refused = ask("check", &[]);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert_eq!(
        refused.lines()[..2],
        [
            "DENIED  by tokens-per-user: waiting does not help",
            "the rule refuses without counting: tollgate explain says why"
        ]
    );
    let explained = ask("explain", &[]);
    assert!(explained.out.contains("\n    not looked at: another rule refuses already\n"), "{explained:?}");
    assert!(
        explained.out.contains("\n    an override blocks this request, whatever is left\n"),
        "{explained:?}"
    );
    let away = ["explain", "route=login", "ip=203.0.113.9", "--store", "redis://127.0.0.1:1"];
    let away = said(tollgate(&away).arg("--config").arg(&config));
    assert!(
        away.out.contains("\n    the store is away, so that the counter could not be looked at\n"),
        "{away:?}"
    );
}

#[test]
fn a_peek_and_an_explanation_count_nothing() {
    let (_home, server) = server();
    for _ in 0..3 {
        let said = server.ask(&["peek", "route=login", "ip=203.0.113.9"]);
        assert_eq!((said.code, said.lines()[0]), (Some(0), "ALLOWED  5 of 5 left by login-per-ip"));
        let said = server.ask(&["explain", "route=login", "ip=203.0.113.9", "--cost", "2"]);
        assert_eq!(
            said.lines(),
            [
                "ALLOWED  5 of 5 left by login-per-ip",
                "",
                "Rules that apply",
                "  login-per-ip: 5 per 1m by sliding-log",
                "    0 used + 2 asked = 2 of 5: fits",
                "    counter login-per-ip:203.0.113.9",
                "",
                "Rules that do not",
                "  tokens-per-user  per label user is missing",
            ]
        );
    }
    let said = server.ask(&["peek", "other=1"]);
    let why = "tollgate explain with the same words says why";
    assert_eq!((said.code, said.lines()), (Some(0), vec!["ALLOWED  no rule applies", why]));
    let said = server.ask(&["peek", "route=login,ip=203.0.113.9"]);
    let one = "\"route=login,ip=203.0.113.9\" is one label: write each as a word of its own";
    assert!(said.lines()[1].starts_with(one), "{said:?}");
}

#[test]
fn a_charge_may_go_into_debt_and_can_be_taken_back_exactly() {
    let (_home, server) = server();
    let charged = server.ask(&["charge", "user=42", "--cost", "tokens=1200"]);
    assert_eq!(charged.code, Some(0), "{charged:?}");
    assert_eq!(charged.lines()[0], "CHARGED  0 of 1000 left by tokens-per-user");
    let at = charged.out.split("--at ").nth(1).unwrap().split(' ').next().unwrap();
    let said = server.ask(&["check", "user=42", "--cost", "tokens=1"]);
    assert_eq!(said.code, Some(1), "{said:?}");
    let said =
        server.ask(&["refund", "user=42", "--cost", "tokens=1200", "--at", at, "--rules", "tokens-per-user"]);
    assert_eq!(
        (said.code, said.lines()[0]),
        (Some(0), "REFUNDED  as far as it still counted: 1000 of 1000 left by tokens-per-user")
    );
    let said = server.ask(&["check", "user=42", "--cost", "requests=1,tokens=850"]);
    assert_eq!((said.code, said.lines()[0]), (Some(0), "ALLOWED  150 of 1000 left by tokens-per-user"));
    let said = server.ask(&["reset", "user=42"]);
    assert_eq!((said.code, &*said.out), (Some(0), "RESET  1 counter is forgotten\n"));
    for (command, done) in [("charge", "NOTHING CHARGED"), ("refund", "NOTHING REFUNDED")] {
        let said = server.ask(&[command, "nobody=knows"]);
        assert_eq!((said.code, said.lines()[0]), (Some(0), &*format!("{done}  no rule applies")));
    }
    let said = server.ask(&["reset", "user=42", "--json"]);
    assert_eq!((said.code, &*said.out), (Some(0), "{\"reset\":0}\n"));
}

#[test]
fn a_key_is_asked_about_without_rules() {
    let (_home, server) = server();
    let key = ["--key", "user:42", "--limit", "2 per 1m", "--algorithm", "sliding-log"];
    for (code, first) in
        [(0, "ALLOWED  1 of 2 left"), (0, "ALLOWED  0 of 2 left"), (1, "DENIED  try again in ")]
    {
        let said = server.ask(&[&["check"], &key[..]].concat());
        assert!(said.code == Some(code) && said.out.starts_with(first), "{said:?}");
    }
    assert_eq!(server.ask(&[&["reset"], &key[..]].concat()).out, "RESET  1 counter is forgotten\n");
    for limit in ["10/1s", "10 per second", "10 per s"] {
        let said = server.ask(&["peek", "--key", "user:42", "--limit", limit, "--burst", "30"]);
        assert_eq!(said.lines()[0], "ALLOWED  30 of 30 left");
    }
}

#[test]
fn colours_are_for_terminals_only_and_not_where_they_are_unwanted() {
    let check = ["check", "--store", "memory:", "route=login", "ip=1.1.1.1"];
    let piped = said(&mut tollgate(&check));
    let unwanted = said(tollgate(&check).env("NO_COLOR", "1").env("CLICOLOR_FORCE", "0"));
    for said in [piped, unwanted] {
        assert!(!said.out.contains('\x1b') && !said.err.contains('\x1b'), "{said:?}");
    }
    let forced = said(tollgate(&check).env("CLICOLOR_FORCE", "1"));
    assert!(forced.out.starts_with("\x1b[1m\x1b[32mALLOWED\x1b[0m  "), "{forced:?}");
}
