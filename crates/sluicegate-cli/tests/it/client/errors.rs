use std::net::TcpListener;

use sluicegate_testkit::{
    server::{Flavor, Server, Setup},
    tls::Certificates,
};

use super::{RULES, server};
use crate::{
    command::{run, sluicegate},
    server_process::{ANY_PORTS, ConfigDir},
};

/// Runs a failing command; returns the error message, which is the last line.
fn error(words: &[&str], variables: &[(&str, &str)]) -> String {
    let output = run(sluicegate(words).envs(variables.iter().copied()));
    assert_eq!((output.code, &*output.out), (Some(2), ""), "{output:?}");
    let last = output.err.lines().last().unwrap();
    assert!(last.starts_with("sluicegate: "), "{output:?}");
    last.to_owned()
}

/// An address without a listener.
fn unused_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_refused_connection_is_an_error_with_a_remedy() {
    let address = format!("http://{}", unused_address());
    let output = error(&["check", "a=1", "--server", &address], &[]);
    assert!(
        output.contains(&format!("connection to {address} refused: start a server with sluicegate serve")),
        "{output}"
    );
    let output = error(&["check", "a=1", "--json"], &[("SLUICEGATE_SERVER", &address)]);
    assert!(output.contains(&address), "{output}");
}

#[test]
fn invalid_and_unreachable_addresses_have_different_errors() {
    let table = [
        (
            "http://no-such-host.invalid",
            "cannot resolve the host of http://no-such-host.invalid: correct --server",
        ),
        ("127.0.0.1:8080", "is not a server URL: use for example http://127.0.0.1:8080"),
        ("ftp://127.0.0.1", "is not a server URL"),
        ("", "is not a server URL"),
    ];
    for (server, remedy) in table {
        let output = error(&["check", "a=1", "--server", server], &[]);
        assert!(output.contains(remedy), "{output}");
    }
    let (_home, program) = server();
    for address in [&program.grpc, &program.resp] {
        let output = error(&["check", "a=1", "--server", &format!("http://{address}")], &[]);
        assert!(output.contains("sluicegate server's HTTP front end"), "{output}");
    }
    let output = error(&["check", "a=1", "--server", &format!("https://{}", program.http)], &[]);
    assert!(output.contains("use http:// if the server does not use TLS"), "{output}");
    let output = error(&["check", "a=1", "--server", &format!("http://{}/elsewhere", program.http)], &[]);
    assert!(output.contains("there is no /elsewhere/v1/check"), "{output}");
}

#[test]
fn a_token_is_required_and_sent() {
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[[server.token]]\nname = \"app\"\nfile = \"token\"\nmay = [\"check\"]\n{RULES}"
    ));
    home.write("token", "0123456789abcdef0123456789abcdef\n");
    let program = home.start();
    let url = format!("http://{}", program.http);
    let server = ("SLUICEGATE_SERVER", &*url);
    let missing = error(&["check", "a=1"], &[server]);
    assert!(
        missing.contains("missing token") && missing.contains("set SLUICEGATE_TOKEN to a token of"),
        "{missing}"
    );
    let wrong = error(&["check", "a=1"], &[server, ("SLUICEGATE_TOKEN", "wrong")]);
    assert!(wrong.contains("unknown token") && wrong.contains("set SLUICEGATE_TOKEN"), "{wrong}");
    let token = ("SLUICEGATE_TOKEN", "0123456789abcdef0123456789abcdef");
    let weak = error(&["reset", "a=1"], &[server, token]);
    assert!(weak.contains("lacks the scope \"admin\"") && !weak.contains(token.1), "{weak}");
    let unsendable = error(&["check", "a=1"], &[server, ("SLUICEGATE_TOKEN", "a\nb")]);
    assert!(unsendable.contains("SLUICEGATE_TOKEN contains characters"), "{unsendable}");
    assert_eq!(run(sluicegate(&["check", "a=1"]).envs([server, token])).code, Some(0));
}

#[test]
fn a_tls_server_is_verified_and_may_require_a_client_certificate() {
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[server.tls]\ncert = \"server.pem\"\nkey = \"server.key\"\n{RULES}"
    ));
    let files = Certificates::issue(home.path(), [127, 0, 0, 1].into());
    let program = home.start();
    let url = format!("https://{}", program.http);
    let ca = files.authority.to_str().unwrap();
    let check = ["check", "route=login", "ip=1.1.1.1", "--server", &url];
    let run_with = |more: &[&str]| run(&mut sluicegate(&[&check[..], more].concat()));
    let untrusted = error(&check, &[]);
    assert!(untrusted.contains("set --ca to the authority of its certificate"), "{untrusted}");
    let trusted = run_with(&["--ca", ca]);
    assert_eq!(
        (trusted.code, trusted.lines()[0]),
        (Some(0), "ALLOWED  4 of 5 remaining (login-per-ip)"),
        "{trusted:?}"
    );
    for (more, remedy) in [
        (["--ca", "/nowhere"], "--ca: cannot read /nowhere: No such file"),
        (["--ca", files.server_key.to_str().unwrap()], "contains no certificate: use a PEM file"),
    ] {
        let output = error(&[&check[..], &more].concat(), &[]);
        assert!(output.contains(remedy), "{output}");
    }
    let plain = error(&["check", "a=1", "--server", &format!("http://{}", program.http)], &[]);
    assert!(plain.contains("with https:// if it uses TLS"), "{plain}");
    let in_vain = error(&["check", "a=1", "--server", "http://127.0.0.1:1", "--ca", ca], &[]);
    assert!(in_vain.contains("does not use TLS: use https://"), "{in_vain}");

    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[server.tls]\ncert = {:?}\nkey = {:?}\nclient_ca = {ca:?}\n{RULES}",
        files.server_certificate, files.server_key
    ));
    let program = home.start();
    let url = format!("https://{}", program.http);
    let check = ["check", "route=login", "ip=1.1.1.1", "--server", &url, "--ca", ca];
    let unknown = error(&check, &[]);
    assert!(unknown.contains("set --client-cert and --client-key"), "{unknown}");
    let shown = [
        "--client-cert",
        files.client_certificate.to_str().unwrap(),
        "--client-key",
        files.client_key.to_str().unwrap(),
    ];
    let known = run(&mut sluicegate(&[&check[..], &shown].concat()));
    assert_eq!(known.code, Some(0), "{known:?}");
}

#[test]
fn errors_of_the_api_are_passed_on() {
    let (_home, program) = server();
    let url = format!("http://{}", program.http);
    let month = ["check", "--key", "k", "--limit", "1 per 1 month", "--algorithm", "fixed-window"];
    let table: [(&[&str], &str); 9] = [
        (&month[..5], "token-bucket has no calendar windows: use fixed-window"),
        (&[&month[..], &["--zone", "Mars"]].concat(), "zone \"Mars\" is unknown: use a name of the IANA"),
        (&[&month[..], &["--anchor", "friday"]].concat(), "anchor \"friday\" does not fit \"1 month\""),
        (&[&month[..], &["--anchor", "32"]].concat(), "use a day of the month, 1 to 31"),
        (&["check", "a=1", "a=2"], "label \"a\" is given more than once"),
        (&["check", "--key", "k", "--limit", "1 per 4000d"], "out of range"),
        (
            &["check", "--key", "k", "--limit", "1 per 1m", "--cost", "tokens=1"],
            "the cost of a key has no units",
        ),
        (&["charge", "user=1", "--rules", "nope"], "there is no rule \"nope\": use login-per-ip"),
        (&["check", "user=1", "--cost", "tokens=1,tokens=2"], "unit \"tokens\" is named more than once"),
    ];
    for (words, remedy) in table {
        let output = error(words, &[("SLUICEGATE_SERVER", &url)]);
        assert!(output.contains(remedy), "{output}");
        let direct = error(&[words, &["--store", "redis://127.0.0.1:1"]].concat(), &[]);
        assert!(direct.contains(remedy), "{direct}");
    }
}

#[test]
fn the_fix_of_a_store_that_does_not_decide_fits_its_error() {
    let redis = Server::start(Flavor::Redis7);
    let check = ["check", "route=login", "ip=1.1.1.1", "--store", &redis.url()];
    redis.config_set("maxmemory", 1);
    let output = run(&mut sluicegate(&check));
    assert!(
        output.lines()[2].contains("OOM ") && output.lines()[2].contains("raise maxmemory"),
        "{output:?}"
    );
    redis.config_set("maxmemory", 0);
    redis.suspend();
    let hangs = "but no reply within 2s: Redis hangs or runs a long command: check its CPU and SLOWLOG GET";
    let output = run(&mut sluicegate(&check));
    assert!(output.lines()[2].contains(hangs), "{output:?}");
    let doctor = run(&mut sluicegate(&["doctor", "--store", &redis.url()]));
    let problem = format!("connected to {}, but no reply within 2s", redis.addr());
    assert!(doctor.out.contains(&problem) && !doctor.out.contains("firewall"), "{doctor:?}");
    redis.resume();
}

#[test]
fn an_unavailable_store_is_reported_without_its_password() {
    let url = format!("redis://:s3cret@{}", unused_address());
    let output = run(&mut sluicegate(&["check", "route=login", "ip=1.1.1.1", "--store", &url]));
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(output.lines()[0], "ALLOWED  4 of 5 remaining (login-per-ip)");
    assert_eq!(
        output.lines()[1],
        "DEGRADED  store unavailable: decided by this process's share of the limit (failure policy local)"
    );
    assert!(output.lines()[2].starts_with("WHY  cannot connect to 127.0.0.1:"), "{output:?}");
    assert!(output.lines()[2].contains("check that the server is running"), "{output:?}");
    assert!(!format!("{output:?}").contains("s3cret"), "{output:?}");
    let charge = error(&["charge", "route=login", "ip=1.1.1.1", "--store", &url], &[]);
    assert!(
        charge.contains("nothing changed: cannot connect to") && charge.contains("sluicegate doctor"),
        "{charge}"
    );
    let wrong = error(&["check", "a=1", "--store", "postgres://:s3cret@host"], &[]);
    assert!(wrong.starts_with("sluicegate: --store: ") && !wrong.contains("s3cret"), "{wrong}");
    let no_file = error(&["check", "a=1", "--config", "nowhere.toml"], &[]);
    assert!(no_file.contains("--config: cannot read nowhere.toml"), "{no_file}");
}

#[test]
fn a_store_that_rejects_the_connection_is_diagnosed() {
    let redis = Setup::new(Flavor::Redis7).password("right").start();
    for (login, database, why) in [
        (":s3cret@", "", "wrong user, password or permissions"),
        ("", "", "wrong user, password or permissions"),
        (":right@", "/99", "the database number in the URL does not exist"),
    ] {
        let url = format!("redis://{login}{}{database}", redis.addr());
        for command in ["check", "peek", "explain"] {
            let output = run(&mut sluicegate(&[command, "route=login", "ip=1.1.1.1", "--store", &url]));
            assert_eq!(output.code, Some(0), "{output:?}");
            assert!(output.lines()[1].starts_with("DEGRADED  "), "{output:?}");
            assert!(output.lines()[2].starts_with("WHY  ") && output.lines()[2].contains(why), "{output:?}");
            assert!(!format!("{output:?}").contains("s3cret"), "{output:?}");
        }
    }
}

#[test]
fn invalid_flag_values_are_rejected_with_the_valid_ones() {
    let key = ["check", "--key", "k", "--limit"];
    let without_window = error(&[&key[..], &["100"]].concat(), &[]);
    assert!(without_window.contains("\"100 per minute\" or 100/1m; only concurrency"), "{without_window}");
    let table: [(&[&str], &str); 13] = [
        (&["check"], "<LABEL=VALUE|--key <KEY>>"),
        (&["check", "--key", "k"], "--limit <AMOUNT per WINDOW>"),
        (
            &["check", "a=1", "--cost", "-1"],
            "use a whole number up to 9007199254740991, or one for each unit",
        ),
        (&["check", "a=1", "--cost", "1.5"], "or one for each unit as in requests=1,tokens=850"),
        (&["refund", "a=1", "--at", "abc"], "use the at_us of the response that counted it"),
        (&["refund", "a=1", "--at", "99999999999999999"], "use the at_us of the response that counted it"),
        (&["refund", "a=1", "--at", "-1"], "use the at_us of the response that counted it"),
        (&[&key[..], &["100 per fortnight"]].concat(), "or use second, minute, hour or day"),
        (&[&key[..], &["100 per 1y"]].concat(), "\"1y\" is not a duration"),
        (&[&key[..], &["100 per 60"]].concat(), "60s for seconds"),
        (&[&key[..], &["1/1m", "--burst", "lots"]].concat(), "use a whole number, for example 200"),
        (&["serve", "--otlp-share", "2"], "use a number from 0 to 1"),
        (&["serve", "--log", "verbose"], "use off, error, warn, info, debug, trace"),
    ];
    for (words, right) in table {
        let output = run(&mut sluicegate(words));
        assert_eq!((output.code, &*output.out), (Some(2), ""), "{output:?}");
        assert!(output.err.starts_with("error: ") && output.err.contains(right), "{right}: {output:?}");
    }
}

#[test]
fn conflicting_arguments_are_rejected() {
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
        let output = run(&mut sluicegate(words));
        assert_eq!((output.code, &*output.out), (Some(2), ""), "{output:?}");
        assert!(output.err.starts_with("error: "), "{output:?}");
    }
}
