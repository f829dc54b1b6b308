use std::net::TcpListener;

use tollgate_testkit::{
    server::{Flavor, Setup},
    tls::Certificates,
};

use super::{RULES, server};
use crate::{
    command::{said, tollgate},
    program::{ANY_PORTS, Home},
};

/// What an error says: the last line, after notes.
fn error(words: &[&str], variables: &[(&str, &str)]) -> String {
    let said = said(tollgate(words).envs(variables.iter().copied()));
    assert_eq!((said.code, &*said.out), (Some(2), ""), "{said:?}");
    let last = said.err.lines().last().unwrap();
    assert!(last.starts_with("tollgate: "), "{said:?}");
    last.to_owned()
}

/// An address where nobody listens.
fn nobody() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_server_that_is_not_there_is_an_error_that_says_how_to_start_one() {
    let address = format!("http://{}", nobody());
    let said = error(&["check", "a=1", "--server", &address], &[]);
    assert!(
        said.contains(&format!("nothing listens at {address}: start a server with tollgate serve")),
        "{said}"
    );
    let said = error(&["check", "a=1", "--json"], &[("TOLLGATE_SERVER", &address)]);
    assert!(said.contains(&address), "{said}");
}

#[test]
fn an_address_that_is_none_is_told_from_one_that_does_not_answer() {
    let table = [
        ("http://no-such-host.invalid", "is not known: correct --server"),
        ("127.0.0.1:8080", "is no server's URL: write for example http://127.0.0.1:8080"),
        ("ftp://127.0.0.1", "is no server's URL"),
        ("", "is no server's URL"),
    ];
    for (server, remedy) in table {
        let said = error(&["check", "a=1", "--server", server], &[]);
        assert!(said.contains(remedy), "{said}");
    }
    let (_home, program) = server();
    for address in [&program.grpc, &program.resp] {
        let said = error(&["check", "a=1", "--server", &format!("http://{address}")], &[]);
        assert!(said.contains("tollgate server's HTTP front end"), "{said}");
    }
    let said = error(&["check", "a=1", "--server", &format!("https://{}", program.http)], &[]);
    assert!(said.contains("use http:// if it has no certificates"), "{said}");
    let said = error(&["check", "a=1", "--server", &format!("http://{}/elsewhere", program.http)], &[]);
    assert!(said.contains("there is no /elsewhere/v1/check"), "{said}");
}

#[test]
fn a_token_is_asked_for_and_sent() {
    let home = Home::with(&format!(
        "{ANY_PORTS}[[server.token]]\nname = \"app\"\nfile = \"token\"\nmay = [\"check\"]\n{RULES}"
    ));
    home.write("token", "0123456789abcdef0123456789abcdef\n");
    let program = home.start();
    let url = format!("http://{}", program.http);
    let server = ("TOLLGATE_SERVER", &*url);
    let said_without = error(&["check", "a=1"], &[server]);
    assert!(
        said_without.contains("missing token") && said_without.contains("set TOLLGATE_TOKEN to one that"),
        "{said_without}"
    );
    let wrong = error(&["check", "a=1"], &[server, ("TOLLGATE_TOKEN", "wrong")]);
    assert!(wrong.contains("unknown token") && wrong.contains("set TOLLGATE_TOKEN"), "{wrong}");
    let token = ("TOLLGATE_TOKEN", "0123456789abcdef0123456789abcdef");
    let weak = error(&["reset", "a=1"], &[server, token]);
    assert!(weak.contains("lacks the scope \"admin\"") && !weak.contains(token.1), "{weak}");
    let unsendable = error(&["check", "a=1"], &[server, ("TOLLGATE_TOKEN", "a\nb")]);
    assert!(unsendable.contains("TOLLGATE_TOKEN has characters"), "{unsendable}");
    assert_eq!(said(tollgate(&["check", "a=1"]).envs([server, token])).code, Some(0));
}

#[test]
fn an_encrypted_server_is_trusted_by_its_authority_and_may_ask_who_calls() {
    let home =
        Home::with(&format!("{ANY_PORTS}[server.tls]\ncert = \"server.pem\"\nkey = \"server.key\"\n{RULES}"));
    let files = Certificates::issue(home.path(), [127, 0, 0, 1].into());
    let program = home.start();
    let url = format!("https://{}", program.http);
    let ca = files.authority.to_str().unwrap();
    let check = ["check", "route=login", "ip=1.1.1.1", "--server", &url];
    let said_of = |more: &[&str]| said(&mut tollgate(&[&check[..], more].concat()));
    let untrusted = error(&check, &[]);
    assert!(untrusted.contains("name the authority of its certificate with --ca"), "{untrusted}");
    let trusted = said_of(&["--ca", ca]);
    assert_eq!(
        (trusted.code, trusted.lines()[0]),
        (Some(0), "ALLOWED  4 of 5 left by login-per-ip"),
        "{trusted:?}"
    );
    for (more, remedy) in [
        (["--ca", "/nowhere"], "--ca: cannot read /nowhere: No such file"),
        (["--ca", files.server_key.to_str().unwrap()], "has no certificate: name a file of PEM"),
    ] {
        let said = error(&[&check[..], &more].concat(), &[]);
        assert!(said.contains(remedy), "{said}");
    }
    let plain = error(&["check", "a=1", "--server", &format!("http://{}", program.http)], &[]);
    assert!(plain.contains("with https:// if it has certificates"), "{plain}");
    let in_vain = error(&["check", "a=1", "--server", "http://127.0.0.1:1", "--ca", ca], &[]);
    assert!(in_vain.contains("is not encrypted: use https://"), "{in_vain}");

    let home = Home::with(&format!(
        "{ANY_PORTS}[server.tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {ca:?}\n{RULES}",
        files.server_certificate, files.server_key
    ));
    let program = home.start();
    let url = format!("https://{}", program.http);
    let check = ["check", "route=login", "ip=1.1.1.1", "--server", &url, "--ca", ca];
    let unknown = error(&check, &[]);
    assert!(unknown.contains("show one with --client-cert and --client-key"), "{unknown}");
    let shown = [
        "--client-cert",
        files.client_certificate.to_str().unwrap(),
        "--client-key",
        files.client_key.to_str().unwrap(),
    ];
    let known = said(&mut tollgate(&[&check[..], &shown].concat()));
    assert_eq!(known.code, Some(0), "{known:?}");
}

#[test]
fn what_the_server_cannot_use_is_said_in_its_words() {
    let (_home, program) = server();
    let url = format!("http://{}", program.http);
    let table: [(&[&str], &str); 5] = [
        (&["check", "a=1", "a=2"], "label \"a\" is given more than once"),
        (&["check", "--key", "k", "--limit", "1 per 4000d"], "out of range"),
        (
            &["check", "--key", "k", "--limit", "1 per 1m", "--cost", "tokens=1"],
            "the cost of a key has no units",
        ),
        (&["charge", "user=1", "--rules", "nope"], "there is no rule \"nope\": in force are login-per-ip"),
        (&["check", "user=1", "--cost", "tokens=1,tokens=2"], "unit \"tokens\" is named more than once"),
    ];
    for (words, remedy) in table {
        let said = error(words, &[("TOLLGATE_SERVER", &url)]);
        assert!(said.contains(remedy), "{said}");
        let direct = error(&[words, &["--store", "redis://127.0.0.1:1"]].concat(), &[]);
        assert!(direct.contains(remedy), "{direct}");
    }
}

#[test]
fn a_store_that_is_away_is_said_so_and_no_password_is_shown() {
    let url = format!("redis://:s3cret@{}", nobody());
    let said = said(&mut tollgate(&["check", "route=login", "ip=1.1.1.1", "--store", &url]));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(said.lines()[0], "ALLOWED  by what the rules say for a store that does not answer");
    assert_eq!(said.lines()[1], "DEGRADED  the store did not answer: it passes, as the rules say (open)");
    assert!(said.lines()[2].starts_with("WHY  cannot connect to 127.0.0.1:"), "{said:?}");
    assert!(said.lines()[2].contains("look whether it is up"), "{said:?}");
    assert!(!format!("{said:?}").contains("s3cret"), "{said:?}");
    let charge = error(&["charge", "route=login", "ip=1.1.1.1", "--store", &url], &[]);
    assert!(
        charge.contains("nothing changed: cannot connect to") && charge.contains("tollgate doctor"),
        "{charge}"
    );
    let wrong = error(&["check", "a=1", "--store", "postgres://:s3cret@host"], &[]);
    assert!(wrong.starts_with("tollgate: --store: ") && !wrong.contains("s3cret"), "{wrong}");
    let no_file = error(&["check", "a=1", "--config", "nowhere.toml"], &[]);
    assert!(no_file.contains("--config: cannot read nowhere.toml"), "{no_file}");
}

#[test]
fn a_store_that_does_not_let_one_in_says_why() {
    let redis = Setup::new(Flavor::Redis7).password("right").start();
    for (login, database, why) in [
        (":s3cret@", "", "user or password are wrong"),
        ("", "", "user or password are wrong"),
        (":right@", "/99", "is a database that it does not have"),
    ] {
        let url = format!("redis://{login}{}{database}", redis.addr());
        for command in ["check", "peek", "explain"] {
            let said = said(&mut tollgate(&[command, "route=login", "ip=1.1.1.1", "--store", &url]));
            assert_eq!(said.code, Some(0), "{said:?}");
            assert!(said.lines()[1].starts_with("DEGRADED  "), "{said:?}");
            assert!(said.lines()[2].starts_with("WHY  ") && said.lines()[2].contains(why), "{said:?}");
            assert!(!format!("{said:?}").contains("s3cret"), "{said:?}");
        }
    }
}

#[test]
fn what_a_flag_cannot_be_is_told_what_it_can() {
    let key = ["check", "--key", "k", "--limit"];
    let table: [(&[&str], &str); 14] = [
        (&["check"], "<LABEL=VALUE|--key <KEY>>"),
        (&["check", "--key", "k"], "--limit <AMOUNT per WINDOW>"),
        (
            &["check", "a=1", "--cost", "-1"],
            "write a whole number up to 9007199254740991, or one for each unit",
        ),
        (&["check", "a=1", "--cost", "1.5"], "or one for each unit as in requests=1,tokens=850"),
        (&["refund", "a=1", "--at", "abc"], "write the at_us of the answer that counted it"),
        (&["refund", "a=1", "--at", "99999999999999999"], "write the at_us of the answer that counted it"),
        (&["refund", "a=1", "--at", "-1"], "write the at_us of the answer that counted it"),
        (&[&key[..], &["100 per fortnight"]].concat(), "one of second, minute, hour, day"),
        (&[&key[..], &["100 per 1y"]].concat(), "\"1y\" is not a duration"),
        (&[&key[..], &["100 per 60"]].concat(), "60s for seconds"),
        (&[&key[..], &["100"]].concat(), "\"100 per minute\" or 100/1m"),
        (&[&key[..], &["1/1m", "--burst", "lots"]].concat(), "write a whole number, for example 200"),
        (&["serve", "--otlp-share", "2"], "write a number from 0 to 1"),
        (&["serve", "--log", "verbose"], "use off, error, warn, info, debug, trace"),
    ];
    for (words, right) in table {
        let said = said(&mut tollgate(words));
        assert_eq!((said.code, &*said.out), (Some(2), ""), "{said:?}");
        assert!(said.err.starts_with("error: ") && said.err.contains(right), "{right}: {said:?}");
    }
}

#[test]
fn words_that_do_not_go_together_are_refused_before_anything_is_asked() {
    let table: [&[&str]; 12] = [
        &["check"],
        &["check", "a=1", "--limit", "1/1m"],
        &["check", "a=1", "--algorithm", "gcra"],
        &["check", "a=1", "--burst", "1"],
        &["check", "route"],
        &["check", "a=1", "--key", "k", "--limit", "1/1m"],
        &["check", "--key", "k"],
        &["check", "a=1", "--cost", "x"],
        &["check", "a=1", "--rules", "login-per-ip"],
        &["reset", "a=1", "--cost", "1"],
        &["charge", "a=1", "--at", "1"],
        &["check", "a=1", "--server", "http://127.0.0.1:1", "--store", "memory:"],
    ];
    for words in table {
        let said = said(&mut tollgate(words));
        assert_eq!((said.code, &*said.out), (Some(2), ""), "{said:?}");
        assert!(said.err.starts_with("error: "), "{said:?}");
    }
}
