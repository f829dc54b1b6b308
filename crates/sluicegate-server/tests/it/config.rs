//! Configuration files: valid ones and their settings, invalid ones and their error messages.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{fs, time::Duration};

use sluicegate::{
    Algorithm, Cost, Labels, OnStoreFailure,
    config::RulesFile,
    rules::{Absent, Applied, Effect, RuleSet},
};
use sluicegate_server::{
    config::{
        self, Colour, Config, ConfigError, Digest, Environment, Flags, Listen, Origin, RuleView, Scopes,
        Source,
    },
    grpc::Closed,
    store::StoreUrl,
};
use sluicegate_tower::headers::Dialect;
use tempfile::TempDir;

/// A directory with a configuration.
struct Setup {
    directory: TempDir,
    source: Source,
}

impl Setup {
    fn new(text: &str) -> Self {
        let setup = Self::empty();
        setup.write("sluicegate.toml", text);
        setup
    }

    fn empty() -> Self {
        let directory = TempDir::new().unwrap();
        let source = Source {
            flags: Flags::default(),
            environment: Environment::of([]),
            directory: directory.path().to_owned(),
        };
        Self { directory, source }
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn with_variables<'a>(mut self, variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        self.source.environment = Environment::of(variables);
        self
    }

    fn load(&self) -> Result<Config, ConfigError> {
        config::load(&self.source)
    }
}

fn load(text: &str) -> Config {
    Setup::new(text).load().unwrap_or_else(|error| panic!("{}", error.render(Colour::Never)))
}

fn rejected(text: &str) -> ConfigError {
    Setup::new(text).load().unwrap_err()
}

/// A valid rule with additional fields.
fn rule(fields: &str) -> String {
    format!("[[rule]]\nname = \"r\"\namount = 10\nwindow = \"1m\"\n{fields}\n")
}

#[test]
fn without_a_file_the_demo_rules_run_on_loopback_and_in_memory() {
    let config = Setup::empty().load().unwrap();
    assert_eq!(config.origin, Origin::Demo);
    assert_eq!(config.rules, sluicegate_server::demo::rules());
    assert_eq!(config.store.url, StoreUrl::Memory);
    let address = |text: &str| Listen::Address(text.parse().unwrap());
    let server = &config.server;
    assert_eq!((server.http, server.grpc), (address("127.0.0.1:8080"), address("127.0.0.1:8081")));
    assert_eq!(server.resp, address("127.0.0.1:6380"));
    assert!(server.tokens.is_empty() && server.tls.is_none() && !server.insecure);
    assert_eq!((server.headers, server.envoy_closed), (Dialect::Draft11, Closed::OverLimit));
    let store = &config.store;
    assert_eq!((store.deadline, store.denial_cache), (Duration::from_millis(50), Duration::from_secs(1)));
    assert_eq!((store.max_memory, store.prefix.as_str()), (256 << 20, "sg"));
    assert_eq!(store.key_scan_interval, None);
}

#[test]
fn a_service_that_reads_the_file_has_the_rules_and_labels_of_the_server() {
    let setup = Setup::new(
        "[server]\nhttp = \"127.0.0.1:0\"\n[store]\nurl = \"redis://db\"\nhash_secret_file = \"hash\"\n\
         [labels]\napi_key = { header = \"x-api-key\", secret = true }\n[defaults]\nwindow = \"1m\"\n\
         [[rule]]\nname = \"per-key\"\nper = [\"api_key\"]\nwhen = { api_key = [\"a\", \"b\"] }\namount = 5\n\
         overrides_file = \"overrides.csv\"\n",
    );
    setup.write("hash", "0123456789abcdef\n");
    setup.write("overrides.csv", "api_key,amount\na,50\n");
    let config = setup.load().unwrap();
    let file = RulesFile::read(setup.directory.path().join("sluicegate.toml")).unwrap();
    assert_eq!((&file.rules, &file.labels), (&config.rules, &config.labels));
    assert_eq!(file.rules[0].overrides.len(), 1);
}

#[test]
fn an_empty_file_has_no_rules() {
    let config = load("");
    assert!(config.rules.is_empty() && matches!(config.origin, Origin::File(_)));
}

#[test]
fn errors_have_a_location_the_value_and_a_fix() {
    let own_rule = |fields: &str| rule(fields);
    let mut wrong = Vec::new();
    for (text, at, parts) in [
        // TOML itself
        ("[server".to_owned(), (1, 8), vec!["invalid TOML"]),
        ("a = 1\na = 2".to_owned(), (2, 1), vec!["duplicate key"]),
        ("x = \"".to_owned(), (1, 6), vec!["invalid TOML"]),
        // Keys
        (
            "[sever]\nhttp = 1".to_owned(),
            (1, 2),
            vec!["the file: unknown key `sever`", "did you mean `server`?"],
        ),
        ("[server]\nhtpp = \"off\"".to_owned(), (2, 1), vec!["server: unknown key `htpp`", "`http`"]),
        (
            "[server]\nzzz = 1".to_owned(),
            (2, 1),
            vec!["unknown key `zzz`", "the keys here are http, grpc, resp"],
        ),
        (own_rule("on_store_fail = \"open\""), (5, 1), vec!["rule: unknown key", "`on_store_failure`"]),
        (
            own_rule("[[rule.override]]\nwhen = {t=\"x\"}\namout = 1"),
            (7, 1),
            vec!["rule.override", "`amount`"],
        ),
        (
            "[labels]\nip = { knd = \"ip\" }".to_owned(),
            (2, 8),
            vec!["labels.ip: unknown key `knd`", "`kind`"],
        ),
        // Shapes
        ("server = 1".to_owned(), (1, 10), vec!["server: 1 is not a table", "[server]"]),
        ("[rule]\nname = \"r\"".to_owned(), (1, 1), vec!["rule: a table is not a list", "[[rule]]"]),
        ("[server]\ntrusted_proxies = \"10.0.0.0/8\"".to_owned(), (2, 19), vec!["is not a list", "[ ]"]),
        (own_rule("when = \"x\""), (5, 8), vec!["rule.when: \"x\" is not a table"]),
        (own_rule("per = \"ip\""), (5, 7), vec!["rule.per: \"ip\" is not a list"]),
        // Values
        (
            "[server]\nhttp = \"localhost:80\"".to_owned(),
            (2, 8),
            vec!["\"localhost:80\" is not an address", "\"off\""],
        ),
        ("[server]\nhttp = 8080".to_owned(), (2, 8), vec!["server.http: 8080 is not an address"]),
        (
            "[server]\nmax_connections = 9".to_owned(),
            (2, 19),
            vec!["server.max_connections: 9 is out of range: use 10 to 100000"],
        ),
        (
            "[server]\nmax_connections_per_address = 0".to_owned(),
            (2, 31),
            vec!["server.max_connections_per_address: 0 is out of range: use 1 to 100000"],
        ),
        ("[server]\ninsecure = \"yes\"".to_owned(), (2, 12), vec!["\"yes\" is not a boolean"]),
        (
            "[server]\nheaders = \"draft-7\"".to_owned(),
            (2, 11),
            vec!["\"draft-7\"", "did you mean \"draft-07\"?"],
        ),
        (
            "[server]\nheaders = \"zz\"".to_owned(),
            (2, 11),
            vec!["use one of draft-11, x-ratelimit, draft-07"],
        ),
        ("[server]\nenvoy_closed = \"error\"".to_owned(), (2, 16), vec!["over-limit, unavailable"]),
        (
            "[server]\ntrusted_proxies = [\"10.0.0.0/8\", \"10.0.0.0/33\"]".to_owned(),
            (2, 34),
            vec!["\"10.0.0.0/33\" is not a network", "\"10.0.0.0/8\""],
        ),
        ("[store]\ndeadline = \"10\"".to_owned(), (2, 12), vec!["\"10\" is not a duration", "\"250ms\""]),
        ("[store]\ndeadline = 10".to_owned(), (2, 12), vec!["10 is not a duration"]),
        ("[store]\ndeadline = \"0s\"".to_owned(), (2, 12), vec!["out of range: use 1ms to 10s"]),
        ("[store]\ndenial_cache = \"2m\"".to_owned(), (2, 16), vec!["use 0s to 60s"]),
        (
            "[store]\nurl = \"redis://h\"\nkey_scan_interval = \"30s\"".to_owned(),
            (3, 21),
            vec!["store.key_scan_interval is out of range", "use 1m to 30d, or remove it"],
        ),
        ("[store]\ninstances = 0".to_owned(), (2, 13), vec!["store.instances 0", "use 1 to 100000"]),
        (
            "[store]\nmax_memory = \"256MB\"".to_owned(),
            (2, 14),
            vec!["\"256MB\" is not a size", "\"256MiB\""],
        ),
        ("[store]\nmax_memory = \"1KiB\"".to_owned(), (2, 14), vec!["at least \"1MiB\""]),
        ("[store]\nprefix = \"a:b\"".to_owned(), (2, 10), vec!["\"a:b\" is not a prefix", "letters"]),
        ("[store]\nurl = \"postgres://x\"".to_owned(), (2, 7), vec!["memory: or redis://"]),
        ("[store]\nurl = \"redis://a,b\"".to_owned(), (2, 7), vec!["names several servers"]),
        (
            "[store]\nurl = \"redis://h\"\npassword_file = \"p\"".to_owned(),
            (3, 17),
            vec!["cannot read", "p: No such file"],
        ),
        (
            "[labels]\nx = { kind = \"uuid\" }".to_owned(),
            (2, 14),
            vec!["labels.x.kind", "use one of text, ip"],
        ),
        ("[labels]\nip = { ipv6_prefix = 129 }".to_owned(), (2, 22), vec!["129", "use 1 to 128"]),
        ("[labels]\nx = { ipv6_prefix = 64 }".to_owned(), (2, 21), vec!["kind = \"ip\""]),
        ("[labels]\nx = { header = \"x key\" }".to_owned(), (2, 16), vec!["\"x key\" is not a header name"]),
        // Rules
        ("[[rule]]\namount = 1\nwindow = \"1m\"".to_owned(), (1, 1), vec!["a rule needs a name"]),
        (
            "[[rule]]\nname = \"r\"\nwindow = \"1m\"".to_owned(),
            (2, 8),
            vec!["rule \"r\" has no amount", "amount = 10"],
        ),
        ("[[rule]]\nname = \"r\"\namount = 1".to_owned(), (2, 8), vec!["rule \"r\" has no window"]),
        (
            "[[rule]]\nname = \"r\"\namount = 0\nwindow = \"1m\"".to_owned(),
            (3, 10),
            vec!["amount 0", "1 to 1000000000"],
        ),
        (
            "[[rule]]\nname = \"r\"\namount = -1\nwindow = \"1m\"".to_owned(),
            (3, 10),
            vec!["-1 is not a non-negative integer"],
        ),
        (
            "[[rule]]\nname = \"r\"\namount = \"9\"\nwindow = \"1m\"".to_owned(),
            (3, 10),
            vec!["rule.amount: \"9\"", "quotes"],
        ),
        (
            "[[rule]]\nname = \"r\"\namount = 1\nwindow = \"1w\"".to_owned(),
            (4, 10),
            vec!["\"1w\" is not a duration"],
        ),
        (
            "[[rule]]\nname = \"r\"\namount = 1\nwindow = \"3651d\"".to_owned(),
            (4, 10),
            vec!["1ms to 10 years"],
        ),
        ("[[rule]]\nname = \"é\"\namount = 1\nwindow = \"1m\"".to_owned(), (2, 8), vec!["printable ASCII"]),
        (own_rule("algorithm = \"leaky\""), (5, 13), vec!["\"leaky\" is unknown", "sliding-log"]),
        (own_rule("algorithm = \"sliding-log\"\nburst = 5"), (6, 9), vec!["sliding-log has no burst"]),
        (own_rule("burst = 0"), (5, 9), vec!["burst 0 is out of range"]),
        (own_rule("stagger = true"), (5, 11), vec!["token-bucket has no stagger"]),
        (own_rule("lease = \"1%\""), (5, 9), vec!["lease 1% of 10 is less than one unit"]),
        (own_rule("lease = \"many\""), (5, 9), vec!["rule.lease: \"many\" is not a lease", "0.01"]),
        (own_rule("lease = 11"), (5, 9), vec!["lease of 11 units is out of range: use 1 to 10"]),
        (own_rule("lease = 1\nlease_for = \"2m\""), (6, 13), vec!["lease lifetime 120s", "60s"]),
        (own_rule("lease_for = \"1s\""), (5, 13), vec!["lease_for has no effect without lease"]),
        (own_rule("lease = 1\non_expiry = \"release\""), (6, 13), vec!["remove the lease, or use on_expiry"]),
        (
            own_rule("on_expiry = \"release\"\n[[rule.override]]\nwhen = {t=\"x\"}\nlease = 1"),
            (8, 9),
            vec!["an override of rule \"r\"", "remove the lease"],
        ),
        (
            own_rule("on_expiry = \"refund\""),
            (5, 13),
            vec!["\"refund\" is unknown: use one of charge, release"],
        ),
        (own_rule("ttl = 60"), (5, 7), vec!["rule.ttl: 60 is not a duration", "in quotes"]),
        (own_rule("ttl = \"0s\""), (5, 7), vec!["ttl 0ns is out of range: use 1ms to 86400s"]),
        (own_rule("ttl = \"25h\""), (5, 7), vec!["ttl 90000s is out of range"]),
        (own_rule("max_excess = 1000000001"), (5, 14), vec!["max_excess 1000000001", "use 0 to 1000000000"]),
        (own_rule("hold = \"\""), (5, 8), vec!["hold: ", "empty name"]),
        (own_rule("unit = \"a b\""), (5, 8), vec!["unit \"a b\" is invalid"]),
        (own_rule("cost = 9007199254740992"), (5, 8), vec!["9007199254740992", "9007199254740991"]),
        (own_rule("per = [\"ip\", \"ip\"]"), (5, 7), vec!["per: label \"ip\" is named twice"]),
        (own_rule("per = [\"ip\", 3]"), (5, 14), vec!["rule.per: 3 is not a string"]),
        (own_rule("per = [\"user\"]\ntag = [\"tenant\"]"), (6, 7), vec!["\"tenant\" is not in per"]),
        (
            own_rule("absent = \"ignore\""),
            (5, 10),
            vec!["\"ignore\" is unknown: use one of skip, shared, deny"],
        ),
        (own_rule("on_store_failure = \"close\""), (5, 20), vec!["did you mean \"closed\"?"]),
        (own_rule("when = { route = [] }"), (5, 18), vec!["label \"route\": empty list"]),
        (own_rule("when = { route = 3 }"), (5, 18), vec!["rule.when.route: 3 is not a pattern"]),
        (own_rule("when = { route = [\"a\", 3] }"), (5, 24), vec!["3 is not a string"]),
        (own_rule("when = { \"\" = \"x\" }"), (5, 8), vec!["empty name"]),
        (own_rule("[[rule.override]]\namount = 5"), (5, 1), vec!["has no condition", "when = "]),
        (
            own_rule("[[rule.override]]\nwhen = {t=\"x\"}\namount = 0"),
            (7, 10),
            vec!["override of rule \"r\": amount 0"],
        ),
        (
            own_rule("[[rule.override]]\nwhen = {t=\"x\"}\nunlimited = true\nblocked = true"),
            (8, 11),
            vec!["contradict"],
        ),
        (own_rule("overrides_file = \"none.csv\""), (5, 18), vec!["cannot read", "none.csv"]),
        ("[defaults]\nname = \"x\"".to_owned(), (2, 8), vec!["defaults apply to all rules"]),
    ] {
        let error = rejected(&text);
        let (line, drawn) = (error.problems()[0].to_string(), error.render(Colour::Never));
        let location = format!("sluicegate.toml:{}:{}", at.0, at.1);
        let has_location = error.problems()[0].line_and_column() == Some(at);
        let is_shown = line.contains(&location) && drawn.contains(&location);
        let has_parts = parts.iter().all(|part| line.contains(part)) && error.problems().len() == 1;
        if !(has_location && is_shown && has_parts) {
            wrong.push(format!("{text}\nexpected {at:?} {parts:?}, got {error}\n"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn all_errors_are_reported_at_once_in_file_order() {
    let text = "[server]\nhttp = \"x\"\nbogus = 1\n[[rule]]\nname = \"a\"\namount = 0\nwindow = \"1 m\"\n\
                [[rule]]\nname = \"a\"\namount = \"x\"\nwindow = \"1m\"\nper = [1, 2]\n";
    let error = rejected(text);
    let lines: Vec<_> = error.problems().iter().map(|problem| problem.line_and_column().unwrap().0).collect();
    assert_eq!(lines, [2, 3, 7, 9, 10, 12, 12], "{error}");
    let drawn = error.render(Colour::Never);
    assert_eq!(drawn.matches("error: ").count(), 7, "{drawn}");
    assert!(drawn.contains("7 | window = \"1 m\""), "{drawn}");
    // In a log, all of it is one line.
    assert!(!error.to_string().contains('\n'));
}

#[test]
fn a_rule_with_invalid_numbers_has_its_other_errors_reported_too() {
    let text = "[[rule]]\nname = \"é\"\namount = 0\nwindow = \"1m\"\nalgorithm = \"sliding-log\"\nburst = 3\n\
                per = [\"ip\", \"ip\"]\ntag = [\"user\"]\nunit = \"a b\"\nstagger = true\n[[rule]]\nper = [\"a\", \"a\"]\n";
    let error = rejected(text);
    let lines: Vec<_> = error.problems().iter().map(|problem| problem.line_and_column().unwrap().0).collect();
    assert_eq!(lines, [2, 3, 6, 7, 8, 9, 10, 11, 11, 11, 12], "{error}");
}

#[test]
fn a_duplicate_rule_name_is_rejected_with_the_location_of_the_first() {
    let error = rejected(&(rule("") + &rule("")));
    let line = error.to_string();
    assert!(line.contains(":7:8: rule \"r\" is defined twice: use a unique name"), "{line}");
    assert!(line.contains(":2:8: first defined here"), "{line}");
    let drawn = error.render(Colour::Never);
    assert!(drawn.contains("2 | name = \"r\"") && drawn.contains("7 | name = \"r\""), "{drawn}");
}

#[test]
fn further_errors_are_counted_rather_than_listed() {
    let text: String = (0..50).map(|number| format!("key{number} = 1\n")).collect();
    let error = rejected(&text);
    assert_eq!(error.problems().len(), 20);
    assert!(
        error.to_string().ends_with("and 30 more") && error.render(Colour::Always).contains("and 30 more")
    );
}

#[test]
fn a_given_file_must_exist() {
    let mut setup = Setup::empty();
    setup.source.flags.config = Some("/nowhere/t.toml".into());
    let error = setup.load().unwrap_err().to_string();
    assert!(error.starts_with("--config: cannot read /nowhere/t.toml: No such file"), "{error}");
    let setup = Setup::empty().with_variables([("SLUICEGATE_CONFIG", "/nowhere/u.toml")]);
    let error = setup.load().unwrap_err().to_string();
    assert!(error.starts_with("SLUICEGATE_CONFIG: cannot read /nowhere/u.toml"), "{error}");
    let setup = Setup::empty();
    fs::write(setup.directory.path().join("sluicegate.toml"), b"a = \"\xff\"").unwrap();
    let error = setup.load().unwrap_err();
    assert_eq!(error.problems()[0].line_and_column(), Some((1, 6)), "{error}");
    assert!(error.to_string().contains("not UTF-8"));
}

#[test]
fn flags_override_environment_overrides_file_overrides_defaults() {
    let file = "[server]\nhttp = \"127.0.0.1:1\"\ngrpc = \"127.0.0.1:1\"\nresp = \"127.0.0.1:11\"\n\
                [store]\nurl = \"redis://file\"\nprefix = \"file\"\n";
    let mut setup = Setup::new(file).with_variables([
        ("SLUICEGATE_HTTP", "127.0.0.1:2"),
        ("SLUICEGATE_GRPC", "127.0.0.1:22"),
        ("SLUICEGATE_RESP", ""),
        ("SLUICEGATE_STORE_URL", "redis://variable"),
        ("SLUICEGATE_STORE_DEADLINE", "7ms"),
        ("SLUICEGATE_STORE_DENIAL_CACHE", "2s"),
        ("SLUICEGATE_STORE_MAX_MEMORY", "2MiB"),
        ("SLUICEGATE_STORE_KEY_SCAN_INTERVAL", "1h"),
        ("SLUICEGATE_HEADERS", "github"),
        ("SLUICEGATE_ENVOY_CLOSED", "unavailable"),
        ("SLUICEGATE_TRUSTED_PROXIES", "10.0.0.0/8, ::ffff:192.0.2.1"),
    ]);
    setup.source.flags =
        Flags { http: Some("127.0.0.1:3".into()), store: Some("redis://flag".into()), ..Flags::default() };
    let config = setup.load().unwrap();
    let port = |listen: Listen| listen.address().unwrap().port();
    let server = &config.server;
    assert_eq!((port(server.http), port(server.grpc), port(server.resp)), (3, 22, 11));
    assert_eq!(config.store.url.to_string(), "redis://flag");
    assert_eq!((config.store.prefix.as_str(), config.store.deadline), ("file", Duration::from_millis(7)));
    assert_eq!((config.store.denial_cache, config.store.max_memory), (Duration::from_secs(2), 2 << 20));
    assert_eq!(config.store.key_scan_interval, Some(Duration::from_secs(3_600)));
    assert_eq!((server.headers, server.envoy_closed), (Dialect::GitHub, Closed::Unavailable));
    let proxies: Vec<_> = server.trusted_proxies.iter().map(ToString::to_string).collect();
    assert_eq!(proxies, ["10.0.0.0/8", "192.0.2.1/32"]);
}

#[test]
fn flags_and_variables_apply_to_the_demo() {
    let mut setup = Setup::empty().with_variables([("SLUICEGATE_GRPC", "off")]);
    setup.source.flags.http = Some("127.0.0.1:0".into());
    let config = setup.load().unwrap();
    assert_eq!((config.origin, config.server.grpc), (Origin::Demo, Listen::Off));
    assert_eq!(config.server.http, Listen::Address("127.0.0.1:0".parse().unwrap()));
}

#[test]
fn an_invalid_flag_or_variable_is_reported_by_name() {
    for (variable, value, part) in [
        ("SLUICEGATE_HTTP", "8080", "SLUICEGATE_HTTP: \"8080\" is not an address"),
        ("SLUICEGATE_INSECURE", "1", "SLUICEGATE_INSECURE: \"1\" is not true or false"),
        ("SLUICEGATE_TRUSTED_PROXIES", "::/0,x", "SLUICEGATE_TRUSTED_PROXIES: \"x\" is not a network"),
        ("SLUICEGATE_STORE_URL", "http://:s3cret@h", "SLUICEGATE_STORE_URL: the store's URL names no store"),
    ] {
        let error = Setup::empty().with_variables([(variable, value)]).load().unwrap_err();
        for text in [error.to_string(), error.render(Colour::Never), format!("{error:?}")] {
            assert!(!text.contains("s3cret"), "{text}");
        }
        assert!(error.to_string().contains(part), "{error}");
    }
    let mut setup = Setup::empty();
    setup.source.flags.resp = Some("x".into());
    assert!(setup.load().unwrap_err().to_string().starts_with("--resp: \"x\" is not an address"));
}

#[test]
fn without_tokens_only_loopback_listeners_are_allowed_unless_insecure() {
    for (listen, is_local) in [
        ("127.0.0.1:1", true),
        ("127.9.9.9:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        ("off", true),
        ("0.0.0.0:1", false),
        ("[::]:1", false),
        ("10.0.0.1:1", false),
    ] {
        for key in ["http", "grpc", "resp"] {
            let text = format!("[server]\n{key} = \"{listen}\"\n");
            match Setup::new(&text).load() {
                Ok(_) => assert!(is_local, "{listen}"),
                Err(error) => {
                    assert!(!is_local, "{error}");
                    assert_eq!(error.problems()[0].line_and_column(), Some((2, 8)), "{error}");
                    assert!(error.to_string().contains("[[server.token]]"), "{error}");
                }
            }
            assert!(Setup::new(&(text.clone() + "insecure = true\n")).load().is_ok());
            let setup = Setup::new(&(text + "[[server.token]]\nname = \"t\"\nenv = \"T\"\n"));
            assert!(setup.with_variables([("T", "secret")]).load().is_ok());
        }
    }
}

#[test]
fn two_front_ends_cannot_share_an_address() {
    let error = rejected("[server]\nresp = \"127.0.0.1:8080\"\n");
    assert!(
        error.to_string().contains(":2:8: server.http and server.resp are both 127.0.0.1:8080"),
        "{error}"
    );
    load("[server]\nhttp = \"127.0.0.1:0\"\nresp = \"127.0.0.1:0\"\ngrpc = \"off\"\n");
    load("[server]\nhttp = \"off\"\nresp = \"off\"\ngrpc = \"off\"\n");
}

#[test]
fn tokens_are_read_from_files_and_the_environment() {
    let setup = Setup::new(
        "[[server.token]]\nname = \"deploy\"\nfile = \"secrets/deploy\"\nmay = [\"check\", \"adjust\", \"admin\"]\n\
         [[server.token]]\nname = \"edge\"\nenv = \"EDGE\"\n",
    );
    setup.write("secrets/deploy", "from-a-file\r\n");
    let setup = setup.with_variables([("EDGE", "from-a-variable")]);
    let tokens = setup.load().unwrap().server.tokens;
    assert_eq!((tokens[0].name.as_str(), tokens[1].name.as_str()), ("deploy", "edge"));
    assert_eq!(tokens[0].may, Scopes::ALL);
    assert_eq!(tokens[1].may, Scopes { check: true, ..Scopes::default() });
    assert!(tokens[0].accepts(&Digest::of(b"from-a-file")));
    assert!(tokens[1].accepts(&Digest::of(b"from-a-variable")));
    for wrong in [&b""[..], b"from-a-fil", b"from-a-file\n", b"from-a-variable"] {
        assert!(!tokens[0].accepts(&Digest::of(wrong)));
    }
    assert!(!format!("{tokens:?}").contains("from-a"), "{tokens:?}");
}

#[test]
fn invalid_tokens_are_rejected() {
    let token = |fields: &str| format!("[[server.token]]\nname = \"t\"\n{fields}\n");
    for (text, part) in [
        (token(""), "has no secret"),
        (token("file = \"none\""), "cannot read"),
        (token("env = \"NONE\""), "variable NONE is not set"),
        (token("env = \"GOOD\"\nfile = \"empty\""), "remove file or env"),
        (token("file = \"empty\""), "secret of the token is empty"),
        (token("env = \"SPACED\""), "a header cannot carry"),
        (token("env = \"GOOD\"\nmay = []"), "allows nothing"),
        (token("env = \"GOOD\"\nmay = [\"amin\"]"), "did you mean \"admin\"?"),
        (token("secret = \"GOOD-s3cret\""), "unknown key `secret`"),
        ("[[server.token]]\nenv = \"GOOD\"".to_owned(), "has no name"),
        (token("env = \"GOOD\"") + &token("env = \"OTHER\""), "token \"t\" is defined twice"),
        (token("env = \"GOOD\"") + "[[server.token]]\nname = \"u\"\nenv = \"SAME\"", "have the same secret"),
    ] {
        let setup = Setup::new(&text);
        setup.write("empty", "\n");
        let setup = setup.with_variables([
            ("GOOD", "GOOD-s3cret"),
            ("SAME", "GOOD-s3cret"),
            ("OTHER", "other"),
            ("SPACED", "s3cret with space"),
        ]);
        let error = setup.load().unwrap_err();
        assert!(error.to_string().contains(part), "{text}\n{error}");
        for shown in [error.to_string(), error.render(Colour::Never), format!("{error:?}")] {
            assert!(!shown.contains("s3cret"), "{shown}");
        }
    }
}

#[test]
fn no_secret_is_ever_printed() {
    let setup = Setup::new(
        "[store]\nurl = \"redis://me:s3cret-1@h\"\npassword_file = \"password\"\nhash_secret_file = \"hash\"\n\
         [labels]\nkey = { secret = true }\n[[server.token]]\nname = \"t\"\nenv = \"T\"\n\
         [[rule]]\nname = \"r\"\namount = 1\nwindow = \"1m\"\nwhen = { key = \"s3cret-2\" }\n",
    );
    setup.write("password", "s3cret-3\n");
    setup.write("hash", "s3cret-4-which-is-long\n");
    let setup = setup.with_variables([("T", "s3cret-5")]);
    let config = setup.load().unwrap();
    let shown = format!("{config:?} {:?} {:?}", setup.source, RuleView::from(&config.rules[0]));
    assert!(!shown.contains("s3cret"), "{shown}");
    let broken = fs::read_to_string(setup.directory.path().join("sluicegate.toml")).unwrap();
    for broken in
        [broken.replace("@h\"", "@h"), broken.replace("redis:", "reds:"), broken.replace("url", "ulr")]
    {
        setup.write("sluicegate.toml", &broken);
        let error = setup.load().unwrap_err();
        let shown = format!("{error} {error:?} {}", error.render(Colour::Never));
        assert!(!shown.contains("s3cret-1"), "{shown}");
    }
}

#[test]
fn paths_are_relative_to_the_configuration_file() {
    let mut setup = Setup::empty();
    setup.write("etc/t.toml", "[store]\nurl = \"redis://h\"\npassword_file = \"secrets/redis\"\n");
    setup.write("etc/secrets/redis", "s3cret\n");
    setup.source.flags.config = Some(setup.directory.path().join("etc/t.toml"));
    let redis = setup.load().unwrap().store.redis;
    assert_eq!(redis, sluicegate::redis::RedisSettings::default().password("s3cret"));
}

#[test]
fn inconsistent_store_settings_are_rejected() {
    for (text, part) in [
        ("url = \"memory:\"\nca = \"pem\"", "needs Redis"),
        ("key_scan_interval = \"1h\"", "needs Redis but store.url is \"memory:\": remove it"),
        ("url = \"rediss://h\"\ncert = \"pem\"", "store.cert has no private key"),
        ("url = \"rediss://h\"\nkey = \"pem\"", "store.key has no certificate"),
        ("url = \"rediss://h\"\nca = \"empty\"", "is not PEM"),
        ("url = \"redis://h\"\nca = \"pem\"", "rediss"),
        ("url = \"rediss://h\"\nca = \"pem\"", "use PEM"),
        ("url = \"redis://me@h\"", "user without password"),
        ("url = \"redis://h\"\npassword_file = \"empty\"", "has no password"),
    ] {
        let setup = Setup::new(&format!("[store]\n{text}\n"));
        setup.write("pem", "-----BEGIN CERTIFICATE-----\nMA==\n-----END CERTIFICATE-----\n");
        setup.write("empty", "");
        let error = setup.load().unwrap_err().to_string();
        assert!(error.contains(part), "{text}\n{error}");
    }
    for url in ["redis://h", "rediss://h", "redis-sentinel://a,b/main", "rediss-cluster://a,b"] {
        let config = load(&format!("[store]\nurl = \"{url}\"\n"));
        assert_eq!(config.store.url.to_string(), url);
    }
}

#[test]
fn certificates_are_read_and_must_be_complete() {
    let setup = Setup::new("[server.tls]\ncert = \"pem\"\nkey = \"pem\"\nclient_ca = \"pem\"\n");
    setup.write("pem", "-----BEGIN CERTIFICATE-----\n");
    let tls = setup.load().unwrap().server.tls.unwrap();
    assert!(tls.cert == tls.key && tls.client_ca == Some(tls.cert.clone()));
    assert_eq!(format!("{tls:?}"), "Tls(…)");
    setup.write("sluicegate.toml", "[server.tls]\ncert = \"pem\"\n");
    let error = setup.load().unwrap_err().to_string();
    assert!(error.contains("sluicegate.toml:1:1: server.tls has no key"), "{error}");
}

#[test]
fn every_field_of_a_rule_is_applied() {
    let config = load(
        "[[rule]]\nname = \"r\"\nwhen = { route = \"login\", plan = [\"a\", \"b*\"], user = \"*\", ip = \"10.0.0.0/8\" }\n\
         unless = { plan = \"internal\" }\nper = [\"tenant\", \"user\"]\nalgorithm = \"gcra\"\namount = 100\n\
         window = \"1h30m\"\nburst = 7\nunit = \"tokens\"\ncost = 3\non_store_failure = \"closed\"\nshadow = true\n\
         overdraft = true\ntag = [\"tenant\"]\nabsent = \"deny\"\nexact = true\n\
         [[rule.override]]\nwhen = { tenant = \"acme\" }\namount = 1000\nwindow = \"2h\"\nburst = 8\ncost = 0\n\
         blocked = true\non_store_failure = \"open\"\nshadow = false\n\
         [[rule]]\nname = \"s\"\nalgorithm = \"fixed-window\"\namount = 1\nwindow = \"1s\"\nstagger = true\n",
    );
    let (rule, other) = (&config.rules[0], &config.rules[0].overrides[0]);
    let view = serde_json::to_value(RuleView::from(rule)).unwrap();
    let expected = serde_json::json!({
        "name": "r",
        "when": { "route": ["login"], "plan": ["a", "b*"], "user": ["*"], "ip": ["10.0.0.0/8"] },
        "unless": { "plan": ["internal"] }, "per": ["tenant", "user"], "algorithm": "token-bucket", "amount": 100,
        "window": "1h30m", "burst": 7, "unit": "tokens", "cost": 3, "on_store_failure": "closed", "shadow": true,
        "overdraft": true, "absent": "deny", "exact": true, "tag": ["tenant"], "stagger": false, "overrides": 1,
    });
    assert_eq!(view, expected);
    assert_eq!((other.amount, other.window), (Some(1000), Some(Duration::from_secs(7200))));
    assert_eq!((other.burst, other.cost.unwrap().units()), (Some(8), 0));
    assert_eq!((other.unlimited, other.blocked, other.shadow), (None, Some(true), Some(false)));
    assert_eq!(other.on_store_failure, Some(OnStoreFailure::Open));
    assert!(config.rules[1].stagger);
    assert_eq!(RuleSet::new(config.rules).unwrap().len(), 2);
}

#[test]
fn a_rule_needs_only_name_amount_and_window() {
    let rule = load(&rule("")).rules.remove(0);
    assert_eq!((rule.limit.algorithm(), rule.limit.capacity()), (Algorithm::TokenBucket, 10));
    assert_eq!((rule.on_store_failure, rule.absent), (OnStoreFailure::Open, Absent::Skip));
    assert!(rule.when.is_empty() && rule.per.is_empty() && &*rule.unit == "requests");
}

#[test]
fn defaults_apply_to_absent_fields_that_the_algorithm_supports() {
    let config = load(
        "[defaults]\namount = 5\nwindow = \"1m\"\nburst = 3\non_store_failure = \"local\"\nper = [\"ip\"]\n\
         [[defaults.override]]\nwhen = { plan = \"internal\" }\nunlimited = true\n\
         [[rule]]\nname = \"plain\"\n\
         [[rule]]\nname = \"own\"\namount = 7\nburst = 9\non_store_failure = \"open\"\nper = []\n\
         [[rule.override]]\nwhen = { tenant = \"acme\" }\namount = 8\n\
         [[rule]]\nname = \"log\"\nalgorithm = \"sliding-log\"\n",
    );
    let [plain, own, log] = &config.rules[..] else { panic!("{:?}", config.rules) };
    assert_eq!((plain.limit.amount(), plain.burst, plain.per.len()), (5, Some(3), 1));
    assert_eq!(plain.on_store_failure, OnStoreFailure::Local);
    assert_eq!((own.limit.amount(), own.burst, own.per.len()), (7, Some(9), 0));
    assert_eq!(own.on_store_failure, OnStoreFailure::Open);
    assert_eq!((log.limit.algorithm(), log.burst), (Algorithm::SlidingLog, None));
    // Overrides of the defaults come first, so that those of the rule win.
    let amounts: Vec<_> = own.overrides.iter().map(|other| (other.unlimited, other.amount)).collect();
    assert_eq!(amounts, [(Some(true), None), (None, Some(8))]);
    assert_eq!(plain.overrides.len(), 1);
}

#[test]
fn address_labels_match_networks_and_secret_labels_match_hashes() {
    let rules = |labels: &str, when: &str| {
        let text = format!("[labels]\n{labels}\n{}", rule(&format!("when = {{ {when} }}")));
        Setup::new(&text).load().map(|config| (RuleSet::new(config.rules).unwrap(), config.labels))
    };
    let applies = |labels: &str, when: &str, given: (&str, &str)| {
        let (set, policy) = rules(labels, when).unwrap();
        let request = policy.clean([given]).unwrap();
        !set.matching(&request, &sluicegate::Costs::from(1)).unwrap().is_empty()
    };
    assert!(applies("", "ip = \"10.0.0.0/8\"", ("ip", "::ffff:10.1.2.3")));
    assert!(!applies("", "ip = \"10.0.0.0/8\"", ("ip", "11.1.2.3")));
    assert!(applies("", "ip = \"2001:db8::/32\"", ("ip", "2001:db8:1:2:3::4")));
    assert!(applies("", "ip = [\"localhost\", \"10.*\"]", ("ip", "localhost")));
    assert!(applies("peer = { kind = \"ip\" }", "peer = [\"10.0.0.1\", \"::1/64\"]", ("peer", "::5")));
    assert!(!applies("", "peer = \"10.0.0.0/8\"", ("peer", "10.0.0.1")));
    assert!(applies("k = { secret = true }", "k = [\"other\", \"s3cret\"]", ("k", "s3cret")));
    assert!(applies("k = { secret = true }", "k = \"*\"", ("k", "s3cret")));
    assert!(applies("ip = { secret = true }", "ip = \"::ffff:10.0.0.1\"", ("ip", "10.0.0.1")));
    for (labels, when, part) in [
        ("ip = { kind = \"ip\" }", "ip = \"localhost\"", "\"localhost\" is not a network"),
        (
            "ip = { kind = \"ip\" }",
            "ip = [\"10.0.0.0/8\", \"10.0.0.0/64\"]",
            "\"10.0.0.0/64\" is not a network",
        ),
        ("", "ip = \"2001:db8::1\"", "truncated to /64"),
        ("ip = { ipv6_prefix = 48 }", "ip = \"2001:db8::/56\"", "truncated to /48"),
        ("k = { secret = true }", "k = \"s3*\"", "its values are hashed"),
        ("ip = { secret = true }", "ip = \"10.0.0.0/8\"", "match only as a whole"),
    ] {
        let error = rules(labels, when).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn rules_that_fail_open_without_setting_a_policy_cause_a_warning_with_a_remote_store() {
    let remote = "[store]\nurl = \"redis://h\"\n";
    let named = |name: &str, fields: &str| rule(fields).replace("\"r\"", &format!("{name:?}"));
    let (unset, shadow) = (named("a", "") + &named("b", ""), named("c", "shadow = true"));
    let set = named("d", "on_store_failure = \"open\"") + &named("e", "on_store_failure = \"closed\"");
    let config = load(&format!("{remote}{unset}{shadow}{set}"));
    assert_eq!(
        config.policy_warning.as_deref(),
        Some(
            "rules without on_store_failure allow every request while the store is unavailable or late: \"a\", \"b\"; set \
          on_store_failure in [defaults] (\"local\" is recommended, \"open\" keeps this behaviour)"
        )
    );
    for quiet in [
        unset.clone(),
        format!("{remote}{shadow}{set}"),
        format!("{remote}[defaults]\non_store_failure = \"open\"\n{unset}"),
        remote.to_owned(),
    ] {
        assert_eq!(load(&quiet).policy_warning, None, "{quiet}");
    }
    let many: String = (0..12).map(|number| named(&format!("r{number}"), "")).collect();
    assert!(load(&format!("{remote}{many}")).policy_warning.unwrap().contains("\"r9\" and 2 more; set"));
    let demo = Setup::empty().with_variables([("SLUICEGATE_STORE_URL", "redis://h")]).load().unwrap();
    assert!(demo.rules.iter().all(|rule| rule.on_store_failure == OnStoreFailure::Local));
    assert_eq!(demo.policy_warning, None);
}

#[test]
fn every_number_of_a_limit_is_reported_at_once() {
    let error =
        Setup::new("[[rule]]\nname = \"r\"\namount = 0\nwindow = \"0s\"\nburst = 0\n").load().unwrap_err();
    let problems: Vec<_> = error
        .problems()
        .iter()
        .map(|problem| (problem.line_and_column().unwrap().0, problem.message().split(' ').nth(2).unwrap()))
        .collect();
    assert_eq!(problems, [(3, "amount"), (4, "window"), (5, "burst")], "{error}");
}

#[test]
fn a_rule_that_clients_escape_by_omitting_a_header_causes_a_warning() {
    let warnings =
        |rules: &str| load(&format!("[labels]\nkey = {{ header = \"x-api-key\" }}\n{rules}")).warnings;
    let per_key = |rest: &str| {
        format!("[[rule]]\nname = \"per-key\"\nper = [\"key\"]\namount = 1\nwindow = \"1s\"\n{rest}\n")
    };
    let expected = "clients that omit x-api-key are not limited by rule \"per-key\": set absent = \"deny\" or \"shared\", or add a \
                    rule per ip";
    assert_eq!(warnings(&per_key("")), [expected]);
    for policy in ["skip", "deny", "shared"] {
        assert!(warnings(&per_key(&format!("absent = \"{policy}\""))).is_empty(), "{policy}");
    }
    let per_ip = "[[rule]]\nname = \"per-ip\"\nper = [\"ip\"]\namount = 1\nwindow = \"1s\"\n";
    assert!(warnings(&(per_key("") + per_ip)).is_empty(), "such clients are limited by another rule");
    let other_requests = format!("{per_ip}when = {{ route = \"login\" }}\n");
    assert_eq!(warnings(&(per_key("") + &other_requests)), [expected]);
    assert!(warnings(&per_key("when = { key = \"a*\" }")).is_empty(), "a rule about certain keys");
    assert!(warnings(&per_key("shadow = true")).is_empty());
}

#[test]
fn a_short_token_causes_a_warning_without_the_token() {
    let setup =
        Setup::new("[server]\nhttp = \"127.0.0.1:0\"\n[[server.token]]\nname = \"app\"\nfile = \"token\"\n");
    setup.write("token", "0123456789abcde\n");
    let warning = "the secret of token \"app\" has only 15 characters: use at least 16, for example the output of `openssl rand \
                   -hex 32`";
    assert_eq!(setup.load().unwrap().warnings, [warning]);
    setup.write("token", "0123456789abcdef\n");
    assert!(setup.load().unwrap().warnings.is_empty());
}

#[test]
fn a_secret_label_without_a_shared_key_causes_a_warning() {
    let config = load("[labels]\nkey = { secret = true, header = \"X-Api-Key\" }\n");
    assert!(config.warnings[0].contains("store.hash_secret_file"));
    assert_eq!(config.labels.headers().collect::<Vec<_>>(), [("key", "x-api-key")]);
    let setup = Setup::new("[store]\nhash_secret_file = \"hash\"\n[labels]\nkey = { secret = true }\n");
    setup.write("hash", "0123456789abcdef\n");
    let config = setup.load().unwrap();
    assert!(config.warnings.is_empty());
    let one = config.labels.clean([("key", "x")]).unwrap();
    assert_eq!(one, setup.load().unwrap().labels.clean([("key", "x")]).unwrap());
    setup.write("hash", "0123456789abcde\n");
    let error = setup.load().unwrap_err().to_string();
    assert!(error.contains(":2:20: the key in this file has 15 bytes: use at least 16"), "{error}");
}

/// A rule per tenant, with a file of overrides.
fn with_csv(csv: &str) -> Result<Config, ConfigError> {
    let setup = Setup::new(&rule(
        "per = [\"tenant\"]\noverrides_file = \"tenants.csv\"\n[[rule.override]]\nwhen = {tenant=\"own\"}",
    ));
    setup.write("tenants.csv", csv);
    setup.load()
}

#[test]
fn a_lease_is_a_percentage_a_fraction_or_units_and_follows_the_amount_of_overrides() {
    let setup = Setup::new(
        "[defaults]\nlease = 0.05\namount = 1_000\nwindow = \"10s\"\n[[rule]]\nname = \"fraction\"\nper = [\"tenant\"]\n\
         [[rule.override]]\nwhen = { tenant = \"large\" }\namount = 20_000\nlease_for = \"50ms\"\n\
         [[rule.override]]\nwhen = { tenant = \"exact\" }\nlease = 0\n\
         [[rule]]\nname = \"percent\"\nlease = \"0.5%\"\n[[rule]]\nname = \"units\"\nlease = 7\nlease_for = \"2s\"\n\
         [[rule]]\nname = \"none\"\nlease = \"0%\"\n",
    );
    let rules = RuleSet::new(setup.load().unwrap().rules).unwrap();
    let leases = |tenant: &str| -> Vec<Option<(u64, Duration)>> {
        let labels = Labels::new([("tenant", tenant)]).unwrap();
        let applied = rules.matching(&labels, &Cost::ONE.into()).unwrap();
        let lease = |applied: Applied<'_>| match applied.effect {
            Effect::Limit { limit, .. } => limit.lease().map(|lease| (lease.units(), lease.lifetime())),
            Effect::Deny { .. } => None,
        };
        applied.into_iter().map(lease).collect()
    };
    let (second, units) = (Duration::from_secs(1), Some((7, Duration::from_secs(2))));
    let percent = Some((5, second));
    assert_eq!(leases("acme"), [Some((50, second)), percent, units, None]);
    assert_eq!(leases("large"), [Some((1_000, Duration::from_millis(50))), percent, units, None]);
    assert_eq!(leases("exact"), [None, percent, units, None]);
}

#[test]
fn overrides_are_read_from_csv_before_those_of_the_rule() {
    let csv = "# who pays\n tenant , amount,window,burst,cost,unlimited,blocked,on_store_failure,shadow,when.amount\n\
               acme,100,2m,5,2,,,local,true,\n\
               \"a, \"\"b\"\"\",,,,,true,,,,x\r\n\n\
               evil*,,,,,,true,,,";
    let overrides = with_csv(csv).unwrap().rules.remove(0).overrides;
    assert_eq!(overrides.len(), 4);
    let acme = &overrides[0];
    assert_eq!((acme.amount, acme.window, acme.burst), (Some(100), Some(Duration::from_secs(120)), Some(5)));
    assert_eq!((acme.cost.unwrap().units(), acme.shadow), (2, Some(true)));
    assert_eq!((acme.on_store_failure, acme.unlimited), (Some(OnStoreFailure::Local), None));
    let pairs = |at: usize| -> Vec<_> {
        overrides[at].when.pairs().map(|(label, pattern)| (label.to_owned(), pattern.to_string())).collect()
    };
    assert_eq!(pairs(0), [("tenant".to_owned(), "acme".to_owned())]);
    let second = [("amount".to_owned(), "x".to_owned()), ("tenant".to_owned(), "a, \\\"b\\\"".to_owned())];
    assert_eq!((pairs(1), overrides[1].unlimited), (second.to_vec(), Some(true)));
    assert_eq!(
        (pairs(2), overrides[2].blocked),
        (vec![("tenant".to_owned(), "evil*".to_owned())], Some(true))
    );
    assert_eq!(pairs(3), [("tenant".to_owned(), "own".to_owned())]);
    assert_eq!(with_csv("tenant,amount\n").unwrap().rules[0].overrides.len(), 1);
}

#[test]
fn errors_in_csv_files_have_a_line_and_a_column() {
    let long = format!("tenant,amount\n{},1", "x".repeat(2000));
    for (csv, at, part) in [
        ("", (1, 1), "no label to match"),
        ("amount\n1", (1, 1), "no label to match"),
        ("tenant,amout\nacme,1", (1, 8), "did you mean `amount`?"),
        ("tenant,region\nacme,eu", (1, 8), "write when.region"),
        ("tenant,amount,tenant\na,1,b", (1, 15), "appears twice"),
        ("tenant,amount\nacme,ten", (2, 6), "amount: \"ten\" is not a non-negative integer"),
        ("tenant,amount\n\"a,b\", x ", (2, 8), "\"x\" is not a non-negative integer"),
        ("tenant,window\nacme,1m\nb,1w", (3, 3), "\"1w\" is not a duration"),
        ("tenant,amount\nacme,0", (2, 6), "amount 0 is out of range"),
        ("tenant,amount\n,5", (2, 1), "has no condition"),
        ("tenant,amount\nacme", (2, 1), "has 1 cells"),
        ("tenant,amount\nacme,1,2", (2, 1), "has 3 cells"),
        ("tenant,unlimited,blocked\nacme,true,true", (2, 11), "contradict"),
        ("tenant,shadow\nacme,yes", (2, 6), "\"yes\" is not true or false"),
        (&long, (2, 1), "more than 1024 bytes"),
    ] {
        let error = with_csv(csv).unwrap_err();
        let problem = &error.problems()[0];
        assert!(error.to_string().contains("tenants.csv:"), "{error}");
        assert_eq!(problem.line_and_column(), Some(at), "{csv}\n{error}");
        assert!(error.to_string().contains(part), "{csv}\n{error}");
    }
}

#[test]
fn a_hundred_thousand_overrides_are_read() {
    let rows: String = (0..100_000).map(|number| format!("t{number},{}\n", number + 1)).collect();
    let overrides = with_csv(&format!("tenant,amount\n{rows}")).unwrap().rules.remove(0).overrides;
    assert_eq!((overrides.len(), overrides[99_999].amount), (100_001, Some(100_000)));
}

#[test]
fn a_fingerprint_depends_on_the_rules_only() {
    let of = |text: &str| config::fingerprint(&load(text).rules);
    let plain = of(&rule(""));
    assert_eq!(plain.len(), 32);
    assert_eq!(plain, of(&format!("[server]\nhttp = \"off\"\n{}# the same\n", rule(""))));
    let others = [
        rule("burst = 5"),
        rule("when = { a = \"b\" }"),
        rule("unless = { a = \"b\" }"),
        rule("shadow = true"),
        rule("[[rule.override]]\nwhen = { a = \"b\" }\namount = 1"),
        rule("[[rule.override]]\nwhen = { a = \"b\" }\namount = 2"),
        rule("") + &rule("").replace("\"r\"", "\"s\""),
    ];
    let mut all: Vec<_> = others.iter().map(|text| of(text)).chain([plain]).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), others.len() + 1);
}

/// The page with the documented example.
const REFERENCE: &str = include_str!("../../../../docs/configuration.md");

fn documented_example() -> &'static str {
    let (_, rest) = REFERENCE.split_once("```toml\n").unwrap();
    rest.split_once("```").unwrap().0
}

#[test]
fn the_documented_example_is_valid() {
    let setup = Setup::new(documented_example());
    setup.write("secrets/deploy", "a-secret");
    setup.write("tenants.csv", "tenant,amount\nacme,5\n");
    let config = setup.load().unwrap_or_else(|error| panic!("{}", error.render(Colour::Never)));
    let names: Vec<_> = config.rules.iter().map(|rule| &*rule.name).collect();
    assert_eq!(names, ["login-per-ip", "tokens-per-tenant"]);
    assert_eq!(config.rules[0].on_store_failure, OnStoreFailure::Closed);
    assert_eq!(config.rules[1].on_store_failure, OnStoreFailure::Local);
    assert_eq!(config.rules[1].overrides.len(), 2);
}

fn as_json(text: &str) -> serde_json::Value {
    serde_json::to_value(toml::from_str::<toml::Table>(text).unwrap()).unwrap()
}

#[test]
fn the_schema_accepts_the_documented_example_and_rejects_invalid_files() {
    let schema = jsonschema::validator_for(&config::schema()).unwrap();
    let example = as_json(documented_example());
    let errors: Vec<_> = schema.iter_errors(&example).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    assert!(
        schema.is_valid(&as_json("")) && schema.is_valid(&as_json(&rule("when = { a = [\"x\", \"y*\"] }")))
    );
    let holds = concurrency_rule("ttl = \"90s\"\nhold = \"request_id\"\non_expiry = \"release\"");
    assert!(schema.is_valid(&as_json(&holds)));
    for text in [
        "bogus = 1".to_owned(),
        "[server]\nbogus = 1".to_owned(),
        "[server]\nhttp = 1".to_owned(),
        "[server]\nheaders = \"draft-7\"".to_owned(),
        "[defaults]\nname = \"x\"".to_owned(),
        "[[rule]]\namount = 1".to_owned(),
        rule("bogus = 1"),
        rule("burst = -1"),
        rule("when = 3"),
        rule("window = \"1 minute\"").replacen("window = \"1m\"\n", "", 1),
        rule("[[rule.override]]\namount = 1"),
        "[labels]\nip = { bogus = 1 }".to_owned(),
        rule("on_expiry = \"refund\""),
        rule("max_excess = -1"),
        rule("ttl = 60"),
    ] {
        assert!(!schema.is_valid(&as_json(&text)), "{text}");
    }
}

/// A valid concurrency rule, with additional fields.
fn concurrency_rule(fields: &str) -> String {
    format!("[[rule]]\nname = \"r\"\nalgorithm = \"concurrency\"\namount = 10\n{fields}\n")
}

#[test]
fn a_concurrency_rule_has_no_window_and_releases_expired_holds() {
    let config = load(
        "[defaults]\nwindow = \"1 month\"\nzone = \"Asia/Tokyo\"\nanchor = 3\nburst = 3\nstagger = true\nlease = 1\n\
         lease_for = \"1s\"\non_expiry = \"charge\"\nmax_excess = 7\nttl = \"5m\"\nhold = \"request_id\"\nper = [\"tenant\"]\noverdraft = true\n\
         [[rule]]\nname = \"in-flight\"\nalgorithm = \"concurrency\"\namount = 10\nttl = \"30s\"\n\
         [[rule.override]]\nwhen = { tenant = \"acme\" }\namount = 100\ncost = 2\n\
         [[rule]]\nname = \"tokens\"\nalgorithm = \"fixed-window\"\namount = 1000\nunit = \"tokens\"\non_expiry = \"release\"\n",
    );
    let rule = &config.rules[0];
    assert_eq!(rule.limit, sluicegate::Limit::concurrency(10).unwrap());
    assert_eq!((rule.ttl, rule.hold.as_deref()), (Some(Duration::from_secs(30)), Some("request_id")));
    assert_eq!((rule.lease, rule.lease_for, rule.stagger, rule.burst), (None, None, false, None));
    assert_eq!((rule.overdraft, config.rules[1].overdraft), (false, true));
    let view = serde_json::to_value(RuleView::from(rule)).unwrap();
    assert_eq!((&view["algorithm"], &view["ttl"]), (&"concurrency".into(), &"30s".into()));
    for absent in ["window", "zone", "anchor", "lease", "on_expiry", "max_excess"] {
        assert!(view.get(absent).is_none(), "{absent}: {view}");
    }
    let tokens = serde_json::to_value(RuleView::from(&config.rules[1])).unwrap();
    for (key, value) in
        [("on_expiry", "release"), ("hold", "request_id"), ("ttl", "5m"), ("window", "1 month")]
    {
        assert_eq!(tokens[key], value, "{tokens}");
    }
    assert_eq!((&tokens["max_excess"], tokens.get("lease")), (&7.into(), None));
    let rules = RuleSet::new(config.rules).unwrap();
    let labels = Labels::new([("tenant", "acme")]).unwrap();
    match &rules.matching(&labels, &Cost::ONE.into()).unwrap()[0].effect {
        Effect::Limit { limit, cost, .. } => assert_eq!((limit.amount(), cost.units()), (100, 2)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn fields_that_a_concurrency_rule_does_not_have_are_rejected() {
    let an_override = "[[rule.override]]\nwhen = { t = \"x\" }\n";
    for (fields, at, part) in [
        ("window = \"1m\"".to_owned(), (5, 10), "concurrency has no window: remove it"),
        ("window = \"1 month\"".to_owned(), (5, 10), "concurrency has no window: remove it"),
        ("zone = \"UTC\"".to_owned(), (5, 8), "concurrency has no zone: remove it"),
        ("anchor = 1".to_owned(), (5, 10), "concurrency has no anchor: remove it"),
        ("burst = 1".to_owned(), (5, 9), "concurrency has no burst: remove it"),
        ("stagger = true".to_owned(), (5, 11), "concurrency has no stagger: remove it"),
        ("overdraft = true".to_owned(), (5, 13), "concurrency has no overdraft: remove it"),
        ("lease = 1".to_owned(), (5, 9), "concurrency has no lease: remove it"),
        ("lease_for = \"1s\"".to_owned(), (5, 13), "concurrency has no lease: remove it"),
        ("max_excess = 1".to_owned(), (5, 14), "concurrency has no max_excess: remove it"),
        (
            "on_expiry = \"charge\"".to_owned(),
            (5, 13),
            "concurrency always releases expired holds: remove on_expiry",
        ),
        (format!("{an_override}amount = 0"), (7, 10), "amount 0 is out of range: concurrency accepts 1 to"),
        (format!("{an_override}window = \"1m\""), (7, 10), "concurrency has no window: remove it"),
        (format!("{an_override}window = \"1 day\""), (7, 10), "concurrency has no window: remove it"),
        (format!("{an_override}zone = \"UTC\""), (7, 8), "zone needs a calendar window"),
        (format!("{an_override}burst = 1"), (7, 9), "concurrency has no burst: remove it"),
        (format!("{an_override}lease = 1"), (7, 9), "concurrency has no lease: remove it"),
        (format!("{an_override}lease_for = \"1s\""), (7, 13), "concurrency has no lease: remove it"),
    ] {
        let error = rejected(&concurrency_rule(&fields));
        let [problem] = error.problems() else { panic!("{fields}: {error}") };
        assert_eq!(problem.line_and_column(), Some(at), "{fields}: {error}");
        assert!(problem.message().contains(part), "{fields}: {error}");
    }
    load(&concurrency_rule("on_expiry = \"release\"\nlease = 0\noverdraft = false"));
    let amount = rejected(&concurrency_rule("").replace("10", "0"));
    assert!(amount.to_string().contains(":4:10: rule \"r\": amount 0 is out of range"), "{amount}");
}

#[test]
fn a_fingerprint_contains_the_settings_of_holds() {
    let of = |text: String| config::fingerprint(&load(&text).rules);
    let mut fingerprints = vec![of(rule("")), of(concurrency_rule(""))];
    for field in ["ttl = \"1s\"", "on_expiry = \"release\"", "max_excess = 0", "hold = \"id\""] {
        fingerprints.push(of(rule(field)));
    }
    // by default it follows overrides of the amount
    fingerprints.push(of(rule("max_excess = 10")));
    fingerprints.sort();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), 7);
}

/// A fixed-window rule with a calendar window and additional fields.
fn calendar_rule(window: &str, fields: &str) -> String {
    format!(
        "[[rule]]\nname = \"r\"\nalgorithm = \"fixed-window\"\namount = 10\nwindow = \"{window}\"\n{fields}\n"
    )
}

#[test]
fn a_calendar_window_has_a_zone_and_an_anchor() {
    let shown = |text: &str| load(text).rules[0].limit.calendar().map(ToString::to_string);
    let table = [
        (calendar_rule("1 month", ""), "1 month in UTC"),
        (
            calendar_rule("1 month", "zone = \"Europe/Berlin\"\nanchor = 31"),
            "1 month in Europe/Berlin from day 31",
        ),
        (
            calendar_rule("1 week", "zone = \"america/new_york\"\nanchor = \"sunday\""),
            "1 week in America/New_York from sunday",
        ),
        (calendar_rule("1 quarter", "anchor = 1"), "1 quarter in UTC"),
        (calendar_rule("1 year", ""), "1 year in UTC"),
        (calendar_rule("1 day", "zone = \"Asia/Tokyo\""), "1 day in Asia/Tokyo"),
    ];
    for (text, calendar) in table {
        assert_eq!(shown(&text).as_deref(), Some(calendar), "{text}");
    }
    assert_eq!(shown(&calendar_rule("1d", "")), None, "24 hours, aligned to the epoch");
}

#[test]
fn default_calendar_settings_apply_only_where_they_fit() {
    let text = format!(
        "[defaults]\nzone = \"Asia/Tokyo\"\nanchor = 15\nstagger = true\n{}{}{}{}",
        calendar_rule("1 month", ""),
        calendar_rule("1 week", "").replace("\"r\"", "\"week\""),
        calendar_rule("1h", "").replace("\"r\"", "\"hour\""),
        calendar_rule("1h", "[[rule.override]]\nwhen = { a = \"b\" }\nwindow = \"1 day\"")
            .replace("\"r\"", "\"other\""),
    );
    let rules = load(&text).rules;
    let shown = |rule: usize| rules[rule].limit.calendar().map(ToString::to_string);
    assert_eq!(shown(0).as_deref(), Some("1 month in Asia/Tokyo from day 15"));
    assert_eq!(shown(1).as_deref(), Some("1 week in Asia/Tokyo"));
    assert_eq!(shown(2), None);
    assert_eq!(rules.iter().map(|rule| rule.stagger).collect::<Vec<_>>(), [false, false, true, true]);
    assert_eq!(rules[3].overrides[0].calendar.zone.map(|zone| zone.name()), Some("Asia/Tokyo"));
}

#[test]
fn invalid_calendar_windows_are_rejected_with_the_fix() {
    let table = [
        (
            calendar_rule("2 months", ""),
            (5, 10),
            "\"2 months\" is not a calendar window: use \"1 day\", \"1 week\"",
        ),
        (calendar_rule("1 month", "zone = \"Europe/Berln\""), (6, 8), "did you mean \"Europe/Berlin\"?"),
        (calendar_rule("1 month", "zone = \"nowhere\""), (6, 8), "use a name of the IANA time zone database"),
        (calendar_rule("1 month", "zone = 1"), (6, 8), "1 is not a time zone"),
        (calendar_rule("1 month", "anchor = 32"), (6, 10), "use a day of the month, 1 to 31"),
        (
            calendar_rule("1 month", "anchor = \"monday\""),
            (6, 10),
            "anchor \"monday\" does not fit \"1 month\"",
        ),
        (calendar_rule("1 week", "anchor = 2"), (6, 10), "anchor 2 does not fit \"1 week\": use a weekday"),
        (calendar_rule("1 week", "anchor = true"), (6, 10), "true is not an anchor"),
        (calendar_rule("1 month", "anchor = \"15\""), (6, 10), "write a day of the month without quotes"),
        (calendar_rule("1 day", "anchor = 1"), (6, 10), "\"1 day\" has no anchor: remove it"),
        (
            calendar_rule("1d", "zone = \"UTC\""),
            (6, 8),
            "zone needs a calendar window: use window = \"1 day\" (with a space)",
        ),
        (calendar_rule("1d", "anchor = 1"), (6, 10), "anchor needs a calendar window"),
        (calendar_rule("1 month", "stagger = true"), (6, 11), "a calendar window has no stagger"),
        (
            calendar_rule("1 month", "").replace("fixed-window", "sliding-log"),
            (5, 10),
            "sliding-log has no calendar windows: use fixed-window, or a window such as \"30d\"",
        ),
        (
            calendar_rule("1h", "[[rule.override]]\nwhen = { a = \"b\" }\nzone = \"UTC\""),
            (8, 8),
            "zone needs a calendar window",
        ),
        (
            calendar_rule("1 month", "[[rule.override]]\nwhen = { a = \"b\" }\nanchor = \"friday\""),
            (8, 10),
            "anchor \"friday\" does not fit \"1 month\"",
        ),
    ];
    for (text, at, part) in table {
        let error = rejected(&text);
        assert_eq!(error.problems()[0].line_and_column(), Some(at), "{text}\n{error}");
        assert!(error.to_string().contains(part), "{text}\n{error}");
        assert_eq!(error.problems().len(), 1, "{error}");
    }
}

#[test]
fn csv_files_can_set_the_calendar_window_of_each_tenant() {
    let setup = Setup::new(&calendar_rule("1 month", "per = [\"tenant\"]\noverrides_file = \"tenants.csv\""));
    setup.write("tenants.csv", "tenant,window,zone,anchor\nacme,,Asia/Tokyo,15\nb,1 week,,sunday\nc,1h,,\n");
    let rules = RuleSet::new(setup.load().unwrap().rules).unwrap();
    let window = |tenant: &str| {
        let labels = sluicegate::Labels::new([("tenant", tenant)]).unwrap();
        match &rules.matching(&labels, &sluicegate::Cost::ONE.into()).unwrap()[0].effect {
            sluicegate::rules::Effect::Limit { limit, .. } => limit.calendar().map(ToString::to_string),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(window("acme").as_deref(), Some("1 month in Asia/Tokyo from day 15"));
    assert_eq!(window("b").as_deref(), Some("1 week in UTC from sunday"));
    assert_eq!(window("c"), None);
    assert_eq!(window("other").as_deref(), Some("1 month in UTC"));
}

#[test]
fn a_rule_view_and_the_fingerprint_contain_zone_and_anchor() {
    let of = |fields: &str| load(&calendar_rule("1 month", fields)).rules;
    let rules = of("zone = \"Europe/Berlin\"\nanchor = 15");
    let view = serde_json::to_value(RuleView::from(&rules[0])).unwrap();
    assert_eq!(
        (&view["window"], &view["zone"], &view["anchor"]),
        (&"1 month".into(), &"Europe/Berlin".into(), &15.into())
    );
    let plain = serde_json::to_value(RuleView::from(&load(&rule("")).rules[0])).unwrap();
    assert!(plain.get("zone").is_none() && plain.get("anchor").is_none());
    let others = [
        of(""),
        of("anchor = 15"),
        of("zone = \"Europe/Berlin\""),
        of("[[rule.override]]\nwhen = { a = \"b\" }\nanchor = 2"),
        of("[[rule.override]]\nwhen = { a = \"b\" }\nzone = \"Asia/Tokyo\""),
        of("[[rule.override]]\nwhen = { a = \"b\" }\nwindow = \"1 week\""),
    ];
    let mut fingerprints: Vec<String> =
        others.iter().chain([&rules]).map(|rules| config::fingerprint(rules)).collect();
    fingerprints.sort();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), 7);
}
