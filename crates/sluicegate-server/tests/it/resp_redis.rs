//! The Redis protocol in front of a real Redis, which may be slow or down.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::time::Duration;

use redis::{Value, aio::MultiplexedConnection};
use sluicegate::{Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule};
use sluicegate_server::{
    auth::Access,
    engine::Engine,
    net::acceptor::AcceptConfig,
    resp::{self, Endpoint},
};
use sluicegate_testkit::{
    proxy::Proxy,
    server::{Flavor, Server},
};
use tokio::net::TcpListener;

const HOUR: Duration = Duration::from_secs(3_600);

/// Long enough for a busy machine.
const DEADLINE: Duration = Duration::from_secs(5);

async fn client(
    url: &str,
    deadline: Duration,
    rules: impl IntoIterator<Item = Rule>,
) -> MultiplexedConnection {
    let store = RedisStore::connect(url).await.unwrap();
    let options = Options::default().deadline(deadline);
    let engine = Engine::new(Limiter::builder().store(store).rules(rules).options(options).build().unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(resp::server::run(
        listener,
        Endpoint::new(engine, Access::default()),
        AcceptConfig::default(),
    ));
    let client = redis::Client::open(format!("redis://{address}/")).unwrap();
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(Some(4 * DEADLINE));
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

/// Sends all commands at once.
async fn pipeline(connection: &mut MultiplexedConnection, lines: &[&str]) -> Vec<Value> {
    let mut pipeline = redis::pipe();
    for line in lines {
        let mut words = line.split(' ');
        pipeline.cmd(words.next().unwrap()).arg(words.collect::<Vec<_>>());
    }
    pipeline.ignore_errors();
    pipeline.query_async(connection).await.unwrap()
}

fn integer(value: &Value) -> i64 {
    match value {
        Value::Int(number) => *number,
        other => panic!("{other:?} is no integer"),
    }
}

/// Field `index` of each reply.
fn fields(replies: &[Value], index: usize) -> Vec<i64> {
    let field = |reply: &Value| match reply {
        Value::Array(fields) => integer(&fields[index]),
        other => panic!("{other:?} is no decision"),
    };
    replies.iter().map(field).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_on_one_key_is_decided_in_order() {
    let server = Server::start(Flavor::Redis7);
    let mut connection = client(&server.url(), DEADLINE, []).await;
    for round in 0..50 {
        let line = format!("CL.THROTTLE key:{round} 4 1 3600");
        let replies = pipeline(&mut connection, &[&*line; 10]).await;
        assert_eq!(fields(&replies, 0), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]);
        assert_eq!(fields(&replies, 2), [4, 3, 2, 1, 0, 0, 0, 0, 0, 0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_on_redis_has_the_same_replies_as_single_commands() {
    let server = Server::start(Flavor::Redis7);
    let limit = Limit::sliding_log(10, HOUR).unwrap();
    let mut connection = client(&server.url(), DEADLINE, [Rule::new("r", limit).per(["u"])]).await;
    for round in 0..20 {
        let (u, v) = (format!("u {round}"), format!("u other{round}"));
        let lines = [
            format!("SG.CHECK 3 {u}"),
            format!("SG.CHECK 9 {u}"), // denied
            format!("SG.CHECK 1 {v}"),
            format!("SG.CHECK 2 {u}"),
            "PING".to_owned(),
            format!("SG.CHECK x {u}"), // an error
            format!("SG.CHECK 1 {u}"),
            format!("SG.REFUND 4 {u}"),
            format!("SG.CHECK 1 {v}"),
            format!("SG.CHARGE 20 {u}"),
            format!("SG.PEEK {u}"),
            format!("SG.RESET {u}"),
            format!("SG.CHECK 10 {u}"),
            format!("SG.PEEK {v}"),
        ];
        let replies = pipeline(&mut connection, &lines.each_ref().map(String::as_str)).await;
        assert_eq!(replies.len(), lines.len());
        assert_eq!(replies[4], Value::SimpleString("PONG".into()));
        assert!(matches!(replies[5], Value::ServerError(_)), "{:?}", replies[5]);
        let Value::Array(reset) = &replies[11] else { panic!("{replies:?}") };
        assert_eq!(integer(&reset[0]), 1);
        let decisions: Vec<_> = replies
            .into_iter()
            .enumerate()
            .filter(|(place, _)| ![4, 5, 11].contains(place))
            .map(|(_, reply)| reply)
            .collect();
        assert_eq!(fields(&decisions, 0), [1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]);
        assert_eq!(fields(&decisions, 2), [7, 7, 9, 5, 4, 8, 8, 0, 0, 0, 8]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_about_many_keys_shares_round_trips() {
    let server = Server::start(Flavor::Redis7);
    let mut connection = client(&server.url(), DEADLINE, []).await;
    let calls = || {
        let info = redis::cmd("INFO").arg("commandstats").query::<String>(&mut server.connection());
        let stats = info.unwrap();
        let count = |name: &str| {
            let line = stats.lines().find_map(|line| line.strip_prefix(name));
            line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse::<u32>().unwrap())
        };
        count("cmdstat_evalsha:") + count("cmdstat_eval:")
    };
    pipeline(&mut connection, &["CL.THROTTLE warm 1 1 60"]).await;
    let before = calls();
    let lines: Vec<_> = (0..60).map(|key| format!("CL.THROTTLE key:{key} 1 1 3600")).collect();
    let replies = pipeline(&mut connection, &lines.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert_eq!(fields(&replies, 2), [1; 60]);
    let took = calls() - before;
    assert!(took <= 20, "{took} calls for 60 keys");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_redis_does_not_answer_is_made_later() {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let rule = Rule::new("in-flight", Limit::concurrency(1).unwrap()).per(["u"]);
    let mut connection = client(&proxy.url(), Duration::from_millis(100), [rule]).await;
    let lines = ["SG.HOLD a 0 1 u x", "SG.HOLD b 0 1 u x", "SG.CHECK 1 u x"];
    let replies = pipeline(&mut connection, &lines).await;
    assert_eq!(fields(&replies[..2], 0), [1, 0]);
    assert!(matches!(replies[2], Value::ServerError(_)), "{:?}", replies[2]);
    proxy.stall();
    let replies = pipeline(&mut connection, &["SG.RELEASE a u x", "SG.RENEW a 1000 u x"]).await;
    assert_eq!(replies[0], Value::BulkString(b"queued".into()));
    assert!(
        matches!(&replies[1], Value::ServerError(error) if error.code() == "UNAVAILABLE"),
        "{:?}",
        replies[1]
    );
    proxy.pass();
    let released = async {
        loop {
            let held = pipeline(&mut connection, &["SG.HOLD c 0 1 u x"]).await;
            // while the store is down, the failure policy allows
            if (fields(&held, 0), fields(&held, 6)) == (vec![1], vec![0]) {
                break;
            }
        }
    };
    tokio::time::timeout(4 * DEADLINE, released).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_store_failure_policies_decide_checks_and_a_charge_is_an_error() {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    let limit = Limit::sliding_log(10, HOUR).unwrap();
    let rule = |name: &str, policy| {
        let rule = Rule::new(name, limit).when("policy", name).per(["policy"]);
        rule.on_store_failure(policy)
    };
    let rules = [rule("open", OnStoreFailure::Open), rule("closed", OnStoreFailure::Closed)];
    let mut connection = client(&proxy.url(), Duration::from_millis(100), rules).await;
    let lines = ["SG.CHECK 1 policy open", "SG.CHECK 1 policy closed", "CL.THROTTLE k 4 1 60"];
    let replies = pipeline(&mut connection, &lines).await;
    assert_eq!(fields(&replies[..2], 6), [0, 0], "not degraded: {replies:?}");
    proxy.stall();
    let replies = pipeline(&mut connection, &lines).await;
    assert_eq!((fields(&replies[..2], 0), fields(&replies[..2], 6)), (vec![1, 0], vec![1, 1]));
    let [_, _, Value::Array(cell)] = &replies[..] else { panic!("{replies:?}") };
    assert_eq!(cell.iter().map(integer).collect::<Vec<_>>(), [0, 5, 5, -1, 0], "allowed, with unknown usage");
    let replies =
        pipeline(&mut connection, &["SG.CHARGE 1 policy open", "SG.RESET policy open", "PING"]).await;
    for reply in &replies[..2] {
        assert!(matches!(reply, Value::ServerError(error) if error.code() == "UNAVAILABLE"), "{reply:?}");
    }
    assert_eq!(replies[2], Value::SimpleString("PONG".into()));
}
