//! Configuration files, good and bad: what they mean, and what is said about those that mean nothing.

use std::{fs, time::Duration};

use tempfile::TempDir;
use tollgate::{Absent, Algorithm, OnStoreFailure, RuleSet};
use tollgate_server::{
    config::{
        self, Colour, Config, ConfigError, Environment, EnvoyClosed, Flags, Headers, Listen, Origin,
        RuleView, Scopes, Source,
    },
    store::StoreUrl,
};

/// A directory with a configuration.
struct Setup {
    directory: TempDir,
    source: Source,
}

impl Setup {
    fn new(text: &str) -> Self {
        let setup = Self::empty();
        setup.write("tollgate.toml", text);
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

fn refusal(text: &str) -> ConfigError {
    Setup::new(text).load().unwrap_err()
}

/// A rule of which each test writes the interesting part.
fn rule(fields: &str) -> String {
    format!("[[rule]]\nname = \"r\"\namount = 10\nwindow = \"1m\"\n{fields}\n")
}

#[test]
fn without_a_file_there_is_the_demo_on_loopback_and_in_memory() {
    let config = Setup::empty().load().unwrap();
    assert_eq!(config.origin, Origin::Demo);
    assert_eq!(config.rules, tollgate_server::demo::rules());
    assert_eq!(config.store.url, StoreUrl::Memory);
    let address = |text: &str| Listen::Address(text.parse().unwrap());
    let server = &config.server;
    assert_eq!((server.http, server.grpc), (address("127.0.0.1:8080"), address("127.0.0.1:8081")));
    assert_eq!(server.resp, address("127.0.0.1:6380"));
    assert!(server.tokens.is_empty() && server.tls.is_none() && !server.insecure);
    assert_eq!((server.headers, server.envoy_closed), (Headers::Draft11, EnvoyClosed::OverLimit));
    let store = &config.store;
    assert_eq!((store.deadline, store.refusal_cache), (Duration::from_millis(10), Duration::from_secs(1)));
    assert_eq!((store.max_memory, store.prefix.as_str()), (256 << 20, "tg"));
}

#[test]
fn an_empty_file_has_no_rules() {
    let config = load("");
    assert!(config.rules.is_empty() && matches!(config.origin, Origin::File(_)));
}

#[test]
fn mistakes_are_named_with_line_column_value_and_remedy() {
    let own_rule = |fields: &str| rule(fields);
    let mut wrong = Vec::new();
    for (text, at, parts) in [
        // TOML itself
        ("[server".to_owned(), (1, 8), vec!["this is not TOML"]),
        ("a = 1\na = 2".to_owned(), (2, 1), vec!["duplicate key"]),
        ("x = \"".to_owned(), (1, 6), vec!["this is not TOML"]),
        // Keys
        (
            "[sever]\nhttp = 1".to_owned(),
            (1, 2),
            vec!["the file: there is no key `sever`", "did you mean `server`?"],
        ),
        ("[server]\nhtpp = \"off\"".to_owned(), (2, 1), vec!["server: there is no key `htpp`", "`http`"]),
        ("[server]\nzzz = 1".to_owned(), (2, 1), vec!["no key `zzz`", "the keys here are http, grpc, resp"]),
        (own_rule("on_store_fail = \"open\""), (5, 1), vec!["rule: there is no key", "`on_store_failure`"]),
        (
            own_rule("[[rule.override]]\nwhen = {t=\"x\"}\namout = 1"),
            (7, 1),
            vec!["rule.override", "`amount`"],
        ),
        (
            "[labels]\nip = { knd = \"ip\" }".to_owned(),
            (2, 8),
            vec!["labels.ip: there is no key `knd`", "`kind`"],
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
        ("[server]\ninsecure = \"yes\"".to_owned(), (2, 12), vec!["\"yes\" is neither true nor false"]),
        (
            "[server]\nheaders = \"draft-7\"".to_owned(),
            (2, 11),
            vec!["\"draft-7\"", "did you mean \"draft-07\"?"],
        ),
        ("[server]\nheaders = \"zz\"".to_owned(), (2, 11), vec!["use draft-11, x-ratelimit, draft-07"]),
        ("[server]\nenvoy_closed = \"error\"".to_owned(), (2, 16), vec!["over-limit, unavailable"]),
        (
            "[server]\ntrusted_proxies = [\"10.0.0.0/8\", \"10.0.0.0/33\"]".to_owned(),
            (2, 34),
            vec!["\"10.0.0.0/33\" is not a network", "\"10.0.0.0/8\""],
        ),
        ("[store]\ndeadline = \"10\"".to_owned(), (2, 12), vec!["\"10\" is not a duration", "\"250ms\""]),
        ("[store]\ndeadline = 10".to_owned(), (2, 12), vec!["10 is not a duration"]),
        ("[store]\ndeadline = \"0s\"".to_owned(), (2, 12), vec!["out of range: use 1ms to 10s"]),
        ("[store]\nrefusal_cache = \"2m\"".to_owned(), (2, 17), vec!["use 0s to 60s"]),
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
        ("[labels]\nx = { kind = \"uuid\" }".to_owned(), (2, 14), vec!["labels.x.kind", "use text, ip"]),
        ("[labels]\nip = { ipv6_prefix = 129 }".to_owned(), (2, 22), vec!["129", "use 1 to 128"]),
        ("[labels]\nx = { ipv6_prefix = 64 }".to_owned(), (2, 21), vec!["kind = \"ip\""]),
        (
            "[labels]\nx = { header = \"x key\" }".to_owned(),
            (2, 16),
            vec!["\"x key\" is not the name of a header"],
        ),
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
            vec!["-1 is not a whole number"],
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
        (own_rule("stagger = true"), (5, 11), vec!["stagger does nothing for token-bucket"]),
        (own_rule("unit = \"a b\""), (5, 8), vec!["unit \"a b\" is not a name"]),
        (own_rule("cost = 9007199254740992"), (5, 8), vec!["9007199254740992", "9007199254740991"]),
        (own_rule("per = [\"ip\", \"ip\"]"), (5, 7), vec!["per: label \"ip\" is named twice"]),
        (own_rule("per = [\"ip\", 3]"), (5, 14), vec!["rule.per: 3 is not a text"]),
        (own_rule("per = [\"user\"]\ntag = [\"tenant\"]"), (6, 7), vec!["\"tenant\" is not in per"]),
        (own_rule("absent = \"ignore\""), (5, 10), vec!["\"ignore\" is unknown: use skip, shared, refuse"]),
        (own_rule("on_store_failure = \"close\""), (5, 20), vec!["did you mean \"closed\"?"]),
        (own_rule("when = { route = [] }"), (5, 18), vec!["label \"route\": an empty list"]),
        (own_rule("when = { route = 3 }"), (5, 18), vec!["rule.when.route: 3 is not a pattern"]),
        (own_rule("when = { route = [\"a\", 3] }"), (5, 24), vec!["3 is not a text"]),
        (own_rule("when = { \"\" = \"x\" }"), (5, 8), vec!["empty name"]),
        (own_rule("[[rule.override]]\namount = 5"), (5, 1), vec!["does not say for whom", "when = "]),
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
        ("[defaults]\nname = \"x\"".to_owned(), (2, 8), vec!["defaults are for all rules"]),
    ] {
        let error = refusal(&text);
        let (line, drawn) = (error.problems()[0].to_string(), error.render(Colour::Never));
        let place = format!("tollgate.toml:{}:{}", at.0, at.1);
        let is_placed = error.problems()[0].line_and_column() == Some(at);
        let is_shown = line.contains(&place) && drawn.contains(&place);
        let is_said = parts.iter().all(|part| line.contains(part)) && error.problems().len() == 1;
        if !(is_placed && is_shown && is_said) {
            wrong.push(format!("{text}\nexpected {at:?} {parts:?}, got {error}\n"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
