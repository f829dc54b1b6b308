//! TLS, passwords and ACL users, forged tokens of holds, and that secrets are never printed.

use std::{fs, path::Path, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use sluicegate::{
    Cost, Labels, Limit, Limiter, MemoryStore, Options, RedisStore, Rule, StoreError,
    limiter::{HoldToken, Operation, SettleOutcome},
    redis::{RedisSettings, RedisSetupError},
    store::{Check, HoldId, Key, RemoteStore, Store, Terms, Tier},
};
use sluicegate_testkit::{
    server::{Flavor, Server, Setup},
    store_fixture::DecideAll,
    tls::ClientCertificates,
};

const PAGE: &str = include_str!("../../../../docs/redis.md");

fn hit(key: &str) -> [Check; 1] {
    let limit = Limit::sliding_log(10, Duration::from_secs(60)).unwrap();
    let tier = Tier { key: Key::without_rule(key).unwrap(), terms: Terms::new(limit, Cost::ONE) };
    [Check::new(Operation::Check, vec![tier]).unwrap()]
}

async fn available(store: &RedisStore) -> Result<i64, StoreError> {
    Ok(store.decide_all(&hit("k"), None).await?[0].answers[0].available)
}

fn pem(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap()
}

async fn connect_error(url: &str, settings: &RedisSettings) -> String {
    match RedisStore::connect_with(url, settings).await {
        Err(RedisSetupError::Connect(reason)) => reason,
        other => panic!("expected a connection error, found {other:?}"),
    }
}

#[tokio::test]
async fn only_the_configured_authority_is_trusted() {
    let server = Setup::new(Flavor::Redis7).tls(ClientCertificates::Ignored).start();
    let trusted = RedisSettings::default().authority(pem(&server.tls().authority));
    let store = RedisStore::connect_with(&server.url(), &trusted).await.unwrap();
    assert_eq!(available(&store).await.unwrap(), 9);

    let stranger = Setup::new(Flavor::Redis7).tls(ClientCertificates::Ignored).start();
    let wrong = RedisSettings::default().authority(pem(&stranger.tls().authority));
    assert!(connect_error(&server.url(), &wrong).await.contains("certificate"));
    assert!(connect_error(&server.url(), &RedisSettings::default()).await.contains("certificate"));

    // neither side falls back to plain text
    let plain = server.url().replace("rediss://", "redis://");
    assert!(RedisStore::connect(&plain).await.is_err());
    let without_tls = Server::start(Flavor::Redis7);
    let url = without_tls.url().replace("redis://", "rediss://");
    assert!(RedisStore::connect_with(&url, &trusted).await.is_err());
    let error = RedisStore::connect_later_with(&plain, &trusted).unwrap_err();
    assert!(matches!(error, RedisSetupError::Tls(_)), "{error}");
}

#[tokio::test]
async fn a_client_certificate_is_presented_when_required() {
    let server = Setup::new(Flavor::Redis7).tls(ClientCertificates::Required).start();
    let files = server.tls();
    let unknown = RedisSettings::default().authority(pem(&files.authority));
    connect_error(&server.url(), &unknown).await;
    let known = unknown.clone().client_certificate(pem(&files.client_certificate), pem(&files.client_key));
    let store = RedisStore::connect_with(&server.url(), &known).await.unwrap();
    assert_eq!(available(&store).await.unwrap(), 9);
    assert_eq!(server.kill_clients(), 1);
    while available(&store).await.is_err() {}

    let stranger = Setup::new(Flavor::Redis7).tls(ClientCertificates::Required).start();
    let files = stranger.tls();
    let foreign = unknown.client_certificate(pem(&files.client_certificate), pem(&files.client_key));
    connect_error(&server.url(), &foreign).await;

    let broken = RedisSettings::default().authority("no PEM");
    let error = RedisStore::connect_later_with(&server.url(), &broken).unwrap_err();
    assert!(error.to_string().contains("PEM"), "{error}");
}

#[tokio::test]
async fn user_password_database_and_name_reach_the_server() {
    let server = Server::start(Flavor::Redis7);
    server.set_user("limiter", &["on", ">p@ss:w/rd", "~*", "+@all"]);
    let place = server.addr();
    let in_url = format!("redis://limiter:p%40ss%3Aw%2Frd@{place}/3");
    let settings = RedisSettings::default().user("limiter").password("p@ss:w/rd").database(3);
    let beside_url = [
        (in_url, RedisSettings::default()),
        (format!("redis://{place}"), settings.clone()),
        (format!("redis://unknown:wrong@{place}/2"), settings),
    ];
    for (left, (url, settings)) in (0..10).rev().zip(beside_url) {
        let settings = settings.client_name("gateway-1");
        let store = RedisStore::connect_with(&url, &settings).await.unwrap();
        assert_eq!(available(&store).await.unwrap(), left);
        let clients: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
        let ours = clients.lines().find(|line| line.contains("name=gateway-1"));
        let ours = ours.unwrap_or_else(|| panic!("{clients}"));
        assert!(ours.contains(" db=3 ") && ours.contains(" user=limiter "), "{ours}");
    }
}

#[tokio::test]
async fn the_documented_acl_user_has_exactly_the_needed_permissions() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let line = PAGE.lines().find_map(|line| line.strip_prefix("user sluicegate ")).unwrap();
        let rules: Vec<&str> = line.split(' ').collect();
        server.set_user("sluicegate", &rules);
        let password = line.split_once('>').unwrap().1.split(' ').next().unwrap();
        let settings = RedisSettings::default().user("sluicegate").password(password);
        let store = RedisStore::connect_with(&server.url(), &settings).await.unwrap();
        for limit in
            sluicegate::Algorithm::WINDOWED.map(|name| Limit::new(name, 5, Duration::from_secs(60)).unwrap())
        {
            for operation in
                [Operation::Check, Operation::Peek, Operation::Charge, Operation::Refund { at: None }]
            {
                let key = Key::without_rule("k").unwrap();
                let tier = Tier { key, terms: Terms::new(limit, Cost::ONE) };
                let check = Check::new(operation, vec![tier]).unwrap();
                store.decide_all(&[check], None).await.unwrap_or_else(|error| panic!("{flavor}: {error}"));
            }
            let key = Key::without_rule("k").unwrap();
            assert_eq!(store.reset(&[(key, limit.algorithm())]).await.unwrap(), 1);
        }
        hold_and_end(store.clone(), &flavor).await;
        assert_eq!(store.announce(1, Duration::from_secs(5)).await.unwrap(), 1);
        assert_eq!(store.announce(2, Duration::from_secs(5)).await.unwrap(), 2);
        store.probe(0).await.unwrap();
        server.flush_scripts();
        assert_eq!(available(&store).await.unwrap(), 9);

        let url = format!("redis://sluicegate:{password}@{}", server.addr());
        let mut other = redis::Client::open(url).unwrap().get_connection().unwrap();
        for forbidden in ["FLUSHALL", "KEYS *", "CONFIG GET *", "SET other 1", "GET other", "ACL LIST"] {
            let mut words = forbidden.split(' ');
            let mut command = redis::cmd(words.next().unwrap());
            words.for_each(|word| {
                command.arg(word);
            });
            let error = command.exec(&mut other).unwrap_err();
            assert_eq!(error.code(), Some("NOPERM"), "{flavor}: {forbidden}");
        }
    }
}

/// Makes holds, ends them in every way, and lets some expire.
async fn hold_and_end(store: RedisStore, flavor: &Flavor) {
    let minute = Duration::from_secs(60);
    let rules = [
        Rule::new("in-flight", Limit::concurrency(50).unwrap()),
        Rule::new("bucket", Limit::token_bucket(50, minute).unwrap()),
        Rule::new("log", Limit::sliding_log(50, minute).unwrap()),
    ];
    let options = Options::new().deadline(Duration::from_secs(5));
    let limiter = Limiter::builder().store(store).rules(rules).options(options).build().unwrap();
    let labels = Labels::default();
    for ttl in [minute, minute, Duration::from_millis(1), Duration::from_millis(1)] {
        let id = HoldId::random();
        let held = limiter.hold(&labels, 3).id(id.clone()).ttl(ttl).decide().await.unwrap();
        let failure = &held.decision.failure;
        assert!(held.decision.is_allowed() && failure.is_none(), "{flavor}: {failure:?}");
        let token = held.token.unwrap();
        if ttl == minute {
            limiter.hold(&labels, 3).id(id).ttl(ttl).decide().await.unwrap();
            let renewed = limiter.renew(&token, ttl).await.unwrap();
            assert_eq!(renewed.outcome, SettleOutcome::Renewed, "{flavor}");
            assert_eq!(limiter.settle(&token, 1).await.unwrap().outcome, SettleOutcome::Settled, "{flavor}");
            assert_eq!(limiter.release(&token).await.unwrap().outcome, SettleOutcome::Already, "{flavor}");
        }
    }
    assert!(limiter.peek(&labels, 1).await.unwrap().failure.is_none(), "{flavor}");
    let counters = [(Key::without_rule("k").unwrap(), Limit::concurrency(5).unwrap())];
    limiter.inspect(&counters).await.unwrap();
}

#[tokio::test]
async fn a_user_without_eval_can_decide_and_probe_once_the_script_is_loaded() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let line = PAGE.lines().find_map(|line| line.strip_prefix("user sluicegate ")).unwrap();
        let rules: Vec<&str> = line.split(' ').filter(|rule| *rule != "+eval").collect();
        server.set_user("sluicegate", &rules);
        let settings = RedisSettings::default().user("sluicegate").password("change-me");
        let connect = async || RedisStore::connect_with(&server.url(), &settings).await;
        let error = connect().await.unwrap_err().to_string();
        assert!(error.contains("NOPERM"), "{flavor}: the script is not loaded: {error}");
        let administrator = RedisStore::connect(&server.url()).await.unwrap();
        assert_eq!(available(&administrator).await.unwrap(), 9);
        let store = connect().await.unwrap();
        store.probe(0).await.unwrap();
        assert_eq!(available(&store).await.unwrap(), 8);
        // instances are counted by another script
        let error = store.announce(1, Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(&error, StoreError::Rejected { code, .. } if code == "NOPERM"), "{flavor}: {error}");
        assert_eq!(available(&store).await.unwrap(), 7);
        assert_eq!(
            store.stats().connections,
            1,
            "{flavor}: a rejected command does not close the connection"
        );
    }
}

#[tokio::test]
async fn the_documented_acl_user_suffices_on_a_tls_cluster_of_one_node_without_an_announced_address() {
    let node = Setup::new(Flavor::Redis7)
        .tls(ClientCertificates::Ignored)
        .args(&["--cluster-enabled", "yes", "--tls-cluster", "yes"])
        .start();
    let line = PAGE.lines().find_map(|line| line.strip_prefix("user sluicegate ")).unwrap();
    let rules: Vec<&str> = line.split(' ').collect();
    node.set_user("sluicegate", &rules);
    let mut admin = node.connection();
    redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383).exec(&mut admin).unwrap();
    let url = node.url().replace("rediss://", "rediss-cluster://sluicegate:change-me@");
    let settings = RedisSettings::default().authority(pem(&node.tls().authority));
    let store = RedisStore::connect_with(&url, &settings).await.unwrap();
    // a new cluster rejects calls at first
    let mut left = available(&store).await;
    for _ in 0..500 {
        if left.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        left = available(&store).await;
    }
    assert_eq!(left, Ok(9));
}

#[tokio::test]
async fn passwords_and_keys_are_never_printed() {
    let server = Setup::new(Flavor::Redis7).password("right").start();
    let place = server.addr();
    let mut shown = Vec::new();
    for url in [
        format!("redis://me:s3cret@{place}"),
        format!("redis://:s3cret@{place}"),
        format!("rediss://:s3cret@{place}"),
        "redis://:s3cret@127.0.0.1:1".to_owned(),
        "redis-sentinel://:s3cret@127.0.0.1:1/main".to_owned(),
        "redis://:s3cret@host:port".to_owned(),
    ] {
        let settings = RedisSettings::default().sentinel_password("s3cret").client_name("me");
        shown.push(format!("{settings:?}"));
        let error = RedisStore::connect_with(&url, &settings).await.unwrap_err();
        shown.push(format!("{error} {error:?}"));
        if let Ok(store) = RedisStore::connect_later_with(&url, &settings) {
            let error = available(&store).await.unwrap_err();
            assert!(matches!(error, StoreError::NotRun(_)), "nothing was sent: {error}");
            shown.push(format!("{store:?} {error} {error:?}"));
        }
    }
    let identity = RedisSettings::default().password("s3cret").client_certificate("s3cret", "s3cret");
    shown.push(format!("{identity:?}"));
    let error = RedisStore::connect_later_with("rediss://h", &identity).unwrap_err();
    shown.push(format!("{error} {error:?}"));
    for text in shown {
        assert!(!text.contains("s3cret"), "{text}");
    }
    let alone = RedisStore::connect_later("redis://me@host").unwrap_err();
    assert_eq!(alone, RedisSetupError::Credentials);
}

/// A counter has another name in a token with the tag that it has anyway.
#[tokio::test]
async fn a_forged_token_that_names_a_counter_twice_settles_it_once() {
    let server = Server::start(Flavor::Redis7);
    let limit = Limit::fixed_window(100, Duration::from_secs(86_400)).unwrap();
    let redis = RedisStore::connect(&server.url()).await.unwrap();
    for store in [Store::from(MemoryStore::new()), Store::from(redis)] {
        let options = Options::new().deadline(Duration::from_secs(5));
        let limiter = Limiter::builder().store(store).options(options).build().unwrap();
        limiter.charge_key("k", &limit, Cost::from(40)).await.unwrap();
        let token = limiter.hold_key("k", &limit, Cost::from(10)).await.unwrap().into_token();
        let text = String::from_utf8(URL_SAFE_NO_PAD.decode(token.to_string()).unwrap()).unwrap();
        let tag = Key::without_rule("k").unwrap().tag();
        let forged = format!("{text}:fixed-window:requests:1:{tag:x}:!key:k");
        let forged: HoldToken = URL_SAFE_NO_PAD.encode(forged).parse().unwrap();
        limiter.release(&forged).await.unwrap();
        limiter.release(&token).await.unwrap();
        assert_eq!(limiter.peek_key("k", &limit, Cost::ONE).await.unwrap().remaining(), Some(60));
    }
}
