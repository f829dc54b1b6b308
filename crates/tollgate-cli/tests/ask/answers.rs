use crate::{said, server, tollgate};

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
    assert!(said.lines()[3].contains("  for ever  "), "{said:?}");
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
                "  tokens-per-user  there is no label user, by which it counts",
            ]
        );
    }
    let said = server.ask(&["peek", "other=1"]);
    assert_eq!((said.code, &*said.out), (Some(0), "ALLOWED  no rule applies\n"));
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
    assert_eq!((said.code, said.lines()[0]), (Some(0), "REFUNDED  1000 of 1000 left by tokens-per-user"));
    let said = server.ask(&["check", "user=42", "--cost", "requests=1,tokens=850"]);
    assert_eq!((said.code, said.lines()[0]), (Some(0), "ALLOWED  150 of 1000 left by tokens-per-user"));
    let said = server.ask(&["reset", "user=42"]);
    assert_eq!((said.code, &*said.out), (Some(0), "RESET  1 counter is forgotten\n"));
    for (command, done) in [("charge", "NOTHING CHARGED"), ("refund", "NOTHING REFUNDED")] {
        let said = server.ask(&[command, "nobody=knows"]);
        assert_eq!((said.code, &*said.out), (Some(0), &*format!("{done}  no rule applies\n")));
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
    let said = server.ask(&["peek", "--key", "user:42", "--limit", "10/1s", "--burst", "30"]);
    assert_eq!(said.lines()[0], "ALLOWED  30 of 30 left");
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
