//! The proxy applies its mode to the traffic of a real server, and changes nothing else.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use sluicegate_testkit::proxy::{
    AfterDrop, Direction, DropReplies, MAX_CONNECTIONS, Mode, Occurrence, Proxy, RequestFilter,
};
use sluicegate_testkit::server::{Flavor, Server};
use sluicegate_testkit::wait;

/// Long enough to observe that nothing arrives.
const SILENCE: Duration = Duration::from_millis(150);

fn server_and_proxy() -> (Server, Proxy) {
    let server = Server::start(Flavor::Redis7);
    let proxy = Proxy::start(server.addr());
    (server, proxy)
}

/// A client that sends bytes and expects bytes.
struct Client(TcpStream);

impl Client {
    fn connect(proxy: &Proxy) -> Client {
        let stream = TcpStream::connect(proxy.addr()).expect("the proxy accepts");
        let client = Client(stream);
        client.wait_for(wait::PATIENCE);
        client
    }

    fn wait_for(&self, bound: Duration) {
        self.0.set_read_timeout(Some(bound)).expect("a time that is not zero");
    }

    fn send(&mut self, bytes: &str) {
        self.0.write_all(bytes.as_bytes()).expect("a connection that takes requests");
    }

    fn expect(&mut self, bytes: &str) {
        let mut reply = vec![0; bytes.len()];
        self.0.read_exact(&mut reply).expect("a reply");
        assert_eq!(String::from_utf8_lossy(&reply), bytes);
    }

    fn ask(&mut self, request: &str, reply: &str) {
        self.send(request);
        self.expect(reply);
    }

    fn expect_silence(&mut self) {
        self.wait_for(SILENCE);
        let error = self.0.read(&mut [0; 1]).expect_err("neither bytes nor an end of stream");
        assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
        self.wait_for(wait::PATIENCE);
    }

    fn expect_end(&mut self) {
        assert_eq!(self.0.read(&mut [0; 1]).expect("an end, not a reset"), 0);
    }

    fn expect_reset(&mut self) {
        let error = self.0.read(&mut [0; 1]).expect_err("a reset, not an end");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}

fn value(server: &Server, key: &str) -> u64 {
    redis::cmd("GET").arg(key).query::<Option<u64>>(&mut server.connection()).expect("a number").unwrap_or(0)
}

/// A request that increments a key and sets its TTL.
const CHARGE: &str =
    "EVAL \"local n = redis.call('INCR', KEYS[1]) redis.call('EXPIRE', KEYS[1], 60) return n\" 1 used\r\n";

#[test]
fn everything_passes_and_is_counted() {
    let (_server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n*2\r\n$4\r\nECHO\r\n$3\r\na\r\n\r\n", "+PONG\r\n$3\r\na\r\n\r\n");
    let big = "x".repeat(3_000_000);
    client.send(&format!("*2\r\n$4\r\nECHO\r\n${}\r\n{big}\r\n", big.len()));
    client.expect(&format!("${}\r\n{big}\r\n", big.len()));

    let bytes_down = 7 + 9 + 10 + 3_000_000 + 2;
    wait::until("the counters are up to date", wait::PATIENCE, || proxy.counters().bytes_down >= bytes_down);
    let counters = proxy.counters();
    assert_eq!((counters.accepted, counters.open, counters.rejected), (1, 1, 0));
    assert_eq!((counters.requests, counters.replies, counters.dropped_replies), (3, 3, 0));
    assert_eq!(counters.bytes_down, bytes_down);
    assert_eq!(counters.bytes_up, 6 + 23 + 24 + 3_000_000 + 2);

    drop(client);
    wait::until("the connection is closed", wait::PATIENCE, || proxy.counters().open == 0);
}

#[test]
fn a_real_client_works_through_it() {
    let (_server, proxy) = server_and_proxy();
    let mut connection = redis::Client::open(proxy.url()).unwrap().get_connection().unwrap();
    let pong: String = redis::cmd("PING").query(&mut connection).unwrap();
    assert_eq!(pong, "PONG");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a delay is seen in real time")]
fn each_direction_is_delayed_separately_and_pipelined_delays_do_not_add_up() {
    let (_server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    let (requests, replies) = (Duration::from_millis(120), Duration::from_millis(80));
    proxy.set(Mode::Delay { requests, replies });

    let start = Instant::now();
    for _ in 0..10 {
        client.send("PING\r\n");
        std::thread::sleep(Duration::from_millis(10));
    }
    client.expect("+PONG\r\n");
    let first = start.elapsed();
    client.expect(&"+PONG\r\n".repeat(9));
    let last = start.elapsed();
    assert!(first >= requests + replies, "{first:?}");
    assert!(last < 4 * (requests + replies), "ten requests took {last:?}: their delays add up");

    proxy.set(Mode::Delay { requests: Duration::ZERO, replies: Duration::MAX });
    client.send("PING\r\n");
    client.expect_silence();
    assert_eq!(proxy.counters().requests, 11);
    proxy.pass();
    client.expect("+PONG\r\n");
}

#[test]
fn a_cut_resets_open_and_new_connections_until_it_ends() {
    let (_server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n", "+PONG\r\n");

    proxy.cut();
    assert_eq!(proxy.counters().open, 0);
    client.expect_reset();
    let mut client = Client::connect(&proxy);
    client.expect_reset();
    assert_eq!(proxy.counters().accepted, 2);

    proxy.pass();
    Client::connect(&proxy).ask("PING\r\n", "+PONG\r\n");
}

#[test]
fn refusing_connections_differs_from_resetting_them_and_keeps_the_port() {
    let (_server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n", "+PONG\r\n");
    for _ in 0..3 {
        proxy.set(Mode::Refuse);
        let error = TcpStream::connect(proxy.addr()).expect_err("a refused connection");
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        proxy.pass();
        Client::connect(&proxy).ask("PING\r\n", "+PONG\r\n");
    }
    client.expect_reset();
}

#[test]
fn a_single_reset_does_not_affect_new_connections() {
    let (_server, proxy) = server_and_proxy();
    let mut old = Client::connect(&proxy);
    old.ask("PING\r\n", "+PONG\r\n");
    proxy.reset_connections();
    let mut new = Client::connect(&proxy);
    new.ask("PING\r\n", "+PONG\r\n");
    old.expect_reset();
}

#[test]
fn a_stall_holds_back_all_bytes_and_delivers_them_when_it_ends() {
    let (server, proxy) = server_and_proxy();
    let mut old = Client::connect(&proxy);
    old.ask("PING\r\n", "+PONG\r\n");
    proxy.stall();
    let mut new = Client::connect(&proxy);
    let mut gone = Client::connect(&proxy);
    old.send(CHARGE);
    new.send(CHARGE);
    gone.send(CHARGE);
    gone.0.shutdown(Shutdown::Both).unwrap();
    old.expect_silence();
    new.expect_silence();
    assert_eq!(value(&server, "used"), 0, "a request was delivered");

    proxy.pass();
    let replies = [&mut old, &mut new].map(|client| {
        let mut reply = [0; 4];
        client.0.read_exact(&mut reply).unwrap();
        reply[1]
    });
    assert_ne!(replies[0], replies[1]);
    wait::until("the request of the disconnected client is executed too", wait::PATIENCE, || {
        value(&server, "used") == 3
    });
}

#[test]
fn one_direction_of_a_connection_can_be_closed() {
    let (server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n", "+PONG\r\n");
    proxy.half_close(Direction::Replies);
    client.expect_end();
    client.send(CHARGE);
    wait::until("the request is delivered", wait::PATIENCE, || value(&server, "used") == 1);

    // Redis closes a connection whose requests have ended, after it has answered earlier requests.
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n", "+PONG\r\n");
    proxy.half_close(Direction::Requests);
    client.expect_end();
    Client::connect(&proxy).ask("PING\r\n", "+PONG\r\n");
}

#[test]
fn every_third_reply_is_dropped_after_its_request_ran_and_no_other_reply_is_shifted() {
    let (server, proxy) = server_and_proxy();
    proxy.drop_every_nth_reply(3, RequestFilter::SCRIPTS);
    let mut client = Client::connect(&proxy);
    for call in 1..=9 {
        // Other requests are neither counted nor changed, also in the same chunk.
        client.send(&format!("PING\r\n{CHARGE}"));
        client.expect("+PONG\r\n");
        if call % 3 == 0 {
            client.expect_end();
            client = Client::connect(&proxy);
        } else {
            client.expect(&format!(":{call}\r\n"));
        }
        assert_eq!(value(&server, "used"), call);
    }
    assert_eq!(proxy.counters().dropped_replies, 3);
}

#[test]
fn a_pipeline_is_answered_exactly_up_to_the_dropped_reply() {
    let (server, proxy) = server_and_proxy();
    for step in [1, 7, 100_000] {
        redis::cmd("DEL").arg("used").exec(&mut server.connection()).unwrap();
        proxy.drop_every_nth_reply(4, RequestFilter::SCRIPTS);
        let mut client = Client::connect(&proxy);
        for piece in CHARGE.repeat(6).as_bytes().chunks(step) {
            // The connection may be closed before the last chunk.
            let _ = client.0.write_all(piece);
        }
        client.expect(":1\r\n:2\r\n:3\r\n");
        assert!(
            matches!(client.0.read(&mut [0; 1]), Ok(0) | Err(_)),
            "a later reply instead of the dropped one"
        );
        assert!(value(&server, "used") >= 4, "the fourth request was not delivered");
    }
}

#[test]
fn the_next_reply_is_dropped_as_a_whole_and_later_ones_pass() {
    let (server, proxy) = server_and_proxy();
    redis::cmd("SET")
        .arg("long")
        .arg("x".repeat(1_000_000))
        .arg("EX")
        .arg(60)
        .exec(&mut server.connection())
        .unwrap();
    proxy.drop_next_reply(RequestFilter::Any);
    let mut client = Client::connect(&proxy);
    client.send("GET long\r\n");
    client.expect_end();
    assert_eq!(proxy.counters().bytes_down, 0, "a part of the dropped reply was forwarded");
    Client::connect(&proxy).ask("PING\r\n", "+PONG\r\n");
    assert_eq!(proxy.counters().dropped_replies, 1);
}

#[test]
fn a_dropped_reply_can_stall_its_connection_permanently() {
    let (server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n", "+PONG\r\n");
    proxy.drop_next_reply_and_stall(RequestFilter::SCRIPTS);
    client.send(CHARGE);
    wait::until("the request is executed", wait::PATIENCE, || value(&server, "used") == 1);
    client.send(CHARGE);
    client.expect_silence();
    wait::until("later requests are executed too", wait::PATIENCE, || value(&server, "used") == 2);
    Client::connect(&proxy).ask(CHARGE, ":3\r\n");

    proxy.pass();
    client.expect_silence();
    proxy.cut();
    client.expect_reset();
}

#[test]
fn a_real_client_reports_a_dropped_reply_as_an_error_and_the_server_ran_it_once() {
    let (server, proxy) = server_and_proxy();
    let client = redis::Client::open(proxy.url()).unwrap();
    let mut connection = client.get_connection().unwrap();
    proxy.drop_next_reply(RequestFilter::Named(&["SET"]));
    let error = redis::cmd("SET").arg("key").arg(7).arg("EX").arg(60).exec(&mut connection).unwrap_err();
    assert!(error.is_io_error(), "{error}");
    assert_eq!(value(&server, "key"), 7);
    let mut connection = client.get_connection().unwrap();
    assert_eq!(redis::cmd("GET").arg("key").query::<u64>(&mut connection).unwrap(), 7);
}

#[test]
fn push_messages_are_not_counted_as_replies() {
    let (server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    // RESP3 delivers invalidations between replies.
    client.send("HELLO 3\r\n");
    client.send("CLIENT TRACKING on BCAST PREFIX pushed\r\n");
    client.send("ECHO ready\r\n");
    let mut seen = Vec::new();
    while !seen.ends_with(b"$5\r\nready\r\n") {
        let mut byte = [0; 1];
        client.0.read_exact(&mut byte).unwrap();
        seen.extend(byte);
    }
    // With a request in flight, a push message could be mistaken for its reply.
    proxy.drop_next_reply(RequestFilter::Named(&["BLPOP"]));
    client.send("BLPOP list 60\r\n");
    wait::until("the request waits", wait::PATIENCE, || server.info("blocked_clients") == "1");
    redis::cmd("SET").arg("pushed").arg(1).arg("EX").arg(60).exec(&mut server.connection()).unwrap();
    client.expect(">2\r\n$10\r\ninvalidate\r\n*1\r\n$6\r\npushed\r\n");
    assert_eq!(proxy.counters().dropped_replies, 0);
    redis::cmd("LPUSH").arg("list").arg(1).exec(&mut server.connection()).unwrap();
    client.expect_end();
    assert_eq!(proxy.counters().dropped_replies, 1);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a pause is seen in real time")]
fn a_trickle_passes_one_byte_at_a_time_until_the_mode_changes() {
    let (_server, proxy) = server_and_proxy();
    let mut client = Client::connect(&proxy);
    proxy.set(Mode::Trickle { pause: Duration::from_millis(10) });
    let start = Instant::now();
    client.ask("PING\r\n", "+PONG\r\n");
    let elapsed = start.elapsed();
    // Five pauses before the last byte of the request, six before that of the reply.
    assert!(elapsed >= Duration::from_millis(110), "{elapsed:?}");

    proxy.set(Mode::Trickle { pause: Duration::from_secs(3_600) });
    client.send("PING\r\n");
    wait::until("the first byte is forwarded", wait::PATIENCE, || proxy.counters().bytes_up == 7);
    proxy.pass();
    client.expect("+PONG\r\n");
}

#[test]
fn connections_are_bounded() {
    let (_server, proxy) = server_and_proxy();
    let mut clients = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        clients.push(Client::connect(&proxy));
    }
    wait::until("all are open", wait::PATIENCE, || proxy.counters().open == MAX_CONNECTIONS);
    Client::connect(&proxy).expect_reset();
    assert_eq!(proxy.counters().rejected, 1);

    drop(clients);
    wait::until("they are closed", wait::PATIENCE, || proxy.counters().open == 0);
    Client::connect(&proxy).ask("PING\r\n", "+PONG\r\n");
}

#[test]
fn an_unreachable_server_resets_the_client_and_a_dropped_proxy_closes_everything() {
    let (mut server, proxy) = server_and_proxy();
    let mut before = Client::connect(&proxy);
    before.ask("PING\r\n", "+PONG\r\n");
    server.kill();
    before.expect_end();
    Client::connect(&proxy).expect_reset();

    server.restart();
    let mut client = Client::connect(&proxy);
    client.ask("PING\r\n", "+PONG\r\n");
    let addr = proxy.addr();
    drop(proxy);
    assert!(matches!(client.0.read(&mut [0; 1]), Ok(0) | Err(_)));
    assert!(TcpStream::connect(addr).is_err(), "the proxy still listens");
}

#[test]
#[should_panic(expected = "every zeroth reply")]
fn dropping_every_zeroth_reply_panics() {
    let (_server, proxy) = server_and_proxy();
    proxy.set(Mode::DropReplies(DropReplies {
        requests: RequestFilter::Any,
        occurrence: Occurrence::Every(0),
        after: AfterDrop::Stall,
    }));
}
