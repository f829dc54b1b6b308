use serde_json::{Value, json};
use sluicegate_testkit::server::{Flavor, Server};

use super::RULES;
use crate::{
    command::{run, sluicegate},
    server_process::{ANY_PORTS, ConfigDir},
};

/// Every command, in a sequence that charges, denies, refunds and resets.
const CALLS: [&[&str]; 12] = [
    &["check", "route=login", "ip=IP", "user=USER", "--cost", "requests=3,tokens=10"],
    &["check", "route=login", "ip=IP", "--cost", "3"],
    &["peek", "route=login", "ip=IP", "--cost", "9"],
    &["explain", "route=login", "ip=IP", "--cost", "2"],
    &["charge", "route=login", "ip=IP", "user=USER", "--cost", "tokens=2000", "--rules", "tokens-per-user"],
    &["explain", "user=USER", "--cost", "tokens=1"],
    &["refund", "route=login", "ip=IP", "--cost", "2"],
    &["check", "other=label"],
    &["check", "--key", "key:USER", "--limit", "3 per 1m", "--burst", "5"],
    &["explain", "--key", "key:USER", "--limit", "3 per 1m", "--burst", "5"],
    &["reset", "route=login", "ip=IP", "user=USER"],
    &["reset", "--key", "key:USER", "--limit", "3 per 1m"],
];

/// The call with this address and user.
fn arguments(call: &[&str], ip: &str, user: &str) -> Vec<String> {
    call.iter().map(|word| word.replace("IP", ip).replace("USER", user)).collect()
}

/// The response without times, and with placeholders for address and user.
fn normalized(mut answer: Value, ip: &str, user: &str) -> Value {
    mask_times(&mut answer);
    let text = answer.to_string().replace(ip, "IP").replace(user, "USER");
    serde_json::from_str(&text).unwrap()
}

fn mask_times(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                match &**name {
                    "at_us" | "from_us" | "until_us" | "retry_after_ms" | "reset_after_ms"
                        if member.is_u64() =>
                    {
                        *member = json!("some time")
                    }
                    "level" => *member = json!(member.as_f64().unwrap().ceil()),
                    "arithmetic" => *member = json!(member.as_str().unwrap().split(": fits in").next()),
                    _ => mask_times(member),
                }
            }
        }
        Value::Array(members) => members.iter_mut().for_each(mask_times),
        _ => {}
    }
}

#[test]
fn a_server_and_its_store_give_the_same_responses() {
    let redis = Server::start(Flavor::Redis7);
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}[store]\nurl = \"{}\"\ndenial_cache = \"0s\"\ndeadline = \"5s\"\n{RULES}",
        redis.url()
    ));
    let server = home.start();
    let (url, config) = (format!("http://{}", server.http), home.path().join("sluicegate.toml"));
    for call in CALLS {
        let of_server =
            run(sluicegate(&["--json"]).args(arguments(call, "192.0.2.1", "ann")).arg("--server").arg(&url));
        let of_store = run(sluicegate(&["--json"])
            .args(arguments(call, "192.0.2.2", "bob"))
            .arg("--config")
            .arg(&config));
        let (code, answer) = of_server.json();
        let (direct_code, direct_answer) = of_store.json();
        assert_eq!(
            (code, normalized(answer, "192.0.2.1", "ann")),
            (direct_code, normalized(direct_answer, "192.0.2.2", "bob")),
            "{call:?}"
        );
        assert_eq!(of_store.err, "", "{call:?}");
    }
}

#[test]
fn a_server_and_a_command_share_the_counters_of_a_store() {
    let redis = Server::start(Flavor::Redis7);
    let home =
        ConfigDir::new(&format!("{ANY_PORTS}[store]\nurl = \"{}\"\ndeadline = \"5s\"\n{RULES}", redis.url()));
    let server = home.start();
    let config = home.path().join("sluicegate.toml");
    let check = ["check", "route=login", "ip=192.0.2.7"];
    let check_store = || run(sluicegate(&check).arg("--config").arg(&config));
    assert_eq!(server.run(&check).lines()[0], "ALLOWED  4 of 5 remaining (login-per-ip)");
    let direct = check_store();
    assert_eq!(direct.lines()[0], "ALLOWED  3 of 5 remaining (login-per-ip)");
    assert_eq!(
        direct.err,
        format!("called {} directly, with the rules of {}\n", redis.url(), config.display())
    );
    assert_eq!(server.run(&check).lines()[0], "ALLOWED  2 of 5 remaining (login-per-ip)");
    redis.assert_every_key_expires();
}

#[test]
fn a_store_without_a_configuration_uses_the_demo_rules() {
    let redis = Server::start(Flavor::Redis7);
    for left in [4, 3] {
        let output = run(&mut sluicegate(&["check", "route=login", "ip=192.0.2.7", "--store", &redis.url()]));
        assert_eq!(output.lines()[0], format!("ALLOWED  {left} of 5 remaining (login-per-ip)"));
        assert!(
            output.err.ends_with("with the demo rules (./sluicegate.toml does not exist)\n"),
            "{output:?}"
        );
    }
}

#[test]
fn a_memory_store_prints_a_note_that_it_is_empty() {
    for words in [
        &["check", "route=login", "ip=192.0.2.7", "--store", "memory:"][..],
        &["--json", "check", "user=1", "--store", "memory:"],
    ] {
        let output = run(&mut sluicegate(words));
        assert_eq!(output.code, Some(0), "{output:?}");
        assert!(
            output.err.starts_with("the store memory: is empty at the start of each command"),
            "{output:?}"
        );
    }
}
