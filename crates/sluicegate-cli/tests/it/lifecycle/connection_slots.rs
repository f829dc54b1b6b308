//! Clients without a token that occupy all connections: clients with a token are served nevertheless.

use std::{
    io::{Read, Write},
    net::TcpStream,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use redis::cmd;
use sluicegate_server::grpc::messages::{
    RateLimitDescriptor, RateLimitRequest, rate_limit_descriptor::Entry,
    rate_limit_service_client::RateLimitServiceClient,
};
use sluicegate_testkit::wait::PATIENCE;
use tonic::{
    Request,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    http_client::Client,
    server_process::{ANY_PORTS, ConfigDir, ServerProcess},
};

const MAX_CONNECTIONS: usize = 40;

/// How often each connection without a token sends a request: too often to count as idle.
const INTERVAL: Duration = Duration::from_millis(300);

/// How long a client with a token is idle before its second request: longer than the minimum idle time for an eviction.
const IDLE: Duration = Duration::from_secs(3);

const TOKEN: &str = "s3cret-of-app";

fn start() -> (ConfigDir, ServerProcess) {
    let home = ConfigDir::new(&format!(
        "{ANY_PORTS}max_connections = {MAX_CONNECTIONS}\n[[server.token]]\nname = \"app\"\nfile = \"app\"\n"
    ));
    home.write("app", TOKEN);
    let program = home.start();
    (home, program)
}

#[expect(clippy::disallowed_methods, reason = "the server runs in real time")]
fn pause(duration: Duration) {
    thread::sleep(duration);
}

/// Sends requests on every connection repeatedly. Reconnects when a connection is closed.
fn occupy(address: &str, request: &[u8], is_over: &AtomicBool) {
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let mut streams: Vec<_> = (0..MAX_CONNECTIONS).map(|_| connect()).collect();
    while !is_over.load(Ordering::Relaxed) {
        for stream in &mut streams {
            let is_closed =
                matches!(stream.read(&mut [0; 4 << 10]), Ok(0)) || stream.write_all(request).is_err();
            if is_closed {
                *stream = connect();
            }
        }
        pause(INTERVAL);
    }
}

/// Runs a test while all connections of a front end are occupied.
fn while_occupied(occupy: impl Fn(&AtomicBool) + Sync, test: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| occupy(&is_over));
        pause(2 * INTERVAL);
        let tested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test));
        is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = tested {
            std::panic::resume_unwind(panic);
        }
    });
}

/// A connection that is open before the others keeps its slot, and a new one gets a slot.
fn assert_served(
    program: &ServerProcess,
    connect: impl Fn(&ServerProcess) -> Box<dyn FnMut()>,
    occupy: impl Fn(&AtomicBool) + Sync,
) {
    let mut old = connect(program);
    old();
    while_occupied(occupy, || {
        connect(program)();
        pause(IDLE);
        old();
        connect(program)();
    });
}

fn by_http(program: &ServerProcess) -> Box<dyn FnMut()> {
    let mut client = Client::connect(&program.http).unwrap();
    Box::new(move || {
        let headers = [("authorization", format!("Bearer {TOKEN}"))];
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        let response = client.call("POST /v1/check", &headers, r#"{"labels":{}}"#).unwrap();
        assert_eq!(response.status, 200, "{}", response.body);
    })
}

#[test]
fn http_connections_without_a_token_do_not_exclude_clients_with_one() {
    let (_home, program) = start();
    let request = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n";
    assert_served(&program, by_http, |is_over| occupy(&program.http, request, is_over));
}

fn by_resp(program: &ServerProcess) -> Box<dyn FnMut()> {
    let client = redis::Client::open(format!("redis://:{TOKEN}@{}", program.resp)).unwrap();
    let mut connection = client.get_connection_with_timeout(PATIENCE).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    Box::new(move || {
        cmd("SG.CHECK").arg(&["1", "a", "b"]).query::<redis::Value>(&mut connection).unwrap();
    })
}

#[test]
fn redis_connections_without_a_token_do_not_exclude_clients_with_one() {
    let (_home, program) = start();
    assert_served(&program, by_resp, |is_over| occupy(&program.resp, b"PING\r\n", is_over));
}

fn endpoint(program: &ServerProcess) -> Endpoint {
    let address = format!("http://{}", program.grpc);
    Endpoint::from_shared(address).unwrap().connect_timeout(PATIENCE).timeout(PATIENCE)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn by_grpc(program: &ServerProcess) -> Box<dyn FnMut()> {
    let runtime = runtime();
    let channel = runtime.block_on(endpoint(program).connect()).unwrap();
    let mut client = RateLimitServiceClient::new(channel);
    Box::new(move || {
        let entry = Entry { key: "a".to_owned(), value: b"b".to_vec() };
        let descriptors =
            vec![RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() }];
        let message = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", format!("Bearer {TOKEN}").parse().unwrap());
        runtime.block_on(client.should_rate_limit(request)).unwrap();
    })
}

/// As [`occupy`], with health checks.
fn occupy_grpc(program: &ServerProcess, is_over: &AtomicBool) {
    let runtime = runtime();
    let _entered = runtime.enter();
    let channels: Vec<Channel> = (0..MAX_CONNECTIONS).map(|_| endpoint(program).connect_lazy()).collect();
    while !is_over.load(Ordering::Relaxed) {
        for channel in &channels {
            let mut client = HealthClient::new(channel.clone());
            runtime.spawn(async move {
                // fails if the connection was evicted
                let _ = client.check(HealthCheckRequest::default()).await;
            });
        }
        runtime.block_on(tokio::time::sleep(INTERVAL));
    }
}

#[test]
fn grpc_connections_without_a_token_do_not_exclude_clients_with_one() {
    let (_home, program) = start();
    assert_served(&program, by_grpc, |is_over| occupy_grpc(&program, is_over));
}
