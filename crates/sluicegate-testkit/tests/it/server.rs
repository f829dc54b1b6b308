//! Servers of the testkit start with the requested version and end on drop.

use std::net::TcpStream;
use std::panic::{AssertUnwindSafe, catch_unwind};

use sluicegate_testkit::server::{Flavor, Server};

#[test]
fn each_flavor_starts_with_its_version_and_ends_on_drop() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let info: String = redis::cmd("INFO").arg("server").query(&mut server.connection()).unwrap();
        let version = match flavor {
            Flavor::Redis6 => "redis_version:6.2.",
            Flavor::Redis7 => "redis_version:7.",
            Flavor::Valkey9 => "valkey_version:9.1.",
        };
        assert!(info.contains(version), "{flavor}: no {version} in {info}");
        assert!(
            info.contains(&format!("process_id:{}\r\n", server.pid())),
            "{flavor}: another process answers"
        );
        assert!(
            info.contains(&format!("tcp_port:{}\r\n", server.port())),
            "{flavor}: another server answers"
        );

        let (port, socket) = (server.port(), server.socket());
        assert!(socket.exists());
        drop(server);
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "{flavor} still listens after drop");
        assert!(!socket.parent().unwrap().exists(), "{flavor} leaves its directory behind");
    }
}

#[test]
fn a_key_without_ttl_fails_the_test_that_drops_the_server() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let port = server.port();
        let mut connection = server.connection();
        redis::cmd("SET").arg("short-lived").arg(1).arg("PX").arg(60_000).exec(&mut connection).unwrap();
        redis::cmd("SET").arg("immortal").arg(1).exec(&mut connection).unwrap();

        let message = panic_message(|| drop(server));
        assert!(message.contains("\"immortal\" in database 0"), "{message}");
        assert!(!message.contains("short-lived"), "{message}");
        assert!(
            TcpStream::connect(("127.0.0.1", port)).is_err(),
            "{flavor} still runs after the failed check"
        );
    }
}

#[test]
fn keys_of_every_database_and_page_are_checked() {
    let server = Server::start(Flavor::Redis7);
    let mut connection = server.connection();
    redis::cmd("SELECT").arg(3).exec(&mut connection).unwrap();
    let mut fill = redis::pipe();
    for n in 0..5_000 {
        fill.cmd("SET").arg(n).arg(1).arg("EX").arg(60).ignore();
    }
    fill.exec(&mut connection).unwrap();
    server.assert_every_key_expires();

    redis::cmd("PERSIST").arg(4_321).exec(&mut connection).unwrap();
    let message = panic_message(|| server.assert_every_key_expires());
    assert!(message.contains("holds 1 keys without a TTL: \"4321\" in database 3"), "{message}");
    redis::cmd("FLUSHALL").exec(&mut connection).unwrap();
}

#[test]
fn a_server_that_does_not_answer_fails_the_test_too() {
    let server = Server::start_with(Flavor::Redis7, &["--requirepass", "secret"]);
    let message = panic_message(|| drop(server));
    assert!(message.contains("could not be checked"), "{message}");
}

#[test]
fn a_stopped_server_is_not_checked() {
    let mut server = Server::start(Flavor::Redis7);
    redis::cmd("SET").arg("immortal").arg(1).exec(&mut server.connection()).unwrap();
    server.kill();
    assert!(TcpStream::connect(("127.0.0.1", server.port())).is_err());
}

#[test]
fn a_restart_keeps_the_port_and_loses_the_data() {
    for flavor in Flavor::ALL {
        let mut server = Server::start(flavor);
        let (url, pid) = (server.url(), server.pid());
        redis::cmd("SET").arg("key").arg(1).arg("EX").arg(60).exec(&mut server.connection()).unwrap();

        server.restart();
        assert_eq!(server.url(), url);
        assert_ne!(server.pid(), pid);
        let left: u64 = redis::cmd("DBSIZE").query(&mut server.connection()).unwrap();
        assert_eq!(left, 0);

        server.kill();
        server.restart();
        let _ = server.connection();
    }
}

#[test]
fn extra_arguments_reach_the_server_and_invalid_ones_are_reported() {
    let server = Server::start_with(Flavor::Valkey9, &["--maxmemory", "3mb"]);
    let answer: Vec<String> =
        redis::cmd("CONFIG").arg("GET").arg("maxmemory").query(&mut server.connection()).unwrap();
    assert_eq!(answer, ["maxmemory", "3145728"]);

    let message = panic_message(|| drop(Server::start_with(Flavor::Redis7, &["--no-such-setting", "1"])));
    assert!(message.contains("no-such-setting"), "{message}");
}

/// Returns the message of the panic of `action`.
fn panic_message(action: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(action)).expect_err("should have panicked");
    *payload.downcast::<String>().expect("a formatted panic message")
}
