//! Faults of a real server are in effect when their method returns, and have ended when the method that ends them returns.

use std::process::Command;
use std::time::{Duration, Instant};

use redis::{Connection, RedisResult};
use sluicegate_testkit::faults::PausedCommands;
use sluicegate_testkit::server::{Flavor, Server, Setup};
use sluicegate_testkit::tls::{Certificates, ClientCertificates};
use sluicegate_testkit::wait;

/// Connects over TCP with a short timeout.
fn client(server: &Server) -> Connection {
    let client = redis::Client::open(server.url()).expect("a good address");
    let connection = client.get_connection_with_timeout(Duration::from_secs(5)).expect("the server accepts");
    connection.set_read_timeout(Some(Duration::from_millis(200))).expect("a time that is not zero");
    connection
}

fn set(connection: &mut Connection, key: &str) -> RedisResult<()> {
    redis::cmd("SET").arg(key).arg(1).arg("EX").arg(60).exec(connection)
}

/// Returns the error code of a write.
fn error_code(server: &Server) -> String {
    let error = set(&mut client(server), "rejected").expect_err("the write should fail");
    error.code().unwrap_or_else(|| panic!("no error code: {error}")).to_string()
}

fn keys(server: &Server) -> u64 {
    redis::cmd("DBSIZE").query(&mut server.connection()).expect("a server that answers")
}

#[test]
fn a_suspended_server_accepts_connections_and_executes_requests_after_it_resumes() {
    let server = Server::start(Flavor::Redis7);
    let mut before = client(&server);
    server.suspend();
    server.suspend();
    assert!(set(&mut before, "before").unwrap_err().is_timeout());
    let stream = std::net::TcpStream::connect(server.addr()).unwrap();
    drop(stream);

    server.resume();
    wait::until("the late request is executed", wait::PATIENCE, || keys(&server) == 1);
}

#[test]
fn a_server_suspended_at_the_end_of_a_test_is_still_checked_for_keys_without_ttl() {
    let server = Server::start(Flavor::Redis7);
    redis::cmd("SET").arg("immortal").arg(1).exec(&mut server.connection()).unwrap();
    server.suspend();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(server)));
    let message = *outcome.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("\"immortal\""), "{message}");
}

#[test]
fn a_panic_ends_even_a_suspended_server() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let test = std::thread::spawn(move || {
        let server = Server::start(Flavor::Redis7);
        server.suspend();
        sender.send(server.pid()).unwrap();
        panic!("as a test does");
    });
    assert!(test.join().is_err());
    let pid = receiver.recv().unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} outlives its test");
}

#[test]
fn a_restart_restores_the_saved_data_or_starts_empty() {
    for flavor in Flavor::ALL {
        let mut server = Server::start(flavor);
        let port = server.port();
        set(&mut server.connection(), "saved").unwrap();
        server.save();
        set(&mut server.connection(), "lost").unwrap();
        let run_id = server.info("run_id");

        server.restart_with_data();
        assert_eq!(keys(&server), 1);
        assert_ne!(server.info("run_id"), run_id);
        assert_eq!(server.port(), port);

        server.restart();
        assert_eq!(keys(&server), 0, "{flavor} has data after a restart without data");
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a pause is seen in real time")]
fn paused_clients_wait_and_reads_only_if_all_commands_are_paused() {
    let server = Server::start(Flavor::Redis7);
    let mut paused = client(&server);
    server.pause_clients(Duration::from_secs(3_600), PausedCommands::Writes);
    redis::cmd("PING").exec(&mut paused).unwrap();
    assert!(set(&mut paused, "key").unwrap_err().is_timeout());
    server.unpause_clients();
    set(&mut client(&server), "key").unwrap();

    let start = Instant::now();
    server.pause_clients(Duration::from_millis(500), PausedCommands::All);
    assert!(redis::cmd("PING").exec(&mut client(&server)).unwrap_err().is_timeout());
    server.unpause_clients();
    assert!(start.elapsed() >= Duration::from_millis(500), "a pause of all commands ended early");
    redis::cmd("PING").exec(&mut client(&server)).unwrap();
}

#[test]
fn killed_clients_lose_their_connection() {
    let server = Server::start(Flavor::Redis7);
    let (mut plain, mut subscriber) = (client(&server), client(&server));
    redis::cmd("PING").exec(&mut plain).unwrap();
    redis::cmd("SUBSCRIBE").arg("channel").exec(&mut subscriber).unwrap();
    assert_eq!(server.kill_clients(), 2);
    let error = redis::cmd("PING").exec(&mut plain).unwrap_err();
    assert!(error.is_connection_dropped(), "{error}");
    redis::cmd("PING").exec(&mut client(&server)).unwrap();
}

#[test]
fn writes_fail_without_memory_replicas_or_disk_and_succeed_again() {
    let server = Server::start(Flavor::Redis7);
    server.config_set("maxmemory", 1);
    assert_eq!(server.config_get("maxmemory"), "1");
    assert_eq!(error_code(&server), "OOM");
    server.config_set("maxmemory", 0);

    server.config_set("min-replicas-to-write", 1);
    assert_eq!(error_code(&server), "NOREPLICAS");
    server.config_set("min-replicas-to-write", 0);

    server.break_saving();
    assert_eq!(error_code(&server), "MISCONF");
    server.restore_saving();
    set(&mut client(&server), "key").unwrap();
}

#[test]
fn a_busy_server_replies_busy_until_its_script_ends() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        server.make_busy();
        assert_eq!(error_code(&server), "BUSY", "{flavor}");
        server.end_busy();
        set(&mut client(&server), "key").unwrap();
    }
}

#[test]
fn a_loading_server_replies_loading_until_its_data_is_loaded() {
    for flavor in [Flavor::Redis7, Flavor::Valkey9] {
        let mut server = Server::start(flavor);
        set(&mut client(&server), "kept").unwrap();
        server.restart_into_loading();
        assert_eq!(error_code(&server), "LOADING", "{flavor}");
        server.finish_loading();
        let kept: bool = redis::cmd("EXISTS").arg("kept").query(&mut client(&server)).unwrap();
        assert!(kept);
    }
}

#[test]
fn flushed_scripts_are_not_found() {
    let server = Server::start(Flavor::Redis7);
    let mut connection = client(&server);
    let digest: String = redis::cmd("SCRIPT").arg("LOAD").arg("return 1").query(&mut connection).unwrap();
    server.flush_scripts();
    let error = redis::cmd("EVALSHA").arg(digest).arg(0).exec(&mut connection).unwrap_err();
    assert_eq!(error.code(), Some("NOSCRIPT"));
}

#[test]
fn a_password_is_required_of_clients_and_used_by_the_testkit() {
    for flavor in Flavor::ALL {
        let mut server = Setup::new(flavor).password("open sesame").start();
        assert_eq!(error_code(&server), "NOAUTH", "{flavor}");
        set(&mut server.connection(), "key").unwrap();
        server.restart();
        assert_eq!(keys(&server), 0);
    }
}

#[test]
fn a_user_has_the_permissions_of_its_acl_rules() {
    let server = Server::start(Flavor::Redis7);
    server.set_user("limited", &["on", ">secret", "~sg1:*", "+get", "+ping"]);
    let url = format!("redis://limited:secret@{}", server.addr());
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    redis::cmd("GET").arg("sg1:key").exec(&mut connection).unwrap();
    for (command, key) in [("GET", "other"), ("TTL", "sg1:key")] {
        let error = redis::cmd(command).arg(key).exec(&mut connection).unwrap_err();
        assert_eq!(error.code(), Some("NOPERM"), "{command} {key}");
    }
    server.set_user("default", &["off"]);
    let error = redis::Client::open(server.url()).unwrap().get_connection().map(|_| ());
    let error = error.and_then(|()| redis::cmd("PING").exec(&mut client(&server))).unwrap_err();
    assert_eq!(error.code(), Some("NOAUTH"));
    // The testkit cannot connect either.
    drop_without_check(server);
}

fn drop_without_check(mut server: Server) {
    server.kill();
}

#[test]
fn a_replica_follows_rejects_writes_and_can_be_promoted() {
    for flavor in Flavor::ALL {
        let (primary, replica) = (Server::start(flavor), Server::start(flavor));
        set(&mut client(&primary), "key").unwrap();
        replica.replicate(&primary);
        assert_eq!(keys(&replica), 1, "{flavor}");
        assert!(primary.is_primary() && !replica.is_primary());
        assert_eq!(error_code(&replica), "READONLY");
        replica.promote();
        assert!(replica.is_primary());
        set(&mut client(&replica), "key").unwrap();
    }
}

/// Pings over TLS with redis-cli.
fn ping_over_tls(server: &Server, trusted: &Certificates, as_client: Option<&Certificates>) -> String {
    let mut command = Command::new("redis-cli");
    command.args(["-h", "127.0.0.1", "-p", &server.port().to_string(), "--tls", "--cacert"]);
    command.arg(&trusted.authority);
    if let Some(files) = as_client {
        command.arg("--cert").arg(&files.client_certificate).arg("--key").arg(&files.client_key);
    }
    let output = command.arg("PING").output().expect("redis-cli is installed");
    [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
}

#[test]
fn a_tls_port_is_verified_by_its_authority_and_rejects_plain_text() {
    let server = Setup::new(Flavor::Redis7).tls(ClientCertificates::Ignored).start();
    assert!(server.url().starts_with("rediss://127.0.0.1:"));
    assert_eq!(ping_over_tls(&server, server.tls(), None), "PONG\n");
    set(&mut server.connection(), "key").unwrap();

    let dir = tempfile::tempdir().unwrap();
    let other = Certificates::issue(dir.path(), server.addr().ip());
    let answer = ping_over_tls(&server, &other, None);
    assert!(answer.contains("certificate verify failed"), "{answer}");

    let plain = redis::Client::open(format!("redis://{}", server.addr())).unwrap();
    let outcome = plain.get_connection_with_timeout(Duration::from_secs(5));
    assert!(outcome.and_then(|mut connection| redis::cmd("PING").exec(&mut connection)).is_err());
}

#[test]
fn a_client_certificate_can_be_required() {
    let server = Setup::new(Flavor::Redis7).tls(ClientCertificates::Required).start();
    assert_eq!(ping_over_tls(&server, server.tls(), Some(server.tls())), "PONG\n");
    let dir = tempfile::tempdir().unwrap();
    let other = Certificates::issue(dir.path(), server.addr().ip());
    for as_client in [None, Some(&other)] {
        let answer = ping_over_tls(&server, server.tls(), as_client);
        assert!(!answer.contains("PONG"), "{answer}");
    }

    let server = Setup::new(Flavor::Redis7).tls(ClientCertificates::Optional).start();
    assert_eq!(ping_over_tls(&server, server.tls(), None), "PONG\n");
    let answer = ping_over_tls(&server, server.tls(), Some(&other));
    assert!(!answer.contains("PONG"), "{answer}");
}
