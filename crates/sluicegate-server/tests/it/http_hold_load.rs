//! A thousand clients that hold over HTTP and end in every way.

#![expect(clippy::unwrap_used, reason = "a failing helper fails the test")]

use std::{collections::HashMap, net::SocketAddr, sync::Arc, time::Duration};

use serde_json::{Value, json};
use sluicegate::{Limit, Limiter, OnStoreFailure, Options, RedisStore, Rule};
use sluicegate_server::{
    engine::Engine,
    http::{self, HttpService},
    net::acceptor::AcceptConfig,
};
use sluicegate_testkit::{
    server::{Flavor, Server},
    wait,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep},
};

const SLOTS: u64 = 10;
const CLIENTS: usize = 1_000;
/// Clients at a time. More than the slots, so that some are denied.
const AT_A_TIME: usize = 200;
/// The time until a hold expires that its client does not end.
const SHORT_TTL: Duration = Duration::from_millis(100);
const LONG_TTL: Duration = Duration::from_secs(60);

/// How a client ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum End {
    Settle,
    Release,
    /// With labels and id instead of the token, twice.
    SettleById,
    RenewAndSettle,
    /// Without an end, as if the client had crashed.
    Crash,
    /// Before the answer to the hold.
    DisconnectFromHold,
    /// Before the answer to the settlement.
    DisconnectFromSettle,
}

const ENDS: [End; 7] = [
    End::Settle,
    End::Release,
    End::SettleById,
    End::RenewAndSettle,
    End::Crash,
    End::DisconnectFromHold,
    End::DisconnectFromSettle,
];

/// A time in which a request was certainly in flight.
type Live = (Instant, Instant);

struct Client {
    number: usize,
    stream: TcpStream,
}

impl Client {
    async fn connect(server: SocketAddr, number: usize) -> Self {
        Self { number, stream: TcpStream::connect(server).await.unwrap() }
    }

    async fn send(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        let length = body.len();
        let text = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n\r\n{body}");
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// Returns the body of a 200.
    async fn post(&mut self, path: &str, body: &Value) -> Value {
        self.send(path, body).await;
        let mut answer = Vec::new();
        loop {
            assert_ne!(self.stream.read_buf(&mut answer).await.unwrap(), 0, "the server has disconnected");
            let text = std::str::from_utf8(&answer).unwrap();
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.split_once("content-length: ").unwrap().1.split("\r\n").next().unwrap();
            if body.len() == length.parse::<usize>().unwrap() {
                assert!(head.starts_with("HTTP/1.1 200"), "{text}");
                return serde_json::from_str(body).unwrap();
            }
        }
    }

    /// Makes a hold and ends it. Returns when it was certainly live; `None` if the client does not know.
    async fn run(mut self, end: End) -> Option<Live> {
        let id = format!("client-{}", self.number);
        let is_short = matches!(end, End::Crash | End::DisconnectFromHold);
        let ttl = if is_short { SHORT_TTL } else { LONG_TTL };
        let mut hold = json!({"labels": {}, "ttl_ms": ttl.as_millis() as u64});
        if end == End::SettleById {
            hold["id"] = json!(id);
        }
        let (held, sent, received) = loop {
            let sent = now();
            if end == End::DisconnectFromHold {
                self.send("/v1/hold", &hold).await;
                return None;
            }
            let answer = self.post("/v1/hold", &hold).await;
            if answer["allowed"] == true {
                break (answer, sent, now());
            }
            assert_eq!((&answer["rule"], answer.get("token")), (&json!("in-flight"), None), "{answer}");
            sleep(Duration::from_millis(rand::random_range(1..30))).await;
        };
        sleep(Duration::from_millis(rand::random_range(0..5))).await;
        let token = json!({"token": held["token"], "cost": 1});
        if end == End::RenewAndSettle {
            let renew = json!({"token": held["token"], "ttl_ms": LONG_TTL.as_millis() as u64});
            assert_eq!(self.post("/v1/renew", &renew).await["outcome"], "renewed");
        }
        let ends = now();
        match end {
            End::Crash => return Some((received, sent + SHORT_TTL)),
            End::DisconnectFromHold => unreachable!("it does not know the answer"),
            End::DisconnectFromSettle => self.send("/v1/settle", &token).await,
            End::Settle | End::RenewAndSettle => {
                assert_eq!(self.post("/v1/settle", &token).await["outcome"], "settled");
            }
            End::Release => {
                let release = json!({"token": held["token"]});
                assert_eq!(self.post("/v1/release", &release).await["outcome"], "released");
            }
            End::SettleById => {
                let settle = json!({"labels": {}, "id": id, "cost": 1});
                assert_eq!(self.post("/v1/settle", &settle).await["outcome"], "settled");
                assert_eq!(self.post("/v1/settle", &settle).await["outcome"], "already");
            }
        }
        Some((received, ends))
    }
}

fn now() -> Instant {
    Instant::now()
}

/// Returns the most requests that were certainly in flight at one time.
fn most_live(requests: &[Live]) -> u64 {
    let live = |now: Instant| requests.iter().filter(|(from, until)| *from <= now && now < *until).count();
    requests.iter().map(|(from, _)| live(*from) as u64).max().unwrap_or(0)
}

async fn run(limiter: Limiter) {
    let engine = Engine::new(limiter.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = HttpService::new(engine, http::Settings::default());
    tokio::spawn(http::server::run(listener, service, AcceptConfig::default()));

    let permits = Arc::new(Semaphore::new(AT_A_TIME));
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let permit = Arc::clone(&permits).acquire_owned().await.unwrap();
        let end = ENDS[number % ENDS.len()];
        clients.spawn(async move {
            let _permit = permit;
            (end, Client::connect(address, number).await.run(end).await)
        });
    }
    let (mut live, mut counts) = (Vec::new(), HashMap::<End, usize>::new());
    while let Some(ended) = clients.join_next().await {
        let (end, request) = ended.unwrap();
        *counts.entry(end).or_default() += 1;
        live.extend(request);
    }
    assert!(ENDS.iter().all(|end| counts[end] >= CLIENTS / ENDS.len()), "{counts:?}");
    let most = most_live(&live);
    assert!((2..=SLOTS).contains(&most), "{most} requests were in flight");

    let mut client = Client::connect(address, CLIENTS).await;
    for _ in 0..2 {
        let all = json!({"labels": {}, "cost": SLOTS, "id": "all", "ttl_ms": 60_000});
        wait::until_async("all slots are free", wait::PATIENCE, async || {
            client.post("/v1/hold", &all).await["allowed"] == true
        })
        .await;
    }
    wait::until_async("every hold has one end", wait::PATIENCE, async || {
        let holds = limiter.stats().holds;
        // `all` is still held; a hold whose client disconnected may be released after it has expired; Redis deletes a counter whose
        // holds have all expired, and they are not counted
        let ended = holds.settled + holds.released + holds.expired + 1;
        (ended..=ended + holds.late + SLOTS).contains(&holds.held)
    })
    .await;
    let holds = limiter.stats().holds;
    assert_eq!((holds.unknown, holds.waiting), (0, 0), "{holds:?}");
}

fn rule() -> Rule {
    Rule::new("in-flight", Limit::concurrency(SLOTS).unwrap()).on_store_failure(OnStoreFailure::Closed)
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_ten_of_a_thousand_http_clients_are_in_flight_and_no_slot_is_lost() {
    run(Limiter::in_memory([rule()]).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_most_ten_of_a_thousand_http_clients_are_in_flight_and_no_slot_is_lost_on_redis() {
    let redis = Server::start(Flavor::Redis7);
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let options = Options::new().deadline(Duration::from_secs(10));
    run(Limiter::builder().store(store).rules([rule()]).options(options).build().unwrap()).await;
}
